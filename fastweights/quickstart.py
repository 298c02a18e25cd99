"""The quickstart: convert a small model in front of the user and measure what that changes.

The model is a GPT-2 with random weights, so its text is noise; times and sizes are real.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import track
from rich.table import Column, Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from fastweights.cache import FastWeightsCache
from fastweights.config import FastWeightsConfig
from fastweights.convert import convert, save
from fastweights.provenance import write_result

LENGTHS = (256, 1024, 4096, 16384)
TIMED_TOKENS = 16
PROMPT = "Every new token costs the same"


def run(folder: Path, console: Console) -> dict[int, dict[str, dict[str, float]]]:
    """Convert, save, load, generate, measure; returns seconds and bytes by length and model."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    base = GPT2LMHeadModel(
        GPT2Config(
            n_layer=6, n_head=6, n_embd=384, vocab_size=len(tokenizer), n_positions=LENGTHS[-1] + TIMED_TOKENS + 1
        )
    ).eval()
    settings = FastWeightsConfig(rule="decay", m=32)
    console.print(f"[bold]1.[/] a GPT-2 with random weights: {base.num_parameters():,} parameters, softmax attention")
    save(base, folder / "base", tokenizer, overwrite=True)
    save(
        convert(AutoModelForCausalLM.from_pretrained(folder / "base"), settings),
        folder / "decay",
        tokenizer,
        overwrite=True,
    )
    converted = AutoModelForCausalLM.from_pretrained(folder / "decay").eval()
    console.print(f"[bold]2.[/] fast weights in its place (decay, m = 32): saved in {folder / 'decay'}")
    console.print("[bold]3.[/] both continue a prompt (random weights: noise)")
    for name, model in (("attention", base), ("decay", converted)):
        console.print(f"   {name:9}", repr(sample(model, tokenizer)), markup=False, highlight=False)
    console.print("[bold]4.[/] one more token after a text of this many:")
    measured = {}
    for length in track(LENGTHS, "   measuring", console=console, transient=True):
        measured[length] = {"attention": measure(base, length), "decay": measure(converted, length)}
    console.print(table(measured))
    what = "median seconds of one token after a text, and bytes kept of it, on a GPT-2 with random weights"
    write_result(folder / "result.json", {"what": what, "seed": 0, "tokens": TIMED_TOKENS, "measured": measured})
    return measured


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sample(model: Any, tokenizer: Any) -> str:
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    torch.manual_seed(0)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=True, pad_token_id=0)
    return tokenizer.decode(made[0])


@torch.no_grad()
def measure(model: Any, length: int) -> dict[str, float]:
    """Median seconds of a token after `length` others, and the bytes the model keeps of them."""
    cache: Any = None
    for piece in torch.zeros(1, length, dtype=torch.long).split(1024, dim=1):
        cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    size = cache.nbytes if isinstance(cache, FastWeightsCache) else kv_bytes(cache)
    seconds = []
    for _ in range(TIMED_TOKENS):
        began = time.perf_counter()
        model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
        seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds), "bytes": size}


def kv_bytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def table(measured: dict[int, dict[str, dict[str, float]]]) -> Table:
    headers = ("tokens", "attention: time", "memory", "decay: time", "memory")
    shown = Table(*(Column(header, justify="right") for header in headers), box=None)
    for length, models_ in measured.items():
        cells = [
            text
            for name in ("attention", "decay")
            for text in (f"{1e3 * models_[name]['seconds']:.1f} ms", decimal(int(models_[name]["bytes"])))
        ]
        shown.add_row(f"{length:,}", *cells)
    return shown
