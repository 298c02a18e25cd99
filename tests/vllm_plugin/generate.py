"""Generate with vLLM and with this package's engine. vLLM changes settings of its whole process and warns a lot, so
this is a program of its own: `python -m vllm_plugin.generate FOLDER OUT` saves models in FOLDER and writes results as
JSON."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers.tiny import depend_on_input, pretrained, tokens

import fastweights as fw

NEW_TOKENS, LENGTH = 20, 96
# More prompts than sequences at a time, so that pages are used again; the shortest has no state to start from.
LENGTHS, SEQUENCES = (1, 5, 17, 40, 9), 3
# vLLM's attention on a CPU has no heads of fewer than 32 elements.
WIDE_HEADS = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_hidden_layers=3)
WINDOW = dict(m=8, window=5, sinks=2, mix="token")


@dataclass(frozen=True)
class Case:
    """A converted model, options of vLLM, and the sizes of the base model that differ from the tiny one's."""

    family: str
    settings: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("llama", dict(m=8, gate_init="log")),
    "bfloat16": Case("llama", WINDOW, dict(dtype="bfloat16")),
    "window and sinks, prompts in parts": Case("llama", WINDOW, dict(max_num_batched_tokens=16)),
    "window and sinks, prefixes cached": Case("llama", WINDOW, dict(enable_prefix_caching=True, block_size=16)),
    "shared projections": Case("llama", WINDOW | dict(rule="gated_delta", projections="shared", gate_rank=4)),
    "windows of two widths": Case("gemma3_text", dict(rule="local", window=12), {}, dict(num_hidden_layers=6)),
    "layer types in the config": Case("qwen3", dict(m=8, rule="gated_delta")),
    "learned positions and a normalizer": Case("gpt2", dict(m=8, rule="delta", normalize="attention+sum")),
    "hybrid": Case("llama", dict(m=8, layers=[0, 2]), {}, WIDE_HEADS),
}
REFUSED = {
    "tensor_parallel_size": dict(tensor_parallel_size=2),
    "quantization": dict(quantization="fp8"),
    "rope_type": dict(
        hf_overrides=dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)),
    ),
    "speculative_config": dict(speculative_config=dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)),
}


def save(case: Case, folder: Path) -> Any:
    """Convert and save a case's model."""
    model = fw.convert(pretrained(case.family, **case.sizes), fw.FastWeightsConfig(**case.settings))
    depend_on_input(model)
    model.to(getattr(torch, case.options.get("dtype", "float32"))).save_pretrained(folder)
    return model


def start(folder: Path, **options: Any) -> Any:
    """vLLM with a saved model."""
    from vllm import LLM

    fixed = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=LENGTH, max_num_seqs=SEQUENCES)
    return LLM(str(folder), **fixed | dict(dtype="float32", enable_prefix_caching=False) | options)


def from_vllm(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Greedy tokens of each prompt, their log probabilities, and how many tokens of prompts were in vLLM's cache."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=1, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    chosen = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(each.token_ids) for each in chosen],
        "log_probabilities": [
            [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)] for each in chosen
        ],
        "cached": sum(output.num_cached_tokens or 0 for output in outputs),
    }


@torch.no_grad()
def log_probabilities(model: Any, prompt: list[int], new: list[int]) -> list[float]:
    """The log probabilities of the tokens after a prompt, from one pass over all of them."""
    logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(new)[:, None])[:, 0].tolist()


def run(case: Case, folder: Path) -> dict[str, Any]:
    """What vLLM gives for a case, twice, the second time with what it has cached; and what it should give."""
    model, prompts = save(case, folder), [tokens(1, n, seed=n)[0].tolist() for n in LENGTHS]
    llm = start(folder, **case.options)
    found, again = from_vllm(llm, prompts), from_vllm(llm, prompts)
    engine = fw.Engine(model, batch_size=SEQUENCES, max_length=LENGTH)
    return {
        "vllm": found,
        "again": again,
        "engine_tokens": engine.generate([torch.tensor(prompt) for prompt in prompts], NEW_TOKENS, stop_tokens=()),
        "log_probabilities": [
            log_probabilities(model, prompt, new) for prompt, new in zip(prompts, found["tokens"], strict=True)
        ],
    }


def refusal(folder: Path, options: dict[str, Any]) -> str:
    """The message with which vLLM refuses to start."""
    try:
        start(folder, **options)
    except ValueError as error:
        return str(error)
    return ""


def main(folder: Path, out: Path) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    results: dict[str, Any] = {}
    for i, (name, case) in enumerate(CASES.items()):
        results[name] = run(case, folder / str(i))
        gc.collect()
        cleanup_dist_env_and_memory()
    results["refused"] = {setting: refusal(folder / "0", options) for setting, options in REFUSED.items()}
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
