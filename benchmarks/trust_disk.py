"""What becomes of training runs that are killed, lose power, get I/O errors or damaged files, or share a folder.

    python benchmarks/trust_disk.py --name after [--out results/trust_disk.json] [--every 1]

A short run of a tiny model is recorded, and resumed from every state that a kill or a power cut may leave (see
tests/helpers/disk.py). To measure another version, put it first in PYTHONPATH, start in its folder, and give it
another --name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.cli import tokenizer
from helpers.crashes import (
    is_same_run,
    mutations,
    outcome_of_error,
    outcome_of_image,
    outcome_of_mutation,
    record_run,
    short_run,
)
from helpers.engine import converted, greedy, prompts_of
from helpers.training import (
    FINETUNE,
    STEP,
    Files,
    Program,
    crash_after,
    make_recipe,
    make_train_config,
    train_in,
    training_files,
)

import fastweights as fw
from fastweights.training import checkpoint
from fastweights.utils.provenance import provenance, write_result

PARTS = ("engine", "checkpoint", "folder", "interruptions", "mutations", "mutations, two checkpoints")
MUTATIONS, THREADS, SHARED_RUNS, TIMED = 500, 40, 10, 9


def count(outcomes: Iterable[str]) -> dict[str, int]:
    """How many there are of each; no name for those that did not happen but for the usual ones."""
    names = ("same", "refused", "lost", "different", "traceback")
    found = Counter("traceback" if outcome.startswith("traceback") else outcome for outcome in outcomes)
    return {name: found[name] for name in (*names, *sorted(found.keys() - set(names)))} | {"all": found.total()}


def interruptions(files: Files, every: int) -> dict[str, Any]:
    config, folder, expected = short_run(files), files.folder, files.folder / "expected"
    train_in(expected, config)
    disk = record_run(config, folder / "recorded")
    scratch = (folder / f"disk {number}" for number in range(10**6))
    result: dict[str, Any] = {"operations": disk.operations}
    for policy, images in disk.images.items():
        result[policy] = count(
            outcome_of_image(config, expected, next(scratch), image, reported) for reported, image in images[::every]
        )
        print(policy, result[policy], flush=True)
    numbers = range(1, disk.operations + 1, every)
    result["io errors"] = count(outcome_of_error(config, expected, next(scratch), n, n % 2 == 0) for n in numbers)
    return result


def damages(files: Files, every: int, steps: int) -> dict[str, Any]:
    """Resume a run that crashed after some steps, with a damaged file. It has checkpoints of steps 2 and 3."""
    folder = files.folder / f"damaged after {steps}"
    config, expected, crashed = short_run(files), folder / "not damaged", folder / "crashed"
    train_in(expected, config)
    crash_after(crashed, config, steps)
    scratch = (folder / f"damaged {number}" for number in range(10**6))
    damaged = mutations(crashed, MUTATIONS)[::every]
    return count(outcome_of_mutation(config, expected, crashed, next(scratch), *mutation) for mutation in damaged)


def shared_engine() -> dict[str, int]:
    """Two threads call one engine at once: how many of the calls return the tokens of their own prompt."""
    model = converted("gpt2")
    prompts = prompts_of(5, 9)
    expected, engine, found = [greedy(model, prompt, 20) for prompt in prompts], fw.Engine(model), Counter[str]()

    def call(i: int) -> None:
        barrier.wait()
        try:
            found["right" if engine.generate([prompts[i]], 20) == [expected[i]] else "wrong"] += 1
        except ValueError:
            found["refused"] += 1

    for _ in range(THREADS // 2):
        barrier = threading.Barrier(2)
        threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {name: found[name] for name in ("right", "wrong", "refused")} | {"all": THREADS}


def shared_folder(files: Files) -> dict[str, int]:
    """Two processes resume one run at the same time.

    Returns:
        How often the second is refused and the first unharmed, both end well, and one stops at a file of the other;
        and how often log or weights are not those of the run alone.
    """
    stage = dict(FINETUNE[0], tokens=60 * STEP)
    config, found = make_train_config(files, make_recipe((stage,), checkpoint_every=20)), Counter[str]()
    train_in(files.folder / "alone", config)
    for number in range(SHARED_RUNS):
        folder = files.folder / f"shared {number}"
        crash_after(folder, config, 2)
        programs = [Program(files.folder / f"output {number} {i}", "train", "--resume", folder) for i in range(2)]
        codes = [program.wait(600) for program in programs]
        refused = any("in use by process" in program.output for program in programs)
        found["one refused" if refused else "both ran" if codes == [0, 0] else "collided"] += 1
        found["wrong"] += not is_same_run(folder, files.folder / "alone")
    return {name: found[name] for name in ("one refused", "both ran", "collided", "wrong")} | {"all": SHARED_RUNS}


def checkpoint_seconds(folder: Path) -> dict[str, Any]:
    """Seconds to write a checkpoint of a model with Adam's state."""
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=16_384, bos_token_id=0, eos_token_id=0)
    )
    weights = checkpoint.model_weights(model)
    training = {f"{name}:{moment}": w.clone() for name, w in weights.items() for moment in ("exp_avg", "exp_avg_sq")}
    seconds, size = [], 0
    for step in range(1, TIMED + 1):
        started = time.perf_counter()
        progress = checkpoint.Progress(step=step)
        checkpoint.write_checkpoint(folder, model, weights, tokenizer(), training, progress)
        seconds.append(time.perf_counter() - started)
        size = sum(path.stat().st_size for path in (folder / "last").resolve().iterdir())
    return {"seconds": statistics.median(seconds), "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results" / "trust_disk.json")
    parser.add_argument("--every", type=int, default=1, help="Take every n-th state only.")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="Parts to measure; others stay.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, training_files(Path(name)) as files:
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "engine": lambda: {"engine": shared_engine()},
            "checkpoint": lambda: {"checkpoint": checkpoint_seconds(files.folder / "timed")},
            "folder": lambda: {"folder": shared_folder(files)},
            "interruptions": lambda: interruptions(files, options.every),
            "mutations": lambda: {"mutations": damages(files, options.every, 3)},
            "mutations, two checkpoints": lambda: {"mutations, two checkpoints": damages(files, options.every, 4)},
        }
        result = {name: value for part in options.only for name, value in measures[part]().items()}
    print(result)
    before = json.loads(options.out.read_text()) if options.out.is_file() else {}
    version = before.get(options.name, {}) | result
    version["commits"] = version.get("commits", {}) | dict.fromkeys(options.only, provenance()["commit"])
    write_result(options.out, before | provenance() | {options.name: version})


if __name__ == "__main__":
    main()
