"""How should a window be combined with the rule, and from which start? Convert to decay with a window and train each
layer on its teacher's attention output (attention transfer); print held-out perplexities and write JSON.
Shares: y = (1 - a) rule + a window, a in (0, 1) learned. Sums: y = rule + w window, w learned.

    python benchmarks/window_mix.py MODEL --text TEXT_FILE [--tokens 2000000] [--out results/window_mix.json]
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fastweights as fw
from fastweights.loading import load, load_tokenizer
from fastweights.training.losses import capture_attention, layer_output, sequence_info
from fastweights.utils.provenance import write_result

HELD_OUT_SHARE = 0.05


class Share(torch.nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.logit = torch.nn.Parameter(torch.tensor(math.log(start / (1 - start))))

    def share(self) -> Tensor:
        return self.logit.sigmoid()

    def forward(self, from_rule: Tensor, from_window: Tensor, _: Tensor) -> Tensor:
        return torch.lerp(from_rule.float(), from_window.float(), self.share())


class Sum(torch.nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(start))

    def share(self) -> Tensor:
        return self.weight

    def forward(self, from_rule: Tensor, from_window: Tensor, _: Tensor) -> Tensor:
        return from_rule.float() + self.weight * from_window.float()


def values(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--m", type=int, default=32)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--sums", default="0,0.5,1")
    parser.add_argument("--shares", default="0.5,0.9,0.98")
    parser.add_argument("--only", help="names of variants, separated by semicolons")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="results/window_mix.json")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = load(options.model, dtype=torch.float32).eval().to(device)
    train, held_out = read_tokens(options, load_tokenizer(options.model))
    common = dict(m=options.m, gate_init="log", train_length=options.length, seed=options.seed)
    decay = dict(rule="decay", **common)
    windowed = decay | dict(window=options.window)
    variants: dict[str, tuple[dict, torch.nn.Module | None]] = {
        "window alone": (dict(rule="local", window=options.window, seed=options.seed), None),
        **{f"share from {a}": (windowed, Share(a)) for a in values(options.shares)},
        **{f"sum from {w}": (windowed, Sum(w)) for w in values(options.sums)},
        "decay alone": (decay, None),
        "decay alone, output norm": (decay | dict(output_norm=True), None),
        "share from 0.5, output norm": (windowed | dict(output_norm=True), Share(0.5)),
    }
    if options.only:
        variants = {name: variant for name, variant in variants.items() if name in options.only.split(";")}
    result: dict[str, Any] = {
        "what": "held-out perplexity after conversion and after attention transfer, by start of the window's mix",
        "settings": vars(options) | {"model": str(options.model).split("/")[-1], "text": options.text.split("/")[-1]},
        "base": perplexity(teacher, held_out, device),
        "runs": {},
    }
    print(f"base: {result['base']:.2f}", flush=True)
    for name, (settings, mix) in variants.items():
        result["runs"][name] = run(teacher, settings, mix, train, held_out, options, device)
        write_result(options.out, result)
        print(f"{name}: {result['runs'][name]}", flush=True)


def read_tokens(options: argparse.Namespace, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Rows of `length` tokens for training and for measuring."""
    with open(options.text, encoding="utf-8") as file:
        text = file.read(int(options.tokens * 6 / (1 - HELD_OUT_SHARE)))
    ids = torch.tensor(tokenizer(text.replace("<|endoftext|>", ""), verbose=False)["input_ids"])
    rows = ids[: len(ids) // options.length * options.length].view(-1, options.length)
    held_out = max(1, min(64, int(len(rows) * HELD_OUT_SHARE)))
    return rows[:-held_out], rows[-held_out:]


@torch.no_grad()
def perplexity(model: Any, rows: Tensor, device: str) -> float:
    losses = [model(batch.to(device), labels=batch.to(device), use_cache=False).loss.item() for batch in rows.split(8)]
    return math.exp(sum(losses) / len(losses))


def run(
    teacher: Any,
    settings: dict,
    mix: torch.nn.Module | None,
    train: Tensor,
    held_out: Tensor,
    options: Any,
    device: str,
) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    student = fw.convert(copy.deepcopy(teacher), fw.FastWeightsConfig(**settings))
    attentions = [student.family.attention_of(block) for block in student.family.blocks(student)]
    if mix is not None:
        for attention in attentions:
            attention.mix = copy.deepcopy(mix).to(device)
    measured: dict[str, Any] = {"after swap": perplexity(student, held_out, device)}
    steps, started = options.tokens // (options.batch * options.length), time.time()
    optimizer = torch.optim.AdamW([p for a in attentions for p in a.parameters()], options.learning_rate, (0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total_steps=steps + 1, pct_start=0.1
    )
    for step in range(steps):
        rows = train[torch.randint(len(train), (options.batch,), generator=torch.Generator().manual_seed(step))]
        transfer_step(teacher, attentions, rows.to(device), device)
        torch.nn.utils.clip_grad_norm_([p for a in attentions for p in a.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step + 1 in (steps // 4, steps // 2, steps):
            measured[f"after {(step + 1) * rows.numel()} tokens"] = perplexity(student, held_out, device)
    if mix is not None:
        mixes = torch.stack([attention.mix.share().detach() for attention in attentions])
        measured["window at the end"] = {
            "mean": mixes.mean().item(),
            "min": mixes.min().item(),
            "max": mixes.max().item(),
        }
    return measured | {"seconds": time.time() - started}


def transfer_step(teacher: Any, attentions: list, rows: Tensor, device: str) -> None:
    """Each layer gets its teacher's input and is drawn to the teacher's output."""
    batch = {"input_ids": rows, "position_ids": torch.arange(rows.shape[1], device=device).expand_as(rows)}
    with torch.autocast(device, torch.bfloat16):
        captured = capture_attention(teacher, batch)
    for index, attention in enumerate(attentions):
        with torch.autocast(device, torch.bfloat16):
            output = layer_output(attention, captured[index], sequence_info(batch))
        target = captured[index].output.float()
        (F.mse_loss(output.float(), target) / target.square().mean()).backward()


if __name__ == "__main__":
    main()
