"""Perplexity right after conversion, before any training, for several settings.

python benchmarks/after_swap.py MODEL --text TEXT_FILE [--out results/after_swap.json]
"""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import torch

import fastweights as fw
from fastweights.loading import load, load_tokenizer
from fastweights.utils.provenance import write_result

LENGTH, ROWS = 512, 4
LOG = dict(rule="decay", m=32, gate_init="log", train_length=LENGTH)
VARIANTS: dict[str, dict[str, Any]] = {
    "decay m 32, uniform gates": dict(rule="decay", m=32),
    "decay m 32, log gates": LOG,
    "decay m 32, log gates, rotary dropped": LOG | dict(rotary="drop"),
    "decay m 32, log gates, window 32": LOG | dict(window=32),
    "decay m 32, uniform gates, window 32": dict(rule="decay", m=32, window=32),
    "local, window 32": dict(rule="local", window=32),
    "gated m 32": dict(rule="gated", m=32),
    "delta m 32": dict(rule="delta", m=32),
    "add m 32": dict(rule="add", m=32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", default="results/after_swap.json")
    options = parser.parse_args()
    base = load(options.model, dtype=torch.float32).eval()
    text = Path(options.text).read_text(encoding="utf-8")[: 8 * LENGTH * ROWS]
    ids = torch.tensor(load_tokenizer(options.model)(text, verbose=False)["input_ids"][: LENGTH * ROWS])
    rows = ids.view(ROWS, LENGTH)
    found = {"base": perplexity(base, rows)}
    for name, settings in VARIANTS.items():
        found[name] = perplexity(fw.convert(copy.deepcopy(base), fw.FastWeightsConfig(**settings)), rows)
        print(f"{name:45} {found[name]:.4g}", flush=True)
    what = "perplexity by token on rows of 512 tokens of Wikipedia, right after conversion"
    model = Path(options.model).name
    write_result(options.out, {"what": what, "model": model, "seed": 0, "tokens": rows.numel(), "perplexity": found})


@torch.no_grad()
def perplexity(model: Any, rows: torch.Tensor) -> float:
    losses = [model(row[None], labels=row[None], use_cache=False).loss.item() for row in rows]
    return math.exp(sum(losses) / len(losses))


if __name__ == "__main__":
    main()
