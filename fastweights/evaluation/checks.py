"""What an evaluation's arguments must be, as far as they can be checked without a model and without importing torch."""

from __future__ import annotations

from collections.abc import Sized

from fastweights.utils.errors import Argument, FastWeightsError

# Tokens of a window, where the models have as many positions.
WINDOW = 1024


class EvaluationError(FastWeightsError):
    """An evaluation that cannot be done, with the reason."""


def check_window(length: int, context: int = 0) -> None:
    """Refuse windows that are empty or have no token to score."""
    if length < 1:
        raise EvaluationError(Argument("length"), f" {length}: a window has at least 1 token")
    if not 0 <= context < length:
        raise EvaluationError(
            Argument("context"),
            f" {context} with ",
            Argument("length"),
            f" {length}: a window must have tokens left to score, so context is from 0 to {length - 1}",
        )


def check_measures(data: Sized, tasks: Sized, recall: bool, by_position: bool) -> None:
    """Refuse an evaluation that would measure nothing."""
    if not (data or tasks or recall) or (by_position and not data):
        names = [Argument(name) for name in ("data", "by_position", "tasks", "recall")]
        message = ("nothing to evaluate on: give ", names[0], " (which ", names[1], " needs), ", names[2], " or ")
        raise EvaluationError(*message, names[3])
