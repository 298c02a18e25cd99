"""Chunked operations against the loop, and decoding at length 1k against 16k, on the CPU.

    python benchmarks/cpu.py [--out results/cpu.json] [--rules decay,gated]

Each operation is first checked against the float64 loop. One that fails the check is not timed. Times are medians of
runs that alternate in one process. Memory is the peak of allocated tensors beyond the inputs.
Two loops are shown: rules.loop, and the fastest loop we know. The second splits its inputs beforehand, so that autograd
needs no tensor of zeros for every slice; the memory shown is that of the second. `states` is the size of all states S_t
in float32, which a kernel that stores them needs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fastweights as fw
from fastweights.ops.chunked import chunked
from fastweights.rules import DELTA_RULES, MATRIX_RULES, RULES, loop
from fastweights.utils.provenance import write_result

B, T, H, D, M = 4, 1024, 12, 64, 32
TOLERANCE = 1e-5
WIDTHS = {"m": (M,), "d": (D,), "1": ()}
DECODE_LENGTHS = (1024, 16384)


def inputs(rule: str, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    q, k, v = torch.randn(B, T, H, M), torch.randn(B, T, H, M), torch.randn(B, T, H, D)
    if rule in DELTA_RULES:
        k = torch.nn.functional.normalize(k, dim=-1)
    gates = [torch.randn(B, T, H, *WIDTHS[width]) for width in RULES[rule].gates.values()]
    return [x.requires_grad_() for x in (q, k, v, *gates)]


def split_loop(rule: Any, q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    state, outputs = v.new_zeros(B, H, D, M), []
    for step in zip(*(x.unbind(1) for x in (q, k, v, *gates)), strict=True):
        y, state = rule.step(state, *step)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


WAYS: dict[str, Callable] = {"chunked": chunked, "loop": loop, "split loop": split_loop}


def forward_backward(way: str, rule: str, tensors: list[Tensor], upstream: Tensor) -> None:
    y, _ = WAYS[way](RULES[rule], *tensors[:3], tuple(tensors[3:]))
    torch.autograd.grad(y, tensors, upstream)


def error(rule: str) -> float:
    """Largest relative error of output, state and gradients of the float32 chunked form against the float64 loop."""
    short = 130
    found = _results(chunked, rule, [x[:, :short] for x in inputs(rule)])
    truth = _results(loop, rule, [x[:, :short].double() for x in inputs(rule)])
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in zip(found, truth, strict=True))


def _results(way: Callable, rule: str, tensors: list[Tensor]) -> list[Tensor]:
    tensors = [x.detach().requires_grad_() for x in tensors]
    y, state = way(RULES[rule], *tensors[:3], tuple(tensors[3:]))
    return [y, state, *torch.autograd.grad(y.sin().sum() + state.sin().sum(), tensors)]


def times(rule: str, repeats: int) -> dict[str, float]:
    tensors, upstream = inputs(rule), torch.randn(B, T, H, D)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS:
        forward_backward(way, rule, tensors, upstream)
    for _ in range(repeats):
        for way in WAYS:
            started = time.perf_counter()
            forward_backward(way, rule, tensors, upstream)
            seconds[way].append(time.perf_counter() - started)
    return {way: statistics.median(values) for way, values in seconds.items()}


def peak_bytes(way: str, rule: str) -> int:
    """The most memory that tensors held at once, beyond the inputs, by the allocator's own record."""
    tensors, upstream = inputs(rule), torch.randn(B, T, H, D)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        forward_backward(way, rule, tensors, upstream)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held)


def decoding(tokens: int) -> dict[str, Any]:
    """Median seconds of one greedy token after prompts of both lengths, alternating."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6, vocab_size=4096
    )
    model = fw.convert(LlamaForCausalLM(config).eval(), fw.FastWeightsConfig(rule="decay", m=M))
    token, caches, seconds = torch.zeros(1, 1, dtype=torch.long), {}, {length: [] for length in DECODE_LENGTHS}
    with torch.no_grad():
        for length in DECODE_LENGTHS:
            cache = None
            for chunk in torch.randint(4096, (1, length)).split(1024, dim=1):
                cache = model(chunk, past_key_values=cache, use_cache=True).past_key_values
            caches[length] = cache
        for _ in range(tokens):
            for length, cache in caches.items():
                started = time.perf_counter()
                model(token, past_key_values=cache)
                seconds[length].append(time.perf_counter() - started)
    return {
        "seconds a token": {length: statistics.median(values) for length, values in seconds.items()},
        "state bytes": {length: cache.nbytes for length, cache in caches.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/cpu.json")
    parser.add_argument("--rules", default=",".join(MATRIX_RULES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=200)
    options = parser.parse_args()
    result = {
        "what": "forward + backward in float32, and decoding of one token, on the CPU",
        "shape": {"B": B, "T": T, "H": H, "d": D, "m": M},
        "seed": 0,
        "tokens": B * T,
        "operations": {rule: operation(rule, options.repeats) for rule in options.rules.split(",")},
        "decoding": decoding(options.decode_tokens),
    }
    result["targets reached"] = targets(result)
    write_result(options.out, result)
    show(json.loads(json.dumps(result)))


def operation(rule: str, repeats: int) -> dict[str, Any]:
    wrong = error(rule)
    measured: dict[str, Any] = {"relative error": wrong, "states": 4 * B * T * H * D * M}
    if wrong > TOLERANCE:
        return measured
    return measured | {
        "seconds": times(rule, repeats),
        "peak bytes": {way: peak_bytes(way, rule) for way in ("chunked", "split loop")},
    }


def targets(result: dict[str, Any]) -> dict[str, bool]:
    """The targets of these operations."""
    short, long = result["decoding"]["seconds a token"].values()
    reached = {"decoding at 16k at most 1.1 times 1k": long / short <= 1.1}
    for rule, row in result["operations"].items():
        if "seconds" in row:
            seconds, held = row["seconds"], row["peak bytes"]
            reached[f"{rule} at least 15 times faster than rules.loop"] = seconds["loop"] / seconds["chunked"] >= 15
            reached[f"{rule} at least 8 times below the loop's memory"] = held["split loop"] / held["chunked"] >= 8
    return reached


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"forward + backward, {result['shape']}", title_justify="left")
    for header in (
        "rule",
        "error",
        "chunked",
        "loop",
        "split loop",
        "x loop",
        "x split",
        "memory",
        "split loop's",
        "states",
    ):
        table.add_column(header, justify="right")
    for rule, row in result["operations"].items():
        if "seconds" not in row:
            table.add_row(rule, f"{row['relative error']:.1e}", "WRONG: no time")
            continue
        chunk, plain, split = (row["seconds"][way] for way in WAYS)
        here, loops = (row["peak bytes"][way] for way in ("chunked", "split loop"))
        table.add_row(
            rule,
            f"{row['relative error']:.1e}",
            *(f"{1e3 * seconds:.0f} ms" for seconds in (chunk, plain, split)),
            f"{plain / chunk:.1f}",
            f"{split / chunk:.1f}",
            *(f"{size / 1e6:.0f} MB" for size in (here, loops, row["states"])),
        )
    missed = [target for target, reached in result["targets reached"].items() if not reached]
    seconds, sizes = result["decoding"]["seconds a token"].values(), result["decoding"]["state bytes"].values()
    short, long = seconds
    Console(width=120).print(
        table,
        f"decoding after {DECODE_LENGTHS[0]} and {DECODE_LENGTHS[1]} tokens: {1e3 * short:.2f} and {1e3 * long:.2f} ms "
        f"a token, ratio {long / short:.3f}; state {' and '.join(map(str, sizes))} bytes",
        f"targets missed: {', '.join(missed) or 'none'}",
    )


if __name__ == "__main__":
    main()
