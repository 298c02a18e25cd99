"""Text to memory-mapped token files, which are made once and cached."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, DownloadColumn
from transformers import PreTrainedTokenizerBase

from fastweights.data.cache_limit import Hold, shrink
from fastweights.data.cache_limit import cache_limit as parsed_limit
from fastweights.data.chat import ChatEncoder
from fastweights.data.encoding import Encoded, TextEncoder, encode_batches, usable_processes
from fastweights.data.readers import TOKENS, Chat, DataError, Document, Documents, Source, empty_source, find
from fastweights.loading import require_tokenizer
from fastweights.tokenization import bos_token
from fastweights.utils.errors import Argument
from fastweights.utils.files import atomic_folder, remove_leftovers, write_json
from fastweights.utils.parsing import read_json
from fastweights.utils.progress import progress_bar

FORMAT_VERSION = 1
SCORED = "scored.bin"  # only for conversations
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
META_CHECKSUM = "meta_sha256"  # the field of meta.json with a checksum of the others

# Characters of the documents that are encoded at once, at least.
BATCH_CHARACTERS = 2**20
# Elements of a token file that are read at once for its checksum.
CHECKSUM_ITEMS = 2**24
# Tokenizers with one vocabulary that differ otherwise encode this text differently.
PROBE = (
    "Don't  stop\tat 3.14159, 2,048 or 1e-5!\n\n  def f(x_1):\r\n\treturn {'a': [x**2 >= 0]}  # ok?\n"
    "Ünïcödé, Ｗｉｄｅ, e\u0301, ß, Ελληνικά, русский, 日本語の文, हिन्दी, العربية, 한국어, 🙂👍🏽, ½ € … “q”\n"
    "www.a-b.org/~c?d=e&f <|endoftext|> </s>"
)


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A memory-mapped token file: the tokens of all documents, and where each document starts."""

    folder: Path
    tokens: np.ndarray  # ids, uint16 or uint32
    starts: np.ndarray  # index of each document's first token, int64; the first is 0
    meta: dict[str, Any]  # source, settings, fingerprint of the tokenizer, vocab_size, largest_id, counts, and sha256
    bos: int | None = None  # the token that the model expects before every row, as before every document
    scored: np.ndarray | None = None  # of conversations, which tokens are to be predicted, bool; None: all
    hold: Hold | None = None  # marks the file as in use, so that a limit of the cache does not remove it

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of all tokens, starts and scored, read once."""
        checksum = hashlib.sha256()
        for array in (self.tokens, self.starts, *([] if self.scored is None else [self.scored])):
            _update(checksum, array)
        return checksum.hexdigest()

    @property
    def identity(self) -> list[Any]:
        """What a resumed run compares: rows made of the same tokens, with or without bos."""
        return [len(self), self.checksum, *([] if self.bos is None else [self.bos])]


def _update(checksum: Any, array: np.ndarray) -> None:
    for start in range(0, len(array), CHECKSUM_ITEMS):
        checksum.update(array[start : start + CHECKSUM_ITEMS].tobytes())


def prepare(
    source: str | os.PathLike,
    tokenizer: Any,
    *,
    cache: str | os.PathLike | None = None,
    text_field: str = "text",
    limit: int | None = None,
    cache_limit: int | str | None = None,
    progress: bool = True,
) -> TokenFile:
    """Tokenize a text, or open its tokens in the cache.

    Each document gets the tokenizer's usual special tokens and ends with its eos token. Blank documents are left out.
    A conversation is rendered by the tokenizer's chat template, and only the assistant's answers are to be predicted.
    Of several processes, let one call this first.

    Args:
        source: A text file (documents are separated by lines `<|endoftext|>`), JSON lines, parquet, a folder of such
            files (text and JSON lines may be .xz or .gz), a folder that a data set's `save_to_disk` wrote, a data set
            of the hub, hf:NAME[:CONFIG][:SPLIT], or a folder of tokens that an earlier call made. Rows of JSON lines,
            parquet files and data sets may have a conversation in the field `messages` instead of text.
        tokenizer: The model's tokenizer.
        cache: Folder for token files; by default $FASTWEIGHTS_CACHE, else ~/.cache/fastweights.
        text_field: Field that holds the text in JSON lines, parquet files and data sets.
        limit: Tokens to take, at most.
        cache_limit: Size of the cache, at most, in bytes or as "20GB"; by default $FASTWEIGHTS_CACHE_LIMIT, else none.
            Above it, the files that were not used for longest are removed, but none that a process has open.
        progress: Whether to show a bar.

    Raises:
        DataError: The source cannot be read, or the cache cannot be written.
        CheckpointError: `tokenizer` is None.
    """
    require_tokenizer(tokenizer)
    if limit is not None and limit < 1:
        raise DataError(Argument("limit"), f" must be at least 1 token, found {limit}")
    most = parsed_limit(cache_limit)
    if (Path(source) / TOKENS).is_file():
        return _tokens_in(Path(source), limit, bos_token(tokenizer))
    found = find(os.fspath(source), text_field)
    settings = {"text_field": text_field, "limit": limit, "tokenizer": _tokenizer_fingerprint(tokenizer)}
    chat_settings = settings | {"chat_template": _fingerprint(getattr(tokenizer, "chat_template", None))}
    root = Path(cache or os.environ.get("FASTWEIGHTS_CACHE") or "~/.cache/fastweights").expanduser().resolve()
    text, chat = (
        root / "data" / _fingerprint([FORMAT_VERSION, found.identity, values]) for values in (settings, chat_settings)
    )
    bos = bos_token(tokenizer)
    for folder in (text, chat):
        ready = _open(folder, bos)
        if ready is not None:
            return ready
    found, is_chat = _look_ahead(found)
    write = partial(_write, found, tokenizer, chat_settings if is_chat else settings, is_chat, progress)
    made = _make(chat if is_chat else text, write, bos)
    if most is not None:
        shrink(root / "data", most)
    return made


def _look_ahead(source: Source) -> tuple[Source, bool]:
    """The source without blank documents, and whether it holds conversations, as its first document tells."""
    filled = ((document, read) for document, read in source.documents if not _is_blank(document))
    first = list(itertools.islice(filled, 1))
    is_chat = bool(first) and isinstance(first[0][0], Chat)
    return source._replace(documents=_of_one_kind(source.name, itertools.chain(first, filled), is_chat)), is_chat


def _of_one_kind(name: str, documents: Iterable[tuple[Document, int]], is_chat: bool) -> Documents:
    for document, read in documents:
        if isinstance(document, Chat) != is_chat:
            raise DataError(f"{name} has both text and conversations: train on one, then on the other")
        yield document, read


def _is_blank(document: Document) -> bool:
    return not document.messages if isinstance(document, Chat) else not document.strip()


def _tokens_in(folder: Path, limit: int | None, bos: int | None) -> TokenFile:
    """Tokens that were made elsewhere. `check_vocabulary` checks that the tokenizer is the model's."""
    tokens = _open(folder, bos)
    if tokens is None:
        raise DataError(f"{folder}: tokens.bin is not as meta.json and starts.npy beside it say: copy the folder again")
    starts = tokens.starts[tokens.starts < (limit or len(tokens))]
    scored = None if tokens.scored is None else tokens.scored[:limit]
    return replace(tokens, tokens=tokens.tokens[:limit], starts=starts, scored=scored)


def check_vocabulary(tokens: TokenFile, tokenizer: Any, model_config: Any) -> None:
    """Refuse tokens of another tokenizer, and ids that the model has no embedding for."""
    made_with = tokens.meta.get("tokenizer")
    if made_with is not None and made_with != _tokenizer_fingerprint(tokenizer):
        raise DataError(f"the tokens in {tokens.folder} were made with another tokenizer: prepare them with this one")
    largest = int(tokens.tokens.max())
    if largest >= model_config.vocab_size:
        raise DataError(
            f"the tokenizer does not match the model: the text has token id {largest}, but the model's vocab_size is "
            f"{model_config.vocab_size} (the tokenizer has {len(tokenizer)} tokens); use the model's own tokenizer"
        )


def _tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of what the tokenizer does. How it is stored differs between versions of transformers."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return _fingerprint([vocabulary, tokenizer.eos_token_id, _encode([PROBE], tokenizer)[0].tolist()])


def _fingerprint(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _open(folder: Path, bos: int | None = None) -> TokenFile | None:
    """The token file in a folder; None where there is none or it is damaged."""
    try:
        hold = Hold(folder)
        meta = read_json(folder / "meta.json")
        tokens = np.memmap(folder / TOKENS, dtype=DTYPES[meta["dtype"]], mode="r")
        starts = np.load(folder / "starts.npy", mmap_mode="r", allow_pickle=False)
        scored = np.memmap(folder / SCORED, dtype=np.bool_, mode="r") if "scored" in meta else None
        opened = TokenFile(folder, tokens, starts, meta, bos, scored, hold)
        return opened if _is_whole(opened) else None
    except Exception:  # numpy parses the header of starts.npy as Python, which raises errors of many kinds
        return None


def _is_whole(tokens: TokenFile) -> bool:
    """Whether the files fit each other. Checksums are verified where there are some: earlier versions wrote none."""
    starts, meta = tokens.starts, tokens.meta
    if not isinstance(starts, np.ndarray) or starts.dtype != np.int64 or starts.ndim != 1:
        return False
    if (len(tokens), len(starts)) != (meta["tokens"], meta["documents"]) or not len(starts):
        return False
    if tokens.scored is not None and len(tokens.scored) != len(tokens):
        return False
    if starts[0] != 0 or starts[-1] >= len(tokens) or not bool((np.diff(starts) > 0).all()):
        return False
    return meta.get("sha256") in (None, tokens.checksum) and meta.get(META_CHECKSUM) in (None, _meta_checksum(meta))


def _meta_checksum(meta: dict[str, Any]) -> str:
    """A checksum of the other fields of meta.json."""
    return _fingerprint(sorted((name, value) for name, value in meta.items() if name != META_CHECKSUM))


def _make(folder: Path, write: Callable[[Path], None], bos: int | None) -> TokenFile:
    """Write a token file. Another process may have finished first: its file is as good."""
    failure: OSError | None = None
    remove_leftovers(folder.parent)  # also those of other texts, which nobody may ask for again
    try:
        with atomic_folder(folder, unless=lambda: _open(folder) is not None) as temporary:
            write(temporary)
    except OSError as error:
        failure = error
    made = _open(folder, bos)
    if made is None:
        reason = "it cannot be read back" if failure is None else failure.strerror
        raise DataError(f"cannot write to {folder}: {reason}; set FASTWEIGHTS_CACHE to another folder") from failure
    return made


def _write(
    source: Source, tokenizer: Any, settings: dict[str, Any], is_chat: bool, progress: bool, folder: Path
) -> None:
    dtype = np.dtype(np.uint16 if max(len(tokenizer) - 1, *tokenizer.get_vocab().values()) < 2**16 else np.uint32)
    starts, count, largest, checksum = [], Counter[str](tokens=0), 0, hashlib.sha256()
    columns = ["{task.completed:,.0f} documents"] if source.size is None else [BarColumn(), DownloadColumn()]
    bar = progress_bar("{task.description}", *columns, enabled=progress)
    task = bar.add_task("tokenizing", total=source.size)
    encode = _chat_batches(tokenizer) if is_chat else _text_batches(tokenizer)
    with ExitStack() as files:
        file = files.enter_context((folder / TOKENS).open("wb"))
        scored_file = files.enter_context((folder / SCORED).open("wb")) if is_chat else None
        files.enter_context(bar)
        for document, read in _encoded(source.documents, tokenizer, encode, settings["limit"]):
            starts.append(count["tokens"])
            encoded = document.ids.astype(dtype).tobytes()
            file.write(encoded)
            checksum.update(encoded)
            count.update(tokens=len(document.ids), documents=1, words=document.words, bytes=document.bytes)
            if scored_file is not None and document.scored is not None:
                scored_file.write(document.scored.tobytes())
                count.update(scored=int(document.scored.sum()))
            largest = max(largest, int(document.ids.max()))
            bar.update(task, completed=count["documents"] if source.size is None else read)
    if not starts:
        raise empty_source(source.name)
    np.save(folder / "starts.npy", np.array(starts, dtype=np.int64))
    _update(checksum, np.array(starts, dtype=np.int64))
    if is_chat:
        if not count["scored"]:
            raise DataError(f"{source.name} has no answers to learn: no message that was read has the role 'assistant'")
        _update(checksum, np.memmap(folder / SCORED, dtype=np.bool_, mode="r"))
    vocabulary = {"vocab_size": len(tokenizer), "largest_id": largest, "dtype": dtype.name}
    meta = {"source": source.name, **count, **vocabulary, **settings, "sha256": checksum.hexdigest()}
    write_json(folder / "meta.json", meta | {META_CHECKSUM: _meta_checksum(meta)})


# Encodes batches of documents, in order.
BatchEncoder = Callable[[Iterator[list[Any]]], Iterator[list[Encoded]]]


def _encoded(
    documents: Documents, tokenizer: Any, encode: BatchEncoder, limit: int | None
) -> Iterator[tuple[Encoded, int]]:
    """Each document and its position in the source. The document that crosses the limit is cut there."""
    left, places = limit or 2**63, deque[list[int]]()

    def texts() -> Iterator[list[Document]]:
        for batch in _batches(documents):
            places.append([read for _, read in batch])
            yield [document for document, _ in batch]

    with closing(encode(texts())) as encoded:  # type: ignore[type-var]
        for batch in encoded:
            for read, document in zip(places.popleft(), batch, strict=True):
                if len(document.ids) > left:
                    document = _cut_document(document, left, tokenizer)
                if len(document.ids):
                    yield document, read
                left -= len(document.ids)
                if not left:
                    return


def _cut_document(document: Encoded, length: int, tokenizer: Any) -> Encoded:
    ids, scored = document.ids[:length], None if document.scored is None else document.scored[:length]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Encoded(ids, len(text.split()), len(text.encode()), scored)


def _batches(documents: Documents) -> Iterator[list[tuple[Document, int]]]:
    batch: list[tuple[Document, int]] = []
    characters = 0
    for document, read in documents:
        batch.append((document, read))
        texts = [document] if isinstance(document, str) else [message["content"] for message in document.messages]
        characters += sum(map(len, texts))
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _text_batches(tokenizer: Any) -> BatchEncoder:
    return partial(encode_batches, _text_encoder(tokenizer), processes=usable_processes())


def _text_encoder(tokenizer: Any) -> TextEncoder:
    """The encoder of a tokenizer. Where that only calls one of the tokenizers library, so does the encoder."""
    eos, backend = tokenizer.eos_token_id, getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and type(tokenizer).__call__ is PreTrainedTokenizerBase.__call__:
        expected = _encode([PROBE], tokenizer)[0]  # which also ends padding and truncation
        fast = TextEncoder.from_backend(backend, eos)
        if np.array_equal(fast.ids([PROBE])[0], expected):
            return fast
    return TextEncoder(partial(_call, tokenizer), eos)


def _chat_batches(tokenizer: Any) -> BatchEncoder:
    encoder = ChatEncoder(tokenizer)

    def encode(batches: Iterator[list[Chat]]) -> Iterator[list[Encoded]]:
        for batch in batches:
            found = (encoder.encode(conversation) for conversation in batch)
            yield [Encoded(ids, len(text.split()), len(text.encode()), scored) for text, ids, scored in found]

    return encode


def _encode(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """The ids of documents as the tokenizer itself returns them, with special tokens."""
    return TextEncoder(partial(_call, tokenizer), tokenizer.eos_token_id).ids(texts)


def _call(tokenizer: Any, texts: Sequence[str], special: bool) -> list[list[int]]:
    options = dict(return_attention_mask=False, return_token_type_ids=False, verbose=False)
    return tokenizer(list(texts), add_special_tokens=special, **options)["input_ids"]
