"""Pretrained attention with the window's kernels: what transformers' masks of T x T give, without such masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches import batch_of, packed
from helpers.relative_error import assert_close
from helpers.tiny import pretrained, tokens

import fastweights as fw
from fastweights import ops
from fastweights.modeling.document_attention import use_document_kernels
from fastweights.training.losses import capture_attention, next_token_loss, without_plain_positions

ROWS = {"packed": packed()[0], "plain": without_plain_positions(batch_of(tokens(2, 20)))}


def loss_and_gradients(model: Any, rows: Any) -> list[torch.Tensor]:
    loss = next_token_loss(model, rows)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, "packed") for family in ("gpt2", "llama", "gemma2", "gpt_neox", "opt")]
    + [(family, "plain") for family in ("gpt2", "opt", "mistral")],
)
def test_kernels_give_the_losses_and_gradients_of_masks(family: str, kind: str) -> None:
    """Also for sliding windows, capped logits and grouped heads."""
    expected = loss_and_gradients(pretrained(family), ROWS[kind])
    model = pretrained(family)
    with ops.use_backend("triton"):
        assert use_document_kernels(model)
        found = loss_and_gradients(model, ROWS[kind])
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_close(family, one, other, 1e-4, least=0.1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_hybrids_use_the_kernels_in_their_attention_layers(family: str) -> None:
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(m=4, layers=(1,)))
    expected = loss_and_gradients(model, ROWS["packed"])
    model.zero_grad()
    with ops.use_backend("triton"):
        assert use_document_kernels(model)
        found = loss_and_gradients(model, ROWS["packed"])
    for one, other in zip(found, expected, strict=True):
        assert_close(family, one, other, 1e-4, least=0.1)


def test_attention_that_is_captured_has_no_mask_of_T_x_T() -> None:
    teacher, rows = pretrained("llama"), ROWS["packed"]
    with ops.use_backend("triton"):
        use_document_kernels(teacher)
        captured = capture_attention(teacher, rows)
    expected = capture_attention(pretrained("llama"), rows)
    for index, found in captured.items():
        assert found.keywords["attention_mask"].shape == (2, 1, 2, rows["input_ids"].shape[1])
        assert_close("output", found.output, expected[index].output, 1e-5)


def test_models_that_kernels_cannot_run_stay_as_they_are() -> None:
    converted = fw.convert(pretrained("llama"), fw.FastWeightsConfig(m=4))
    for model, backend in ((pretrained("llama"), "auto"), (pretrained("llama"), "chunked"), (converted, "triton")):
        before = model.config._attn_implementation
        if backend == "auto":
            assert torch.cuda.is_available() or not use_document_kernels(model)
            continue
        with ops.use_backend(backend):
            assert not use_document_kernels(model)
        assert model.config._attn_implementation == before


def test_other_masks_are_sdpas() -> None:
    """A padded batch, as users pass it."""
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    model, other = pretrained("llama"), pretrained("llama")
    with ops.use_backend("triton"), torch.no_grad():
        use_document_kernels(model)
        found, expected = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (model, other))
    assert_close("logits", found, expected, 1e-6)
