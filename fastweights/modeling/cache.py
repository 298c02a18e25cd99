"""The recurrent state as `past_key_values` of Hugging Face's generate, and as an object that is saved, loaded, forked.

Converted layers hold tensors of constant size; attention layers hold keys and values as in the pretrained model.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache, StaticLayer

from fastweights.config import FastWeightsConfig
from fastweights.modeling.state_file import StateError
from fastweights.modeling.state_format import LOGITS, read_state, write_state
from fastweights.utils.errors import Argument

# A mask has an element for every token that a state has seen: 8 bytes each.
MAX_MASK = 2**29
# Fingerprints are sums of numbers below this prime: the square of one fits an int64.
PRIME = 2**31 - 1


class StateLayer(CacheLayerMixin):
    """A converted layer's tensors by name. They are made at first use and from then on written in place."""

    is_compileable = True
    supports_early_init = False  # the shapes of the tensors are known to the layer, not to the cache

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, None where there is none yet."""
        return self.tensors.get(name)

    def put(self, name: str, value: Tensor) -> None:
        """Store a tensor, in place where possible, so that its address stays the same."""
        held = self.tensors.get(name)
        if held is None or torch.is_grad_enabled():  # autograd may still need the old one
            with torch.inference_mode(False):
                self.tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
            _mark_static(self.tensors[name])
            self.is_initialized = True
        else:
            held.copy_(value.detach())

    def get_all(self, kind: Any) -> Any:
        """The tensors of a NamedTuple, if they are held."""
        if kind._fields[0] not in self.tensors:
            return None
        return kind(*(self.tensors[name] for name in kind._fields))

    def put_all(self, values: Any) -> None:
        """Store the tensors of a NamedTuple by their names."""
        for name, value in zip(values._fields, values, strict=True):
            self.put(name, value)

    def select(self, rows: Tensor) -> None:
        """Select or reorder rows of the batch."""
        for name, held in self.tensors.items():
            chosen = held.index_select(0, rows.to(held.device))
            if chosen.shape == held.shape:
                held.copy_(chosen)
            else:
                self.tensors[name] = chosen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.tensors = {name: held.repeat_interleave(repeats, dim=0) for name, held in self.tensors.items()}

    def reset(self) -> None:
        for held in self.tensors.values():
            held.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise StateError("a recurrent state cannot forget its last tokens: fork it before them instead")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a converted layer caches a state, not keys and values")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("a converted layer caches a state, not keys and values")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class Counts(NamedTuple):
    """What a state has seen. `seen` [] counts positions, `lengths` [B] the real tokens of each row; `fingerprint` [B]
    is a digest of all tokens, None if some were given as embeddings."""

    seen: Tensor
    lengths: Tensor | None
    fingerprint: Tensor | None


class FastWeightsCache(Cache):
    """The cache of a converted model: what it returns and takes as `past_key_values`.

    Converted layers store a state of constant size. Layers that remain attention store keys and values.

    Args:
        config: the config of the converted model.
        max_cache_len: makes the cache static: attention layers allocate keys and values for this many tokens, and
            `generate` compiles its step as transformers does for static caches.
    """

    def __init__(self, config: Any, max_cache_len: int | None = None) -> None:
        settings, text_config = FastWeightsConfig.from_dict(config.fastweights), config.get_text_config(decoder=True)
        if max_cache_len is None:
            attention = DynamicCache(config=text_config).layers
        else:
            attention = StaticCache(config=text_config, max_cache_len=max_cache_len).layers
        layers = [StateLayer() if settings.converts(i) else layer for i, layer in enumerate(attention)]
        super().__init__(layers=layers)
        self.is_static = max_cache_len is not None
        # See `Counts`. They are tensors, so that a compiled step is not compiled again at every token.
        with torch.inference_mode(False):
            self.seen = torch.zeros((), dtype=torch.long)
        self.lengths: Tensor | None = None
        self.fingerprint: Tensor | None = None

    @property
    def attention_layers(self) -> list[int]:
        """Indices of the layers that remain attention."""
        return [i for i, layer in enumerate(self.layers) if not isinstance(layer, StateLayer)]

    @property
    def counts(self) -> Counts:
        """A copy of what was counted so far."""
        return Counts(*(None if x is None else x.clone() for x in (self.seen, self.lengths, self.fingerprint)))  # type: ignore[arg-type]

    @counts.setter
    def counts(self, counts: Counts) -> None:
        self.seen, self.lengths, self.fingerprint = (None if x is None else x.clone() for x in counts)  # type: ignore[assignment]

    def advance(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Count tokens [B,T], or embeddings [B,T,D], that all layers have processed. mask [B,T]: the real ones."""
        (batch, length), device = tokens.shape[:2], tokens.device
        with torch.inference_mode(False):
            if self.lengths is None:
                self.lengths, self.fingerprint = (torch.zeros(batch, dtype=torch.long, device=device) for _ in range(2))
                if self.is_static:  # a CUDA graph has no tensors of the host
                    self.seen = self.seen.to(device)
                _mark_static(self.lengths, self.fingerprint, self.seen)
            real = length if mask is None else mask.sum(1)
            self.lengths += real
            if tokens.ndim > 2:
                self.fingerprint = None
            elif self.fingerprint is not None:
                self.fingerprint += _fingerprint(tokens, self.seen)
            self.seen += length

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """The number of positions read so far: an int if the model has attention layers, else a tensor."""
        return super().get_seq_length(self.attention_layers[0]) if self.attention_layers else self.seen

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.get_seq_length()

    @property
    def is_sliding(self) -> list[bool]:
        """None for converted layers: masks are sized by the layers that are attention."""
        return [None if isinstance(layer, StateLayer) else getattr(layer, "is_sliding", False) for layer in self.layers]  # type: ignore[misc]

    @property
    def is_compileable(self) -> bool:
        """Whether generate may compile its step: only where a static cache was asked for."""
        return self.is_static

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first token."""
        return -1 if self.lengths is None else self.lengths.shape[0]

    def check_rows(self, rows: int) -> None:
        """Refuse an input that has another number of rows than this state."""
        if self.batch_size in (-1, rows):
            return
        copies, rest = divmod(rows, self.batch_size)
        fix = "give one row of tokens for each" if rest else f"fork it first, past_key_values=cache.fork({copies})"
        raise StateError(f"the state has {self.batch_size} rows and the input {rows}: {fix}")

    def _for_rows(self, counts: Tensor, rows: int) -> Tensor:
        """The counts [B] of an input of `rows` rows: the state may have copies of each row, which are for beams."""
        if len(counts) % rows:
            self.check_rows(rows)
        return counts[:: len(counts) // rows]

    def __repr__(self) -> str:
        rows, seen = max(0, self.batch_size), int(self.get_seq_length())
        keys = f", {self.attention_nbytes:,} bytes of keys and values" if self.attention_layers else ""
        return f"{type(self).__name__}({rows} x {seen:,} tokens seen, {self.nbytes:,} bytes of state{keys})"

    def _rows(self, rows: Tensor) -> None:
        if self.lengths is not None:
            self.lengths = self.lengths.index_select(0, rows.to(self.lengths.device))
        if self.fingerprint is not None:
            self.fingerprint = self.fingerprint.index_select(0, rows.to(self.fingerprint.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.lengths is not None:
            self.lengths = self.lengths.repeat_interleave(repeats)
        if self.fingerprint is not None:
            self.fingerprint = self.fingerprint.repeat_interleave(repeats)

    def reset(self) -> None:
        super().reset()
        for count in (self.seen, self.lengths, self.fingerprint):
            if count is not None:
                count.zero_()

    def fork(self, copies: int = 1) -> FastWeightsCache:
        """Return an independent copy in which each row is repeated `copies` times, for several continuations."""
        if copies < 1:
            raise StateError(f"a state is forked into at least one copy, found copies={copies}")
        held = [x for layer in self.layers for x in vars(layer).values() if isinstance(x, Tensor)]
        twin = copy.deepcopy(self, {id(x): x.detach().clone() for x in held if x.requires_grad})
        if copies > 1 and twin.batch_size > 0:
            twin.batch_repeat_interleave(copies)
        return twin

    def is_start_of(self, input_ids: Tensor) -> bool | None:
        """Whether input_ids [B,T] begin with the tokens that this state has seen. None: unknown after embeddings."""
        seen, (rows, length) = int(self.get_seq_length()), input_ids.shape
        if self.fingerprint is None:
            return None
        if length < seen:
            return False
        expected = self._for_rows(self.fingerprint, rows)
        found = _fingerprint(input_ids[:, :seen].to(expected.device), torch.zeros_like(self.seen))
        return bool((found == expected).all())

    def mask_for(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the `attention_mask` [B,S+T] of all tokens, for an input of only the new ones after this state.

        Args:
            input_ids: the new tokens [B,T].
            attention_mask: the mask of the new tokens [B,T]. None: all are real.

        Raises:
            StateError: attention layers have seen padding, and where it was is not known.
        """
        seen, (rows, length) = int(self.get_seq_length()), input_ids.shape[:2]
        if seen * rows > MAX_MASK:
            raise StateError(
                f"this state has seen {seen:,} tokens, too many for a mask: generate with Engine, no beams"
            )
        mask = torch.ones(rows, seen + length, dtype=torch.long, device=input_ids.device)
        if attention_mask is not None:
            mask[:, seen:] = attention_mask
        if self.lengths is not None:
            self.check_padding()
            padding = (seen - self._for_rows(self.lengths, rows)).to(mask.device)
            mask[:, :seen] = torch.arange(seen, device=mask.device) >= padding[:, None]
        return mask

    def check_padding(self) -> None:
        """Refuse to continue without a whole mask where attention layers have seen padding."""
        if self.attention_layers and self.lengths is not None and bool((self.lengths < self.seen).any()):
            raise StateError(
                "this state has seen padding and has attention layers: pass the ",
                Argument("attention_mask"),
                " of the whole sequence",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the recurrent state. They do not depend on the context length."""
        return sum(t.nbytes for layer in self.layers if isinstance(layer, StateLayer) for t in layer.tensors.values())

    @property
    def attention_nbytes(self) -> int:
        """Bytes of the keys and values of layers that remain attention. They grow with the context length."""
        layers = [self.layers[i] for i in self.attention_layers]
        return sum(t.nbytes for layer in layers for t in (layer.keys, layer.values) if t is not None)

    def to(self, device: torch.device) -> FastWeightsCache:
        """Return this state on a device: itself if it is there, else a copy."""
        held = [x for layer in self.layers for x in (*vars(layer).values(), *getattr(layer, "tensors", {}).values())]
        held = [x for x in (*held, self.lengths, self.fingerprint) if isinstance(x, Tensor) and x.device != device]
        if not held:
            return self
        moved = {id(x): x.detach().to(device) for x in held}
        return copy.deepcopy(self, moved | {id(self.seen): self.seen.cpu()})

    def named_tensors(self) -> dict[str, Tensor]:
        """All tensors of the state, by their names in a file."""
        tensors = {"seen": self.seen, "lengths": torch.zeros(0) if self.lengths is None else self.lengths}
        if self.fingerprint is not None:
            tensors["fingerprint"] = self.fingerprint
        for i, layer in enumerate(self.layers):
            held = layer.tensors if isinstance(layer, StateLayer) else _keys_and_values(layer)
            tensors |= {f"{i}.{name}": value for name, value in held.items() if value is not None}
            if hasattr(layer, "cumulative_length"):
                tensors[f"{i}.cumulative_length"] = torch.as_tensor(layer.get_seq_length())
        return tensors

    def set_tensors(self, tensors: dict[str, Tensor], model: Any) -> None:
        """Fill an empty state of `model` with the tensors of a file, in the model's dtype and on its device."""
        device, tensors = model.device, dict(tensors)
        self.seen, lengths = tensors.pop("seen"), tensors.pop("lengths")
        self.lengths = lengths.to(device) if len(lengths) else None
        self.fingerprint = tensors.pop("fingerprint").to(device) if "fingerprint" in tensors else None
        for name, value in tensors.items():
            index, _, field = name.partition(".")
            layer = self.layers[int(index)]
            if value.is_floating_point():
                dtype = model.dtype if field != "state" else torch.promote_types(model.dtype, torch.float32)
                value = value.to(dtype)
            if isinstance(layer, StateLayer):
                layer.put(field, value.to(device))
            elif field == "cumulative_length":
                if hasattr(layer, field):
                    layer.cumulative_length = int(value)
            else:  # keys or values: `state_format` lets no other name through
                put_keys_or_values(layer, field, value.to(device))

    def save(self, path: str | os.PathLike, model: nn.Module) -> None:
        """Write the state to a safetensors file. It can be loaded only for the same model."""
        write_state(path, self.named_tensors(), model)

    @classmethod
    def load(cls, path: str | os.PathLike, model: Any) -> FastWeightsCache:
        """Read a state that `save` wrote for this model. Logits in the file are ignored.

        Raises:
            StateError: the file is damaged, or does not hold exactly the tensors that the model's states have.
        """
        cache = cls(model.config)
        tensors = read_state(Path(path), model, cache)
        tensors.pop(LOGITS, None)
        cache.set_tensors(tensors, model)
        return cache


def put_keys_or_values(layer: Any, name: str, value: Tensor) -> None:
    """Overwrite the keys or the values [B,H,n,d] of a dynamic cache's attention layer."""
    if not layer.is_initialized:
        layer.lazy_initialization(value, value)
    setattr(layer, name, value)


def _fingerprint(tokens: Tensor, start: Tensor) -> Tensor:
    """A digest [B] of tokens [B,T] at the positions from `start` on. The digests of parts of a sequence add up."""
    positions = torch.arange(tokens.shape[1], device=tokens.device) + start
    mixed = (tokens.long() * 48271 + positions * 69621 + 1) % PRIME
    return (mixed * mixed % PRIME).sum(1)


def _mark_static(*tensors: Tensor) -> None:
    """Let CUDA graphs write to these tensors in place, as transformers does for static caches."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor, guard=False)


def _keys_and_values(layer: Any) -> dict[str, Tensor | None]:
    """The keys and values [B,H,n,d] of an attention layer as a dynamic cache has them: without the empty end of a
    static one; a full sliding window less the token that the next one replaces."""
    if layer.keys is None or not isinstance(layer, StaticLayer):
        return {"keys": layer.keys, "values": layer.values}
    seen = int(layer.get_seq_length())
    held = slice(1 if layer.is_sliding and seen >= layer.max_cache_len else 0, seen)
    return {"keys": layer.keys[:, :, held], "values": layer.values[:, :, held]}
