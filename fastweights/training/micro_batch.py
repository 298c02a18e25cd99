"""How many sequences a process takes through the model at once, estimated from the memory that they need, and batches
cut into such parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.modeling.families import family_of
from fastweights.training.chunked_loss import CHUNK_SHARE
from fastweights.training.recipe import Recipe, Stage

# Bytes that the backward pass needs for one token, by layer and width. With gradient checkpointing a layer saves only
# its input and output, and one layer at a time is recomputed (with some room for the next).
ACTIVATION_BYTES, BOUNDARY_BYTES, RECOMPUTED_LAYERS = 100, 16, 2
# Bytes for one parameter: itself, its gradient, AdamW's two moments and the teacher's copy.
PARAMETER_BYTES = 20
# What all of it may take: a share of a GPU's memory, or so many bytes on a CPU.
MEMORY_SHARE, CPU_BYTES = 0.8, 2**32


def micro_batch_size(recipe: Recipe, stage: Stage, student: Any, device: torch.device, memory_share: float) -> int:
    """Sequences at once: the recipe's `micro_batch`, or what fits into memory. At least 1.

    Args:
        recipe: Its `micro_batch` and `gradient_checkpointing` count.
        stage: The stage, which may have a sequence length of its own.
        student: The model to train.
        device: Where it is trained.
        memory_share: Share of the GPU's memory that this run may use.
    """
    if recipe.micro_batch:
        return recipe.micro_batch
    token_bytes = _activation_bytes(student, recipe.gradient_checkpointing)
    return max(1, _free_bytes(student, device, memory_share) // (recipe.length_of(stage) * token_bytes))


def _free_bytes(student: Any, device: torch.device, memory_share: float) -> int:
    """Memory for activations: what the parameters and the loss's chunks of logits leave."""
    if device.type == "cpu":
        return CPU_BYTES
    total = memory_share * torch.cuda.get_device_properties(device).total_memory
    fixed = PARAMETER_BYTES * sum(p.numel() for p in student.parameters())
    return max(0, int((MEMORY_SHARE - CHUNK_SHARE) * total) - fixed)


def _activation_bytes(student: Any, gradient_checkpointing: bool) -> int:
    """Bytes that the backward pass needs for one token."""
    layers = len(family_of(student).blocks(student))
    per_width = layers * ACTIVATION_BYTES
    if gradient_checkpointing:
        per_width = RECOMPUTED_LAYERS * ACTIVATION_BYTES + layers * BOUNDARY_BYTES
    return student.config.hidden_size * per_width


def split(batch: dict[str, Tensor], rows: int) -> list[dict[str, Tensor]]:
    """The batch in parts of at most `rows` rows."""
    count = len(batch["input_ids"])
    return [{name: x[start : start + rows] for name, x in batch.items()} for start in range(0, count, rows)]
