"""Perplexity of one model on one text, three ways: ours, lm-eval's and a plain loop that shares no code with either.

python benchmarks/perplexity_three_ways.py MODEL --text FILE [--bytes 100000] [--length 1024]
                                           [--out results/perplexity_three_ways.json]
"""

from __future__ import annotations

import argparse
import lzma
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from fastweights.evaluation.lm_eval import rolling_perplexity
from fastweights.evaluation.perplexity import perplexity
from fastweights.loading import load, load_tokenizer
from fastweights.utils.provenance import write_result

BATCH = 4
AGREE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="a text file, plain or .xz")
    parser.add_argument("--bytes", type=int, default=100_000, help="how much of its beginning is read")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", default="results/perplexity_three_ways.json")
    options = parser.parse_args()
    model = load(options.model, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(options.model)
    text = beginning(options.text, options.bytes)

    def fastweights() -> tuple[float, int]:
        found = perplexity(model, tokenizer, text, length=options.length, batch_size=BATCH)
        return found.nll, found.tokens

    ways = {
        "fastweights": measure(fastweights),
        "lm-eval": measure(lambda: rolling_perplexity(model, tokenizer, text, options.length, batch_size=BATCH)),
        "plain loop": measure(lambda: plain_loop(model, tokenizer, text, options.length)),
    }
    reference = ways["plain loop"]["perplexity"]
    differences = {name: abs(way["perplexity"] / reference - 1) for name, way in ways.items()}
    for name, way in ways.items():
        shown = f"{way['perplexity']:.6f}  {way['tokens']:,} tokens  off by {differences[name]:.1e}"
        print(f"{name:12} perplexity {shown}  {way['seconds']:.0f} s")
    result = {
        "what": "perplexity by token of an unconverted model, three ways; differences are relative, to the plain loop",
        "model": Path(options.model).name,
        "text": {"file": Path(options.text).name, "bytes": len(text.encode()), "words": len(text.split())},
        "length": options.length,
        "seed": 0,
        "tokens": ways["plain loop"]["tokens"],
        "ways": ways,
        "relative_difference": differences,
        "agree": max(differences.values()) <= AGREE,
    }
    write_result(options.out, result)


def beginning(file: str, size: int) -> str:
    """The first `size` bytes of a text, without an incomplete character at the end."""
    reader: Any = lzma.open if file.endswith(".xz") else open
    with reader(file, "rb") as stream:
        return stream.read(size).decode("utf-8", errors="ignore")


def measure(way: Callable[[], tuple[float, int]]) -> dict[str, Any]:
    started = time.perf_counter()
    nll, tokens = way()
    seconds = round(time.perf_counter() - started, 1)
    return {"perplexity": math.exp(nll / tokens), "nll": nll, "tokens": tokens, "seconds": seconds}


@torch.no_grad()
def plain_loop(model: Any, tokenizer: Any, text: str, length: int) -> tuple[float, int]:
    """Window after window; the last, shorter one is filled up with the tokens before it. A tokenizer that adds bos to a
    text tells that every window has to start with it."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    row, nll = torch.tensor([first, *ids]), 0.0
    for start in range(0, len(ids), length):
        end = min(start + length, len(ids))
        seen = row[max(0, end - length) : end].clone()
        if tokenizer.encode("a")[0] == first:
            seen[0] = first
        logits = model(seen[None]).logits[0, start - end :]
        nll += functional.cross_entropy(logits, row[start + 1 : end + 1], reduction="sum").item()
    return nll, len(ids)


if __name__ == "__main__":
    main()
