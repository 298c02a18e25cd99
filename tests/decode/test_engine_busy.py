"""An engine has one owner at a time: a second caller gets an error, and the first one its own tokens."""

from __future__ import annotations

import threading

import pytest
from helpers.engine import converted, greedy, prompts_of

import fastweights as fw
from fastweights.decode.engine import EngineBusy


def test_second_thread_is_refused_and_the_first_gets_its_tokens() -> None:
    model = converted("gpt2")
    first, second = prompts_of(5, 9)
    engine, started, checked = fw.Engine(model), threading.Event(), threading.Event()
    found: list[list[int]] = []

    def wait(*_: int) -> None:
        started.set()
        assert checked.wait(30)

    thread = threading.Thread(target=lambda: found.extend(engine.generate([first], 6, on_token=wait)))
    thread.start()
    assert started.wait(30)
    for call in (lambda: engine.generate([second], 6), engine.step):
        with pytest.raises(EngineBusy, match="generating already"):
            call()
    checked.set()
    thread.join()
    assert found == [greedy(model, first, 6)]
    assert engine.generate([second], 6) == [greedy(model, second, 6)]


def test_engine_called_from_its_own_on_token_is_refused_and_usable_afterwards() -> None:
    model = converted("gpt2")
    first, second = prompts_of(5, 9)
    engine = fw.Engine(model)
    with pytest.raises(EngineBusy, match="on_token"):
        engine.generate([first], 6, on_token=lambda *_: engine.generate([second], 2))
    assert engine.generate([first], 6) == [greedy(model, first, 6)]
