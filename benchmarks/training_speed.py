"""Training speed on a GPU: fastweights train against Hugging Face's Trainer, and several runs at a time.

    python benchmarks/training_speed.py [--model SmolLM2.gguf] [--pieces distill transfer …] [-o FILE]

Each piece runs what `fastweights train` runs, on random tokens in documents of random lengths, and takes the time
between the steps that its display shows. Some further steps are profiled: which kernels take the most time, and for
which share of the time the GPU works. Every piece is written to the result as soon as it is measured; a piece that is
in the result already is replaced. Without --model, the model has the shape of SmolLM2-135M and random weights.
--tiny tries the script: another model, few steps, also on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import fastweights as fw
from fastweights.data.batches import PackedBatches
from fastweights.data.token_files import TokenFile, prepare
from fastweights.loading import load, load_tokenizer
from fastweights.training.recipe import Recipe
from fastweights.training.trainer import TrainConfig, train
from fastweights.utils.progress import Display
from fastweights.utils.provenance import write_result

SMOLLM2 = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
SMOLLM2 |= dict(num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True)
TINY = dict(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
TINY |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True)
# Mean tokens of a document; more tokens than a short run reads.
DOCUMENT_TOKENS, TEXT_TOKENS = 600, 2**23
PROFILED_STEPS, TOP_KERNELS = 3, 40
JOBS = (1, 2, 4)
# Seconds that jobs wait for each other before all of them measure.
PATIENCE = 300


@dataclass(frozen=True)
class Setting:
    """What is measured at: sequences of a step, their length, and the steps before and while the time is taken."""

    rows: int
    length: int
    warm_up: int
    steps: int
    compiled: bool
    device: str


class Enough(Exception):
    """All steps that were needed are made."""


class Stopwatch(Display):
    """Takes the time of steps, and profiles some after them.

    Args:
        setting: How many steps.
        profiled: Whether to profile.
        ready: Called after the warm-up.
    """

    def __init__(self, setting: Setting, profiled: bool = True, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(enabled=False)
        self.setting, self.profiled, self.ready = setting, profiled, ready
        self.times: list[float] = []
        self.losses: list[float] = []
        self.profile: dict[str, Any] | None = None
        self._count, self._profiler = 0, None

    def step(self, loss: float, tokens: int) -> None:
        super().step(loss, tokens)
        self.add(loss)

    def at_edge(self) -> bool:
        """Whether the next step is the last one before the time is taken, or while it is."""
        return self._count + 1 - self.setting.warm_up in (0, self.setting.steps)

    def add(self, loss: float | None) -> None:
        self._count += 1
        if loss is not None:
            self.losses.append(loss)
        measured = self._count - self.setting.warm_up
        if measured == 0:
            self.ready()
        if 0 <= measured <= self.setting.steps:
            self.times.append(time.perf_counter())
        if measured == self.setting.steps:
            if not self.profiled:
                raise Enough
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        if self._profiler is not None and measured == self.setting.steps + PROFILED_STEPS:
            if self.setting.device == "cuda":
                torch.cuda.synchronize()
            self._profiler.stop()
            self.profile = summary(self._profiler)
            raise Enough

    def result(self) -> dict[str, Any]:
        steps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        tokens = self.setting.rows * self.setting.length
        return {
            "tokens/s": tokens * len(steps) / (self.times[-1] - self.times[0]),
            "ms a step": 1e3 * statistics.median(steps),
            "tokens a step": tokens,
            "steps": len(steps),
            "first losses": self.losses[:3],
            **memory(self.setting.device),
            **({} if self.profile is None else {"profile": self.profile}),
        }


def memory(device: str) -> dict[str, float]:
    return {"peak GiB": torch.cuda.max_memory_allocated() / 2**30} if device == "cuda" else {}


def summary(profiler: Any) -> dict[str, Any]:
    """The kernels (on a CPU: the operators) that took the most time, and the share of the time in which one ran."""
    kernels, spans = defaultdict[str, list[float]](list), []
    on_gpu = (e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    events = [e for e in on_gpu if not e.is_user_annotation]  # such as the optimizer's, which covers the gaps, too
    for event in events or profiler.events():
        spans.append((event.time_range.start, event.time_range.end))
        kernels[event.name].append(event.time_range.elapsed_us() if events else event.self_cpu_time_total)
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    busy, reached = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    top = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:TOP_KERNELS]
    shown = [{"name": k[:120], "ms a step": sum(v) / PROFILED_STEPS / 1e3, "calls": len(v)} for k, v in top]
    return {
        "ms a step": whole / PROFILED_STEPS / 1e3,
        "busy share": busy / whole if events else None,
        "kernels a step": len(events) / PROFILED_STEPS,
        "top": shown,
    }


def make_models(folder: Path, source: str | None, tiny: bool) -> tuple[Path, Path]:
    """Save the base and the converted model."""
    if source is None:
        torch.manual_seed(0)
        base = LlamaForCausalLM(LlamaConfig(**(TINY if tiny else SMOLLM2)))
        vocabulary = {f"t{i}": i for i in range(base.config.vocab_size)}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="t0")))
    else:
        base, tokenizer = load(source), load_tokenizer(source)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    converted = fw.convert(AutoModelForCausalLM.from_pretrained(folder / "base"))
    converted.config.fastweights_base = str(folder / "base")
    converted.save_pretrained(folder / "converted")
    tokenizer.save_pretrained(folder / "converted")
    return folder / "base", folder / "converted"


def make_text(folder: Path, vocabulary: int, tokens: int) -> Path:
    """A folder of random tokens, as `prepare` makes it from text."""
    draw = np.random.default_rng(0)
    lengths = np.maximum(1, draw.exponential(DOCUMENT_TOKENS, size=2 * tokens // DOCUMENT_TOKENS).astype(np.int64))
    starts = np.cumsum([0, *lengths])
    starts = starts[starts < tokens]
    folder.mkdir()
    draw.integers(0, vocabulary, tokens, dtype=np.uint16).tofile(folder / "tokens.bin")
    np.save(folder / "starts.npy", starts)
    meta = {"tokens": tokens, "documents": len(starts), "dtype": "uint16", "source": "random"}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def measure_train(
    model: Path, text: Path, loss: str, setting: Setting, watch: Stopwatch, share: float, **more: Any
) -> None:
    """Run `train` until the stopwatch has seen enough."""
    stage = dict(loss=loss, tokens=10**9, learning_rate=1e-4, fit="none")
    stage |= dict(cross_entropy=0.3) if loss == "distill" else {}
    recipe = Recipe.from_dict(
        dict(
            stages=[stage],
            length=setting.length,
            batch_tokens=setting.rows * setting.length,
            compile=setting.compiled,
            checkpoint_every=10**9,
            **more,
        )
    )
    config = TrainConfig(str(model), str(text), recipe, device=setting.device, memory_share=share)
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(config, Path(folder) / "run", display=watch)
        except Enough:
            return


class Rows(torch.utils.data.Dataset):
    """The rows that `train` reads, in memory, for Hugging Face's Trainer, which does not separate their documents."""

    def __init__(self, tokens: TokenFile, setting: Setting) -> None:
        batches = PackedBatches(tokens, setting.length, setting.rows)
        steps = setting.warm_up + setting.steps + PROFILED_STEPS
        read = [batches.batch(step) for step in range(steps)]
        self.rows = {name: torch.cat([batch[name] for batch in read]) for name in ("input_ids", "labels")}

    def __len__(self) -> int:
        return len(self.rows["input_ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: rows[index] for name, rows in self.rows.items()}


class Watching(TrainerCallback):
    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.watch.setting.device == "cuda" and self.watch.at_edge():
            torch.cuda.synchronize()  # so that the whole time is that of the GPU
        self.watch.add(None)


def measure_hugging_face(model: Path, text: Path, setting: Setting, watch: Stopwatch) -> None:
    tokens = prepare(text, load_tokenizer(model), progress=False)
    on_gpu = setting.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=setting.rows,
            max_steps=10**6,
            learning_rate=1e-4,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            torch_compile=setting.compiled,
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            dataloader_num_workers=2 if on_gpu else 0,
            dataloader_pin_memory=on_gpu,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        base = AutoModelForCausalLM.from_pretrained(model)
        trainer = Trainer(base, arguments, train_dataset=Rows(tokens, setting), callbacks=[Watching(watch)])
        try:
            trainer.train()
        except Enough:
            return


def wait_for_others(folder: Path, number: int, count: int) -> None:
    (folder / f"ready-{number}").touch()
    ends = time.monotonic() + PATIENCE
    while len(list(folder.glob("ready-*"))) < count and time.monotonic() < ends:
        time.sleep(0.01)


def measure_jobs(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """Distillation in several processes at once. They start to measure together."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--work", str(options.work), "--device", options.device]
        command += ["--tiny"] if options.tiny else []
        command += ["--compile", options.compile, "--steps", str(options.steps), "--rows", str(options.rows)]
        jobs = [
            subprocess.Popen([*command, "--job", str(n), "--of", str(count), "--meet", name], stderr=subprocess.DEVNULL)
            for n in range(count)
        ]
        codes = [job.wait() for job in jobs]
        if any(codes):
            return {"error": f"exit codes {codes}"}
        each = [json.loads((folder / f"result-{n}.json").read_text())["tokens/s"] for n in range(count)]
    return {"jobs": count, "tokens/s": sum(each), "tokens/s of each": each}


def run_job(options: argparse.Namespace, setting: Setting) -> None:
    folder = Path(options.meet)
    watch = Stopwatch(setting, False, lambda: wait_for_others(folder, options.job, options.of))
    converted, text = options.work / "converted", options.work / "text"
    measure_train(converted, text, "distill", setting, watch, 1 / options.of)
    (folder / f"result-{options.job}.json").write_text(json.dumps(watch.result()))


def pieces(options: argparse.Namespace, setting: Setting) -> dict[str, Callable[[], dict[str, Any]]]:
    """What can be measured, by name."""
    base, converted, text = (options.work / name for name in ("base", "converted", "text"))

    def timed(run: Callable[[Stopwatch], None]) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            if setting.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            watch = Stopwatch(setting)
            run(watch)
            return watch.result()

        return measure

    def with_train(model: Path, loss: str, **more: Any) -> Callable[[], dict[str, Any]]:
        return timed(lambda watch: measure_train(model, text, loss, setting, watch, 1.0, **more))

    stages = {"distill": converted, "transfer": converted, "finetune": base}
    return {
        **{name: with_train(model, name) for name, model in stages.items()},
        **{f"{name}, CUDA graphs": with_train(model, name, cuda_graphs=True) for name, model in stages.items()},
        "Hugging Face's Trainer": timed(lambda watch: measure_hugging_face(base, text, setting, watch)),
        **{f"{count} jobs": (lambda count=count: measure_jobs(options, count)) for count in JOBS},
    }


def print_table(measured: dict[str, Any]) -> None:
    print(f"{'':26}{'tokens/s':>12}{'ms a step':>11}{'GPU busy':>10}")
    for name, found in measured.items():
        busy = (found.get("profile") or {}).get("busy share")
        shown = "–" if busy is None else f"{busy:.0%}"
        if "error" in found:
            print(f"{name:26}{found['error']}")
        else:
            print(f"{name:26}{found['tokens/s']:>12,.0f}{found.get('ms a step', float('nan')):>11.1f}{shown:>10}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="The base: a GGUF file or a folder.")
    parser.add_argument("--work", type=Path, help="Folder for the models; by default a temporary one.")
    # Not --only: torch.compile takes the word after it for the name of a model, and the apostrophe in one of these ends
    # a string in the code that it writes.
    parser.add_argument("--pieces", nargs="+", help="Pieces to measure; by default all.")
    parser.add_argument("--rows", type=int, default=64, help="Sequences of a step.")
    parser.add_argument("--steps", type=int, default=40, help="Steps to take the time of.")
    parser.add_argument("--compile", choices=("yes", "no"), default="yes", help="Whether blocks are compiled.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="Try the script: a tiny model, few steps.")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/training_speed.json"))
    for name in ("--job", "--of", "--meet"):
        parser.add_argument(name, type=str if name == "--meet" else int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.tiny:
        options.rows, options.steps = 4, min(options.steps, 4)
    compiled = options.compile == "yes" and options.device == "cuda"
    shape = dict(length=64, warm_up=2) if options.tiny else dict(length=1024, warm_up=12)
    setting = Setting(options.rows, steps=options.steps, compiled=compiled, device=options.device, **shape)
    if options.job is not None:
        run_job(options, setting)
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.work = options.work or Path(temporary)
        if not (options.work / "text").is_dir():
            options.work.mkdir(parents=True, exist_ok=True)
            base, _ = make_models(options.work, options.model, options.tiny)
            vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
            make_text(options.work / "text", min(vocabulary, 2**16), 2**14 if options.tiny else TEXT_TOKENS)
        found = json.loads(options.output.read_text()) if options.output.is_file() else {}
        measured: dict[str, Any] = found.get("measured", {})
        known = pieces(options, setting)
        for name in options.pieces or known:
            measured[name] = known[name]()
            settings = dict(vars(setting), model=options.model or "random weights", tiny=options.tiny)
            tokens = setting.rows * setting.length * setting.steps  # of each piece, while the time is taken
            write_result(options.output, {"seed": 0, "tokens": tokens, "settings": settings, "measured": measured})
            print_table({name: measured[name]})
    print_table(measured)


if __name__ == "__main__":
    main()
