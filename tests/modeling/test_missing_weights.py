"""Weights and buffers that a checkpoint does not have, or has in another shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import CONFIGS, config_of, pretrained, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import id_tensor_storage

import fastweights as fw
from fastweights.modeling.classes import CLASSES
from fastweights.utils.errors import CheckpointError

VARIANTS = [
    dict(rule="decay", m=6, gate_init="log"),
    dict(rule="delta", m=6, window=3, output_norm=True, mix="token"),
    dict(rule="gated_delta", m=8, window=3, projections="shared", gate_rank=3),
    dict(rule="gated", m=4, feature_map="rfa", normalize="attention", layers=(1,)),
    dict(rule="abc", m=4),
    dict(rule="linformer", m=4, train_length=20),
]


def converted(family: str = "llama", **settings: Any) -> Any:
    return fw.convert(pretrained(family), fw.FastWeightsConfig(**settings or VARIANTS[0]))


def fill_with_garbage(model: Any) -> None:
    """What memory from `to_empty` may hold."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(10**6 if not tensor.is_floating_point() else float("nan"))


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s["rule"])
@pytest.mark.parametrize("family", CONFIGS)
def test_init_weights_after_meta_device_fills_every_weight_and_buffer(family: str, settings: dict[str, Any]) -> None:
    config_class, model_class = CLASSES[family]
    settings_of = fw.FastWeightsConfig(**settings).to_dict()
    config = config_class.from_dict(config_of(family).to_dict() | {"fastweights": settings_of})
    with torch.device("meta"):
        model = model_class(config)
    model.to_empty(device="cpu")
    fill_with_garbage(model)
    model.init_weights()
    model.eval()
    assert torch.isfinite(model(tokens(1, 7)).logits).all()
    expected = converted(family, **settings)
    drawn = ("key_scale", "gates.f.bias", "gates.g.bias", "gates.s.weight", "gates.weight.weight", "mix.logit")
    drawn += ("mix.from_token", "gate_down", "feature_map")
    for name, tensor in expected.state_dict().items():
        if any(part in name for part in drawn):
            assert torch.equal(model.state_dict()[name], tensor), f"{name} starts as in a conversion"


def test_init_weights_leaves_converted_layers_alone() -> None:
    model = converted()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.init_weights()
    layers = [name for name in before if "self_attn" in name]
    assert layers and all(torch.equal(model.state_dict()[name], before[name]) for name in layers)


@pytest.mark.parametrize("buffer", ["planes", "key_scale"])
def test_a_missing_buffer_is_an_error_that_names_it(buffer: str, tmp_path: Path) -> None:
    model = converted()
    model.save_pretrained(tmp_path)
    remaining = {name: x for name, x in load_file(tmp_path / "model.safetensors").items() if not name.endswith(buffer)}
    save_file(remaining, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"missing tensors: .*{buffer}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def other_shapes(folder: Path, *endings: str) -> set[str]:
    """Give some tensors of a checkpoint another shape; returns their names."""
    tensors = load_file(folder / "model.safetensors")
    changed = {name for name in tensors if name.endswith(endings)}
    save_file(
        {name: x[:-1].clone() if name in changed else x for name, x in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return changed


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, fw.load])
def test_ignore_mismatched_sizes_initializes_tensors_of_another_shape(load: Any, tmp_path: Path) -> None:
    model = converted()
    model.save_pretrained(tmp_path)
    changed = other_shapes(tmp_path, "planes", "key_scale", "gates.f.bias", "q_proj.weight")
    with pytest.raises(CheckpointError, match="another shape"):
        load(tmp_path)
    loaded = load(tmp_path, ignore_mismatched_sizes=True)
    assert torch.isfinite(loaded(tokens(1, 7)).logits).all()
    for name, tensor in model.state_dict().items():
        if name not in changed:
            assert torch.equal(loaded.state_dict()[name], tensor), f"{name} is in the checkpoint"
    scale = "model.layers.0.self_attn.rule.key_scale"
    assert torch.equal(loaded.state_dict()[scale], model.state_dict()[scale]), "drawn as in a conversion"


def test_another_number_of_labels_needs_ignore_mismatched_sizes(tmp_path: Path) -> None:
    converted("gpt2").save_pretrained(tmp_path / "whole")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", num_labels=3)
    classifier.save_pretrained(tmp_path / "three")
    with pytest.raises(CheckpointError, match=r"another shape: .*score\.weight"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "three", num_labels=5)
    five = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "three", num_labels=5, ignore_mismatched_sizes=True
    )
    assert five.score.weight.shape[0] == 5


@pytest.mark.parametrize("family, settings", [("gpt2", dict(m=4)), ("llama", dict(m=4, rotary="drop"))])
def test_empty_tensors_of_a_state_dict_do_not_look_tied(family: str, settings: dict[str, Any]) -> None:
    storages = [
        id_tensor_storage(x) for name, x in converted(family, **settings).state_dict().items() if x.numel() == 0
    ]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("family, settings", [("gpt2", dict(m=4)), ("llama", dict(m=4, rotary="drop"))])
def test_checkpoints_with_empty_planes_still_load(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = converted(family, **settings)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    earlier = {f"{name}.planes": x for name, x in _empty_planes(model).items()}
    save_file(tensors | earlier, tmp_path / "model.safetensors", {"format": "pt"})
    for load in (AutoModelForCausalLM.from_pretrained, fw.load):
        assert torch.equal(load(tmp_path)(tokens(1, 5)).logits, model(tokens(1, 5)).logits)
    model.load_state_dict(model.state_dict() | earlier)


def _empty_planes(model: Any) -> dict[str, torch.Tensor]:
    found = {name: module.planes for name, module in model.named_modules() if hasattr(module, "planes")}
    assert found and all(x.numel() == 0 for x in found.values())
    return found
