"""Loading and saving models: hub ids, folders and GGUF files."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.config import ConfigError
from fastweights.conversion import _forget_gguf
from fastweights.modeling.classes import check_tensors, keep_softcap
from fastweights.utils.errors import CheckpointError


def load(source: str | os.PathLike, **kwargs: Any) -> Any:
    """A causal language model from a hub id, a folder or a GGUF file, with errors that name the file."""
    model, info = _load(
        AutoModelForCausalLM, source, **kwargs | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    )
    check_tensors(source, info, extra_is_error=False)
    _forget_gguf(model)
    keep_softcap(model.config)
    return model


def load_tokenizer(source: str | os.PathLike) -> Any:
    """The tokenizer that lies beside a model, or None where there is none."""
    folder, gguf = _locate(source)
    if gguf:
        return _gguf_tokenizer(folder, gguf)
    if Path(folder).is_dir() and not any(Path(folder).glob("*tokenizer*")):
        return None
    try:
        return _load(AutoTokenizer, source)
    except CheckpointError as error:
        raise CheckpointError(f"the tokenizer of {error}") from error


def _gguf_tokenizer(folder: str, gguf: str) -> Any:
    """A GGUF file may have none, or one that transformers cannot build."""
    try:
        return AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    except (ValueError, KeyError, OSError):
        return None


def _load(kind: Any, source: str | os.PathLike, **kwargs: Any) -> Any:
    folder, gguf = _locate(source)
    try:
        return kind.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {}), **kwargs)
    except SafetensorError as error:
        raise CheckpointError(
            f"{source}: {_damaged(folder)} cannot be read ({error}); copy or save it again"
        ) from error
    except ConfigError as error:
        raise CheckpointError(f"{source}: config.json: {error}") from error
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        where = "" if Path(folder).is_dir() else "there is no such folder here, and from the hub "
        raise CheckpointError(f"{source}: {where}it cannot be loaded: {error}") from error


def _locate(source: str | os.PathLike) -> tuple[str, str | None]:
    """(folder or hub id, GGUF file name or None)."""
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"no GGUF file at {path}")
        if importlib.util.find_spec("gguf") is None:
            raise CheckpointError(f"to read {path} install the gguf package: pip install 'fastweights[gguf]'")
        return str(path.parent), path.name
    if path.is_file():
        raise CheckpointError(f"{path} is a file: give the folder it lies in, a GGUF file or a hub id")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} is not a checkpoint: it has no config.json (save_pretrained writes one)")
        if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
            raise CheckpointError(f"{path} is not a checkpoint: it has a config.json but no model.safetensors")
        return str(path), None
    looks_local = path.is_absolute() or str(source).startswith(("./", "../", "~")) or str(source).count("/") > 1
    if looks_local:
        raise CheckpointError(f"no folder at {path}: give a model's folder, a GGUF file or a hub id")
    return str(source), None


def _damaged(folder: str) -> str:
    """The first safetensors file in a folder whose length is not what its header says."""
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file.name
    return "a safetensors file"


@contextmanager
def new_folder(
    target: str | os.PathLike, overwrite: bool = False, source: str | os.PathLike | None = None
) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when all went well; otherwise nothing stays behind.
    `source`, what is read meanwhile, must not be replaced."""
    target = Path(target).resolve()
    _check_target(target, overwrite)
    if source is not None and target in (Path(source).resolve(), *Path(source).resolve().parents):
        raise CheckpointError(f"{target} is, or holds, the model to convert: choose another output folder")
    made: list[Path] = []
    try:
        for parent in reversed([p for p in target.parents if not p.exists()]):
            parent.mkdir()
            made.append(parent)
        _remove_leftovers(target)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.{os.getpid()}.", suffix=".tmp", dir=target.parent))
    except OSError as error:
        _remove(made)
        raise CheckpointError(f"cannot write to {target}: {error.strerror}; choose another output folder") from error
    try:
        yield temporary
        temporary.chmod(0o755)
        _put_in_place(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _remove(made)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"cannot write to {target}: {error}") from error
        raise


def _check_target(target: Path, overwrite: bool) -> None:
    here = Path.cwd()
    if target == here or target in here.parents:
        raise CheckpointError(f"{target} is the folder you are in, or holds it: name a new output folder")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} exists and is not a folder: choose another output folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists and is not empty: choose another output folder, or pass --overwrite")
    if not (target / "config.json").is_file():
        raise CheckpointError(
            f"{target} is not a saved model, and --overwrite replaces only those: choose another folder"
        )


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename, with what was there kept until the new folder stands."""
    if not target.exists():
        temporary.rename(target)
        return
    old = target.with_name(f"{temporary.name}.old")
    target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """What a killed process left behind: its number is in the folder's name."""
    for folder in target.parent.glob(f".{target.name}.*.tmp*"):
        process = folder.name.removeprefix(f".{target.name}.").split(".")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _remove(folders: list[Path]) -> None:
    for folder in reversed(folders):
        folder.rmdir()


def save(model: Any, folder: str | os.PathLike, tokenizer: Any = None, overwrite: bool = False) -> None:
    """save_pretrained, all or nothing."""
    with new_folder(folder, overwrite) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
