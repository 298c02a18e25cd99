"""A model card: the README.md of a saved model, as the Hugging Face hub shows it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastweights.report.build import provenance_table, write_page
from fastweights.report.cost import winnings
from fastweights.report.page import Block, Bullets, Code, Page, Section, Table, Text, to_markdown
from fastweights.report.quality import losses, model_tables, recall_tables, task_tables
from fastweights.report.ranking import ranking_tables
from fastweights.report.results import (
    LoadedResult,
    ReportError,
    ResultFile,
    costs_in,
    models_in,
    rankings_in,
    read_results,
    runs_in,
)
from fastweights.report.text import bytes_text, whole
from fastweights.report.training import outcomes, training_tables
from fastweights.utils.parsing import read_json

if TYPE_CHECKING:
    from fastweights.modeling.description import Description

# Front matter must be the first thing in the file, so this stands right after it.
MARK = "<!-- written by fastweights -->"
PAPER = "H. H. Mao, Fine-Tuning Pre-trained Transformers into Decaying Fast Weights, EMNLP 2022."
CITATION = """@inproceedings{mao-2022-fine,
  title = {Fine-Tuning Pre-trained Transformers into Decaying Fast Weights},
  author = {Mao, Huanru Henry},
  booktitle = {Proceedings of the 2022 Conference on Empirical Methods in Natural Language Processing},
  year = {2022}
}"""
LIMITS = (
    "A state of fixed size forgets. What an attention model can look up word for word, however far back, this model "
    "may not be able to recall: names, numbers and quotations from early in a long text first of all.",
    "Otherwise it has the limits and biases of the model it was made from, and of the text it was trained on.",
)


def model_card(
    results: Sequence[ResultFile],
    model_folder: str | os.PathLike,
    *,
    base_name: str | None = None,
    license: str | None = None,
) -> str:
    """The card of a saved, converted model. `base_name` is the base model's id on the hub: without it the card names
    the base only where a result does so by such an id."""
    from huggingface_hub import ModelCardData

    found = read_results(results)
    base_name = base_name or _hub_id_in(found) or _hub_id_of(Path(model_folder))
    about = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["fastweights", "linear-attention"],
        base_model=base_name,
        license=license,
    )
    page = Page(_name(Path(model_folder)), _card_sections(found, Path(model_folder), base_name))
    return f"---\n{about.to_yaml()}\n---\n{MARK}\n\n{to_markdown(page)}"


def write_model_card(
    results: Sequence[ResultFile],
    model_folder: str | os.PathLike,
    *,
    base_name: str | None = None,
    license: str | None = None,
) -> Path:
    """Write the card to README.md in the model's folder, unless a README of someone else's is there."""
    target = Path(model_folder) / "README.md"
    text = model_card(results, model_folder, base_name=base_name, license=license)
    if target.exists() and MARK not in target.read_text(encoding="utf-8", errors="replace"):
        raise ReportError(f"{target} was not written by fastweights and is not replaced: move it away first")
    write_page(target, text)
    return target


def _hub_id_in(results: Sequence[LoadedResult]) -> str | None:
    names = [entry.run.base.name for entry in runs_in(results) if entry.run.base]
    names += [entry.model.name for entry in models_in(results) if not entry.converted]
    ids = [name for name in names if re.fullmatch(r"[\w.-]+/[\w.-]+", name)]
    return next((name for name in ids if not Path(name).exists()), None)


def _hub_id_of(folder: Path) -> str | None:
    """The model it was converted from, where that is one of the hub's."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return None
    name = config.get("fastweights_base") if isinstance(config, dict) else None
    is_hub_id = isinstance(name, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not Path(name).exists()
    return name if is_hub_id else None


def _name(folder: Path) -> str:
    """A model's name: of a training run's `best` or `last`, the run's."""
    folder = folder.absolute()
    return folder.parent.name if folder.is_symlink() else folder.name


def _card_sections(results: Sequence[LoadedResult], folder: Path, base_name: str | None) -> list[Section]:
    from fastweights.modeling.description import describe_folder, summarize

    described = describe_folder(folder)
    if described.settings is None:
        raise ReportError(f"{folder} holds a model that is not converted: a card is written for converted ones")
    settings = Table(["setting", "value"], list(summarize(described).items()), names=2)
    return [
        Section("What it is", _what_it_is(described, base_name)),
        Section("How to load it", [Code("python", _loading(folder))]),
        Section("Settings", [settings]),
        *_measured(results),
        Section("Limits", [Bullets(LIMITS), *recall_tables(models_in(results))]),
        Section("Citation", [Text(PAPER), Code("bibtex", CITATION)]),
    ]


def _what_it_is(described: Description, base_name: str | None) -> list[Block]:
    made_from = f" made from {base_name}" if base_name else ""
    words = (
        f"A {described.family} model{made_from}: in {len(described.converted)} of its {described.layers} layers "
        "softmax attention was replaced by fast weights with the library fastweights. Such a layer has a state of "
        "fixed size instead of keys and values of every token, so that a new token costs it the same time and memory, "
        "however long the context."
    )
    rows = [[whole(m.tokens), bytes_text(m.here), bytes_text(m.attention)] for m in described.memory]
    return [Text(words), Table(["tokens", "cache of this model", "KV cache of the base model"], rows, names=0)]


def _loading(folder: Path) -> str:
    name = json.dumps(_name(folder))
    return f"""import fastweights  # first: it makes the model known to transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({name})
tokenizer = AutoTokenizer.from_pretrained({name})
inputs = tokenizer("Fast weights are", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))"""


def _measured(results: Sequence[LoadedResult]) -> list[Section]:
    models, runs = models_in(results), runs_in(results)
    words = _bullets([*losses(models), *winnings(models, costs_in(results))])
    quality: list[Block] = [*words, *model_tables(models), *task_tables(models)]
    training: list[Block] = [*_bullets(outcomes(runs)), *training_tables(runs)]
    sections = [
        Section("Results", quality),
        Section("Training", training),
        Section("Ranking of layers", ranking_tables(rankings_in(results))),
        Section("Where the numbers come from", [provenance_table(results)] if results else []),
    ]
    return [section for section in sections if section.blocks]


def _bullets(lines: Sequence[str]) -> list[Bullets]:
    return [Bullets(lines)] if lines else []
