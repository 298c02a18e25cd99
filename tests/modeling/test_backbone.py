"""The backbone alone (AutoModel) and the sequence classifier: padding, packed documents, saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, pretrained, tokens
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import fastweights as fw
from fastweights.utils.errors import CheckpointError

VARIANTS = [dict(rule="decay", m=6), dict(rule="delta", m=6, window=3), dict(m=4, layers=(0,))]
NAMES = ["decay", "delta-window", "hybrid"]


def converted(family: str = "llama", **settings: Any) -> Any:
    return fw.convert(pretrained(family), fw.FastWeightsConfig(**settings or VARIANTS[0]))


def padded_batch(side: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Two sequences of 5 and 9 tokens, padded to 9 with token 0: ids, attention mask, and the sequences alone."""
    ids, mask = tokens(2, 9, seed=3).clamp(min=1), torch.ones(2, 9, dtype=torch.long)
    padding = slice(0, 4) if side == "left" else slice(5, 9)
    ids[0, padding], mask[0, padding] = 0, 0
    return ids, mask, [row[real.bool()][None] for row, real in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("settings", VARIANTS, ids=NAMES)
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_backbone_ignores_padding(family: str, settings: dict[str, Any], side: str) -> None:
    model = converted(family, **settings)
    ids, mask, sequences = padded_batch(side)
    found = model.base_model(ids, attention_mask=mask).last_hidden_state
    whole = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(found, whole), "the causal language model has the same hidden states"
    for row, sequence in enumerate(sequences):
        alone = model.base_model(sequence).last_hidden_state[0]
        assert_close(f"hidden states of row {row}", found[row][mask[row].bool()], alone, 1e-5)


@pytest.mark.parametrize("settings", VARIANTS, ids=NAMES)
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_backbone_separates_packed_documents(family: str, settings: dict[str, Any]) -> None:
    backbone, ids = converted(family, **settings).base_model, tokens(1, 9)
    packed = backbone(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])).last_hidden_state
    assert_close("second document", packed[:, 4:], backbone(ids[:, 4:]).last_hidden_state, 1e-5)


@pytest.mark.parametrize("settings", VARIANTS, ids=NAMES)
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@torch.no_grad()
def test_backbone_continues_from_its_cache(family: str, settings: dict[str, Any]) -> None:
    backbone, ids = converted(family, **settings).base_model, tokens(2, 9)
    first = backbone(ids[:, :5])
    assert isinstance(first.past_key_values, fw.FastWeightsCache)
    rest = backbone(ids[:, 5:], past_key_values=first.past_key_values).last_hidden_state
    assert_close("hidden states", rest, backbone(ids).last_hidden_state[:, 5:], 1e-5)


def test_opt_decoder_inside_the_backbone_ignores_padding() -> None:
    decoder = converted("opt").model.decoder
    ids, mask, sequences = padded_batch("left")
    with torch.no_grad():
        found = decoder(ids, attention_mask=mask).last_hidden_state[:1, 4:]
        assert_close("hidden states", found, decoder(sequences[0]).last_hidden_state, 1e-5)


def test_backbone_without_tokens_names_its_arguments() -> None:
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        converted().model()


@pytest.mark.parametrize("settings", VARIANTS, ids=NAMES)
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_auto_model_loads_the_backbone_of_a_converted_folder(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model, ids = converted(family, **settings), tokens(2, 7)
    model.save_pretrained(tmp_path / "whole")
    backbone = AutoModel.from_pretrained(tmp_path / "whole")
    assert type(backbone) is type(model.base_model)
    expected = model.base_model(ids).last_hidden_state
    assert torch.equal(backbone(ids).last_hidden_state, expected)
    backbone.save_pretrained(tmp_path / "backbone")
    again = AutoModel.from_pretrained(tmp_path / "backbone")
    assert again.config.model_type == model.config.model_type
    assert torch.equal(again(ids).last_hidden_state, expected)


@pytest.mark.parametrize("settings", VARIANTS, ids=NAMES)
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_classifier_is_loaded_from_a_converted_folder_and_ignores_padding(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = converted(family, **settings)
    model.save_pretrained(tmp_path / "whole")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", num_labels=3)
    classifier.save_pretrained(tmp_path / "classifier")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    for side in ("left", "right"):
        ids, mask, sequences = padded_batch(side)
        logits = classifier(ids, attention_mask=mask).logits
        assert logits.shape == (2, 3)
        assert torch.equal(loaded(ids, attention_mask=mask).logits, logits)
        for row, sequence in enumerate(sequences):
            hidden = model(sequence, output_hidden_states=True).hidden_states[-1][:, -1]
            assert_close(f"logits of row {row}", logits[row : row + 1], classifier.score(hidden), 1e-5)


def test_classifier_trains_all_parameters(tmp_path: Path) -> None:
    converted("gpt2").save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).train()
    ids, mask, _ = padded_batch("left")
    classifier(ids, attention_mask=mask, labels=torch.tensor([0, 2])).loss.backward()
    assert all(parameter.grad is not None for parameter in classifier.parameters())


def test_tensors_of_the_backbone_must_be_in_the_checkpoint(tmp_path: Path) -> None:
    model = converted()
    weights = model.state_dict()
    gate = "model.layers.0.self_attn.rule.gates.f.weight"
    model.save_pretrained(tmp_path, state_dict={name: x for name, x in weights.items() if name != gate})
    for auto in (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification):
        with pytest.raises(CheckpointError, match=r"missing tensors: .*layers\.0\.self_attn\.rule\.gates\.f\.weight"):
            auto.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", CONFIGS)
def test_converting_a_backbone_names_the_auto_class_to_use(family: str) -> None:
    with pytest.raises(ValueError, match=f"{type(pretrained(family).base_model).__name__}.*AutoModelForCausalLM"):
        fw.convert(pretrained(family).base_model)
