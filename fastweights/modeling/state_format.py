"""The format of a state file: a safetensors file of the tensors of a `FastWeightsCache`, a sample of the weights of the
model that it belongs to, and a checksum. Everything in a file is compared with the model before it is used.

A file may also hold the `logits` [V] of the next token. The server stores them, so that a text can go on without
reading a token again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from fastweights.modeling.families import family_of
from fastweights.modeling.layer import FastWeightsAttention
from fastweights.modeling.state_file import StateError, check_state_file
from fastweights.modeling.window import cached_tokens
from fastweights.utils.files import write_tensors

if TYPE_CHECKING:
    from fastweights.modeling.cache import FastWeightsCache

# Settings that do not change what a state means: how a model was initialized, and what it refuses.
NOT_IN_LAYOUT = ("positions", "seed", "train_length", "projection_init")
# Settings that earlier versions did not have, at what those versions did: states of such models still load.
AS_BEFORE = {"mix": "constant", "sinks": 0, "projections": "own", "gate_rank": None, "ablation": None}
AS_BEFORE |= {"wide_window": 0, "wide_layers": None}
FILE_KIND = "fastweights-state-1"
# Metadata of a state file. Files of earlier versions have no checksum.
KIND, MODEL, CHECKSUM = "kind", "model", "sha256"
# The name of the tensor that only some files have.
LOGITS = "logits"
# Bytes of the names and shapes in a file that comes from outside. A model of 100 layers needs 40 KB.
MAX_HEADER = 2**20
FLOATS = ("F64", "F32", "BF16", "F16")
# Two samples of one model's weights differ at most by rounding to bfloat16, about 1e-3.
SAME_WEIGHTS = 4e-3
# The dtypes that a tensor of a file may have, and its shape (None: any size).
Expected = tuple[tuple[str, ...], tuple[int | None, ...]]


class Identity(NamedTuple):
    """What a file says about the model that its state belongs to."""

    layout: str
    samples: list[Tensor]


def identify(model: nn.Module) -> Identity:
    """The identity of a model with its present weights."""
    return Identity(layout(model), weight_samples(model))


def write_state(path: str | os.PathLike, tensors: dict[str, Tensor], model: nn.Module) -> None:
    """Write the tensors of a state of `model` to a file.

    Raises:
        StateError: the file cannot be written.
    """
    try:
        write_tensors(path, *_content(tensors, identify(model)))
    except OSError as error:
        raise StateError(f"cannot write the state to {path}: {error.strerror}") from error


def state_to_bytes(tensors: dict[str, Tensor], identity: Identity) -> bytes:
    """The bytes of a file that holds the tensors of a state."""
    return save(*_content(tensors, identity))


def _content(tensors: dict[str, Tensor], identity: Identity) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file."""
    tensors = tensors | {"model": torch.cat(identity.samples)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return tensors, {KIND: FILE_KIND, MODEL: identity.layout, CHECKSUM: checksum(tensors)}


def read_state(path: Path, model: nn.Module, cache: FastWeightsCache) -> dict[str, Tensor]:
    """Read the tensors of a state file.

    All names, shapes and dtypes are compared with the model's before any tensor is read.

    Args:
        path: the file.
        model: the converted model that the state is for.
        cache: an empty cache of that model.

    Raises:
        StateError: the file is damaged, or does not hold exactly the tensors that the model's states have.
    """
    check_state_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            header = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}

            def read() -> dict[str, Tensor]:
                return {name: file.get_tensor(name) for name in header}

            return _checked(str(path), file.metadata() or {}, header, read, model, cache, identify(model))
    except (OSError, SafetensorError) as error:
        raise StateError(_unreadable(str(path), error)) from error


def state_from_bytes(
    data: bytes, source: str, model: nn.Module, cache: FastWeightsCache, identity: Identity
) -> dict[str, Tensor]:
    """Read the tensors of a state file whose bytes are in memory, as `read_state` does.

    Args:
        data: the bytes of the file.
        source: what an error calls the file.
        model: the converted model that the state is for.
        cache: an empty cache of that model.
        identity: that of the model.

    Raises:
        StateError: as for `read_state`.
    """
    size = int.from_bytes(data[:8], "little")
    if size > MAX_HEADER:
        raise StateError(_unreadable(source, f"its header has {size:,} bytes"))
    try:
        header = {name: (x["dtype"], tuple(x["shape"])) for name, x in deserialize(data)}
        return _checked(source, _metadata(data[8 : 8 + size]), header, lambda: load(data), model, cache, identity)
    except SafetensorError as error:
        raise StateError(_unreadable(source, error)) from error


def _metadata(header: bytes) -> dict[str, str]:
    """The metadata in a header that safetensors has parsed, but does not return."""
    try:
        metadata = json.loads(header).get("__metadata__")
    except ValueError as error:  # Python's limit on the digits of a number
        raise SafetensorError(str(error)) from error
    return metadata if isinstance(metadata, dict) else {}


def _checked(
    source: str,
    metadata: Mapping[str, str],
    header: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[], dict[str, Tensor]],
    model: nn.Module,
    cache: FastWeightsCache,
    identity: Identity,
) -> dict[str, Tensor]:
    """The tensors of a file, which are read after its header has been compared with the model."""
    if metadata.get(KIND) != FILE_KIND:
        raise StateError(f"{source} is a safetensors file, but not a state saved by fastweights")
    if metadata.get(MODEL) != identity.layout:
        raise StateError(_foreign(source))
    problem = _header_problem(header, metadata, model, cache, identity)
    tensors = {} if problem else read()
    problem = problem or _content_problem(tensors, metadata, cache)
    if problem:
        raise StateError(f"{source} is a damaged state file: {problem}; save it again")
    if not _same_weights(tensors.pop("model"), identity.samples):
        raise StateError(_foreign(source))
    return tensors


def _unreadable(source: str, reason: object) -> str:
    return f"{source} is not a readable state file ({reason}): save it again"


def _foreign(source: str) -> str:
    return f"the state in {source} belongs to another model: load it with the model that made it"


def _header_problem(
    header: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    model: Any,
    cache: FastWeightsCache,
    identity: Identity,
) -> str | None:
    """What is wrong with the names, dtypes and shapes of a file's tensors, or None."""
    unknown = set(metadata) - {KIND, MODEL, CHECKSUM}
    if unknown:
        return f"unknown metadata {', '.join(sorted(unknown))}"
    batch = header.get("lengths", ("", ()))[1][:1]
    expected: dict[str, Expected] = {
        "seen": (("I64",), ()),
        "lengths": (("I64",) if batch != (0,) else ("I64", "F32"), (None,)),
        "model": (("F32",), (sum(map(len, identity.samples)),)),
    }
    if LOGITS in header:
        expected[LOGITS] = (("F32",), (model.config.get_text_config().vocab_size,))
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
    shape = attention.shape
    tensors: dict[str, Expected] = {}
    if attention.rule is not None:
        tensors["state"] = (FLOATS, (batch, *attention.rule.state_shape))
    if attention.window is not None:
        cached = cached_tokens(attention.window.window, attention.window.sinks)
        tensors |= dict.fromkeys(("k", "v"), (FLOATS, (batch, cached, shape.kv_heads, shape.head_dim)))
        tensors["mask"] = (("BOOL",), (batch, cached))
    return tensors


def _content_problem(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], cache: FastWeightsCache) -> str | None:
    """What is wrong with the values of a file's tensors, or None."""
    if CHECKSUM in metadata and metadata[CHECKSUM] != checksum(tensors):
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


def checksum(tensors: Mapping[str, Tensor]) -> str:
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
