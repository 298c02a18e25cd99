"""Texts to token ids, also in several processes at once.

A tokenizer of the tokenizers library can use threads of its own, but they wait for each other, and turning its results
into arrays takes one thread. So a large text is shared out to processes that run this module: each gets batches of
texts and returns arrays. This module imports neither torch nor transformers, so that they start quickly.

A process reads frames from stdin and writes frames to stdout. A frame is a list of byte strings: their number, their
lengths (int64), and the strings. The first frame it reads has the tokenizer as JSON and the settings, each other one
the texts of a batch. For each batch it returns the ids of all texts (uint32), and for each text the number of its ids
and of its words (int64).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

import numpy as np

# A tokenizer needs about 150 bytes of memory for each character that it encodes at once.
CHUNK_CHARACTERS = 2**22
# Where a long document is cut: between a line break and the next word a token ends anyway.
_CUT = re.compile(r"(?<=\n)(?= ?\S)")
# Processes are started after so many batches: before, they would take longer to start than they save.
BATCHES_BEFORE = 4


class Encoded(NamedTuple):
    """A document: its ids [T], how many words and bytes its text has, and which ids are scored [T] (None: all)."""

    ids: np.ndarray
    words: int
    bytes: int
    scored: np.ndarray | None = None


class TextEncoder:
    """Encodes documents. Each has the tokenizer's usual special tokens and ends with its eos token.

    Args:
        call: Maps texts, and whether to add special tokens, to lists of ids.
        eos: The eos token. None: documents end without one.
    """

    def __init__(self, call: Callable[[Sequence[str], bool], Sequence[list[int]]], eos: int | None) -> None:
        self.call, self.eos = call, eos
        self._backend: Any = None

    @classmethod
    def from_backend(cls, backend: Any, eos: int | None) -> TextEncoder:
        """The encoder of a `tokenizers.Tokenizer`, which must not pad or truncate. It can be sent to processes."""

        def call(texts: Sequence[str], special: bool) -> list[list[int]]:
            return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=special)]

        encoder = cls(call, eos)
        encoder._backend = backend
        return encoder

    def to_frame(self) -> list[bytes] | None:
        """What a process needs to encode in the same way. None: the tokenizer cannot be sent."""
        if self._backend is None:
            return None
        settings = {"eos": self.eos, "encode_special_tokens": self._backend.encode_special_tokens}
        return [self._backend.to_str().encode(), json.dumps(settings).encode()]

    @classmethod
    def from_frame(cls, frame: list[bytes]) -> TextEncoder:
        """The encoder that `to_frame` describes."""
        from tokenizers import Tokenizer

        backend, settings = Tokenizer.from_str(frame[0].decode()), json.loads(frame[1])
        backend.encode_special_tokens = settings["encode_special_tokens"]
        return cls.from_backend(backend, settings["eos"])

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text. A long one is cut into chunks, of which the first one has the special tokens."""
        chunks = [_cut(text) for text in texts]
        documents = []
        for ids, (_, *rest) in zip(self.call([first for first, *_ in chunks], True), chunks, strict=True):
            if rest and ids[-1:] == [self.eos]:
                ids.pop()
            parts = [np.asarray(ids, dtype=np.uint32)]
            parts += [np.asarray(self.call([chunk], False)[0], dtype=np.uint32) for chunk in rest]
            if self.eos is not None and parts[-1][-1:].tolist() != [self.eos]:
                parts.append(np.array([self.eos], dtype=np.uint32))
            documents.append(np.concatenate(parts) if len(parts) > 1 else parts[0])
        return documents

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode documents, with the counts that describe them."""
        found = zip(texts, self.ids(texts), strict=True)
        return [Encoded(ids, len(text.split()), len(text.encode())) for text, ids in found]


def _cut(text: str) -> list[str]:
    chunks, start = [], 0
    while cut := _CUT.search(text, start + CHUNK_CHARACTERS):
        chunks.append(text[start : cut.start()])
        start = cut.start()
    return [*chunks, text[start:]]


def encode_batches(encoder: TextEncoder, batches: Iterator[list[str]], processes: int) -> Iterator[list[Encoded]]:
    """Encode batches of texts, in order. A large text is shared out to processes.

    Args:
        encoder: Encodes them.
        batches: Batches of texts. With processes, a few are read ahead.
        processes: How many processes to use at most; 0 and 1 for this one alone.
    """
    frame = encoder.to_frame() if processes > 1 else None
    for number, batch in enumerate(batches, 1):
        yield encoder.encode(batch)
        if number == BATCHES_BEFORE and frame is not None:
            break
    else:
        return
    with _workers(frame, processes) as encode, ThreadPoolExecutor(processes) as threads:
        waiting: deque[Future[list[Encoded]]] = deque()
        failure: Exception | None = None
        try:
            while True:
                while failure is None and len(waiting) < 2 * processes:
                    try:
                        waiting.append(threads.submit(encode, encoder, next(batches)))
                    except Exception as error:  # also the end of the batches: what was read before it counts
                        failure = error
                if not waiting:
                    break
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
        if failure is not None and not isinstance(failure, StopIteration):
            raise failure


def usable_processes() -> int:
    """How many processes may tokenize at once: the cores of this process, unless TOKENIZERS_PARALLELISM is false."""
    if os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() in ("false", "off", "0", "no", "f", "n", ""):
        return 1
    return usable_cores()


def usable_cores() -> int:
    """The cores of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """A process that encodes. It ends when its stdin is closed, also if the process that started it is killed."""

    def __init__(self, frame: list[bytes]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from fastweights.data.encoding import work; work()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C is for the process that started it
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        try:
            _write_frame(self.stdin, frame)
        except BaseException:  # it has ended already
            self.end()
            raise

    def encode(self, texts: list[str]) -> list[Encoded]:
        encoded = [text.encode() for text in texts]
        _write_frame(self.stdin, encoded)
        all_ids, lengths, words = (np.frombuffer(x, t) for x, t in zip(_read_frame(self.stdout), _TYPES, strict=True))
        ids = np.split(all_ids, np.cumsum(lengths)[:-1])
        return [Encoded(*found) for found in zip(ids, words.tolist(), map(len, encoded), strict=True)]

    def end(self) -> None:
        with suppress(OSError):
            self.stdin.close()
        self.stdout.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def _workers(frame: Any, count: int) -> Iterator[Callable[[TextEncoder, list[str]], list[Encoded]]]:
    """Processes; in the block, what it gets encodes a batch in one that is free. It is called from `count` threads."""
    free: SimpleQueue[_Worker | None] = SimpleQueue()
    workers: list[_Worker] = []

    def encode(encoder: TextEncoder, texts: list[str]) -> list[Encoded]:
        worker = free.get()
        try:
            if worker is not None:
                return worker.encode(texts)
        except (OSError, EOFError):  # it was killed, perhaps because memory was short: go on without it
            worker = None
        finally:
            free.put(worker)
        return encoder.encode(texts)

    try:
        for _ in range(count):
            try:
                workers.append(_Worker(frame))
                free.put(workers[-1])
            except OSError:  # the system allows no more, or ended it
                free.put(None)
        yield encode
    finally:
        for worker in workers:
            worker.end()


_TYPES = (np.uint32, np.int64, np.int64)


def work() -> None:
    """What a process does: encode batches from stdin until that is closed."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    encoder = TextEncoder.from_frame(_read_frame(stdin))
    with suppress(EOFError, BrokenPipeError):
        while True:
            found = encoder.encode([text.decode() for text in _read_frame(stdin)])
            arrays = (np.concatenate([x.ids for x in found]), [len(x.ids) for x in found], [x.words for x in found])
            _write_frame(stdout, [np.asarray(x, t).tobytes() for x, t in zip(arrays, _TYPES, strict=True)])


def _write_frame(stream: IO[bytes], parts: list[bytes]) -> None:
    header = np.array([len(parts), *map(len, parts)], dtype=np.int64)
    stream.write(b"".join([header.tobytes(), *parts]))
    stream.flush()


def _read_frame(stream: IO[bytes]) -> list[bytes]:
    """The parts of the next frame. Raises EOFError at the end of the stream."""
    (count,) = np.frombuffer(_read(stream, 8), np.int64)
    lengths = np.frombuffer(_read(stream, 8 * int(count)), np.int64)
    return [_read(stream, int(length)) for length in lengths]


def _read(stream: IO[bytes], length: int) -> bytes:
    found = stream.read(length)
    if len(found) < length:
        raise EOFError
    return found
