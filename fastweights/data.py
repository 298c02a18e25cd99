"""Text -> memory-mapped token files, made once and reused -> packed batches, a pure function of seed and step."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import lzma
import os
import re
import shutil
import socket
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress
from torch import Tensor

SEPARATOR = b"<|endoftext|>"
FORMAT_VERSION = 1
IGNORED = -100  # the label that Hugging Face's losses leave out

# A tokenizer needs some 150 bytes of memory for each character that it is given at once.
BATCH_CHARACTERS, PIECE_CHARACTERS = 2**20, 2**22
# Between the end of a line and the first word of the next, tokenizers end a token anyway.
_CUT = re.compile(r"(?<=\n)(?= ?\S)")

_OPENERS: dict[str, Callable[[Any], Any]] = {".xz": lzma.open, ".gz": gzip.open}
_BROKEN = (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError)


class DataError(ValueError):
    """Text that cannot be read, is too little, or does not fit the model."""


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A memory-mapped token file: tokens one after another, documents by where they start."""

    folder: Path
    tokens: np.ndarray  # ids, uint16 or uint32
    starts: np.ndarray  # index of each document's first token, int64; the first is 0
    meta: dict[str, Any]  # source, settings, tokenizer (its fingerprint), vocab_size, largest_id, and what was counted

    def __len__(self) -> int:
        return len(self.tokens)


def prepare(
    source: str | os.PathLike,
    tokenizer: Any,
    *,
    cache: str | os.PathLike | None = None,
    text_field: str = "text",
    limit: int | None = None,
    progress: bool = True,
) -> TokenFile:
    """The tokens of a text, from the cache where source, tokenizer and settings are those of an earlier call.

    `source` is a text file (documents separated by lines `<|endoftext|>`), JSON lines or parquet with the text in
    `text_field`, a folder of such files (text and JSON lines may be .xz or .gz), a folder that a data set's
    save_to_disk wrote, or a data set of the hub, hf:NAME[:CONFIG][:SPLIT]. Each document gets the tokenizer's usual
    special tokens and ends with its eos token; blank ones are left out. At most `limit` tokens are taken.
    `cache` is by default $FASTWEIGHTS_CACHE, else ~/.cache/fastweights. Of several processes, let one call this first.
    """
    if tokenizer is None:
        how = "AutoTokenizer.from_pretrained(BASE).save_pretrained(DIR)"
        raise DataError(f"there is no tokenizer beside the model: save the base model's there, {how}")
    if limit is not None and limit < 1:
        raise DataError(f"the limit must be at least 1 token, found {limit}")
    found = _find(os.fspath(source), text_field)
    settings = {"text_field": text_field, "limit": limit, "tokenizer": _tokenizer_fingerprint(tokenizer)}
    root = Path(cache or os.environ.get("FASTWEIGHTS_CACHE") or "~/.cache/fastweights").expanduser().resolve()
    folder = root / "data" / _fingerprint([FORMAT_VERSION, found.identity, settings])
    ready = _open(folder)
    return _make(folder, partial(_write, found, tokenizer, settings, progress)) if ready is None else ready


def check_vocabulary(tokens: TokenFile, tokenizer: Any, model_config: Any) -> None:
    """Refuse tokens of another tokenizer, and ids that the model has no embedding for."""
    made_with = tokens.meta.get("tokenizer")
    if made_with is not None and made_with != _tokenizer_fingerprint(tokenizer):
        raise DataError(f"the tokens in {tokens.folder} were made with another tokenizer: prepare them with this one")
    largest = tokens.meta["largest_id"] if "largest_id" in tokens.meta else int(tokens.tokens.max())
    if largest >= model_config.vocab_size:
        raise DataError(
            f"the tokenizer does not match the model: the text has token id {largest}, but the model's vocab_size is "
            f"{model_config.vocab_size} (the tokenizer has {len(tokenizer)} tokens); use the model's own tokenizer"
        )


class PackedBatches:
    """Rows of `length` tokens, in an order that depends on seed and step alone: a run goes on from its step's number.

    Every epoch has each row once, in an order of its own; the last tokens, too few for a row, are left out.
    `rows` is the global batch, over all processes.
    """

    def __init__(self, tokens: TokenFile, length: int, rows: int, seed: int = 0) -> None:
        self.rows_in_epoch = _count_rows(tokens, length)
        if not 1 <= rows <= self.rows_in_epoch:
            raise DataError(
                f"{_name(tokens)}: {len(tokens):,} tokens are no batch of {rows:,} rows of {length:,} tokens "
                f"({rows * length:,}): give more text with --data, or change --batch-tokens"
            )
        self.tokens, self.length, self.rows, self.seed = tokens, length, rows, seed
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, step: int, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
        """This process's rows of the step's batch: input_ids, position_ids and labels, each [rows,length] int64."""
        if self.rows % world:
            change = f"make --batch-tokens a multiple of {world} x --length, {world * self.length:,}"
            raise DataError(f"a batch of {self.rows} rows cannot be shared evenly by {world} processes: {change}")
        share = self.rows // world
        return _pack(self.tokens, self._rows_of(step)[rank * share : (rank + 1) * share], self.length)

    def targets(self, step: int) -> int:
        """How many tokens of the whole batch, all processes together, are predicted."""
        first, starts = self._rows_of(step) * self.length, self.tokens.starts
        begun = np.searchsorted(starts, first + self.length) - np.searchsorted(starts, first + 1)
        return self.rows * (self.length - 1) - int(begun.sum())

    def _rows_of(self, step: int) -> np.ndarray:
        epochs, places = np.divmod(np.arange(step * self.rows, (step + 1) * self.rows), self.rows_in_epoch)
        return np.concatenate([self._order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)])

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.rows_in_epoch)
            # A batch may lie across two epochs.
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: order}
        return order


def validation_rows(tokens: TokenFile, length: int, limit_tokens: int | None = None) -> dict[str, Tensor]:
    """The text in its own order, as rows of `length` tokens; the same keys as PackedBatches.batch."""
    return _pack(tokens, np.arange(_count_rows(tokens, length, limit_tokens)), length)


def _count_rows(tokens: TokenFile, length: int, limit_tokens: int | None = None) -> int:
    if length < 2:
        raise DataError(f"--length must be at least 2 tokens, the second predicted from the first; found {length}")
    count = len(tokens) if limit_tokens is None else min(len(tokens), limit_tokens)
    if count < length:
        what = f"{_name(tokens)}: {count:,} tokens are fewer than one row of {length:,}"
        raise DataError(f"{what}: give more text with --data, or lower --length")
    return count // length


def _name(tokens: TokenFile) -> str:
    return str(tokens.meta.get("source", tokens.folder))


def _pack(tokens: TokenFile, rows: np.ndarray, length: int) -> dict[str, Tensor]:
    """Where a document starts, positions count from 0 again and the token is not to be predicted."""
    columns = np.arange(length)
    ids = np.asarray(tokens.tokens[rows[:, None] * length + columns], dtype=np.int64)
    is_start = np.zeros(ids.shape, dtype=bool)
    is_start[:, 0] = True
    for row, first in enumerate(rows * length):
        low, high = np.searchsorted(tokens.starts, (first, first + length))
        is_start[row, tokens.starts[low:high] - first] = True
    positions = columns - np.maximum.accumulate(np.where(is_start, columns, 0), axis=1)
    packed = {"input_ids": ids, "position_ids": positions, "labels": np.where(is_start, IGNORED, ids)}
    return {name: torch.from_numpy(array) for name, array in packed.items()}


# A document's text, and how many bytes of its file were read up to its end.
_Documents = Iterator[tuple[str, int]]


class _Source(NamedTuple):
    name: str
    identity: list[Any]  # changes when the source does
    documents: _Documents
    size: int | None = None  # in bytes; None where documents do not say how far they are


def _find(name: str, field: str) -> _Source:
    if name.startswith("hf:") and name != "hf:":
        dataset, config, split, *_ = [*name.removeprefix("hf:").split(":", 2), "", ""]
        if config in ("train", "validation", "test") and not split:
            config, split = "", config
        wanted = {"path": dataset, "name": config or None, "split": split or "train", "streaming": True}
        rows = _dataset_documents(name, field, lambda d: d.load_dataset(**wanted))
        return _Source(name, [name, *_stats(Path(dataset).rglob("*"))], rows)
    path = Path(name).expanduser()
    if not path.exists():
        takes = "--data takes a text, JSON lines or parquet file, a folder of them, or hf:NAME for a hub data set"
        raise DataError(f"{path}: there is no such file or folder; {takes}")
    if (path / "state.json").is_file():
        rows = _dataset_documents(name, field, lambda d: d.load_from_disk(str(path)))
        return _Source(name, _stats(path.rglob("*")), rows)
    files = _files_in(path) if path.is_dir() else [path]
    size = None if any(_kind(file) == ".parquet" for file in files) else sum(f.stat().st_size for f in files)
    return _Source(name, _stats(files), _file_documents(files, field), size)


def _files_in(folder: Path) -> list[Path]:
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        raise DataError(f"{folder} is a model's folder: --data takes text")
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


def _file_documents(files: list[Path], field: str) -> _Documents:
    before = 0
    for file in files:
        for text, read in _READERS.get(_kind(file), _text_documents)(file, field):
            yield text, before + read
        before += file.stat().st_size


def _text_documents(file: Path, field: str) -> _Documents:
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


def _json_documents(file: Path, field: str) -> _Documents:
    for number, (line, read) in enumerate(_lines(file), 1):
        text, where = _decode([line], file, number), f"{file}, line {number}"
        try:
            row = json.loads(text) if text.strip() else {field: ""}
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not JSON ({error}): every line must be an object of its own") from error
        yield _field(row, field, where), read


def _parquet_documents(file: Path, field: str) -> _Documents:
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
    """Lines as text, without the end of the last one."""
    try:
        return b"".join(lines).decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        line = first_line + error.object.count(b"\n", 0, error.start)
        fault = f"{file}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise DataError(f"{fault}; convert the file to UTF-8, for example with iconv -f LATIN1 -t UTF-8") from error


def _dataset_documents(name: str, field: str, load: Callable[[Any], Any]) -> _Documents:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"to read {name} install the datasets package: pip install 'fastweights[eval]'") from error
    try:
        rows = load(datasets)
        if field in (rows.column_names or ()):
            rows = rows.select_columns([field])
        for row in rows:
            yield _field(row, field, name), 0
    except DataError:
        raise
    except Exception as error:  # the hub, the network and every format have errors of their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{name} cannot be read: {reason}") from error


def _field(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or field not in row:
        found = f"only {', '.join(row)}" if isinstance(row, dict) else f"it is a {type(row).__name__}"
        raise DataError(f"{where} has no field {field!r}, {found}: name the text's with --text-field")
    text = "" if row[field] is None else row[field]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise DataError(f"{where}: the field {field!r} is a {kind}, not text: name the text's with --text-field")
    # JSON can hold halves of characters (lone surrogates), which no tokenizer takes.
    return text.encode("utf-8", "replace").decode()


def _tokenizer_fingerprint(tokenizer: Any) -> str:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return _fingerprint([sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id])
    # The last call's padding and truncation stay in the backend; they say nothing about the next.
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    return _fingerprint([backend, tokenizer.eos_token_id])


def _fingerprint(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _open(folder: Path) -> TokenFile | None:
    """The token file in a folder; None where there is none or it is damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
        starts = np.load(folder / "starts.npy", mmap_mode="r")
        whole = len(tokens) == meta["tokens"] and len(starts) == meta["documents"]
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return TokenFile(folder, tokens, starts, meta) if whole else None


def _make(folder: Path, write: Callable[[Path], None]) -> TokenFile:
    """Write under a temporary name, then rename. Another process may have been faster: what it made is as good."""
    failure: OSError | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        prefix = f".{folder.name}.{os.getpid()}.{socket.gethostname()}."
        temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=folder.parent))
        try:
            write(temporary)
            temporary.chmod(0o755)
            if _open(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        failure = error
    made = _open(folder)
    if made is None:
        reason = failure or "it cannot be read back"
        raise DataError(f"cannot write to {folder}: {reason}; set FASTWEIGHTS_CACHE to another folder") from failure
    return made


def _remove_leftovers(parent: Path) -> None:
    """What killed processes left behind: their number is in the name, with the machine's, for machines may share it."""
    for folder in parent.glob(f".*.{socket.gethostname()}.*.tmp"):
        process = folder.name.split(".")[2]
        if Path("/proc/self").exists() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _write(source: _Source, tokenizer: Any, settings: dict[str, Any], progress: bool, folder: Path) -> None:
    dtype = np.dtype(np.uint16 if max(len(tokenizer) - 1, *tokenizer.get_vocab().values()) < 2**16 else np.uint32)
    starts, count, largest = [], Counter[str](tokens=0), 0
    counted = ["{task.completed:,.0f} documents"] if source.size is None else [BarColumn(), DownloadColumn()]
    bar = Progress("tokenising", *counted, console=Console(stderr=True), transient=True, disable=not progress)
    task = bar.add_task("", total=source.size)
    with (folder / "tokens.bin").open("wb") as file, bar:
        for text, ids, read in _encoded(source.documents, tokenizer, settings["limit"]):
            starts.append(count["tokens"])
            file.write(ids.astype(dtype).tobytes())
            count.update(tokens=len(ids), documents=1, words=len(text.split()), bytes=len(text.encode()))
            largest = max(largest, int(ids.max()))
            bar.update(task, completed=count["documents"] if source.size is None else read)
    if not starts:
        raise DataError(f"{source.name} has no text in it: it is empty, or all its documents are blank")
    np.save(folder / "starts.npy", np.array(starts, dtype=np.int64))
    vocabulary = {"vocab_size": len(tokenizer), "largest_id": largest, "dtype": dtype.name}
    meta = {"source": source.name, **count, **vocabulary, **settings}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def _encoded(documents: _Documents, tokenizer: Any, limit: int | None) -> Iterator[tuple[str, np.ndarray, int]]:
    """Each document's text, ids and place in the source; the one that goes beyond the limit is cut there."""
    left = limit or 2**63
    for batch in _batches(documents):
        for (text, read), ids in zip(batch, _encode([text for text, _ in batch], tokenizer), strict=True):
            if len(ids) > left:
                ids = ids[:left]
                text = tokenizer.decode(ids, skip_special_tokens=True)
            if len(ids):
                yield text, ids, read
            left -= len(ids)
            if not left:
                return


def _batches(documents: _Documents) -> Iterator[list[tuple[str, int]]]:
    batch, characters = [], 0
    for text, read in documents:
        if text.strip():
            batch.append((text, read))
            characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """Special tokens and all. Of a document cut into pieces only the first piece has those."""
    call = partial(tokenizer, return_attention_mask=False, return_token_type_ids=False, verbose=False)
    pieces, eos = [_cut(text) for text in texts], tokenizer.eos_token_id
    documents = []
    for ids, (_, *rest) in zip(call([first for first, *_ in pieces])["input_ids"], pieces, strict=True):
        if rest and ids[-1] == eos:
            ids.pop()
        parts = [np.asarray(ids, dtype=np.int64)]
        parts += [np.asarray(call(piece, add_special_tokens=False)["input_ids"], dtype=np.int64) for piece in rest]
        if eos is not None and parts[-1][-1:].tolist() != [eos]:
            parts.append(np.array([eos]))
        documents.append(np.concatenate(parts))
    return documents


def _cut(text: str) -> list[str]:
    pieces, begin = [], 0
    while cut := _CUT.search(text, begin + PIECE_CHARACTERS):
        pieces.append(text[begin : cut.start()])
        begin = cut.start()
    return [*pieces, text[begin:]]
