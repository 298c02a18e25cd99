"""Numbers as a report writes them.

None, for what was not measured, is a dash. NaN and infinity are accepted: a run that diverged has them.
"""

from __future__ import annotations

import math
from typing import Any

from rich.filesize import decimal

MISSING = "–"
DIVERGED = "diverged"


def finite(value: float | None) -> float | None:
    """The value, None where it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def is_broken(value: float | None) -> bool:
    """Whether a value was measured and is NaN or infinite."""
    return value is not None and not math.isfinite(value)


def ratio(value: float | None, base: float | None) -> float | None:
    """value / base, None where either is missing, not finite, or the base is 0."""
    above, below = finite(value), finite(base)
    return None if above is None or not below else above / below


def perplexity_text(value: float | None) -> str:
    """A perplexity with as many digits as it deserves; "diverged" where it is not finite."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return DIVERGED
    if value >= 1e9:
        return f"{value:.1e}"
    if value >= 1e6:
        return f"{value / 1e6:,.1f} million"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def whole(value: float | None) -> str:
    """A whole number with its thousands separated."""
    found = finite(value)
    return MISSING if found is None else f"{found:,.0f}"


def count_text(value: float | None) -> str:
    """Tokens and parameters: 512, 10,240, 25.6 M, 3.3 B."""
    found = finite(value)
    if found is None or abs(found) < 1e6:
        return whole(value)
    return f"{found / 1e9:.3g} B" if abs(found) >= 0.9995e9 else f"{found / 1e6:.3g} M"


def percent_text(value: float | None, digits: int = 1) -> str:
    """A share as a percentage; a small one as "< 0.1 %"."""
    found, smallest = finite(value), 10**-digits
    if found is not None and 0 < 100 * found < smallest / 2:
        return f"< {smallest:g} %"
    return MISSING if found is None else f"{100 * found:.{digits}f} %"


def times_text(value: float | None) -> str:
    """A ratio: 1.02 ×, 16.4 ×, 1,024 ×."""
    return MISSING if value is None else f"{value:,.0f} ×" if value >= 100 else f"{value:.{1 + (value < 10)}f} ×"


def bytes_text(value: float | None) -> str:
    """A number of bytes in decimal units."""
    found = finite(value)
    return MISSING if found is None else decimal(int(found))


def seconds_text(value: float | None) -> str:
    """A duration in a unit that fits it: µs to hours."""
    found = finite(value)
    if found is None:
        return MISSING
    if found < 0.9995:
        return f"{1e3 * found:.3g} ms" if found >= 0.9995e-3 else f"{1e6 * found:.3g} µs"
    if found < 120:
        return f"{found:.3g} s"
    return f"{found / 60:.0f} min" if found < 7200 else f"{found / 3600:.1f} h"


def axis_text(value: float) -> str:
    """A label of an axis."""
    return count_text(value) if abs(value) >= 1000 else f"{value:.4g}"


def settings_text(settings: dict[str, Any] | None) -> str:
    """The settings that most tell models apart, in a few words."""
    if settings is None:
        return MISSING
    parts = [str(settings.get("rule", MISSING))]
    parts += [f"{name} {settings[name]}" for name in ("m", "window") if settings.get(name)]
    if settings.get("wide_window"):
        parts.append(f"{settings['wide_window']} in layers {', '.join(map(str, settings.get('wide_layers') or ()))}")
    parts += [f"sinks {settings['sinks']}"] if settings.get("sinks") else []
    parts += ["shared projections"] if settings.get("projections") == "shared" else []
    parts += [f"gate rank {settings['gate_rank']}"] if settings.get("gate_rank") else []
    parts += [str(settings["ablation"])] if settings.get("ablation") else []
    return ", ".join(parts)
