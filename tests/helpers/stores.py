"""Snapshots of a tiny model, and a Redis server for tests of the stores."""

from __future__ import annotations

import functools
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
import torch

from fastweights.config import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.decode.prefill import prefill
from fastweights.serve.snapshot import Snapshot
from helpers.tiny import pretrained, tokens


@functools.cache
def served_model(m: int = 4, layers: tuple[int, ...] | None = None) -> Any:
    return convert(pretrained("llama"), FastWeightsConfig(rule="decay", m=m, window=3, layers=layers)).eval()


def snapshot_of(ids: list[int], model: Any = None) -> Snapshot:
    """The snapshot after these tokens."""
    logits, state = prefill(served_model() if model is None else model, torch.tensor(ids))
    return Snapshot(state, logits.reshape(-1).float())


@functools.cache
def numbered(number: int) -> Snapshot:
    """A snapshot that differs from those with other numbers. All have the same size."""
    return snapshot_of(tokens(5, seed=number).tolist())


def same(a: Snapshot, b: Snapshot) -> bool:
    """Whether two snapshots are equal to the last bit."""
    ours, theirs = (s.state.named_tensors() | {"logits": s.logits} for s in (a, b))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of a Redis server that runs during the block. The test is skipped where Redis is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    with tempfile.TemporaryDirectory() as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as process:
            try:
                _wait_for(url)
                yield url
            finally:
                process.terminate()


def _wait_for(url: str) -> None:
    end = time.monotonic() + 30
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
