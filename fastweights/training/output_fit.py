"""Fitting new layers to the teacher's attention: memory lengths from how far back it attends, and output projections by
least squares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.modeling.initialization import gates_are_trained, set_memory_lengths
from fastweights.modeling.layer import FastWeightsAttention, converted_layers
from fastweights.training.attention_distance import attention_distances
from fastweights.training.losses import Batch, capture_attention, layer_output, sequence_info

# Ridge of the least-squares fit, as a share of the diagonal.
RIDGE = 1e-4
# Tokens that the teacher's attention distances are measured on.
DISTANCE_TOKENS = 4_096


@torch.no_grad()
def fit_outputs(
    student: Any, teacher: Any, batches: Iterable[Batch], kind: str, advance: Callable[[], None] = lambda: None
) -> None:
    """Fit each new layer's output projection to the output of the teacher's attention.

    Right after conversion a rule's output can be many times larger than attention's. With gate_init="teacher", gates
    that have not been trained get their memory lengths first.

    Args:
        student: The converted model.
        teacher: The model it was converted from.
        batches: Batches to fit on.
        kind: "full" for the whole projection, "scale" for one scale for each head.
        advance: Called after each batch.
    """
    batches, layers = list(batches), converted_layers(student)
    _fit_memory_lengths(student, teacher, batches)
    products: dict[int, tuple[Tensor, Tensor]] = {}
    for batch in batches:
        captured, info = capture_attention(teacher, batch), sequence_info(batch)
        for index, layer in layers.items():
            with _inputs_of(layer.o_proj) as seen:
                layer_output(layer, captured[index], info)
            y, expected = (x.flatten(0, 1).double() for x in (seen[0], captured[index].output))
            y = y if layer.o_proj.bias is None else F.pad(y, (0, 1), value=1.0)
            gram, onto = products.get(index, (0, 0))
            products[index] = (gram + y.mT @ y, onto + y.mT @ expected)
        advance()
    for index, layer in layers.items():
        (_fit_scales if kind == "scale" else _fit_projection)(layer, *products[index])


def fitted_tensors(student: Any) -> list[Tensor]:
    """What `fit_outputs` may change in a converted model."""
    tensors: list[Tensor] = []
    for layer in converted_layers(student).values():
        tensors += list(layer.o_proj.parameters())
        if layer.rule is not None:
            tensors += [*layer.rule.gates.parameters(), *layer.rule.buffers(recurse=False)]
    return tensors


def awaits_memory_lengths(student: Any) -> bool:
    """Whether gates of a converted model are to be set from the teacher and have not been trained yet."""
    return any(map(_awaits_memory_lengths, converted_layers(student).values()))


def _awaits_memory_lengths(layer: FastWeightsAttention) -> bool:
    return layer.config.gate_init == "teacher" and layer.rule is not None and not gates_are_trained(layer.rule)


def _fit_memory_lengths(student: Any, teacher: Any, batches: Sequence[Batch]) -> None:
    """Set the gates that wait for it, from the teacher's attention in the first of the batches."""
    waiting = {i: layer for i, layer in converted_layers(student).items() if _awaits_memory_lengths(layer)}
    if waiting:
        needed = -(-DISTANCE_TOKENS // batches[0]["input_ids"].numel())
        distances = attention_distances(waiting, teacher, batches[:needed])
        for index, layer in waiting.items():
            set_memory_lengths(layer, distances[index])


@contextmanager
def _inputs_of(linear: nn.Module) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0]))
    try:
        yield seen
    finally:
        hook.remove()


def _fit_projection(layer: FastWeightsAttention, gram: Tensor, onto: Tensor) -> None:
    """From sums over tokens: gram = y^T y and onto = y^T expected, y with a column of ones where there is a bias."""
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


def _least_squares(gram: Tensor, expected: Tensor) -> Tensor:
    """Solve with a little ridge, every unknown measured in units of its own column."""
    size = gram.diagonal().sqrt().clamp(min=1e-12)
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    unit = size if expected.ndim == 1 else size[:, None]
    return torch.linalg.solve(gram / size[:, None] / size + RIDGE * eye, expected / unit) / unit
