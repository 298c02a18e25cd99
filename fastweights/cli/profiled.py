"""What `fastweights profile` measures: the paper's layer, models, or both; and the figure of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fastweights.conversion import convert
from fastweights.loading import load
from fastweights.profiling import layer_cost as layer_profile
from fastweights.profiling import model_cost as profiling
from fastweights.quickstart import PACKAGED, SETTINGS
from fastweights.report import ReportError, cost_figure
from fastweights.report.results import Result, read_results
from fastweights.utils.errors import CheckpointError

Say = Callable[[str], None]


def profile(
    sources: Mapping[str, str],
    say: Say,
    *,
    layer: bool = False,
    lengths: Sequence[int] | None = None,
    batch: int | None = None,
    heads: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    compiled: bool = False,
) -> dict[str, Any]:
    """The cost of the models by name; without any, of the packaged model and of the paper's layer; or of that alone."""
    if sources and (layer or heads):
        flag, first = "--layer" if layer else "--heads", next(iter(sources))
        raise ValueError(f"{flag} is for the layer, and {first} is a model: give only one of them")
    one: dict[str, Any] = {}
    if not sources:
        chosen = lengths or layer_profile.LENGTHS
        say(_plan(f"one layer, batch {batch or 32}, heads {heads or 1}, d = m = 64", chosen, device))
        one = layer_profile.layer_cost(
            chosen,
            batch=batch or 32,
            heads=heads or 1,
            dtype=None if dtype == "auto" else getattr(torch, dtype),
            device=device,
            compiled=compiled,
        )
    if layer:
        return one
    models = _load(sources, dtype, device, say)
    chosen = lengths or (layer_profile.LENGTHS if torch.device(device).type == "cuda" else profiling.LENGTHS)
    say(_plan(f"{', '.join(models)}, batch {batch or 1}", chosen, device))
    whole = profiling.decode_cost(models, chosen, batch=batch or 1, stretch_positions=True, compiled=compiled)
    return whole | {"layer": one} if one else whole


def _plan(what: str, lengths: Sequence[int], device: str) -> str:
    return f"measuring on {device}: {what}, after {', '.join(f'{length:,}' for length in lengths)} tokens"


def _load(sources: Mapping[str, str], dtype: str, device: str, say: Say) -> dict[str, Any]:
    """The models named; none: the packaged one and its conversion; a converted one alone: its base before it."""
    if not sources:
        # As attention is used: in float32 a GPU has no fast kernel for it.
        best = "bfloat16" if torch.device(device).type == "cuda" else "float32"
        packaged = best if dtype == "auto" else dtype
        base, converted = (load(PACKAGED, dtype=packaged).to(device).eval() for _ in range(2))
        return {"packaged": base, "decay": convert(converted, SETTINGS)}
    loaded = {name: load(source, dtype=dtype).to(device).eval() for name, source in sources.items()}
    base_name = getattr(next(iter(loaded.values())).config, "fastweights_base", None) if len(loaded) == 1 else None
    if base_name is None:
        return loaded
    try:
        return {"base": load(base_name, dtype=dtype).to(device).eval()} | loaded
    except CheckpointError:
        say(f"the base {base_name} is not found: measured without it")
        return loaded


def read_cost(path: Path) -> Result:
    (result,) = read_results([path])
    if result.kind != "cost":
        raise ReportError(f"--from {path} is a result of {result.kind}: give one that fastweights profile wrote")
    return result


def figure(result: Result, target: Path) -> str:
    """Draw, and say what was drawn."""
    return f"figure: {' and '.join(map(str, cost_figure(result, target)))}"


def figure_beside(path: Path) -> str:
    """The figure of a result that was just written; the numbers are safe without it, too."""
    try:
        return figure(read_cost(path), path)
    except ReportError as error:
        return f"no figure: {error}, then fastweights profile --from {path}"
