"""One more token of the packaged model on the CPU: the decode engine after conversion, and attention with its cache.

    python benchmarks/decode_cpu.py [--out results/decode_cpu.json] [--tokens 126]

Attention is the pretrained model's own forward with transformers' DynamicCache and the likeliest token of its logits;
the engine chooses the token, too. Both alternate in one process, token by token. Half of the timed tokens are before
the given length, half after it. First the engine is checked against the converted model's forward.
The packaged position table ends at 512: it is repeated for attention, and the converted model clamps its positions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

import fastweights as fw
from fastweights.decode.prefill import prefill
from fastweights.modeling.modes import evaluating
from fastweights.profiling.model_cost import stretched
from fastweights.quickstart import PACKAGED, SETTINGS
from fastweights.utils.provenance import write_result

LENGTHS = (64, 512, 1024)
TOLERANCE = 1e-5


def attention(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """A function that runs one more token after a prompt."""
    cache = DynamicCache(config=model.config)
    token = model(ids[None], past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)

    def step() -> None:
        nonlocal token
        token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)

    return step


def check(model: Any, ids: torch.Tensor) -> float:
    """Relative error of the engine's logits after a sequence whose last token is run as a step."""
    engine = fw.Engine(model)
    engine.decoder.set_slot(0, prefill(model, ids[:-1])[1])
    engine.decoder.tokens.copy_(ids[-1:])
    expected = model(ids[None]).logits[:, -1]
    return float((engine.decoder.step() - expected).norm() / expected.norm())


def seconds(steps: dict[str, Callable[[], None]], tokens: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(tokens):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in taken.items()}


def measure(tokens: int) -> dict[str, Any]:
    longest = max(LENGTHS) + tokens
    base = stretched(fw.load(PACKAGED, dtype=torch.float32).eval(), longest)
    converted = stretched(fw.convert(fw.load(PACKAGED, dtype=torch.float32).eval(), SETTINGS), longest)
    engine, points = fw.Engine(converted), []
    text = torch.randint(base.config.vocab_size, (longest,), generator=torch.Generator().manual_seed(0))
    with evaluating(base, converted):
        error = check(converted, text[:100])
        for length in LENGTHS if error <= TOLERANCE else ():
            before = text[: length - tokens // 2]
            engine.generate([before], 1, stop_tokens=())
            points.append(
                {"length": length} | seconds({"attention": attention(base, before), "engine": engine.step}, tokens)
            )
    return {"relative error": error, "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/decode_cpu.json")
    parser.add_argument("--tokens", type=int, default=126, help="tokens timed at each length, at most 126")
    options = parser.parse_args()
    tokens = min(options.tokens, 2 * min(LENGTHS) - 2)
    measured = measure(tokens)
    ahead = [point["engine"] / point["attention"] for point in measured["points"]]
    result = {
        "what": "median seconds of one more token around this length, packaged model, float32, batch 1, on the CPU",
        "baseline": "transformers' GPT-2 with DynamicCache, and argmax",
        "settings": SETTINGS.to_dict(),
        "seed": 0,
        "tokens": tokens,
        **measured,
        "targets reached": {
            "at 64 at least as fast as attention": bool(ahead) and ahead[0] <= 1,
            "from 512 on faster": bool(ahead) and max(ahead[1:]) < 1,
        },
    }
    write_result(options.out, result)
    table = Table("length", "attention", "engine", "engine / attention")
    for point, ratio in zip(measured["points"], ahead, strict=True):
        times = (f"{1e3 * point[name]:.2f} ms" for name in ("attention", "engine"))
        table.add_row(str(point["length"]), *times, f"{ratio:.2f}")
    Console().print(table, f"relative error {measured['relative error']:.1e}", result["targets reached"])


if __name__ == "__main__":
    main()
