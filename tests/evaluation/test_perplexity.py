"""Perplexity and loss by position agree with a plain reading of their definitions."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cli import CHARACTERS, tokenizer
from helpers.tiny import pretrained
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastweights import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.data.readers import read_text
from fastweights.evaluation.perplexity import (
    EvaluationError,
    Perplexity,
    perplexity,
    perplexity_by_position,
)
from fastweights.modeling.fairseq import dictionary_tokenizer
from fastweights.modeling.positions import PositionError
from fastweights.results import PositionBucket
from fastweights.utils.errors import CheckpointError

TEXT = "".join(CHARACTERS[i] for i in torch.randint(0, 55, (150,), generator=torch.Generator().manual_seed(3)))
QUIET = dict(progress=False)
evaluation = importlib.import_module("fastweights.evaluation.perplexity")


def converted(family: str = "llama", **settings: Any) -> Any:
    return convert(pretrained(family), FastWeightsConfig(**dict(rule="decay", m=4) | settings))


def row_of(text: str) -> torch.Tensor:
    return torch.tensor([1, *tokenizer()(text, add_special_tokens=False)["input_ids"]])


@torch.no_grad()
def loss_of(model: Any, seen: torch.Tensor, target: torch.Tensor) -> float:
    return float(-model(seen[None], use_cache=False).logits[0, -1].double().log_softmax(-1)[target])


def definition(model: Any, text: str, length: int, context: int, bos: bool) -> float:
    """Token by token: the number of its window tells what has been seen before it. With `bos` every window starts with
    it, else the row does."""
    row = row_of(text)
    count, step, nll = len(row) - 1, length - context, 0.0
    for token in range(1, count + 1):
        window = 0 if token <= length else 1 + (token - length - 1) // step
        first = max(0, min(count, length + window * step) - length)
        seen = torch.cat([row[:1] if bos else row[first : first + 1], row[first + 1 : token]])
        nll += loss_of(model, seen, row[token])
    return nll


@pytest.mark.parametrize("bos", (True, False), ids=("bos", "no bos"))
@pytest.mark.parametrize("context", (0, 5, 15))
@pytest.mark.parametrize("model", (pretrained("gpt2"), converted(window=3)), ids=("gpt2", "converted"))
def test_each_token_is_scored_once_in_its_window(model: Any, context: int, bos: bool) -> None:
    found = perplexity(model, tokenizer(bos), TEXT[:90], length=16, context=context, batch_size=3, **QUIET)
    assert found.nll == pytest.approx(definition(model, TEXT[:90], 16, context, bos), rel=1e-5)
    assert (found.tokens, found.length, found.context) == (90, 16, context)


class Bits(nn.Module):
    """The token at place i of what it reads, from 1, predicts `a` and the end of the line with probability 2 ** -i."""

    config = SimpleNamespace(vocab_size=5)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:
        chance = 0.5 ** torch.arange(1.0, input_ids.shape[1] + 1)[:, None]
        rest = (1 - 2 * chance) / 3
        row = torch.cat([rest, rest, chance, rest, chance], 1).log()
        return CausalLMOutputWithPast(logits=row.expand(len(input_ids), -1, -1))


def test_context_of_fairseq_by_hand(tmp_path: Path) -> None:
    """Seven tokens, the last one the end of the line. A loss is as many bits as the window has tokens up to there.

    --length 4 --context 0: windows of 4 and 3 tokens, 1 + 2 + 3 + 4 and 1 + 2 + 3 bits.
    --length 4 --context 2: 1 + 2 + 3 + 4 for the first window; 3 + 4 for the last two of the next; then one token is
    left, which sees two before it: 3 bits.
    """
    (tmp_path / "dict.txt").write_text("a 2\n")
    words = dictionary_tokenizer(tmp_path / "dict.txt", 5)
    for context, bits in ((0, 16), (2, 20)):
        for text in ("a a a a a a", "a a a a a a\n"):
            found = perplexity(Bits(), words, text, length=4, context=context, **QUIET)
            assert found.tokens == 7 and found.nll == pytest.approx(bits * math.log(2))
            assert found.token == pytest.approx(2 ** (bits / 7))
    blank_last_line = "a a \n "  # as WikiText's files end, without their last line break
    assert perplexity(Bits(), words, blank_last_line, length=4, **QUIET).tokens == 4


WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "wikitext-103"


@pytest.mark.skipif(not WIKITEXT.is_dir(), reason="WikiText-103 and its dictionary are not in ../shared/data")
def test_wikitext_has_all_its_tokens_and_unknown_words() -> None:
    """245,569 tokens of the test text, which fairseq counts, and the published shares of unknown words."""
    words = dictionary_tokenizer(WIKITEXT / "dict.txt.xz", 267_744)
    for split, tokens, share in (("valid", 217_646, 0.0077), ("test", 245_569, 0.0103)):
        text = read_text(WIKITEXT / f"wiki.{split}.tokens.xz")
        row = evaluation._token_row(None, words, text)[1:]
        assert len(row) == tokens
        assert float((row == words.unk_token_id).sum()) / len(text.split()) == pytest.approx(share, abs=5e-5)


def test_adaptive_softmax_is_scored_without_logits_of_all_words() -> None:
    for model in (pretrained("adaptive_input"), converted("adaptive_input", window=3)):
        found = perplexity(model, tokenizer(), TEXT[:90], length=16, context=5, batch_size=3, **QUIET)
        assert found.nll == pytest.approx(definition(model, TEXT[:90], 16, 5, True), rel=1e-5)


def test_repr_shows_the_perplexity() -> None:
    found = perplexity(converted(), tokenizer(), TEXT[:40], **QUIET)
    assert f"token={found.token:.6g}" in repr(found) and f"word={found.word:.6g}" in repr(found)


def test_text_shorter_than_a_window_is_scored_at_once() -> None:
    model = converted()
    whole = perplexity(model, tokenizer(), TEXT[:40], length=400, **QUIET)
    row = row_of(TEXT[:40])[None]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(row[:, :-1]).logits[0], row[0, 1:], reduction="sum")
    assert whole.nll == pytest.approx(float(loss), rel=1e-5)
    assert perplexity(model, tokenizer(), TEXT[:40], length=400, context=399, **QUIET).nll == whole.nll


def test_perplexity_is_reported_per_token_word_and_byte() -> None:
    found = perplexity(converted(), tokenizer(), "ab cd\n ef?", **QUIET)
    assert (found.tokens, found.words, found.bytes) == (10, 3, 10)
    assert found.token == pytest.approx(math.exp(found.nll / 10))
    assert found.word == pytest.approx(math.exp(found.nll / 3))
    assert found.bits_per_byte == pytest.approx(found.nll / math.log(2) / 10)
    assert perplexity(converted(), tokenizer(), "é" * 4, **QUIET).bytes == 8
    assert Perplexity(1e6, 10, 2, 10, 16, 0).word == math.inf


def test_without_bos_and_eos_the_first_token_is_not_scored() -> None:
    bare = tokenizer()
    bare.bos_token = None
    model, row = converted(), row_of(TEXT[:30])[1:]
    found = perplexity(model, bare, TEXT[:30], length=64, **QUIET)
    assert found.tokens == 29
    assert found.nll == pytest.approx(sum(loss_of(model, row[:i], row[i]) for i in range(1, 30)), rel=1e-5)
    bare.eos_token = "<pad>"
    assert perplexity(model, bare, TEXT[:30], length=64, **QUIET).tokens == 30


def test_bfloat16_logits_are_scored_in_float32() -> None:
    model, row = converted().bfloat16(), row_of(TEXT[:30])
    with torch.no_grad():
        logits = model(row[None, :-1], use_cache=False).logits[0]
    loss = nn.functional.cross_entropy(logits.float(), row[1:], reduction="sum")
    assert logits.dtype == torch.bfloat16
    assert perplexity(model, tokenizer(), TEXT[:30], **QUIET).nll == pytest.approx(float(loss), rel=1e-6)


def test_modes_are_restored_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    model = converted().train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    perplexity(model, tokenizer(), TEXT, length=32)
    with pytest.raises(EvaluationError):
        perplexity(model.double().apply(_spoil), tokenizer(), TEXT, length=32)
    assert [module.training for module in model.modules()] == before
    assert capfd.readouterr() == ("", "")


def _spoil(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        module.weight.data.fill_(math.nan)


@pytest.mark.parametrize(
    ("text", "settings", "reason"),
    (
        ("", {}, "the text is empty"),
        (" \n", {}, "the text is empty"),
        ("a", {}, "has 1 token"),
        (TEXT, dict(context=16), "context 16 with length 16"),
        (TEXT, dict(context=-1), "context -1"),
        (TEXT, dict(length=0), "length 0"),
        (TEXT, dict(batch_size=0), "batch_size 0"),
    ),
)
def test_bad_text_or_window_is_refused(text: str, settings: dict[str, int], reason: str) -> None:
    with pytest.raises(EvaluationError, match=reason):
        perplexity(converted(), tokenizer(), text, **dict(length=16) | settings, **QUIET)


def test_missing_or_other_tokenizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        perplexity(converted(), None, TEXT, **QUIET)
    model = converted()
    model.resize_token_embeddings(40)
    with pytest.raises(EvaluationError, match="another model's tokenizer"):
        perplexity(model, tokenizer(), TEXT, **QUIET)


def test_a_loss_that_is_not_finite_names_its_window() -> None:
    model = converted()
    model.get_input_embeddings().weight.data[row_of("Z")[1]] = math.nan
    with pytest.raises(EvaluationError, match="nan in the window of tokens 32 to 48"):
        perplexity(model, tokenizer(), "a" * 40 + "Z" + "a" * 40, length=16, **QUIET)


def test_windows_past_the_position_table_are_refused_unless_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (pretrained("gpt2"), converted("gpt2"), pretrained("opt")):
        with pytest.raises(PositionError, match="learned positions for 96 tokens"):
            perplexity(model, tokenizer(), TEXT, length=97, **QUIET)
        with pytest.raises(PositionError, match="learned positions for 96 tokens"):
            perplexity_by_position(model, tokenizer(), TEXT, length=97, **QUIET)
    monkeypatch.setattr(evaluation, "CHUNK", 50)
    clamped = converted("gpt2", positions="clamp")
    assert perplexity(clamped, tokenizer(), TEXT, length=140, **QUIET).tokens == 150
    assert perplexity_by_position(clamped, tokenizer(), TEXT, length=140, **QUIET)[-1].end == 140


def test_by_position_adds_up_to_the_perplexity() -> None:
    model = converted(window=3)
    found = perplexity_by_position(model, tokenizer(), TEXT, length=75, batch_size=1, **QUIET)
    assert [(row.start, row.end, row.tokens) for row in found] == [(0, 64, 128), (64, 75, 22)]
    total = sum(row.loss * row.tokens for row in found)
    assert total == pytest.approx(perplexity(model, tokenizer(), TEXT, length=75, **QUIET).nll, rel=1e-6)
    assert found[0].perplexity == pytest.approx(math.exp(found[0].loss))


@pytest.mark.parametrize("bos", (True, False), ids=("bos", "no bos"))
def test_position_buckets_average_the_right_tokens(bos: bool) -> None:
    model, row = converted(), row_of(TEXT)
    found = perplexity_by_position(model, tokenizer(bos), TEXT, length=50, buckets=(0, 1, 40, 99), **QUIET)
    assert [(row.start, row.end) for row in found] == [(0, 1), (1, 40), (40, 50)]
    first = sum(loss_of(model, row[:1] if bos else row[i : i + 1], row[i + 1]) for i in (0, 50, 100)) / 3
    assert found[0].loss == pytest.approx(first, rel=1e-5)
    long = perplexity_by_position(converted(), tokenizer(), TEXT * 4, length=500, **QUIET)
    assert [row.start for row in long] == [0, 64, 128, 256]
    with pytest.raises(EvaluationError, match="has only 150"):
        perplexity_by_position(model, tokenizer(), TEXT, length=151, **QUIET)


@pytest.mark.parametrize(
    "model",
    (pretrained("llama"), pretrained("mistral"), pretrained("gpt_neox"), converted(window=3), converted(layers=(1,))),
    ids=("llama", "mistral", "gpt_neox", "converted", "hybrid"),
)
def test_long_windows_read_in_chunks_give_the_same_losses(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> tuple[list[PositionBucket], float]:
        by_position = perplexity_by_position(model, tokenizer(), TEXT, length=70, **QUIET)
        return by_position, perplexity(model, tokenizer(), TEXT, length=70, context=60, **QUIET).nll

    at_once = both()
    monkeypatch.setattr(evaluation, "CHUNK", 16)
    chunked = both()
    for one, other in zip(at_once[0], chunked[0], strict=True):
        assert one.to_dict() == pytest.approx(other.to_dict(), rel=1e-5)
    assert at_once[1] == pytest.approx(chunked[1], rel=1e-5)
