"""The models of benchmarks/gpu.py, with random weights: GPT-2 small in training, SmolLM2-135M's shape in generation."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import peers
import torch
from measure import (
    MIB,
    Settings,
    copy_bandwidth,
    first_line,
    freed,
    milliseconds,
    relative_error,
    stamp,
    synchronize,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import fastweights as fw
from fastweights import ops
from fastweights.decode.engine import Engine
from fastweights.decode.prefill import prefill

M = 32
WARM_UP_STEPS, TIMED_STEPS = 3, 10
# Of logits in bfloat16 arithmetic, between two backends.
LOGITS_LIMIT = 3e-2
LEARNING_RATE = 3e-4
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
TINY_GPT2 = dict(n_embd=32, n_layer=2, n_head=2, vocab_size=128, n_positions=64)

SMOLLM2_135M = dict(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
TINY_LLAMA = SMOLLM2_135M | dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, vocab_size=128)
TINY_LLAMA |= dict(num_attention_heads=3, num_key_value_heads=1)
BATCHES, CONTEXTS = (1, 32, 256), (1024, 16384, 65536)
# The one that is asked for first; the others as far as the time goes.
ATTENTION_CASES = [(32, 16384), (1, 65536), (1, 16384), (1, 1024)]
ATTENTION_SECONDS = 40
SKIPPED_TOKENS, TIMED_TOKENS = 8, 64
CHECKED_PROMPT, CHECKED_TOKENS = 48, 24
BELOW_LIMIT = 0.2


def random_model(config: Any, converted: bool, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    # convert changes the configuration as well
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa", dtype=dtype)
    return (fw.convert(model, fw.FastWeightsConfig(rule="decay", m=M)) if converted else model).to(device)


def training(settings: Settings) -> Iterator[dict[str, Any]]:
    """Steps of GPT-2 small as train.py makes them: float32 weights, bfloat16 autocast, compiled, fused AdamW."""
    batch, length = (2, 64) if settings.small else (32, 1024)
    config = GPT2Config(**NO_DROPOUT | (TINY_GPT2 if settings.small else {}))
    result: dict[str, Any] = {
        "model": "GPT-2 small, random weights, no dropout",
        "arithmetic": "float32 weights, bfloat16 autocast; torch.compile; AdamW, fused on a GPU",
        "batch": batch,
        "length": length,
        "steps": TIMED_STEPS,
        "models": {},
    }
    for name in ("attention", "decay"):
        with freed(settings.device):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            try:
                model = random_model(config, name == "decay", settings.device, torch.float32).train()
                ids = torch.randint(config.vocab_size, (batch, length), device=settings.device)
                found = checked(model, ids[:2], settings) if name == "decay" else {"passed": True}
                if found["passed"]:
                    found |= train_steps(model, ids, settings)
                del model
            except Exception as error:
                found = {"passed": False, "error": first_line(error)}
        result["models"][name] = found
        yield result


def checked(model: Any, ids: Tensor, settings: Settings) -> dict[str, Any]:
    """The logits with the backend that the model is going to be timed with, against the chunked form in float32."""
    with torch.no_grad():
        with ops.use_backend("chunked"):
            expected = model(ids, use_cache=False).logits
        with torch.autocast(settings.device, torch.bfloat16):
            error = relative_error(model(ids, use_cache=False).logits, expected)
    return {"error of logits": error, "passed": error <= LOGITS_LIMIT}


def train_steps(model: Any, ids: Tensor, settings: Settings) -> dict[str, Any]:
    model.loss_type = "ForCausalLM"  # the default, but transformers would log it, which breaks the graph
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=settings.on_gpu)
    model.compile()

    def step() -> None:
        with torch.autocast(settings.device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    started = time.perf_counter()
    step()
    synchronize(settings.device)
    compile_seconds = time.perf_counter() - started
    for _ in range(WARM_UP_STEPS):
        step()
    if settings.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    spent = stamped(step, TIMED_STEPS, settings.device)
    counters = torch._dynamo.utils.counters
    return {
        "tokens/s": 1e3 * ids.numel() / statistics.median(spent),
        "ms a step": {"median": statistics.median(spent), "least": min(spent), "most": max(spent)},
        "peak MiB": torch.cuda.max_memory_allocated() / MIB if settings.on_gpu else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first step seconds": compile_seconds,
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": [reason.splitlines()[0] for reason in counters["graph_break"]],
    }


def stamped(step: Callable[[], Any], count: int, device: str) -> list[float]:
    """Milliseconds of each of some steps on end."""
    stamps = [stamp(device)]
    for _ in range(count):
        step()
        stamps.append(stamp(device))
    synchronize(device)
    return [milliseconds(a, b) for a, b in pairwise(stamps)]


def decode(settings: Settings) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step, beside the time to read the weights and to read and write the state, and attention's."""
    config = LlamaConfig(**(TINY_LLAMA if settings.small else SMOLLM2_135M))
    batches, contexts = ((1, 3), (16, 40)) if settings.small else (BATCHES, CONTEXTS)
    with freed(settings.device):
        bandwidth = copy_bandwidth(settings.device)
    model = random_model(config, True, settings.device, torch.bfloat16).eval()
    result: dict[str, Any] = {
        "model": "the shape of SmolLM2-135M, random weights in bfloat16",
        "decay is": "fastweights.Engine.generate, greedy; m = 32; all slots continue from one prompt's state",
        "attention is": "generate of transformers with a static cache, its own compiled steps, greedy",
        "copy bytes/s": bandwidth,
        "weight bytes": sum(p.nbytes for p in model.parameters()),
        **checked_engine(model, config.vocab_size, settings),
        "decay": [],
        "attention": [],
    }
    yield result
    if result["passed"]:
        for row in decay_steps(model, batches, contexts, settings):
            floor = 1e3 * (result["weight bytes"] + 2 * row.get("state bytes", 0)) / bandwidth
            ratio = {"floor ms": floor, "times the floor": row["ms"] / floor} if "ms" in row else {}
            result["decay"].append(row | ratio)
            yield result
    del model
    for row in attention_steps(config, settings):
        result["attention"].append(row)
        yield result


def checked_engine(model: Any, vocabulary: int, settings: Settings) -> dict[str, Any]:
    """Whether the engine's tokens are the likeliest to the model, read at once in the chunked form. Two tokens can be
    equally likely but for rounding, so what counts is how far below the likeliest they are, in standard deviations."""
    prompts = torch.randint(vocabulary, (2, CHECKED_PROMPT))
    new = torch.tensor(Engine(model, 2).generate(list(prompts), CHECKED_TOKENS, stop_tokens=()))
    text = torch.cat([prompts, new], dim=1).to(settings.device)
    with torch.no_grad(), ops.use_backend("chunked"):
        logits = model(text[:, :-1], use_cache=False).logits[:, -CHECKED_TOKENS:].float()
    chosen = logits.gather(-1, text[:, -CHECKED_TOKENS:, None])[..., 0]
    below = float(((logits.amax(-1) - chosen) / logits.std(-1)).max())
    return {"tokens below the likeliest, sd": below, "passed": below <= BELOW_LIMIT}


def decay_steps(model: Any, batches: Any, contexts: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    engines: dict[int, Engine] = {}
    for context in contexts:
        ids = torch.randint(model.config.vocab_size, (context,))
        _, state = prefill(model, ids[:-1])
        for batch in batches:
            row = {"batch": batch, "context": context}
            try:
                if batch not in engines:
                    engines[batch] = Engine(model, batch)
                yield row | engine_times(engines[batch], ids, state, batch, settings)
            except Exception as error:
                yield row | {"error": first_line(error)}


def engine_times(engine: Engine, ids: Tensor, state: Any, batch: int, settings: Settings) -> dict[str, Any]:
    """Of generate by the host's clock, and of its step alone; each slot reads the prompt's last token itself."""
    arrived: list[float] = []
    engine.generate(
        [ids[-1:]] * batch,
        SKIPPED_TOKENS + TIMED_TOKENS,
        stop_tokens=(),
        on_token=lambda i, _: arrived.append(time.perf_counter()) if i == 0 else None,
        states=[state.fork() for _ in range(batch)],
    )
    spent = [1e3 * (b - a) for a, b in pairwise(arrived[-TIMED_TOKENS - 1 :])]
    ms = statistics.median(spent)
    alone = statistics.median(stamped(engine.step, TIMED_TOKENS, settings.device))
    return {"ms": ms, "step alone ms": alone, "tokens/s": 1e3 * batch / ms, "state bytes": batch * state.nbytes}


def attention_steps(config: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    for batch, context in [(3, 40), (1, 16)] if settings.small else ATTENTION_CASES:
        row = {"batch": batch, "context": context}
        if settings.time_left() < ATTENTION_SECONDS:
            yield row | {"error": "left out: the time for this part was up"}
            continue
        with freed(settings.device):
            try:
                found = peers.attention_step(config, batch, context, settings)
                yield row | found | {"tokens/s": 1e3 * batch / found["ms"]}
            except Exception as error:
                yield row | {"error": first_line(error)}
