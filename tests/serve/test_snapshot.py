"""A snapshot's file is a state file with the logits of the next token."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stores import same, served_model, snapshot_of
from helpers.tiny import pretrained, tokens
from safetensors.torch import load, save

import fastweights as fw
from fastweights.decode.prefill import prefill
from fastweights.modeling import state_format
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.state_file import StateError
from fastweights.serve.snapshot import Snapshot, fingerprint, from_bytes, size, to_bytes

IDS = tokens(9).tolist()


def header_of(data: bytes) -> dict[str, Any]:
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def forged(data: bytes, **changes: torch.Tensor | None) -> bytes:
    """The file with other tensors (None: without them), and a checksum that is right."""
    tensors = {name: value for name, value in (load(data) | changes).items() if value is not None}
    metadata = header_of(data)["__metadata__"] | {"sha256": state_format.checksum(tensors)}
    return save(tensors, metadata)


@pytest.mark.parametrize("layers", [None, (0,)])
def test_snapshot_comes_back_to_the_last_bit_and_continues_alike(layers: Any) -> None:
    model = served_model(layers=layers)
    snapshot = snapshot_of(IDS, model)
    again = from_bytes(to_bytes(snapshot, model), model, "x")
    assert same(again, snapshot)
    following = [prefill(model, tokens(3, seed=1), s.state.fork())[0] for s in (snapshot, again)]
    assert torch.equal(*following)


def test_snapshot_file_loads_as_a_state_and_a_state_file_as_a_snapshot(tmp_path: Path) -> None:
    model, snapshot = served_model(), snapshot_of(IDS)
    (tmp_path / "snapshot").write_bytes(to_bytes(snapshot, model))
    assert same(Snapshot(FastWeightsCache.load(tmp_path / "snapshot", model), snapshot.logits), snapshot)
    snapshot.state.save(tmp_path / "state", model)
    imported = from_bytes((tmp_path / "state").read_bytes(), model, "x")
    assert imported.logits is None
    assert same(imported._replace(logits=snapshot.logits), snapshot)


def test_size_counts_all_tensors() -> None:
    model = served_model(layers=(0,))
    snapshot = snapshot_of(IDS, model)
    names = ("seen", "lengths", "fingerprint", "cumulative_length")
    tensors = {n: t for n, t in snapshot.state.named_tensors().items() if not n.endswith(names)}
    assert snapshot.logits is not None
    assert size(snapshot) == sum(t.nbytes for t in tensors.values()) + snapshot.logits.nbytes
    assert size(Snapshot(snapshot.state, None)) == size(snapshot) - snapshot.logits.nbytes


def test_file_of_another_model_is_refused() -> None:
    data = to_bytes(snapshot_of(IDS), served_model())
    with torch.no_grad():
        trained = fw.convert(pretrained("llama"), fw.FastWeightsConfig(rule="decay", m=4, window=3))
        trained.lm_head.weight.mul_(1.1)
    for model in (served_model(m=8), trained):
        with pytest.raises(StateError, match="upload belongs to another model"):
            from_bytes(data, model, "upload")
    assert len({fingerprint(model) for model in (served_model(), served_model(m=8), trained)}) == 3


def test_state_of_no_or_several_texts_is_refused() -> None:
    model = served_model()
    empty = FastWeightsCache(model.config)
    pair = snapshot_of(IDS).state.fork(2)
    padded = FastWeightsCache(model.config)
    mask = torch.tensor([[0, 1, 1]])
    with torch.no_grad():
        model(tokens(1, 3), attention_mask=mask, past_key_values=padded)
    for state in (empty, pair, padded):
        with pytest.raises(StateError, match="one text"):
            from_bytes(to_bytes(Snapshot(state, None), model), model, "upload")


def test_forged_files_are_refused() -> None:
    model = served_model()
    data = to_bytes(snapshot_of(IDS), model)
    vocab = model.config.vocab_size
    assert from_bytes(forged(data), model, "upload").logits is not None
    for changes in (
        dict(logits=torch.zeros(vocab + 1)),
        dict(logits=torch.zeros(1, vocab)),
        dict(logits=torch.zeros(vocab, dtype=torch.float16)),
        dict(logits=torch.full((vocab,), float("nan"))),
        dict(seen=torch.tensor(2**62), lengths=torch.tensor([2**62])),
        dict(seen=None),
        dict(lengths=None),
        dict(extra=torch.zeros(1)),
    ):
        with pytest.raises(StateError, match="upload"):
            from_bytes(forged(data, **changes), model, "upload")


def with_header(header: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if claimed is None else claimed) + header


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 64,
        with_header(b"{}"),
        with_header(b"[]"),
        with_header(b"{" * 200_000),
        with_header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        with_header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, claimed=100),
        with_header(b'{"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"y":' + b"9" * 5000 + b"}}"),
        with_header(b'{"x":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'),
        with_header(b'{"x":{"dtype":"F32","shape":[0,1000000000000],"data_offsets":[0,0]}}'),
        with_header(b'{"__metadata__":{"kind":1}}'),
        with_header(b'{"__metadata__":{"kind":"a"},"__metadata__":[]}'),
        with_header(b"{}" + b" " * 2**21),
    ],
    ids=range(14),
)
def test_bytes_that_are_no_state_are_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(StateError, match="upload") as error:
        from_bytes(data, served_model(), "upload")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_state_moves_to_another_device_as_a_copy() -> None:
    snapshot = snapshot_of(IDS, served_model(layers=(0,)))
    assert snapshot.to(torch.device("cpu")) is snapshot
    moved = snapshot.to(torch.device("meta")).state.named_tensors()
    held = snapshot.state.named_tensors()
    assert {name for name, tensor in moved.items() if tensor.device.type != "meta"} <= {"seen", "1.cumulative_length"}
    assert {name: tensor.shape for name, tensor in moved.items()} == {name: t.shape for name, t in held.items()}
    assert all(tensor.device.type == "cpu" for tensor in held.values())
