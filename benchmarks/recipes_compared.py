"""Transfer, then distillation, against plain fine-tuning at equal tokens, on the packaged model: validation curves of
both recipes for several seeds, as JSON and as one plot.

    python benchmarks/recipes_compared.py [--tokens 200000] [--seeds 0,1,2] [--processes 2]
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fastweights.config import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.loading import load, load_tokenizer, save
from fastweights.quickstart import PACKAGED, RECOVERY_TEXT, VALIDATION_TEXT, WINDOW
from fastweights.report import compare_curves
from fastweights.results import TrainingResult
from fastweights.training.recipe import Recipe, Stage, load_recipe
from fastweights.training.trainer import TrainConfig, train
from fastweights.utils.progress import Display
from fastweights.utils.provenance import write_result

SETTINGS = FastWeightsConfig(rule="decay", m=32, gate_init="log", window=32, train_length=WINDOW, positions="clamp")
TRANSFER_SHARE = 0.2


def recipes(tokens: int) -> dict[str, tuple[Stage, ...]]:
    common: dict[str, Any] = dict(learning_rate=1e-3, body_learning_rate=3e-4, final=0.0)
    first = int(tokens * TRANSFER_SHARE)
    return {
        "transfer + distill": (
            Stage("transfer", tokens=first, learning_rate=1e-3, fit="full"),
            Stage("distill", tokens=tokens - first, cross_entropy=0.3, **common),
        ),
        "fine-tuning": (Stage("finetune", tokens=tokens, **common),),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, on one thread each")
    parser.add_argument("--out", type=Path, default=Path("results/recipes_compared.json"))
    parser.add_argument("--plot", type=Path, default=Path("recipes_compared.svg"))
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    names = list(recipes(options.tokens))
    jobs = [(name, seed, options.tokens) for seed in seeds for name in names]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        results = list(pool.map(run, jobs))
    by_name = {name: [r for (n, _, _), r in zip(jobs, results, strict=True) if n == name] for name in names}
    assert results[0].base is not None
    base = results[0].base.perplexity
    fields = ("seed", "tokens", "recipe", "validation", "best", "last", "seconds", "diverged")
    write_result(
        options.out,
        {
            "what": "validation perplexity of the packaged model, converted to decay m 32, under two recipes",
            "seed": seeds,
            "tokens": options.tokens,
            "base": base,
            "runs": {name: [{key: r.to_dict()[key] for key in fields} for r in runs] for name, runs in by_name.items()},
        },
    )
    compare_curves(by_name, options.plot, base=base)
    for name, runs in by_name.items():
        print(name, [round(r.last.perplexity / base, 3) for r in runs if r.last])


def run(job: tuple[str, int, int]) -> TrainingResult:
    name, seed, tokens = job
    torch.set_num_threads(1)
    recipe: Recipe = dataclasses.replace(
        load_recipe("quickstart"), stages=recipes(tokens)[name], seed=seed, validate_every=10, validation_tokens=8192
    )
    with tempfile.TemporaryDirectory() as folder:
        converted = convert(load(PACKAGED, dtype=torch.float32), dataclasses.replace(SETTINGS, seed=seed))
        save(converted, Path(folder) / "converted", load_tokenizer(PACKAGED))
        task = TrainConfig(
            model=str(Path(folder) / "converted"),
            data=str(RECOVERY_TEXT),
            recipe=recipe,
            teacher=str(PACKAGED),
            validation=str(VALIDATION_TEXT),
        )
        return train(task, Path(folder) / "run", display=Display(enabled=False))


if __name__ == "__main__":
    main()
