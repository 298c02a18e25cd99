"""Maps phi from queries and keys to the m features the state is read and written with.

Shapes: x [B,T,G*H,r] -> [B,T,G*H,m]; r is the map's input width. Queries of a group share their state's map.
Queries and keys come with the square root of the attention scale already in them, so that q . k is attention's logit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALLEST_SUM = 1e-6


def input_width(name: str, m: int, d: int) -> int:
    """How wide queries and keys must be for a map to make m features out of them."""
    if name == "dpfp":
        return m // 2
    return m if name in ("none", "elu") else d


def sum_normalize(x: Tensor) -> Tensor:
    """phi / sum(phi), for positive features."""
    return x / x.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)


class Identity(nn.Module):
    """none: the linear map is part of the projections."""

    def __init__(self, heads: int, m: int, d: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x

    def draw(self, generator: torch.Generator) -> None:
        """Set the map's own numbers, if it has any."""


class Elu(Identity):
    """ELU(x) + 1 (Katharopoulos et al. 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1


class Dpfp(Identity):
    """Products of neighbours in relu([x, -x]), nu = 1 (Schlag et al. 2021): m = 2 r."""

    def forward(self, x: Tensor) -> Tensor:
        halves = F.relu(torch.cat([x, -x], dim=-1))
        return halves * halves.roll(1, dims=-1)


class Relu(Identity):
    """relu(W x + b), learned, one map a head for its queries and keys (Kasai et al. 2021)."""

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
    """FAVOR+: exp(w.x - |x|^2 / 2) / sqrt(m) over orthogonal Gaussian w; unbiased for exp(q . k)
    (Choromanski et al. 2021). Its variance grows like exp(|x|^2): queries or keys longer than about 8 give features
    near zero. The original's running maximum over all keys needs the whole text and has no place in a recurrence."""

    def __init__(self, heads: int, m: int, d: int) -> None:
        super().__init__(heads, m, d)
        self.register_buffer("directions", torch.zeros(m, d))
        self.directions: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = _exact(x)
            exponent = x @ self.directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2
            return exponent.exp() * self.directions.shape[0] ** -0.5

    def draw(self, generator: torch.Generator) -> None:
        m, d = self.directions.shape
        blocks = [_random_rotation(d, generator) for _ in range(-(-m // d))]
        norms = torch.randn(m, d, generator=generator).norm(dim=-1, keepdim=True)
        self.directions.copy_(torch.cat(blocks)[:m] * norms)


def _exact(x: Tensor) -> Tensor:
    """At least float32: exponents and angles do not survive bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _random_rotation(d: int, generator: torch.Generator) -> Tensor:
    """Uniform over the orthogonal matrices: QR alone favours some signs."""
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
            x = _exact(x)
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
