"""How the memory of windows is best spent: a pretrained model whose attention is limited to windows, without training.

Each layout is a window for all layers and, in some, a wider one in the layers that look up most. Measured
are the perplexity of a text, how often the second occurrence of a passage of the text is predicted token by token, and
the recall probe.

python benchmarks/wide_windows.py MODEL --text FILE [--tokens 24576] [--out results/wide_windows.json]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastweights as fw
from fastweights.config import FastWeightsConfig
from fastweights.data.readers import read_text
from fastweights.evaluation.perplexity import perplexity
from fastweights.evaluation.recall import ordinary_tokens, recall_probe
from fastweights.loading import load, load_tokenizer
from fastweights.modeling.description import describe
from fastweights.modeling.modes import evaluating
from fastweights.tokenization import bos_token
from fastweights.utils.provenance import write_result

SINKS = 4
# window, wide window
LAYOUTS = [(60, 0), (124, 0), (60, 508), (124, 508), (252, 0), (508, 0)]
DISTANCES = (128, 256, 512)
# Passages of so many tokens, and other text between the two occurrences. The first tokens are not counted.
PASSAGE, BETWEEN, SKIPPED, PASSAGES = 150, 140, 8, 24
BATCH = 8


def repeated(model: Any, rows: Tensor) -> float:
    """The share of a passage's tokens that are the likeliest at its second occurrence."""
    found = []
    with evaluating(model):
        for batch in rows.split(BATCH):
            logits = model(batch, use_cache=False, logits_to_keep=PASSAGE - SKIPPED).logits[:, :-1]
            found.append((logits.argmax(-1) == batch[:, SKIPPED + 1 - PASSAGE :]).double())
    return float(torch.cat(found).mean())


def passages(ids: Tensor, first: int | None) -> Tensor:
    """Rows of a passage, other text, and the passage again, from different places of a text."""
    length = PASSAGE + BETWEEN
    starts = torch.linspace(0, len(ids) - length, PASSAGES).long().tolist()
    rows = torch.stack([torch.cat([ids[s : s + length], ids[s : s + PASSAGE]]) for s in starts])
    return rows if first is None else torch.nn.functional.pad(rows, (1, 0), value=first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="a text file, plain or .xz")
    parser.add_argument("--tokens", type=int, default=24_576, help="how much of the text is read")
    parser.add_argument("--samples", type=int, default=32, help="sequences of the recall probe for each distance")
    parser.add_argument("--out", default="results/wide_windows.json")
    options = parser.parse_args()
    started, tokenizer = time.perf_counter(), load_tokenizer(options.model)
    ids = tokenizer(read_text(options.text), add_special_tokens=False).input_ids[: options.tokens]
    text, first = tokenizer.decode(ids), bos_token(tokenizer)
    rows, layouts = passages(torch.tensor(ids), first), []
    for window, wide in [(0, 0), *LAYOUTS]:
        model = load(options.model, dtype=torch.float32)
        if window:
            model = fw.convert(model, FastWeightsConfig(rule="local", window=window, sinks=SINKS, wide_window=wide))
        probe = recall_probe(
            model,
            distances=DISTANCES,
            samples=options.samples,
            vocabulary=ordinary_tokens(model, tokenizer),
            bos=first,
            progress=False,
        )
        row = {
            "window": window,
            "wide window": wide,
            "wide layers": model.config.fastweights["wide_layers"] if window else None,
            "state bytes": describe(model).state_bytes,
            "perplexity": perplexity(model, tokenizer, text, length=1024, batch_size=4, progress=False).token,
            "repeated": repeated(model, rows),
            "copy": {str(each.distance): each.accuracy for each in probe.copy},
            "pairs": {str(each.distance): each.accuracy for each in probe.pairs},
        }
        print(row, flush=True)
        layouts.append(row)
    result = {
        "what": "a pretrained model with attention limited to windows, without training; window 0 is the model itself",
        "model": Path(options.model).name,
        "text": Path(options.text).name,
        "sinks": SINKS,
        "seed": 0,
        "tokens": len(ids),
        "layouts": layouts,
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
