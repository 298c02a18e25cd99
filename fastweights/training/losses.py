"""What training minimizes. Each loss is a sum over this process's rows, so that rows may be split over micro-batches
and processes in any way; the caller divides by the count of the whole batch.

Shapes: input_ids, position_ids, labels [B,T]   x, attention outputs [B,T,D]   y [B,T,H*d]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fastweights.data.batches import IGNORED
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.document_attention import documents_mask, uses_document_kernels
from fastweights.modeling.families import family_of
from fastweights.modeling.layer import FastWeightsAttention, SequenceInfo, converted_layers
from fastweights.modeling.packing import checked_inputs, document_mask, document_starts
from fastweights.training.chunked_loss import LossConfig, head_loss, head_of, without_head
from fastweights.training.recipe import Stage

Batch = dict[str, Tensor]


class CapturedAttention(NamedTuple):
    """One call of a teacher's attention: its inputs and its output, [B,T,D]."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor


def run_model(model: Any, batch: Batch, **options: Any) -> Any:
    """Run a model with the documents of each row separated.

    A batch without positions has rows of one document each (see `without_plain_positions`): attention then needs no
    mask. A model with `use_document_kernels` never needs one.
    """
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False, **options}
    positions, converted = batch.get("position_ids"), isinstance(model, FastWeightsMixin)
    if positions is not None:
        inputs["position_ids"] = positions
    if not converted and uses_document_kernels(model):
        inputs["attention_mask"] = documents_mask(batch["input_ids"], sequence_info(batch).reset)
        if positions is None:  # OPT would count them with the mask
            inputs["position_ids"] = torch.arange(batch["input_ids"].shape[1], device=batch["input_ids"].device)[None]
    elif positions is not None and not converted and not family_of(model).masks_documents:
        inputs["attention_mask"] = document_mask(model, positions)
    with checked_inputs(), _without_padding_check(model.config):
        return model(**inputs)


@contextmanager
def _without_padding_check(config: Any) -> Iterator[None]:
    """In its block transformers does not search the tokens for padding, to warn about it: the host would wait."""
    padding, config.pad_token_id = getattr(config, "pad_token_id", None), None
    try:
        yield
    finally:
        config.pad_token_id = padding


def without_plain_positions(batch: Batch) -> Batch:
    """The batch without its positions if every row is one document. To be called while it is in the host's memory:
    reading it from a GPU would make the host wait."""
    if "position_ids" not in batch or bool(document_starts(batch["position_ids"]).any()):
        return batch
    return {name: rows for name, rows in batch.items() if name != "position_ids"}


def sequence_info(batch: Batch) -> SequenceInfo:
    """What layers must know about a batch: where its documents start."""
    positions = batch.get("position_ids")
    return SequenceInfo.packed(None if positions is None else document_starts(positions))


def hidden_of(model: Any, batch: Batch) -> Tensor:
    """The inputs of the output layer, [B*T,D]."""
    with without_head(model) as seen:
        run_model(model, batch)
    return seen[0].flatten(0, 1)


def next_tokens(batch: Batch) -> Tensor:
    """The label of each token's successor, [B*T]."""
    return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()


def next_token_loss(model: Any, batch: Batch, config: LossConfig | None = None) -> Tensor:
    """Sum of the cross-entropy over the tokens that have a label."""
    return head_loss(head_of(model), hidden_of(model, batch), next_tokens(batch), config or LossConfig())


class StageLoss(nn.Module):
    """A student with the loss of one stage. The teacher is no submodule: it is neither trained, sharded nor saved."""

    def __init__(
        self,
        student: Any,
        teacher: Any,
        stage: Stage,
        recompute: bool = False,
        compiled: bool = False,
        memory_share: float = 1.0,
    ) -> None:
        super().__init__()
        self.student, self.stage, self.recompute = student, stage, recompute
        self.text_config = LossConfig(compiled=compiled, memory_share=memory_share)
        self.stage_config = replace(
            self.text_config, cross_entropy=stage.cross_entropy, temperature=stage.temperature, top_k=stage.top_k
        )
        self._teacher = [teacher]

    @property
    def teacher(self) -> Any:
        """The teacher. It is in a list, so that it is no submodule and its parameters are not trained."""
        return self._teacher[0]

    def forward(self, batch: Batch, score: bool = False) -> Tensor:
        """The loss of the stage. With `score` it is the cross-entropy in every stage: a sharded model must be called as
        a whole, also to validate."""
        if self.stage.loss == "transfer" and not score:
            return self._transfer(batch)
        if self.stage.loss == "finetune" or score:
            return next_token_loss(self.student, batch, self.text_config)
        with torch.no_grad(), self._block_outputs(self.teacher) as expected:
            teacher_hidden = hidden_of(self.teacher, batch)
        with self._block_outputs(self.student) as outputs:
            hidden = hidden_of(self.student, batch)
        labels = next_tokens(batch)
        loss = head_loss(
            head_of(self.student), hidden, labels, self.stage_config, head_of(self.teacher), teacher_hidden
        )
        errors = [_error(*pair, labels) for pair in zip(outputs, expected, strict=True)]
        return loss + self.stage.hidden * torch.stack(errors).mean() if errors else loss

    @contextmanager
    def _block_outputs(self, model: Any) -> Iterator[list[Tensor]]:
        """Collect the output of each block, [B,T,D], where the stage compares them."""
        outputs: list[Tensor] = []

        def collect(_module: nn.Module, _arguments: Any, output: Any) -> None:
            outputs.append(output if isinstance(output, Tensor) else output[0])

        hooks = [block.register_forward_hook(collect) for block in family_of(model).blocks(model) if self.stage.hidden]
        try:
            yield outputs
        finally:
            for hook in hooks:
                hook.remove()

    def _transfer(self, batch: Batch) -> Tensor:
        """Each layer's squared error against the teacher's attention, relative to the squared norm of each row."""
        layers = converted_layers(self.student)
        captured, info = capture_attention(self.teacher, batch), sequence_info(batch)
        loss = torch.zeros((), device=batch["input_ids"].device)
        for index, layer in layers.items():
            output = layer_output(layer, captured[index], info, self.recompute).float()
            expected = captured[index].output.float()
            error = (output - expected).square().sum((1, 2)) / expected.square().sum((1, 2)).clamp(min=1e-12)
            loss = loss + error.sum() / len(layers)
        return loss


def _error(output: Tensor, expected: Tensor, labels: Tensor) -> Tensor:
    """Relative squared error of each token of [B,T,D], summed over the tokens that have a label."""
    error, norm = ((x.float().square().sum(-1)).flatten() for x in (output - expected, expected))
    return torch.where(labels != IGNORED, error / norm.clamp(min=1e-12), 0.0).sum()


@torch.no_grad()
def capture_attention(teacher: Any, batch: Batch) -> dict[int, CapturedAttention]:
    """Run the teacher and capture the inputs and the output of each attention layer."""
    family = family_of(teacher)
    captured: dict[int, CapturedAttention] = {}

    def capture(index: int) -> Any:
        def hook(_module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            captured[index] = CapturedAttention(arguments, keywords, output[0])

        return hook

    hooks = [
        family.attention_of(block).register_forward_hook(capture(index), with_kwargs=True)
        for index, block in enumerate(family.blocks(teacher))
    ]
    try:
        run_model(teacher, batch, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return captured


def layer_output(
    layer: FastWeightsAttention, captured: CapturedAttention, info: SequenceInfo, recompute: bool = False
) -> Tensor:
    """The output of a fast-weight layer, [B,T,D], for the inputs of the teacher's layer."""

    def run(*arguments: Any) -> Tensor:
        return layer(*arguments, **captured.keywords | {"fast_weights": info})[0]

    if recompute:
        return checkpoint(run, *captured.arguments, use_reentrant=False)
    return run(*captured.arguments)
