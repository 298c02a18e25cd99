"""Which layers a hybrid should keep as attention.

One converted layer after another is restored to attention. Its gain is the decrease of the KL divergence between the
next-token distributions of the base and of the model.

Shapes: input_ids, labels [B,T]   teacher_hidden, the input of the teacher's output layer, [B*T,D]
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastweights.data.batches import IGNORED
from fastweights.loading import load, load_tokenizer
from fastweights.model_paths import new_model_folder
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.families import family_of
from fastweights.modeling.layer import FastWeightsAttention, converted_layers
from fastweights.modeling.modes import autocast, evaluating
from fastweights.results import LayerRanking, RankedLayer
from fastweights.training.chunked_loss import LossConfig, head_loss, head_of
from fastweights.training.losses import Batch, hidden_of, next_tokens, without_plain_positions
from fastweights.training.micro_batch import split
from fastweights.training.output_fit import fit_outputs, fitted_tensors
from fastweights.training.teacher import load_teacher, sizes_of
from fastweights.utils.errors import Argument, FastWeightsError
from fastweights.utils.progress import progress_bar

__all__ = ["RankingError", "hybrid_from", "rank_layers", "restored"]

# Tokens that output projections are fitted on, as before training.
FIT_TOKENS = 16_384
BATCH_TOKENS = 8_192


class RankingError(FastWeightsError):
    """Layers that cannot be ranked or restored, with what to change."""


@contextmanager
def restored(student: Any, teacher: Any, layers: Collection[int]) -> Iterator[None]:
    """Temporarily replace these layers of the student by the attention modules of the teacher.

    The settings of the student are changed accordingly, because the forward pass makes masks for the layers that are
    not converted. Only for passes without a cache.
    """
    family, settings = student.family, student.config.fastweights
    blocks, bases = family.blocks(student), family.blocks(teacher)
    before = {index: family.attention_of(blocks[index]) for index in layers}
    try:
        for index in layers:
            setattr(blocks[index], family.attention, family.attention_of(bases[index]))
        student.config.fastweights = _settings_of(settings, sorted(converted_layers(student)))
        yield
    finally:
        student.config.fastweights = settings
        for index, attention in before.items():
            setattr(blocks[index], family.attention, attention)


def _settings_of(settings: dict[str, Any], converted: list[int]) -> dict[str, Any]:
    """A model's settings with fewer converted layers."""
    wide = [layer for layer in settings.get("wide_layers") or () if layer in converted]
    without_wide = {} if wide else {"wide_window": 0}
    return settings | {"layers": converted, "wide_layers": wide or None} | without_wide


def rank_layers(
    student: Any, teacher: Any, batches: Sequence[Batch], *, keep: int = 0, fit: bool = False, progress: bool = True
) -> LayerRanking:
    """Measure what each converted layer gains as attention. Both models are restored at the end.

    Args:
        student: The converted model.
        teacher: The model it was converted from, on the same device and in the same dtype.
        batches: Rows of tokens: input_ids and labels [B,T].
        keep: Number of layers to choose greedily: the best, then the best in addition to it, and so on.
        fit: Whether to fit the output projections to the teacher's attention first. Without it the gains
            of an untrained model are not meaningful.
        progress: Whether to show a progress bar.

    Returns:
        The mean of KL(teacher || student) over the next tokens with no layer restored, with each one restored, and
        after each of the chosen ones.

    Raises:
        RankingError: If the teacher does not fit, there are fewer layers than `keep`, or a divergence is not finite.
    """
    check_teacher(student, teacher)
    candidates = sorted(converted_layers(student))
    if not 0 <= keep <= len(candidates):
        raise RankingError(
            Argument("keep"), f" {keep}: choose from 0 to {len(candidates)}, the number of converted layers"
        )
    passes = len(batches) * (1 + sum(len(candidates) - done for done in range(max(1, keep))))
    with evaluating(student, teacher), _fitted(student, teacher, batches if fit else ()), _bar(passes, progress) as bar:
        measure = functools.partial(_divergences, student, teacher, batches, bar)
        nothing, *each = measure([(), *((index,) for index in candidates)])
        ranked = alone = sorted(zip(each, candidates, strict=True))
        chosen: list[int] = []
        kl_after: list[float] = []
        for _ in range(keep):
            if chosen:
                rest = [index for index in candidates if index not in chosen]
                ranked = sorted(zip(measure([(*chosen, index) for index in rest]), rest, strict=True))
            kl_after.append(ranked[0][0])
            chosen.append(ranked[0][1])
    layers = [RankedLayer(layer=index, kl=kl, gain=nothing - kl) for kl, index in alone]
    return LayerRanking(kl=nothing, layers=layers, chosen=chosen, kl_after=kl_after)


def batches_of(rows: Batch) -> list[Batch]:
    """Split rows into batches of at most BATCH_TOKENS tokens, at least one row each."""
    return split(rows, max(1, BATCH_TOKENS // rows["input_ids"].shape[1]))


def _divergences(
    student: Any,
    teacher: Any,
    batches: Sequence[Batch],
    bar: Callable[[], None],
    choices: Sequence[tuple[int, ...]],
) -> list[float]:
    """The mean divergence for each choice of layers to restore. All choices are measured on a batch before the next
    one, so that the teacher runs once."""
    sums, count = [0.0] * len(choices), 0
    for batch in batches:
        batch = _on_device(batch, student.device)
        with autocast(student.device):
            teacher_hidden = hidden_of(teacher, batch)
        count += int((next_tokens(batch) != IGNORED).sum())
        for i, layers in enumerate(choices):
            with restored(student, teacher, layers), autocast(student.device):
                sums[i] += _divergence(student, teacher, batch, teacher_hidden)
            if not math.isfinite(sums[i]):
                raise RankingError(
                    f"the divergence is {sums[i]} with {_named(layers)} restored: values of the model overflow; "
                    "fit its projections first, ",
                    Argument("fit"),
                    ", or train it",
                )
            bar()
    if not count:
        raise RankingError("the text has no next tokens to compare: give one with longer documents")
    return [total / count for total in sums]


def _named(layers: Collection[int]) -> str:
    return f"layer {', '.join(map(str, layers))}" if layers else "nothing"


def _divergence(student: Any, teacher: Any, batch: Batch, teacher_hidden: Tensor) -> float:
    """Sum of KL(teacher || student) over the next tokens of a batch."""
    heads, hidden = (head_of(student), head_of(teacher)), hidden_of(student, batch)
    return float(
        head_loss(heads[0], hidden, next_tokens(batch), LossConfig(cross_entropy=0.0), heads[1], teacher_hidden)
    )


def _on_device(batch: Batch, device: torch.device) -> Batch:
    return {name: x.to(device) for name, x in without_plain_positions(batch).items()}


def _check_fit(projections: Sequence[Any], tokens: int) -> None:
    """Refuse a text so short that the fit would reproduce it exactly: every layer would then seem perfect."""
    inputs = max(projection.in_features for projection in projections)
    if tokens <= inputs:
        reason = (
            f" needs more tokens than an output projection has inputs, {inputs:,}, found {tokens:,}: give more text, "
        )
        raise RankingError(Argument("fit"), reason, "or raise ", Argument("tokens"))


@contextmanager
def _fitted(student: Any, teacher: Any, batches: Sequence[Batch]) -> Iterator[None]:
    """Temporarily fit the layers to the attention of the teacher, on the first of the batches."""
    tensors = fitted_tensors(student) if batches else []
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        if batches:
            projections = [layer.o_proj for layer in converted_layers(student).values()]
            _check_fit(projections, sum(batch["input_ids"].numel() for batch in batches))
            needed = math.ceil(FIT_TOKENS / batches[0]["input_ids"].numel())
            with autocast(student.device):
                fit_outputs(student, teacher, (_on_device(b, student.device) for b in batches[:needed]), "full")
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.detach().copy_(value)


@contextmanager
def _bar(passes: int, progress: bool) -> Iterator[Callable[[], None]]:
    with progress_bar(enabled=progress) as bar:
        task = bar.add_task("restoring layers", total=passes)
        yield lambda: bar.advance(task)


def load_pair(
    folder: str | os.PathLike,
    teacher: str | None = None,
    *,
    dtype: Any = "auto",
    announce: Callable[[str], None] = lambda text: None,
) -> tuple[Any, Any]:
    """Load a converted model and its base, in the precision of the converted model; `announce` as in `load_teacher`."""
    student = load(folder, dtype=dtype)
    if not isinstance(student, FastWeightsMixin):
        raise RankingError(f"{folder} is not converted: give a folder that fastweights convert or train wrote")
    base = load_teacher(student, str(folder), teacher, dtype=student.dtype, announce=announce)
    check_teacher(student, base, Argument("teacher"), f" {base.config._name_or_path}")
    return student, base


def check_teacher(student: Any, teacher: Any, *name: str) -> None:
    """Refuse all but the unconverted model that the student was made from, as far as its config shows.

    Args:
        student: The converted model.
        teacher: The model to check.
        name: Parts of a message that name the teacher.

    Raises:
        RankingError: If the class, the sizes, the device, the dtype or the attention implementation differ.
    """
    name = name or (Argument("teacher"),)
    if not isinstance(student, FastWeightsMixin):
        raise RankingError(f"a {type(student).__name__} is not converted: convert it first")
    found, expected = type(teacher).__name__, student.family.model_class
    if found != expected:
        raise RankingError(*name, f" is a {found}: give the {expected} that the model was converted from")
    found, expected = _sizes(teacher), _sizes(student)
    if found != expected:
        raise RankingError(*name, f" ({found}) is not the model that was converted ({expected})")
    for what, of in (
        ("device", lambda model: model.device),
        ("dtype", lambda model: model.dtype),
        ("attn_implementation", lambda model: model.config._attn_implementation),
    ):
        if of(teacher) != of(student):
            raise RankingError(*name, f" has {what} {of(teacher)}, the converted model {of(student)}: load both alike")


def _sizes(model: Any) -> str:
    family = family_of(model)
    attention: Any = family.attention_of(family.blocks(model)[0])
    shape = attention.shape if isinstance(attention, FastWeightsAttention) else family.shape(attention, model.config)
    return f"{sizes_of(model)}, {shape.heads} heads of {shape.head_dim}, {shape.kv_heads} for keys"


def hybrid_from(
    student_folder: str | os.PathLike,
    attention_layers: Collection[int],
    output: str | os.PathLike,
    teacher: str | None = None,
) -> None:
    """Restore layers of a converted model to the attention of its base, and save the hybrid.

    The other weights are those of the converted model, as trained.

    Args:
        student_folder: Folder of the converted model.
        attention_layers: Indices of the layers that are attention in the hybrid. Some may be attention already.
        output: New folder for the hybrid and its tokenizer.
        teacher: Hub id or folder of the base; by default the model that the student was converted from.

    Raises:
        RankingError: If the student is not converted, a layer does not exist, or no layer would stay converted.
        TeacherError: If the base cannot be loaded or does not fit.
    """
    with new_model_folder(output, source=student_folder) as folder:
        student, base = load_pair(student_folder, teacher)
        with restored(student, base, _to_restore(student, attention_layers)):
            student.save_pretrained(folder)
        tokenizer = load_tokenizer(student_folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def _to_restore(student: Any, attention_layers: Collection[int]) -> list[int]:
    count, converted = len(student.family.blocks(student)), converted_layers(student)
    beyond = sorted(set(attention_layers) - set(range(count)))
    if beyond:
        raise RankingError(f"layers {beyond} do not exist: the model has {count}, numbered 0 to {count - 1}")
    if not set(converted) - set(attention_layers):
        raise RankingError("with all layers as attention nothing is left converted: that is the base model itself")
    return sorted(set(attention_layers) & set(converted))
