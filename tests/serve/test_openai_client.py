"""The official client, unchanged, against a server on a port."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from helpers.chat import LLAMA2, read_tokens, script
from helpers.server import MODEL, Running, make_engine, serving

import fastweights as fw

USER = {"role": "user", "content": "Hello, are you here?"}
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def engine() -> fw.Engine:
    """The same model without a server."""
    return make_engine()


def expected(engine: fw.Engine, prompt: list[int], count: int, **sampling: Any) -> str:
    (tokens,) = engine.generate([prompt], count, fw.Sampling(**sampling), stop_tokens=())
    return engine.tokenizer.decode(tokens, skip_special_tokens=True)


def chat_prompt(engine: fw.Engine, *messages: dict[str, str]) -> list[int]:
    text = engine.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return engine.tokenizer.encode(text)


@pytest.fixture
def scripted() -> Iterator[Any]:
    """A server whose model writes what it is told."""
    engine = make_engine(slots=1)
    with serving(engine) as running, running.client() as client:

        def write(answer: str) -> openai.OpenAI:
            running.wait_until_idle()
            script(engine, answer + "." * 60)
            return client

        yield write


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_completion_equals_engine(client: openai.OpenAI, engine: fw.Engine) -> None:
    reply = client.completions.create(**GREEDY, prompt="Hello", max_tokens=9)
    (choice,) = reply.choices
    assert choice.text == expected(engine, engine.tokenizer.encode("Hello"), 9)
    assert choice.finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 9)


def test_completion_of_several_prompts_as_texts_and_as_tokens(client: openai.OpenAI, engine: fw.Engine) -> None:
    texts = ["Hello", "a b c d", "The end."]
    tokens = [engine.tokenizer.encode(text) for text in texts]
    wanted = [expected(engine, prompt, 5) for prompt in tokens]
    for prompt in (texts, tokens):
        reply = client.completions.create(**GREEDY, prompt=prompt, max_tokens=5)
        assert [choice.text for choice in reply.choices] == wanted
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
    (choice,) = client.completions.create(**GREEDY, prompt=tokens[1], max_tokens=5).choices
    assert choice.text == wanted[1]


def test_chat_equals_engine_and_streams_the_same(client: openai.OpenAI, engine: fw.Engine) -> None:
    wanted = expected(engine, chat_prompt(engine, USER), 12)
    reply = client.chat.completions.create(**GREEDY, messages=[USER], max_tokens=12)
    assert reply.choices[0].message.content == wanted
    assert reply.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(**GREEDY, messages=[USER], max_completion_tokens=12, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_is_the_last_chunk_of_a_stream_if_it_is_asked_for(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    for stream in (
        client.chat.completions.create(**GREEDY, messages=[USER], max_tokens=4, stream=True, stream_options=options),
        client.completions.create(**GREEDY, prompt="abc", max_tokens=4, stream=True, stream_options=options),
    ):
        *chunks, last = stream
        assert last.choices == [] and last.usage.completion_tokens == 4
        assert all(chunk.usage is None for chunk in chunks)


def test_streamed_completions_of_several_prompts_are_put_together_by_index(client: openai.OpenAI) -> None:
    options = {**GREEDY, "prompt": ["abc", "Hello there"], "n": 2, "max_tokens": 6}
    whole = client.completions.create(**options)
    texts, reasons = ["", "", "", ""], dict[int, Any]()
    for chunk in client.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == dict.fromkeys(range(4), "length")


def test_sampled_tokens_follow_the_seed(client: openai.OpenAI, engine: fw.Engine) -> None:
    options: dict[str, Any] = dict(model=MODEL, prompt="Hello", max_tokens=12, temperature=1.5, top_p=0.9)
    options["extra_body"] = {"top_k": 20}
    prompt = engine.tokenizer.encode("Hello")
    wanted = [expected(engine, prompt, 12, temperature=1.5, top_p=0.9, top_k=20, seed=seed) for seed in (5, 6)]
    assert wanted[0] != wanted[1]
    reply = client.completions.create(**options, seed=5, n=2)
    assert [choice.text for choice in reply.choices] == wanted
    assert client.completions.create(**options, seed=-1).choices[0].text


def test_answers_of_one_prompt_are_sampled_independently_and_read_it_once(server: Running) -> None:
    with server.client() as client, read_tokens(server.service.model) as read:
        reply = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "only here"}], n=6, max_tokens=16, temperature=2
        )
    assert len({choice.message.content for choice in reply.choices}) > 1
    assert len(read) == reply.usage.prompt_tokens - reply.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("stop", ["Yes", ["No", "Yes"]])
def test_text_ends_before_a_stop_text(scripted: Any, stop: Any) -> None:
    client = scripted("abYYeYes and more")
    reply = client.completions.create(**GREEDY, prompt="a", max_tokens=50, stop=stop)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("abYYe", "stop")
    client = scripted("abYYeYes and more")
    chunks = list(client.completions.create(**GREEDY, prompt="a", max_tokens=50, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abYYe"


def test_held_back_text_is_sent_if_the_stop_text_does_not_come(scripted: Any) -> None:
    client = scripted("abYe")
    reply = client.completions.create(**GREEDY, prompt="a", max_tokens=4, stop="Yes")
    assert reply.choices[0].text == "abYe"


def test_end_of_turn_ends_an_answer(scripted: Any) -> None:
    client = scripted("Hi.<|im_end|>")
    reply = client.chat.completions.create(**GREEDY, messages=[USER])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Hi.", "stop")


def test_logprobs_of_chat_and_completion_agree_with_the_model(client: openai.OpenAI, engine: fw.Engine) -> None:
    prompt = engine.tokenizer.encode("Hello")
    reply = client.completions.create(**GREEDY, prompt=prompt, max_tokens=3, logprobs=2)
    found = reply.choices[0].logprobs
    tokens = prompt + engine.generate([prompt], 3)[0]
    logprobs = engine.model(torch.tensor([tokens])).logits[0].log_softmax(-1).detach()
    wanted = [float(logprobs[len(prompt) - 1 + i, tokens[len(prompt) + i]]) for i in range(3)]
    assert found.token_logprobs == pytest.approx(wanted, abs=1e-3)
    assert "".join(found.tokens) == reply.choices[0].text
    assert found.text_offset == [0, 1, 2]
    for top, token in zip(found.top_logprobs, found.tokens, strict=True):
        assert len(top) == 2 and max(top.values()) == top[token]
    chat = client.chat.completions.create(**GREEDY, messages=[USER], max_tokens=3, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content
    shown = [token.token for token in content if not token.token.startswith("<|")]
    assert "".join(shown) == chat.choices[0].message.content
    assert [len(token.top_logprobs) for token in content] == [2, 2, 2]
    assert bytes(content[0].bytes).decode() == content[0].token
    streamed = client.chat.completions.create(**GREEDY, messages=[USER], max_tokens=3, logprobs=True, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    sent = [token.logprob for part in parts if part for token in part.content]
    assert sent == pytest.approx([token.logprob for token in content], abs=1e-4)


def test_tokens_after_a_stop_text_have_no_logprobs(scripted: Any) -> None:
    client = scripted("abYes")
    reply = client.completions.create(**GREEDY, prompt="a", max_tokens=50, stop="Yes", logprobs=0)
    assert reply.choices[0].logprobs.tokens == ["a", "b"]


def test_chat_with_one_more_turn_reads_only_new_tokens(server: Running, engine: fw.Engine) -> None:
    system = {"role": "system", "content": "You are a very short test."}
    messages = [system, {"role": "user", "content": "Hello, you there?"}]
    with server.client() as client:
        first = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=10)
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        again = [*messages, answer, {"role": "user", "content": "And now?"}]
        with read_tokens(server.service.model) as read:
            second = client.chat.completions.create(**GREEDY, messages=again, max_tokens=10)
        fresh = client.chat.completions.create(**GREEDY, messages=[system, USER], max_tokens=1)
    assert second.choices[0].message.content == expected(engine, chat_prompt(engine, *again), 10)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens
    assert len(read) == second.usage.prompt_tokens - cached
    # another conversation with the same system prompt
    assert 20 < fresh.usage.prompt_tokens_details.cached_tokens < fresh.usage.prompt_tokens


def test_prompt_that_is_exactly_a_stored_prefix_is_answered_without_reading(server: Running) -> None:
    options = {**GREEDY, "messages": [{"role": "user", "content": "exactly this"}], "max_tokens": 8}
    with server.client() as client:
        first = client.chat.completions.create(**options)
        with read_tokens(server.service.model) as read:
            second = client.chat.completions.create(**options)
    assert second.choices[0].message.content == first.choices[0].message.content
    assert not read and second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens


def test_response_continues_from_its_state(server: Running, engine: fw.Engine) -> None:
    conversation = fw.Conversation(engine)
    turns = ["Hello, who is it?", "I see.", "Then a long one, to see that nothing of it is lost."]
    with server.client() as client:
        previous = None
        for turn in turns:
            wanted = "".join(conversation.send(turn, 9))
            with read_tokens(server.service.model) as read:
                reply = client.responses.create(
                    **GREEDY, input=turn, max_output_tokens=9, previous_response_id=previous
                )
            assert reply.output_text.lstrip() == wanted
            usage = reply.usage
            assert len(read) == usage.input_tokens - usage.input_tokens_details.cached_tokens
            assert len(read) < 2 * len(turn) + 30 or previous is None
            previous = reply.id
    assert usage.input_tokens_details.cached_tokens > 100


def test_two_responses_that_name_the_same_one_are_a_fork(client: openai.OpenAI) -> None:
    def turn(text: str, previous: str | None) -> Any:
        return client.responses.create(**GREEDY, input=text, max_output_tokens=8, previous_response_id=previous)

    root = turn("Tell me a story.", None)
    fork, other = turn("A sad one.", root.id), turn("A merry one.", root.id)
    assert fork.output_text != other.output_text
    assert turn("A sad one.", root.id).output_text == fork.output_text
    assert turn("Go on.", fork.id).output_text != turn("Go on.", other.id).output_text


def test_streamed_response_has_the_events_of_openai(client: openai.OpenAI) -> None:
    options = {**GREEDY, "input": "Hello", "max_output_tokens": 6}
    whole = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    deltas = names.count("output_text.delta")
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert deltas > 1
    assert client.responses.retrieve(events[-1].response.id).output_text == text
    with client.responses.stream(**options) as stream:
        assert stream.get_final_response().output_text == text


def test_stored_response_is_retrieved_deleted_and_then_unknown(client: openai.OpenAI) -> None:
    made = client.responses.create(
        **GREEDY, input="Hello", instructions="Be short.", max_output_tokens=4, metadata={"a": "b"}
    )
    found = client.responses.retrieve(made.id)
    assert found == made and found.metadata == {"a": "b"} and found.instructions == "Be short."
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(**GREEDY, input="Go on", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"


def test_response_that_is_not_stored_cannot_be_continued(client: openai.OpenAI) -> None:
    made = client.responses.create(**GREEDY, input="Hello", max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_input_of_a_response_may_be_messages(client: openai.OpenAI) -> None:
    parts = [{"type": "input_text", "text": "Hello, are "}, {"type": "input_text", "text": "you here?"}]
    for content in (USER["content"], parts):
        reply = client.responses.create(
            **GREEDY,
            input=[{"role": "developer", "content": "Be short."}, {"role": "user", "content": content}],
            max_output_tokens=6,
        )
        chat = client.chat.completions.create(
            **GREEDY, messages=[{"role": "system", "content": "Be short."}, USER], max_tokens=6
        )
        assert reply.output_text == chat.choices[0].message.content


def test_instructions_that_are_repeated_are_read_once(server: Running) -> None:
    options = {**GREEDY, "instructions": "You are as short as possible.", "max_output_tokens": 3}
    with server.client() as client:
        first = client.responses.create(**options, input="Hello")
        with read_tokens(server.service.model) as same:
            client.responses.create(**options, input="Go on", previous_response_id=first.id)
        with read_tokens(server.service.model) as changed:
            client.responses.create(
                **options | {"instructions": "Now be long."}, input="Go on", previous_response_id=first.id
            )
    assert len(changed) > len(same) + len("Now be long.")


def test_instructions_that_the_template_leaves_out_are_refused() -> None:
    with serving(make_engine(template=LLAMA2)) as running, running.client() as client:
        first = client.responses.create(**GREEDY, input="Hello", instructions="Be short.", max_output_tokens=2)
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(**GREEDY, input="Go on", instructions="Be long.", previous_response_id=first.id)
    assert error.value.param == "instructions"


@pytest.mark.parametrize("stream", [False, True])
def test_response_is_stored_before_its_reply_ends(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as running, running.client() as client:
        put = running.service.store.put_response

        async def put_slowly(*arguments: Any) -> None:
            await asyncio.sleep(0.3)
            await put(*arguments)

        monkeypatch.setattr(running.service.store, "put_response", put_slowly)
        reply = client.responses.create(**GREEDY, input="Hello", max_output_tokens=2, stream=stream)
        made = next(event.response for event in reply if event.type == "response.completed") if stream else reply
        assert client.responses.retrieve(made.id).output_text == made.output_text


@pytest.mark.parametrize("answer", ["Hi.<|im_end|>", "Hi.</s>", "Hi. Stop!"])
def test_response_continues_alike_however_the_answer_ended(answer: str) -> None:
    """By the end of a turn, by another end token, which is not part of the conversation, or by a stop text."""
    engine = make_engine(slots=1)
    choose = engine.sampler.choose
    with serving(engine) as running, running.client() as client:
        script(engine, answer + "." * 60)
        options = {**GREEDY, "extra_body": {"stop": " Stop"}}
        first = client.responses.create(**options, input="Hello")
        assert (first.output_text, first.status) == ("Hi.", "completed")
        engine.sampler.choose = choose
        second = client.responses.create(**options, input="Go on", previous_response_id=first.id, max_output_tokens=9)
        messages = [("user", "Hello"), ("assistant", "Hi."), ("user", "Go on")]
        wanted = client.chat.completions.create(
            **options, messages=[{"role": role, "content": text} for role, text in messages], max_tokens=9
        )
    assert second.output_text == wanted.choices[0].message.content
    assert second.usage.input_tokens == wanted.usage.prompt_tokens


def test_model_without_a_chat_template_converses_in_lines() -> None:
    engine = make_engine(slots=1, template=None)
    with serving(engine) as running, running.client() as client:
        script(engine, " Hi.\nUser: and on" + "." * 60)
        reply = client.chat.completions.create(**GREEDY, messages=[USER])
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Hi.", "stop")
        script(engine, " Hi.\nUser: and on" + "." * 60)
        pieces = list(client.chat.completions.create(**GREEDY, messages=[USER], stream=True))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Hi."


def test_response_of_zero_tokens_only_reads(client: openai.OpenAI) -> None:
    made = client.responses.create(**GREEDY, input="A long text to read once.", max_output_tokens=0)
    assert made.output_text == "" and made.usage.output_tokens == 0
    assert client.responses.create(**GREEDY, input="Hm?", previous_response_id=made.id, max_output_tokens=2).output


def call_chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": [USER], "max_tokens": 2} | fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 1.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_bad_or_unsupported_field_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        call_chat(client, **fields)
    assert error.value.param == param
    assert error.value.type == "invalid_request_error"
    assert param.split(".")[-1].split("[")[0] in str(error.value)


@pytest.mark.parametrize(
    ("path", "fields", "used"),
    [
        ("completions", {"prompt": "a", "max_completion_tokens": 2}, "max_tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_output_tokens": 2}, "max_tokens"),
        ("responses", {"input": "a", "max_tokens": 2}, "max_output_tokens"),
        ("responses", {"input": "a", "n": 2}, "n"),
        ("completions", {"prompt": "a", "min_p": 0.1}, "min_p"),
    ],
)
def test_field_of_another_api_is_not_ignored(server: Running, path: str, fields: dict[str, Any], used: str) -> None:
    reply = httpx.post(f"{server.url}/v1/{path}", json=fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == list(fields)[1] and used in error["message"].split()


def test_harmless_fields_are_ignored(client: openai.OpenAI) -> None:
    fields = {"user": "me", "tools": [], "frequency_penalty": 0, "store": False, "service_tier": "auto"}
    assert call_chat(client, **fields, extra_body={"nonsense": {"deep": [1]}}).choices


def test_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        call_chat(client, model="gpt-4")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


def test_too_long_prompt_is_refused_and_too_long_answer_is_cut() -> None:
    engine = make_engine(slots=1, family="gpt2")  # 96 positions
    with serving(engine) as running, running.client() as client:
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model=MODEL, prompt="a" * 100, max_tokens=1)
        assert error.value.code == "context_length_exceeded"
        reply = client.completions.create(model=MODEL, prompt="a" * 90, max_tokens=60)
        assert reply.usage.completion_tokens < 10 and reply.choices[0].finish_reason == "length"
    with serving(max_prompt_tokens=10) as running, running.client() as client:
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model=MODEL, prompt="a" * 100, max_tokens=1)
        assert error.value.code == "context_length_exceeded"
