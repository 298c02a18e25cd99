"""The file of a snapshot: of a place in a text from which generation can continue.

The file is a state file (`fastweights.modeling.state_format`) that also holds the logits of the next token. So
`FastWeightsCache.load` reads it, too, and a state that `fastweights generate --save-state` wrote is a snapshot without
logits.
"""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fastweights.decode.batch import Snapshot
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.state_file import StateError
from fastweights.modeling.state_format import LOGITS, Identity, identify, state_from_bytes, state_to_bytes

CPU = torch.device("cpu")
# Counts of tokens beyond this are not of a text: sums with them would overflow.
MAX_SEEN = 2**40
# The identity of each served model, whose weights do not change: to sample them takes longer than to read a state.
_identities: WeakKeyDictionary[nn.Module, Identity] = WeakKeyDictionary()


def size(snapshot: Snapshot) -> int:
    """Bytes of the tensors of a snapshot."""
    logits = 0 if snapshot.logits is None else snapshot.logits.nbytes
    return snapshot.state.nbytes + snapshot.state.attention_nbytes + logits


def to_bytes(snapshot: Snapshot, model: nn.Module) -> bytes:
    """The bytes of the snapshot's file, with the model's identity and a checksum."""
    tensors = snapshot.state.named_tensors()
    if snapshot.logits is not None:
        tensors[LOGITS] = snapshot.logits
    return state_to_bytes(tensors, _identity(model))


def from_bytes(data: bytes, model: Any, source: str) -> Snapshot:
    """Read a snapshot's file. The state is on the model's device.

    Args:
        data: the bytes of the file. They may come from anyone.
        model: the converted model that the snapshot is for.
        source: what an error calls the file.

    Raises:
        StateError: the file is damaged, of another model, or not of one sequence without padding.
    """
    state = FastWeightsCache(model.config)
    tensors = state_from_bytes(data, source, model, state, _identity(model))
    logits, seen, lengths = tensors.pop(LOGITS, None), int(tensors["seen"]), tensors["lengths"].tolist()
    if lengths != [seen] or not 0 < seen <= MAX_SEEN:
        raise StateError(f"the state in {source} must be of one text without padding, found tokens {lengths[:8]}")
    state.set_tensors(tensors, model)
    return Snapshot(state, logits)


def fingerprint(model: nn.Module) -> str:
    """A digest of the model's structure, settings and weights. States of models with different ones do not mix."""
    identity = _identity(model)
    samples = torch.cat(identity.samples).numpy().tobytes()
    return hashlib.sha256(identity.layout.encode() + samples).hexdigest()


def _identity(model: nn.Module) -> Identity:
    if model not in _identities:
        _identities[model] = identify(model)
    return _identities[model]
