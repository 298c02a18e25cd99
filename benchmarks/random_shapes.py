"""Random shapes, gates, flags and dtypes: every output and gradient of an operation against float64.

    python benchmarks/random_shapes.py [--cases 10000] [--seconds 300] [--processes 16] [--out OUT]
    python benchmarks/random_shapes.py --case SEED       one case alone, with its errors
    python benchmarks/random_shapes.py --device cpu --backend chunked --cases 200 --processes 1     a test of the script

The truth is the chunked form in float64, which tests hold to 1e-10 of the loop, and in one case of 50 the loop itself,
unless its states would need too much memory. It gets the same inputs as the operation and runs on the CPU: many
processes that launch the small kernels of a loop would mostly wait for each other on one GPU.
Errors are ||found - truth|| / ||truth||, with these floors:
- a tensor whose elements are smaller than SMALLEST (a state after a hundred closed gates);
- some gradients are differences of terms that may be much larger, and are compared with at least CANCELLED of these:
  a gate's is q dq - k dk or y dy - v dv (docs/derivations.md), and zero where the gate is past the floor; that of
  a query whose output is normalized is zero along the query (so all of it where m is 1: compared with the whole term),
  and, as that of a key, zero where only one token is remembered; the state of the delta rules is erased along the
  first keys, all of it where m is 1, and what is left of its gradient is compared with the upstream one of a state.
Kernels are compiled for padded widths, flags and dtypes, so these come in a fixed number of kinds; sizes vary freely.
Shapes: see fastweights/ops/__init__.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import queue
import random
import time
from collections import Counter
from typing import Any

import torch
from measure import NOT_FINITE, first_line
from torch import Tensor

from fastweights import ops
from fastweights.rules import DELTA_RULES, MATRIX_RULES, RULES
from fastweights.utils.provenance import write_result

# bfloat16 rounds by up to 4e-3: a tensor of few elements is not held to the 5e-3 of large ones.
LIMITS = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 1e-2}
# float16 has less than its full precision below 2^-14.
SMALLEST = {"float32": 1e-6, "float16": 2**-14, "bfloat16": 1e-6}
CANCELLED = 0.3
# Padded m and d. Every rule and dtype gets each of them, so that no combination of rule, dtype and padded m is missing.
BLOCKS = [(16, 16), (16, 64), (16, 256), (32, 32), (32, 256), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128)]
KINDS = len(MATRIX_RULES) * len(LIMITS) * len(BLOCKS)
FLAGS = [(), ("state",), ("state", "mask"), ("reset",), ("state", "mask", "reset")]
LOOP_EVERY, LOOP_ELEMENTS = 50, 2**27
# Fewer independent elements than these can cancel to nearly nothing by chance.
LEAST_TOKENS, LEAST_STATES = 12, 32
GRACE_SECONDS = 30

Case = dict[str, Any]
Tensors = dict[str, Tensor]


def draw_case(seed: int) -> Case:
    """Everything random in a case except its values. Which kernels are compiled depends on the kind alone."""
    number = seed % KINDS
    kind = random.Random(number)
    pairs = list(itertools.product(MATRIX_RULES, LIMITS))
    rule, dtype = pairs[number % len(pairs)]
    flags, heads = FLAGS[(number + number // len(pairs)) % len(FLAGS)], kind.randint(1, 4)
    normalize = RULES[rule].has_normalizer and kind.random() < 0.3
    groups = 2 if kind.random() < 0.25 else 1
    widest_m, widest_d = BLOCKS[number // len(pairs)]
    sizes = random.Random(f"sizes {seed}")
    longest = sizes.choices((20, 130, 300, 2000), (30, 45, 22, 3))[0]
    case: Case = {
        "seed": seed,
        "rule": rule,
        "dtype": dtype,
        "flags": flags,
        "normalize": normalize,
        "groups": groups,
        "T": sizes.randint(1, longest),
        "m": sizes.randint(1 if widest_m == 16 else widest_m // 2 + 1, widest_m),
        # the normalizer is one more row of the state
        "d": sizes.randint(1 if widest_d == 16 else widest_d // 2 + 1, widest_d) - normalize or 1,
        "B": sizes.randint(1, 3),
        "H": heads,
        "bias": sizes.uniform(-12, 12),
    }
    few_states = case["B"] * case["H"] * case["m"] * case["d"] < LEAST_STATES
    if few_states or case["B"] * case["H"] * case["T"] < LEAST_TOKENS:
        case |= {"B": 3, "H": 4}
    return case


def draw_tensors(case: Case) -> tuple[Tensors, Tensors, Tensors]:
    """Arguments, flags and what comes back from above, on the CPU, so that a seed means the same everywhere."""
    B, T, H, m, d, normalize = (case[name] for name in ("B", "T", "H", "m", "d", "normalize"))
    generator, dtype = torch.Generator().manual_seed(case["seed"]), getattr(torch, case["dtype"])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs = {"q": draw(B, T, case["groups"] * H, m), "k": draw(B, T, H, m), "v": draw(B, T, H, d)}
    if normalize:
        inputs |= {name: inputs[name].abs() + 0.1 for name in ("q", "k")}
    if case["rule"] in DELTA_RULES:
        inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
    widths: dict[str, tuple[int, ...]] = {"m": (m,), "d": (d,), "1": ()}
    for gate, width in RULES[case["rule"]].gates.items():
        inputs[f"{gate}_logit"] = draw(B, T, H, *widths[width]) + case["bias"]
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    if "state" in case["flags"]:
        state = draw(B, H, d + normalize, m)
        if normalize:
            state[:, :, -1].abs_()
        inputs["state"] = state
    drawn = {"mask": torch.rand(B, T, generator=generator) < 0.8, "reset": torch.rand(B, T, generator=generator) < 0.03}
    flags = {name: flag for name, flag in drawn.items() if name in case["flags"]}
    upstream = {"y": draw(B, T, case["groups"] * H, d).to(dtype)}
    return inputs, flags, upstream | {"state": draw(B, H, d + normalize, m)}


def run(case: Case, inputs: Tensors, flags: Tensors, upstream: Tensors, backend: str) -> Tensors:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    normalize = {"normalize": True} if case["normalize"] else {}
    y, state = getattr(ops, case["rule"])(**leaves, **flags, **normalize, backend=backend)
    gradients = torch.autograd.grad((y, state), list(leaves.values()), (upstream["y"], upstream["state"]))
    return {"y": y, "state": state} | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def cancelled_terms(case: Case, inputs: Tensors, upstream: Tensors, truth: Tensors) -> Tensors:
    """The terms whose difference a gradient is; a gate's are brought to its logit by the share that the gate shuts
    out. Of a query's, one is y dy times the normalizer over its product with the query, so at least y dy / |q|; of a
    normalized key's, one is v dv along the key."""

    def of_states(x: Tensor) -> Tensor:
        return x.unflatten(2, (case["H"], -1)).sum(3)

    written = (inputs["k"] * truth["dk"]).abs()
    along_m = of_states((inputs["q"] * truth["dq"]).abs())
    read = (truth["y"] * upstream["y"]).abs()
    values = (inputs["v"] * truth["dv"]).abs()
    along_d = of_states(read) + values
    let_in = written.sum(-1)
    found = {}
    if case["normalize"]:
        let_in = torch.maximum(let_in, values.sum(-1))
        found["dq"] = read.sum(-1) / inputs["q"].norm(dim=-1) / (CANCELLED if case["m"] == 1 else 1)
        found["dk"] = values.sum(-1) / inputs["k"].norm(dim=-1)
    terms = {"m": along_m + written, "d": along_d, "1": along_m.sum(-1) + let_in}
    if case["rule"] in DELTA_RULES:
        found["dstate"] = upstream["state"]
    for gate, width in RULES[case["rule"]].gates.items():
        found[f"d{gate}_logit"] = terms[width] * (-inputs[f"{gate}_logit"]).sigmoid()
        if case["rule"] == "gated":  # what is let in has a factor of 1 - g
            found[f"d{gate}_logit"] += let_in
    return found


def is_looped(case: Case) -> bool:
    """Whether a case is compared with the loop."""
    states = math.prod(case[name] for name in ("B", "T", "H", "m", "d"))
    return case["seed"] % LOOP_EVERY == 0 and states <= LOOP_ELEMENTS


def errors_of(case: Case, device: str, backend: str) -> dict[str, float]:
    inputs, flags, upstream = draw_tensors(case)

    def moved(tensors: Tensors) -> Tensors:
        return {name: x.to(device) for name, x in tensors.items()}

    found = run(case, moved(inputs), moved(flags), moved(upstream), backend)
    exact = [{name: x.double() for name, x in tensors.items()} for tensors in (inputs, upstream)]
    truth = run(case, exact[0], flags, exact[1], "loop" if is_looped(case) else "chunked")
    floors = {name: CANCELLED * x.norm() for name, x in cancelled_terms(case, *exact, truth).items()}
    errors = []
    for name, x in truth.items():
        least = torch.full_like(x.norm(), SMALLEST[case["dtype"]] * x.numel() ** 0.5)
        errors.append(
            (found[name].cpu().double() - x).norm() / torch.stack([x.norm(), least, floors.get(name, least)]).max()
        )
    values = torch.stack(errors).nan_to_num(NOT_FINITE, NOT_FINITE).tolist()
    return dict(zip(truth, values, strict=True))


def worker(number: int, options: argparse.Namespace, ends: float, results: Any) -> None:
    """The cases of every `processes`-th kind, so that no two processes compile the same kernels."""
    torch.set_num_threads(1)
    for seed in range(options.cases):
        if seed % KINDS % options.processes != number:
            continue
        if time.time() > ends:
            break
        results.put((number, seed, attempt(seed, options)))


def attempt(seed: int, options: argparse.Namespace) -> Case:
    """A case with its errors, or what stopped it."""
    case = draw_case(seed)
    try:
        return case | {"errors": errors_of(case, options.device, options.backend)}
    except Exception as error:
        return case | {"error": first_line(error)}


def passed(case: Case) -> bool:
    return "errors" in case and max(case["errors"].values()) <= LIMITS[case["dtype"]]


def gather(options: argparse.Namespace) -> tuple[list[Case], dict[str, str]]:
    """All processes' cases, and how those ended that ended badly."""
    context = multiprocessing.get_context("spawn")
    results, ends = context.Queue(), time.time() + options.seconds
    started = [
        context.Process(target=worker, args=(number, options, ends, results), daemon=True)
        for number in range(options.processes)
    ]
    for process in started:
        process.start()
    cases: list[Case] = []
    last = dict.fromkeys(range(options.processes), -1)
    while time.time() < ends + GRACE_SECONDS:
        alive = any(process.is_alive() for process in started)
        try:
            number, seed, case = results.get(timeout=1)
        except queue.Empty:
            if not alive:
                break
            continue
        cases.append(case)
        last[number] = seed
    broken = {}
    for number, process in enumerate(started):
        if process.is_alive():
            process.terminate()
            broken[str(number)] = f"hung after the case of seed {last[number]}"
        elif process.exitcode:
            broken[str(number)] = f"exit code {process.exitcode} after the case of seed {last[number]}"
    return cases, broken


def worst_of(cases: list[Case]) -> dict[str, dict[str, float]]:
    """By rule and dtype, the largest error of each tensor."""
    worst: dict[str, dict[str, float]] = {}
    for case in cases:
        row = worst.setdefault(f"{case['rule']}, {case['dtype']}", {"cases": 0})
        row["cases"] += 1
        for name, value in case.get("errors", {}).items():
            row[name] = max(row.get(name, 0.0), value)
    return dict(sorted(worst.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--case", type=int)
    parser.add_argument("--out", default="results/random_shapes.json")
    options = parser.parse_args()
    if options.case is not None:
        case = attempt(options.case, options)
        print(json.dumps(case, indent=1), "passed" if passed(case) else "FAILED")
        return
    started = time.time()
    cases, broken = gather(options)
    failed = [case for case in cases if not passed(case)]
    result = {
        "what": "random shapes, gates and flags against float64: relative errors of outputs and gradients",
        "seed": f"0 to {options.cases - 1}, one a case",
        "tokens": sum(case["B"] * case["T"] for case in cases),
        "settings": {"device": options.device, "backend": options.backend, "kinds": KINDS},
        "limits": LIMITS,
        "asked": options.cases,
        "cases": len(cases),
        "against the loop": sum(map(is_looped, cases)),
        "failed": len(failed),
        "failed by rule, dtype and kind": Counter(f"{c['rule']}, {c['dtype']}, {c['seed'] % KINDS}" for c in failed),
        "failures": failed[:100],
        "broken processes": broken,
        "seconds": time.time() - started,
        "worst": worst_of(cases),
    }
    write_result(options.out, result)
    for name, row in result["worst"].items():
        print(f"{name}: {', '.join(f'{key} {value:.3g}' for key, value in row.items())}")
    for case in failed[:20]:
        print(f"FAILED --case {case['seed']}: {case}")
    print(f"{len(cases)} of {options.cases} cases in {result['seconds']:.0f} s, {len(failed)} failed; {broken or ''}")


if __name__ == "__main__":
    main()
