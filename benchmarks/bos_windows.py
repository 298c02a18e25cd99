"""Perplexity of a model that expects bos before every sequence, in windows with it and without it.

Without it, bos is before the first window only, as in lm-eval and in versions of fastweights before this measurement.

python benchmarks/bos_windows.py MODEL --text FILE [--bytes 10000] [--lengths 128,256,1024]
                                 [--out results/bos_windows.json]
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from perplexity_three_ways import beginning

from fastweights.evaluation.perplexity import perplexity
from fastweights.loading import load, load_tokenizer
from fastweights.tokenization import bos_token, set_special_tokens
from fastweights.utils.provenance import write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="a text file, plain or .xz")
    parser.add_argument("--bytes", type=int, default=10_000, help="how much of its beginning is read")
    parser.add_argument("--lengths", default="128,256,1024")
    parser.add_argument("--out", default="results/bos_windows.json")
    options = parser.parse_args()
    started = time.perf_counter()
    with_bos = load_tokenizer(options.model)
    if bos_token(with_bos) is None:
        parser.error(f"{options.model} expects no bos token: there is nothing to compare")
    without = copy.deepcopy(with_bos)
    set_special_tokens(without, bos=False, eos=False)
    model = load(options.model, dtype=torch.float32).eval()
    text, rows = beginning(options.text, options.bytes), []
    for length in map(int, options.lengths.split(",")):
        found = {
            name: perplexity(model, tokenizer, text, length=length, batch_size=1)
            for name, tokenizer in (("with_bos", with_bos), ("without_bos", without))
        }
        row = {"length": length} | {name: x.token for name, x in found.items()}
        print(row, flush=True)
        rows.append(row)
    result = {
        "what": "perplexity by token of an unconverted model, with bos before every window or the first one only",
        "model": Path(options.model).name,
        "text": {"file": Path(options.text).name, "bytes": len(text.encode()), "words": len(text.split())},
        "seed": 0,
        "tokens": found["with_bos"].tokens,
        "windows": rows,
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
