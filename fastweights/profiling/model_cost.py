"""What one more token costs after a sequence of a given length: seconds, and bytes of the cache."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fastweights.config import ConfigError
from fastweights.decode.model import check_weights, make_decode_model
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.description import layer_memory
from fastweights.modeling.families import family_of
from fastweights.modeling.modes import evaluating
from fastweights.modeling.positions import check_length, position_limit
from fastweights.profiling.checks import check_counts, check_lengths
from fastweights.profiling.timing import Conditions, Contender, Findings, check_room, measure, on
from fastweights.results import CostPoint, CostResult, ModelCost
from fastweights.utils.errors import Argument, error_context
from fastweights.utils.progress import track

LENGTHS = (256, 1024, 4096, 16384)
TIMED_TOKENS = 16
CHUNK = 1024
STRETCHED = "table repeated for timing"
UNMASKED = "sdpa_unmasked"
COMPARED = ("seconds", "bytes", "peak_bytes")
AttentionInterface.register(UNMASKED, sdpa_attention_forward)


def decode_cost(
    models: Mapping[str, Any],
    lengths: Sequence[int] = LENGTHS,
    *,
    batch: int = 1,
    timed_tokens: int = TIMED_TOKENS,
    stretch_positions: bool = False,
    compiled: bool = False,
    weights: str | None = None,
    progress: bool = True,
) -> CostResult:
    """Measure the time and memory of one more token after sequences of several lengths.

    At each length the models alternate, token by token, so that other load on the machine affects all of them.

    Args:
        models: Models by name, on one device.
        lengths: Tokens before the one that is timed. A length that does not fit into memory or past the end of a
            learned position table (GPT-2, OPT) is left out for that model, and `left_out` says why.
        batch: Sequences at once.
        timed_tokens: Timed steps at each length; the median counts.
        stretch_positions: Whether to measure past the end of a position table on a copy whose table is repeated. Its
            output is nonsense, but it costs the time and memory of a model with a longer table.
        compiled: Whether to compile every step with torch.compile.
        weights: What converted models' weights are stored as, as for `Engine`.
        progress: Whether to show a progress bar.

    Returns:
        The cost of each model by length, without provenance.

    Raises:
        ConfigError: If there is no model or no length.
        PositionError: If a model has too few positions for the shortest.
    """
    _check(models, lengths, batch, timed_tokens)
    for model in models.values():
        check_weights(model, weights)
    lengths = sorted(lengths)
    device = next(iter(models.values())).device
    conditions = Conditions(device, timed_tokens, compiled)
    if not stretch_positions:
        _check_positions(models, lengths[0] + 1)
    found = {name: Findings() for name in models}
    with evaluating(*models.values()), on(device):
        for length in track(lengths, "models", enabled=progress):
            fitting = {}
            for name, model in models.items():
                if stretch_positions or _fits(model, length + 1):
                    fitting[name] = functools.partial(_contender, model, length, batch, weights)
                else:
                    found[name].leave_out(length, f"the position table ends at {position_limit(model)}")
            measure(fitting, length, conditions, found)
    in_tables = {name: _fits(model, lengths[-1] + 1) for name, model in models.items()}
    positions = {name: STRETCHED if stretch_positions and not in_tables[name] else None for name in models}
    converted = {name: isinstance(model, FastWeightsMixin) for name, model in models.items()}
    costs = with_crossings([found[name].cost(name, converted[name], positions[name]) for name in models])
    return CostResult(
        what="median seconds of one more token after this length, bytes of the cache, and these with "
        "the most that the token needs beside the weights",
        seed=0,
        tokens=timed_tokens,
        batch=batch,
        dtype=str(next(iter(models.values())).dtype).removeprefix("torch."),
        device=device.type,
        weights=weights,
        models=costs,
        cheaper_from=first_cheaper_from(costs),
    )


def cheaper_from(points_base: Sequence[CostPoint], points_converted: Sequence[CostPoint], key: str) -> int | None:
    """The length from which the converted model costs less at all longer lengths; None if there is none.

    Costs are interpolated linearly between two measured lengths, as the bytes of full attention grow. Nothing is
    extrapolated, so a model that is always cheaper is so from the smallest length measured.
    """
    base = {point.length: getattr(point, key) for point in points_base}
    excess = sorted((p.length, getattr(p, key) - base[p.length]) for p in points_converted if p.length in base)
    costlier = [i for i, (_, difference) in enumerate(excess) if not difference < 0]
    if not excess or not costlier:
        return excess[0][0] if excess else None
    if costlier[-1] == len(excess) - 1:
        return None
    (before, above), (after, below) = excess[costlier[-1] : costlier[-1] + 2]
    return min(after, math.floor(before + (after - before) * above / (above - below)) + 1)


def cached_bytes(cache: Cache) -> int:
    """Bytes of a cache: states, keys and values."""
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
        check_room(rows * table.weight[0].nbytes, model.device)
        weight = table.weight.repeat(math.ceil(rows / table.num_embeddings), 1)[:rows]
    table.weight, table.num_embeddings = nn.Parameter(weight, requires_grad=False), rows
    setattr(twin.config, str(family_of(twin).learned_positions), length)
    return twin


def _check(models: Mapping[str, Any], lengths: Sequence[int], batch: int, timed_tokens: int) -> None:
    if not models:
        raise ConfigError(Argument("models"), " must be models by name, found none")
    check_lengths(lengths)
    check_counts(batch=batch, timed_tokens=timed_tokens)


def _check_positions(models: Mapping[str, Any], shortest: int) -> None:
    what = "the shortest of ", Argument("lengths"), " and the timed token make a sequence of"
    for name, model in models.items():
        with error_context(f"{name}: "):
            check_length(model, shortest, *what, fix=("Give shorter ones, or stretch_positions=True",))


def _fits(model: Any, length: int) -> bool:
    """Whether a sequence of `length` tokens has a position for each."""
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


def _contender(model: Any, length: int, batch: int, weights: str | None = None) -> Contender:
    """A model that has read `length` random tokens and generates one more, as `fastweights generate` does.

    The step is the engine's where it supports the model, and otherwise the model's own forward.
    """
    check_room(_needed_bytes(model, length, batch), model.device)
    model = stretched(model, length + 1)
    cache, token = _cache_after(model, length, batch), _random_tokens(model, batch, 1)
    cached = cached_bytes(cache)
    if isinstance(cache, FastWeightsCache):
        decoder = make_decode_model(model, batch, max_length=length + 1, weights=weights)
        if decoder.static:
            return Contender(_engine_step(decoder, cache, token), cached, attends=False, is_engine=True)
    attends = not isinstance(cache, FastWeightsCache) or bool(cache.attention_layers)
    return Contender(_forward_step(model, cache, token), cached, attends)


def _needed_bytes(model: Any, length: int, batch: int) -> int:
    """Bytes of the cache after `length` + 1 tokens, times the copies that exist at once."""
    layers = layer_memory(model, family_of(model))
    cached = sum(layer.state_bytes if layer.converted else layer.attention_bytes(length + 1) for layer in layers)
    copies = 3 if isinstance(model, FastWeightsMixin) else 1  # the engine's own, and the one that it is filled from
    return copies * batch * cached


def _forward_step(model: Any, cache: Cache, token: Tensor) -> Callable[[], Tensor]:
    _make_static(cache)
    lengths = getattr(cache, "lengths", None)

    def step() -> Tensor:
        if lengths is not None:
            cache.lengths = lengths  # a converted model counts in a new tensor, and a CUDA graph needs the same one
        with _no_mask(model):
            return model(token, past_key_values=cache, use_cache=True).logits[:, -1]

    return step


def _engine_step(decoder: Any, cache: FastWeightsCache, token: Tensor) -> Callable[[], Tensor]:
    for row in range(len(token)):
        single = cache.fork()
        single.batch_select_indices(torch.tensor([row]))
        decoder.set_slot(row, single)
    decoder.tokens.copy_(token[:, 0])
    return decoder.step


def _random_tokens(model: Any, batch: int, length: int) -> Tensor:
    generator, words = torch.Generator().manual_seed(length), model.config.get_text_config().vocab_size
    return torch.randint(words, (batch, length), generator=generator).to(model.device)


def _cache_after(model: Any, length: int, batch: int) -> Cache:
    cache = None
    for chunk in _random_tokens(model, batch, length).split(CHUNK, dim=1):
        cache = model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return cache


class _StaticLayer(DynamicLayer):
    """The keys and values of a sequence, with room for one more token.

    The new token is always written to the same place, so shapes and addresses stay constant, which a CUDA graph needs.
    There is nothing to mask, so the fastest kernels can be used.
    """

    def __init__(self, filled: DynamicLayer) -> None:
        super().__init__()
        self.keys, self.values = (F.pad(held, (0, 0, 0, 1)) for held in (filled.keys, filled.values))
        self.dtype, self.device, self.is_sliding = self.keys.dtype, self.keys.device, filled.is_sliding
        self.length, self.is_initialized = int(filled.get_seq_length()), True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, -1:] = key_states
        self.values[:, :, -1:] = value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.keys.shape[2]
        return held, self.length + 1 - held


def _make_static(cache: Cache) -> None:
    for i, layer in enumerate(cache.layers):  # one after the other: all at once would need the memory twice
        if isinstance(layer, DynamicLayer):
            cache.layers[i] = _StaticLayer(layer)


@contextlib.contextmanager
def _no_mask(model: Any) -> Iterator[None]:
    """Prevent the mask that transformers makes for one token while a CUDA graph is captured.

    torch has no flash attention with a mask. transformers makes none for attention implementations it does not know.
    """
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = UNMASKED if before == "sdpa" else before
    try:
        yield
    finally:
        config._attn_implementation = before


def with_crossings(costs: Sequence[ModelCost]) -> list[ModelCost]:
    """Add to each converted model the lengths from which it costs less than the first unconverted model."""
    base = next((cost for cost in costs if not cost.converted), None)
    if base is None:
        return list(costs)
    return [
        replace(cost, cheaper_from={key: cheaper_from(base.points, cost.points, key) for key in COMPARED})
        if cost.converted
        else cost
        for cost in costs
    ]


def first_cheaper_from(costs: Sequence[ModelCost]) -> dict[str, int | None]:
    """The lengths that `with_crossings` added to the first converted model, None for each where there is none."""
    return next((cost.cheaper_from for cost in costs if cost.cheaper_from is not None), dict.fromkeys(COMPARED))
