"""Reading text: files, folders and data sets as a stream of documents."""

from __future__ import annotations

import gzip
import importlib
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.utils.errors import Argument, FastWeightsError

SEPARATOR = b"<|endoftext|>"
MESSAGES = "messages"
TOKENS = "tokens.bin"  # in a folder of tokens that token_files.py wrote

_OPENERS: dict[str, Callable[[Any], Any]] = {".xz": lzma.open, ".gz": gzip.open}
_TEXT_FIELD = Argument("text_field")
_BROKEN = (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError)


class DataError(FastWeightsError):
    """Text that cannot be read, is too little, or does not fit the model."""


class Chat(NamedTuple):
    """A chat: messages, each with a role and its content, and where they were read."""

    messages: list[dict[str, Any]]
    where: str


Document = str | Chat
# A document, and how many bytes of its file were read up to its end.
Documents = Iterator[tuple[Document, int]]


class Source(NamedTuple):
    """Documents to read, and what identifies their content."""

    name: str
    identity: list[Any]  # changes when the source does
    documents: Documents
    size: int | None = None  # in bytes; None where documents do not say how far they are


def find(name: str, field: str) -> Source:
    """The documents of a file, a folder or a data set, with the text in `field` where they have fields.

    Rows without this field may have a conversation in the field `messages` instead.
    """
    if name.startswith("hf:") and name != "hf:":
        dataset, config, split, *_ = [*name.removeprefix("hf:").split(":", 2), "", ""]
        if config in ("train", "validation", "test") and not split:
            config, split = "", config
        arguments = {"path": dataset, "name": config or None, "split": split or "train", "streaming": True}
        rows = _dataset_documents(name, field, lambda d: d.load_dataset(**arguments))
        return Source(name, [name, *_stats(Path(dataset).rglob("*"))], rows)
    path = Path(name).expanduser()
    if not path.exists():
        sources = "a text, JSON lines or parquet file, a folder of them, or hf:NAME for a hub data set"
        raise DataError(f"{path}: there is no such file or folder; give {sources}")
    if (path / "state.json").is_file():
        rows = _dataset_documents(name, field, lambda d: d.load_from_disk(str(path)))
        return Source(name, _stats(path.rglob("*")), rows)
    files = _files_in(path) if path.is_dir() else [path]
    size = None if any(_kind(file) == ".parquet" for file in files) else sum(f.stat().st_size for f in files)
    return Source(name, _stats(files), _file_documents(files, field), size)


def check_data(name: str, field: str = "text") -> None:
    """Refuse a source that is not there or is empty, without reading it. A folder of tokens is a source, too.

    Raises:
        DataError: what is wrong with it.
    """
    if not (Path(name) / TOKENS).is_file() and find(name, field).size == 0:
        raise empty_source(name)


def empty_source(name: str) -> DataError:
    """The error about a source without text."""
    return DataError(f"{name} has no text in it: it is empty, or all its documents are blank")


def _files_in(folder: Path) -> list[Path]:
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        raise DataError(f"{folder} is a model's folder: give text files")
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(str(part) for part in folder.iterdir() if part.is_dir())
        raise DataError(f"{folder} holds the splits of a data set: choose one, {' or '.join(splits)}")
    files = sorted(f for f in folder.rglob("*") if _kind(f) in (".txt", *_READERS) and f.is_file() and f.name[0] != ".")
    if not files:
        raise DataError(f"{folder} has no file to read: in a folder these are .txt, {', '.join(_READERS)} (.xz, .gz)")
    return files


def _kind(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix in _OPENERS else file.suffix


def _stats(files: Iterable[Path]) -> list[Any]:
    return [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(files) if not f.is_dir()]


def _file_documents(files: list[Path], field: str) -> Documents:
    before = 0
    for file in files:
        for text, read in _READERS.get(_kind(file), _text_documents)(file, field):
            yield text, before + read
        before += file.stat().st_size


def _text_documents(file: Path, field: str) -> Documents:
    held: list[bytes] = []
    first_line, read = 1, 0
    for line, read in _lines(file):
        if line.rstrip(b"\r\n") == SEPARATOR:
            yield _decode(held, file, first_line), read
            first_line += len(held) + 1
            held = []
        else:
            held.append(line)
    yield _decode(held, file, first_line), read


def _json_documents(file: Path, field: str) -> Documents:
    for number, (line, read) in enumerate(_lines(file), 1):
        text, where = _decode([line], file, number), f"{file}, line {number}"
        try:
            row = json.loads(text) if text.strip() else {field: ""}
        except (ValueError, RecursionError) as error:  # also whole numbers of too many digits, and deep nesting
            raise DataError(f"{where} is not JSON ({error}): every line must be an object of its own") from error
        yield _field(row, field, where), read


def _parquet_documents(file: Path, field: str) -> Documents:
    arguments = {"path": "parquet", "data_files": str(file), "split": "train", "streaming": True}
    return _dataset_documents(str(file), field, lambda d: d.load_dataset(**arguments))


_READERS = {".jsonl": _json_documents, ".json": _json_documents, ".parquet": _parquet_documents}


def _lines(file: Path) -> Iterator[tuple[bytes, int]]:
    """The lines of a file, compressed or not, and how many bytes of the file were read for them."""
    try:
        with file.open("rb") as raw, _OPENERS.get(file.suffix, nullcontext)(raw) as stream:
            for line in stream:
                yield line, raw.tell()
    except _BROKEN as error:
        raise DataError(f"{file} is damaged, it cannot be decompressed ({error}): copy or download it again") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _decode(lines: list[bytes], file: Path, first_line: int) -> str:
    """Lines as text, without the last line break."""
    try:
        return b"".join(lines).decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        line = first_line + error.object.count(b"\n", 0, error.start)
        fault = f"{file}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise DataError(f"{fault}; convert the file to UTF-8, for example with iconv -f LATIN1 -t UTF-8") from error


def _dataset_documents(name: str, field: str, load: Callable[[Any], Any]) -> Documents:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"to read {name} install the datasets package: pip install 'fastweights[eval]'") from error
    try:
        rows = load(datasets)
        columns = [column for column in (field, MESSAGES) if column in (rows.column_names or ())]
        if columns:
            rows = rows.select_columns(columns[:1])
        for row in rows:
            yield _field(row, field, name), 0
    except DataError:
        raise
    except Exception as error:  # the hub, the network and every format have errors of their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{name} cannot be read: {reason}") from error


def _field(row: Any, field: str, where: str) -> Document:
    if isinstance(row, dict) and field not in row and MESSAGES in row:
        field = MESSAGES
    if not isinstance(row, dict) or field not in row:
        found = f"only {', '.join(row)}" if isinstance(row, dict) else f"it is a {type(row).__name__}"
        raise DataError(f"{where} has no field {field!r}, {found}: name the field of the text with ", _TEXT_FIELD)
    text = "" if row[field] is None else row[field]
    if isinstance(text, list):
        return Chat([_message(*numbered, f"{where}: {field}") for numbered in enumerate(text, 1)], where)
    if field == MESSAGES and text:
        raise DataError(f"{where}: {MESSAGES} must be a list of messages, found a {type(text).__name__}")
    if not isinstance(text, str):
        kind = type(text).__name__
        found = f"the field {field!r} is a {kind}, not text"
        raise DataError(f"{where}: {found}: name the field of the text with ", _TEXT_FIELD)
    return _without_surrogates(text)


def _message(number: int, message: Any, where: str) -> dict[str, Any]:
    """A message of a conversation. Fields besides role and content are left to the chat template."""
    if not isinstance(message, dict):
        found = f"a {type(message).__name__}"
    else:
        wrong = [name for name in ("role", "content") if not isinstance(message.get(name), str)]
        if not wrong:
            return message | {"content": _without_surrogates(message["content"])}
        found = f"{wrong[0]} is {f'a {type(message[wrong[0]]).__name__}' if wrong[0] in message else 'missing'}"
    expected = 'every message must be an object with the texts "role" and "content"'
    raise DataError(f"{where}, message {number}: {expected}, found: {found}")


def _without_surrogates(text: str) -> str:
    """JSON can hold halves of characters (lone surrogates), which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def documents(name: str | os.PathLike, field: str = "text") -> Iterator[str]:
    """The documents of a source, one after another.

    Raises:
        DataError: The source cannot be read, or holds conversations.
    """
    for document, _ in find(str(name), field).documents:
        if isinstance(document, Chat):
            raise DataError(f"{document.where} is a conversation, which only training reads: give text")
        yield document


def read_text(name: str | os.PathLike, field: str = "text") -> str:
    """All documents of a source as one string, with an empty line between them."""
    return "\n\n".join(documents(name, field))
