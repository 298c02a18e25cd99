"""Settings: fields of a dataclass with a description, choices and limits, checked when one is created."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from fastweights.utils.errors import Argument, FastWeightsError

_LIMITS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def setting(default: Any, help: str, choices: tuple[str, ...] = (), **limits: float) -> Any:
    """A field of a dataclass that `check_settings` checks.

    Args:
        default: Its default value.
        help: Its description, which the command line shows too.
        choices: The strings that it may be; empty for no restriction.
        limits: Of a number: ge (at least), gt (above), le (at most), lt (below).
    """
    return field(default=default, metadata={"help": help, "choices": choices, "limits": limits})


def setting_help(cls: Any, name: str) -> str:
    """The description of a setting, with its choices."""
    metadata = _metadata(cls, name)
    return metadata["help"] + (f" [{'|'.join(metadata['choices'])}]" if metadata["choices"] else "")


def check_settings(settings: Any, error: type[FastWeightsError]) -> None:
    """Check that every setting is of its type, one of its choices and within its limits.

    A whole number may stand for a float. No value is converted.

    Raises:
        FastWeightsError: Of the class `error`. It names the setting, its value and what it must be.
    """
    cls: Any = type(settings)
    for f in fields(settings):
        if "limits" not in f.metadata:
            continue
        value = getattr(settings, f.name)
        (kind, optional), metadata = _type_of(cls, f.name), f.metadata
        if value is None and optional:
            continue
        valid = value in metadata["choices"] if metadata["choices"] else _is_of_type(value, kind)
        within = valid and all(_LIMITS[name](value, limit) for name, limit in metadata["limits"].items())
        if not within:
            raise error(Argument(f.name), _reason(cls, f.name, value, out_of_range=valid))


def check_names(
    cls: Any, names: Iterable[str], error: type[FastWeightsError], prefix: str = "", elsewhere: Sequence[str] = ()
) -> None:
    """Refuse names that are no settings of the dataclass `cls`, and suggest those that may be meant.

    Args:
        cls: The dataclass.
        names: The names to check.
        error: The error to raise.
        prefix: What messages put before a name.
        elsewhere: Names with a prefix of their own, such as distill.tokens, which may be meant, too.
    """
    known = [f.name for f in fields(cls)]
    unknown = [name for name in names if name not in known]
    if unknown:
        choices = [*(f"{prefix}{name}" for name in known), *elsewhere]
        near = [other for name in unknown for other in _nearest(name, choices)]
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        listed = ", ".join(f"{prefix}{name}" for name in unknown)
        raise error(f"unknown setting {listed}{hint}; known are {', '.join(known)}")


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """Of names that may have a prefix, those that are `name` without it; else those of which it has the initials, such
    as lr, or a letter or two wrong."""
    names = {full: full.rpartition(".")[2] for full in known}
    near = set(get_close_matches(name, names.values(), n=len(names), cutoff=0.8))
    near |= {other for other in names.values() if name == "".join(word[:1] for word in other.split("_"))}
    exact = [full for full, other in names.items() if other == name]
    return exact or [full for full, other in names.items() if other in near]


def _metadata(cls: Any, name: str) -> Any:
    return next(f for f in fields(cls) if f.name == name).metadata


def _is_of_type(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, as huggingface_hub's strict dataclasses check it. True is no number."""
    from huggingface_hub.dataclasses import type_validator  # imported here: it takes longer than this package

    try:
        type_validator("", value, float | int if kind is float else kind)
    except TypeError:
        return False
    return True


@cache  # a state is made with checked settings for every request of a server
def _type_of(cls: Any, name: str) -> tuple[Any, bool]:
    """The type of a setting without None, and whether it may be None."""
    kind = get_type_hints(cls)[name]
    if NoneType not in get_args(kind):
        return kind, False
    (kind,) = (part for part in get_args(kind) if part is not NoneType)
    return kind, True


def _reason(cls: Any, name: str, value: Any, out_of_range: bool) -> str:
    (kind, optional), metadata = _type_of(cls, name), _metadata(cls, name)
    if metadata["choices"]:
        return f"={value!r} is not known; choose one of {', '.join(metadata['choices'])}"
    expected = _KINDS.get(kind, "whole numbers") + (" or empty" if optional else "")
    return f" must be {_limits(**metadata['limits']) if out_of_range else expected}, found {value!r}"


def _limits(ge: float | None = None, gt: float | None = None, le: float | None = None, lt: float | None = None) -> str:
    if ge is not None and le is not None:
        return f"between {ge:,} and {le:,}"
    limits = (("at least", ge), ("above", gt), ("at most", le), ("below", lt))
    return " and ".join(f"{words} {limit:,}" for words, limit in limits if limit is not None)
