"""Every store follows the same rules: in memory, in a folder, in Redis."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.stores import numbered, redis_server, same, served_model, snapshot_of

from fastweights.serve import store as store_module
from fastweights.serve.snapshot import Snapshot, from_bytes, size, to_bytes
from fastweights.serve.store import Store, StoreError, StoreLimits, open_store

KINDS = ("memory", "folder", "redis")
TENANT = "tenant"


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Place:
    """Where a test's store is. It can be opened several times, also with other limits."""

    def __init__(self, kind: str, url: str | None) -> None:
        self.kind, self.url, self.clock = kind, url, Clock()

    def open(self, model: Any = None, **limits: Any) -> Store:
        return open_store(self.url, model or served_model(), StoreLimits(**limits), self.clock)

    def entry_bytes(self) -> int:
        """Bytes that a response with the record {} takes."""
        return (size(numbered(0)) if self.kind == "memory" else len(to_bytes(numbered(0), served_model()))) + 2

    def limit(self, count: int) -> dict[str, int]:
        """A limit on bytes that `count` responses fit in."""
        name = "memory_bytes" if self.kind == "memory" else "disk_bytes"
        return {name: count * self.entry_bytes() + self.entry_bytes() // 2}

    def states(self) -> int | None:
        """Number of states that the place holds, None in memory."""
        if self.url is None:
            return None
        if self.kind == "folder":
            return sum(1 for path in Path(self.url).rglob("*") if path.is_file() and "index" not in path.name)
        with redis.Redis.from_url(self.url) as client:
            assert len(client.keys("*:entry:*")) == client.hlen("{fastweights}:info")
            return len(client.keys("*:entry:*"))


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    url = None
    if request.param == "folder":
        url = str(tmp_path / "store")
    elif request.param == "redis":
        url = request.getfixturevalue("redis_url")
        with redis.Redis.from_url(url) as client:
            client.flushall()
    return Place(request.param, url)


def in_store(place: Place, test: Callable[[Store], Awaitable[None]], model: Any = None, **limits: Any) -> None:
    """Run a coroutine with an open store, and close it."""

    async def run() -> None:
        store = place.open(model, **limits)
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(run())


async def put(store: Store, *ids: str, tenant: str = TENANT) -> None:
    for id in ids:
        await store.put_response(tenant, id, {}, numbered(0))


async def stored(store: Store, *ids: str, tenant: str = TENANT) -> list[str]:
    """Those of the ids that have a response."""
    return [id for id in ids if await store.get_response(tenant, id) is not None]


def test_response_comes_back_to_the_last_bit(place: Place) -> None:
    record = {"output": [{"text": "ä\u0000\U0001f600"}], "usage": {"input_tokens": 3}, "none": None}

    async def test(store: Store) -> None:
        await store.put_response(TENANT, "resp_1", record, numbered(1))
        await store.put_response(TENANT, "resp_2", {}, numbered(2))
        found = await store.get_response(TENANT, "resp_1")
        assert found is not None and found[0] == record and same(found[1], numbered(1))
        assert await store.get_record(TENANT, "resp_1") == record
        assert await store.get_response(TENANT, "resp_3") is None and await store.get_record(TENANT, "resp_3") is None

    in_store(place, test)
    in_store(place, test, **({} if place.kind == "memory" else {"memory_bytes": 0}))


def test_response_with_a_used_id_replaces_it(place: Place) -> None:
    async def test(store: Store) -> None:
        await store.put_response(TENANT, "a", {"n": 1}, numbered(1))
        await store.put_response(TENANT, "a", {"n": 2}, numbered(2))
        found = await store.get_response(TENANT, "a")
        assert found is not None and found[0] == {"n": 2} and same(found[1], numbered(2))
        assert place.states() in (1, None)

    in_store(place, test)


def test_deleted_response_is_gone_with_its_state(place: Place) -> None:
    async def test(store: Store) -> None:
        await put(store, "a", "b")
        assert await store.delete_response(TENANT, "a")
        assert not await store.delete_response(TENANT, "a")
        assert await stored(store, "a", "b") == ["b"]
        assert place.states() in (1, None)

    in_store(place, test)


def test_id_of_another_tenant_does_not_exist(place: Place) -> None:
    async def test(store: Store) -> None:
        await put(store, "a", tenant="one")
        await store.put_prefix("one", [1, 2, 3], numbered(0))
        for tenant in ("two", "", "one ", "one\u0000"):
            assert await store.get_response(tenant, "a") is None
            assert await store.get_record(tenant, "a") is None
            assert not await store.delete_response(tenant, "a")
            assert await store.longest_prefix(tenant, [1, 2, 3]) is None
        assert await stored(store, "a", tenant="one") == ["a"]

    in_store(place, test)


@pytest.mark.parametrize("id", ["", "../../x", "/etc/passwd", "a\u0000b", "' OR 1=1 --", "\ud83d", "x" * 100_000])
def test_any_string_can_be_an_id(place: Place, id: str) -> None:
    async def test(store: Store) -> None:
        assert await store.get_response(TENANT, id) is None
        await store.put_response(id, id, {"n": 1}, numbered(0))
        assert await store.get_record(id, id) == {"n": 1}
        assert await store.get_record(TENANT, id) is None

    in_store(place, test)


def test_models_that_share_a_store_do_not_mix(place: Place) -> None:
    other = served_model(m=8)

    async def write(store: Store) -> None:
        await put(store, "a")
        await store.put_prefix(TENANT, [1, 2], numbered(0))

    async def read(store: Store) -> None:
        assert await store.get_response(TENANT, "a") is None
        assert await store.longest_prefix(TENANT, [1, 2]) is None
        await store.put_response(TENANT, "a", {}, snapshot_of([1, 2, 3], other))

    in_store(place, write)
    in_store(place, read, other)
    if place.kind != "memory":
        in_store(place, lambda store: expect(store, ["a"], "a"))


async def expect(store: Store, ids: list[str], *asked: str) -> None:
    assert await stored(store, *asked) == ids


def test_longest_prefix_is_found_by_tokens(place: Place) -> None:
    async def test(store: Store) -> None:
        for length in (2, 4, 7):
            await store.put_prefix(TENANT, [1, 2, 3, 4, 5, 6, 7][:length], numbered(length))
        await store.put_prefix(TENANT, [1, 2, 3, 9, 5], numbered(9))

        async def check(tokens: list[int], length: int, number: int) -> None:
            found = await store.longest_prefix(TENANT, tokens)
            assert found is not None and found[0] == length and same(found[1], numbered(number))

        await check([1, 2], 2, 2)
        await check([1, 2, 3], 2, 2)
        await check([1, 2, 3, 4], 4, 4)
        await check([1, 2, 3, 4, 5, 6, 7, 8], 7, 7)
        await check([1, 2, 3, 4, 5, 6, 8, 8], 4, 4)
        await check([1, 2, 3, 9, 5, 6], 5, 9)
        for tokens in ([], [1], [2, 1], [12], [1 + 256 * 2]):
            assert await store.longest_prefix(TENANT, tokens) is None

    in_store(place, test)


def test_prefix_is_stored_once_and_needs_logits(place: Place) -> None:
    async def test(store: Store) -> None:
        for _ in range(3):
            await store.put_prefix(TENANT, [1, 2], numbered(0))
        await store.put_prefix(TENANT, [1, 2, 3], Snapshot(numbered(0).state, None))
        await store.put_prefix(TENANT, [], numbered(0))
        found = await store.longest_prefix(TENANT, [1, 2, 3])
        assert found is not None and found[0] == 2
        assert place.states() in (1, None)

    in_store(place, test)


def test_response_can_lack_logits(place: Place) -> None:
    async def test(store: Store) -> None:
        await store.put_response(TENANT, "a", {}, Snapshot(numbered(0).state, None))
        found = await store.get_response(TENANT, "a")
        assert found is not None and found[1].logits is None

    in_store(place, test, **({} if place.kind == "memory" else {"memory_bytes": 0}))


def test_least_recently_used_are_removed_beyond_the_byte_limit(place: Place) -> None:
    async def test(store: Store) -> None:
        await put(store, "a", "b", "c")
        assert await stored(store, "a") == ["a"]  # a use
        await put(store, "d")
        assert await stored(store, "a", "b", "c", "d") == ["a", "c", "d"]
        assert place.states() in (3, None)

    in_store(place, test, **place.limit(3))


def test_tenant_keeps_the_states_it_used_last(place: Place) -> None:
    async def test(store: Store) -> None:
        await put(store, "x", tenant="other")
        await put(store, "a", "b")
        assert await stored(store, "a") == ["a"]
        await put(store, "c")
        assert await stored(store, "a", "b", "c") == ["a", "c"]
        assert await stored(store, "x", tenant="other") == ["x"]
        assert place.states() in (3, None)

    in_store(place, test, states_per_tenant=2)


@pytest.mark.parametrize("by", ["count", "bytes"])
def test_prefixes_are_removed_before_responses(place: Place, by: str) -> None:
    async def test(store: Store) -> None:
        await put(store, "a")
        for token in range(5):
            await store.put_prefix(TENANT, [token], numbered(token))
        found = [await store.longest_prefix(TENANT, [token]) is not None for token in range(5)]
        assert found == [False, False, False, True, True]
        await put(store, "b", "c")
        assert await stored(store, "a", "b", "c") == ["a", "b", "c"]
        await store.put_prefix(TENANT, [9], numbered(9))
        assert await store.longest_prefix(TENANT, [9]) is None
        assert await stored(store, "a", "b", "c") == ["a", "b", "c"]
        assert place.states() in (3, None)

    in_store(place, test, **(dict(states_per_tenant=3) if by == "count" else place.limit(3)))


def test_new_entry_stays_though_the_clock_of_others_is_ahead(place: Place) -> None:
    async def test(store: Store) -> None:
        place.clock.now += 1000
        await put(store, "a")
        place.clock.now -= 1000
        await put(store, "b")
        assert await stored(store, "b") == ["b"]

    in_store(place, test, states_per_tenant=1)
    in_store(place, test, **place.limit(1))


def test_state_beyond_the_byte_limit_is_refused(place: Place) -> None:
    async def test(store: Store) -> None:
        with pytest.raises(StoreError, match="larger than"):
            await put(store, "a")
        await store.put_prefix(TENANT, [1], numbered(0))
        assert await store.longest_prefix(TENANT, [1]) is None
        assert place.states() in (0, None)

    in_store(place, test, **place.limit(0))


def test_unused_entries_expire_with_their_states(place: Place) -> None:
    async def test(store: Store) -> None:
        await put(store, "a", "b")
        await store.put_prefix(TENANT, [1], numbered(0))
        place.clock.now += 60
        assert await stored(store, "a") == ["a"]
        place.clock.now += 60
        assert await stored(store, "a", "b") == ["a"]
        assert await store.get_record(TENANT, "b") is None and not await store.delete_response(TENANT, "b")
        assert await store.longest_prefix(TENANT, [1]) is None
        await store.remove_expired()
        assert place.states() in (1, None)
        place.clock.now += 200
        await put(store, "c")
        assert place.states() in (1, None)

    in_store(place, test, ttl_seconds=100)


def test_store_is_as_before_after_it_was_closed(place: Place) -> None:
    if place.kind == "memory":
        pytest.skip("memory does not outlive the store")

    async def write(store: Store) -> None:
        await store.put_response(TENANT, "a", {"n": 1}, numbered(1))
        await store.put_prefix(TENANT, [1, 2], numbered(2))

    async def read(store: Store) -> None:
        response, prefix = await store.get_response(TENANT, "a"), await store.longest_prefix(TENANT, [1, 2, 3])
        assert response is not None and response[0] == {"n": 1} and same(response[1], numbered(1))
        assert prefix is not None and prefix[0] == 2 and same(prefix[1], numbered(2))

    in_store(place, write)
    in_store(place, read)


def test_two_stores_at_one_place_see_what_the_other_does(place: Place) -> None:
    if place.kind == "memory":
        pytest.skip("memory is not shared")

    async def test(one: Store) -> None:
        two = place.open()
        await one.put_response(TENANT, "a", {"n": 1}, numbered(1))
        found = await two.get_response(TENANT, "a")
        assert found is not None and same(found[1], numbered(1))
        await two.put_response(TENANT, "a", {"n": 2}, numbered(2))
        found = await one.get_response(TENANT, "a")
        assert found is not None and found[0] == {"n": 2} and same(found[1], numbered(2))
        await two.delete_response(TENANT, "a")
        assert await one.get_response(TENANT, "a") is None
        await two.close()

    in_store(place, test)


def test_many_requests_at_once(place: Place) -> None:
    async def test(store: Store) -> None:
        async def one(number: int) -> None:
            id = f"resp_{number % 20}"
            await store.put_response(TENANT, id, {"n": number % 4}, numbered(number % 4))
            found = await store.get_response(TENANT, id)
            assert found is not None and same(found[1], numbered(found[0]["n"]))
            await store.put_prefix(TENANT, [1] * (number % 5 + 1), numbered(0))
            assert await store.longest_prefix(TENANT, [1] * 9) is not None

        await asyncio.gather(*(one(number) for number in range(60)))
        assert place.states() in (25, None)

    in_store(place, test)


def test_cancelled_put_leaves_nothing_half_written(place: Place) -> None:
    async def test(store: Store) -> None:
        for number in range(20):
            task = asyncio.create_task(store.put_response(TENANT, str(number), {}, numbered(0)))
            await asyncio.sleep(0.0003 * number)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await put(store, "last")
        ids = await stored(store, *map(str, range(20)), "last")
        assert ids[-1:] == ["last"]

    in_store(place, test)
    assert place.kind != "folder" or not list(Path(place.url or "").rglob("*.tmp"))


# folder


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.fixture
def folder(tmp_path: Path) -> Place:
    return Place("folder", str(tmp_path / "store"))


def test_state_that_left_memory_is_read_from_its_file(folder: Place) -> None:
    async def test(store: Store) -> None:
        for number in range(3):
            await store.put_response(TENANT, str(number), {}, numbered(number))
        for path in files_of(Path(folder.url or "")):
            path.write_bytes(b"")
        assert await stored(store, "0", "1", "2") == ["2"]  # the only one in memory

    in_store(folder, test, memory_bytes=size(numbered(0)))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "delete"])
def test_damaged_file_is_never_served(folder: Place, damage: str) -> None:
    async def write(store: Store) -> None:
        await put(store, "a")
        await store.put_prefix(TENANT, [1], numbered(1))
        await store.put_prefix(TENANT, [1, 2], numbered(2))

    async def read(store: Store) -> None:
        assert await stored(store, "a") == []
        found = await store.longest_prefix(TENANT, [1, 2, 3])
        assert found is not None and found[0] == 1 and same(found[1], numbered(1))

    in_store(folder, write)
    for path in files_of(Path(folder.url or "")):
        content = path.read_bytes()
        if same(from_bytes(content, served_model(), str(path)), numbered(1)):
            continue
        if damage == "delete":
            path.unlink()
        else:
            flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
            path.write_bytes({"flip": flipped, "cut": content[:-1], "empty": b""}[damage])
    in_store(folder, read)
    in_store(folder, read)
    assert len(files_of(Path(folder.url or ""))) == 1


def test_files_without_an_entry_are_deleted_when_the_store_is_opened(folder: Place) -> None:
    async def write(store: Store) -> None:
        await put(store, "a")

    root = Path(folder.url or "")
    in_store(folder, write)
    (kept,) = files_of(root)
    orphan = kept.parent / f"{kept.name[:2]}{'0' * 30}.safetensors"
    orphan.write_bytes(kept.read_bytes())
    dead = kept.parent / f".{kept.name}.999999999.{os.uname().nodename}.abcdefgh.tmp"
    of_other_host = kept.parent / f".{kept.name}.1.elsewhere.abcdefgh.tmp"
    fresh = kept.parent / f".{kept.name}.2.elsewhere.abcdefgh.tmp"
    for path in (dead, of_other_host, fresh, root / "notes.safetensors", kept.parent / "mine.safetensors"):
        path.write_text("x")
    os.utime(of_other_host, (0, 0))
    in_store(folder, lambda store: expect(store, ["a"], "a"))
    assert [path.exists() for path in (kept, orphan, dead, of_other_host, fresh)] == [True, False, False, False, True]
    assert (root / "notes.safetensors").exists() and (kept.parent / "mine.safetensors").exists()


def test_opening_a_folder_deletes_no_file_whose_entry_another_process_is_about_to_write(folder: Place) -> None:
    async def test(store: Any) -> None:
        put_entry, opened = store._index.put, list[asyncio.Future[Store]]()
        loop = asyncio.get_running_loop()

        def open_before_entry(*args: Any) -> list[str]:
            assert folder.states() == 1
            opened.append(asyncio.run_coroutine_threadsafe(asyncio.to_thread(folder.open), loop))  # type: ignore[arg-type]
            time.sleep(0.3)
            return put_entry(*args)

        store._index.put = open_before_entry
        await put(store, "a")
        other = await asyncio.wrap_future(opened[0])  # type: ignore[arg-type]
        assert await stored(other, "a") == ["a"]
        await other.close()

    in_store(folder, test)


def test_folder_is_opened_while_a_temporary_file_gets_its_name(folder: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    in_store(folder, lambda store: put(store, "a"))
    (kept,) = files_of(Path(folder.url or ""))
    temporary = kept.parent / f".{kept.name}.1.elsewhere.abcdefgh.tmp"
    temporary.write_text("x")

    def rename(_: str) -> bool:
        temporary.unlink()
        return True

    monkeypatch.setattr(store_module, "is_temporary", rename)
    in_store(folder, lambda store: expect(store, ["a"], "a"))
    assert not temporary.exists()


def test_only_the_owner_can_read_the_folder_and_no_name_is_from_a_request(folder: Place) -> None:
    async def test(store: Store) -> None:
        await store.put_response("secret_key", "resp_id", {}, numbered(0))

    in_store(folder, test)
    root = Path(folder.url or "")
    assert root.stat().st_mode & 0o777 == 0o700
    content = b"".join(path.read_bytes() + str(path).encode() for path in root.rglob("*") if path.is_file())
    assert b"secret_key" not in content and b"resp_id" not in content


def test_failed_write_leaves_no_file(folder: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async def test(store: Any) -> None:
        await put(store, "a")
        monkeypatch.setattr(store._index, "put", fail)
        with pytest.raises(StoreError, match="No space left"):
            await put(store, "b")
        await store.put_prefix(TENANT, [1], numbered(0))
        monkeypatch.undo()
        assert await stored(store, "a", "b") == ["a"]
        assert folder.states() == 1

    in_store(folder, test)


# opening


def test_place_that_is_no_store_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x" * 10_000)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "index.sqlite").write_text("x" * 10_000)
    for url, name in ((file, str(file)), (broken, str(broken)), ("postgres://x", "postgres://")):
        with pytest.raises(StoreError, match=name):
            open_store(str(url), served_model(), StoreLimits())


def test_index_of_a_later_version_is_refused(folder: Place) -> None:
    in_store(folder, lambda store: put(store, "a"))
    database = sqlite3.connect(Path(folder.url or "") / "index.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match="version 99"):
        folder.open()


def test_redis_that_is_not_there_is_refused_without_its_password() -> None:
    with pytest.raises(StoreError) as error:
        open_store("redis://:secret@127.0.0.1:1/0", served_model(), StoreLimits())
    assert "secret" not in str(error.value) and "\n" not in str(error.value)


def test_redis_that_went_away_is_an_error_for_responses_only() -> None:
    async def test() -> None:
        with redis_server() as url:
            store = open_store(url, served_model(), StoreLimits())
            await put(store, "a")
        with pytest.raises(StoreError):
            await store.get_response(TENANT, "a")
        with pytest.raises(StoreError):
            await put(store, "b")
        await store.put_prefix(TENANT, [1], numbered(0))
        assert await store.longest_prefix(TENANT, [1]) is None
        await store.close()

    asyncio.run(test())


@pytest.mark.parametrize("kind", ["flip", "delete"])
def test_damaged_state_in_redis_is_never_served(redis_url: str, kind: str) -> None:
    place = Place("redis", redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        in_store(place, lambda store: put(store, "a"))
        (entry,) = client.keys("*:entry:*")
        data = client.hget(entry, "data")
        if kind == "delete":
            client.delete(entry)  # as Redis does when it expires
        else:
            client.hset(entry, "data", data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        in_store(place, lambda store: expect(store, [], "a"))
        assert place.states() == 0 and int(client.get("{fastweights}:bytes")) == 0


def test_redis_deletes_entries_by_itself(redis_url: str) -> None:
    place = Place("redis", redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        in_store(place, lambda store: put(store, "a"), ttl_seconds=100)
        (entry,) = client.keys("*:entry:*")
        assert 90_000 < client.pttl(entry) <= 100_000


@pytest.mark.parametrize("name", ["memory_bytes", "disk_bytes", "ttl_seconds", "states_per_tenant"])
def test_limits_must_be_possible(name: str) -> None:
    for value in (-1, float("nan")):
        with pytest.raises(StoreError, match=name):
            StoreLimits(**{name: value})  # type: ignore[arg-type]
