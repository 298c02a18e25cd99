"""The decode engine: generates sequences with a converted model at constant time and memory per token.

Shapes: a prompt [T]   tokens and positions of the slots [B]   logits [B,V]
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.config import ConfigError, is_whole
from fastweights.decode.batch import Batch, End, FinishReason, Generation, Token
from fastweights.decode.device_sampler import GREEDY, Sampler, SamplerMode
from fastweights.decode.model import DecodeModel, ForwardDecodeModel, check_weights, make_decode_model
from fastweights.decode.packing import UnsupportedModel
from fastweights.decode.prefill import PREFILL_CHUNK
from fastweights.decode.sampling import Sampling
from fastweights.decode.text_decoder import TextDecoder
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.modes import evaluating
from fastweights.modeling.positions import check_length
from fastweights.ops.device import unsupported_reason
from fastweights.tokenization import prompt_tokens
from fastweights.utils.errors import Argument, FastWeightsError

# A prompt: its token ids [T], or its text.
Prompt = Tensor | Sequence[int] | str


class EngineBusy(FastWeightsError):
    """An engine was called while it generates: by another thread, by its own `on_token`, or before a stream ended."""


class StreamedToken(NamedTuple):
    """A new token of a stream."""

    prompt: int
    """Index of the prompt that the token continues."""
    token: int
    """Id of the token."""
    text: str
    """The text that the token completes: empty inside a character and for special tokens, or without a tokenizer."""
    finish_reason: FinishReason | None
    """Why this is the last token of its sequence: "stop" for a stop token, "length" for `max_new_tokens`. None if the
    sequence continues."""


class Engine:
    """Generate many sequences with a converted model, `batch_size` at a time.

    Each sequence has a slot. When it ends, the next prompt takes the slot while the other sequences continue, so
    nothing is padded. A long prompt is read in chunks between their steps. A step, including sampling, runs on the
    device with tensors at fixed addresses. The weights are packed once: make a new engine after changing the model. An
    engine serves one caller at a time.

    Args:
        model: A converted model.
        batch_size: Number of slots.
        graph: Whether to run a step as a CUDA graph; by default on a GPU.
        prefill_chunk: Tokens of prompts that are read at most between two steps.
        kernels: Whether to use the Triton kernels. By default these on a GPU and compiled C code on a CPU, where they
            are supported. False: torch operators.
        max_length: Length of the longest sequence in tokens, prompt included. Required if some layers remain
            attention: each slot then reserves keys and values for this many tokens.
        tokenizer: The model's tokenizer. With it, prompts can be strings, and `stream` returns text.
        weights: On a CPU, what the weights of linear layers are stored as to generate faster: "int8" or "bfloat16".
            By default they are in the model's dtype. Prompts are read with the model's own weights in any case.

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
        tokenizer: Any = None,
        weights: str | None = None,
    ) -> None:
        _check_at_least_one("batch_size", batch_size)
        _check_at_least_one("prefill_chunk", prefill_chunk)
        if max_length is not None:
            _check_at_least_one("max_length", max_length)
        _check_model(model)
        _check_kernels(model, kernels)
        check_weights(model, weights, kernels)
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
        self.tokenizer = tokenizer
        # An engine made in inference mode can also be used outside of it, so its tensors must be ordinary ones.
        with torch.inference_mode(False), evaluating(model):
            decoder = make_decode_model(model, batch_size, kernels, self.max_length, weights)
        if attention_layers and isinstance(decoder, ForwardDecodeModel):
            raise UnsupportedModel(
                f"layers {attention_layers} are still attention, and the engine cannot decode this model: "
                f"{decoder.unsupported_reason}; use model.generate"
            )
        can_capture = self.device.type == "cuda" and decoder.static
        if graph and not can_capture:
            raise ConfigError(Argument("graph"), "=True needs a CUDA device and a supported model; leave it out")
        with torch.inference_mode(False):
            sampler = Sampler(batch_size, model.config.get_text_config().vocab_size, self.device)
            self.batch = Batch(model, decoder, sampler, prefill_chunk, graph=can_capture and graph is not False)

    @property
    def decoder(self) -> DecodeModel | ForwardDecodeModel:
        """The model as it decodes: one token for every slot."""
        return self.batch.decoder

    @property
    def sampler(self) -> Sampler:
        """Chooses the tokens of all slots."""
        return self.batch.sampler

    @property
    def graphs(self) -> dict[SamplerMode, torch.cuda.CUDAGraph] | None:
        """The CUDA graphs of a step; None if steps do not run as graphs."""
        return self.batch.graphs

    def generate(
        self,
        prompts: Sequence[Prompt],
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
            prompts: Token ids of each prompt [T], with T >= 1; or its text if the engine has a tokenizer. Text gets the
                tokenizer's special tokens, unless a state comes before it.
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
        generations = self._generations(prompts, max_new_tokens, sampling, stop_tokens, states, progress)
        for i, token, _ in self._run(generations):
            if on_token is not None:
                on_token(i, token)
        return [generation.new_tokens for generation in generations]

    def stream(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | Sequence[int] = 100,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop_tokens: int | Sequence[int] | None = None,
        states: Sequence[FastWeightsCache | None] | None = None,
    ) -> Generator[StreamedToken]:
        """Generate the continuation of each prompt, and return the tokens one by one as they are produced.

        The arguments and the tokens are those of `generate`. The iterator owns the engine from its first token until
        it ends, or until it is closed (`close()`) or deleted; closing it stops generating.

        Args:
            prompts: As for `generate`.
            max_new_tokens: As for `generate`.
            sampling: As for `generate`.
            stop_tokens: As for `generate`.
            states: As for `generate`.

        Returns:
            An iterator of `StreamedToken(prompt, token, text, finish_reason)`. The texts of a prompt, joined, are the
            text of its new tokens without special tokens.

        Raises:
            ConfigError: An argument is wrong, or a sequence may become longer than `max_length`.
            ValueError: A sequence may become longer than the model's position table.
            GenerationError: From the iterator: logits are NaN.
            EngineBusy: From the iterator: the engine is generating already.
        """
        return self._stream(self._generations(prompts, max_new_tokens, sampling, stop_tokens, states))

    def _stream(self, generations: Sequence[Generation]) -> Generator[StreamedToken]:
        decoders = [None if self.tokenizer is None else TextDecoder(self.tokenizer) for _ in generations]
        for i, token, finish_reason in self._run(generations):
            text, decoder = "", decoders[i]
            if decoder is not None:
                text = decoder.add(token) + (decoder.end() if finish_reason else "")
            yield StreamedToken(i, token, text, finish_reason)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The slots belong to one call at a time."""
        if not self._lock.acquire(blocking=False):
            raise EngineBusy(
                "the engine is generating already: call it from one thread at a time and not from on_token, end or "
                "close its stream, or make an engine for each"
            )
        try:
            yield
        finally:
            self._lock.release()

    def step(self, mode: SamplerMode = GREEDY) -> None:
        """Feed the token of every slot to the model and choose the next ones.

        Raises:
            EngineBusy: The engine is generating.
        """
        with self._exclusive():
            self.batch.advance(mode)

    @contextmanager
    def batching(self) -> Iterator[Batch]:
        """The engine's batch, which belongs to the caller until the context ends.

        Raises:
            EngineBusy: The engine is generating.
        """
        with self._exclusive():
            try:
                yield self.batch
            finally:
                self.batch.clear()

    def _run(self, generations: Sequence[Generation]) -> Iterator[tuple[int, int, FinishReason | None]]:
        """Generate all sequences.

        Yields the index of a sequence, its new token, and why the sequence ends with it.
        """
        indices = {generation: i for i, generation in enumerate(generations)}
        waiting = deque(generations)
        with self.batching() as batch:
            batch.prepare([SamplerMode.of([generation.sampling for generation in generations])])
            while waiting or batch.busy:
                while waiting and batch.free:
                    batch.add(waiting.popleft())
                for generation, event in batch.step():
                    if isinstance(event, Token):
                        yield indices[generation], event.id, generation.finish_reason
                    elif isinstance(event, End) and event.error is not None:
                        raise event.error

    # checks of what generate and stream are given

    def _generations(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] | None,
        stop_tokens: int | Sequence[int] | None,
        states: Sequence[FastWeightsCache | None] | None,
        progress: bool = False,
    ) -> list[Generation]:
        if isinstance(prompts, str):
            raise ConfigError(Argument("prompts"), f" must be a list, found one string: [{prompts[:20]!r}]")
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
        stops = set(end_of_text(self.model)) if stop_tokens is None else self._check_stop_tokens(stop_tokens)
        return [
            Generation(
                self._check_prompt(i, prompt, limit, state),
                limit,
                own_sampling,
                seed_of(own_sampling, offset=i if shared else 0),
                stops,
                state,
                progress=progress,
            )
            for i, (prompt, limit, own_sampling, state) in enumerate(
                zip(prompts, limits, samplings, given, strict=True)
            )
        ]

    def _check_prompt(self, i: int, prompt: Any, limit: int, state: FastWeightsCache | None) -> Tensor:
        """The prompt as a tensor [T]."""
        name, vocab_size = (Argument("prompts"), f"[{i}]"), self.sampler.vocab_size
        if isinstance(prompt, str):
            if self.tokenizer is None:
                how = "give its tokens, tokenizer(text).input_ids, or make the engine with "
                raise ConfigError(*name, f" is a string: {how}", Argument("tokenizer"))
            begins = state is None or state.lengths is None
            prompt = prompt_tokens(self.tokenizer, prompt, continues=not begins)
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
        self.check_length(state, len(ids) + limit - 1, *name)
        return ids.long()

    def check_length(self, state: FastWeightsCache | None, tokens: int, *name: str) -> None:
        """Refuse a sequence that the engine cannot read.

        Args:
            state: The state before it.
            tokens: Tokens to read after the state, also generated ones.
            name: Parts of a message that name the sequence.

        Raises:
            ConfigError: It may become longer than `max_length`.
            PositionError: It may become longer than the model's position table.
            StateError: Attention layers of the state have seen padding.
        """
        length = tokens + (0 if state is None or state.lengths is None else int(state.lengths[0]))
        check_length(self.model, length)
        if self.max_length is not None and length > self.max_length:
            raise ConfigError(
                *name, f" may grow to {length} tokens, and ", Argument("max_length"), f" is {self.max_length}"
            )
        if self.max_length is not None and state is not None:
            state.check_padding()

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


def seed_of(sampling: Sampling, offset: int = 0) -> int:
    """The seed of a sequence, drawn from torch's generator if none is given."""
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


def end_of_text(model: Any) -> list[int]:
    """The model's end-of-text tokens."""
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
