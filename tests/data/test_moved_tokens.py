"""Tokens that were made on another machine, given as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import tokenizer

from fastweights.data.readers import DataError
from fastweights.data.token_files import TokenFile, prepare


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenFile:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("Once upon\n<|endoftext|>\nthere was a café\n<|endoftext|>\nThe end\n")
    return prepare(tmp_path / "a.txt", tokenizer(), progress=False)


def test_copied_token_folder_is_used_without_its_source(made: TokenFile, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(made.folder, moved)
    found = prepare(moved, tokenizer())
    assert np.array_equal(found.tokens, made.tokens) and np.array_equal(found.starts, made.starts)
    assert found.folder == moved
    (moved / "tokens.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"tokens\.bin is not as meta\.json and starts\.npy"):
        prepare(moved, tokenizer())


def test_limit_applies_to_copied_token_folder(made: TokenFile) -> None:
    limit = int(made.starts[2])
    found = prepare(made.folder, tokenizer(), limit=limit)
    assert np.array_equal(found.tokens, made.tokens[:limit]) and np.array_equal(found.starts, made.starts[:2])
