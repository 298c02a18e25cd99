"""The index of stored entries: an SQLite database, in a file that several processes share, or in memory.

An entry is a response or a prefix. It names its state, a random name under which the state is stored elsewhere. All
methods may be called from any thread.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

BUSY_SECONDS = 60.0
VERSION = 1
SCHEMA = f"""
CREATE TABLE entries (
    number INTEGER PRIMARY KEY,  -- later entries have larger ones
    key TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    length INTEGER NOT NULL,     -- tokens of a prefix, 0 for a response
    record TEXT NOT NULL,        -- JSON
    state TEXT NOT NULL UNIQUE,
    bytes INTEGER NOT NULL,
    used REAL NOT NULL           -- when it was last written or read
);
CREATE INDEX entries_of_owner ON entries (owner, length, key);
CREATE INDEX entries_by_use ON entries (used, number, bytes);
PRAGMA user_version = {VERSION};
"""


class Entry(NamedTuple):
    """What is stored under a key."""

    key: str
    owner: str
    length: int
    record: str
    state: str
    bytes: int


class Index:
    """The entries of a database.

    Args:
        path: the file of the database. None: it is in memory.

    Raises:
        sqlite3.Error: the file cannot be read, or is not of this version.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.RLock()
        self._database = sqlite3.connect(
            path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            self._open()
        except BaseException:
            self._database.close()
            raise

    def _open(self) -> None:
        self._use_wal()
        self._database.execute("PRAGMA synchronous = FULL")  # a power cut undoes no commit
        with self.transaction():
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in SCHEMA.split(";\n"):
                    self._database.execute(statement)
            elif version != VERSION:
                raise sqlite3.DatabaseError(f"it has version {version} of the format, this program reads {VERSION}")

    def _use_wal(self) -> None:
        """Readers do not wait for a writer. SQLite does not wait by itself while another process does the same."""
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._database.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """No other process and no other thread writes to the index during this block."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                raise

    def put(self, entry: Entry, now: float) -> list[str]:
        """Add an entry in place of one with the same key. Returns the state of that one."""
        with self._lock:
            replaced = self.remove(entry.key)
            values = (*entry, now)
            self._rows(
                "INSERT INTO entries (key, owner, length, record, state, bytes, used) VALUES (?, ?, ?, ?, ?, ?, ?)",
                *values,
            )
            return replaced

    def find(self, key: str, now: float, oldest: float) -> Entry | None:
        """Find and note the use of an entry that was last used at `oldest` or later."""
        query = "UPDATE entries SET used = max(used, ?) WHERE key = ? AND used >= ? RETURNING " + ", ".join(
            Entry._fields
        )
        with self._lock:
            self._rows("PRAGMA synchronous = NORMAL")  # a power cut may undo this note: nobody waits for the disk
            try:
                rows = self._rows(query, now, key, oldest)
            finally:
                self._rows("PRAGMA synchronous = FULL")
        return Entry(*rows[0]) if rows else None

    def prefixes(self, owner: str, longest: int) -> list[tuple[int, str]]:
        """Length and key of the owner's prefixes of at most `longest` tokens."""
        query = "SELECT length, key FROM entries WHERE owner = ? AND length BETWEEN 1 AND ?"
        return [(length, key) for length, key in self._rows(query, owner, longest)]

    def remove(self, key: str, oldest: float = 0.0) -> list[str]:
        """Remove an entry that was last used at `oldest` or later. Returns its state."""
        return self._states("DELETE FROM entries WHERE key = ? AND used >= ? RETURNING state", key, oldest)

    def remove_state(self, state: str) -> None:
        """Remove the entry with this state."""
        self._rows("DELETE FROM entries WHERE state = ?", state)

    def remove_unused(self, oldest: float) -> list[str]:
        """Remove entries that were last used before `oldest`. Returns their states."""
        return self._states("DELETE FROM entries WHERE used < ? RETURNING state", oldest)

    # Prefixes are removed before responses: a response was promised to its client, a prefix only saves time. Among
    # those of its kind, an entry that has just been written stays even if other processes have a clock that is ahead.

    def limit_entries(self, owner: str, count: int, keep: str) -> list[str]:
        """Remove prefixes, then responses that the owner used least recently, until there are `count`. Returns their
        states."""
        ((found,),) = self._rows("SELECT count(*) FROM entries WHERE owner = ?", owner)
        if found <= count:
            return []
        return self._states(
            "DELETE FROM entries WHERE number IN (SELECT number FROM entries WHERE owner = ?"
            " ORDER BY length > 0, key = ? DESC, used DESC, number DESC LIMIT -1 OFFSET ?) RETURNING state",
            owner,
            keep,
            count,
        )

    def limit_bytes(self, total: int, keep: str) -> list[str]:
        """Remove the least recently used prefixes, then responses, until the others have `total` bytes. Returns their
        states."""
        ((found,),) = self._rows("SELECT total(bytes) FROM entries")
        if found <= total:  # this is read for every entry that is written, and ordering all of them takes longer
            return []
        return self._states(
            "DELETE FROM entries WHERE number IN (SELECT number FROM (SELECT number, sum(bytes) OVER (ORDER BY"
            " length > 0, key = ? DESC, used DESC, number DESC) AS running FROM entries) WHERE running > ?)"
            " RETURNING state",
            keep,
            total,
        )

    def states(self) -> set[str]:
        """The states of all entries."""
        return set(self._states("SELECT state FROM entries"))

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _states(self, query: str, *values: object) -> list[str]:
        return [state for (state,) in self._rows(query, *values)]

    def _rows(self, query: str, *values: object) -> list[tuple]:
        with self._lock:
            return self._database.execute(query, values).fetchall()
