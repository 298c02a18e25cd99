"""The quickstart: converts, trains and measures the packaged model, on a CPU, in minutes.

The model (fastweights/packaged) is a GPT-2 of 1.1 million parameters, pretrained on books of Project Gutenberg by
benchmarks/packaged_model.py. The text beside it is of other books: the converted model is trained and measured on it.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table

from fastweights.conversion import convert
from fastweights.data.readers import documents
from fastweights.evaluation.suite import evaluate, scored_tokens
from fastweights.loading import load, load_tokenizer, save
from fastweights.modeling.description import describe
from fastweights.presets import RECOMMENDED, preset_config
from fastweights.profiling.model_cost import decode_cost
from fastweights.report import check_matplotlib, make_report
from fastweights.results import CostResult, EvaluationResult
from fastweights.training import checkpoint as saved
from fastweights.training.recipe import Recipe, load_recipe
from fastweights.training.trainer import Interrupted, TrainConfig, resume, train
from fastweights.utils.errors import Argument, FastWeightsError
from fastweights.utils.files import make_folder
from fastweights.utils.progress import Display
from fastweights.utils.provenance import write_result

PACKAGED = Path(__file__).parent / "packaged"
RECOVERY_TEXT, VALIDATION_TEXT = PACKAGED / "recovery.txt.xz", PACKAGED / "validation.txt.xz"
WINDOW = 512
# Characters of each of the validation books that are measured on: about 90,000 tokens.
MEASURED_CHARACTERS = 130_000
RECALL_SAMPLES = 16
LENGTHS = (256, 1024, 4096, 16384)
SETTINGS = preset_config(RECOMMENDED, head_dim=32, width=128, train_length=WINDOW, positions="clamp")
PROMPT = "It was a dark evening, and the old man"
MARK = ".quickstart"
BASE, CONVERTED, TRAINED = "base", "after conversion", "after training"


class QuickstartError(FastWeightsError):
    """A folder that a quickstart cannot write to."""


def run(folder: Path, console: Console, recipe: Recipe | None = None) -> dict[str, Any]:
    """Measure the packaged model, convert it, train it, measure again, generate, and write a report.

    Args:
        folder: where everything is written; it must be new, empty, or of an earlier quickstart.
        console: where the steps are shown.
        recipe: how to train; by default the shipped recipe `quickstart`.

    Returns:
        The result that is also written to `folder / "result.json"`.

    Raises:
        QuickstartError: the folder holds something else.
    """
    check_matplotlib()
    _claim(folder)
    console.record = not console.is_terminal  # for the result; on a terminal, every frame of the bars would be in it
    started = time.perf_counter()
    recipe = recipe or load_recipe("quickstart")
    tokenizer = load_tokenizer(PACKAGED)
    base = load(PACKAGED, dtype=torch.float32).eval()
    size = f"{base.num_parameters():,} parameters"
    _print_step(console, 1, f"a GPT-2 with {size} and softmax attention, pretrained on books")
    converted = convert(load(PACKAGED, dtype=torch.float32), SETTINGS).eval()
    converted.config.fastweights_base = str(PACKAGED)
    save(converted, folder / "converted", tokenizer, overwrite=True)
    rule = f"the rule {SETTINGS.rule} with m = {SETTINGS.m}"
    (layer,) = converted.config.fastweights["wide_layers"]
    windows = f"{SETTINGS.window} tokens (layer {layer}: {SETTINGS.wide_window})"
    window = f"an exact window of {windows} with {SETTINGS.sinks} sinks"
    _print_step(console, 2, f"its attention replaced by {rule} and {window};")
    console.print(
        "   perplexity on unseen books, and size of the cache after 1,024 and 65,536 tokens:", highlight=False
    )
    quality = _measure(BASE, base, tokenizer)
    quality.models.extend(_measure(CONVERTED, converted, tokenizer, recall=False).models)
    console.print(_table(quality, {BASE: base, CONVERTED: converted}), "")
    losses = ", then ".join(stage.loss for stage in recipe.stages)
    _print_step(console, 3, f"trained on books that neither model has seen: {losses}, {_tokens(recipe):,} tokens")
    training = _train(folder, recipe, console)
    trained = load(folder / "training" / "best", dtype=torch.float32).eval()
    quality.models.extend(_measure(TRAINED, trained, tokenizer).models)
    quality = replace(quality, tokens=scored_tokens(quality.models))
    console.print("", _table(quality, {BASE: base, CONVERTED: converted, TRAINED: trained}), "")
    _print_step(console, 4, "both continue the same prompt:")
    for name, model in ((BASE, base), (TRAINED, trained)):
        console.print(f"   [bold]{name}:[/] ", end="")
        console.print(_sample(model, tokenizer), markup=False, highlight=False)
    _print_step(console, 5, "time and memory of one more token, by the number of tokens before it:")
    cost = decode_cost({BASE: base, "converted": trained}, LENGTHS, stretch_positions=True)
    console.print(_costs(cost), "")
    output = console.export_text(clear=False) if console.record else None
    result = _write(folder, quality, cost, training, time.perf_counter() - started, output)
    _print_step(console, 6, f"the report: {folder / 'report' / 'report.html'}")
    console.print(f"   the model: {folder / 'training' / 'best'} ({result['seconds']:.0f} s in all)", highlight=False)
    return result


def _claim(folder: Path) -> None:
    """Refuse a folder that is not of a quickstart, because its content will be replaced."""
    mark = folder / MARK
    if folder.exists() and not mark.is_file() and (not folder.is_dir() or any(folder.iterdir())):
        reason = f" {folder} exists and is not the folder of a quickstart: choose another one"
        raise QuickstartError(Argument("output"), reason)
    make_folder(folder)
    mark.touch()


def _print_step(console: Console, number: int, text: str) -> None:
    console.print(f"[bold]{number}.[/] {text}", highlight=False)


def _tokens(recipe: Recipe) -> int:
    return sum(recipe.steps_of(stage) * recipe.batch_tokens for stage in recipe.stages)


def _measure(name: str, model: Any, tokenizer: Any, recall: bool = True) -> EvaluationResult:
    text = {"two unseen books": "\n\n".join(text[:MEASURED_CHARACTERS] for text in documents(VALIDATION_TEXT))}
    options: dict[str, Any] = dict(recall=recall, recall_samples=RECALL_SAMPLES, by_position=True)
    return evaluate({name: (model, tokenizer)}, data=text, length=WINDOW, **options)


def _train(folder: Path, recipe: Recipe, console: Console) -> dict[str, Any]:
    """Resume an interrupted quickstart; a finished one starts again."""
    target, display = folder / "training", Display(console=console)
    try:
        if (target / saved.RUN).is_file() and not (target / saved.RESULT).is_file():
            return resume(target, display=display).to_dict()
        if (target / saved.RUN).is_file():
            shutil.rmtree(target)
        model, texts = str((folder / "converted").absolute()), (str(RECOVERY_TEXT), str(VALIDATION_TEXT))
        config = TrainConfig(model, texts[0], recipe, validation=texts[1], device="cpu")
        return train(config, target, display=display).to_dict()
    except Interrupted as error:
        error.parts = (f"stopped in the training; resume with: fastweights quickstart -o {folder}",)
        raise


def _rounded(value: float, digits: int) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:,.{digits}f}"


def _perplexity(quality: EvaluationResult, name: str) -> float:
    return next(model.perplexity[0].token for model in quality.models if model.name == name and model.perplexity)


def _table(quality: EvaluationResult, models: dict[str, Any]) -> Table:
    """Quality, size and memory of the cache for each model."""
    headers = ("perplexity", "× base", "parameters", "cache at 1,024", "at 65,536")
    table = Table(Column("model", no_wrap=True), *(Column(h, justify="right") for h in headers), box=None)
    for name, model in models.items():
        perplexity, described = _perplexity(quality, name), describe(model)
        cache = [decimal(row.here) for row in described.memory]
        ratio = _rounded(perplexity / _perplexity(quality, BASE), 3)
        table.add_row(name, _rounded(perplexity, 2), ratio, f"{described.parameters:,}", cache[0], cache[-1])
    return table


def _sample(model: Any, tokenizer: Any) -> str:
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    torch.manual_seed(0)
    options = dict(do_sample=True, temperature=0.7, top_k=50, max_new_tokens=60, pad_token_id=tokenizer.eos_token_id)
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return " ".join(tokenizer.decode(generated[0], skip_special_tokens=True).split())


def _costs(cost: CostResult) -> Table:
    headers = ("tokens", *(f"{model.name}: {what}" for model in cost.models for what in ("time", "memory")))
    table = Table(*(Column(header, justify="right") for header in headers), box=None)
    for points in zip(*(model.points for model in cost.models), strict=True):
        cells = [cell for p in points for cell in (f"{1e3 * p.seconds:.1f} ms", decimal(p.bytes))]
        table.add_row(f"{points[0].length:,}", *cells)
    return table


def _write(
    folder: Path,
    quality: EvaluationResult,
    cost: CostResult,
    training: dict[str, Any],
    seconds: float,
    output: str | None,
) -> dict[str, Any]:
    quality.write(folder / "evaluation.json")
    cost.write(folder / "cost.json")
    parts = [folder / "training" / saved.RESULT, folder / "evaluation.json", folder / "cost.json"]
    make_report(parts, folder / "report", title="The quickstart: a small GPT-2 becomes recurrent")
    perplexity = {name: _perplexity(quality, name) for name in (BASE, CONVERTED, TRAINED)}
    result = {
        "what": "the packaged model converted with the recommended settings, and trained back on unseen books",
        "seed": training["seed"],
        "tokens": training["tokens"],
        "perplexity": perplexity,
        "ratio": perplexity[TRAINED] / perplexity[BASE],
        "validation": {"base": training["base"]["perplexity"], "points": training["validation"]},
        "training_seconds": training["seconds"],
        "seconds": seconds,
        "cost": [{"name": model.name, "points": [point.to_dict() for point in model.points]} for model in cost.models],
    }
    if output is not None:
        result["output"] = output
    write_result(folder / "result.json", result)
    return result
