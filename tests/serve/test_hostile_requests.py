"""Requests that are wrong on purpose get an error of the 4xx kind: no 5xx, no hang, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import struct
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from helpers.server import MODEL, Running, make_engine, serving, wait_until
from safetensors.torch import load, save

import fastweights as fw
from fastweights.serve.http import BodyLimit, EventStream
from fastweights.serve.service import Service

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MAX_BODY = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(max_body_bytes=MAX_BODY, max_prompt_tokens=5000) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1} | fields).encode()


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "not JSON": b"{",
    "a list": b"[1, 2]",
    "null": b"null",
    "bad UTF-8": b'{"prompt": "\xff\xfe\xfa"}',
    "half of a surrogate pair": b'{"prompt": "\\ud800", "max_tokens": 1}',
    "NaN temperature": body(temperature=float("nan")),
    "infinite temperature": body(temperature=float("inf")),
    "number too large for a float": b'{"prompt": "a", "temperature": 1e999}',
    "number of many digits": b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}",
    "deeply nested": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "huge n": body(n=2**70),
    "many prompts with many answers": body(prompt=["a"] * 100, n=100),
    "huge max_tokens": body(max_tokens=2**70),
    "negative max_tokens": body(max_tokens=-1),
    "huge seed": body(seed=2**80),
    "huge top_k": body(top_k=2**80),
    "text for a number": body(n="1"),
    "fraction of a choice": body(n=1.5),
    "true for a number": body(n=True),
    "huge logprobs": body(logprobs=10**6),
    "token that does not exist": body(prompt=[10**6]),
    "negative token": body(prompt=[-1]),
    "no tokens": body(prompt=[]),
    "prompts of no tokens": body(prompt=[[]]),
    "texts and tokens": body(prompt=["a", [1]]),
    "no prompt": b'{"max_tokens": 1}',
    "null prompt": body(prompt=None),
    "too many tokens": body(prompt="a" * 6000),
    "many stop texts": body(stop=["a"] * 1000),
    "long stop text": body(stop="a" * 10_000),
    "stream that is a text": body(stream="yes"),
}


@pytest.mark.parametrize("content", BODIES.values(), ids=BODIES)
def test_bad_body_is_refused_in_openais_form(server: Running, http: httpx.Client, content: bytes) -> None:
    reply = http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    assert len(reply.content) < 1000
    server.wait_until_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"content": "x"}]},
        {"messages": ["x"]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
    ],
)
def test_bad_messages_are_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert http.post(CHAT, json=fields).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"input": []},
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
        {"input": "x", "previous_response_id": "../../etc/passwd"},
        {"input": "x", "previous_response_id": "resp_" + "0" * 32},
        {"input": "x", "previous_response_id": "x" * 10_000},
        {"input": "x", "previous_response_id": 5},
        {"input": "x", "metadata": {"a": 1}},
        {"input": "x", "metadata": {"a" * 65: "b"}},
        {"input": "x", "background": True},
        {"input": "x", "conversation": "conv_1"},
        {"input": "x", "prompt": {"id": "pmpt_1"}},
    ],
)
def test_bad_response_requests_are_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert http.post(RESPONSES, json=fields).status_code in (400, 404)


@pytest.mark.parametrize("id", ["..", "%2e%2e%2fetc%2fpasswd", "resp_x", "resp_" + "0" * 32, "a" * 5000, "%00", "é"])
def test_unknown_ids_are_not_found(http: httpx.Client, id: str) -> None:
    for reply in (http.get(f"{RESPONSES}/{id}"), http.delete(f"{RESPONSES}/{id}"), http.get(f"/v1/states/{id}")):
        assert reply.status_code in (404, 405)
        assert reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/secret"])
def test_unknown_paths_are_not_found_in_openais_form(http: httpx.Client, path: str) -> None:
    reply = http.get(path)
    assert reply.status_code == 404 and "/v1" in reply.json()["error"]["message"]


def test_wrong_method_and_wrong_content_type_are_refused(http: httpx.Client) -> None:
    assert http.get(CHAT).status_code == 405
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        reply = http.post(COMPLETIONS, content=body(), headers={"Content-Type": kind} if kind else {})
        assert reply.status_code == 400 and "Content-Type: application/json" in reply.json()["error"]["message"]
    kind = "Application/JSON; charset=utf-8"
    assert http.post(COMPLETIONS, content=body(), headers={"Content-Type": kind}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_are_refused(http: httpx.Client, site: str) -> None:
    for method, path in (("POST", COMPLETIONS), ("POST", "/v1/states"), ("GET", "/v1/models")):
        reply = http.request(method, path, headers={"Sec-Fetch-Site": site})
        assert reply.status_code == 403 and reply.json()["error"]["code"] == "other_site"
    assert http.get("/", headers={"Sec-Fetch-Site": site}).status_code == 200  # a link to the page
    for own in ("same-origin", "none"):
        assert http.get("/v1/models", headers={"Sec-Fetch-Site": own}).status_code == 200


def test_names_that_a_site_could_own_are_refused_on_this_machine(http: httpx.Client, guarded: Running) -> None:
    for host in (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "[",
        "[::1",
    ):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 403, host
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:80", "192.168.0.7:8000", "app.localhost"):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200, host
    headers = {"Host": "proxied.example", "Authorization": f"Bearer {KEYS[0]}"}
    assert httpx.get(f"{guarded.url}/v1/models", headers=headers).status_code == 200


def test_large_body_is_refused_before_it_is_sent(server: Running) -> None:
    """By its length alone: the reply comes although no byte of the body was sent."""
    with connect(server) as client:
        client.sendall(head(COMPLETIONS, 10**7))
        assert b" 413 " in client.recv(4096).split(b"\r\n")[0]


def test_large_body_without_a_length_is_refused_while_it_is_sent(http: httpx.Client) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(10 * MAX_BODY // 2**16):
            sent += 2**16
            yield b" " * 2**16

    try:
        reply = http.post(COMPLETIONS, content=chunks(), headers={"Content-Type": "application/json"})
        assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"
    except httpx.TransportError:  # the server has closed the connection
        assert sent < 10 * MAX_BODY


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_body_that_does_not_arrive_is_given_up(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_with_body_seconds(monkeypatch, 0.2) as slow, connect(slow) as client:
        client.sendall(head(COMPLETIONS, 100) + b"{")
        assert b" 408 " in client.recv(4096).split(b"\r\n")[0]


def serving_with_body_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Any:
    monkeypatch.setattr(BodyLimit.__init__, "__defaults__", (seconds,))
    return serving()


def test_connections_without_a_request_are_closed(endless: None) -> None:
    """When the server looks a second time. Connections with an answer stay open."""
    with serving(max_tokens=10**8) as running, connect(running) as silent, connect(running) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost:")
        with connect(running) as busy, httpx.Client(base_url=running.url) as client:
            busy.sendall(post(COMPLETIONS, {"prompt": "a", "stream": True, **LONG}))
            assert busy.recv(1)
            (loop,) = {server.get_loop() for server in running.server.servers}
            for _ in range(2):
                assert client.get("/health").status_code == 200
                assert all(not readable(idle) for idle in (silent, slow))
                asyncio.run_coroutine_threadsafe(running.server.on_tick(0), loop).result(20)
            assert silent.recv(1) == slow.recv(1) == b""
            assert client.get("/health").status_code == 200
            assert busy.recv(1)
            reset(busy)
        running.wait_until_idle()


def readable(client: socket.socket) -> bool:
    """Whether there is something to receive, which may be the end."""
    return bool(select.select([client], [], [], 0)[0])


def test_not_http_at_all(server: Running) -> None:
    with connect(server) as client:
        client.sendall(b"\x16\x03\x01\x00\xff nonsense\r\n\r\n")
        assert b"400" in client.recv(4096)


def reset(client: socket.socket) -> None:
    """Hang up without a goodbye."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def post(path: str, fields: dict[str, Any]) -> bytes:
    content = json.dumps(fields).encode()
    return head(path, len(content)) + content


def head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}")
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that end only at their limit."""
    monkeypatch.setattr(Service, "stop_tokens", lambda *_: frozenset())


LONG = {"max_tokens": 10**9, "temperature": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "a", "n": 3, **LONG}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], **LONG}),
        (RESPONSES, {"input": "a", "max_output_tokens": 10**9}),
    ],
)
def test_generation_stops_when_the_client_hangs_up(
    path: str, fields: dict[str, Any], stream: bool, endless: None
) -> None:
    with serving(make_engine(slots=4), max_tokens=10**8) as running:
        client = connect(running)
        client.sendall(post(path, fields | {"stream": stream}))
        if stream:
            assert client.recv(1)
        wait_until(lambda: running.service.worker.stats.generated_tokens > 5)
        reset(client)
        running.wait_until_idle()


def test_client_that_does_not_read_is_given_up() -> None:
    """The server waits in `send` while its buffer for this client is full."""
    closed: list[str] = []

    async def events() -> AsyncGenerator[str]:
        try:
            while True:
                yield "data: x\n\n"
        finally:
            closed.append("events")

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def receive() -> Any:
        await asyncio.sleep(60)

    stream = EventStream(events(), lambda: closed.append("reply"), seconds=0.01)
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), 10))
    assert closed == ["events", "reply"]


def test_full_queue_is_answered_429_with_retry_after() -> None:
    with serving(make_engine(slots=1), queue=1, max_tokens=10**8) as running, running.client() as client:
        request = {"prompt": "a", "stream": True, **LONG}
        open_streams = [connect(running) for _ in range(2)]
        for number, stream in enumerate(open_streams):
            stream.sendall(post(COMPLETIONS, request))
            wait_until(lambda n=number: running.active() == n + 1)
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model=MODEL, prompt="a")
        assert error.value.code == "queue_full"
        assert int(error.value.response.headers["Retry-After"]) >= 1
        for stream in open_streams:
            reset(stream)
        running.wait_until_idle()
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices


def test_answer_ends_at_its_deadline(endless: None) -> None:
    with serving(make_engine(slots=1), timeout=0.5, max_tokens=10**8) as running, running.client() as client:
        reply = client.completions.create(model=MODEL, prompt="a", max_tokens=10**8)
        assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens < 10**6
        made = client.responses.create(model=MODEL, input="a")
        assert made.status == "incomplete" and client.responses.retrieve(made.id) == made
        with connect(running) as blocking:
            blocking.sendall(post(COMPLETIONS, {"prompt": "a", "stream": True, **LONG}))
            wait_until(lambda: running.active() > 0)
            running.service.settings = replace(running.service.settings, timeout=0.1)
            with pytest.raises(openai.APIStatusError) as error:
                client.completions.create(model=MODEL, prompt="a", max_tokens=5)
            assert error.value.status_code == 408


KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with serving(keys=KEYS, max_body_bytes=MAX_BODY) as running:
        yield running


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic first-key", "first-key", "é"])
def test_wrong_keys_are_refused(guarded: Running, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/v1/nothing"), ("POST", "/v1/states")):
        reply = httpx.request(method, guarded.url + path, headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["type"] == "authentication_error"
    assert httpx.get(guarded.url + "/health").status_code == 200


def test_body_of_a_stranger_is_not_read(guarded: Running) -> None:
    with connect(guarded) as client:
        client.sendall(head(COMPLETIONS, 1000))
        assert b" 401 " in client.recv(4096).split(b"\r\n")[0]


def test_what_one_key_stored_does_not_exist_for_another(guarded: Running) -> None:
    with guarded.client(KEYS[0]) as mine, guarded.client(KEYS[1]) as other:
        made = mine.responses.create(model=MODEL, input="A secret", max_output_tokens=4)
        options: dict[str, Any] = dict(model=MODEL, messages=[{"role": "user", "content": "A secret"}], max_tokens=2)
        mine.chat.completions.create(**options)
        for call in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model=MODEL, input="Go on", previous_response_id=made.id)
        state = httpx.get(f"{guarded.url}/v1/states/{made.id}", headers={"Authorization": f"Bearer {KEYS[1]}"})
        assert state.status_code == 404
        assert other.chat.completions.create(**options).usage.prompt_tokens_details.cached_tokens == 0
        assert mine.chat.completions.create(**options).usage.prompt_tokens_details.cached_tokens > 0
        assert mine.responses.retrieve(made.id) == made


def exported(server: Running, http: httpx.Client) -> tuple[str, bytes]:
    with server.client() as client:
        id = client.responses.create(model=MODEL, input="Hello there", max_output_tokens=6, temperature=0).id
    reply = http.get(f"/v1/states/{id}")
    assert reply.headers["Content-Type"] == "application/octet-stream"
    return id, reply.content


def test_exported_state_continues_on_another_server(server: Running, http: httpx.Client) -> None:
    id, data = exported(server, http)
    options: dict[str, Any] = dict(model=MODEL, input="Go on", max_output_tokens=8, temperature=0)
    with serving() as other, httpx.Client(base_url=other.url) as there:
        made = there.post("/v1/states", content=data).json()
        with server.client() as client, other.client() as other_client:
            wanted = client.responses.create(**options, previous_response_id=id)
            found = other_client.responses.create(**options, previous_response_id=made["id"])
            assert other_client.responses.retrieve(made["id"]).status == "completed"
    assert found.output_text == wanted.output_text
    assert made["object"] == "state" and found.usage.input_tokens == wanted.usage.input_tokens


def test_exported_state_is_a_file_that_conversations_load(server: Running, http: httpx.Client, tmp_path: Path) -> None:
    id, data = exported(server, http)
    (tmp_path / "saved.state").write_bytes(data)
    conversation = fw.Conversation(make_engine())
    conversation.load(tmp_path / "saved.state")
    with server.client() as client:
        wanted = client.responses.create(
            model=MODEL, input="Go on", max_output_tokens=8, temperature=0, previous_response_id=id
        )
        assert "".join(conversation.send("Go on", 8)) == wanted.output_text.lstrip()
        conversation.save(tmp_path / "back.state")
        made = http.post("/v1/states", content=(tmp_path / "back.state").read_bytes()).json()
        assert made["tokens"] > wanted.usage.input_tokens
        assert client.responses.create(model=MODEL, input="More", previous_response_id=made["id"]).output


def test_damaged_and_foreign_states_are_refused(server: Running, http: httpx.Client) -> None:
    _, data = exported(server, http)
    for content in (b"", b"nonsense", data[:-5], data[:-1] + bytes([data[-1] ^ 1]), save({"x": load(data)["seen"]})):
        reply = http.post("/v1/states", content=content)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_state"
    with serving(make_engine(rule="decay", m=4)) as other:
        reply = httpx.post(f"{other.url}/v1/states", content=data)
        assert reply.status_code == 400 and "another model" in reply.json()["error"]["message"]
    assert http.post("/v1/states", content=b" " * 20_000_000).status_code == 413


def test_imported_state_that_overflows_is_an_error_of_its_request_only(server: Running, http: httpx.Client) -> None:
    id, data = exported(server, http)
    size = int.from_bytes(data[:8], "little")
    metadata = {k: v for k, v in json.loads(data[8 : 8 + size])["__metadata__"].items() if k != "sha256"}
    tensors = {
        name: torch.full_like(x, 3e38) if x.is_floating_point() and name not in ("model", "logits") else x
        for name, x in load(data).items()
    }
    made = http.post("/v1/states", content=save(tensors, metadata)).json()
    good, huge = (
        {"input": "Go on", "max_output_tokens": 4, "temperature": 0, "previous_response_id": id}
        for id in (id, made["id"])
    )
    before = http.post(RESPONSES, json=good).json()["output"][0]["content"]
    for _ in range(5):  # in every slot
        reply = http.post(RESPONSES, json=huge)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "previous_response_id"
    assert "response.failed" in http.post(RESPONSES, json=huge | {"stream": True}).text
    for _ in range(5):
        assert http.post(RESPONSES, json=good).json()["output"][0]["content"] == before


def test_logs_have_no_prompts_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for shown in (False, True):
        caplog.clear()
        with caplog.at_level("INFO"), serving(log_prompts=shown) as running, running.client() as client:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "zebra"}], max_tokens=1)
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model=MODEL, prompt="zebra", n=0)
        assert ("zebra" in caplog.text) == shown
        assert "POST /v1/chat/completions 200" in caplog.text


def test_metrics_and_health(server: Running, http: httpx.Client) -> None:
    def value(name: str) -> float:
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name + " ")]
        return float(lines[0].split()[1])

    before = value("fastweights_generated_tokens_total")
    http.post(COMPLETIONS, json={"prompt": "metrics", "max_tokens": 7})
    assert value("fastweights_generated_tokens_total") == before + 7
    assert value("fastweights_slots") == 4 and value("fastweights_running") == 0
    assert http.get("/health").json() == {"status": "ok"}
    info = http.get("/v1/info").json()
    assert info["model"] == MODEL and info["state_bytes"] > 0 and info["base_kv_bytes_per_token"] > 0


def test_health_fails_when_the_worker_has_stopped() -> None:
    with serving() as running, httpx.Client(base_url=running.url) as http:
        running.service.worker.close(0)
        assert http.get("/health").status_code == 503
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 503


def test_error_inside_the_model_is_a_server_error_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(slots=1)
    choose = engine.sampler.choose
    with serving(engine) as running, httpx.Client(base_url=running.url) as http:
        engine.sampler.choose = None
        reply = http.post(COMPLETIONS, json={"prompt": "a"})
        assert reply.status_code == 500 and "NoneType" not in reply.text and "NoneType" in caplog.text
        assert '"server_error"' in http.post(COMPLETIONS, json={"prompt": "a", "stream": True}).text
        assert "response.failed" in http.post(RESPONSES, json={"input": "a", "stream": True}).text
        engine.sampler.choose = choose
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200
