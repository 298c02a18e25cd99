"""Where a model is read from and where it is saved: hub ids, folders, GGUF files and training runs.

This module imports neither torch nor transformers, so that the command line checks paths before it imports them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastweights.utils.errors import Argument, CheckpointError
from fastweights.utils.files import atomic_folder
from fastweights.utils.manifest import MANIFEST, find_damage
from fastweights.utils.parsing import ParseError, read_json

CONFIG, ADAPTER = "config.json", "adapter_config.json"
# In the folder of a training run: its settings, and links to two of its checkpoints.
RUN, BEST, LAST = "run.json", "best", "last"
# In a checkpoint: how far the run had come, and what it resumes from beside the model.
PROGRESS, TRAINING = "progress.json", "training.safetensors"
_GGUF_MAGIC = b"GGUF"
# File names that end so are models: in llama.cpp's format, and checkpoints of fairseq.
GGUF, FAIRSEQ = ".gguf", ".pt"
# A pickle, alone or in a zip file.
_FAIRSEQ_MAGIC = (b"PK", b"\x80")


def locate(source: str | os.PathLike) -> tuple[str, str | None]:
    """The folder or hub id of a model, and the name of its file if it is a GGUF file or a checkpoint of fairseq.

    Raises:
        CheckpointError: there is no model at a path, or an adapter. A hub id is not looked up.
    """
    path = Path(find_model(source))
    if path.suffix == FAIRSEQ:
        _check_fairseq(path)
        return str(path.parent), path.name
    if path.suffix == GGUF and not path.is_dir():
        _check_gguf(path)
        _check_no_adapter(path.parent)
        return str(path.parent), path.name
    if path.is_file():
        files = "a GGUF file, a fairseq checkpoint (.pt) or a hub id"
        archive = "; unpack it first" if ".tar" in path.suffixes or path.suffix == ".zip" else ""
        raise CheckpointError(f"{path} is a file: give the folder it lies in, {files}{archive}")
    if path.is_dir():
        _check_no_adapter(path)
        if not (path / CONFIG).is_file():
            checkpoints = sorted(path.glob(f"*{FAIRSEQ}"))
            how = f"for a fairseq checkpoint give {checkpoints[0]}" if checkpoints else "save_pretrained writes one"
            raise CheckpointError(f"{path} is not a checkpoint: it has no {CONFIG} ({how})")
        if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
            raise CheckpointError(f"{path} is not a checkpoint: it has a {CONFIG} but no model.safetensors")
        return str(path), None
    looks_local = path.is_absolute() or str(source).startswith(("./", "../", "~")) or str(source).count("/") > 1
    if looks_local:
        raise no_such_folder(source)
    return str(source), None


def find_model(source: str | os.PathLike) -> str:
    """The model that a source stands for: of a training run's folder its best checkpoint, else the source itself.

    A run without validation has no best checkpoint: then it is the last one.

    Raises:
        CheckpointError: the run has no checkpoint yet, or its best one is gone.
    """
    folder = Path(source)
    if not (folder / RUN).is_file() or (folder / CONFIG).is_file():
        return os.fspath(source)
    if (folder / BEST / CONFIG).is_file():
        return str(folder / BEST)
    if (folder / LAST / CONFIG).is_file():
        if _has_best(folder / LAST):
            how = f"restore it, or give the last checkpoint, {folder / LAST}"
            raise CheckpointError(f"{folder / BEST} is not there: {how}")
        return str(folder / LAST)
    raise CheckpointError(f"the training run in {folder} has no checkpoint yet: resume it, or give another model")


def _has_best(checkpoint: Path) -> bool:
    """Whether a run had a best checkpoint when it wrote this one."""
    try:
        progress = read_json(checkpoint / PROGRESS)
    except (OSError, ParseError):
        return False
    return isinstance(progress, dict) and progress.get("best") is not None


def damage_of_model(folder: Path) -> str | None:
    """What is wrong with the model in a training run's checkpoint; None where nothing is, or without checksums."""
    return find_damage(folder, without=(TRAINING,)) if (folder / MANIFEST).is_file() else None


def display_name(source: str | os.PathLike) -> str:
    """A model's name: that of its folder, file or hub repository, and of a run's `best` or `last` that of the run."""
    path = Path(source)
    folder = path.absolute()
    of_run = path.name in (BEST, LAST) and (folder.is_symlink() or (folder.parent / RUN).is_file())
    return folder.parent.name if of_run else path.name or folder.name


def short_path(source: str | os.PathLike) -> str:
    """A path in the working directory as relative to it; anything else, such as a hub id, as it is."""
    path, here = Path(source), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else os.fspath(source)


def no_such_folder(source: str | os.PathLike) -> CheckpointError:
    """The error about a path where there is nothing."""
    return CheckpointError(f"no folder at {source}: give a model's folder, a GGUF file or a hub id")


def _check_no_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter: transformers would load the model that this names, maybe from the hub."""
    if (folder / ADAPTER).is_file():
        how = "merge the adapter into its model with peft (merge_and_unload) and save that, or move the file away"
        raise CheckpointError(f"{folder / ADAPTER} makes this an adapter of another model, which is not loaded: {how}")


def dictionary_beside(checkpoint: str | os.PathLike) -> Path | None:
    """The dictionary in the folder of a checkpoint, where fairseq's archives have it."""
    files = (Path(checkpoint).with_name(name) for name in ("dict.txt", "dict.txt.xz", "dict.txt.gz"))
    return next((file for file in files if file.is_file()), None)


def _check_fairseq(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"no fairseq checkpoint at {path}")
    with path.open("rb") as file:
        if not file.read(2).startswith(_FAIRSEQ_MAGIC):
            raise CheckpointError(f"{path} is not a checkpoint of PyTorch, or is damaged: copy or download it again")


def _check_gguf(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"no GGUF file at {path}")
    with path.open("rb") as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file, or is damaged: copy or download it again")
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(f"to read {path} install the gguf package: pip install 'fastweights[gguf]'")


@contextmanager
def new_model_folder(
    target: str | os.PathLike, overwrite: bool = False, source: str | os.PathLike | None = None
) -> Iterator[Path]:
    """Yield a temporary folder for a model's files. It becomes `target` when the block succeeds.

    Args:
        target: the folder to write. It must be new or empty, unless `overwrite` is set.
        overwrite: replace `target` if it holds a saved model.
        source: a model that is read inside the block; `target` must not replace it.

    Raises:
        CheckpointError: if `target` must not be replaced or cannot be written.
    """
    target = Path(target).resolve()
    _check_target(target, overwrite)
    if source is not None and target in (Path(source).resolve(), *Path(source).resolve().parents):
        raise CheckpointError(f"{target} is, or holds, the model to convert: choose another output folder")
    try:
        with atomic_folder(target) as temporary:
            yield temporary
    except OSError as error:
        reason = f"{error.strerror}; choose another output folder"
        raise CheckpointError(f"cannot write to {target}: {reason}") from error


def _check_target(target: Path, overwrite: bool) -> None:
    here = Path.cwd()
    if target == here or target in here.parents:
        raise CheckpointError(f"{target} is the current folder, or holds it: name a new output folder")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} exists and is not a folder: choose another output folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    flag = Argument("overwrite")
    if not overwrite:
        raise CheckpointError(f"{target} exists and is not empty: choose another output folder, or pass ", flag)
    if not (target / CONFIG).is_file():
        raise CheckpointError(
            f"{target} is not a saved model, and ", flag, " replaces only those: choose another folder"
        )
