"""What training minimises. Each loss is a sum over this process's rows, so that rows may be split over micro-batches
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
from fastweights.modeling.families import family_of
from fastweights.modeling.layer import FastWeightsAttention, SequenceInfo
from fastweights.modeling.packing import document_mask, document_starts
from fastweights.training.chunked_loss import LossConfig, head_loss, head_of, without_head
from fastweights.training.recipe import Stage

Batch = dict[str, Tensor]


class CapturedAttention(NamedTuple):
    """One call of a teacher's attention: what went in, and what came out."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor


def converted_layers(model: Any) -> dict[int, FastWeightsAttention]:
    """The fast-weight layers of a model by number."""
    layers = {}
    for module in model.modules():
        if isinstance(module, FastWeightsAttention):
            layers[module.layer_idx] = module
    return layers


def run_model(model: Any, batch: Batch, **options: Any) -> Any:
    """Documents are kept apart. Without a border in the batch no positions are given: attention then needs no mask."""
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False, **options}
    if bool(document_starts(batch["position_ids"]).any()):
        inputs["position_ids"] = batch["position_ids"]
        if not isinstance(model, FastWeightsMixin) and not family_of(model).masks_documents:
            inputs["attention_mask"] = document_mask(model, batch["position_ids"])
    return model(**inputs)


def hidden_of(model: Any, batch: Batch) -> Tensor:
    """What the output layer is given, [B*T,D]."""
    with without_head(model) as seen:
        run_model(model, batch)
    return seen[0].flatten(0, 1)


def next_tokens(batch: Batch) -> Tensor:
    """The label of each token's successor, [B*T]."""
    return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()


def next_token_loss(model: Any, batch: Batch, aim: LossConfig | None = None) -> Tensor:
    """Sum of the cross-entropy over the tokens that have a label."""
    return head_loss(head_of(model), hidden_of(model, batch), next_tokens(batch), aim or LossConfig())


class StageLoss(nn.Module):
    """A student with the loss of one stage. The teacher is no part of it: it is neither trained, sharded nor saved."""

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
        self.text = LossConfig(compiled=compiled, memory_share=memory_share)
        self.aim = replace(
            self.text, cross_entropy=stage.cross_entropy, temperature=stage.temperature, top_k=stage.top_k
        )
        self._teacher = [teacher]

    @property
    def teacher(self) -> Any:
        return self._teacher[0]

    def forward(self, batch: Batch, score: bool = False) -> Tensor:
        """The stage's loss; with `score` the cross-entropy, whatever the stage (sharded models must be called as a
        whole)."""
        if self.stage.loss == "transfer" and not score:
            return self._transfer(batch)
        if self.stage.loss == "finetune" or score:
            return next_token_loss(self.student, batch, self.text)
        with torch.no_grad(), self._block_outputs(self.teacher) as wanted:
            taught = hidden_of(self.teacher, batch)
        with self._block_outputs(self.student) as found:
            hidden = hidden_of(self.student, batch)
        labels = next_tokens(batch)
        loss = head_loss(head_of(self.student), hidden, labels, self.aim, head_of(self.teacher), taught)
        errors = [_error(*pair, labels) for pair in zip(found, wanted, strict=True)]
        return loss + self.stage.hidden * torch.stack(errors).mean() if errors else loss

    @contextmanager
    def _block_outputs(self, model: Any) -> Iterator[list[Tensor]]:
        """What each block makes, [B,T,D], where that counts."""
        seen: list[Tensor] = []

        def note(_module: nn.Module, _arguments: Any, output: Any) -> None:
            seen.append(output if isinstance(output, Tensor) else output[0])

        hooks = [block.register_forward_hook(note) for block in family_of(model).blocks(model) if self.stage.hidden]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _transfer(self, batch: Batch) -> Tensor:
        """Each layer's squared error against the teacher's attention, in shares of each row's own size."""
        layers = converted_layers(self.student)
        heard = capture_attention(self.teacher, batch)
        loss = torch.zeros((), device=batch["input_ids"].device)
        for index, layer in layers.items():
            found = answer(layer, heard[index], batch, self.recompute).float()
            wanted = heard[index].output.float()
            error = (found - wanted).square().sum((1, 2)) / wanted.square().sum((1, 2)).clamp(min=1e-12)
            loss = loss + error.sum() / len(layers)
        return loss


def _error(found: Tensor, wanted: Tensor, labels: Tensor) -> Tensor:
    """Squared errors [B,T,D], each token's in shares of its own size, summed over the tokens that have a label."""
    off, size = ((x.float().square().sum(-1)).flatten() for x in (found - wanted, wanted))
    return torch.where(labels != IGNORED, off / size.clamp(min=1e-12), 0.0).sum()


@torch.no_grad()
def capture_attention(teacher: Any, batch: Batch) -> dict[int, CapturedAttention]:
    """Run the teacher and note what each attention layer was given and answered."""
    family = family_of(teacher)
    heard: dict[int, CapturedAttention] = {}

    def note(index: int) -> Any:
        def hook(_module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            heard[index] = CapturedAttention(arguments, keywords, output[0])

        return hook

    hooks = [
        family.attention_of(block).register_forward_hook(note(index), with_kwargs=True)
        for index, block in enumerate(family.blocks(teacher))
    ]
    try:
        run_model(teacher, batch, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return heard


def answer(layer: FastWeightsAttention, heard: CapturedAttention, batch: Batch, recompute: bool = False) -> Tensor:
    """What a fast-weight layer makes of the input that the teacher's layer was given."""
    starts = document_starts(batch["position_ids"])
    info = SequenceInfo(None, starts if bool(starts.any()) else None)

    def run(*arguments: Any) -> Tensor:
        return layer(*arguments, **heard.keywords | {"fast_weights": info})[0]

    if recompute:
        return checkpoint(run, *heard.arguments, use_reentrant=False)
    return run(*heard.arguments)
