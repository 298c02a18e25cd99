"""Presets: named choices of a conversion's settings. Settings that a user gives always win over those of a preset."""

from __future__ import annotations

from typing import Any

from fastweights.config import FORGETTING_RULES, LOCAL, RULES_WITHOUT_GATES, ConfigError, FastWeightsConfig, is_whole
from fastweights.utils.errors import Argument

RECOMMENDED, PAPER = "recommended", "paper"
PRESETS = (RECOMMENDED, PAPER)
PRESET_HELP = (
    "Settings that are not given: recommended, the best ones with constant memory that we know (gated_delta, m = head "
    "dimension but at most 128, window 124 and 508 in one layer in four, sinks 4, mix token, shared projections, gate "
    "rank 32), or paper, the best ones of each rule in the paper (decay, m = 32, no window), which are the defaults "
    "that other options name."
)
# Window and sinks together fill a tile of the engine's kernel, whose size is a power of two.
WINDOW, WIDE_WINDOW, SINKS = 124, 508, 4
GATE_RANK = 32
# The widest state that the GPU kernels take: ops.WIDEST_M, whose import would load torch.
WIDEST_M = 128


def preset_config(preset: str, head_dim: int, width: int, **settings: Any) -> FastWeightsConfig:
    """The settings of a conversion by a preset.

    Args:
        preset: "recommended" or "paper".
        head_dim: Head dimension d of the model.
        width: Width D of the model.
        **settings: Settings of FastWeightsConfig that are given; None stands for one that is not. The recommended
            settings adapt to them: what a given setting rules out is left out.

    Raises:
        ConfigError: There is no such preset, or a given setting is wrong or does not fit the others.
    """
    if preset not in PRESETS:
        raise ConfigError(Argument("preset"), f" must be one of {', '.join(PRESETS)}, found {preset!r}")
    given = {name: value for name, value in settings.items() if value is not None}
    if preset == RECOMMENDED:
        given = _recommended(given, head_dim, width) | given
    return FastWeightsConfig(**given)


def _recommended(given: dict[str, Any], head_dim: int, width: int) -> dict[str, Any]:
    """The recommended settings that fit the given ones."""
    rule, wide = given.get("rule", "gated_delta"), given.get("wide_window") or WIDE_WINDOW
    # Shorter than a wide window that is given. One that is no number is refused by FastWeightsConfig.
    window = given.get("window", max(1, min(WINDOW, wide - 1)) if is_whole(wide) else WINDOW)
    settings: dict[str, Any] = {"rule": rule, "m": min(head_dim, WIDEST_M), "window": window}
    if rule == "delta" and not given.keys() & {"feature_map", "normalize"}:
        settings |= {"feature_map": "none", "normalize": "unit"}
    if rule in FORGETTING_RULES:
        settings["gate_init"] = "log"
    if rule not in RULES_WITHOUT_GATES:
        settings["gate_rank"] = min(GATE_RANK, width)
    # A window that is no number is refused by FastWeightsConfig, with a message of its own.
    if not is_whole(window) or window < 1:
        return settings
    if window < WIDE_WINDOW:
        settings["wide_window"] = WIDE_WINDOW
    if window > SINKS:
        settings["sinks"] = SINKS
    if rule != LOCAL:
        settings["mix"] = "token"
        if _can_share(settings | given, head_dim):
            settings["projections"] = "shared"
    return settings


def _can_share(settings: dict[str, Any], head_dim: int) -> bool:
    """Whether the state can use the window's projections with these settings."""
    if settings["m"] != head_dim:
        return False
    try:
        return FastWeightsConfig(**settings, projections="shared").shares_projections
    except (ConfigError, TypeError):
        return False
