"""A store in Redis, which several servers share: any of them can take the next turn of a conversation.

Every change is one Lua script, so that servers never see half of it. Keys have one hash tag: in a cluster all of them
are on one node. How durable a stored response is depends on the settings of Redis (`appendonly`, `appendfsync`). Its
`maxmemory-policy` must be `noeviction`, the default: the store itself removes what was used least recently.

    entry:KEY       record, name of the state, and the state itself as a file; Redis deletes it when it expires
    info            KEY → bytes, owner and kind of the entry, for the time when Redis has deleted it
    used            KEY by the time of its last use
    order           KEY in the order of removal where there is no room: prefixes, then responses, by their last use
    owner:OWNER     the same of one owner
    prefixes:OWNER  KEY of a prefix by its length
    bytes           sum of the bytes of all entries
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
import redis.asyncio

from fastweights.modeling.state_file import StateError
from fastweights.serve.snapshot import Snapshot, from_bytes, to_bytes
from fastweights.serve.store import RecentSnapshots, Store, StoreError, StoreLimits, check_size, log

SECONDS = 10.0  # that Redis may take to answer
PREFIX = "{fastweights}:"

COMMON = f"""
local P = '{PREFIX}'
local function remove(key)
    local info = redis.call('HGET', P .. 'info', key)
    if not info then return end
    local bytes, owner = info:match('^(%d+) (%x+) ')
    redis.call('DECRBY', P .. 'bytes', bytes)
    redis.call('HDEL', P .. 'info', key)
    redis.call('ZREM', P .. 'used', key)
    redis.call('ZREM', P .. 'order', key)
    redis.call('ZREM', P .. 'owner:' .. owner, key)
    redis.call('ZREM', P .. 'prefixes:' .. owner, key)
    redis.call('DEL', P .. 'entry:' .. key)
end
local function remove_unused(oldest)
    for _, key in ipairs(redis.call('ZRANGE', P .. 'used', '-inf', '(' .. oldest, 'BYSCORE')) do remove(key) end
end
local function use(key, owner, kind, now, ttl)
    redis.call('ZADD', P .. 'used', now, key)
    local place = kind == 'prefix' and string.format('%.6f', tonumber(now) - 1e12) or now
    redis.call('ZADD', P .. 'order', place, key)
    redis.call('ZADD', P .. 'owner:' .. owner, place, key)
    redis.call('PEXPIRE', P .. 'entry:' .. key, ttl)
end
"""
# The entry itself is added last, so that it is never the one to be removed. A prefix never removes a response: if only
# responses are left, it is not stored.
PUT = """
local key, owner, length, record, state, data, now, oldest, ttl, count, limit = unpack(ARGV)
remove(key)
remove_unused(oldest)
local bytes, kind = #record + #data, tonumber(length) > 0 and 'prefix' or 'response'
local function remove_first(set)
    local first = redis.call('ZRANGE', P .. set, 0, 0)[1]
    if not first then return false end
    local other = redis.call('HGET', P .. 'info', first):match(' (%a+)$')
    if kind == 'prefix' and other == 'response' then return false end
    remove(first)
    return true
end
while redis.call('ZCARD', P .. 'owner:' .. owner) >= tonumber(count) do
    if not remove_first('owner:' .. owner) then return end
end
while tonumber(redis.call('GET', P .. 'bytes') or 0) + bytes > tonumber(limit) do
    if not remove_first('order') then return end
end
redis.call('HSET', P .. 'entry:' .. key, 'record', record, 'state', state, 'data', data)
redis.call('HSET', P .. 'info', key, bytes .. ' ' .. owner .. ' ' .. kind)
redis.call('INCRBY', P .. 'bytes', bytes)
if kind == 'prefix' then redis.call('ZADD', P .. 'prefixes:' .. owner, length, key) end
use(key, owner, kind, now, ttl)
"""
FIND = """
local key, now, oldest, ttl = unpack(ARGV)
local used, found = redis.call('ZSCORE', P .. 'used', key), redis.call('HMGET', P .. 'entry:' .. key, 'record', 'state')
if not used or tonumber(used) < tonumber(oldest) or not found[2] then
    remove(key)
    return false
end
local owner, kind = redis.call('HGET', P .. 'info', key):match(' (%x+) (%a+)$')
use(key, owner, kind, tonumber(used) > tonumber(now) and used or now, ttl)
return found
"""
REMOVE = """
local key, oldest = unpack(ARGV)
local used = redis.call('ZSCORE', P .. 'used', key)
local there = redis.call('EXISTS', P .. 'entry:' .. key) == 1 and used and tonumber(used) >= tonumber(oldest)
remove(key)
return there and 1 or 0
"""
REMOVE_UNUSED = "remove_unused(ARGV[1])"


class RedisStore(Store):
    """A store in Redis.

    Args:
        url: redis://, rediss:// or unix://. It may hold a password: no error and no log shows it.

    Raises:
        StoreError: Redis does not answer.
    """

    def __init__(self, url: str, model: Any, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        super().__init__(model, limits, clock)
        timeouts = dict(socket_timeout=SECONDS, socket_connect_timeout=SECONDS)
        with _errors(), redis.Redis.from_url(url, **timeouts) as client:
            client.ping()
        self._redis = redis.asyncio.Redis.from_url(url, **timeouts)
        self._recent = RecentSnapshots(limits.memory_bytes)
        register = self._redis.register_script
        self._put_script, self._find_script = register(COMMON + PUT), register(COMMON + FIND)
        self._remove_script, self._remove_unused_script = register(COMMON + REMOVE), register(COMMON + REMOVE_UNUSED)

    async def remove_expired(self) -> None:
        with _errors():
            await self._remove_unused_script(args=[self._oldest()])

    async def close(self) -> None:
        await self._redis.aclose()

    async def _put(self, owner: str, key: str, length: int, record: str, snapshot: Snapshot) -> None:
        state, data = secrets.token_hex(16), await asyncio.to_thread(to_bytes, snapshot, self.model)
        check_size(len(record.encode()) + len(data), self.limits.disk_bytes)
        limits = self.limits.states_per_tenant, self.limits.disk_bytes
        entry = key, owner, length, record, state, data
        with _errors():
            await self._put_script(args=[*entry, self.clock(), self._oldest(), self._ttl(), *limits])
        self._recent.put(state, snapshot)

    async def _get(self, key: str) -> tuple[str, Snapshot] | None:
        found = await self._find(key)
        if found is None:
            return None
        record, state = found
        snapshot = self._recent.get(state) or await self._load(key)
        return None if snapshot is None else (record, snapshot)

    async def _load(self, key: str) -> Snapshot | None:
        """Read a state from Redis. None: another server has removed it, or it is damaged."""
        with _errors():
            state, data = await self._redis.hmget(f"{PREFIX}entry:{key}", "state", "data")
        if data is None:
            return None
        snapshot = await asyncio.to_thread(self._decode, data)
        if snapshot is None:
            await self._delete(key)
        else:
            self._recent.put(state.decode(), snapshot)
        return snapshot

    def _decode(self, data: bytes) -> Snapshot | None:
        """Read a state. None: it is damaged."""
        try:
            return from_bytes(data, self.model, "the state in Redis")
        except StateError as error:
            log.warning("%s", error)
            return None

    async def _get_record(self, key: str) -> str | None:
        found = await self._find(key)
        return None if found is None else found[0]

    async def _delete(self, key: str) -> bool:
        with _errors():
            return bool(await self._remove_script(args=[key, self._oldest()]))

    async def _prefixes(self, owner: str, longest: int) -> list[tuple[int, str]]:
        with _errors():
            found = await self._redis.zrange(f"{PREFIX}prefixes:{owner}", 1, longest, byscore=True, withscores=True)
        return [(int(length), key.decode()) for key, length in found]

    async def _find(self, key: str) -> tuple[str, str] | None:
        """The record and the name of the state of an entry, whose use is noted."""
        with _errors():
            found = await self._find_script(args=[key, self.clock(), self._oldest(), self._ttl()])
        return None if found is None else (found[0].decode(), found[1].decode())

    def _ttl(self) -> int:
        """The time to live in milliseconds."""
        return math.ceil(1000 * self.limits.ttl_seconds)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError, ValueError) as error:  # ValueError: a URL that is none
        raise StoreError(f"the store in Redis cannot be used: {error}") from error
