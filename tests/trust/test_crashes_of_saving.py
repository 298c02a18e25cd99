"""A state or model folder whose saving is interrupted at a file operation is the old one or the new one, and whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.cli import run, save_model, tokenizer
from helpers.disk import RecordedDisk, failing_disk, write_image
from helpers.tiny import pretrained, tokens

from fastweights import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.loading import load, save
from fastweights.modeling.cache import FastWeightsCache
from fastweights.utils.errors import FastWeightsError

SAVED = "saved"
Content = dict[str, Any]


class Case(NamedTuple):
    """What is saved: `old` writes what is there before into a folder, `new` saves, and `read` reads what is there."""

    old: Callable[[Path], Any]
    new: Callable[[Path], Any]
    read: Callable[[Path], Any]


def model(m: int) -> Any:
    return convert(pretrained("gpt2"), FastWeightsConfig(m=m))


def save_state(root: Path, length: int) -> None:
    one = model(4)
    one(tokens(1, length), use_cache=True).past_key_values.save(root / SAVED, one)


def read_state(root: Path) -> None:
    FastWeightsCache.load(root / SAVED, model(4))


def save_folder(root: Path, m: int) -> None:
    save(model(m), root / SAVED, tokenizer(), overwrite=True)


def save_pretrained(root: Path) -> None:
    try:
        model(4).save_pretrained(root / SAVED)
    except OSError as error:  # as in transformers
        raise FastWeightsError(str(error)) from error


def convert_folder(root: Path) -> None:
    result = run("convert", root.parents[1] / "base", "-o", root / SAVED, "--overwrite", "--m", 4)
    if result.exit_code:
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, (result.output, result.exception)
        raise FastWeightsError(result.stderr)


def read_folder(root: Path) -> None:
    load(root / SAVED)


def nothing(root: Path) -> None:
    pass


CASES = {
    "new state": Case(nothing, lambda root: save_state(root, 9), read_state),
    "replaced state": Case(lambda root: save_state(root, 5), lambda root: save_state(root, 9), read_state),
    "new model folder": Case(nothing, lambda root: save_folder(root, 4), read_folder),
    "replaced model folder": Case(lambda root: save_folder(root, 8), lambda root: save_folder(root, 4), read_folder),
    "save_pretrained into a new folder": Case(nothing, save_pretrained, read_folder),
    "convert": Case(lambda root: save_folder(root, 8), convert_folder, read_folder),
}


def content(root: Path) -> Content:
    """All files of what is saved; empty where there is nothing."""
    path = root / SAVED
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(root)): _in_order(file.read_bytes()) for file in files}


def _in_order(data: bytes) -> Any:
    """The content of a file. safetensors writes the fields of a header in any order."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        return json.loads(data[8:end]), data[end:]
    except ValueError:
        return data


class Recorded(NamedTuple):
    case: Case
    old: Content
    new: Content
    disk: RecordedDisk


@pytest.fixture(scope="module", params=CASES)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("saving")
    save_model(folder.parent / "base")
    root = folder / "disk"
    root.mkdir()
    case.old(root)
    old, disk = content(root), RecordedDisk(root)
    with disk.record():
        case.new(root)
        disk.reported = "saved"
    assert content(root) != old
    return Recorded(case, old, content(root), disk)


@pytest.mark.parametrize("policy", ["kill", "nothing unsynced", "empty files", "random"])
def test_interrupted_save_leaves_the_old_or_the_new_one_whole(recorded: Recorded, tmp_path: Path, policy: str) -> None:
    case, old, new, disk = recorded
    found = set()
    for number, (reported, image) in enumerate(disk.images[policy]):
        root = write_image(tmp_path / str(number), image)
        left = content(root)
        assert left == new or (left == old and reported is None), (number, sorted(left))
        found.add(left == new)
    assert found == {False, True}
    case.read(root)


def test_save_on_a_failing_disk_leaves_the_old_or_the_new_one_whole(recorded: Recorded, tmp_path: Path) -> None:
    """And one line says that it failed; afterwards it can be saved."""
    case, old, new, disk = recorded
    failures = 0
    for number in range(1, disk.operations + 1):
        root = tmp_path / str(number)
        root.mkdir()
        case.old(root)
        try:
            with failing_disk(root, number, lasting=number % 2 == 0):
                case.new(root)
        except FastWeightsError:
            failures += 1
            assert content(root) in (old, new), number
        else:
            assert content(root) == new, number
        case.new(root)
        assert content(root) == new, number
    assert failures > disk.operations / 2
