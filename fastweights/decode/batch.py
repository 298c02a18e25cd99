"""Continuous batching: sequences join and leave a batch between two steps.

Each sequence has a slot. A long prompt is read in chunks, so that the other sequences continue in the meantime.

Shapes: tokens of the slots [B]   logits [B,V]; of one sequence [1,V], in a Snapshot [V]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fastweights.decode.device_sampler import GREEDY, Sampler, SamplerMode
from fastweights.decode.model import DecodeModel, ForwardDecodeModel
from fastweights.decode.prefill import PromptReader
from fastweights.decode.sampling import Sampling
from fastweights.modeling.cache import FastWeightsCache
from fastweights.utils.errors import FastWeightsError

WARM_UP_STEPS = 3

FinishReason = Literal["stop", "length", "deadline", "cancelled", "shutdown", "error"]


class GenerationError(FastWeightsError):
    """A model that cannot generate: its logits are NaN, or transformers refuses its generation_config."""


def nan_error(new_tokens: int) -> GenerationError:
    """The error for logits that contain NaN, from which no token can be chosen."""
    return GenerationError(
        f"the model's logits are NaN after {new_tokens} new tokens: its weights or its state contain NaN, or it "
        "overflows in this dtype; copy or train the model again, or load it in float32"
    )


class Snapshot(NamedTuple):
    """A place in a text from which generation can continue. It is never changed: continue with `state.fork()`.

    Attributes:
        state: the state of one sequence after all tokens of the text.
        logits: those of the next token, [V] float32 on the CPU. None where the state came from a file without them: at
            least one token must be read before the next one can be sampled.
    """

    state: FastWeightsCache
    logits: Tensor | None

    def to(self, device: torch.device) -> Snapshot:
        """This snapshot with its state on a device: itself if it is there, else a copy."""
        state = self.state.to(device)
        return self if state is self.state else self._replace(state=state)


@dataclass(frozen=True, slots=True)
class Border:
    """The first `count` tokens of a prompt have been read."""

    count: int
    snapshot: Snapshot


class Token(NamedTuple):
    """A new token. Log-probabilities are those of the model's logits: before penalty, temperature, top_k and top_p."""

    id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    """The likeliest tokens and their log-probabilities, the likeliest first."""


class End(NamedTuple):
    """A sequence has ended."""

    finish_reason: FinishReason
    snapshot: Snapshot | None = None
    error: Exception | None = None


Event = Border | Token | End


@dataclass(eq=False)
class Generation:
    """A sequence to generate, and its new tokens so far.

    Attributes:
        prompt: Token ids [T]. It may be empty if `logits` are given.
        max_new_tokens: Number of new tokens unless a stop token comes first. 0: the prompt is only read.
        sampling: How tokens are chosen.
        seed: Seed of the random numbers.
        stops: Tokens that end the sequence.
        state: The state before the prompt, which is advanced past the prompt in place. None: a new one.
        logits: The logits [1,V] before the prompt, for an empty one.
        top_logprobs: How many of the likeliest tokens are returned with log-probabilities. None: no log-probabilities.
        borders: Counts of the prompt's tokens after which a snapshot is returned.
        final_snapshot: Whether a snapshot after the last new token is returned with the end.
        progress: Show a progress bar for a long prompt.
    """

    prompt: Tensor
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stops: Collection[int]
    state: FastWeightsCache | None = None
    logits: Tensor | None = None
    top_logprobs: int | None = None
    borders: Sequence[int] = ()
    final_snapshot: bool = False
    progress: bool = False
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Batch:
    """The sequences that a decode model generates, one in each slot. One thread may use it at a time.

    Args:
        model: The converted model, which reads prompts.
        decoder: The same model as a decode model, which generates.
        sampler: Chooses the tokens of all slots.
        prefill_chunk: Tokens of prompts that are read at most between two steps.
        graph: Whether steps run as CUDA graphs.
    """

    def __init__(
        self,
        model: Any,
        decoder: DecodeModel | ForwardDecodeModel,
        sampler: Sampler,
        prefill_chunk: int,
        graph: bool = False,
    ) -> None:
        self.model, self.decoder, self.sampler, self.prefill_chunk = model, decoder, sampler, prefill_chunk
        self.device = model.device
        self.on_gpu = self.device.type == "cuda"
        self.overlaps = self.on_gpu  # whether a step starts before the tokens of the last one are read on the host
        self.graphs: dict[SamplerMode, torch.cuda.CUDAGraph] | None = {} if graph else None
        self.slots: list[Generation | None] = [None] * len(decoder.tokens)
        self.readers: dict[Generation, PromptReader] = {}  # of prompts that are not read yet, the oldest first
        self.steps = self.read_tokens = self.generated_tokens = 0
        self._logits: Tensor | None = None  # of the last step
        self._modes: Sequence[SamplerMode] = (GREEDY,)
        self._mode = GREEDY
        self._ending: dict[int, FinishReason] = {}  # slots whose last token must be fed to the model for a snapshot
        self._ahead = False  # whether the tokens that were read last have been fed to the model
        self._oldest_first = False
        self._events: list[tuple[Generation, Event]] = []
        self._host_tokens, self._host_scores = (
            torch.zeros(len(self.slots), dtype=dtype, pin_memory=self.on_gpu) for dtype in (torch.long, torch.float32)
        )

    # joining and leaving

    @property
    def free(self) -> int:
        """How many sequences can be added."""
        return self.slots.count(None) - len(self.readers)

    @property
    def busy(self) -> bool:
        """Whether there are sequences, or events that `step` has not returned yet."""
        return self.free < len(self.slots) or bool(self._events)

    def prepare(self, modes: Sequence[SamplerMode]) -> None:
        """Say what the sequences to come may need from the sampler, the least first, and capture the graphs for it.

        Warm-up steps change all slots, so no slot may be in use.
        """
        assert not self.busy
        self._modes = modes
        with self._computing():
            for mode in modes:
                self.sampler.prepare(mode)
                self._capture(mode)

    def add(self, generation: Generation) -> None:
        """Add a sequence. There must be a free slot."""
        assert self.free
        self.readers[generation] = PromptReader(
            self.model,
            generation.prompt,
            generation.state,
            self.prefill_chunk,
            generation.borders,
            generation.logits,
            generation.progress,
        )

    def remove(self, generation: Generation) -> None:
        """Remove a sequence at once. One that has ended is ignored."""
        if self.readers.pop(generation, None) is None and generation in self.slots:
            self._release(self.slots.index(generation))

    def finish(self, generation: Generation, reason: FinishReason) -> None:
        """End a sequence early. Its end, with the snapshot after the last token if it wants one, is an event of the
        next step."""
        if generation in self.slots and generation.final_snapshot:
            self._ending.setdefault(self.slots.index(generation), reason)
        elif generation in self.slots or generation in self.readers:
            self.remove(generation)
            self._emit_end(generation, End(reason))

    def clear(self) -> None:
        """Remove all sequences."""
        self.readers.clear()
        self._events.clear()
        for slot in range(len(self.slots)):
            self._release(slot)

    def _release(self, slot: int) -> None:
        self.slots[slot] = None
        self._ending.pop(slot, None)
        self._choose_mode()

    def _choose_mode(self) -> None:
        needed = SamplerMode.of([generation.sampling for generation in self.slots if generation is not None])
        self._mode = next(mode for mode in self._modes if mode.covers(needed))

    # a step

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """The model's own dtype and device. Entered for each step, since a stream's caller runs between the steps."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            if self.on_gpu:
                stack.enter_context(torch.cuda.device(self.device))
            yield

    def step(self) -> list[tuple[Generation, Event]]:
        """Generate one token for each sequence whose prompt has been read, and read more of the other prompts.

        Returns:
            What happened to each sequence, in order. An error of one sequence is its `End`, and the others continue.
        """
        # On a GPU the next step starts before the tokens of the last one are read on the host. So a sequence that ends
        # with a stop token has been decoded one step further than needed; its slot is overwritten anyway.
        with self._computing():
            if not self._ahead and self._writes:
                self.advance(self._mode, self._used)
            self._end_after_last_token()
            self._read_prompts()
            self._ahead = False
            if self._writes:
                self._read_new_tokens()
                if self._ahead:
                    self._end_after_last_token()
        events, self._events = self._events, []
        return events

    @property
    def _writes(self) -> bool:
        return any(generation is not None for generation in self.slots)

    @property
    def _used(self) -> list[int]:
        """The slots that have a sequence."""
        return [slot for slot, generation in enumerate(self.slots) if generation is not None]

    def _emit_end(self, generation: Generation, end: End) -> None:
        generation.finish_reason = end.finish_reason
        self._events.append((generation, end))

    def _fail(self, generation: Generation, error: Exception) -> None:
        self.remove(generation)
        self._emit_end(generation, End("error", error=error))

    # prompts

    def _read_prompts(self) -> None:
        """Read at most `prefill_chunk` tokens of prompts, the one with the fewest tokens left first.

        So a short prompt does not wait for a long one. In every second step the oldest one is the first, so that a long
        one does not wait forever for short ones.
        """
        budget, oldest_first = self.prefill_chunk, self._oldest_first
        while self.readers:
            readers = self.readers.items()
            generation, reader = next(iter(readers)) if oldest_first else min(readers, key=lambda item: item[1].left)
            size = reader.sizes[0] if reader.sizes else 0
            if size > budget:
                break
            budget, oldest_first = budget - size, False
            try:
                self._read_chunk(generation, reader)
            except Exception as error:
                self._fail(generation, error)
        self._oldest_first = not self._oldest_first

    def _read_chunk(self, generation: Generation, reader: PromptReader) -> None:
        if reader.left:
            before = reader.read
            reader.read_chunk()
            self.read_tokens += reader.read - before
        if reader.read in generation.borders:
            # A state that is advanced no further needs no copy: `_place` copies it to the slot.
            state = reader.state.fork() if reader.left else reader.state
            self._events.append((generation, Border(reader.read, self._snapshot(state, reader.logits))))
        if reader.left:
            return
        if generation.max_new_tokens:
            self._place(generation, reader)
        else:
            snapshot = self._snapshot(reader.state, reader.logits) if generation.final_snapshot else None
            del self.readers[generation]
            self._emit_end(generation, End("length", snapshot))

    def _place(self, generation: Generation, reader: PromptReader) -> None:
        """Write the state after a prompt to a free slot and choose the first new token."""
        slot = self.slots.index(None)
        generation.logits = logits = reader.logits.to(self.device)  # type: ignore[union-attr]
        self.decoder.set_slot(slot, reader.state)
        self.sampler.set_slot(slot, generation.sampling, generation.seed, generation.prompt.to(self.device))
        row, mode = slice(slot, slot + 1), SamplerMode.of([generation.sampling])
        self.decoder.tokens[row].copy_(self.sampler.choose(logits, self.decoder.positions[row], mode, row))
        del self.readers[generation]
        self.slots[slot] = generation
        self._choose_mode()

    def _snapshot(self, state: FastWeightsCache, logits: Tensor | None, new_tokens: int = 0) -> Snapshot:
        assert logits is not None
        row = logits[0].to("cpu", torch.float32, copy=True)
        if bool(row.isnan().any()):
            raise nan_error(new_tokens)
        return Snapshot(state, row)

    # new tokens

    def _read_new_tokens(self) -> None:
        logprobs = self._logprobs()
        copied = self._copy_tokens_to_host()
        self._ahead = self.overlaps and any(
            generation.final_snapshot or len(generation.new_tokens) + 1 < generation.max_new_tokens
            for generation in self.slots
            if generation is not None
        )
        if self._ahead:
            self.advance(self._mode, self._used)
        if copied is not None:
            copied.synchronize()
        tokens, scores = self._host_tokens.tolist(), self._host_scores.tolist()
        for slot, generation in enumerate(self.slots):
            if generation is None:
                continue
            token, score = tokens[slot], scores[slot]
            generation.logits = None
            if score != score:
                self._fail(generation, nan_error(len(generation.new_tokens)))
                continue
            generation.new_tokens.append(token)
            self.generated_tokens += 1
            event = Token(token) if slot not in logprobs else logprobs[slot].token(token, generation.top_logprobs)
            self._events.append((generation, event))
            if token in generation.stops or len(generation.new_tokens) == generation.max_new_tokens:
                self._end(slot, generation, "stop" if token in generation.stops else "length")

    def _end(self, slot: int, generation: Generation, reason: FinishReason) -> None:
        if generation.final_snapshot:
            generation.finish_reason = reason
            self._ending[slot] = reason
        else:
            self._release(slot)
            self._emit_end(generation, End(reason))

    def _end_after_last_token(self) -> None:
        """End the sequences whose last token has now been fed to the model, with a snapshot."""
        for slot, reason in list(self._ending.items()):
            generation = self.slots[slot]
            assert generation is not None and self._logits is not None
            tokens = generation.new_tokens
            try:
                state = self.decoder.get_slot(slot, tokens)
                snapshot = self._snapshot(state, self._logits[slot : slot + 1], len(tokens))
            except Exception as error:
                self._fail(generation, error)
            else:
                self._release(slot)
                self._emit_end(generation, End(reason, snapshot))

    def advance(self, mode: SamplerMode, slots: Sequence[int] | None = None) -> None:
        """Feed the tokens of some slots to the model and choose the next ones; of all slots by default.

        A CUDA graph, and a step as torch operators, compute all slots in any case.
        """
        self.steps += 1
        graph = None if self.graphs is None else self.graphs.get(mode)
        if graph is not None:
            graph.replay()
        else:
            self._step(mode, slots)

    @torch.inference_mode()
    def _step(self, mode: SamplerMode, slots: Sequence[int] | None = None) -> None:
        self._logits = self.decoder.step(slots)
        rows = slice(len(self.slots) if slots is None else slots[-1] + 1)
        logits, positions = self._logits[rows], self.decoder.positions[rows]
        self.decoder.tokens[rows].copy_(self.sampler.choose(logits, positions, mode, rows))

    def _capture(self, mode: SamplerMode) -> None:
        """Capture a step in a graph."""
        if self.graphs is None or mode in self.graphs:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._step(mode)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Graphs share their memory: one runs at a time, and what it leaves is in tensors outside of it.
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._step(mode)
        self.graphs[mode] = graph

    def _copy_tokens_to_host(self) -> torch.cuda.Event | None:
        """Start to copy the tokens to the host. On a GPU, the event tells when they have arrived."""
        self._host_tokens.copy_(self.decoder.tokens, non_blocking=True)
        self._host_scores.copy_(self.sampler.scores, non_blocking=True)
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _logprobs(self) -> dict[int, _Logprobs]:
        """The log-probabilities of the new tokens, for the slots that want them."""
        wanted = {
            slot: generation
            for slot, generation in enumerate(self.slots)
            if generation is not None and generation.top_logprobs is not None
        }
        if not wanted:
            return {}
        rows = [
            self._logits[slot] if generation.logits is None else generation.logits[0]  # type: ignore[index]
            for slot, generation in wanted.items()
        ]
        logprobs = torch.stack(rows).float().log_softmax(-1)
        chosen = logprobs.gather(1, self.decoder.tokens[list(wanted), None])
        count = max(generation.top_logprobs or 0 for generation in wanted.values())
        likeliest = logprobs.topk(min(count, logprobs.shape[1]))
        # The copies are complete when those of the tokens are, which come after them.
        host = [x.to("cpu", non_blocking=True) for x in (chosen[:, 0], likeliest.indices, likeliest.values)]
        return {slot: _Logprobs(*(x[i] for x in host)) for i, slot in enumerate(wanted)}


class _Logprobs(NamedTuple):
    """The log-probabilities of a new token [] and of the n likeliest tokens [n], with their ids [n], on the host."""

    chosen: Tensor
    ids: Tensor
    values: Tensor

    def token(self, token: int, count: int | None) -> Token:
        top = list(zip(self.ids[:count].tolist(), self.values[:count].tolist(), strict=True))
        return Token(token, float(self.chosen), top)
