"""What the operations keep for the backward pass: inputs and chunk boundaries, never T*d*m."""

from __future__ import annotations

import pytest
import torch
from helpers.relative_error import op_inputs, run_op
from torch import Tensor

from fastweights.ops.tiles import CHUNK
from fastweights.rules import RULES

B, T, H, d, m, r = 2, 512, 2, 64, 32, 7
BYTES = 4
EVERY_STATE = B * H * T * d * m * BYTES
# What each rule keeps besides its inputs and the boundary states, in units of T*(d+m): gated its keys times 1 - g;
# rules with slots what goes into the operations that they call, of m elements each: two of linformer, five of abc.
SAVED_ACTIVATIONS = {"add": 0.0, "delta": 0.0, "gated": 0.5, "decay": 0.0, "gated_delta": 0.0}
SAVED_ACTIVATIONS |= {"linformer": 0.7, "abc": 1.7}


def saved_bytes(rule: str, length: int, backend: str) -> int:
    """Bytes of the distinct storages saved for backward that are not the caller's own inputs."""
    inputs = {name: x.requires_grad_() for name, x in op_inputs(rule, B, length, H, d, m, r=r).items()}
    given = {x.untyped_storage().data_ptr() for x in inputs.values()}
    storages = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        results = run_op(rule, inputs, backend=backend)
    assert all(x.requires_grad for x in results)
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in given)


@pytest.mark.parametrize("rule", RULES)
def test_chunked_saves_only_states_at_chunk_boundaries(rule: str) -> None:
    for length in (T, 2 * T):
        boundaries = B * H * (length // CHUNK) * RULES[rule].state_rows(d, r) * m * BYTES
        activations = SAVED_ACTIVATIONS[rule] * B * H * length * (d + m) * BYTES
        assert saved_bytes(rule, length, "chunked") <= activations + boundaries


@pytest.mark.parametrize("rule", RULES)
def test_chunked_saves_far_less_than_every_state(rule: str) -> None:
    saved = saved_bytes(rule, T, "chunked")
    assert 8 * saved <= EVERY_STATE
    assert saved_bytes(rule, 2 * T, "chunked") <= 2.2 * saved


@pytest.mark.parametrize("rule", RULES)
def test_loop_saves_every_state(rule: str) -> None:
    """The measure itself: it must see what the chunked form does without."""
    assert saved_bytes(rule, T, "loop") >= 0.95 * EVERY_STATE
