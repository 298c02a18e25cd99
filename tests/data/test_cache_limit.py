"""The cache of token files stays below its limit, and never loses a file that is in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import run, tokenizer

from fastweights.data.cache_limit import Hold, cache_limit, parse_size, shrink
from fastweights.data.readers import DataError
from fastweights.data.token_files import TokenFile, prepare

TEXT = "some words " * 200


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FASTWEIGHTS_CACHE_LIMIT", raising=False)
    return tmp_path / "cache" / "data"


def tokens_of(tmp_path: Path, name: str, **arguments: object) -> TokenFile:
    if not (tmp_path / name).exists():
        (tmp_path / name).write_text(TEXT)
    return prepare(tmp_path / name, tokenizer(), progress=False, **arguments)  # type: ignore[arg-type]


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def unused(tmp_path: Path, *names: str) -> dict[str, Path]:
    """Token files that nothing uses, used for the last time one after another."""
    folders = {name: tokens_of(tmp_path, name).folder for name in names}
    for number, folder in enumerate(folders.values()):
        os.utime(folder / "meta.json", (number, number))
    return folders


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("500M", 5 * 10**8), ("1.5 kb", 1500), ("12", 12), ("1e9", 10**9), ("2T", 2 * 10**12)]
    + [(text, None) for text in ("", "GB", "-1", "1 GiB", "much", "1,5GB", "nan", "1e400")],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


def test_files_unused_for_longest_are_removed_until_the_rest_fits(tmp_path: Path, cache: Path) -> None:
    folders = unused(tmp_path, "a", "b", "c")
    tokens_of(tmp_path, "a")  # used again
    size = size_of(folders["a"])
    made = tokens_of(tmp_path, "d", cache_limit=2 * size + size // 2).folder
    assert {*cache.iterdir()} == {folders["a"], made}


def test_nothing_is_removed_within_the_limit_or_without_one(tmp_path: Path, cache: Path) -> None:
    folders = unused(tmp_path, "a", "b")
    assert shrink(cache, sum(map(size_of, folders.values()))) == []
    assert tokens_of(tmp_path, "c") and len([*cache.iterdir()]) == 3


def test_files_in_use_stay_whatever_the_limit(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CACHE_LIMIT", "1")
    used = tokens_of(tmp_path, "a")
    assert used.folder.is_dir(), "the new file itself"
    unused(tmp_path, "b")
    newest = tokens_of(tmp_path, "c")
    assert {*cache.iterdir()} == {used.folder, newest.folder}
    assert int(used.tokens.max()) > 0


HOLDING = """
import sys
from pathlib import Path
from fastweights.data.cache_limit import Hold
held = Hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_files_that_another_process_uses_stay_until_it_ends(tmp_path: Path, cache: Path) -> None:
    (folder,) = unused(tmp_path, "a").values()
    command = [sys.executable, "-c", HOLDING, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert shrink(cache, 0) == [] and folder.is_dir()
        other.kill()
    assert shrink(cache, 0) == [folder] and not [*cache.iterdir()]


def test_file_that_is_being_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = unused(tmp_path, "a").values()
    refused: list[str] = []
    rename = Path.rename

    def opened_meanwhile(path: Path, target: Path) -> Path:
        with pytest.raises(BlockingIOError):
            Hold(folder)
        refused.append(target.name)
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", opened_meanwhile)
        shrink(folder.parent, 0)
    assert len(refused) == 1 and not folder.exists()
    assert tokens_of(tmp_path, "a").folder == folder


def test_wrong_limit_is_an_error_that_names_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"^cache_limit must be a size such as 500MB or 20GB, found 'much'$"):
        cache_limit("much")
    result = run("train", tmp_path, "--data", "x", "-o", "y", "--cache-limit", "much")
    assert result.exit_code == 2 and "--cache-limit must be a size" in result.stderr
    monkeypatch.setenv("FASTWEIGHTS_CACHE_LIMIT", "much")
    with pytest.raises(DataError, match=r"^FASTWEIGHTS_CACHE_LIMIT must be"):
        cache_limit()
