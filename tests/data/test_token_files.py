"""Text to tokens: every format gives the same tokens, made once."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.cli import save_model, tokenizer
from helpers.tiny import VOCAB
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase, Sequence
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fastweights.data import encoding
from fastweights.data import token_files as data
from fastweights.data.readers import DataError
from fastweights.data.token_files import PROBE, TokenFile, check_vocabulary, prepare
from fastweights.utils.errors import CheckpointError

DOCUMENTS = ["Once upon, <|endoftext|>\n\nThere was a café", "b", " = The end, of it! = "]
TEXT = "\n<|endoftext|>\n".join([DOCUMENTS[0], "", *DOCUMENTS[1:], " \n "]) + "\n"
BOS = 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "a.txt", TEXT)


def write(file: Path, content: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes({".xz": lzma.compress, ".gz": gzip.compress}.get(file.suffix, bytes)(content.encode()))
    return file


def json_lines(documents: list[Any]) -> str:
    return "\n".join(json.dumps({"id": 7, "text": text}) for text in documents) + "\n\n"


def with_eos() -> Any:
    made = tokenizer()
    made.eos_token = "!"
    return made


def tokens_of(source: str | Path, made: Any = None, **arguments: Any) -> TokenFile:
    return prepare(source, tokenizer() if made is None else made, progress=False, **arguments)


def error_of(source: str | Path, **arguments: Any) -> str:
    with pytest.raises(DataError) as error:
        tokens_of(source, **arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def naive_tokens(documents: list[str], eos: int | None = None) -> tuple[list[int], list[int]]:
    """Tokens and document starts, one character after another."""
    vocabulary, tokens, starts = tokenizer().get_vocab(), [], []
    for text in documents:
        starts.append(len(tokens))
        tokens += [BOS, *(vocabulary.get(character, vocabulary["?"]) for character in text)]
        if eos is not None and tokens[-1] != eos:
            tokens.append(eos)
    return tokens, starts


def assert_tokens(found: TokenFile, documents: list[str], eos: int | None = None) -> None:
    assert (found.tokens.tolist(), found.starts.tolist()) == naive_tokens(documents, eos)


FORMATS = dict.fromkeys(("a.txt", "a.txt.xz", "a.txt.gz", "another.suffix", "another.suffix.xz"), TEXT) | {
    "windows.txt": "\ufeff" + TEXT.replace("\n", "\r\n"),
    "a.jsonl": json_lines([*DOCUMENTS, "  ", None]),
    **dict.fromkeys(("a.jsonl.gz", "a.json.xz"), json_lines(DOCUMENTS)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    found = tokens_of(write(tmp_path / name, FORMATS[name]))
    assert_tokens(found, DOCUMENTS)
    assert found.tokens.dtype == np.uint16 and isinstance(found.tokens, np.memmap) and found.starts.dtype == np.int64
    counts = {"tokens": len(found), "documents": 3, "words": 14, "bytes": len("".join(DOCUMENTS).encode())}
    expected = counts | {"source": str(tmp_path / name), "vocab_size": VOCAB, "largest_id": max(found.tokens)}
    assert {key: found.meta[key] for key in expected} == expected


def test_folder_is_read_in_order_and_tokenized_again_when_a_file_is_added(tmp_path: Path) -> None:
    write(tmp_path / "texts" / "b.jsonl.gz", json_lines(DOCUMENTS[2:]))
    write(tmp_path / "texts" / "a" / "first.txt.xz", f"{DOCUMENTS[0]}\n<|endoftext|>\n{DOCUMENTS[1]}")
    write(tmp_path / "texts" / "README.md", "not data")
    write(tmp_path / "texts" / ".hidden.txt", "not data")
    assert_tokens(tokens_of(tmp_path / "texts"), DOCUMENTS)
    write(tmp_path / "texts" / "c.txt", "new")
    assert_tokens(tokens_of(tmp_path / "texts"), [*DOCUMENTS, "new"])


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("datasets", reason="the datasets package is not installed (fastweights[eval])")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    module.disable_progress_bars()
    return module


def test_saved_data_sets_and_parquet_give_the_same_tokens(datasets: Any, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"id": [1, 2, 3, 4], "body": [*DOCUMENTS, None]})
    rows.save_to_disk(tmp_path / "saved")
    rows.to_parquet(tmp_path / "a.parquet")
    for name in ("saved", "a.parquet"):
        assert_tokens(tokens_of(tmp_path / name, text_field="body"), DOCUMENTS)
        assert "has no field 'text', only id, body: name the field of the text with text_" in error_of(tmp_path / name)
    splits = tmp_path / "splits"
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(splits)
    assert f"holds the splits of a data set: choose one, {splits}/test or {splits}/train" in error_of(splits)
    assert "broken.parquet cannot be read: " in error_of(write(tmp_path / "broken.parquet", "PAR1 no"))


def test_hub_data_sets_are_streamed(datasets: Any, tmp_path: Path) -> None:
    """load_dataset takes a folder in place of a hub name, so this needs no network."""
    write(tmp_path / "set" / "train.jsonl", json_lines(DOCUMENTS))
    write(tmp_path / "set" / "test.jsonl", json_lines(["for tests"]))
    name = f"hf:{tmp_path / 'set'}"
    for rest in ("", ":default", ":train", "::train", ":default:train"):
        assert_tokens(tokens_of(name + rest), DOCUMENTS)
    for rest in (":test", "::test", ":default:test"):
        assert_tokens(tokens_of(name + rest), ["for tests"])
    write(tmp_path / "set" / "test.jsonl", json_lines(["changed"]))
    assert_tokens(tokens_of(f"{name}:test"), ["changed"])
    assert f"{name}::nope cannot be read: Bad split: nope. Available splits:" in error_of(f"{name}::nope")
    assert f"{name}:nope cannot be read: BuilderConfig 'nope' not found" in error_of(f"{name}:nope")
    assert f"{name}s cannot be read: Couldn't find any data file" in error_of(f"{name}s")
    assert "has no field 'body', only id, text" in error_of(name, text_field="body")


def test_missing_datasets_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("hf:some/text", write(tmp_path / "a.parquet", "")):
        assert "install the datasets package: pip install 'fastweights[eval]'" in error_of(name)


@pytest.mark.parametrize("size", [1, 3, 10, 2**20])
def test_chunks_of_any_size_give_the_same_tokens(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document ends with one eos token, whether the tokenizer puts it there, the text, or nobody."""
    monkeypatch.setattr(encoding, "CHUNK_CHARACTERS", size)
    monkeypatch.setattr(data, "BATCH_CHARACTERS", size)
    lines = "one\n two\n\n\nthree\n    four\n five six seven\neight\n"
    assert "".join(encoding._cut(lines)) == lines and (len(encoding._cut(lines)) > 1) == (size < len(lines))
    documents = [lines, "short", "!", "ends with it!", "in ! it\nand more", lines + "no end"]
    file = write(tmp_path / "a.jsonl", json_lines(documents))
    assert_tokens(tokens_of(file), documents)
    made = with_eos()
    assert_tokens(tokens_of(file, made), documents, made.eos_token_id)
    special = [("<s>", BOS), ("!", made.eos_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A !", special_tokens=special)
    assert_tokens(tokens_of(write(tmp_path / "b.txt", lines + "end"), made), [lines + "end"], made.eos_token_id)


def test_nothing_is_read_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "BATCH_CHARACTERS", 1)
    file = write(tmp_path / "a.jsonl", json_lines(DOCUMENTS) + "not JSON")
    tokens, starts = naive_tokens(DOCUMENTS)
    for limit, read in ((starts[2] + 5, [*DOCUMENTS[:2], DOCUMENTS[2][:4]]), (starts[1], DOCUMENTS[:1])):
        found = tokens_of(file, limit=limit)
        assert found.tokens.tolist() == tokens[:limit] and found.starts.tolist() == starts[: len(read)]
        assert found.meta["bytes"] == len("".join(read).encode())
        assert found.meta["words"] == len(" ".join(read).split())


def test_lone_surrogates_and_ids_beyond_the_vocabulary_size_are_stored(tmp_path: Path) -> None:
    backend = Tokenizer(WordLevel({"?": 0, "far": 70_000}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = tokens_of(write(tmp_path / "a.jsonl", r'{"text": "far \ud800 far"}'), made)
    assert found.tokens.tolist() == [70_000, 0, 70_000] and found.tokens.dtype == np.uint32


def refusing(made: Any) -> Any:
    """It has a fingerprint, but cannot be called with anything else."""

    class Refusing(PreTrainedTokenizerFast):
        def __call__(self, text: Any, **arguments: Any) -> Any:
            assert text == [PROBE]
            return super().__call__(text, **arguments)

    made.__class__ = Refusing
    return made


def test_text_is_tokenized_once(source: Path, cache: Path) -> None:
    first, used = tokens_of(source), tokenizer()
    used(["a", "bcd"], padding=True, truncation=True, max_length=2)
    for again in (tokenizer(), used):
        found = tokens_of(str(source), refusing(again))
        assert found.folder == first.folder and found.meta == first.meta
        assert_tokens(found, DOCUMENTS)
    assert [folder.name for folder in cache.iterdir()] == [first.folder.name] and len(first.folder.name) == 16


def test_cache_is_reused_for_the_same_tokenizer_stored_differently(source: Path) -> None:
    """What does nothing is written by one version of transformers and left out by another."""
    made, before = tokenizer(), tokens_of(source)
    made.backend_tokenizer.normalizer = Sequence([])
    assert tokens_of(source, refusing(made)).folder == before.folder


CHANGES: dict[str, Callable[[Path, Any, dict[str, Any]], Any]] = {
    "content": lambda source, made, arguments: source.write_text(TEXT + "more"),
    "time": lambda source, made, arguments: os.utime(source, ns=(0, source.stat().st_mtime_ns + 1)),
    "tokenizer": lambda source, made, arguments: made.add_tokens("caf"),
    "eos": lambda source, made, arguments: setattr(made, "eos_token", "!"),
    "normalizer": lambda source, made, arguments: setattr(made.backend_tokenizer, "normalizer", Lowercase()),
    "field": lambda source, made, arguments: arguments.update(text_field="x"),
    "limit": lambda source, made, arguments: arguments.update(limit=10**6),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_of_source_tokenizer_or_settings_tokenizes_again(name: str, source: Path) -> None:
    made, arguments = tokenizer(), dict[str, Any]()
    before = tokens_of(source, made)
    CHANGES[name](source, made, arguments)
    after = tokens_of(source, made, **arguments)
    assert after.folder != before.folder
    assert (after.tokens.tolist() != before.tokens.tolist()) == (name in ("content", "tokenizer", "eos", "normalizer"))


def test_cache_folder_follows_argument_environment_and_home(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    chosen = tokens_of(source, cache=tmp_path / "mine")
    assert chosen.folder.parent == tmp_path / "mine" / "data" and not cache.exists()
    monkeypatch.delenv("FASTWEIGHTS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tokens_of(source).folder == tmp_path / "home/.cache/fastweights/data" / chosen.folder.name
    found = error_of(source, cache=source)
    assert f"cannot write to {source}/data/" in found and "; set FASTWEIGHTS_CACHE to another folder" in found


DAMAGED_TOKENS = [("tokens.bin", bytes(n)) for n in (0, 10, 11)]
DAMAGED_META = [("meta.json", content) for content in (b"", b'{"dtype": "uin', b"[]", b"{}")]


@pytest.mark.parametrize(("file", "content"), [*DAMAGED_TOKENS, *DAMAGED_META, ("starts.npy", b"")])
def test_damaged_cache_is_written_again(file: str, content: bytes, source: Path, cache: Path) -> None:
    (tokens_of(source).folder / file).write_bytes(content)
    assert_tokens(tokens_of(source), DOCUMENTS)
    assert_tokens(tokens_of(source, refusing(tokenizer())), DOCUMENTS)
    assert len(list(cache.iterdir())) == 1


KILLED = """
import os, signal, sys
from fastweights.data import encoding
from fastweights.data import token_files as data

class Tokens(list):
    eos_token_id, get_vocab = None, lambda self: {"a": 1}
    def __call__(self, texts, **_):
        self.append(texts)
        return {"input_ids": [[1]]} if len(self) == 1 else os.kill(os.getpid(), signal.SIGKILL)

data.BATCH_CHARACTERS = 1
data.prepare(sys.argv[1], Tokens(), progress=False)
"""


def test_leftovers_of_killed_processes_are_removed(source: Path, cache: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(source)], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    (left,) = cache.iterdir()
    assert left.name.endswith(".tmp") and (left / "tokens.bin").is_file()
    alive = cache / re.sub(r"(?<=\.)\d+(?=\.)", str(os.getpid()), left.name)
    elsewhere = cache / left.name.replace(socket.gethostname(), "another-machine")
    for other in (alive, elsewhere):
        other.mkdir()
    found = tokens_of(source)
    assert_tokens(found, DOCUMENTS)
    assert set(cache.iterdir()) == {found.folder, alive, elsewhere}


def test_of_two_processes_the_slower_uses_the_files_of_the_faster(source: Path, cache: Path) -> None:
    inodes: list[int] = []

    class Slow(PreTrainedTokenizerFast):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            inodes.append((tokens_of(source).folder / "tokens.bin").stat().st_ino)
            return super().__call__(*args, **kwargs)

    slow = tokenizer()
    slow.__class__ = Slow
    found = tokens_of(source, slow)
    assert [(found.folder / "tokens.bin").stat().st_ino] == inodes and list(cache.iterdir()) == [found.folder]


def test_progress_bar_is_shown_on_stderr_only(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    prepare(source, tokenizer(), progress=False)
    assert capsys.readouterr() == ("", "")
    prepare(source, tokenizer(), limit=10)
    shown = capsys.readouterr()
    assert shown.out == "" and "tokenizing" in shown.err and "bytes" in shown.err


XZ, GZ = lzma.compress(b"some text\n" * 1000), gzip.compress(b"some text\n" * 1000)
BROKEN = " is damaged, it cannot be decompressed ("

# file, content, and what the message says right after the file's name
BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.txt", b"", " has no text in it: it is empty, or all its documents are blank"),
    "blank": ("a.txt", b" \n<|endoftext|>\n\n\t\n", " has no text in it"),
    "Latin-1": ("a.txt", b"1\n<|endoftext|>\n3\n\xe9\n", ", line 4: byte 0xe9 is not UTF-8; convert the file to UTF-8"),
    "Latin-1 in JSON": ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', ", line 2: byte 0xe9 is not UTF-8"),
    "not JSON": ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', ", line 3 is not JSON (Expecting value"),
    "a list": ("a.json", b'["a", "b"]', ", line 1 has no field 'text', it is a list"),
    "no field": ("a.jsonl", b'{"title": 1, "body": 2}', ", line 1 has no field 'text', only title, body: name the"),
    "no text": (
        "a.jsonl",
        b'{"text": 3}',
        ", line 1: the field 'text' is a int, not text: name the field of the te",
    ),
    "damaged xz": ("a.txt.xz", XZ[:40] + b"\0\0\0\0" + XZ[44:], BROKEN),
    "xz cut short": ("a.txt.xz", XZ[:-20], BROKEN),
    "not xz": ("a.jsonl.xz", b"some text", BROKEN),
    "damaged gz": ("a.txt.gz", GZ[:20] + b"\0\0\0\0" + GZ[24:], BROKEN),
    "gz cut short": ("a.txt.gz", GZ[:-9], BROKEN),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_damaged_file_is_named_with_its_line(name: str, tmp_path: Path, cache: Path) -> None:
    file, content, message = BAD_FILES[name]
    (tmp_path / file).write_bytes(content)
    assert error_of(tmp_path / file).startswith(f"{tmp_path / file}{message}")
    assert list(cache.glob("*")) == []


def test_bad_sources_and_arguments_are_refused(source: Path, tmp_path: Path) -> None:
    write(tmp_path / "folder" / "notes.md", "text")
    assert "folder has no file to read: in a folder these are .txt, .jsonl, .json, .pa" in error_of(tmp_path / "folder")
    assert "model is a model's folder: give text files" in error_of(save_model(tmp_path / "model"))
    for name in ("nothing.txt", "hf:"):
        assert f"{name}: there is no such file or folder; give a text, JSON lines or" in error_of(name)
    assert error_of(source, limit=0) == "limit must be at least 1 token, found 0"
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        prepare(source, None)


def test_tokens_of_another_tokenizer_are_refused(source: Path) -> None:
    tokens, made = tokens_of(source), tokenizer()
    largest = int(tokens.tokens.max())
    check_vocabulary(tokens, made, SimpleNamespace(vocab_size=largest + 1))
    for meta in (tokens.meta, {}):
        found = TokenFile(tokens.folder, tokens.tokens, tokens.starts, meta)
        with pytest.raises(DataError, match=rf"token id {largest}, but the model's vocab_size is {largest} \(the tok"):
            check_vocabulary(found, made, SimpleNamespace(vocab_size=largest))
    with pytest.raises(DataError, match="were made with another tokenizer: prepare them with this one"):
        check_vocabulary(tokens, with_eos(), SimpleNamespace(vocab_size=1000))


def processes_used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From the first batch on, two processes tokenize; what is returned lists them."""
    started: list[Any] = []

    class Counted(encoding._Worker):
        def __init__(self, frame: list[bytes]) -> None:
            super().__init__(frame)
            started.append(self.process)

    monkeypatch.setattr(encoding, "_Worker", Counted)
    monkeypatch.setattr(encoding, "BATCHES_BEFORE", 1)
    monkeypatch.setattr(data, "usable_processes", lambda: 2)
    monkeypatch.setattr(data, "BATCH_CHARACTERS", 30)
    return started


@pytest.mark.parametrize("special", [False, True])
def test_several_processes_give_the_same_tokens_in_order(
    special: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With special tokens of a template, and of the text itself (which may be meant as text)."""
    made = with_eos()
    if special:
        tokens = [("<s>", BOS), ("!", made.eos_token_id)]
        made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A !", special_tokens=tokens)
        made.split_special_tokens = True
    documents = [f"{n} is a number, <s> not {'long ' * (n % 7)}!" for n in range(40)] + ["b", "é\n x" * 20, "end!"]
    file = write(tmp_path / "a.jsonl", json_lines(documents))
    alone = tokens_of(file, made, cache=tmp_path / "alone")
    started = processes_used(monkeypatch)
    shared = tokens_of(file, made, cache=tmp_path / "shared")
    assert len(started) == 2 and all(process.returncode is not None for process in started)
    assert shared.checksum == alone.checksum and shared.meta == alone.meta


def test_limit_ends_processes_and_an_error_of_the_source_comes_after_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = processes_used(monkeypatch)
    file = write(tmp_path / "a.jsonl", json_lines(["some words, thirty characters at least"] * 8) + "not JSON")
    assert len(tokens_of(file, limit=100)) == 100
    assert "a.jsonl, line 10 is not JSON" in error_of(file)
    assert started and all(process.returncode is not None for process in started)


def test_killed_processes_leave_the_work_to_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["some words, thirty characters at least"] * 20
    file, started = write(tmp_path / "a.jsonl", json_lines(documents)), processes_used(monkeypatch)
    encode = encoding._Worker.encode

    def killed(worker: Any, texts: list[str]) -> Any:
        worker.process.kill()
        worker.process.wait()
        return encode(worker, texts)

    monkeypatch.setattr(encoding._Worker, "encode", killed)
    assert_tokens(tokens_of(file), documents)
    assert len(started) == 2


@pytest.mark.parametrize(("value", "one"), [("false", True), ("0", True), ("true", False), (None, False)])
def test_environment_can_turn_processes_off(value: str | None, one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if value is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    assert encoding.usable_processes() == (1 if one else len(os.sched_getaffinity(0)))
