"""The paper's Figure 1: what one layer needs to generate a token after texts of several lengths.

Shapes: x [B,D]   q, k [B,H,m]   v, y [B,H,d]   state [B,H,d,m]   attention: q, k, v [B,H,1,d], cache [B,H,length+1,d]
        with m slots: q, k [B,H,d]   state [B,H,2d+1,m]
D = H d. The paper's script has one head: B 32, H 1, d = m = 64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.config import ConfigError, FastWeightsConfig
from fastweights.ops.step import step
from fastweights.profiling.checks import check_counts, check_lengths
from fastweights.profiling.model_cost import first_cheaper_from, with_crossings
from fastweights.profiling.timing import Conditions, Contender, Findings, check_room, measure, on
from fastweights.results import CostResult
from fastweights.rules import RULES
from fastweights.rules.feature_maps import sum_normalize, unit_normalize
from fastweights.utils.progress import track

LENGTHS = tuple(2**i for i in range(7, 17))
REPEATS, SETTLE = 15, 6


@dataclass(frozen=True)
class Shape:
    """B, H, d and m, what the numbers are and where they come from."""

    batch: int
    heads: int
    d: int
    m: int
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self.heads * self.d

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """A random tensor. Its memory is checked before it is allocated."""
        check_room(torch.Size(shape).numel() * self.dtype.itemsize, self.device)
        return torch.randn(shape, dtype=self.dtype, device=self.device, generator=self.generator).mul_(scale)


class Layer:
    """Projections without biases, all that read x in one product; a token x."""

    def __init__(self, shape: Shape, *widths: int) -> None:
        self.shape, self.widths = shape, [shape.heads * width for width in widths]
        self.w_in = shape.random(sum(self.widths), shape.width, scale=shape.width**-0.5)
        self.w_out = shape.random(shape.width, shape.width, scale=shape.width**-0.5)
        self.x = shape.random(shape.batch, shape.width)

    def projected(self, x: Tensor) -> list[Tensor]:
        """All projections of x [B,W], each [B,H,width]."""
        heads = self.shape.heads
        return [part.unflatten(-1, (heads, -1)) for part in F.linear(x, self.w_in).split(self.widths, dim=-1)]

    def out(self, y: Tensor) -> Tensor:
        """The output projection of y [B,H,d]."""
        return F.linear(y.flatten(1), self.w_out)


class AttentionLayer(Layer):
    """Softmax attention over a static cache that is full except for the new token's place.

    Nothing is masked or copied, which is the fastest case for torch's attention.
    """

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__(shape, shape.d, shape.d, shape.d)
        self.keys, self.values = (shape.random(shape.batch, shape.heads, length + 1, shape.d) for _ in range(2))
        self.place = torch.tensor([length], device=shape.device)

    @property
    def cached_bytes(self) -> int:
        """Without the new token's place."""
        return (self.keys[:, :, 1:].numel() + self.values[:, :, 1:].numel()) * self.keys.itemsize

    def step(self, x: Tensor) -> Tensor:
        """The output [B,W] of a token x [B,W]."""
        q, k, v = (part[:, :, None] for part in self.projected(x))
        self.keys.index_copy_(2, self.place, k)
        self.values.index_copy_(2, self.place, v)
        return self.out(F.scaled_dot_product_attention(q, self.keys, self.values))


class RuleLayer(Layer):
    """A rule in its best configuration in the paper.

    delta has a ReLU map, whose matrix is part of the projections, and sum normalization. The others have neither;
    gated_delta, which is not in the paper, has queries and keys of unit length. abc and linformer have m slots.
    """

    def __init__(self, shape: Shape, rule: str) -> None:
        widths, update = {"m": shape.m, "d": shape.d, "1": 1}, RULES[rule]
        self.rule, self.gates = rule, [] if update.by_position else list(update.gates.values())
        r = shape.d if update.slots else shape.m
        super().__init__(shape, r, r, shape.d, *(widths[gate] for gate in self.gates))
        self.config = FastWeightsConfig(rule=rule)
        exact = torch.promote_types(shape.dtype, torch.float32)
        self.state = shape.random(shape.batch, shape.heads, update.state_rows(shape.d, r), shape.m).to(exact)
        if update.slots:
            self.state[:, :, -1].abs_()  # totals
        # those of one position
        self.weights = (shape.random(shape.m).expand(shape.batch, shape.heads, -1),) if update.by_position else ()

    @property
    def cached_bytes(self) -> int:
        """Bytes of the state."""
        return self.state.nbytes

    def step(self, x: Tensor) -> Tensor:
        """The output [B,W] of a token x [B,W]. The state is updated in place."""
        q, k, v, *logits = self.projected(x)
        if self.config.normalizes_sum:
            q, k = sum_normalize(F.relu(q)), sum_normalize(F.relu(k))
        if self.config.normalizes_unit:
            q, k = unit_normalize(q), unit_normalize(k)
        gates = tuple(logit[..., 0] if width == "1" else logit for logit, width in zip(logits, self.gates, strict=True))
        return self.out(step(self.rule, self.state, q, k, v, gates + self.weights))


def layer_cost(
    lengths: Sequence[int] = LENGTHS,
    *,
    batch: int = 32,
    heads: int = 1,
    d: int = 64,
    m: int = 64,
    rules: Sequence[str] = ("decay", "delta"),
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    repeats: int = REPEATS,
    compiled: bool = False,
    progress: bool = True,
) -> CostResult:
    """Measure the time and memory of one more token in one layer: softmax attention with a static cache, and rules.

    Args:
        lengths: Tokens before the one that is timed. A length that does not fit into memory is left out, and
            `left_out` says why.
        batch: Sequences at once.
        heads: Heads of the layer.
        d: Size of a value.
        m: Size of a key.
        rules: Update rules to compare with attention.
        dtype: Of weights and activations; by default bfloat16 on a GPU and float32 on a CPU. States are float32.
        device: Where to measure.
        repeats: Timed steps at each length; the median counts.
        compiled: Whether to compile every step with torch.compile.
        progress: Whether to show a progress bar.

    Raises:
        ConfigError: If a rule is not known or a number is below 1.
    """
    _check(lengths, rules, batch=batch, heads=heads, d=d, m=m, repeats=repeats)
    device = torch.device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    shape = Shape(batch, heads, d, m, dtype, device, torch.Generator(device).manual_seed(0))
    found = {name: Findings() for name in ("attention", *rules)}
    with torch.no_grad(), on(device):
        for length in track(sorted(lengths), "one layer", enabled=progress):
            contenders = {name: functools.partial(_contender, shape, name, length) for name in found}
            measure(contenders, length, Conditions(device, repeats, compiled, SETTLE), found)
    costs = with_crossings([findings.cost(name, converted=name != "attention") for name, findings in found.items()])
    return CostResult(
        level="layer",
        what="median seconds of one more token after this length in one layer, bytes of the cache, "
        "and these with the most that the token needs beside the weights",
        seed=0,
        tokens=repeats,
        batch=batch,
        heads=heads,
        d=d,
        m=m,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        models=costs,
        cheaper_from=first_cheaper_from(costs),
    )


def _contender(shape: Shape, name: str, length: int) -> Contender:
    attends = name == "attention"
    layer = AttentionLayer(shape, length) if attends else RuleLayer(shape, name)
    return Contender(functools.partial(layer.step, layer.x), layer.cached_bytes, attends)


def _check(lengths: Sequence[int], rules: Sequence[str], **counts: int) -> None:
    check_lengths(lengths)
    check_counts(**counts)
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        raise ConfigError(f"rule {unknown[0]!r} is not known; choose from {', '.join(RULES)}")
