"""A norm's sums, handed on by the linear that writes the rows to the one behind the norm, against float64. Where there
is no GPU, Triton's interpreter runs the kernels (conftest)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.decode_kernels import DEVICE, kernels, layer_case, randn
from helpers.relative_error import assert_close
from helpers.tiny import pretrained, tokens
from torch import Tensor
from torch.nn import functional as F

import fastweights as fw
from fastweights.decode.model import DecodeModel
from fastweights.ops.linear import FusedLinear, NormSums
from fastweights.ops.step import can_overlap

pytestmark = kernels
WRITER = ("none", False, "none", True, True)
READERS = {"rms": ("silu", True, "rms", False, False), "layer": ("gelu", False, "layer", True, False)}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
WIDTH, COLUMNS = 150, 37


@pytest.fixture(autouse=True)
def tiles_of_some_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one by one: few tiles, but of the rows' width more than one."""
    if DEVICE == "cpu":
        monkeypatch.setattr("fastweights.ops.linear.multiprocessors", lambda _: 11)


def empty_sums(rows: int, width: int, centered: bool) -> NormSums:
    sums = NormSums(rows, width, centered, torch.device(DEVICE))
    sums.values.fill_(math.nan)
    return sums


def written(rows: int, width: int, k: int, dtype: torch.dtype, sums: NormSums | None) -> Tensor:
    """Rows that a linear added to, its sums left in `sums`; what lies before and behind is not a number."""
    writer, x, before, expected = layer_case(WRITER, rows, width, k, dtype, "kernel")
    writer.workspace.sums.fill_(math.nan)
    hidden = F.pad(before, (0, 0, 1, 1), value=math.nan)[1:-1]
    writer(x, hidden, add=True, sums=sums)
    assert_close("written", hidden.cpu(), expected, TOLERANCES[dtype])
    return hidden


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("k", [40, 1100], ids=["short", "long"])
@pytest.mark.parametrize("rows", [2, 17, 33, 65])
@pytest.mark.parametrize("norm", READERS)
def test_writer_leaves_sums_for_the_next_norm(norm: str, rows: int, k: int, dtype: torch.dtype) -> None:
    sums = empty_sums(rows, WIDTH, norm == "layer")
    hidden = written(rows, WIDTH, k, dtype, sums)
    used = sums.parts * rows * (2 if sums.centered else 1)
    assert sums.parts > 1 or DEVICE == "cuda"
    parts = sums.values[:used].view(-1, sums.parts, rows).cpu().double().sum(1)
    wide = hidden.cpu().double()
    expected = torch.stack([wide.square().sum(1), wide.sum(1)])[: len(parts)]
    assert_close("sums of what is stored", parts, expected, 1e-6)
    assert sums.values[used:].isnan().all()

    reader, _, out, expected = layer_case(READERS[norm], rows, COLUMNS, WIDTH, dtype, "kernel", hidden)
    inside = reader(hidden, out.clone())
    assert_close("out", reader(hidden, out, sums=sums).cpu(), expected, TOLERANCES[dtype])
    assert_close("out", out, inside, TOLERANCES[dtype] / 2)
    sums.values.mul_(4)
    assert not torch.allclose(reader(hidden, out.clone(), sums=sums), inside, rtol=0.1), "they are what is used"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", READERS)
def test_norm_adds_more_sums_than_fit_one_load(norm: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.ops.linear.multiprocessors", lambda _: 132)
    rows, width = 3, 130 * 16 - 5
    sums = empty_sums(rows, width, norm == "layer")
    hidden = written(rows, width, 16, dtype, sums)
    assert sums.parts == 130
    reader, _, out, expected = layer_case(READERS[norm], rows, COLUMNS, width, dtype, "kernel", hidden)
    assert_close("out", reader(hidden, out, sums=sums).cpu(), expected, 2 * TOLERANCES[dtype])


@pytest.mark.parametrize("norm", READERS)
def test_one_row_neither_writes_nor_reads_sums(norm: str) -> None:
    sums = empty_sums(1, WIDTH, norm == "layer")
    sums.parts = 3
    hidden = written(1, WIDTH, 40, torch.float32, sums)
    assert sums.parts == 0 and sums.values.isnan().all()
    sums.parts = 3
    reader, _, out, expected = layer_case(READERS[norm], 1, COLUMNS, WIDTH, torch.float32, "kernel", hidden)
    assert_close("out", reader(hidden, out, sums=sums).cpu(), expected, 2e-6)


def test_layer_norm_does_not_use_sums_of_squares_alone() -> None:
    sums = empty_sums(5, WIDTH, centered=False)
    hidden = written(5, WIDTH, 40, torch.float32, sums)
    reader, _, out, expected = layer_case(READERS["layer"], 5, COLUMNS, WIDTH, torch.float32, "kernel", hidden)
    assert_close("out", reader(hidden, out, sums=sums).cpu(), expected, 2e-6)


def test_layer_norm_of_large_constant_rows_is_finite() -> None:
    """A layer norm's variance is a difference: never less than none, whatever is rounded."""
    rows, (writer, x, _, _) = 16, layer_case(WRITER, 16, WIDTH, 40, torch.float32, "kernel")
    writer.bias, sums = None, empty_sums(rows, WIDTH, centered=True)
    hidden = (torch.arange(1.0, rows + 1, device=DEVICE) * 333.3)[:, None].repeat(1, WIDTH)
    writer(torch.zeros_like(x), hidden, add=True, sums=sums)
    reader, _, out, _ = layer_case(READERS["layer"], rows, COLUMNS, WIDTH, torch.float32, "kernel", hidden)
    assert reader(hidden, out, sums=sums).isfinite().all()


# family, settings, batch, how many of the 5 linears behind a norm (of two blocks and the head) are given their sums
DECODE_MODELS = [
    ("llama", dict(rule="decay", m=6), 3, 4),
    ("llama", dict(rule="gated", m=4, window=3, state_heads="kv"), 18, 4),
    ("llama", dict(rule="decay", m=6), 1, 0),
    ("gpt2", dict(rule="delta", m=6), 3, 4),
    ("gpt_neox", dict(rule="decay", m=4), 3, 3),
    ("opt", dict(rule="decay", m=4), 2, 4),
    ("gemma2", dict(rule="decay", m=6), 2, 0),
]


@pytest.mark.parametrize(("family", "settings", "batch", "given"), DECODE_MODELS, ids=str)
def test_decode_model_passes_norm_sums_between_linears(
    family: str, settings: dict[str, Any], batch: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step after step the model's own logits; sums that no linear of the step has left are not a number."""
    counts, parts_given = [], FusedLinear._parts_given

    def spy(self: FusedLinear, sums: NormSums | None) -> int:
        found = parts_given(self, sums)
        if self.norm is not None:
            counts.append(found)
        return found

    monkeypatch.setattr(FusedLinear, "_parts_given", spy)
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(**settings)).eval().to(DEVICE)
    decoder, text = DecodeModel(model, batch, kernels=True), tokens(batch, 6).to(DEVICE)
    with torch.no_grad():
        for slot in range(batch):
            decoder.set_slot(slot, model(text[slot : slot + 1, :2], use_cache=True).past_key_values)
        for t in range(2, 4 if batch > 16 else 6):  # many rows take the interpreter long
            decoder.tokens.copy_(text[:, t])
            decoder.sums.values.fill_(math.nan)
            counts.clear()
            assert_close("logits", decoder.step().cpu(), model(text[:, : t + 1]).logits[:, -1].cpu(), 2e-5)
            assert len(counts) == 5 and sum(count > 0 for count in counts) == given
            assert given == 0 or max(counts) > 1 or DEVICE == "cuda"


def test_sums_are_dropped_when_torch_changes_the_rows() -> None:
    """As if a model normed what only one of a block's halves adds."""
    model = fw.convert(pretrained("gemma2"), fw.FastWeightsConfig(m=6)).eval().to(DEVICE)
    for normed in (0, 1):
        decoders = [DecodeModel(model, 3, kernels=kernel) for kernel in (True, False)]
        for decoder in decoders:
            decoder.tokens.copy_(tokens(3))
            for block in decoder.blocks:
                block.out_norms[1 - normed] = None
        found, expected = (decoder.step().cpu() for decoder in decoders)
        assert_close("logits", found, expected, 2e-5)
        assert decoders[0].sums.parts == (0 if normed else 2) or DEVICE == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 32, 64, 256])
@pytest.mark.parametrize("norm", READERS)
@pytest.mark.parametrize(("width", "k"), [(576, 1536), (2048, 8192)])
def test_passed_sums_are_bitwise_reproducible(width: int, k: int, norm: str, rows: int) -> None:
    """Writers and readers that start while the one before still runs, with one place for the sums."""
    writer, x, before, _ = layer_case(WRITER, rows, width, k, torch.bfloat16, "kernel")
    hidden, sums = before.clone(), empty_sums(rows, width, norm == "layer")
    writer(x, hidden, add=True)
    reader, _, out, expected = layer_case(READERS[norm], rows, 1536, width, torch.bfloat16, "kernel", hidden)
    writer.overlap = reader.overlap = can_overlap(x.device)
    others = [randn(rows, width, seed=i).to(before) for i in range(50)]
    pairs = [(before.clone(), torch.empty_like(out)) for _ in others]
    for other, (rows_written, found) in zip(others, pairs, strict=True):
        writer(x, other, add=True, sums=sums)
        reader(other, out, sums=sums)
        writer(x, rows_written, add=True, sums=sums)
        reader(rows_written, found, sums=sums)
    assert all(torch.equal(found, pairs[0][1]) for _, found in pairs[1:])
    assert_close("out", pairs[0][1].cpu(), expected, 1e-2)
