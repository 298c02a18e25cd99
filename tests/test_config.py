"""FastWeightsConfig: defaults, refusals, and the way to JSON and back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

import fastweights
from fastweights.config import DEFAULT_LOCAL_WINDOW, FEATURE_MAPS, POSITIVE_MAPS, RULES, ConfigError, FastWeightsConfig

FIELDS = [f.name for f in fields(FastWeightsConfig)]
# The best configuration of each rule in the paper's Table 1, where gated_delta is missing: feature map, normalizer,
# window, initialization of the gates.
DEFAULTS = {
    "decay": ("none", "none", 0, "uniform"),
    "gated": ("none", "none", 0, "uniform"),
    "add": ("none", "none", 0, "uniform"),
    "delta": ("relu", "sum", 0, "uniform"),
    "gated_delta": ("none", "unit", 0, "log"),
    "local": ("none", "none", 32, "uniform"),
    "abc": ("none", "none", 0, "uniform"),
    "linformer": ("none", "none", 0, "uniform"),
}
VALID: list[dict[str, Any]] = [
    *({"rule": rule} for rule in RULES),
    {"rule": "delta", "m": 64, "feature_map": "dpfp", "normalize": "attention+sum"},
    {"rule": "gated", "feature_map": "favor+", "normalize": "attention", "gate_init": "log", "train_length": 512},
    {"rule": "decay", "window": 16, "output_norm": True, "rotary": "drop", "state_heads": "kv", "seed": 7},
    {"rule": "delta", "projection_init": "random"},
    {"rule": "delta", "feature_map": "none", "normalize": "unit"},
    {"rule": "gated_delta", "gate_init": "uniform", "feature_map": "elu", "normalize": "sum"},
    {"rule": "decay", "gate_init": "teacher"},
    {"rule": "gated", "window": 1, "mix": "token"},
    {"rule": "gated_delta", "window": 1, "projections": "shared", "gate_rank": 1},
    {"rule": "decay", "window": 4, "gate_init": "log", "projections": "shared", "state_heads": "kv"},
    {"rule": "add", "window": 4, "mix": "token", "gate_rank": 4},
    {"rule": "abc", "m": 64, "gate_rank": 4, "output_norm": True, "rotary": "drop", "state_heads": "kv"},
    {"rule": "abc", "window": 4, "projections": "shared"},
    {"rule": "linformer", "window": 4, "mix": "token", "gate_rank": 4, "train_length": 512},
    {"rule": "local", "sinks": 4},
    {"rule": "decay", "window": 2, "sinks": 1},
    {"rule": "decay", "ablation": "gated_write+pretrained_values"},
    {"rule": "add", "ablation": "pretrained_values"},
    {"rule": "gated", "ablation": "one_gate"},
    {"rule": "add", "layers": (0, 3, 5), "positions": "clamp", "feature_map": "rfa", "m": 4},
    {"rule": "local", "window": 1},
    {"rule": "local", "wide_window": 33},
    {"rule": "gated_delta", "window": 4, "wide_window": 8, "wide_layers": (0, 3), "layers": (0, 2, 3)},
    # no positive map is asked for where the divisor alone is summed: the paper tried it (and it diverged)
    {"rule": "add", "normalize": "attention"},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rule": "softmax"}, r"rule='softmax' is not known; choose one of decay, gated, delta, gated_delta, add, local"),
    ({"feature_map": "cosine"}, r"feature_map='cosine' is not known; choose one of none, relu, elu, dpfp"),
    (
        {"normalize": "layer"},
        r"normalize='layer' is not known; choose one of none, attention, sum, attention\+sum, unit",
    ),
    ({"gate_init": "zero"}, r"gate_init='zero' is not known; choose one of uniform, log, teacher"),
    ({"rotary": "maybe"}, r"rotary='maybe' is not known; choose one of keep, drop"),
    ({"state_heads": "all"}, r"state_heads='all' is not known; choose one of query, kv"),
    ({"positions": "wrap"}, r"positions='wrap' is not known; choose one of error, clamp"),
    ({"m": 0}, r"m must be between 1 and 65,536, found 0"),
    ({"m": 4.0}, r"m must be a whole number, found 4\.0"),
    ({"m": True}, r"m must be a whole number, found True"),
    ({"window": -1}, r"window must be between 0 and 1,048,576, found -1"),
    ({"window": 10**22}, r"window must be between 0 and 1,048,576, found 10000000000000000000000"),
    ({"rule": "local", "window": 0}, r"window must be at least 1 for the local rule, found 0"),
    ({"window": 4, "sinks": -1}, r"sinks must be between 0 and 1,048,576, found -1"),
    ({"window": 4, "sinks": 4}, r"sinks must be fewer than window, found sinks=4, window=4: "),
    ({"sinks": 1}, r"sinks must be fewer than window, found sinks=1, window=0: "),
    ({"rule": "local", "sinks": 33}, r"sinks must be fewer than window, found sinks=33, window=32: "),
    ({"wide_window": 8}, r"wide_window must be larger than window, which must not be 0, found 8 and window=0"),
    ({"window": 8, "wide_window": 8}, r"wide_window must be larger than window, .* found 8 and window=8"),
    ({"window": 8, "wide_window": -1}, r"wide_window must be between 0 and 1,048,576, found -1"),
    ({"window": 8, "wide_layers": (1,)}, r"wide_layers=\(1,\) needs wide_window, their window, found 0"),
    ({"window": 4, "wide_window": 8, "wide_layers": ()}, r"wide_layers must name at least one layer .* found \(\)"),
    ({"window": 4, "wide_window": 8, "wide_layers": (1, 1)}, r"wide_layers must name .* only once, found \(1, 1\)"),
    ({"window": 4, "wide_window": 8, "wide_layers": (-1,)}, r"wide_layers must be layer numbers from 0 up"),
    (
        {"window": 4, "wide_window": 8, "wide_layers": (0, 1), "layers": (1, 2)},
        r"wide_layers=\[0\] remain attention: name layers that are converted",
    ),
    ({"window": 4, "mix": "sum"}, r"mix='sum' is not known; choose one of constant, token"),
    ({"mix": "token"}, r"mix='token' is the window's share .* needs both, found rule='decay', window=0"),
    ({"rule": "local", "mix": "token"}, r"mix='token' .* needs both, found rule='local', window=32"),
    ({"window": 4, "projections": "one"}, r"projections='one' is not known; choose one of own, shared"),
    ({"rule": "gated", "projections": "shared"}, r"needs a window and a state, found rule='gated', window=0"),
    ({"rule": "local", "projections": "shared"}, r"needs a window and a state, found rule='local', window=32"),
    ({"rule": "delta", "window": 4, "projections": "shared"}, r"needs feature_map='none', found 'relu'"),
    ({"rule": "gated", "window": 4, "projections": "shared", "rotary": "drop"}, r"needs rotary='keep', found 'drop'"),
    (
        {"rule": "gated", "window": 4, "projections": "shared", "projection_init": "random"},
        r"projections='shared' needs projection_init='attention', found 'random'",
    ),
    ({"window": 4, "projections": "shared"}, r"projections='shared' needs gate_init='log', found 'uniform'"),
    ({"gate_rank": -1}, r"gate_rank must be between 0 and 65,536, found -1"),
    ({"gate_rank": 1.5}, r"gate_rank must be a whole number or empty, found 1.5"),
    (
        {"rule": "add", "gate_rank": 4},
        r"gate_rank is for gates, .* none: leave it out; found rule='add', mix='constant'",
    ),
    (
        {"rule": "linformer", "gate_rank": 4},
        r"gate_rank is for gates, .* none: leave it out; found rule='linformer', mix='constant'",
    ),
    (
        {"rule": "local", "gate_rank": 4},
        r"gate_rank is for gates, .* none: leave it out; found rule='local', mix='constant'",
    ),
    ({"ablation": "all"}, r"ablation='all' is not known; choose one of linear_gates, gated_write, pretrained_values"),
    ({"ablation": "gated_write", "rule": "gated"}, r"is of the decay rule .* found rule='gated', gate_init='unif"),
    ({"ablation": "linear_gates", "gate_init": "log"}, r"with uniform gates, found rule='decay', gate_init='log'"),
    (
        {"ablation": "pretrained_values", "rule": "add", "normalize": "attention"},
        r"\(or add without a map\), found rule='add'",
    ),
    ({"ablation": "one_gate"}, r"'one_gate' is of the gated rule with uniform gates, found rule='decay'"),
    ({"train_length": 0}, r"train_length must be between 1 and 2,147,483,648, found 0"),
    ({"train_length": 10**22}, r"train_length must be between 1 and 2,147,483,648, found 1"),
    ({"seed": -1}, r"seed must be between 0 and 2,147,483,648, found -1"),
    ({"output_norm": 1}, r"output_norm must be true or false, found 1"),
    ({"layers": (0, -1)}, r"layers must be layer numbers from 0 up, found \(0, -1\)"),
    ({"layers": (0, 1.5)}, r"layers must be whole numbers or empty, found \(0, 1\.5\)"),
    ({"layers": (True,)}, r"layers must be whole numbers or empty, found \(True,\)"),
    ({"layers": ()}, r"layers must name at least one layer and each only once, found \(\)"),
    ({"layers": (2, 2)}, r"layers must name at least one layer and each only once, found \(2, 2\)"),
    ({"rule": "decay", "normalize": "attention"}, r"rule='decay'.*the decay rule has no normalizer"),
    ({"rule": "decay", "feature_map": "relu", "normalize": "sum"}, r"the decay rule has no normalizer"),
    ({"rule": "local", "feature_map": "relu"}, r"local attention is a softmax.*no feature map and no normalizer"),
    ({"rule": "local", "normalize": "attention"}, r"local attention is a softmax.*no feature map and no normalizer"),
    ({"rule": "delta", "feature_map": "none"}, r"sum normalization divides by the sum .* must be positive"),
    ({"rule": "delta", "feature_map": "rfa"}, r"use one of the maps relu, elu, dpfp, favor\+"),
    ({"rule": "add", "normalize": "attention+sum"}, r"sum normalization divides by the sum"),
    ({"rule": "add", "feature_map": "dpfp", "m": 5}, r"m=5.*dpfp makes an even number of features, at least 4"),
    ({"rule": "add", "feature_map": "dpfp", "m": 2}, r"m=2.*dpfp makes an even number of features, at least 4"),
    ({"rule": "add", "feature_map": "rfa", "m": 3}, r"m=3.*a sine and a cosine .* m must be even"),
    ({"rule": "add", "gate_init": "log"}, r"gate_init='log' spreads forget gates: use one of the rules decay"),
    ({"rule": "delta", "gate_init": "log"}, r"use one of the rules decay, gated, gated_delta"),
    ({"rule": "delta", "gate_init": "teacher"}, r"gate_init='teacher' spreads forget gates: use one of the rules"),
    ({"rule": "local", "gate_init": "log"}, r"use one of the rules decay, gated, gated_delta"),
    (
        {"rule": "linformer", "train_length": 2**21},
        r"train_length must be at most 1,048,576 for linformer, .* 2,097,152",
    ),
    ({"rule": "abc", "gate_init": "log"}, r"rule='abc'.*spreads forget gates: use one of the rules decay"),
    ({"rule": "linformer", "gate_init": "teacher"}, r"rule='linformer'.*use one of the rules decay"),
    ({"rule": "abc", "feature_map": "relu"}, r"feature_map='relu'.*abc reads its slots .* \(use feature_map='none'"),
    (
        {"rule": "linformer", "normalize": "attention"},
        r"='attention'.*linformer reads its slots .* no normalizer",
    ),
    ({"rule": "linformer", "normalize": "unit"}, r"rule='linformer'.*reads its slots"),
    ({"rule": "gated_delta", "normalize": "attention"}, r"the gated_delta rule has no attention normalization"),
    (
        {"rule": "gated_delta", "feature_map": "relu", "normalize": "attention+sum"},
        r"the gated_delta rule has no attention normalization",
    ),
    ({"rule": "gated", "normalize": "unit"}, r"rule='gated'.*unit length .* use one of the rules delta, gated_delta"),
    ({"rule": "add", "normalize": "unit"}, r"rule='add'.*unit length .* use one of the rules delta, gated_delta"),
    ({"rule": "decay", "normalize": "unit"}, r"rule='decay'.*the decay rule has no normalizer"),
    ({"rule": "local", "normalize": "unit"}, r"rule='local'.*no feature map and no normalizer"),
]


@pytest.mark.parametrize("rule", RULES)
def test_defaults_are_the_best_configuration_of_the_paper(rule: str) -> None:
    config = FastWeightsConfig(rule=rule)
    assert (config.feature_map, config.normalize, config.window, config.gate_init) == DEFAULTS[rule]
    assert (config.m, config.rotary, config.state_heads) == (32, "keep", "query")
    assert (config.output_norm, config.layers, config.seed) == (False, None, 0)


def test_public_names_exist() -> None:
    """The names product.md gives its users."""
    assert fastweights.FastWeightsConfig is FastWeightsConfig
    assert FastWeightsConfig().rule == "decay"
    assert DEFAULT_LOCAL_WINDOW == 32
    promised = {"rule", "m", "feature_map", "normalize", "gate_init", "window", "output_norm", "rotary"}
    assert promised | {"state_heads", "layers", "seed"} <= set(FIELDS)


@pytest.mark.parametrize("settings", VALID, ids=str)
def test_config_round_trips_through_json(settings: dict[str, Any]) -> None:
    config = FastWeightsConfig(**settings)
    again = FastWeightsConfig.from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)
    assert FastWeightsConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert list(config.to_dict()) == FIELDS


def test_layers_become_a_tuple() -> None:
    config = FastWeightsConfig(layers=[1, 2])
    assert config.layers == (1, 2)
    assert config.to_dict()["layers"] == [1, 2]
    assert [config.converts(i) for i in range(4)] == [False, True, True, False]
    assert all(FastWeightsConfig().converts(i) for i in range(4))


@pytest.mark.parametrize("name", FIELDS)
def test_config_is_frozen(name: str) -> None:
    config = FastWeightsConfig()
    with pytest.raises(FrozenInstanceError):
        setattr(config, name, getattr(config, name))


def test_replace_validates_again() -> None:
    config = FastWeightsConfig(rule="gated", normalize="attention", feature_map="relu")
    assert replace(config, m=8).m == 8
    with pytest.raises(ConfigError, match="no normalizer"):
        replace(config, rule="decay")


@pytest.mark.parametrize(("settings", "reason"), REFUSED, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_invalid_settings_are_refused_with_a_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FastWeightsConfig(**settings)


def test_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize("name", POSITIVE_MAPS)
def test_positive_maps_can_be_sum_normalized(name: str) -> None:
    config = FastWeightsConfig(rule="delta", feature_map=name)
    assert config.normalizes_sum
    assert not config.normalizes_attention


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("rule", ["add", "gated", "delta"])
def test_attention_normalizer_is_accepted_with_every_map(rule: str, name: str) -> None:
    config = FastWeightsConfig(rule=rule, feature_map=name, normalize="attention")
    assert config.normalizes_attention
    assert not config.normalizes_sum


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting color, size; known are rule, m, feature_map"):
        FastWeightsConfig.from_dict({"size": 3, "rule": "add", "color": "red"})


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_help(name: str) -> None:
    text = FastWeightsConfig.help(name)
    assert text.strip()
    choices = next(f for f in fields(FastWeightsConfig) if f.name == name).metadata["choices"]
    assert all(choice in text for choice in choices)
    assert FastWeightsConfig.type_of(name) is not None


def test_importing_config_imports_neither_torch_nor_huggingface_hub() -> None:
    code = "import sys, fastweights.config; sys.exit(' '.join({'torch', 'huggingface_hub'} & set(sys.modules)) or None)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_settings_of_a_layer_have_its_own_window() -> None:
    config = FastWeightsConfig(rule="local", window=4, sinks=1, wide_window=9, wide_layers=(1, 3))
    assert [config.of_layer(layer).window for layer in range(4)] == [4, 9, 4, 9]
    assert config.of_layer(1) == FastWeightsConfig(rule="local", window=9, sinks=1) == config.of_layer(1).of_layer(0)
