"""The examples of docs/serving.md run as written, against the server that the page starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.cli import CHAT_TEMPLATE, save_model, succeed, tokenizer
from helpers.server import serving, wait_until

import fastweights as fw
from fastweights.loading import load_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(LAUNCHER,) = re.findall(r'^```python title="launcher.py"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    shlex.split(command.replace("\\\n", " "))
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for command in re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved = save_model(tmp_path_factory.mktemp("serving") / "served", "llama", rule="decay", m=4)
    made = tokenizer()
    made.chat_template = CHAT_TEMPLATE
    made.save_pretrained(saved)
    return saved


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = fw.Engine(fw.load(folder), 4, tokenizer=load_tokenizer(folder))
    with serving(engine, store=str(tmp_path_factory.mktemp("states"))) as running:
        yield running.url


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
def test_python_runs(block: str, url: str) -> None:
    exec(compile(block.replace(ADDRESS, url), "serving.md", "exec"), {})


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "curl"])
def test_curl_gets_an_answer(words: list[str], url: str) -> None:
    words = [word.replace(ADDRESS, url) for word in words]
    done = subprocess.run([*words, "--silent", "--show-error"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"]


def test_other_commands_are_those_of_the_command_line() -> None:
    (serve,) = [words for words in COMMANDS if words[0] != "curl"]
    assert serve[:2] == ["fastweights", "serve"]
    options = succeed("serve", "--help").stdout
    for flag in re.findall(r"--[a-z]+[a-z-]*", PAGE):
        assert flag in options, flag


def test_transformers_serve_answers_with_a_converted_model(folder: Path, tmp_path: Path) -> None:
    serve = pytest.importorskip("transformers.cli.serve")
    if not serve.is_serve_available():
        pytest.skip("transformers serve needs packages that are not installed: transformers[serving]")
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "launcher.py", "serve", str(folder), *address, "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (
        (tmp_path / "log").open("w") as output,
        subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=output, stdout=output) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or _is_up(port), 120)
            request = {"model": str(folder), "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            reply = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=request, timeout=60)
            assert reply.status_code == 200 and reply.json()["choices"], reply.text
        finally:
            process.kill()


def _is_up(port: int) -> bool:
    time.sleep(0.2)
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
