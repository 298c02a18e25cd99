"""Conversations: the chat template renders them, and the assistant's answers alone are scored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import CHARACTERS
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from fastweights.data.batches import IGNORED, PackedBatches, validation_rows
from fastweights.data.chat import ChatEncoder
from fastweights.data.readers import Chat, DataError, read_text
from fastweights.data.token_files import TokenFile, prepare
from fastweights.tokenization import bos_token, set_special_tokens

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' "
    "+ m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
)
# The system's message moves to the last question, so the rendering of the first turns is no prefix of the whole.
MISTRAL = (
    "{{ bos_token }}{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + (system + ' ' if loop.index0 >= "
    "messages | length - 2 else '') + m['content'] + '[/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] + '. ' + m['content'] + '\n' }}{% endfor %}"

# A question that says what an answer says, and an answer that says what the template does.
TURNS = [
    ("user", "Hi, who are you"),
    ("assistant", " I am a cat.\nMeow "),
    ("user", "assistant"),
    ("assistant", "assistant"),
    ("user", "Bye"),
]


def conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": 3, "messages": [{"role": role, "content": content} for role, content in turns]}


def chat_tokenizer(template: str | None, bos: bool = False) -> Any:
    """A token for each character, and the special tokens of some families."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer, backend.decoder = Split(Regex(r"[\s\S]"), "isolated"), Fuse()
    names = {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": SPECIAL[2:]}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)
    set_special_tokens(made, bos=bos, eos=False)
    return made


@pytest.mark.parametrize(
    ("template", "scored"),
    (
        (CHATML, [" I am a cat.\nMeow <|im_end|>", "assistant<|im_end|>"]),
        (MARKED, [" I am a cat.\nMeow <|im_end|>", "assistant<|im_end|>"]),
        (GEMMA, ["I am a cat.\nMeow<end_of_turn>", "assistant<end_of_turn>"]),
        (MISTRAL, [" I am a cat.\nMeow </s>", "assistant</s>"]),
        (PLAIN, [" I am a cat.\nMeow ", "assistant"]),
    ),
    ids=("chatml", "marked", "gemma", "mistral", "plain"),
)
def test_answers_and_their_end_tokens_are_scored(template: str, scored: list[str]) -> None:
    made = chat_tokenizer(template)
    turns = [("system", "Be brief"), *TURNS] if template in (CHATML, MISTRAL) else TURNS
    text, ids, found = ChatEncoder(made).encode(Chat(conversation(*turns)["messages"], "here"))
    assert made.decode(ids) == text
    assert made.decode(ids[found]) == "".join(scored)
    edges = np.diff(found.astype(int), prepend=0, append=0)
    assert (edges == 1).sum() == len(scored)


@pytest.mark.parametrize("expects", (True, False), ids=("bos", "no bos"))
@pytest.mark.parametrize("template", (CHATML, GEMMA), ids=("template without", "template with"))
def test_bos_is_there_once_where_template_or_model_ask_for_it(template: str, expects: bool) -> None:
    made = chat_tokenizer(template, bos=expects)
    assert bos_token(made) == (0 if expects else None)
    _, ids, scored = ChatEncoder(made).encode(Chat(conversation(*TURNS)["messages"], "here"))
    assert ids.tolist().count(0) == (1 if expects or template == GEMMA else 0)
    assert not scored[0] and (ids[0] == 0) == (0 in ids)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    return write(tmp_path / "chat.jsonl", conversation(*TURNS), conversation(*TURNS[:2]), conversation(*TURNS[2:]))


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def tokens_of(source: Any, made: Any = None, **arguments: Any) -> TokenFile:
    return prepare(source, chat_tokenizer(CHATML) if made is None else made, progress=False, **arguments)


@pytest.mark.parametrize("bos", (True, False), ids=("bos", "no bos"))
def test_only_answers_have_labels_and_targets_counts_them(source: Path, bos: bool) -> None:
    made = chat_tokenizer(CHATML, bos)
    tokens = tokens_of(source, made)
    assert len(tokens.starts) == 3 and tokens.scored is not None
    (row,) = validation_rows(tokens, len(tokens))["labels"].tolist()
    answers = " I am a cat.\nMeow <|im_end|>assistant<|im_end|>"
    assert made.decode([label for label in row if label != IGNORED]) == 2 * answers
    batches = PackedBatches(tokens, 16, rows=4)
    for step in range(5):
        assert batches.targets(step) == int((batches.batch(step)["labels"][:, 1:] != IGNORED).sum())


def test_tokens_are_cached_and_the_template_belongs_to_chats_only(source: Path, tmp_path: Path) -> None:
    first, again, other = (tokens_of(source, chat_tokenizer(template)) for template in (CHATML, CHATML, PLAIN))
    assert first.folder == again.folder != other.folder
    assert again.scored.tolist() == first.scored.tolist() and first.meta["scored"] == int(first.scored.sum())
    text = write(tmp_path / "text.jsonl", {"text": "Hello"})
    plain = [tokens_of(text, chat_tokenizer(template)) for template in (CHATML, None)]
    assert plain[0].folder == plain[1].folder and plain[0].scored is None


def test_damaged_scores_are_made_again_and_a_copied_folder_has_them(source: Path) -> None:
    made = tokens_of(source)
    expected, file = made.scored.tolist(), made.folder / "scored.bin"
    for damaged in (file.read_bytes()[:-1], bytes(len(expected))):
        file.write_bytes(damaged)
        assert tokens_of(source).scored.tolist() == expected
    assert tokens_of(made.folder).scored.tolist() == expected
    assert (
        tokens_of(made.folder, limit=70).scored.tolist() == expected[:70] == tokens_of(source, limit=70).scored.tolist()
    )


BAD = {
    "not messages": ({"messages": ["Hi"]}, ", line 2: messages, message 1: every message must be an object .* a str"),
    "no role": ({"messages": [{"content": "a"}]}, ", line 2: messages, message 1: .* role is missing"),
    "parts": ({"messages": [{"role": "user", "content": ["a"]}]}, ", line 2: .* content is a list"),
    "no messages": ({"messages": 3}, ", line 2: messages must be a list of messages, found a int"),
    "a string": ({"messages": "Hello"}, ", line 2: messages must be a list of messages, found a str"),
    "text": ({"text": "Hello"}, " has both text and conversations"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_conversation_is_named_with_its_line(name: str, source: Path) -> None:
    row, message = BAD[name]
    write(source, conversation(*TURNS), row)
    with pytest.raises(DataError, match=re.escape(str(source)) + message):
        tokens_of(source)


def test_conversations_that_cannot_be_learned_are_refused(source: Path, tmp_path: Path) -> None:
    line = re.escape(f"{source}, line 1")
    with pytest.raises(DataError, match=f"{line} is a conversation, and the tokenizer has no chat template: use the"):
        tokens_of(source, chat_tokenizer(None))
    with pytest.raises(DataError, match=f"{line}: the assistant's answers cannot be found .*generation"):
        tokens_of(source, chat_tokenizer(CHATML.replace("m['content']", "m['content'] | upper")))
    with pytest.raises(DataError, match=f"{line} is a conversation, which only training reads"):
        read_text(source)
    write(source, conversation(("system", "Be brief"), *TURNS))
    with pytest.raises(DataError, match=f"{line}: the chat template cannot render .*: System role not supported"):
        tokens_of(source, chat_tokenizer(GEMMA))
    write(source, conversation(TURNS[0]))
    with pytest.raises(DataError, match=r"chat.jsonl has no answers to learn: no message .* the role 'assistant'"):
        tokens_of(source)


def test_rows_without_answers_cannot_validate(source: Path) -> None:
    tokens = tokens_of(source)
    with pytest.raises(DataError, match="no answer of the assistant is in the tokens"):
        validation_rows(tokens, 8, limit_tokens=16)
