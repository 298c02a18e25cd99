"""A conversation reads every token of its template once, and its forks, files and interruptions leave it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chat import CHATML, GEMMA, LLAMA2, chat_tokenizer, read_tokens, script
from helpers.engine import converted
from helpers.tiny import tokens

import fastweights as fw
from fastweights.config import ConfigError
from fastweights.decode.conversation import PLAIN_TEMPLATE
from fastweights.decode.engine import EngineBusy
from fastweights.modeling.cache import StateError
from fastweights.tokenization import prompt_tokens

HYBRID = dict(m=6, layers=(0,))
USER = ["Hi, who are you?", "<|im_start|> is a token", "  Bye  ", ""]


def conversation(template: str | None = CHATML, system: str | None = None, **settings: Any) -> fw.Conversation:
    model = converted(**settings or dict(m=6, window=5))
    return fw.Conversation(fw.Engine(model, tokenizer=chat_tokenizer(template), max_length=400), system)


def say(talk: fw.Conversation, text: str = "Hi", **options: Any) -> str:
    return "".join(talk.send(text, **dict(max_new_tokens=15) | options))


def state_of(talk: fw.Conversation, text: str) -> fw.FastWeightsCache:
    """The state of the conversation's model after reading a whole text at once."""
    ids = talk.engine.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        return talk.engine.model(ids, use_cache=True).past_key_values


def assert_same_state(found: fw.FastWeightsCache, expected: fw.FastWeightsCache, model: Any) -> None:
    assert int(found.seen) == int(expected.seen)
    with torch.no_grad():
        logits = [model(tokens(1, 3), past_key_values=state.fork()).logits for state in (found, expected)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def differs(first: fw.FastWeightsCache, second: fw.FastWeightsCache) -> bool:
    pairs = zip(first.layers, second.layers, strict=True)
    return any(not torch.equal(a.tensors[name], b.tensors[name]) for a, b in pairs for name in a.tensors)


# what is read


@pytest.mark.parametrize("settings", [dict(m=6, window=5), HYBRID], ids=["converted", "hybrid"])
@pytest.mark.parametrize(
    ("template", "system", "answer", "end"),
    [
        (CHATML, None, "1 2 3!", "<|im_end|>"),
        (CHATML, "You say 1.", "1 2\n3!", "<|im_end|>"),
        (CHATML, None, "1 2 3!", "</s>"),  # ends with another token than the template's
        (GEMMA, None, "1 2 3!", "<|im_end|>"),
        (LLAMA2, "You say 1.", " 1 2 3!", "</s>"),
        (None, "You say 1.", " 1\n2 3!", "</s>"),
        (None, None, " 1\n2 3!", "\nUser:"),
    ],
)
def test_tokens_read_are_those_of_the_template_for_the_whole_conversation(
    template: str | None, system: str | None, answer: str, end: str, settings: dict[str, Any]
) -> None:
    talk = conversation(template, system, **settings)
    messages = [] if system is None else [{"role": "system", "content": system}]
    script(talk.engine, *[answer + end] * len(USER))
    with read_tokens(talk.engine.model) as found:
        for text in USER:
            assert say(talk, text) == answer.strip()
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.strip()}]
        state = talk.state
    tokenizer = talk.engine.tokenizer
    whole = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template or PLAIN_TEMPLATE)
    ids = prompt_tokens(tokenizer, whole)  # this tokenizer adds bos, which one of the templates writes itself
    assert ids[0] == tokenizer.bos_token_id != ids[1]
    assert found == ids
    assert_same_state(state, state_of(talk, tokenizer.decode(ids)), talk.engine.model)


def test_plain_text_turns_have_the_documented_format() -> None:
    talk = conversation(None, "Plain text.")
    script(talk.engine, " 12\nUser:")
    say(talk, "Hi")
    assert_same_state(talk.state, state_of(talk, "<s>Plain text.\n\nUser: Hi\nAssistant: 12\n"), talk.engine.model)


@pytest.mark.parametrize("end", ["<|im_end|>", "</s>"])
def test_end_of_turn_is_not_shown_and_ends_the_answer(end: str) -> None:
    talk = conversation()
    script(talk.engine, f"1 2{end}", "3")
    assert say(talk) == "1 2"
    assert say(talk, max_new_tokens=1) == "3"


def test_text_that_may_begin_the_next_turn_is_held_back_until_it_is_clear() -> None:
    talk = conversation(None)
    script(talk.engine, " 1\nUS\nUser: 2")
    assert list(talk.send("Hi", max_new_tokens=20)) == ["1", "\nUS"]


def test_end_tokens_of_the_models_generation_config_end_an_answer() -> None:
    talk = conversation()
    talk.engine.model.generation_config.eos_token_id = talk.engine.tokenizer.convert_tokens_to_ids("2")
    script(talk.engine, "1123")
    assert say(talk) == "11"


# interruptions


@pytest.mark.parametrize("template", [CHATML, None], ids=["template", "plain"])
def test_closed_answer_ends_there_and_the_conversation_continues(template: str | None) -> None:
    talk, other = conversation(template), conversation(template)
    script(talk.engine, " 1 2\nU", " 3")
    answer = talk.send("Hi")
    shown = "".join(next(answer) for _ in range(3))
    answer.close()
    assert shown == "1 2"
    script(other.engine, " 1 2<|im_end|>" if template else " 1 2</s>")
    say(other)
    assert_same_state(talk.state, other.state, talk.engine.model)
    script(talk.engine, "3")
    assert say(talk, max_new_tokens=1) == "3"


def test_interrupt_while_a_message_is_read_leaves_the_conversation_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = conversation()
    say(talk)
    before = talk.fork()
    with monkeypatch.context() as patch:
        last = talk.engine.model.model.layers[1]
        patch.setattr(last, "forward", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            say(talk, "more")
        with pytest.raises(KeyboardInterrupt):
            _ = talk.state
    assert int(talk.state.seen) == int(before.state.seen)
    assert not differs(talk.state, before.state)


def test_second_conversation_waits_for_the_answer_of_the_first() -> None:
    talk = conversation()
    other = fw.Conversation(talk.engine)
    answer = talk.send("Hi", max_new_tokens=8)
    next(answer)
    with pytest.raises(EngineBusy):
        say(other)
    answer.close()
    assert say(other)


# forks and files


def test_fork_continues_like_its_origin_and_does_not_change_it() -> None:
    talk = conversation()
    say(talk)
    unread = talk.fork()  # its last answer has not been read yet
    before = talk.state.fork()
    read = talk.fork()
    assert [say(fork, "Hello") for fork in (unread, read)] == [say(talk.fork(), "Hello")] * 2
    for fork in (unread, read):
        assert differs(fork.state, before)
    assert not differs(talk.state, before)


@pytest.mark.parametrize("settings", [dict(m=6, window=5), HYBRID], ids=["converted", "hybrid"])
def test_saved_conversation_continues_where_it_was(settings: dict[str, Any], tmp_path: Path) -> None:
    talk, other = conversation(**settings), conversation(**settings)
    say(talk)
    talk.save(tmp_path / "state")
    assert int(talk.state.seen) > 0
    other.load(tmp_path / "state")
    assert say(other, "Bye") == say(talk, "Bye")
    assert_same_state(other.state, talk.state, talk.engine.model)


def test_saved_conversation_ends_with_the_end_of_its_turn(tmp_path: Path) -> None:
    talk = conversation()
    script(talk.engine, "12<|im_end|>")
    with read_tokens(talk.engine.model) as found:
        say(talk)
        talk.save(tmp_path / "state")
    assert talk.engine.tokenizer.decode(found).endswith("12<|im_end|>\n")


def test_reset_begins_anew_and_an_empty_state_can_be_saved(tmp_path: Path) -> None:
    talk = conversation(system="You are 1.")
    talk.save(tmp_path / "empty")
    first = say(talk)
    for begin in (talk.reset, lambda: talk.load(tmp_path / "empty")):
        say(talk, "Bye")
        begin()
        with read_tokens(talk.engine.model) as found:
            assert say(talk) == first
        assert talk.engine.tokenizer.decode(found).startswith("<s><|im_start|>system\nYou are 1.")


def test_state_of_several_sequences_is_refused(tmp_path: Path) -> None:
    talk = conversation()
    say(talk)
    talk.state.fork(2).save(tmp_path / "two", talk.engine.model)
    with pytest.raises(StateError, match="has 2 sequences"):
        talk.load(tmp_path / "two")


def test_state_has_the_same_size_after_every_turn() -> None:
    talk = conversation()
    sizes = set()
    for _ in range(3):
        say(talk)
        sizes.add(talk.state.nbytes)
    assert len(sizes) == 1


# limits and refusals


@pytest.mark.parametrize(
    ("family", "settings", "limit", "message"),
    [("llama", HYBRID, 50, "max_length is 50"), ("gpt2", dict(m=6), 96, "learned positions for 96 tokens")],
)
def test_answer_fills_the_room_that_is_left_and_the_next_message_is_refused(
    family: str, settings: dict[str, Any], limit: int, message: str
) -> None:
    engine = fw.Engine(converted(family, **settings), tokenizer=chat_tokenizer(GEMMA), max_length=50)
    talk = fw.Conversation(engine)
    script(engine, "1" * 200)
    with read_tokens(engine.model) as found:
        answer = say(talk, max_new_tokens=200)
    assert len(found) + len(answer) - 1 == limit
    with pytest.raises(ValueError, match=message):
        say(talk)
    talk.reset()
    assert say(talk, max_new_tokens=2) == "11"


def test_template_that_refuses_a_system_prompt_is_named_with_the_argument() -> None:
    with pytest.raises(ConfigError, match=r"system: .*System role not supported"):
        conversation(GEMMA, "You are 1.")


def test_engine_without_a_tokenizer_and_template_without_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        fw.Conversation(fw.Engine(converted()))
    with pytest.raises(ConfigError, match="leaves answers out"):
        conversation("{{ messages[0]['content'] }}")
