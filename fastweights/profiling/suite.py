"""Everything that `fastweights profile` measures: one layer, whole models, or both, as one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fastweights.loading import load
from fastweights.profiling import layer_cost, model_cost
from fastweights.results import CostResult
from fastweights.training.teacher import TeacherError, base_of, load_teacher
from fastweights.utils.errors import Argument, FastWeightsError

# Called with a line of text about the progress.
Notify = Callable[[str], None]


class ProfileError(FastWeightsError):
    """A measurement of cost that cannot be done, with the reason."""


def profile(
    models: Mapping[str, Any],
    *,
    layer: bool = False,
    lengths: Sequence[int] | None = None,
    batch: int | None = None,
    heads: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    compiled: bool = False,
    weights: str | None = None,
    notify: Notify = lambda text: None,
) -> CostResult:
    """Measure the time and memory of one more token: of one layer, of whole models, or of both.

    Args:
        models: Models by name, on one device; the base first.
        layer: Whether to measure the layer of the paper's Figure 1.
        lengths: Tokens before the one that is timed; by default 128 to 65,536, for models on a CPU 256 to 16,384.
        batch: Sequences at once; by default 1, for the layer 32.
        heads: Heads of the layer; by default 1.
        device: Where to measure the layer.
        dtype: Of the layer: a name of torch's, or "auto" for the device's usual one.
        compiled: Whether to compile every step with torch.compile.
        weights: On a CPU, what converted models' weights are stored as, as for `Engine`.
        notify: Called with a line before each measurement.

    Returns:
        The cost of the models, with that of the layer in `layer`; without models that of the layer.

    Raises:
        ProfileError: If there is nothing to measure.
        ConfigError: If a length or a count is below 1.
    """
    if not (models or layer):
        raise ProfileError("nothing to measure: give ", Argument("models"), " or ", Argument("layer"))
    one = None
    if layer:
        chosen = lengths or layer_cost.LENGTHS
        notify(_plan(f"one layer, batch {batch or 32}, heads {heads or 1}, d = m = 64", chosen, device))
        one = layer_cost.layer_cost(
            chosen,
            batch=batch or 32,
            heads=heads or 1,
            dtype=None if dtype == "auto" else getattr(torch, dtype),
            device=device,
            compiled=compiled,
        )
    if not models:
        assert one is not None
        return one
    chosen = lengths or (layer_cost.LENGTHS if torch.device(device).type == "cuda" else model_cost.LENGTHS)
    notify(_plan(f"{', '.join(models)}, batch {batch or 1}", chosen, device))
    whole = model_cost.decode_cost(
        models, chosen, batch=batch or 1, stretch_positions=True, compiled=compiled, weights=weights
    )
    return replace(whole, layer=one)


def _plan(what: str, lengths: Sequence[int], device: str) -> str:
    return f"measuring on {device}: {what}, after {', '.join(f'{length:,}' for length in lengths)} tokens"


def load_with_base(
    sources: Mapping[str, str], *, device: str = "cpu", dtype: str = "auto", notify: Notify = lambda text: None
) -> dict[str, Any]:
    """Load models by name. A converted model alone gets the model it was converted from before it, named "base".

    Args:
        sources: Folders or hub ids by name.
        device: Where to put the models.
        dtype: Of the weights; "auto" is the checkpoint's own.
        notify: Called with a line that names the base, and with one if it is not found.
    """
    loaded = {name: load(source, dtype=dtype).to(device).eval() for name, source in sources.items()}
    (source, *others), model = sources.values(), next(iter(loaded.values()))
    if others or base_of(model) is None:
        return loaded
    try:
        return {"base": load_teacher(model, source, dtype=dtype, announce=notify).to(device).eval()} | loaded
    except TeacherError:
        notify(f"the base {base_of(model)} is not found: measured without it")
        return loaded
