"""The decode engine for converted models.

Shapes: a prompt [T]   tokens and positions of the slots [B]   logits [B,V]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastweights.config import ConfigError, Sampling, is_whole
from fastweights.decode.model import make_decode_model
from fastweights.decode.sampling import Mode, Sampler
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.classes import FastWeightsMixin, evaluating
from fastweights.ops.device import obstacle
from fastweights.utils.progress import track

PIECE = 1024
# A prompt of more pieces than this shows how far it has been read.
SHOWN_FROM = 8
WARM_UP_STEPS = 3
GREEDY = Mode(False, False, False)


class UnsupportedModelError(ConfigError):
    """A model that only transformers can continue."""


def prefill(
    model: Any, ids: Tensor, state: FastWeightsCache | None = None, piece: int = PIECE, progress: bool = False
) -> tuple[Tensor, FastWeightsCache]:
    """Read a prompt [T] piece by piece: the logits [1,V] after it, and the state, which is advanced in place.
    Memory is that of one piece, however long the prompt, but for layers that are still attention."""
    state = FastWeightsCache(model.config) if state is None else state
    pieces = ids[None].split(piece, dim=1)
    shown = progress and len(pieces) > SHOWN_FROM
    with torch.no_grad():
        for part in track(pieces, "reading", enabled=shown):
            out = model(part.to(model.device), past_key_values=state, logits_to_keep=1)
    return out.logits[:, -1], state


@dataclass
class _Sequence:
    """One text to continue."""

    prompt: Tensor
    limit: int
    sampling: Sampling
    seed: int
    state: FastWeightsCache | None
    new: list[int] = field(default_factory=list)


class Engine:
    """Continues texts with a converted model in `batch_size` slots. When a text ends, the next one's state takes its
    slot; the others go on, and nothing is padded.

    A step (all layers and the choice of the token) has static addresses and stays on the device; `graph`: it is a CUDA
    graph, by default on a GPU. The weights are packed once: after changing the model make a new engine. `kernels`: use
    the Triton kernels, by default where they can be. `max_length`: of the longest text, prompt and new tokens; only for
    a model some of whose layers are still attention: each slot has room for the keys and values of so many tokens."""

    def __init__(
        self,
        model: Any,
        batch_size: int = 1,
        *,
        graph: bool | None = None,
        piece: int = PIECE,
        kernels: bool | None = None,
        max_length: int | None = None,
    ) -> None:
        _check_whole("batch_size", batch_size)
        _check_whole("piece", piece)
        if max_length is not None:
            _check_whole("max_length", max_length)
        _check_model(model)
        reason = obstacle(model.device, model.dtype, interpreter=True) if kernels else None
        if reason is not None:
            raise ConfigError(f"kernels=True cannot be used here: {reason}; leave it out")
        kept = ", ".join(map(str, FastWeightsCache(model.config).kept))
        if kept and max_length is None:
            raise ConfigError(
                f"layers {kept} are still attention and keep keys and values of the text: say with max_length how many "
                "tokens the longest text has, or use model.generate"
            )
        self.max_length = max_length if kept else None
        self.model, self.piece, self.device = model, piece, model.device
        self.on_gpu = self.device.type == "cuda"
        # An engine made in inference mode is used outside it, too, where its tensors must be ordinary ones.
        with torch.inference_mode(False), evaluating(model):
            self.decoder = make_decode_model(model, batch_size, kernels, self.max_length)
        if kept and not self.decoder.static:
            raise UnsupportedModelError(
                f"layers {kept} are still attention, and the model is not of parts the engine knows: use model.generate"
            )
        possible = self.on_gpu and self.decoder.static
        if graph and not possible:
            raise ConfigError("graph=True needs a CUDA device and a model whose family's parts are known; leave it out")
        self.graphs: dict[Mode, torch.cuda.CUDAGraph] | None = {} if possible and graph is not False else None
        with torch.inference_mode(False):
            self.sampler = Sampler(batch_size, model.config.get_text_config().vocab_size, self.device)
            self.arrived = torch.zeros(batch_size, dtype=torch.long, pin_memory=self.on_gpu)

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
        """The new tokens of each prompt, a stop token included (by default the model's end of text; () for none).

        One Sampling for all gives prompt i the seed + i. `on_token(i, token)` is called as tokens come. `states` are
        what the model has seen before each prompt; each is advanced past its prompt. On a GPU a step is started before
        the tokens of the last one are read, so a sequence that ends has been one step further, in vain. All is computed
        in the model's dtype, under autocast, too."""
        sequences = self._sequences(prompts, max_new_tokens, sampling, states)
        stops = set(_end_of_text(self.model)) if stop_tokens is None else self._stop_tokens(stop_tokens)
        mode = Mode.of([sequence.sampling for sequence in sequences])
        here = torch.cuda.device(self.device) if self.on_gpu else nullcontext()
        with evaluating(self.model), torch.autocast(self.device.type, enabled=False), here:
            self._prepare(mode)
            self._run_all(sequences, mode, stops, on_token or (lambda i, token: None), progress)
        return [sequence.new for sequence in sequences]

    def step(self, mode: Mode = GREEDY) -> None:
        """Take in every slot's token and choose the next ones."""
        graph = None if self.graphs is None else self.graphs.get(mode)
        if graph is not None:
            graph.replay()
        else:
            self._step(mode)

    @torch.inference_mode()
    def _step(self, mode: Mode) -> None:
        stepper = self.decoder
        logits = stepper.step()
        stepper.tokens.copy_(self.sampler.choose(logits, stepper.positions, mode))

    def _prepare(self, mode: Mode) -> None:
        """Record the step, before any slot holds a text: trying it out changes them all."""
        self.sampler.prepare(mode)
        if self.graphs is None or mode in self.graphs:
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_STEPS):
                self._step(mode)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(mode)
        self.graphs[mode] = graph

    def _sequences(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] | None,
        states: Sequence[FastWeightsCache | None] | None,
    ) -> list[_Sequence]:
        count = len(prompts)
        sampling = Sampling() if sampling is None else sampling
        one_for_all = isinstance(sampling, Sampling)
        limits, samplings, given = (_for_each(value, count) for value in (max_new_tokens, sampling, states))
        shared = [state for state in given if state is not None]
        for limit in limits:
            _check_whole("max_new_tokens", limit)
        for name, values, kind in (("sampling", samplings, Sampling), ("states", shared, FastWeightsCache)):
            for value in values:
                if not isinstance(value, kind):
                    raise ConfigError(f"{name} must hold {kind.__name__}s, found {value!r}")
        if len({id(state) for state in shared}) < len(shared):
            raise ConfigError("one state is given to two prompts, and would be advanced twice: states=[s.fork(), ...]")
        for name, values in (("max_new_tokens", limits), ("sampling", samplings), ("states", given)):
            if len(values) != count:
                raise ConfigError(f"{name} must be one for all or one for each of {count} prompts, found {len(values)}")
        sequences = []
        for i, (prompt, limit, chosen, state) in enumerate(zip(prompts, limits, samplings, given, strict=True)):
            if isinstance(prompt, str):
                raise ConfigError(f"prompts[{i}] is a text: give its tokens, tokenizer(text).input_ids")
            try:
                ids = torch.as_tensor(prompt)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ConfigError(f"prompts[{i}] must be the tokens of one text, found {prompt!r}") from error
            ids = self._check_prompt(i, ids, limit, state)
            drawn = int(torch.randint(2**62, ())) if chosen.seed is None and not chosen.greedy else 0
            seed = drawn if chosen.seed is None else chosen.seed + (i if one_for_all else 0)
            sequences.append(_Sequence(ids, limit, chosen, seed, state))
        return sequences

    def _check_prompt(self, i: int, ids: Tensor, limit: int, state: FastWeightsCache | None) -> Tensor:
        if ids.ndim != 1 or not len(ids):
            raise ConfigError(f"prompts[{i}] must be the tokens of one text, at least one, found {list(ids.shape)}")
        if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= self.sampler.vocabulary:
            raise ConfigError(f"prompts[{i}] must be tokens from 0 to {self.sampler.vocabulary - 1}")
        if state is not None and state.batch_size > 1:
            raise ConfigError(f"states[{i}] must be of one text, found {state.batch_size}: select a row of it")
        seen = 0 if state is None or state.lengths is None else int(state.lengths[0])
        length = seen + len(ids) + limit - 1
        self.model._check_length(length)
        if self.max_length is not None and length > self.max_length:
            raise ConfigError(f"prompts[{i}] may come to {length} tokens, and max_length is {self.max_length}")
        if self.max_length is not None and state is not None:
            state.mask_for(ids[None])  # refuses one that has seen padding
        return ids.long()

    def _stop_tokens(self, given: Any) -> set[int]:
        listed: Any = given.tolist() if isinstance(given, Tensor) else given
        tokens = [listed] if is_whole(listed) or isinstance(listed, str) else list(listed)
        for token in tokens:
            if not is_whole(token) or not 0 <= token < self.sampler.vocabulary:
                raise ConfigError(f"stop_tokens must be from 0 to {self.sampler.vocabulary - 1}, found {token!r}")
        return {int(token) for token in tokens}

    def _run_all(
        self,
        sequences: list[_Sequence],
        mode: Mode,
        stops: set[int],
        on_token: Callable[[int, int], Any],
        progress: bool,
    ) -> None:
        waiting = deque(range(len(sequences)))
        owners: list[int | None] = [None] * len(self.arrived)
        while True:
            for slot, owner in enumerate(owners):
                if owner is None and waiting:
                    owners[slot] = i = waiting.popleft()
                    self._admit(slot, sequences[i], mode, progress)
            running = [sequences[i] for i in owners if i is not None]
            if not running:
                return
            arrival = self._send()
            ahead = self.on_gpu and any(len(s.new) + 1 < s.limit for s in running)
            if ahead:
                self.step(mode)
            for slot, (owner, token) in enumerate(zip(owners, self._receive(arrival), strict=True)):
                if owner is not None:
                    sequence = sequences[owner]
                    sequence.new.append(token)
                    on_token(owner, token)
                    if token in stops or len(sequence.new) == sequence.limit:
                        owners[slot] = None
            if not ahead and any(owner is not None for owner in owners):
                self.step(mode)

    def _admit(self, slot: int, sequence: _Sequence, mode: Mode, progress: bool) -> None:
        """Read a prompt and overwrite a slot with what comes of it, the first new token included."""
        prompt = sequence.prompt.to(self.device)
        logits, state = prefill(self.model, prompt, sequence.state, self.piece, progress)
        self.decoder.fill(slot, state)
        self.sampler.fill(slot, sequence.sampling, sequence.seed, prompt)
        here = slice(slot, slot + 1)
        self.decoder.tokens[here].copy_(self.sampler.choose(logits, self.decoder.positions[here], mode, here))

    def _send(self) -> torch.cuda.Event | None:
        """Start to bring the tokens to the host; the event says when they are there."""
        self.arrived.copy_(self.decoder.tokens, non_blocking=True)
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _receive(self, arrival: torch.cuda.Event | None) -> list[int]:
        if arrival is not None:
            arrival.synchronize()
        return self.arrived.tolist()


def _for_each(value: Any, count: int) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


def _check_whole(name: str, value: Any) -> None:
    if not is_whole(value):
        raise ConfigError(f"{name} must be a whole number, found {value!r}")
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, found {value}")


def _check_model(model: Any) -> None:
    if not isinstance(model, FastWeightsMixin):
        raise ConfigError(
            f"the engine decodes converted models, found a {type(model).__name__}: convert it, or use its own generate"
        )


def _end_of_text(model: Any) -> list[int]:
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
