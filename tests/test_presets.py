"""Presets: what a conversion uses where the user has not chosen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers.tiny import CONFIGS, pretrained

import fastweights
from fastweights import ops
from fastweights.config import FEATURE_MAPS, RULES, ConfigError, FastWeightsConfig
from fastweights.presets import GATE_RANK, PRESETS, SINKS, WIDE_WINDOW, WINDOW, preset_config


def test_recommended_is_gated_delta_with_windows_and_sinks_and_no_second_projections() -> None:
    expected = FastWeightsConfig(
        rule="gated_delta",
        m=48,
        window=WINDOW,
        wide_window=WIDE_WINDOW,
        sinks=SINKS,
        mix="token",
        projections="shared",
        gate_init="log",
        gate_rank=GATE_RANK,
    )
    assert preset_config("recommended", 48, 32) == expected


def test_paper_is_the_default_of_the_settings() -> None:
    assert preset_config("paper", 48, 32) == FastWeightsConfig()
    assert preset_config("paper", 48, 32, rule="delta", m=8) == FastWeightsConfig(rule="delta", m=8)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (SINKS, 0), (SINKS + 1, SINKS)])
def test_window_too_small_for_sinks_keeps_the_other_settings(window: int, sinks: int) -> None:
    config = preset_config("recommended", 48, 32, window=window)
    assert (config.window, config.sinks, config.mix, config.projections) == (window, sinks, "token", "shared")


def test_delta_shares_projections_unless_it_is_given_a_map() -> None:
    config = preset_config("recommended", 48, 32, rule="delta")
    assert (config.feature_map, config.normalize, config.projections) == ("none", "unit", "shared")
    config = preset_config("recommended", 48, 32, rule="delta", feature_map="relu")
    assert (config.normalize, config.projections) == ("sum", "own")


def test_state_is_no_wider_than_the_gpu_kernels_take() -> None:
    config = preset_config("recommended", 256, 32)
    assert config.m == ops.WIDEST_M and config.projections == "own"


def test_rank_0_is_full_rank() -> None:
    assert preset_config("recommended", 48, 32, gate_rank=0).gate_rank is None


def test_windows_and_sinks_fill_tiles() -> None:
    assert all((window + SINKS).bit_count() == 1 for window in (WINDOW, WIDE_WINDOW))


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        (dict(window=60), (60, WIDE_WINDOW)),
        (dict(window=0), (0, 0)),
        (dict(window=WIDE_WINDOW), (WIDE_WINDOW, 0)),
        (dict(wide_window=0), (WINDOW, 0)),
        (dict(wide_window=1000), (WINDOW, 1000)),
        (dict(wide_window=50), (49, 50)),
        (dict(wide_layers=(1,)), (WINDOW, WIDE_WINDOW)),
    ],
    ids=str,
)
def test_given_window_decides_the_other(given: dict[str, Any], windows: tuple[int, int]) -> None:
    config = preset_config("recommended", 48, 32, **given)
    assert (config.window, config.wide_window, config.wide_layers) == (*windows, given.get("wide_layers"))


@pytest.mark.parametrize("preset", PRESETS)
def test_given_settings_win(preset: str) -> None:
    given: dict[str, Any] = dict(rule="decay", m=6, window=9, sinks=1, mix="constant", gate_init="uniform", seed=3)
    config = preset_config(preset, 6, 32, **given).to_dict()
    assert {name: config[name] for name in given} == given


def test_settings_that_are_none_are_not_given() -> None:
    assert preset_config("recommended", 8, 32, rule=None, m=None, window=None) == preset_config("recommended", 8, 32)


CHOICES: dict[str, tuple[Any, ...]] = dict(
    rule=RULES,
    m=(None, 8, 6),
    window=(None, 0, 1, SINKS, SINKS + 1),
    wide_window=(None, 0, SINKS + 1),
    feature_map=(None, *FEATURE_MAPS),
    rotary=(None, "drop"),
    gate_init=(None, "uniform"),
    projection_init=(None, "random"),
)


@pytest.mark.parametrize("rule", RULES)
def test_recommended_adapts_to_whatever_is_given(rule: str) -> None:
    """A choice that is defined by itself is never refused for what the preset adds to it."""
    names = list(CHOICES)[1:]
    for values in itertools.product(*(CHOICES[name] for name in names)):
        given = {"rule": rule} | {n: value for n, value in zip(names, values, strict=True) if value is not None}
        try:
            FastWeightsConfig(**given)
        except ConfigError:
            continue
        config = preset_config("recommended", 8, 32, **given).to_dict()
        assert {name: config[name] for name in given} == given


@pytest.mark.parametrize("family", CONFIGS)
def test_convert_without_settings_uses_the_recommended_ones(family: str) -> None:
    model = fastweights.convert(pretrained(family))
    settings = model.config.fastweights
    assert settings["rule"] == "gated_delta" and settings["projections"] == "shared"
    assert (settings["window"], settings["sinks"]) == (WINDOW, SINKS)
    # The tiny models whose layers have a sliding window of their own see no more with a wide one.
    assert settings["wide_window"] == (WIDE_WINDOW if settings["wide_layers"] else 0)


def test_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="preset must be one of recommended, paper, found 'best'"):
        preset_config("best", 8, 32)


@pytest.mark.parametrize(
    "given", [dict(window="wide"), dict(window=-1), dict(m=0), dict(rule="decoy"), dict(sinks=WINDOW)]
)
def test_wrong_settings_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        preset_config("recommended", 8, 32, **given)
