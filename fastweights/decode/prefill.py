"""Prefill: a prompt is fed to the model in chunks.

Shapes: ids [T]   logits [1,V]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.modes import evaluating
from fastweights.utils.progress import track

PREFILL_CHUNK = 1024
# A progress bar is shown for prompts of more chunks than this.
MIN_CHUNKS_SHOWN = 8


class PromptReader:
    """Feeds a prompt to the model, one chunk at a time.

    Where chunks end depends on the prompt alone, so its state does too, whatever is computed between two chunks.

    Args:
        model: A converted model.
        ids: Token ids [T].
        state: The state before the prompt, which is advanced in place; a new one by default.
        prefill_chunk: Tokens of a chunk.
        borders: Counts of tokens after which a chunk ends in any case.
        logits: The logits [1,V] before the prompt, if known: those of an empty prompt.
        progress: Show a progress bar for long prompts.
    """

    def __init__(
        self,
        model: Any,
        ids: Tensor,
        state: FastWeightsCache | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        borders: Sequence[int] = (),
        logits: Tensor | None = None,
        progress: bool = False,
    ) -> None:
        self.model = model
        self.state = FastWeightsCache(model.config) if state is None else state
        self.logits = logits
        self.read, self.left = 0, len(ids)
        ends = sorted({*range(prefill_chunk, len(ids), prefill_chunk), *borders} - {0, len(ids)})
        chunks = ids.tensor_split(ends) if len(ids) else ()
        self.sizes = deque(map(len, chunks))
        shown = progress and len(chunks) > MIN_CHUNKS_SHOWN
        self._chunks: Iterator[Tensor] = iter(track(chunks, "prefill") if shown else chunks)

    @torch.no_grad()
    def read_chunk(self) -> None:
        """Advance the state past the next chunk."""
        chunk = next(self._chunks)
        with evaluating(self.model):
            out = self.model(chunk[None].to(self.model.device), past_key_values=self.state, logits_to_keep=1)
        self.logits = out.logits[:, -1]
        self.sizes.popleft()
        self.read, self.left = self.read + len(chunk), self.left - len(chunk)
        if not self.left:
            next(self._chunks, None)  # ends the progress bar


def prefill(
    model: Any,
    ids: Tensor,
    state: FastWeightsCache | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: bool = False,
) -> tuple[Tensor, FastWeightsCache]:
    """Feed a prompt to the model in chunks, in eval mode.

    Memory is that of one chunk, however long the prompt, except for layers that are still attention.

    Args:
        model: A converted model.
        ids: Token ids [T], at least one.
        state: The state before the prompt, which is advanced in place; a new one by default.
        prefill_chunk: Tokens of a chunk.
        progress: Show a progress bar for long prompts.

    Returns:
        The logits [1,V] after the prompt, and the state.
    """
    reader = PromptReader(model, ids, state, prefill_chunk, progress=progress)
    while reader.left:
        reader.read_chunk()
    assert reader.logits is not None
    return reader.logits, reader.state
