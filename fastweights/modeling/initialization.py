"""Initializes a new layer from the pretrained attention that it replaces.

Queries and keys of the pretrained width are copied. Narrower ones are the best approximation of each head's bilinear
form q^T k that fits, biases included. Wider ones represent it exactly and leave room to learn.

Shapes: weights with the bias as one more column, D' = D + 1: q [S,G,n,D'] (G query heads per state), k [S,n,D']
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.config import LINEAR_GATES, ONE_GATE, PRETRAINED_VALUES
from fastweights.modeling.families import AttentionWeights
from fastweights.modeling.layer import (
    AttentionShape,
    FastWeightsAttention,
    HeadNorm,
    Projections,
    RecurrentAttention,
    rotary_pair_count,
    sums_values,
)

ADD_VALUE_SCALE = 1 / 512
DELTA_GATE = 0.007
# By trial on the packaged model, together with UNIT_WINDOW_SHARE below.
GATED_DELTA_GATE = 0.5
# With log-spaced key gates, the value gate remembers this many times longer than the slowest key gate.
OPEN_GATE_FACTOR = 4
# With gate_init="teacher", memory lengths reach from the teacher's distance divided by this to this many times it.
TEACHER_SPREAD = 8
# Standard deviation of abc's control at the start, for inputs of variance 1: slots that differ enough to be fitted (by
# trial on the packaged model), and are not yet full with the one token that has the largest control.
CONTROL_SPREAD = 4
# Initial share of the window in the mix with the rule; see the experiment log. Decay and gated start with outputs many
# times larger than attention's. With queries and keys of unit length they are no larger; a small part learns slowly.
WINDOW_SHARE, UNIT_WINDOW_SHARE = 0.98, 0.9


class Factors(NamedTuple):
    """Queries q [S,G,r,D'] and keys k [S,r,D'], norm weights q_norm [S,G,n] and k_norm [S,n], rotary pairs [S,P]."""

    q: Tensor
    k: Tensor
    pairs: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@torch.no_grad()
def initialize(layer: FastWeightsAttention, weights: AttentionWeights) -> None:
    """Initialize a new layer from the weights of the attention that it replaces. The result depends only on these and
    the seed.
    """
    shape, config = layer.shape, layer.config
    generator = torch.Generator().manual_seed(config.seed * 100_003 + layer.layer_idx)
    if layer.window is not None:
        _fill(layer.window.projections, shape, exact_factors(weights, shape, shape.kv_heads), weights)
    if layer.rule is not None:
        projections = layer.rule.projections
        if projections is not None:
            factors = query_key_factors(
                weights, shape, projections.states, _qk_width(projections), projections.planes.shape[1], generator
            )
            if config.projection_init == "random":
                factors = _random_like(factors, config.seed * 100_003 + 50_000 + layer.layer_idx)
            _fill(projections, shape, factors, weights)
        layer.rule.feature_map.draw(generator)
        _initialize_gates(layer.rule, shape, generator)
        if layer.rule.output_norm is not None:
            _match_value_size(layer.rule.output_norm, weights)
    if layer.mix is not None:
        share = UNIT_WINDOW_SHARE if config.normalizes_unit else WINDOW_SHARE
        layer.mix.logit.fill_(math.log(share / (1 - share)))
        if layer.mix.from_token is not None:
            layer.mix.from_token.weight.zero_()
    if layer.gate_down is not None:
        # Random, since gates start as constants: with zeros on both sides, neither would get a gradient.
        rows = torch.randn(layer.gate_down.weight.shape, generator=generator)
        layer.gate_down.weight.copy_(rows / shape.width**0.5)
    layer.o_proj.weight.copy_(weights.o_weight)
    if weights.o_bias is not None:
        layer.o_proj.bias.copy_(weights.o_bias)


def mark_initialized(layer: FastWeightsAttention) -> None:
    """Tell transformers that a layer has its weights, so that `init_weights` leaves them."""
    for module in layer.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]


@torch.no_grad()
def initialize_missing(layer: FastWeightsAttention, std: float) -> None:
    """Fill what a checkpoint did not have, buffers included, as a conversion of random attention would.

    Args:
        layer: may be new and uninitialized (built on the meta device), or partly loaded by transformers.
        std: standard deviation of the random projections.
    """
    tensors = {name: x for name, x in (*layer.named_parameters(), *layer.named_buffers()) if not x.is_meta}
    missing = {name: x for name, x in tensors.items() if not getattr(x, "_is_hf_initialized", False)}
    if missing:
        with torch.device("cpu"):
            complete = FastWeightsAttention(layer.shape, layer.config, layer.layer_idx).float()
            initialize(complete, _random_attention(layer.shape, std))
        values = dict((*complete.named_parameters(), *complete.named_buffers()))
        for name, tensor in missing.items():
            tensor.copy_(values[name])
    mark_initialized(layer)


def _random_attention(shape: AttentionShape, std: float) -> AttentionWeights:
    """Attention weights as transformers draws them for a new model: normal, with biases of zero and norms of one."""
    heads, kv_heads, d = shape.heads, shape.kv_heads, shape.head_dim

    def normal(*size: int) -> Tensor:
        return torch.randn(size) * std

    def bias(count: int) -> Tensor | None:
        return torch.zeros(count, d) if shape.qkv_bias else None

    norm = None if shape.qk_norm_eps is None else torch.ones(d)
    return AttentionWeights(
        q_weight=normal(heads, d, shape.width),
        k_weight=normal(kv_heads, d, shape.width),
        v_weight=normal(kv_heads, d, shape.width),
        o_weight=normal(shape.width, heads * d),
        q_bias=bias(heads),
        k_bias=bias(kv_heads),
        v_bias=bias(kv_heads),
        o_bias=torch.zeros(shape.width) if shape.out_bias else None,
        q_norm=norm,
        k_norm=norm,
    )


def query_key_factors(
    weights: AttentionWeights, shape: AttentionShape, states: int, width: int, pairs: int, generator: torch.Generator
) -> Factors:
    """Queries and keys `width` wide whose products approximate the pretrained attention logits as well as possible.

    Args:
        weights: of the pretrained attention.
        shape: its sizes.
        states: number of states S.
        width: r, the width of the new queries and keys.
        pairs: number of rotary pairs to retain.
        generator: for the rows that are added where `width` exceeds the head dimension.
    """
    exact = exact_factors(weights, shape, states)
    if width >= shape.head_dim:
        return _widen(exact._replace(pairs=exact.pairs[:, :pairs]), width, generator)
    if not pairs:
        return _widen(_reduce(exact, width), width, generator)
    rotated, still = _split_rotary(exact, shape)
    chosen = _choose_pairs(rotated, pairs)
    if shape.rotary_dim == shape.head_dim:
        return _widen(_rescale_norm(chosen, exact), width, generator)
    rest = _low_rank(_fold_norm(still), width - 2 * pairs)
    joined = Factors(
        torch.cat([_fold_norm(chosen).q, rest.q], 2), torch.cat([_fold_norm(chosen).k, rest.k], 1), chosen.pairs
    )
    return _widen(_constant_norm(joined, exact), width, generator)


def exact_factors(weights: AttentionWeights, shape: AttentionShape, states: int) -> Factors:
    """The pretrained queries and keys, each multiplied by the square root of the attention scale."""
    q = _with_bias(weights.q_weight, weights.q_bias).unflatten(0, (states, -1))
    k = _with_bias(weights.k_weight, weights.k_bias).repeat_interleave(states // shape.kv_heads, dim=0)
    pairs = torch.arange(shape.rotary_dim // 2).expand(states, -1)
    root = shape.scaling**0.5
    if weights.q_norm is None or weights.k_norm is None:
        return Factors(q * root, k * root, pairs)
    q_norm = (weights.q_norm.double().cpu() * root).expand(*q.shape[:2], -1)
    k_norm = (weights.k_norm.double().cpu() * root).expand(states, -1)
    return Factors(q, k, pairs, q_norm, k_norm)


def attention_projections(weights: AttentionWeights, shape: AttentionShape) -> Projections:
    """The pretrained attention's own queries, keys and values; the scale of its logits is in queries and keys."""
    projections = Projections(shape, shape.kv_heads, shape.head_dim, shape.rotary_dim // 2)
    _fill(projections, shape, exact_factors(weights, shape, shape.kv_heads), weights)
    return projections


def _with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """[heads,d,D] -> [heads,d,D+1] in float64."""
    column = torch.zeros_like(weight[..., 0]) if bias is None else bias
    return torch.cat([weight, column[..., None]], dim=-1).double().cpu()


def _low_rank(factors: Factors, rank: int) -> Factors:
    """The best approximation of q^T k of this rank in the Frobenius norm, for all queries of a group together."""
    states, group, _, columns = factors.q.shape
    stacked = factors.q.mT.reshape(states, group * columns, -1)
    q_basis, q_mix = torch.linalg.qr(stacked)
    k_basis, k_mix = torch.linalg.qr(factors.k.mT)
    u, values, v = torch.linalg.svd(q_mix @ k_mix.mT)
    root = values[:, None, :rank].sqrt()
    q = (q_basis @ u[..., :rank] * root).unflatten(1, (group, columns)).mT
    k = (k_basis @ v.mT[..., :rank] * root).mT
    return Factors(q, k, factors.pairs[:, :0])


def _reduce(exact: Factors, width: int) -> Factors:
    """Low-rank queries and keys without RoPE."""
    return _constant_norm(_low_rank(_fold_norm(exact), width), exact)


def _fold_norm(factors: Factors) -> Factors:
    """Fold the weights of the query and key norms into the projections."""
    if factors.q_norm is None or factors.k_norm is None:
        return factors
    return Factors(factors.q * factors.q_norm[..., None], factors.k * factors.k_norm[..., None], factors.pairs)


def _rms(x: Tensor) -> Tensor:
    """Root mean square of W x over a head, for x of unit variance: [..,n,D'] -> [..,1]."""
    return (x.square().sum(-1).mean(-1, keepdim=True)).sqrt()


def _constant_norm(new: Factors, exact: Factors) -> Factors:
    """Norm weights with which the reduced queries and keys are as large as under the pretrained norm."""
    if exact.q_norm is None:
        return new
    q_norm = (_rms(new.q) / _rms(exact.q)).expand(*new.q.shape[:3])
    k_norm = (_rms(new.k) / _rms(exact.k)).expand(*new.k.shape[:2])
    return new._replace(q_norm=q_norm, k_norm=k_norm)


def _rescale_norm(chosen: Factors, exact: Factors) -> Factors:
    """Norm weights for part of a head: the norm now divides by the size of the part instead of the whole."""
    if chosen.q_norm is None or chosen.k_norm is None:
        return chosen
    q_norm = chosen.q_norm * _rms(chosen.q) / _rms(exact.q)
    k_norm = chosen.k_norm * _rms(chosen.k) / _rms(exact.k)
    return chosen._replace(q_norm=q_norm, k_norm=k_norm)


def _split_rotary(exact: Factors, shape: AttentionShape) -> tuple[Factors, Factors]:
    """The elements of each head that RoPE rotates, and the others."""
    end = shape.rotary_dim

    def part(rows: slice) -> Factors:
        norms = (None if n is None else n[..., rows] for n in (exact.q_norm, exact.k_norm))
        return Factors(exact.q[:, :, rows], exact.k[:, rows], exact.pairs, *norms)

    return part(slice(0, end)), part(slice(end, None))


def _choose_pairs(rotated: Factors, count: int) -> Factors:
    """Retain the `count` rotary pairs with the largest query-key form, for each state.

    RoPE rotates each pair within itself, so the retained pairs see relative positions as before.
    """
    folded = _fold_norm(rotated)
    half = rotated.k.shape[1] // 2

    def energy(x: Tensor) -> Tensor:
        by_row = x.square().sum(-1)
        return by_row[..., :half] + by_row[..., half:]

    strength = (energy(folded.q).sum(1) * energy(folded.k)).sqrt()
    pairs = strength.topk(count, dim=-1).indices.sort(dim=-1).values
    rows = torch.cat([pairs, pairs + half], dim=-1)

    def pick(x: Tensor | None, rows: Tensor, dim: int) -> Tensor | None:
        if x is None:
            return None
        index = rows.view(rows.shape[0], *[1] * (dim - 1), -1, *[1] * (x.ndim - dim - 1))
        return x.gather(dim, index.expand(*x.shape[:dim], -1, *x.shape[dim + 1 :]))

    q, k = pick(rotated.q, rows, 2), pick(rotated.k, rows, 1)
    assert q is not None and k is not None
    return Factors(q, k, pairs, pick(rotated.q_norm, rows, 2), pick(rotated.k_norm, rows, 1))


def _widen(factors: Factors, width: int, generator: torch.Generator) -> Factors:
    """Add rows up to `width`: zero queries with random keys change no product, but can be trained."""
    missing = width - factors.k.shape[1]
    if missing <= 0:
        return factors
    states, group, _, columns = factors.q.shape
    random = torch.randn(states, missing, columns, generator=generator, dtype=factors.k.dtype)
    random[..., -1] = 0
    random *= factors.k[..., :-1].square().mean().sqrt()
    q = torch.cat([factors.q, factors.q.new_zeros(states, group, missing, columns)], dim=2)
    return factors._replace(q=q, k=torch.cat([factors.k, random], dim=1))


def _random_like(factors: Factors, seed: int) -> Factors:
    """Random queries and keys of the same size, from a seed of their own: everything else is drawn as without them."""
    generator = torch.Generator().manual_seed(seed)

    def like(x: Tensor) -> Tensor:
        random = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        random[..., -1] = 0
        return random * x[..., :-1].square().mean((-2, -1), keepdim=True).sqrt()

    return factors._replace(q=like(factors.q), k=like(factors.k))


def _fill(projections: Projections, shape: AttentionShape, factors: Factors, weights: AttentionWeights) -> None:
    """Copy queries, keys, values and norm weights into the projections."""
    repeats = projections.states // shape.kv_heads
    v = _with_bias(weights.v_weight, weights.v_bias).repeat_interleave(repeats, dim=0)
    for linear, rows in (
        (projections.q_proj, factors.q.flatten(0, 2)),
        (projections.k_proj, factors.k.flatten(0, 1)),
        (projections.v_proj, v.flatten(0, 1)),
    ):
        linear.weight.copy_(rows[:, :-1])
        if linear.bias is not None:
            linear.bias.copy_(rows[:, -1])
    projections.planes.copy_(factors.pairs)
    if projections.q_norm is not None and projections.k_norm is not None:
        assert factors.q_norm is not None and factors.k_norm is not None
        projections.q_norm.weight.copy_(_pad_ones(factors.q_norm.flatten(0, 1), projections.q_norm))
        projections.k_norm.weight.copy_(_pad_ones(factors.k_norm, projections.k_norm))


def _pad_ones(weight: Tensor, norm: HeadNorm) -> Tensor:
    """Extend norm weights with ones to the width of the norm."""
    missing = norm.weight.shape[-1] - weight.shape[-1]
    return nn.functional.pad(weight, (0, missing), value=1.0)


def _qk_width(projections: Projections) -> int:
    """Width r of queries and keys."""
    return projections.k_proj.out_features // projections.states


def uniform_gate(shape: tuple[int, ...], width: int, generator: torch.Generator) -> Tensor:
    """Uniform Gate Initialization: logits of gates drawn from U(1/n, 1 - 1/n), n being the width."""
    edge = 1 / max(width, 2)
    return torch.logit(edge + (1 - 2 * edge) * torch.rand(shape, generator=generator))


def log_gate(rows: int, count: int, longest: int, generator: torch.Generator) -> Tensor:
    """Logits of gates whose memory lengths f / (1 - f) are evenly spaced in the logarithm, from 1 to `longest` tokens.

    The logit of such a gate is the logarithm of its length. The order is random in each row.
    """
    steps = torch.linspace(0, math.log(longest), count) if count > 1 else torch.tensor([math.log(longest) / 2])
    return torch.stack([steps[torch.randperm(count, generator=generator)] for _ in range(rows)])


def block_means(length: int, m: int) -> Tensor:
    """Weights [N,m] with which each slot ends as the mean of one of m consecutive blocks of N tokens."""
    slot = torch.arange(length) * m // length
    weights = torch.zeros(length, m).scatter_(1, slot[:, None], 1.0)
    return weights / weights.sum(0).clamp(min=1)


def _initialize_gates(rule: RecurrentAttention, shape: AttentionShape, generator: torch.Generator) -> None:
    """Set the gates. Those that forget start independent of the token, and values or keys are scaled so that the first
    steps do not overflow.
    """
    config, states, d = rule.config, rule.states, shape.head_dim
    log = config.spreads_gates
    if config.rule == "decay":
        f = _key_gates(rule, shape, generator)
        z = uniform_gate((states, d), d, generator)
        if log:
            z = torch.full((states, d), math.log(OPEN_GATE_FACTOR * config.train_length))
            assert rule.key_scale is not None
            rule.key_scale.copy_((-f).sigmoid())
        elif not config.has_ablation(PRETRAINED_VALUES):
            assert rule.projections is not None
            _scale_rows(rule.projections.v_proj, (-z).sigmoid())
        if config.has_ablation(LINEAR_GATES):  # the biases are the gates themselves
            f, z = f.sigmoid(), z.sigmoid()
        _set_bias(rule, "f", f)
        _set_bias(rule, "z", z)
    elif config.rule == "gated":
        g = log_gate(1, states, config.train_length, generator) if log else uniform_gate((states,), states, generator)
        if config.has_ablation(ONE_GATE):  # the paper's gated rule has no bias
            g = torch.zeros(1)
        _set_bias(rule, "g", g)
    elif config.rule == "delta":
        _set_bias(rule, "g", torch.full((states,), math.log(DELTA_GATE / (1 - DELTA_GATE))))
    elif config.rule == "gated_delta":
        _set_bias(rule, "f", _key_gates(rule, shape, generator))
        _set_bias(rule, "g", torch.full((states,), math.log(GATED_DELTA_GATE / (1 - GATED_DELTA_GATE))))
    elif config.rule == "abc":
        # Random: slots that start with equal controls would hold the same forever.
        control: Any = rule.gates["s"]
        spread = CONTROL_SPREAD / control.in_features**0.5
        control.weight.copy_(spread * torch.randn(control.weight.shape, generator=generator))
    elif config.rule == "linformer":
        table: Any = rule.gates["weight"]
        table.weight.copy_(block_means(config.train_length, config.m))
    elif sums_values(config) and not config.has_ablation(PRETRAINED_VALUES):
        if rule.projections is not None:
            _scale_rows(rule.projections.v_proj, torch.tensor(ADD_VALUE_SCALE))
        else:
            assert rule.key_scale is not None
            rule.key_scale.fill_(ADD_VALUE_SCALE)


def _key_gates(rule: RecurrentAttention, shape: AttentionShape, generator: torch.Generator) -> Tensor:
    """Logits [S,m] of the key gates. The two elements of a rotary pair start with one gate.

    RoPE mixes the two elements. With one gate for both, a key that is scaled by how long its gate remembers is in fact
    remembered for that long.
    """
    config, states = rule.config, rule.states
    pairs = rotary_pair_count(shape, config) if config.feature_map == "none" else 0
    count = config.m - pairs
    if config.spreads_gates:
        f = log_gate(states, count, config.train_length, generator)
    else:
        f = uniform_gate((states, count), config.m, generator)
    return torch.cat([f[:, :pairs], f], dim=1)


def _set_bias(rule: RecurrentAttention, gate: str, logits: Tensor) -> None:
    """Let a gate start at these logits, independent of the token."""
    linear: Any = rule.gates[gate]
    linear.weight.zero_()
    linear.bias.copy_(logits.flatten())


def _scale_rows(linear: nn.Linear, factors: Tensor) -> None:
    """Multiply the rows of a Linear, and its bias, by factors."""
    rows = factors.flatten().to(linear.weight)
    linear.weight.mul_(rows[:, None] if rows.numel() > 1 else rows)
    if linear.bias is not None:
        linear.bias.mul_(rows)


def _match_value_size(norm: HeadNorm, weights: AttentionWeights) -> None:
    """Let the normed output start as large as the values that it is made of."""
    size = _rms(_with_bias(weights.v_weight, weights.v_bias))
    norm.weight.copy_(size.repeat_interleave(norm.weight.shape[0] // size.shape[0], dim=0).expand_as(norm.weight))


@torch.no_grad()
def set_memory_lengths(layer: FastWeightsAttention, distances: Tensor) -> None:
    """Spread the memory lengths of each state's forget gates around a distance, as gate_init="teacher" asks for.

    Args:
        layer: a converted layer with log-spaced gates that have not been trained.
        distances: how far back each state has to remember, [S], in tokens. 0: its gates stay as they are.
    """
    rule = layer.rule
    assert rule is not None
    gate, longest = "f" if "f" in rule.gates else "g", layer.config.train_length
    linear: Any = rule.gates[gate]
    before = linear.bias.view(len(distances), -1)
    known, distances = (distances > 0)[:, None], distances[:, None].to(before).clamp(1, longest)
    # Where each gate is in its row, from 0 to 1: the order stays, and so do pairs of equal gates.
    low, high = before.amin(1, keepdim=True), before.amax(1, keepdim=True)
    place = torch.where(high > low, (before - low) / (high - low).clamp(min=1e-12), 0.5)
    shortest, most = (distances / TEACHER_SPREAD).clamp(min=1), (distances * TEACHER_SPREAD).clamp(max=longest)
    length = torch.lerp(shortest.log(), most.log(), place) if gate == "f" else distances.log()
    logits = torch.where(known, length, before)
    _set_bias(rule, gate, logits)
    if rule.key_scale is not None:
        rule.key_scale.copy_((-logits).sigmoid())


def gates_are_trained(rule: RecurrentAttention) -> bool:
    """Whether gates depend on the token, as they never do at the start."""
    gates: Any = rule.gates.values()
    return any(bool(linear.weight.any()) for linear in gates)
