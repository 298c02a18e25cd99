"""The recurrent state as `past_key_values` of Hugging Face's generate, and as an object that is saved, loaded, forked.

Converted layers hold tensors of constant size; attention layers hold keys and values as in the pretrained model.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache, StaticLayer

from fastweights.config import FastWeightsConfig
from fastweights.modeling.families import family_of
from fastweights.modeling.layer import FastWeightsAttention
from fastweights.modeling.state_file import StateError, check_state_file
from fastweights.modeling.window import cached_tokens
from fastweights.utils.errors import Argument
from fastweights.utils.files import write_tensors

# Settings that do not change what a state means: how a model was initialized, and what it refuses.
NOT_IN_LAYOUT = ("positions", "seed", "train_length", "projection_init")
# Settings that earlier versions did not have, at what those versions did: states of such models still load.
AS_BEFORE = {"mix": "constant", "sinks": 0}
FILE_KIND = "fastweights-state-1"
# Metadata of a state file. Files of earlier versions have no checksum.
KIND, MODEL, CHECKSUM = "kind", "model", "sha256"
FLOATS = ("F64", "F32", "BF16", "F16")
# A mask has an element for every token that a state has seen: 8 bytes each.
MAX_MASK = 2**29
# Fingerprints are sums of numbers below this prime: the square of one fits an int64.
PRIME = 2**31 - 1
# Two samples of one model's weights differ at most by rounding to bfloat16, about 1e-3.
SAME_WEIGHTS = 4e-3


# The dtypes that a tensor of a file may have, and its shape (None: any size).
Expected = tuple[tuple[str, ...], tuple[int | None, ...]]


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
        # `seen` [] counts positions, `lengths` [B] the real tokens of each row; `fingerprint` [B] is a digest of all
        # tokens, None if some were given as embeddings. They are tensors, so that a compiled step is not compiled again
        # at every token.
        with torch.inference_mode(False):
            self.seen = torch.zeros((), dtype=torch.long)
        self.lengths: Tensor | None = None
        self.fingerprint: Tensor | None = None

    @property
    def attention_layers(self) -> list[int]:
        """Indices of the layers that remain attention."""
        return [i for i, layer in enumerate(self.layers) if not isinstance(layer, StateLayer)]

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

    def save(self, path: str | os.PathLike, model: nn.Module) -> None:
        """Write the state to a safetensors file. It can be loaded only for the same model."""
        tensors = {"seen": self.seen, "lengths": torch.zeros(0) if self.lengths is None else self.lengths}
        if self.fingerprint is not None:
            tensors["fingerprint"] = self.fingerprint
        for i, layer in enumerate(self.layers):
            held = layer.tensors if isinstance(layer, StateLayer) else _keys_and_values(layer)
            tensors |= {f"{i}.{name}": value for name, value in held.items() if value is not None}
            if hasattr(layer, "cumulative_length"):
                tensors[f"{i}.cumulative_length"] = torch.as_tensor(layer.get_seq_length())
        tensors["model"] = torch.cat(weight_samples(model))
        tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        metadata = {KIND: FILE_KIND, MODEL: layout(model), CHECKSUM: _checksum(tensors)}
        try:
            write_tensors(path, tensors, metadata)
        except OSError as error:
            raise StateError(f"cannot write the state to {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | os.PathLike, model: Any) -> FastWeightsCache:
        """Read a state that `save` wrote for this model.

        Raises:
            StateError: the file is damaged, or does not hold exactly the tensors that the model's states have.
        """
        cache = cls(model.config)
        tensors = _read(Path(path), model, cache)
        device = model.device
        cache.seen, lengths = tensors.pop("seen"), tensors.pop("lengths")
        cache.lengths = lengths.to(device) if len(lengths) else None
        cache.fingerprint = tensors.pop("fingerprint").to(device) if "fingerprint" in tensors else None
        for name, value in tensors.items():
            index, _, field = name.partition(".")
            layer = cache.layers[int(index)]
            if value.is_floating_point():
                dtype = model.dtype if field != "state" else torch.promote_types(model.dtype, torch.float32)
                value = value.to(dtype)
            if isinstance(layer, StateLayer):
                layer.put(field, value.to(device))
            elif field == "cumulative_length":
                if hasattr(layer, field):
                    layer.cumulative_length = int(value)
            else:
                if not layer.is_initialized:
                    layer.lazy_initialization(value.to(device), value.to(device))
                setattr(layer, field, value.to(device))  # keys or values: `_read` lets no other name through
        return cache


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


def _read(path: Path, model: nn.Module, cache: FastWeightsCache) -> dict[str, Tensor]:
    """The tensors of a state file. All names, shapes and dtypes are compared with the model's before any is read."""
    check_state_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get(KIND) != FILE_KIND:
                raise StateError(f"{path} is a safetensors file, but not a state saved by fastweights")
            if metadata.get(MODEL) != layout(model):
                raise StateError(_foreign(path))
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            header = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
            problem = _header_problem(header, metadata, model, cache)
            tensors = {} if problem else {name: file.get_tensor(name) for name in header}
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path} is not a readable state file ({error}): save it again") from error
    problem = problem or _content_problem(tensors, metadata, cache)
    if problem:
        raise StateError(f"{path} is a damaged state file: {problem}; save it again")
    if not _same_weights(tensors.pop("model"), weight_samples(model)):
        raise StateError(_foreign(path))
    return tensors


def _foreign(path: Path) -> str:
    return f"the state in {path} belongs to another model: load it with the model that made it"


def _header_problem(
    header: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], model: Any, cache: FastWeightsCache
) -> str | None:
    """What is wrong with the names, dtypes and shapes of a file's tensors, or None."""
    unknown = set(metadata) - {KIND, MODEL, CHECKSUM}
    if unknown:
        return f"unknown metadata {', '.join(sorted(unknown))}"
    batch = header.get("lengths", ("", ()))[1][:1]
    expected: dict[str, Expected] = {
        "seen": (("I64",), ()),
        "lengths": (("I64",) if batch != (0,) else ("I64", "F32"), (None,)),
        "model": (("F32",), (sum(map(len, weight_samples(model))),)),
    }
    if batch and batch != (0,):
        if "fingerprint" in header:  # a state that has seen embeddings has none
            expected["fingerprint"] = (("I64",), batch)
        expected |= _layer_tensors(model, cache, batch[0], header)
    if set(header) != set(expected):
        missing, extra = sorted(set(expected) - set(header)), sorted(set(header) - set(expected))
        return f"missing tensors {_names(missing)}, unknown tensors {_names(extra)}"
    for name, (dtypes, shape) in expected.items():
        dtype, found = header[name]
        fits = len(found) == len(shape) and all(want in (None, size) for want, size in zip(shape, found, strict=True))
        if dtype not in dtypes or not fits:
            return f"{name} must be {' or '.join(dtypes)} of shape {list(shape)}, found {dtype} of shape {list(found)}"
    return None


def _names(names: list[str]) -> str:
    return (", ".join(names[:3]) + (", …" if len(names) > 3 else "")) or "none"


def _layer_tensors(model: Any, cache: FastWeightsCache, batch: int, header: Container[str]) -> dict[str, Expected]:
    """Dtypes and shape (None: any size) of every tensor that a used cache of this model holds."""
    family = family_of(model)
    tensors: dict[str, Expected] = {}
    for i, (block, layer) in enumerate(zip(family.blocks(model), cache.layers, strict=True)):
        attention: Any = family.attention_of(block)
        if isinstance(attention, FastWeightsAttention):
            tensors |= {f"{i}.{name}": value for name, value in _state_tensors(attention, batch).items()}
            continue
        shape = family.shape(attention, model.config)
        for name in ("keys", "values"):
            tensors[f"{i}.{name}"] = (FLOATS, (batch, shape.kv_heads, None, shape.head_dim))
        # Static caches write it for every layer, growing ones only for a sliding window.
        if hasattr(layer, "cumulative_length") or f"{i}.cumulative_length" in header:
            tensors[f"{i}.cumulative_length"] = (("I64",), ())
    return tensors


def _state_tensors(attention: FastWeightsAttention, batch: int) -> dict[str, Expected]:
    shape, config = attention.shape, attention.config
    tensors: dict[str, Expected] = {}
    if attention.rule is not None:
        states = attention.rule.projections.states
        tensors["state"] = (FLOATS, (batch, states, shape.head_dim + config.normalizes_attention, config.m))
    if attention.window is not None:
        cached = cached_tokens(attention.window.window, attention.window.sinks)
        tensors |= dict.fromkeys(("k", "v"), (FLOATS, (batch, cached, shape.kv_heads, shape.head_dim)))
        tensors["mask"] = (("BOOL",), (batch, cached))
    return tensors


def _content_problem(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], cache: FastWeightsCache) -> str | None:
    """What is wrong with the values of a file's tensors, or None."""
    if CHECKSUM in metadata and metadata[CHECKSUM] != _checksum(tensors):
        return "its checksum does not fit its content"
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return f"{name} contains NaN or infinity"
    seen, lengths = int(tensors["seen"]), tensors["lengths"]
    if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= seen:
        return f"lengths must be between 0 and seen={seen}, found {lengths.tolist()[:8]}"
    if not len(lengths) and seen:
        return f"seen must be 0 where there are no lengths, found {seen}"
    for i in cache.attention_layers if len(lengths) else ():
        cumulative = int(tensors.get(f"{i}.cumulative_length", tensors["seen"]))
        lengths_held = {tensors[f"{i}.{name}"].shape[2] for name in ("keys", "values")}
        window = getattr(cache.layers[i], "sliding_window", None)
        least = seen if window is None else min(seen, window - 1)
        if cumulative != seen or len(lengths_held) > 1 or not least <= max(lengths_held) <= seen:
            return f"keys and values of layer {i} are not those of {seen} tokens"
    return None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def layout(model: Any) -> str:
    """A digest of a model's parameters by name and shape, and of the settings that give a state its meaning."""
    settings = {
        name: value
        for name, value in model.config.fastweights.items()
        if name not in NOT_IN_LAYOUT and not (name in AS_BEFORE and value == AS_BEFORE[name])
    }
    shapes = [(name, list(parameter.shape)) for name, parameter in sorted(model.named_parameters())]
    return hashlib.sha256(json.dumps([settings, shapes], sort_keys=True).encode()).hexdigest()


def weight_samples(model: Any) -> list[Tensor]:
    """At most 64 elements of every parameter."""
    samples = []
    for _, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        samples.append(flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.float32))
    return samples


def _same_weights(saved: Tensor, own: list[Tensor]) -> bool:
    """Whether saved samples equal the model's own, up to the rounding of another dtype."""
    pairs = zip(saved.split([len(part) for part in own]), own, strict=True)
    return all(bool((a - b).norm() <= SAME_WEIGHTS * b.norm()) for a, b in pairs)
