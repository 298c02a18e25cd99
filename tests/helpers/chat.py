"""A tokenizer with special tokens for turns, and chat templates of real models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from helpers.tiny import VOCAB

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABHILMNSTUY []/<>.,:!?'\n012345"

# SmolLM2-Instruct's.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Gemma 2's: writes <bos>, calls the assistant "model", trims messages and refuses a system prompt.
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<|im_start|>' + role + '\n' + message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>model\n'}}{% endif %}"
)
# Llama 2's: the system prompt is inside the first message, and every turn has its own beginning and end of text.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def chat_tokenizer(template: str | None = CHATML) -> Any:
    """One token for each character, and special tokens, in a vocabulary as large as the tiny models'."""
    tokens = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *CHARACTERS]
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = Fuse()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    assert len(tokenizer) == VOCAB
    tokenizer.chat_template = template
    return tokenizer


def script(engine: Any, *answers: str) -> None:
    """Make an engine of one slot choose the tokens of these texts, instead of those that the model would choose."""
    chosen = iter([token for text in answers for token in engine.tokenizer(text, add_special_tokens=False).input_ids])
    engine.sampler.choose = lambda *_: torch.tensor([next(chosen)])


@contextmanager
def read_tokens(model: Any) -> Iterator[list[int]]:
    """The tokens that are fed to a model's own forward in the block. The steps of an engine do not use it."""
    found: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: found.extend(ids[0].flatten().tolist())
    )
    try:
        yield found
    finally:
        hook.remove()
