"""The decode engine: generates sequences with a converted model at constant time and memory per token.

Shapes: a prompt [T]   tokens and positions of the slots [B]   logits [B,V]
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastweights.config import ConfigError, is_whole
from fastweights.decode.model import ForwardDecodeModel, UnsupportedModel, make_decode_model
from fastweights.decode.sampler import GREEDY, Sampler, SamplerMode
from fastweights.decode.sampling import Sampling
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.modes import evaluating
from fastweights.modeling.positions import check_length
from fastweights.ops.device import unsupported_reason
from fastweights.utils.errors import Argument, FastWeightsError
from fastweights.utils.progress import track

PREFILL_CHUNK = 1024
# A progress bar is shown for prompts of more chunks than this.
MIN_CHUNKS_SHOWN = 8
WARM_UP_STEPS = 3


class EngineBusy(FastWeightsError):
    """An engine was called while it generates: by another thread, or by its own `on_token`."""


class GenerationError(FastWeightsError):
    """A model that cannot generate: its logits are NaN, or transformers refuses its generation_config."""


def check_no_nan(logits: Tensor, new_tokens: int) -> None:
    """Refuse logits that contain NaN, from which no token can be chosen.

    Raises:
        GenerationError: names the place in the sequence.
    """
    if bool(logits.isnan().any()):
        raise GenerationError(
            f"the model's logits are NaN after {new_tokens} new tokens: its weights or its state contain NaN, or it "
            "overflows in this dtype; copy or train the model again, or load it in float32"
        )


def prefill(
    model: Any,
    ids: Tensor,
    state: FastWeightsCache | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: bool = False,
) -> tuple[Tensor, FastWeightsCache]:
    """Feed a prompt to the model in chunks.

    Memory is that of one chunk, however long the prompt, except for layers that are still attention.

    Args:
        model: A converted model.
        ids: Token ids [T].
        state: The state before the prompt, which is advanced in place; a new one by default.
        prefill_chunk: Tokens of a chunk.
        progress: Show a progress bar for long prompts.

    Returns:
        The logits [1,V] after the prompt, and the state.
    """
    state = FastWeightsCache(model.config) if state is None else state
    chunks = ids[None].split(prefill_chunk, dim=1)
    shown = progress and len(chunks) > MIN_CHUNKS_SHOWN
    with torch.no_grad():
        for chunk in track(chunks, "prefill", enabled=shown):
            out = model(chunk.to(model.device), past_key_values=state, logits_to_keep=1)
    return out.logits[:, -1], state


@dataclass
class _Sequence:
    """A sequence to generate: prompt [T], and the new tokens so far."""

    prompt: Tensor
    max_new_tokens: int
    sampling: Sampling
    seed: int
    state: FastWeightsCache | None
    new_tokens: list[int] = field(default_factory=list)


class Engine:
    """Generate many sequences with a converted model, `batch_size` at a time.

    Each sequence has a slot. When it ends, the next prompt takes the slot while the other sequences continue, so
    nothing is padded. A step, including sampling, runs on the device with tensors at fixed addresses. The weights are
    packed once: make a new engine after changing the model. An engine serves one
    caller at a time.

    Args:
        model: A converted model.
        batch_size: Number of slots.
        graph: Whether to run a step as a CUDA graph; by default on a GPU.
        prefill_chunk: Tokens of a prompt that are fed to the model at once.
        kernels: Whether to use the Triton kernels; by default if they are supported.
        max_length: Length of the longest sequence in tokens, prompt included. Required if some layers remain
            attention: each slot then reserves keys and values for this many tokens.

    Raises:
        ConfigError: The model is not converted, or an argument is wrong or cannot be used here.
        UnsupportedModel: Some layers remain attention, and the engine does not support such a model.
    """

    def __init__(
        self,
        model: Any,
        batch_size: int = 1,
        *,
        graph: bool | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        kernels: bool | None = None,
        max_length: int | None = None,
    ) -> None:
        _check_at_least_one("batch_size", batch_size)
        _check_at_least_one("prefill_chunk", prefill_chunk)
        if max_length is not None:
            _check_at_least_one("max_length", max_length)
        _check_model(model)
        _check_kernels(model, kernels)
        attention_layers = ", ".join(map(str, FastWeightsCache(model.config).attention_layers))
        if attention_layers and max_length is None:
            raise ConfigError(
                f"layers {attention_layers} are still attention and store the keys and values of every token: give ",
                Argument("max_length"),
                ", the number of tokens of the longest sequence, or use model.generate",
            )
        self._lock = threading.Lock()
        self.max_length = max_length if attention_layers else None
        self.model, self.prefill_chunk, self.device = model, prefill_chunk, model.device
        self.on_gpu = self.device.type == "cuda"
        # An engine made in inference mode can also be used outside of it, so its tensors must be ordinary ones.
        with torch.inference_mode(False), evaluating(model):
            self.decoder = make_decode_model(model, batch_size, kernels, self.max_length)
        if attention_layers and isinstance(self.decoder, ForwardDecodeModel):
            raise UnsupportedModel(
                f"layers {attention_layers} are still attention, and the engine cannot decode this model: "
                f"{self.decoder.unsupported_reason}; use model.generate"
            )
        can_capture = self.on_gpu and self.decoder.static
        if graph and not can_capture:
            raise ConfigError(Argument("graph"), "=True needs a CUDA device and a supported model; leave it out")
        self.graphs: dict[SamplerMode, torch.cuda.CUDAGraph] | None = {} if can_capture and graph is not False else None
        with torch.inference_mode(False):
            self.sampler = Sampler(batch_size, model.config.get_text_config().vocab_size, self.device)
            self.host_tokens = torch.zeros(batch_size, dtype=torch.long, pin_memory=self.on_gpu)
            self.host_scores = torch.zeros(batch_size, pin_memory=self.on_gpu)

    def generate(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        max_new_tokens: int | Sequence[int] = 100,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop_tokens: int | Sequence[int] | None = None,
        on_token: Callable[[int, int], Any] | None = None,
        states: Sequence[FastWeightsCache | None] | None = None,
        progress: bool = False,
    ) -> list[list[int]]:
        """Generate the continuation of each prompt.

        The computation uses the model's dtype; autocast has no effect.

        Args:
            prompts: Token ids of each prompt [T], with T >= 1.
            max_new_tokens: Number of tokens to generate unless a stop token comes first; one for all or one each.
            sampling: How tokens are chosen, one for all or one each; greedily by default. If one for all has a seed,
                prompt i uses seed + i.
            stop_tokens: Ids that end a sequence; by default the model's end-of-text tokens, () for none.
            on_token: Called as on_token(i, token) for each new token of prompt i.
            states: The state before each prompt, or None. Each is advanced past its prompt, in place.
            progress: Show a progress bar for long prompts.

        Returns:
            The new tokens of each prompt, including the stop token.

        Raises:
            ConfigError: An argument is wrong, or a sequence may become longer than `max_length`.
            GenerationError: Logits are NaN.
            ValueError: A sequence may become longer than the model's position table.
            EngineBusy: The engine is generating already. Call it from one thread at a time.
        """
        with self._exclusive():
            return self._generate(prompts, max_new_tokens, sampling, stop_tokens, on_token, states, progress)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The slots belong to one call at a time."""
        if not self._lock.acquire(blocking=False):
            raise EngineBusy(
                "the engine is generating already: call it from one thread at a time and not from on_token, or make "
                "an engine for each"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _generate(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] | None,
        stop_tokens: int | Sequence[int] | None,
        on_token: Callable[[int, int], Any] | None,
        states: Sequence[FastWeightsCache | None] | None,
        progress: bool,
    ) -> list[list[int]]:
        # On a GPU the next step starts before the tokens of the last one are read on the host. So a sequence that ends
        # with a stop token has been decoded one step further than needed; its slot is overwritten anyway.
        sequences = self._sequences(prompts, max_new_tokens, sampling, states)
        stops = set(_end_of_text(self.model)) if stop_tokens is None else self._check_stop_tokens(stop_tokens)
        mode = SamplerMode.of([sequence.sampling for sequence in sequences])
        device = torch.cuda.device(self.device) if self.on_gpu else nullcontext()
        with evaluating(self.model), torch.autocast(self.device.type, enabled=False), device:
            self._prepare(mode)
            self._run(sequences, mode, stops, on_token or (lambda i, token: None), progress)
        return [sequence.new_tokens for sequence in sequences]

    def step(self, mode: SamplerMode = GREEDY) -> None:
        """Feed the token of every slot to the model and choose the next ones.

        Raises:
            EngineBusy: The engine is generating.
        """
        with self._exclusive():
            self._advance(mode)

    def _advance(self, mode: SamplerMode) -> None:
        graph = None if self.graphs is None else self.graphs.get(mode)
        if graph is not None:
            graph.replay()
        else:
            self._step(mode)

    @torch.inference_mode()
    def _step(self, mode: SamplerMode) -> None:
        logits = self.decoder.step()
        self.decoder.tokens.copy_(self.sampler.choose(logits, self.decoder.positions, mode))

    def _prepare(self, mode: SamplerMode) -> None:
        """Capture the step in a graph. Warm-up steps change all slots, so no slot may be in use."""
        self.sampler.prepare(mode)
        if self.graphs is None or mode in self.graphs:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._step(mode)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(mode)
        self.graphs[mode] = graph

    def _run(
        self,
        sequences: list[_Sequence],
        mode: SamplerMode,
        stops: set[int],
        on_token: Callable[[int, int], Any],
        progress: bool,
    ) -> None:
        """Generate all sequences; `owners` are the sequences that the slots belong to."""
        waiting = deque(range(len(sequences)))
        owners: list[int | None] = [None] * len(self.host_tokens)
        while True:
            for slot, owner in enumerate(owners):
                if owner is None and waiting:
                    owners[slot] = i = waiting.popleft()
                    self._start(slot, sequences[i], mode, progress)
            running = [sequences[i] for i in owners if i is not None]
            if not running:
                return
            copied = self._copy_tokens_to_host()
            ahead = self.on_gpu and any(len(s.new_tokens) + 1 < s.max_new_tokens for s in running)
            if ahead:
                self._advance(mode)
            for slot, (owner, token) in enumerate(zip(owners, self._read_tokens(copied), strict=True)):
                if owner is not None:
                    sequence = sequences[owner]
                    check_no_nan(self.host_scores[slot], len(sequence.new_tokens))
                    sequence.new_tokens.append(token)
                    on_token(owner, token)
                    if token in stops or len(sequence.new_tokens) == sequence.max_new_tokens:
                        owners[slot] = None
            if not ahead and any(owner is not None for owner in owners):
                self._advance(mode)

    def _start(self, slot: int, sequence: _Sequence, mode: SamplerMode, progress: bool) -> None:
        """Prefill a prompt, write its state to a slot and choose its first new token."""
        prompt = sequence.prompt.to(self.device)
        logits, state = prefill(self.model, prompt, sequence.state, self.prefill_chunk, progress)
        self.decoder.set_slot(slot, state)
        self.sampler.set_slot(slot, sequence.sampling, sequence.seed, prompt)
        row = slice(slot, slot + 1)
        self.decoder.tokens[row].copy_(self.sampler.choose(logits, self.decoder.positions[row], mode, row))

    def _copy_tokens_to_host(self) -> torch.cuda.Event | None:
        """Start to copy the tokens to the host. On a GPU, the event tells when they have arrived."""
        self.host_tokens.copy_(self.decoder.tokens, non_blocking=True)
        self.host_scores.copy_(self.sampler.scores, non_blocking=True)
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _read_tokens(self, copied: torch.cuda.Event | None) -> list[int]:
        if copied is not None:
            copied.synchronize()
        return self.host_tokens.tolist()

    # checks of what generate is given

    def _sequences(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] | None,
        states: Sequence[FastWeightsCache | None] | None,
    ) -> list[_Sequence]:
        count = len(prompts)
        sampling = Sampling() if sampling is None else sampling
        shared = isinstance(sampling, Sampling)
        limits, samplings, given = (_for_each(value, count) for value in (max_new_tokens, sampling, states))
        for limit in limits:
            _check_at_least_one("max_new_tokens", limit)
        _check_items("sampling", samplings, Sampling)
        _check_states([state for state in given if state is not None])
        for name, values in (("max_new_tokens", limits), ("sampling", samplings), ("states", given)):
            if len(values) != count:
                raise ConfigError(
                    Argument(name), f" must be one for all or one for each of {count} prompts, found {len(values)}"
                )
        return [
            _Sequence(
                self._check_prompt(i, prompt, limit, state),
                limit,
                own_sampling,
                _seed(own_sampling, offset=i if shared else 0),
                state,
            )
            for i, (prompt, limit, own_sampling, state) in enumerate(
                zip(prompts, limits, samplings, given, strict=True)
            )
        ]

    def _check_prompt(self, i: int, prompt: Any, limit: int, state: FastWeightsCache | None) -> Tensor:
        """The prompt as a tensor [T]."""
        name, vocab_size = (Argument("prompts"), f"[{i}]"), self.sampler.vocab_size
        if isinstance(prompt, str):
            raise ConfigError(*name, " is a string: give its tokens, tokenizer(text).input_ids")
        try:
            ids = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(*name, f" must be the tokens of one sequence, found {prompt!r}") from error
        if ids.ndim != 1 or not len(ids):
            found = list(ids.shape)
            raise ConfigError(*name, f" must be the tokens of one sequence, at least one, found shape {found}")
        if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise ConfigError(*name, f" must be tokens from 0 to {vocab_size - 1}")
        if state is not None and state.batch_size > 1:
            raise ConfigError(
                Argument("states"), f"[{i}] must be of one sequence, found {state.batch_size}: select a row of it"
            )
        self._check_length(i, ids, limit, state)
        return ids.long()

    def _check_length(self, i: int, ids: Tensor, limit: int, state: FastWeightsCache | None) -> None:
        seen = 0 if state is None or state.lengths is None else int(state.lengths[0])
        length = seen + len(ids) + limit - 1
        check_length(self.model, length)
        if self.max_length is not None and length > self.max_length:
            raise ConfigError(
                Argument("prompts"),
                f"[{i}] may grow to {length} tokens, and ",
                Argument("max_length"),
                f" is {self.max_length}",
            )
        if self.max_length is not None and state is not None:
            state.mask_for(ids[None])  # raises for a state that has seen padding

    def _check_stop_tokens(self, stop_tokens: Any) -> set[int]:
        given: Any = stop_tokens.tolist() if isinstance(stop_tokens, Tensor) else stop_tokens
        tokens = [given] if is_whole(given) or isinstance(given, str) else list(given)
        for token in tokens:
            if not is_whole(token) or not 0 <= token < self.sampler.vocab_size:
                last = self.sampler.vocab_size - 1
                raise ConfigError(Argument("stop_tokens"), f" must be from 0 to {last}, found {token!r}")
        return {int(token) for token in tokens}


def _for_each(value: Any, count: int) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


def _seed(sampling: Sampling, offset: int) -> int:
    if sampling.seed is not None:
        return sampling.seed + offset
    return 0 if sampling.greedy else int(torch.randint(2**62, ()))


def _check_at_least_one(name: str, value: Any) -> None:
    if not is_whole(value):
        raise ConfigError(Argument(name), f" must be a whole number, found {value!r}")
    if value < 1:
        raise ConfigError(Argument(name), f" must be at least 1, found {value}")


def _check_items(name: str, values: Sequence[Any], kind: type) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise ConfigError(Argument(name), f" must hold {kind.__name__}s, found {value!r}")


def _check_states(states: Sequence[Any]) -> None:
    _check_items("states", states, FastWeightsCache)
    if len({id(state) for state in states}) < len(states):
        raise ConfigError(
            Argument("states"), " has one state for two prompts, which would advance it twice: states=[s.fork(), ...]"
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, FastWeightsMixin):
        raise ConfigError(
            f"the engine decodes converted models, found a {type(model).__name__}: convert it, or use its own generate"
        )


def _check_kernels(model: Any, kernels: bool | None) -> None:
    reason = unsupported_reason(model.device, model.dtype, interpreter=True) if kernels else None
    if reason is not None:
        raise ConfigError(Argument("kernels"), f"=True cannot be used here: {reason}; leave it out")


def _end_of_text(model: Any) -> list[int]:
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
