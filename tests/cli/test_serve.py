"""`fastweights serve`: what it refuses, and a server from its start to its end."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from helpers.cli import error_of, save_model, succeed
from helpers.server import serving

import fastweights as fw
from fastweights.loading import load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("serve") / "served", "llama", rule="decay", m=4)


@contextmanager
def started(*arguments: Any, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, and its URL."""
    command = [sys.executable, "-m", "fastweights", "serve", *map(str, arguments), "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, cwd=cwd, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+:\d+", line)
            assert found, line + process.stderr.read()
            yield process, found[0]
        finally:
            process.kill()


def test_server_answers_stores_and_ends_with_its_answers(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = [model, "--store", store, "--slots", 2, "--max-tokens", 10**6, "--grace", 0.5, "--weights", "int8"]
    with started(*options, cwd=tmp_path) as (process, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            (served,) = client.models.list()
            assert served.id == "served"
            assert client.chat.completions.create(
                model="served", messages=[{"role": "user", "content": "Hello"}], max_tokens=3
            ).choices
            stream = client.responses.create(model="served", input="Hello", stream=True)
            made = next(stream).response.id
            next(event for event in stream if event.type == "response.output_text.delta")
            process.send_signal(signal.SIGTERM)
            last = list(stream)[-1]
        assert last.type == "response.completed" and last.response.status == "incomplete"
        assert process.wait(30) == 0
    engine = fw.Engine(fw.load(model), tokenizer=load_tokenizer(model))
    with serving(engine, store=str(store)) as running, running.client() as client:
        assert client.responses.retrieve(made).output_text == last.response.output_text
        more = client.responses.create(input="Go on", previous_response_id=made, max_output_tokens=2)
        assert more.usage.input_tokens_details.cached_tokens > last.response.usage.output_tokens


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command until it would serve, send it a request, and return the reply and what was printed."""

    def run_and_post(*arguments: Any, **headers: str) -> tuple[Any, str]:
        replies = []

        def ask(server: Any, bound: socket.socket) -> None:
            with TestClient(server.config.app) as client:
                body = {"prompt": "It was a dark evening", "max_tokens": 3}
                replies.append(client.post("/v1/completions", json=body, headers=headers))
            server.worker.close(0)

        monkeypatch.setattr("fastweights.serve.server.run", ask)
        printed = succeed("serve", *arguments, "--port", 0).stderr
        return replies[0], printed

    return run_and_post


def test_without_a_model_the_packaged_one_is_served(post: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reply, printed = post("--slots", 1)
    assert reply.json()["model"] == "packaged" and reply.json()["usage"]["completion_tokens"] == 3
    assert "packaged" in printed


def test_without_a_model_that_of_a_quickstart_is_preferred(
    post: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training = tmp_path / "quickstart-output" / "training"
    shutil.copytree(model, training / "best")
    (training / "run.json").write_text("{}")
    reply, printed = post()
    assert reply.json()["model"] == "training" and "quickstart-output" in printed


def test_port_in_use_is_named(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}" in error_of("serve", model, "--port", port)
    assert "--host nowhere.invalid" in error_of("serve", model, "--host", "nowhere.invalid")


def test_unconverted_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", "llama")
    assert "fastweights convert" in error_of("serve", plain, "--port", 0)


def test_wrong_folder_is_named(tmp_path: Path) -> None:
    assert f"no folder at {tmp_path / 'none'}" in error_of("serve", tmp_path / "none")


def test_missing_package_is_named_with_the_extra(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    message = error_of("serve", model)
    assert "uvicorn" in message and "pip install 'fastweights[serve]'" in message


def test_bad_key_files_are_refused(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert str(keys) in error_of("serve", model, "--api-keys", keys)
    keys.write_text("# none\n\n")
    assert "--api-keys" in error_of("serve", model, "--api-keys", keys)
    keys.write_text("good\nkey with spaces\n")
    assert "key 2" in error_of("serve", model, "--api-keys", keys)


def test_keys_are_needed_elsewhere_than_on_this_machine(
    post: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, printed = post(model, "--host", "0.0.0.0")
    assert "warning" in printed and "--api-keys" in printed
    keys = tmp_path / "keys"
    keys.write_text("# keys\nsecret  # whose it is\nsign#inside\n")
    reply, printed = post(model, "--host", "0.0.0.0", "--api-keys", keys)
    assert reply.status_code == 401 and "warning" not in printed
    for key, status in {"secret": 200, "sign#inside": 200, "sign": 401}.items():
        assert post(model, "--api-keys", keys, Authorization=f"Bearer {key}")[0].status_code == status
    monkeypatch.setenv("FASTWEIGHTS_API_KEYS", "one,two")
    assert post(model)[0].status_code == 401
    assert post(model, Authorization="Bearer two")[0].status_code == 200
