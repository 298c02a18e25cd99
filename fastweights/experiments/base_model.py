"""The model that the runs of a comparison start from, and its copy for their processes.

A GGUF file takes long to load: weights and tokenizer are converted every time. So a comparison saves that model once,
in base/FINGERPRINT/NAME of its folder, and loads it from there. FINGERPRINT is of the file's path, size and time. NAME
is that of the file, because a result names a model after the last part of its path.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import os
import shutil
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fastweights.loading import load, load_tokenizer, save
from fastweights.model_paths import CONFIG, GGUF
from fastweights.utils.files import remove_leftovers, temporary_name


class ComparisonBase:
    """The model that the runs of a comparison convert. It is loaded once.

    Used as a context, it keeps other comparisons in the same folder from deleting the copy.

    Args:
        source: Hub id, folder or file of the model.
        folder: The folder of the comparison.
    """

    def __init__(self, source: str, folder: Path) -> None:
        self.source, self._folder = source, folder
        self._copy = _copy_of(Path(source), folder / "base")
        self._lock: int | None = None

    @cached_property
    def model(self) -> Any:
        """The model, in float32."""
        return load(self._readable, dtype=torch.float32)

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer, or None."""
        return load_tokenizer(self._readable)

    def for_conversion(self) -> Any:
        """A model to convert. It shares its tensors with this one: a conversion replaces modules and changes none."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})

    def release(self) -> None:
        """Free the model's memory."""
        vars(self).pop("model", None)

    def quick_source(self) -> str:
        """Where a process loads the model from. The copy of a GGUF file is made if it is not there yet.

        Raises:
            CheckpointError: The copy cannot be written.
        """
        if self._copy is not None and not self._is_copied():
            save(self.model, self._copy, self.tokenizer, overwrite=True)
        return self._readable

    def delete_copy(self) -> None:
        """Delete the copy, unless another comparison uses it."""
        if self._copy is None or self._lock is None:
            return
        with suppress(OSError):  # it is used, or the file system has no locks: then it stays
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = self._copy.parent
            remove_leftovers(folder.parent)
            if folder.is_dir():
                renamed = folder.with_name(temporary_name(folder))
                folder.rename(renamed)  # so that it disappears as a whole
                shutil.rmtree(renamed)
            folder.parent.rmdir()

    def __enter__(self) -> ComparisonBase:
        if self._copy is not None:
            self._lock = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_SH)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _readable(self) -> str:
        return str(self._copy) if self._is_copied() else self.source

    def _is_copied(self) -> bool:
        return self._copy is not None and (self._copy / CONFIG).is_file()


def _copy_of(file: Path, folder: Path) -> Path | None:
    """The path of the copy of a GGUF file; None for other models. A file that was replaced gets another one."""
    if file.suffix != GGUF or not file.is_file():
        return None
    found = file.stat()
    identity = f"{file}\n{found.st_size}\n{found.st_mtime_ns}"
    return folder / hashlib.sha256(identity.encode()).hexdigest()[:16] / file.name
