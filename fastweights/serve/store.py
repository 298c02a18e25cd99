"""Stored responses and prefixes: each is a snapshot of constant size under a key.

`open_store` opens one of three: in memory, in a folder, or in Redis. All of them follow the same rules. A response or a
prefix that nobody has used for `ttl_seconds` is deleted. When a tenant has more than `states_per_tenant`, or all
together have more than `disk_bytes` (in memory: `memory_bytes`), those that were used least recently are deleted.

A folder holds an index (SQLite) and a file for every state. A state is written and flushed before its entry in the
index is, and deleted after it: whatever happens in between, an entry that can be found has a whole state. Several
processes may use one folder: each asks the index for every request. What they hold in memory is only a copy of a state.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastweights.modeling.state_file import StateError
from fastweights.serve.index import Entry, Index
from fastweights.serve.prefixes import owner_key, prefix_key, response_key, stored_prefixes
from fastweights.serve.snapshot import CPU, Snapshot, fingerprint, from_bytes, size, to_bytes
from fastweights.utils.errors import Argument, FastWeightsError
from fastweights.utils.files import atomic_file, flush, is_temporary, make_folder, remove_leftovers

log = logging.getLogger(__name__)
T = TypeVar("T")

REDIS = ("redis://", "rediss://", "unix://")
INDEX, STATES = "index.sqlite", "states"
# No write takes so long. Older temporary files are of processes that were killed.
ABANDONED_SECONDS = 24 * 3600.0
THREADS = 4


class StoreError(FastWeightsError):
    """A store that cannot be opened, read or written."""


@dataclass(frozen=True)
class StoreLimits:
    """What a store may hold.

    Args:
        memory_bytes: bytes of states in the memory of this process.
        disk_bytes: bytes of states in the folder or in Redis, of all models and tenants.
        ttl_seconds: time after which an unused state is deleted.
        states_per_tenant: number of states, responses and prefixes together, of one tenant and model.
    """

    memory_bytes: int = 2**30
    disk_bytes: int = 10 * 2**30
    ttl_seconds: float = 30 * 24 * 3600.0
    states_per_tenant: int = 1000

    def __post_init__(self) -> None:
        for name, least in (("memory_bytes", 0), ("disk_bytes", 0), ("ttl_seconds", 1), ("states_per_tenant", 1)):
            value = getattr(self, name)
            if not value >= least:
                raise StoreError(Argument(name), f" must be at least {least}, found {value}")


def open_store(url: str | None, model: Any, limits: StoreLimits, clock: Callable[[], float] = time.time) -> Store:
    """Open a store of a model's responses and prefixes.

    Args:
        url: None: in memory. A folder, which is created if it is missing. Or redis://HOST:PORT/NUMBER (also rediss://
            and unix://), which several servers can share.
        model: the converted model.
        limits: what the store may hold.
        clock: the time in seconds. Processes that share a store must agree on it.

    Raises:
        StoreError: the store cannot be opened.
    """
    if url is not None and url.startswith(REDIS):
        try:
            from fastweights.serve.redis_store import RedisStore
        except ModuleNotFoundError as error:
            raise StoreError("the redis package is not installed: pip install 'fastweights[serve]'") from error
        return RedisStore(url, model, limits, clock)
    if url is not None and "://" in url:
        raise StoreError(f"a store is a folder or redis://HOST:PORT/NUMBER, found a URL with {url.split('://')[0]}://")
    return LocalStore(None if url is None else Path(url), model, limits, clock)


class Store(ABC):
    """Stored responses and prefixes of a model. An id of one tenant does not exist for another.

    Snapshots that it returns are shared: fork their states before you change them.
    """

    def __init__(self, model: Any, limits: StoreLimits, clock: Callable[[], float]) -> None:
        self.model, self.limits, self.clock = model, limits, clock
        self._fingerprint = fingerprint(model)

    async def put_response(self, tenant: str, id: str, record: dict[str, Any], snapshot: Snapshot) -> None:
        """Store a response. It is durable when this returns.

        Args:
            tenant: whose response it is.
            id: the id of the response. One with the same id is replaced.
            record: what is known about the response, as JSON.
            snapshot: the place after its last token.

        Raises:
            StoreError: the response cannot be stored.
        """
        owner = self._owner(tenant)
        await self._put(owner, response_key(owner, id), 0, json.dumps(record), snapshot)

    async def get_response(self, tenant: str, id: str) -> tuple[dict[str, Any], Snapshot] | None:
        """The record and the snapshot of a response. None: it is unknown, expired, deleted or of another tenant.

        Raises:
            StoreError: the store cannot be read.
        """
        found = await self._get(response_key(self._owner(tenant), id))
        return None if found is None else (json.loads(found[0]), found[1].to(self.model.device))

    async def get_record(self, tenant: str, id: str) -> dict[str, Any] | None:
        """The record of a response, as `get_response` returns it."""
        record = await self._get_record(response_key(self._owner(tenant), id))
        return None if record is None else json.loads(record)

    async def delete_response(self, tenant: str, id: str) -> bool:
        """Delete a response. False where `get_response` returns None."""
        return await self._delete(response_key(self._owner(tenant), id))

    async def put_prefix(self, tenant: str, tokens: Sequence[int], snapshot: Snapshot) -> None:
        """Store the snapshot after `tokens`, if possible: an error is only logged."""
        owner = self._owner(tenant)
        try:
            if len(tokens) and snapshot.logits is not None:
                await self._put_new(owner, prefix_key(owner, tokens), len(tokens), snapshot)
        except StoreError as error:
            log.warning("a prefix was not stored: %s", error)

    async def longest_prefix(self, tenant: str, tokens: Sequence[int]) -> tuple[int, Snapshot] | None:
        """The longest stored prefix of `tokens`, which may be all of them: its length and the snapshot after it.

        None: there is none, or the store cannot be read, which is logged.
        """
        owner = self._owner(tenant)
        try:
            for length, key in stored_prefixes(owner, tokens, await self._prefixes(owner, len(tokens))):
                found = await self._get(key)
                if found is not None:
                    return length, found[1].to(self.model.device)
        except StoreError as error:
            log.warning("no prefix was looked up: %s", error)
        return None

    @abstractmethod
    async def remove_expired(self) -> None:
        """Delete what has not been used for `ttl_seconds`. To be called from time to time: nothing else does it while
        nobody stores anything."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what is being written, and close the store."""

    def _owner(self, tenant: str) -> str:
        return owner_key(self._fingerprint, tenant)

    def _oldest(self) -> float:
        """When the oldest entry that has not expired was used."""
        return self.clock() - self.limits.ttl_seconds

    async def _put_new(self, owner: str, key: str, length: int, snapshot: Snapshot) -> None:
        """Store an entry unless there is one with this key, which is then the same."""
        if await self._get_record(key) is None:
            await self._put(owner, key, length, "", snapshot)

    @abstractmethod
    async def _put(self, owner: str, key: str, length: int, record: str, snapshot: Snapshot) -> None: ...

    @abstractmethod
    async def _get(self, key: str) -> tuple[str, Snapshot] | None: ...

    @abstractmethod
    async def _get_record(self, key: str) -> str | None: ...

    @abstractmethod
    async def _delete(self, key: str) -> bool: ...

    @abstractmethod
    async def _prefixes(self, owner: str, longest: int) -> list[tuple[int, str]]: ...


def check_size(size: int, limit: int) -> None:
    """Refuse a state that a store can never hold."""
    if size > limit:
        raise StoreError(f"a state of {size:,} bytes is larger than all states together may be, {limit:,} bytes")


class RecentSnapshots:
    """The snapshots that were used last, by the names of their states, in the memory of the CPU. Threads share them.

    Args:
        limit: bytes that they may have. None: no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit, self._bytes, self._lock = limit, 0, threading.Lock()
        self._snapshots: dict[str, Snapshot] = {}  # the least recently used first

    def get(self, state: str) -> Snapshot | None:
        with self._lock:
            snapshot = self._snapshots.pop(state, None)
            if snapshot is not None:
                self._snapshots[state] = snapshot
            return snapshot

    def put(self, state: str, snapshot: Snapshot) -> None:
        snapshot = snapshot.to(CPU)
        with self._lock:
            self._remove(state)
            self._snapshots[state] = snapshot
            self._bytes += size(snapshot)
            while self._limit is not None and self._bytes > self._limit:
                self._remove(next(iter(self._snapshots)))

    def remove(self, states: Iterable[str]) -> None:
        with self._lock:
            for state in states:
                self._remove(state)

    def _remove(self, state: str) -> None:
        snapshot = self._snapshots.pop(state, None)
        if snapshot is not None:
            self._bytes -= size(snapshot)


class StateFiles:
    """A folder with a file for every state. It has subfolders, so that none of them has very many files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder)

    def path(self, state: str) -> Path:
        """The file of a state, whose name is one that a store has made."""
        return self.folder / state[:2] / f"{state}.safetensors"

    def remove(self, states: Iterable[str]) -> None:
        for state in states:
            self.path(state).unlink(missing_ok=True)

    def states(self) -> set[str]:
        """The states whose files are there."""
        names = (path.name for path in self.folder.glob("[0-9a-f][0-9a-f]/*.safetensors"))
        return {name.removesuffix(".safetensors") for name in names if re.fullmatch(r"[0-9a-f]{32}\.safetensors", name)}

    def remove_abandoned(self) -> None:
        """Delete temporary files of processes that were killed while they wrote them."""
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            remove_leftovers(folder)
            for path in folder.glob(".*.tmp"):
                with suppress(FileNotFoundError):  # another process has given it its name meanwhile
                    if is_temporary(path.name) and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                        path.unlink()


class LocalStore(Store):
    """A store in a folder, or in the memory of this process.

    Args:
        folder: the folder. None: in memory.
    """

    def __init__(self, folder: Path | None, model: Any, limits: StoreLimits, clock: Callable[[], float]) -> None:
        super().__init__(model, limits, clock)
        self._place = "memory" if folder is None else str(folder)
        self._files: StateFiles | None = None
        with self._errors():
            if folder is not None:
                for created in make_folder(folder)[-1:]:
                    created.chmod(0o700)  # states are conversations
                self._files = StateFiles(folder / STATES)
            self._index = Index(None if folder is None else folder / INDEX)
            # In memory, the index says what is removed.
            self._recent = RecentSnapshots(None if folder is None else limits.memory_bytes)
            try:
                self._clean()
            except BaseException:
                self._index.close()
                raise
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")

    def _clean(self) -> None:
        """Remove what a process left that was killed, or that someone deleted in part. Other processes may be using the
        folder: they give a file its name and add its entry in one transaction."""
        if self._files is not None:
            self._files.remove_abandoned()
            with self._index.transaction():
                files, entries = self._files.states(), self._index.states()
                for state in entries - files:
                    self._index.remove_state(state)
                self._files.remove(files - entries)
        self._remove_expired()

    async def remove_expired(self) -> None:
        await self._run(self._remove_expired)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._index.close()

    async def _put(self, owner: str, key: str, length: int, record: str, snapshot: Snapshot) -> None:
        await self._run(self._write, owner, key, length, record, snapshot)

    async def _get(self, key: str) -> tuple[str, Snapshot] | None:
        return await self._run(self._read, key)

    async def _get_record(self, key: str) -> str | None:
        entry = await self._run(self._find, key)
        return None if entry is None else entry.record

    async def _delete(self, key: str) -> bool:
        return await self._run(self._delete_entry, key)

    async def _prefixes(self, owner: str, longest: int) -> list[tuple[int, str]]:
        return await self._run(self._index.prefixes, owner, longest)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a thread. It runs to its end even if the caller is cancelled."""

        def call() -> T:
            with self._errors():
                return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"the store in {self._place} cannot be used: {error}") from error
        except OSError as error:
            raise StoreError(f"the store in {self._place} cannot be used: {error.strerror or error}") from error

    def _find(self, key: str) -> Entry | None:
        return self._index.find(key, self.clock(), self._oldest())

    def _write(self, owner: str, key: str, length: int, record: str, snapshot: Snapshot) -> None:
        state = secrets.token_hex(16)
        try:
            removed = self._write_entry(state, owner, key, length, record, snapshot)
        except BaseException:
            self._remove_states([state])
            raise
        self._remove_states(removed)

    def _write_entry(self, state: str, owner: str, key: str, length: int, record: str, snapshot: Snapshot) -> list[str]:
        """Write a state and its entry. Returns the states that it displaces."""
        data = None if self._files is None else to_bytes(snapshot, self.model)
        limit = self.limits.memory_bytes if data is None else self.limits.disk_bytes
        count = len(record) + (size(snapshot) if data is None else len(data))
        check_size(count, limit)
        with ExitStack() as stack:
            if data is None:
                stack.enter_context(self._index.transaction())
            else:
                self._write_file(state, data, stack)
            self._recent.put(state, snapshot)
            return [
                *self._index.put(Entry(key, owner, length, record, state, count), self.clock()),
                *self._index.remove_unused(self._oldest()),
                *self._index.limit_entries(owner, self.limits.states_per_tenant, keep=key),
                *self._index.limit_bytes(limit, keep=key),
            ]

    def _write_file(self, state: str, data: bytes, stack: ExitStack) -> None:
        """Write a state's file. It gets its name inside a transaction, which ends with `stack`."""
        assert self._files is not None
        path = self._files.path(state)
        make_folder(path.parent)
        with atomic_file(path) as temporary:
            temporary.write_bytes(data)
            flush(temporary)  # here, so that others need not wait for it
            stack.enter_context(self._index.transaction())

    def _read(self, key: str) -> tuple[str, Snapshot] | None:
        entry = self._find(key)
        if entry is None:
            return None
        snapshot = self._recent.get(entry.state) or self._read_file(entry.state)
        return None if snapshot is None else (entry.record, snapshot)

    def _read_file(self, state: str) -> Snapshot | None:
        """Read a state. None: another process has removed it, or it is damaged; then its entry is removed."""
        try:
            if self._files is not None:
                path = self._files.path(state)
                snapshot = from_bytes(path.read_bytes(), self.model, str(path))
                self._recent.put(state, snapshot)
                return snapshot
        except FileNotFoundError:
            pass
        except StateError as error:
            log.warning("%s", error)
        self._index.remove_state(state)
        self._remove_states([state])
        return None

    def _delete_entry(self, key: str) -> bool:
        removed = self._index.remove(key, self._oldest())
        self._remove_states(removed)
        return bool(removed)

    def _remove_expired(self) -> None:
        self._remove_states(self._index.remove_unused(self._oldest()))

    def _remove_states(self, states: list[str]) -> None:
        """Remove states whose entries are gone."""
        self._recent.remove(states)
        if self._files is not None:
            self._files.remove(states)
