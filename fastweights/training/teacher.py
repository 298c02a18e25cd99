"""The teacher of a converted model: by default the model that it was converted from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastweights.loading import load
from fastweights.model_paths import locate, short_path
from fastweights.modeling.families import family_of
from fastweights.utils.errors import Argument, CheckpointError, FastWeightsError


class TeacherError(FastWeightsError):
    """A teacher that is not found, or that does not fit the student."""


def base_of(model: Any) -> str | None:
    """The hub id or folder of the model that a converted one was made from; None where it is not known."""
    name = getattr(model.config, "fastweights_base", None)
    return name if isinstance(name, str) else None


def load_teacher(
    student: Any,
    source: str,
    teacher: str | None = None,
    *,
    dtype: Any,
    announce: Callable[[str], None] = lambda text: None,
) -> Any:
    """Load a student's teacher and check that it fits.

    Args:
        student: The converted model.
        source: Where the student comes from, for error messages.
        teacher: Hub id or folder of the teacher; by default the model that the student was converted from.
        dtype: Precision of the teacher.
        announce: Gets a line with the teacher that the student's config names, before it is read: it may be a hub id.

    Returns:
        The teacher, in the state that `load` returns.

    Raises:
        TeacherError: The teacher is not known, cannot be loaded, or does not have the student's sizes.
    """
    name = teacher or base_of(student)
    if name is None:
        raise TeacherError(
            f"{source} does not say which model it was converted from: name it with ", Argument("teacher")
        )
    try:
        locate(name)
        if not teacher:
            announce(f"{short_path(source)} was converted from {short_path(name)}, which is loaded")
        model = load(name, dtype=dtype)
    except CheckpointError as error:
        default = () if teacher else (f"the base of {source} is not found, name it with ",)
        raise TeacherError(*default, Argument("teacher"), ": ", *error.parts) from error
    check_teacher_sizes(model, student, name)
    model.config._name_or_path = str(name)  # transformers sets only the folder of a GGUF file
    return model


def check_teacher_sizes(teacher: Any, student: Any, name: str) -> None:
    """Refuse a teacher whose vocabulary, layers or width are not the student's."""
    found, expected = sizes_of(teacher), sizes_of(student)
    if found != expected:
        raise TeacherError(Argument("teacher"), f" {name} ({found}) is not the model that was converted ({expected})")


def sizes_of(model: Any) -> str:
    """The vocabulary, layers and width of a model in words."""
    config, layers = model.config, len(family_of(model).blocks(model))
    clusters = f" in clusters from {', '.join(map(str, config.cutoffs))}" if hasattr(config, "cutoffs") else ""
    return f"vocabulary {config.vocab_size}{clusters}, {layers} layers, width {config.hidden_size}"
