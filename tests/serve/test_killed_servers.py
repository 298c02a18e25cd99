"""Servers that share a store: a killed one loses nothing that its clients have, and another one goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from helpers.server_kills import Kills
from helpers.server_processes import ServerProcess
from helpers.stores import redis_server

GREEDY = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}
ENDLESS = {**GREEDY, "max_output_tokens": 10**6}


def check_kills(folder: Path, kills: int, seed: int) -> None:
    counts = Kills(folder, seed).run(kills)
    assert counts["kills"] == kills and counts["complete"] > kills
    assert counts["requests running when their server was killed"] > 0
    bad = {name: counts[name] for name in ("lost", "different", "errors", "bad lines in the log")}
    assert bad == dict.fromkeys(bad, 0)


def test_killed_servers_lose_no_complete_response(tmp_path: Path) -> None:
    check_kills(tmp_path, 3, 0)


@pytest.mark.full
def test_100_killed_servers_lose_no_complete_response(tmp_path: Path) -> None:
    check_kills(tmp_path, 100, 1)


@pytest.fixture
def two_servers(tmp_path: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers with one Redis."""
    with redis_server() as url:
        options = dict(log=tmp_path / "log", store=url, max_tokens=10**6)
        with ServerProcess(**options) as one, ServerProcess(**options) as other:
            yield one, other


def test_next_turn_may_go_to_another_server_also_when_the_first_is_killed_in_a_stream(
    two_servers: tuple[ServerProcess, ServerProcess],
) -> None:
    one, other = two_servers
    turns = ["Hello, who is it?", "I see.", "And then?"]
    with one.client() as first, other.client() as second:
        alone, previous = [], None  # all on one server
        for turn in turns:
            reply = second.responses.create(**GREEDY, input=turn, previous_response_id=previous)
            alone.append(reply.output_text)
            previous = reply.id
        begun = first.responses.create(**GREEDY, input=turns[0])
        moved = second.responses.create(**GREEDY, input=turns[1], previous_response_id=begun.id)
        assert moved.usage.input_tokens_details.cached_tokens > begun.usage.input_tokens

        stream = first.responses.create(**ENDLESS, input=turns[2], previous_response_id=moved.id, stream=True)
        cut_off = next(stream).response.id
        next(event for event in stream if event.type == "response.output_text.delta")
        one.kill()
        with pytest.raises(openai.APIConnectionError):
            list(stream)
        with pytest.raises(openai.NotFoundError):  # it was not complete
            second.responses.retrieve(cut_off)
        last = second.responses.create(**GREEDY, input=turns[2], previous_response_id=moved.id)
        assert [begun.output_text, moved.output_text, last.output_text] == alone


def test_chat_is_not_read_again_by_another_server(two_servers: tuple[ServerProcess, ServerProcess]) -> None:
    one, other = two_servers
    messages = [{"role": "user", "content": "Hello, who is it?"}]
    with one.client() as first, other.client() as second:
        options = {"model": "tiny", "temperature": 0, "max_tokens": 8}
        reply = first.chat.completions.create(**options, messages=messages)
        one.kill()
        answer = {"role": "assistant", "content": reply.choices[0].message.content}
        again = second.chat.completions.create(
            **options, messages=[*messages, answer, {"role": "user", "content": "I see."}]
        )
    assert again.usage.prompt_tokens_details.cached_tokens >= reply.usage.prompt_tokens
