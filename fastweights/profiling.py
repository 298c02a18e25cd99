"""What one more token costs after a text of a given length: seconds, and bytes kept of that text."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers.cache_utils import Cache

from fastweights.cache import FastWeightsCache
from fastweights.config import ConfigError
from fastweights.families import family_of
from fastweights.models import FastWeightsMixin, evaluating, position_limit

LENGTHS = (256, 1024, 4096, 16384)
TIMED_TOKENS = 16
WARM_UP_TOKENS = 1
PIECE = 1024
STRETCHED = "table repeated for timing"


def decode_cost(
    models: Mapping[str, Any],
    lengths: Sequence[int] = LENGTHS,
    *,
    timed_tokens: int = TIMED_TOKENS,
    stretch_positions: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Median seconds of a token after `length` others, and the bytes kept of these, for each of some models.

    At each length the models take turns, token by token, so that whatever else the machine does falls on all of them.
    A learned position table (GPT-2, OPT) ends: lengths past its end are left out for that model. `stretch_positions`
    measures them on a copy whose table is repeated; its text is nonsense, but it costs the time and bytes of a model
    that has a longer table.
    """
    _check(models, lengths, timed_tokens)
    lengths = sorted(lengths)
    longest = lengths[-1] + WARM_UP_TOKENS + timed_tokens
    measured = {name: stretched(model, longest) if stretch_positions else model for name, model in models.items()}
    _check_positions(measured, lengths[0] + WARM_UP_TOKENS + timed_tokens)
    points: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    with evaluating(*measured.values()):
        for length in track(lengths, "measuring", console=Console(stderr=True), transient=True, disable=not progress):
            fitting = {n: m for n, m in measured.items() if _fits(m, length + WARM_UP_TOKENS + timed_tokens)}
            for name, point in _measure(fitting, length, timed_tokens).items():
                points[name].append(point)
    entries = [_entry(name, model, points[name], measured[name] is not model) for name, model in models.items()]
    return {
        "kind": "cost",
        "what": "median seconds of one more token after a text of this length, and bytes kept of the text",
        "seed": 0,
        "tokens": timed_tokens,
        "models": entries,
        "cheaper_from": _compare(entries),
    }


def cheaper_from(
    points_base: Sequence[Mapping[str, Any]], points_converted: Sequence[Mapping[str, Any]], key: str
) -> int | None:
    """The first length from which the converted model costs less and goes on to, None if it does not end up so.

    Between two measured lengths a cost is a straight line, as the bytes of full attention are; nothing is said outside
    of them, so a model that is cheaper throughout is so from the smallest length measured.
    """
    base = {point["length"]: point[key] for point in points_base}
    excess = sorted((p["length"], p[key] - base[p["length"]]) for p in points_converted if p["length"] in base)
    dearer = [i for i, (_, difference) in enumerate(excess) if not difference < 0]
    if not excess or not dearer:
        return excess[0][0] if excess else None
    if dearer[-1] == len(excess) - 1:
        return None
    (before, above), (after, below) = excess[dearer[-1] : dearer[-1] + 2]
    return min(after, math.floor(before + (after - before) * above / (above - below)) + 1)


def kept_bytes(cache: Cache) -> int:
    """Bytes that a cache holds of the text: states, keys and values."""
    if isinstance(cache, FastWeightsCache):
        return cache.nbytes + cache.attention_nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)


def stretched(model: Any, length: int) -> Any:
    """A copy of a model whose position table reaches `length`, for timing only; the model itself where it does."""
    if _fits(model, length):
        return model
    # All weights but the table's are shared: the copy costs no second model.
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    table = _position_table(twin)
    with torch.no_grad():
        rows = length + getattr(table, "offset", 0)
        weight = table.weight.repeat(math.ceil(rows / table.num_embeddings), 1)[:rows]
    table.weight, table.num_embeddings = nn.Parameter(weight, requires_grad=False), rows
    setattr(twin.config, str(family_of(twin).learned_positions), length)
    return twin


def _check(models: Mapping[str, Any], lengths: Sequence[int], timed_tokens: int) -> None:
    if not models:
        raise ConfigError("decode_cost measures models by name, and found none")
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"lengths must be at least one text length of 1 or more tokens, found {list(lengths)}")
    if timed_tokens < 1:
        raise ConfigError(f"timed_tokens must be at least 1, found {timed_tokens}")


def _check_positions(models: Mapping[str, Any], shortest: int) -> None:
    for name, model in models.items():
        if not _fits(model, shortest):
            raise ConfigError(
                f"{name} has fewer learned positions than the {shortest} tokens that the shortest of the lengths needs "
                "with the timed ones: give shorter lengths, or stretch_positions=True"
            )


def _fits(model: Any, length: int) -> bool:
    """Whether a text of `length` tokens has a position for each."""
    limit = position_limit(model)
    return limit is None or length <= limit


def _position_table(model: Any) -> Any:
    """The embedding that is not the tokens' and has a row for every position (OPT: and two more, its offset)."""
    length = getattr(model.config, str(family_of(model).learned_positions))
    return next(
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and module is not model.get_input_embeddings()
        and module.num_embeddings == length + getattr(module, "offset", 0)
    )


def _measure(models: Mapping[str, Any], length: int, timed_tokens: int) -> dict[str, dict[str, Any]]:
    caches = {name: _cache_after(model, length) for name, model in models.items()}
    sizes = {name: kept_bytes(cache) for name, cache in caches.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(WARM_UP_TOKENS + timed_tokens):
        for name, model in models.items():
            seconds[name].append(_seconds_of_a_token(model, caches[name]))
    return {
        name: {"length": length, "seconds": statistics.median(seconds[name][WARM_UP_TOKENS:]), "bytes": sizes[name]}
        for name in models
    }


def _cache_after(model: Any, length: int) -> Cache:
    cache = None
    for piece in torch.zeros(1, length, dtype=torch.long, device=model.device).split(PIECE, dim=1):
        cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return cache


def _seconds_of_a_token(model: Any, cache: Cache) -> float:
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    _wait_for(model.device)
    began = time.perf_counter()
    model(token, past_key_values=cache, use_cache=True)
    _wait_for(model.device)
    return time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _entry(name: str, model: Any, points: list[dict[str, Any]], is_stretched: bool) -> dict[str, Any]:
    entry = {"name": name, "converted": isinstance(model, FastWeightsMixin), "points": points}
    return entry | ({"positions": STRETCHED} if is_stretched else {})


def _compare(entries: list[dict[str, Any]]) -> dict[str, int | None]:
    """Of the first converted model against the first that is not; each converted entry gets its own as well."""
    base = next((entry for entry in entries if not entry["converted"]), None)
    for entry in entries:
        if base is not None and entry["converted"]:
            entry["cheaper_from"] = {
                key: cheaper_from(base["points"], entry["points"], key) for key in ("seconds", "bytes")
            }
    return next((e["cheaper_from"] for e in entries if "cheaper_from" in e), {"seconds": None, "bytes": None})
