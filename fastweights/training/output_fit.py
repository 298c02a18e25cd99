"""Output projections fitted by least squares to what the teacher answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.modeling.layer import FastWeightsAttention
from fastweights.training.losses import Batch, answer, capture_attention, converted_layers

# Ridge of the least-squares fit, as a share of the diagonal.
RIDGE = 1e-4


@torch.no_grad()
def fit_outputs(student: Any, teacher: Any, batches: Iterable[Batch], kind: str) -> None:
    """Set each new layer's output projection by least squares to what the teacher's attention answers: all of it
    (full), or one scale for each head. Right after the swap a rule's output is many times larger than attention's."""
    layers = converted_layers(student)
    products: dict[int, tuple[Tensor, Tensor]] = {}
    for batch in batches:
        heard = capture_attention(teacher, batch)
        for index, layer in layers.items():
            with _inputs_of(layer.o_proj) as seen:
                answer(layer, heard[index], batch)
            y, wanted = (x.flatten(0, 1).double() for x in (seen[0], heard[index].output))
            y = y if layer.o_proj.bias is None else F.pad(y, (0, 1), value=1.0)
            gram, onto = products.get(index, (0, 0))
            products[index] = (gram + y.mT @ y, onto + y.mT @ wanted)
    for index, layer in layers.items():
        (_fit_scales if kind == "scale" else _fit_projection)(layer, *products[index])


@contextmanager
def _inputs_of(linear: nn.Module) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0]))
    try:
        yield seen
    finally:
        hook.remove()


def _fit_projection(layer: FastWeightsAttention, gram: Tensor, onto: Tensor) -> None:
    """From sums over tokens: gram = y^T y and onto = y^T wanted, y with a column of ones where there is a bias."""
    solution = _least_squares(gram, onto)
    if layer.o_proj.bias is not None:
        layer.o_proj.bias.copy_(solution[-1])
        solution = solution[:-1]
    layer.o_proj.weight.copy_(solution.mT)


def _fit_scales(layer: FastWeightsAttention, gram: Tensor, onto: Tensor) -> None:
    """The same sums for what heads put out, y_h W_h^T, one unknown each."""
    by_head, weight = (layer.shape.heads, layer.shape.head_dim), layer.o_proj.weight.double()
    if layer.o_proj.bias is not None:
        gram, onto = gram[:-1, :-1], onto[:-1] - gram[:-1, -1:] * layer.o_proj.bias.double()
    gram = (gram * (weight.mT @ weight)).unflatten(1, by_head).sum(2).unflatten(0, by_head).sum(1)
    scales = _least_squares(gram, (onto * weight.mT).sum(1).unflatten(0, by_head).sum(1))
    layer.o_proj.weight.mul_(scales.repeat_interleave(layer.shape.head_dim).to(layer.o_proj.weight))


def _least_squares(gram: Tensor, wanted: Tensor) -> Tensor:
    """Solve with a little ridge, every unknown measured in units of its own column."""
    size = gram.diagonal().sqrt().clamp(min=1e-12)
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    unit = size if wanted.ndim == 1 else size[:, None]
    return torch.linalg.solve(gram / size[:, None] / size + RIDGE * eye, wanted / unit) / unit
