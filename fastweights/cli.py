"""The command line: parses, calls, prints. What needs torch is imported inside the commands: help must be instant."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Column, Table

from fastweights import __version__
from fastweights.config import FastWeightsConfig, Sampling
from fastweights.options import (
    COST_OUTPUT_HELP,
    LENGTHS_HELP,
    PROFILED_HELP,
    check_output,
    given_options,
    parse_numbers,
    reports_errors,
    stage_help,
    takes_changes,
    takes_settings,
    usable_device,
)

if TYPE_CHECKING:
    from fastweights.describe import Description

Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
SavedModel = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a saved model, converted or not.")]
DTYPE_HELP = "Precision of the weights; by default the checkpoint's own."

app = typer.Typer(
    help="Pretrained Transformers into recurrent models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The `fastweights` program. Its own messages take the place of transformers' warnings."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


@app.command()
@reports_errors
@takes_settings
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Pretrained model: a hub id, a folder or a GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the converted model to.")],
    config: FastWeightsConfig,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output folder that is not empty.")] = False,
) -> None:
    """Replace a model's attention by fast weights. The tokenizer, where there is one, is saved with the result."""
    from fastweights import convert as converter
    from fastweights.convert import load, load_tokenizer, new_folder
    from fastweights.describe import describe

    with (
        new_folder(output, overwrite, source=model) as folder,
        Console(stderr=True).status(f"loading {escape(model)}") as status,
    ):
        pretrained, tokenizer = load(model, dtype=dtype), load_tokenizer(model)
        status.update("converting")
        converted = converter(pretrained, config)
        converted.config.fastweights_base = str(Path(model).resolve()) if Path(model).exists() else model
        status.update(f"saving to {escape(str(output))}")
        converted.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    _print_description(describe(converted), str(output))


@app.command()
@reports_errors
def info(
    folder: SavedModel,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say what a saved model is and what it keeps in memory. Reads no weights."""
    from fastweights.describe import describe_folder

    described = describe_folder(folder)
    if as_json:
        typer.echo(json.dumps(asdict(described), indent=1))
    else:
        _print_description(described, str(folder))


def _print_description(described: Description, name: str) -> None:
    from fastweights.describe import facts

    summary = Table(title=escape(name), title_justify="left", show_header=False, box=None)
    for label, value in facts(described).items():
        summary.add_row(label, value)
    headers = ("tokens", "this model", "KV cache of the base model")
    memory = Table(*(Column(header, justify="right") for header in headers), box=None)
    for row in described.memory:
        memory.add_row(f"{row.tokens:,}", decimal(row.here), decimal(row.attention))
    Console().print(summary, "", memory)


@app.command()
@reports_errors
def generate(
    folder: SavedModel,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, unless the text ends before.")] = 100,
    temperature: Annotated[float | None, typer.Option(help="Sample, from logits divided by this.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Sample from the likeliest that sum to p.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Divide logits of tokens seen before by this.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Sample, with this seed.")] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Beams to search with.")] = 1,
    load_state: Annotated[Path | None, typer.Option(help="Continue the text whose state was saved here.")] = None,
    save_state: Annotated[Path | None, typer.Option(help="Save the state after the text, to continue it.")] = None,
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU where there is one.")] = None,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
) -> None:
    """Continue a text. Decodes greedily unless a sampling option is given, and prints the new text as it comes."""
    from transformers import TextStreamer

    from fastweights.generate import continue_text, memory_used, prompt_tokens, start_state, state_after

    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    if save_state is not None and (save_state.is_dir() or not save_state.parent.is_dir()):
        raise ValueError(f"--save-state {save_state} cannot be written: give a file name in a folder that exists")
    with Console(stderr=True).status(f"loading {escape(str(folder))}"):
        model, tokenizer = _load_with_tokenizer(folder, dtype, usable_device(device))
    state = start_state(model, folder, load_state, save_state)
    prompt_ids = prompt_tokens(tokenizer, prompt, continues=load_state is not None).to(model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if num_beams == 1 else None
    started = time.perf_counter()
    ids, cache = continue_text(model, prompt_ids, state, sampling, max_new_tokens, num_beams, streamer)
    seconds = time.perf_counter() - started
    new_ids = ids[0, prompt_ids.shape[1] :]
    if streamer is None:
        typer.echo(tokenizer.decode(new_ids, skip_special_tokens=True))
    if save_state is not None and state is not None and cache is not None:
        state_after(model, state, cache, ids).save(save_state, model)
    typer.echo(f"{len(new_ids)} tokens, {len(new_ids) / seconds:.1f} tokens/s, {memory_used(cache)}", err=True)


@app.command()
@reports_errors
@takes_changes
def train(
    changes: dict[str, Any],
    model: Annotated[str | None, typer.Argument(metavar="[DIR]", help="Folder of a saved model.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Text to train on: a file (text, JSON lines, parquet; .xz, .gz), a folder, or hf:NAME."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="New folder for the run.")] = None,
    recipe: Annotated[str, typer.Option(help="Name of a shipped recipe (paper, distill), or a YAML file.")] = "distill",
    validation: Annotated[str | None, typer.Option(help="Text to validate on, as --data.")] = None,
    teacher: Annotated[
        str | None, typer.Option(help="The unconverted model; by default the one that DIR was converted from.")
    ] = None,
    change: Annotated[list[str], typer.Option("--set", help=stage_help())] = [],  # noqa: B006 (typer makes a new one)
    text_field: Annotated[str, typer.Option(help="Field of JSON lines and data sets that holds the text.")] = "text",
    limit: Annotated[int | None, typer.Option(min=1, help="Tokens to read of the data, at most.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or by default a GPU where there is one.")] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Shard the model over the processes of torchrun (FSDP2).")
    ] = False,
    report_to: Annotated[str | None, typer.Option(help="Tracker of accelerate: tensorboard, wandb, ...")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, as it was begun.")] = None,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Train a converted model back to its old quality. Killed at any moment, a run goes on with --resume."""
    from transformers.utils import logging

    from fastweights.recipe import change as changed
    from fastweights.recipe import load_recipe, parse_changes
    from fastweights.train import Task
    from fastweights.train import resume as resume_training
    from fastweights.train import train as start_training

    logging.disable_progress_bar()
    if resume is not None:
        others = given_options(context, besides="resume")
        if others:
            raise ValueError(f"--resume goes on with a run as it was begun: give it alone, without {', '.join(others)}")
        result, folder = resume_training(resume), resume
    else:
        if model is None or data is None or output is None:
            missing = [n for n, v in (("DIR", model), ("--data", data), ("--output", output)) if v is None]
            raise ValueError(f"{', '.join(missing)} missing: fastweights train DIR --data TEXT -o FOLDER")
        made = changed(load_recipe(recipe), changes | parse_changes(change))
        task = Task(
            model=model,
            data=data,
            recipe=made,
            teacher=teacher,
            validation=validation,
            text_field=text_field,
            limit=limit,
            device=device,
            shard=shard,
            report_to=report_to,
        )
        result, folder = start_training(task, output), output
    _print_training(result, folder)


def _print_training(result: dict[str, Any], folder: Path) -> None:
    console = Console()
    if os.environ.get("RANK", "0") != "0":
        return
    best, base = result["best"], result["base"]
    if best is not None:
        ratio = "" if base is None else f", {best['perplexity'] / base['perplexity']:.3f} times the base's"
        console.print(f"validation perplexity {best['perplexity']:,.2f}{ratio}", highlight=False)
    chosen = folder / ("best" if best is not None else "last")
    console.print(
        f"{result['tokens']:,} tokens in {result['seconds']:,.0f} s; model: {chosen}; result: {folder / 'result.json'}",
        highlight=False,
        soft_wrap=True,
    )


@app.command("eval")
@reports_errors
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Models: folders, hub ids, GGUF files; the base first."),
    ],
    data: Annotated[list[str], typer.Option(help="Text for perplexity; may be given again.")] = [],  # noqa: B006
    length: Annotated[
        int | None, typer.Option(help="Tokens of a window; by default 1024, or what all models have positions for.")
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of a window that are seen and not scored, such as 0,480.")] = "0",
    by_position: Annotated[bool, typer.Option("--by-position", help="Loss by position in the window.")] = False,
    position_length: Annotated[int | None, typer.Option(help="Window of --by-position; by default --length.")] = None,
    recall: Annotated[bool, typer.Option("--recall", help="Recall of pairs and copying, by distance.")] = False,
    tasks: Annotated[str, typer.Option(help="lm-eval tasks, such as lambada,hellaswag.")] = "",
    task_folder: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' JSON lines; by default lm-eval downloads them.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Items of each task, at most.")] = None,
    text_field: Annotated[str, typer.Option(help="Field of JSON lines and data sets that holds the text.")] = "text",
    batch_size: Annotated[int, typer.Option(help="Windows at once.")] = 8,
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU where there is one.")] = None,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the result.")] = None,
) -> None:
    """Measure models and compare them: perplexity, recall, lm-eval tasks."""
    from transformers.utils import logging

    from fastweights.evaluate import evaluate as measure
    from fastweights.evaluate import window_for
    from fastweights.provenance import write_result
    from fastweights.sources import read_text

    logging.disable_progress_bar()
    check_output(output)
    contexts = parse_numbers("--context", context)
    texts = {_short(source, data): read_text(source, text_field) for source in data}
    usable = usable_device(device)
    with Console(stderr=True).status("loading"):
        loaded = {name: _load_any(name, dtype, usable) for name in models}
    result = measure(
        {_short(name, models): pair for name, pair in loaded.items()},
        data=texts,
        length=length or window_for([model for model, _ in loaded.values()]),
        contexts=contexts,
        tasks=[task for task in tasks.split(",") if task],
        recall=recall,
        by_position=by_position,
        position_length=position_length,
        limit=limit,
        task_folder=task_folder,
        batch_size=batch_size,
    )
    _print_tables(result)
    if output is not None:
        write_result(output, result)


def _short(name: str, names: list[str]) -> str:
    """A model's name without its folder, where that tells it apart."""
    return Path(name).name if len({Path(other).name for other in names}) == len(names) else name


def _load_any(model: str, dtype: str, device: str) -> tuple[Any, Any]:
    from fastweights.convert import load, load_tokenizer

    return load(model, dtype=dtype).to(device).eval(), load_tokenizer(model)


def _print_tables(result: dict[str, Any]) -> None:
    from fastweights.report import tables_of

    console = Console()
    for table in tables_of(result):
        shown = Table(
            *(Column(h, justify="left" if i < table.names else "right") for i, h in enumerate(table.header)), box=None
        )
        for row in table.rows:
            shown.add_row(*map(escape, row))
        console.print(shown, "")


@app.command()
@reports_errors
def profile(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help=PROFILED_HELP)] = None,
    layer: Annotated[bool, typer.Option("--layer", help="Only the layer of the paper's Figure 1.")] = False,
    lengths: Annotated[str | None, typer.Option(help=LENGTHS_HELP)] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Texts at once: 1, for the layer 32.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads of the layer: the paper's 1.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile every step with torch.compile.")] = False,
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU where there is one.")] = None,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help=COST_OUTPUT_HELP)] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Draw this result again; measures nothing.")] = None,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Time and memory of one more token after texts of several lengths. A converted model alone is compared with the
    model it was made from, where that is found."""
    from transformers.utils import logging

    from fastweights.profiled import figure, figure_beside, read_cost
    from fastweights.profiled import profile as measure
    from fastweights.provenance import write_result

    logging.disable_progress_bar()
    check_output(output, is_picture=source is not None)
    if source is not None:
        if others := given_options(context, besides=("source", "output")):
            raise ValueError(f"--from draws a result again: give it without {', '.join(others)}")
        cost = read_cost(source)
        _print_tables(cost.body)
        typer.echo(figure(cost, output or source), err=True)
        return
    result = measure(
        {_short(name, models or []): name for name in models or []},
        lambda text: typer.echo(text, err=True),
        layer=layer,
        lengths=None if lengths is None else parse_numbers("--lengths", lengths),
        batch=batch,
        heads=heads,
        device=usable_device(device),
        dtype=dtype,
        compiled=compile,
    )
    _print_tables(result)
    if output is not None:
        write_result(output, result)
        typer.echo(figure_beside(output), err=True)


@app.command()
@reports_errors
def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="JSON files of train, eval, profile.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for report.md and report.html.")] = Path(
        "report"
    ),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    card: Annotated[Path | None, typer.Option(help="Also write a model card into this saved model's folder.")] = None,
    base_name: Annotated[str | None, typer.Option(help="Hub id of the base model, for the card.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence, for the card.")] = None,
) -> None:
    """Turn results into a page with tables and plots, and into a model card for the hub."""
    from fastweights.report import make_report, write_model_card

    typer.echo(str(make_report(results, output, title=title)))
    if card is not None:
        typer.echo(str(write_model_card(results, card, base_name=base_name, license=license)))


@app.command()
@reports_errors
def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what is made.")] = Path(
        "quickstart-output"
    ),
) -> None:
    """The whole story on a small packaged model: convert it, train it back, measure it, report."""
    from transformers.utils import logging

    from fastweights.quickstart import run

    logging.disable_progress_bar()
    run(output, Console())


def _load_with_tokenizer(folder: Path, dtype: str, device: str) -> tuple[Any, Any]:
    from transformers.utils import logging

    from fastweights.convert import load, load_tokenizer

    logging.disable_progress_bar()
    if not folder.is_dir():
        hint = "that is a file, convert it first" if folder.is_file() else "give the folder of a saved model"
        raise ValueError(f"no folder at {folder}: {hint}")
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: save the model's there with tokenizer.save_pretrained")
    return load(folder, dtype=dtype).to(device).eval(), tokenizer
