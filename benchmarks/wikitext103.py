"""The paper's Table 3 at a small size: a language model with adaptive input on text in WikiText's tokenisation,
converted under several rules, and scored on WikiText-103's validation and test sets.

    python benchmarks/wikitext103.py DATA --work FOLDER [--size small|tiny] [--minutes 9]
    python benchmarks/wikitext103.py DATA --work FOLDER --full-size STEPS

DATA is as for benchmarks/wikitext_text.py. The first command makes the text, pretrains the base from scratch, runs the
grid `wikitext103` and evaluates every model at context 0 and 480. It stops after so many minutes with exit code 75;
the same command goes on where it stopped. The last time it writes the result and prints the table. `tiny` is the same
chain in minutes on a CPU, with a dictionary of 1,000 words: it shows that everything runs, and its numbers mean
nothing.

The second command trains the full-size model with the paper's recipe (recipes/wikitext103.yaml) for some steps, from
random weights, and writes the time of a step and the memory.
"""

from __future__ import annotations

import argparse
import itertools
import lzma
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from wikitext_text import PARTS, layout, prepare_text

from fastweights.config import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.data.readers import documents, read_text
from fastweights.experiments.grid import load_grid, result_file
from fastweights.loading import save
from fastweights.modeling.adaptive_input import AdaptiveInputConfig, AdaptiveInputForCausalLM
from fastweights.modeling.fairseq import SPECIAL_WORDS, dictionary_tokenizer
from fastweights.report.page import Table, block_markdown
from fastweights.results import EvaluatedModel, EvaluationResult, TrainingResult
from fastweights.training.recipe import change, load_recipe
from fastweights.training.trainer import TrainConfig, train
from fastweights.utils.files import write_text
from fastweights.utils.parsing import read_json
from fastweights.utils.progress import Display
from fastweights.utils.provenance import write_result

ROOT = Path(__file__).parent.parent
RESULT, FULL_SIZE_RESULT = ROOT / "results/wikitext103.json", ROOT / "results/wikitext103_full_size.json"
GRID, LENGTH, CONTEXTS, SPLITS = "wikitext103", 512, (0, 480), ("valid", "test")
LEFT_OVER = 75  # exit code: the same command goes on
STOPPING_SECONDS = 120
MISSING = "–"


@dataclass(frozen=True)
class Size:
    """What a size of the experiment is.

    Attributes:
        model: Settings of the base.
        words: Words of the dictionary that are used, the special ones included; None for all.
        articles, lines: How many articles are trained on, and lines of WikiText scored; None for all.
        base, runs: Changes of the recipes, as NAME=VALUE.
    """

    model: dict[str, Any]
    words: int | None = None
    articles: int | None = None
    lines: int | None = None
    base: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "softmax_dropout"), 0.1)
_TINY_RUN = ("length=64", "batch_tokens=512", "compile=false", "validate_every=20", "validation_tokens=2048")
SIZES = {
    "small": Size(dict(num_hidden_layers=8, hidden_size=512, intermediate_size=2048, **_DROPOUT)),
    "tiny": Size(
        dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, cutoffs=[200, 500]),
        words=1_000,
        articles=40,
        lines=40,
        base=(*_TINY_RUN, "finetune.tokens=50_000", "finetune.learning_rate=5e-3"),
        runs=(*_TINY_RUN, "finetune.tokens=10_240", "finetune.learning_rate=2e-3"),
    ),
}


class OutOfTime(Exception):
    """The time of this call is over; what was begun was saved."""


@dataclass
class Session:
    """One call: the folder, the size and how long it may take."""

    data: Path
    work: Path
    size: Size
    deadline: float
    problems: list[str] = field(default_factory=list)

    def fastweights(self, *arguments: Any) -> bool:
        """Run a command of fastweights. When the time is over it is asked to save and to stop.

        Returns:
            Whether it succeeded.

        Raises:
            OutOfTime: It was stopped, or there was no time left to start it.
        """
        if time.monotonic() >= self.deadline:
            raise OutOfTime
        command = [sys.executable, "-m", "fastweights", *map(str, arguments)]
        print("$ fastweights", *arguments, flush=True)
        process = subprocess.Popen(command, env=os.environ | {"FASTWEIGHTS_CACHE": str(self.work / "cache")})
        try:
            return process.wait(max(0.0, self.deadline - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOPPING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise OutOfTime from None


# The pieces, each of which leaves a file or a folder that says it is done


def make_texts(session: Session) -> None:
    """train/: the text to train on; valid.txt.xz and test.txt.xz: WikiText's own."""
    work, size = session.work, session.size
    work.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        target = work / f"{split}.txt.xz"
        if not target.is_file():
            text = read_text(session.data / f"wikitext-103/wiki.{split}.tokens.xz")
            write_text(target, lzma.compress("".join(text.splitlines(keepends=True)[: size.lines]).encode()))
    if size.articles is None:
        prepare_text(session.data, work, PARTS, min(PARTS, os.cpu_count() or 1))
    elif not (work / "train/part-0.txt").is_file():
        (work / "train").mkdir(exist_ok=True)
        articles = itertools.islice(documents(session.data / "wiki/part-0.txt.xz"), size.articles)
        lines = itertools.chain.from_iterable(map(layout, filter(str.strip, articles)))
        write_text(work / "train/part-0.txt", "".join(f"{line}\n" for line in lines))


def make_start(session: Session) -> None:
    """start/: the base with random weights, and the tokenizer."""
    if (session.work / "start").exists():
        return
    dictionary, size = session.work / "dict.txt", session.size
    if not dictionary.is_file():
        lines = read_text(session.data / "wikitext-103/dict.txt.xz").split("\n")
        count = None if size.words is None else size.words - len(SPECIAL_WORDS)
        write_text(dictionary, "".join(f"{line}\n" for line in lines[:count]))
    tokenizer = dictionary_tokenizer(dictionary)
    torch.manual_seed(0)
    model = AdaptiveInputForCausalLM(AdaptiveInputConfig(vocab_size=len(tokenizer), **size.model))
    save(model, session.work / "start", tokenizer)


def pretrain(session: Session) -> None:
    """base/: a training run."""
    run, texts = (
        session.work / "base",
        ("--data", session.work / "train", "--validation", session.work / "valid.txt.xz"),
    )
    if (run / "result.json").is_file():
        return
    if (run / "run.json").is_file():
        done = session.fastweights("train", "--resume", run)
    else:
        changes = itertools.chain.from_iterable(("--set", change) for change in session.size.base)
        settings = ("--recipe", f"{GRID}_base", *changes, "-o", run)
        done = session.fastweights("train", session.work / "start", *texts, *settings)
    if not done:
        raise SystemExit("the base could not be trained: see above")


def convert_and_train(session: Session) -> None:
    """grid/: the comparison. A run that fails does not keep the others from being evaluated."""
    work = session.work
    if all(result_file(work / "grid", variant.name).is_file() for variant in load_grid(GRID)):
        return
    changes = itertools.chain.from_iterable(("--set", change) for change in session.size.runs)
    texts = ("--data", work / "train", "--validation", work / "valid.txt.xz")
    if not session.fastweights(
        "compare", GRID, "--model", work / "base/best", *texts, "--keep", *changes, "-o", work / "grid"
    ):
        session.problems.append("not every run of the grid ended: see above, and call again")


def evaluate(session: Session) -> None:
    """evaluated/NAME.json of every model that is trained."""
    (session.work / "evaluated").mkdir(exist_ok=True)
    texts = itertools.chain.from_iterable(("--data", session.work / f"{split}.txt.xz") for split in SPLITS)
    windows = ("--length", LENGTH, "--context", ",".join(map(str, CONTEXTS)), "--batch-size", 32)
    options = [*texts, *windows]
    for variant in load_grid(GRID):
        output, run = (
            session.work / f"evaluated/{variant.name}.json",
            session.work / f"grid/runs/{variant.name}/training",
        )
        trained = (run / "result.json").is_file() and result_file(session.work / "grid", variant.name).is_file()
        if trained and not output.is_file() and not session.fastweights("eval", run, *options, "-o", output):
            session.problems.append(f"{variant.name} could not be evaluated")


# The result


def collect(work: Path) -> dict[str, Any]:
    """The measurements of all models, in the grid's order."""
    rows = []
    for variant in load_grid(GRID):
        row: dict[str, Any] = {"name": variant.name, **(variant.cell or {}), "perplexity": {}}
        trained, evaluated = result_file(work / "grid", variant.name), work / f"evaluated/{variant.name}.json"
        if trained.is_file():
            result = TrainingResult.read(trained)
            row |= {"tokens": result.tokens, "seconds": result.seconds, "parameters": result.model.parameters}
            row["diverged"] = None if result.diverged is None else result.diverged.reason
        if evaluated.is_file():
            (model,) = EvaluationResult.read(evaluated).models
            row |= {"state_bytes": model.state_bytes, "perplexity": _by_split(model)}
        rows.append(row)
    base = TrainingResult.read(work / "base/result.json")
    return {
        "what": "perplexity by token of WikiText-103's validation and test sets at context 0 and 480, windows of 512",
        "seed": 0,
        "tokens": base.tokens + sum(row.get("tokens", 0) for row in rows),
        "base": {
            "parameters": base.model.parameters,
            "tokens": base.tokens,
            "recipe": base.recipe,
            "seconds": base.seconds,
        },
        "runs": rows,
    }


def _by_split(model: EvaluatedModel) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in model.perplexity or ():
        found.setdefault(row.data.partition(".")[0], {})[str(row.context)] = row.token
    return found


def table_3(result: dict[str, Any] | None = None) -> Table:
    """The paper's Table 3 with our values. What was not measured yet is a dash.

    Args:
        result: What `collect` returned; by default that of results/wikitext103.json, if it exists.
    """
    if result is None:
        result = read_json(RESULT) if RESULT.is_file() else None
    cells = [{"name": variant.name} | (variant.cell or {}) for variant in load_grid(GRID)]
    runs = cells if result is None else result["runs"]
    columns = [(split, str(context)) for split in SPLITS for context in CONTEXTS]
    base = next((run.get("perplexity", {}) for run in runs if run["name"] == "base"), {})
    rows = []
    for run in runs:
        found = run.get("perplexity", {})
        values = [found.get(split, {}).get(context) for split, context in columns]
        of_base = [base.get("test", {}).get(str(context)) for context in CONTEXTS]
        ratios = [None if not (a and b) else a / b for a, b in zip(values[-len(CONTEXTS) :], of_base, strict=True)]
        shown = [MISSING if value is None else f"{value:.2f}" for value in values]
        shown += [MISSING if ratio is None else f"{ratio:.3f} ×" for ratio in ratios]
        rows.append(
            [
                run["row"],
                run.get("memory", MISSING),
                *shown,
                *(str(run.get(n, MISSING)) for n in ("paper", "paper_480")),
            ]
        )
    header = ["Table 3", "memory"]
    header += [f"{'validation' if split == 'valid' else split}, context {context}" for split, context in columns]
    header += [f"test × base, context {context}" for context in CONTEXTS]
    header += [f"paper: test, context {context}" for context in CONTEXTS]
    return Table(header, rows, names=2, name="Table 3", note=_note(result))


def _note(result: dict[str, Any] | None) -> str:
    if result is None:
        return "Not measured yet: only the paper's values are known."
    base, tokens = result["base"], sorted({run["tokens"] for run in result["runs"] if "tokens" in run})
    each = " or ".join(f"{count / 1e6:,.1f} million" for count in tokens) or "no"
    return (
        f"From wikitext103.json. Our base has {base['parameters'] / 1e6:,.1f} million parameters and was trained on "
        f"{base['tokens'] / 1e6:,.1f} million tokens; every run, the base too, then has {each} tokens (the paper: 247 "
        f"million parameters and 1,331 million tokens each). {_order(result['runs'])}"
    )


def _order(runs: Sequence[dict[str, Any]]) -> str:
    """In words: the models from best to worst, here and in the paper."""
    texts = []
    for context, paper in zip(map(str, CONTEXTS), ("paper", "paper_480"), strict=True):
        ours = {run["name"]: run["perplexity"].get("test", {}).get(context) for run in runs if paper in run}
        if None in ours.values():
            return ""
        here, there = (sorted(ours, key=key) for key in (ours.get, {run["name"]: run.get(paper) for run in runs}.get))
        texts.append(f"at context {context} here {', '.join(here)}; in the paper {', '.join(there)}")
    return f"From best to worst {'; '.join(texts)}."


# The full size


class _Clock(Display):
    """Notes when each step ended."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.times: list[float] = []

    def step(self, *arguments: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def full_size(session: Session, steps: int) -> dict[str, Any]:
    """Train the full-size model for some steps of the paper's recipe: the time of a step, and the memory. With the tiny
    size it is a tiny model with the whole vocabulary."""
    recipe = load_recipe("wikitext103")
    recipe = change(recipe, {"finetune.tokens": steps * recipe.batch_tokens, "checkpoint_every": steps})
    folder, clock = session.work / "full_size", _Clock()
    if not folder.exists():
        tokenizer = dictionary_tokenizer(session.data / "wikitext-103/dict.txt.xz")
        torch.manual_seed(0)
        settings = {} if session.size.words is None else session.size.model
        model = AdaptiveInputForCausalLM(AdaptiveInputConfig(vocab_size=len(tokenizer), **settings))
        save(convert(model, FastWeightsConfig(rule="decay", m=64)), folder, tokenizer)
    os.environ["FASTWEIGHTS_CACHE"] = str(session.work / "cache")
    limit = 2 * recipe.batch_tokens
    config = TrainConfig(str(folder), str(session.data / "wikitext-103/wiki.valid.tokens.xz"), recipe, limit=limit)
    run = session.work / f"full_size_run_{os.getpid()}"
    result = train(config, run, display=clock)
    seconds = [after - before for before, after in itertools.pairwise(clock.times)]
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {
        "what": "steps of the paper's recipe on the full-size model, converted to decay m 64, from random weights",
        "seed": 0,
        "tokens": result.tokens,
        "steps": steps,
        "parameters": result.model.parameters,
        "batch_tokens": recipe.batch_tokens,
        "seconds_of_a_step": statistics.median(seconds[len(seconds) // 2 :]),
        "first_loss": result.curve[0].loss,
        "last_loss": result.curve[-1].loss,
        "peak_gpu_bytes": gpu,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--full-size", type=int, metavar="STEPS")
    parser.add_argument("--output", type=Path, help="by default in results/; with --size tiny in FOLDER")
    options = parser.parse_args(arguments)
    session = Session(options.data, options.work, SIZES[options.size], time.monotonic() + 60 * options.minutes)
    if options.full_size:
        options.work.mkdir(parents=True, exist_ok=True)
        result = full_size(session, options.full_size)
        write_result(options.output or FULL_SIZE_RESULT, result)
        print({name: value for name, value in result.items() if name != "what"})
        return 0
    try:
        for piece in (make_texts, make_start, pretrain, convert_and_train, evaluate):
            piece(session)
    except OutOfTime:
        print("the time is over: the same command goes on", flush=True)
        return LEFT_OVER
    result = collect(options.work)
    write_result(options.output or (RESULT if options.size == "small" else options.work / RESULT.name), result)
    print(block_markdown(table_3(result)))
    print("\n".join(session.problems))
    return int(bool(session.problems))


if __name__ == "__main__":
    sys.exit(main())
