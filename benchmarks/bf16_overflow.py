"""Does a freshly converted model overflow in bfloat16? Every configuration of the paper's Table 1, m 4 and 32, on one
text of 1024 tokens: the largest logit and whether all are finite.

    python benchmarks/bf16_overflow.py MODEL --text TEXT_FILE [--out results/bf16_overflow.json]
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch

import fastweights as fw
from fastweights.loading import load, load_tokenizer
from fastweights.utils.provenance import write_result

LENGTH = 1024
# Rule, and its columns of Table 1: baseline, without normalisation, without map and normalisation.
TABLE = {
    "add": [("relu", "attention"), ("relu", "none"), ("none", "none")],
    "delta": [("relu", "attention+sum"), ("relu", "sum"), ("none", "none")],
    "gated": [("relu", "attention"), ("relu", "none"), ("none", "none")],
    "decay": [("relu", "none"), ("none", "none")],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", default="results/bf16_overflow.json")
    options = parser.parse_args()
    base = load(options.model, dtype=torch.float32).eval()
    text = Path(options.text).read_text(encoding="utf-8")[: 12 * LENGTH]
    ids = torch.tensor([load_tokenizer(options.model)(text, verbose=False)["input_ids"][:LENGTH]])
    runs: dict[str, Any] = {}
    for rule, columns in TABLE.items():
        for feature_map, normalize in columns:
            for m in (4, 32):
                name = f"{rule}, map {feature_map}, normalise {normalize}, m {m}"
                settings = fw.FastWeightsConfig(rule=rule, m=m, feature_map=feature_map, normalize=normalize)
                runs[name] = measure(fw.convert(copy.deepcopy(base), settings), ids)
                print(f"{name:50} {runs[name]}", flush=True)
    what = "largest logit of a freshly converted model in bfloat16"
    model = Path(options.model).name
    write_result(options.out, {"what": what, "model": model, "seed": 0, "tokens": LENGTH, "runs": runs})


@torch.no_grad()
def measure(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    logits = model.to(torch.bfloat16)(ids, use_cache=False).logits
    return {"finite": bool(torch.isfinite(logits).all()), "largest logit": float(logits.abs().max())}


if __name__ == "__main__":
    main()
