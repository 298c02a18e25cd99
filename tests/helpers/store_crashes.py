"""Processes that write to one folder, of which some are killed.

    python -m helpers.store_crashes crash FOLDER ROUNDS SEED
    python -m helpers.store_crashes evict FOLDER STATES

Writers are forked, so that nothing is imported for each of them. A writer reports on a pipe what it has done: `+ID`
after a response was stored, `-ID` before one is deleted and `!ID` after it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

from fastweights.serve.store import Store, StoreLimits, open_store
from helpers.stores import numbered, same, served_model

PUTS = 9
TENANT = "tenant"


class Writer:
    """A process that stores responses and prefixes, some at the same time, and deletes a few."""

    def __init__(self, folder: str, name: str, puts: int = PUTS, limits: StoreLimits | None = None) -> None:
        reader, writer = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                os.close(reader)
                asyncio.run(_write(folder, name, puts, limits or StoreLimits(), writer))
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                os._exit(1)
        os.close(writer)
        self._reader = reader

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)

    def wait(self) -> tuple[int, list[str]]:
        """The exit code and the reports, after the process has ended."""
        with os.fdopen(self._reader) as file:
            lines = file.read().split("\n")[:-1]  # a line is whole where it has an end
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1]), lines


async def _write(folder: str, name: str, puts: int, limits: StoreLimits, pipe: int) -> None:
    store = open_store(folder, served_model(), limits)

    def report(line: str) -> None:
        os.write(pipe, f"{line}\n".encode())

    async def one(number: int) -> None:
        id, version = f"{name}_{number}", number % 4
        await store.put_response(TENANT, id, {"version": version}, numbered(version))
        report(f"+{id}")
        await store.put_prefix(TENANT, [version, number], numbered(version))
        if number % 5 == 0:
            report(f"-{id}")
            await store.delete_response(TENANT, id)
            report(f"!{id}")

    for start in range(0, puts, 3):
        await asyncio.gather(*(one(number) for number in range(start, min(start + 3, puts))))
    await store.close()


async def check(store: Store, lines: list[str]) -> None:
    """Every response that was reported as stored can be read, and none that was reported as deleted."""
    marks = {line[1:]: line[0] for line in lines}
    for id, mark in marks.items():
        found = await store.get_response(TENANT, id)
        if mark == "+":
            assert found is not None, f"{id} is lost"
        if mark == "!":
            assert found is None, f"{id} is back"
        if found is not None:
            assert same(found[1], numbered(found[0]["version"])), f"{id} is another"


async def check_prefixes(store: Store) -> None:
    for number in range(PUTS):
        found = await store.longest_prefix(TENANT, [number % 4, number])
        assert found is None or same(found[1], numbered(number % 4)), f"prefix {number} is another"


def check_files(folder: str, store: Store) -> None:
    """Every file has an entry, and every entry a file."""
    index = store._index  # type: ignore[attr-defined]
    names = {path.name for path in Path(folder, "states").rglob("*") if path.is_file()}
    assert names == {f"{state}.safetensors" for state in index.states()}, "files and entries differ"
    assert index._rows("PRAGMA integrity_check") == [("ok",)]


def crash(folder: str, rounds: int, seed: int) -> None:
    """Each round: two writers, one of which is killed and replaced while the other goes on."""
    draw = random.Random(seed)
    for number in range(rounds):
        writers = [Writer(folder, f"{number}_{name}") for name in "ab"]
        time.sleep(draw.uniform(0, 0.3))
        writers[0].kill()
        writers.append(Writer(folder, f"{number}_c"))
        (_, killed), *others = [writer.wait() for writer in writers]
        assert [code for code, _ in others] == [0, 0], "a writer failed"
        lines = [*killed, *(line for _, lines in others for line in lines)]
        asyncio.run(_verify(folder, lines))


async def _verify(folder: str, lines: list[str]) -> None:
    store = open_store(folder, served_model(), StoreLimits(memory_bytes=0))
    check_files(folder, store)
    await check(store, lines)
    await check_prefixes(store)
    await store.close()


def evict(folder: str, states: int) -> None:
    """Three writers at once in a folder that holds only a few states."""
    limits = StoreLimits(memory_bytes=20_000, states_per_tenant=states)
    writers = [Writer(folder, name, limits=limits) for name in "abc"]
    assert [writer.wait()[0] for writer in writers] == [0] * 3, "a writer failed"
    store = open_store(folder, served_model(), limits)
    check_files(folder, store)
    assert len(store._index.states()) == states  # type: ignore[attr-defined]
    asyncio.run(store.close())


if __name__ == "__main__":
    for version in range(4):
        numbered(version)
    if sys.argv[1] == "crash":
        crash(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        evict(sys.argv[2], int(sys.argv[3]))
