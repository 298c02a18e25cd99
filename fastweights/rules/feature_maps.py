"""Feature maps phi: from queries and keys to the m features that read and write the state.

Shapes: x [B,T,G*H,r] -> [B,T,G*H,m]; r is the input width of the map. Queries of a group share the map of their state.
Queries and keys already contain the square root of the attention scale, so that q . k is the attention logit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALLEST_SUM = 1e-6
# Added to the squared length of features that are scaled to unit length: features of zero remain zero.
UNIT_EPSILON = 1e-6


def input_width(name: str, m: int, d: int) -> int:
    """The width of queries and keys from which a map makes m features; d is the head dimension."""
    if name == "dpfp":
        return m // 2
    return m if name in ("none", "elu") else d


def sum_normalize(x: Tensor) -> Tensor:
    """phi / sum(phi), for positive features: [...,m] -> [...,m]."""
    return x / x.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)


def unit_normalize(x: Tensor) -> Tensor:
    """phi / |phi|, computed in at least float32: [...,m] -> [...,m]."""
    wide = _at_least_float32(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + UNIT_EPSILON).rsqrt()).to(x.dtype)


class Identity(nn.Module):
    """none: no map. A linear map would be part of the projections."""

    def __init__(self, heads: int, m: int, d: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x

    def draw(self, generator: torch.Generator) -> None:
        """Initialize the map's own parameters and buffers, if it has any."""


class Elu(Identity):
    """ELU(x) + 1 (Katharopoulos et al. 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1


class Dpfp(Identity):
    """DPFP with nu = 1: products of neighbors in relu([x, -x]), so m = 2 r (Schlag et al. 2021)."""

    def forward(self, x: Tensor) -> Tensor:
        halves = F.relu(torch.cat([x, -x], dim=-1))
        return halves * halves.roll(1, dims=-1)


class Relu(Identity):
    """relu(W x + b), learned, one map per state for its queries and keys (Kasai et al. 2021)."""

    def __init__(self, heads: int, m: int, d: int) -> None:
        super().__init__(heads, m, d)
        self.weight = nn.Parameter(torch.zeros(heads, m, d))
        self.bias = nn.Parameter(torch.zeros(heads, m))

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(2, (self.weight.shape[0], -1))
        features = torch.einsum("bthgd,hmd->bthgm", grouped, self.weight) + self.bias[:, None]
        return F.relu(features).flatten(2, 3)

    def draw(self, generator: torch.Generator) -> None:
        std = self.weight.shape[-1] ** -0.5
        self.weight.data.copy_(torch.randn(self.weight.shape, generator=generator) * std)
        self.bias.data.zero_()


class Favor(Identity):
    """FAVOR+: exp(w.x - |x|^2 / 2) / sqrt(m) over orthogonal Gaussian w (Choromanski et al. 2021).

    Unbiased for exp(q . k). Its variance grows like exp(|x|^2): queries or keys longer than about 8 give features near
    zero. The original subtracts the maximum over all keys, which needs the whole sequence and is impossible in a
    recurrence.
    """

    def __init__(self, heads: int, m: int, d: int) -> None:
        super().__init__(heads, m, d)
        self.register_buffer("directions", torch.zeros(m, d))
        self.directions: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = _at_least_float32(x)
            exponent = x @ self.directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2
            return exponent.exp() * self.directions.shape[0] ** -0.5

    def draw(self, generator: torch.Generator) -> None:
        m, d = self.directions.shape
        blocks = [_random_rotation(d, generator) for _ in range(-(-m // d))]
        norms = torch.randn(m, d, generator=generator).norm(dim=-1, keepdim=True)
        self.directions.copy_(torch.cat(blocks)[:m] * norms)


def _at_least_float32(x: Tensor) -> Tensor:
    """x in at least float32: exponents and angles are too coarse in bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _random_rotation(d: int, generator: torch.Generator) -> Tensor:
    """A uniformly distributed orthogonal matrix [d,d]. QR alone favors some signs, so they are corrected."""
    q, r = torch.linalg.qr(torch.randn(d, d, generator=generator))
    return q * r.diagonal().sign()


class Rfa(Identity):
    """Random Fourier features [sin(w.x), cos(w.x)] of unit-length x with a learned scale (Peng et al. 2021)."""

    def __init__(self, heads: int, m: int, d: int) -> None:
        super().__init__(heads, m, d)
        self.register_buffer("directions", torch.zeros(m // 2, d))
        self.directions: Tensor
        self.scale = nn.Parameter(torch.ones(heads, d))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = _at_least_float32(x)
            unit = F.normalize(x, dim=-1).unflatten(2, (self.scale.shape[0], -1)) * self.scale[:, None].to(x.dtype)
            angles = unit.flatten(2, 3) @ self.directions.to(x.dtype).mT
        return torch.cat([angles.sin(), angles.cos()], dim=-1) * self.directions.shape[0] ** -0.5

    def draw(self, generator: torch.Generator) -> None:
        self.directions.copy_(torch.randn(self.directions.shape, generator=generator))
        self.scale.data.fill_(1.0)


MAPS: dict[str, type[Identity]] = {
    "none": Identity,
    "relu": Relu,
    "elu": Elu,
    "dpfp": Dpfp,
    "favor+": Favor,
    "rfa": Rfa,
}
