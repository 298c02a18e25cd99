"""A model card: the README.md of a saved model, as the Hugging Face hub shows it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastweights.config import LOCAL
from fastweights.model_paths import display_name
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
from fastweights.report.text import bytes_text, count_text, percent_text, whole
from fastweights.report.training import outcomes, training_tables
from fastweights.training.run_folder import CHECKPOINTS
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
INSTALL = (
    "The model needs Python 3.11 or newer and the package fastweights. The package is not on PyPI: install it from a "
    "checkout of its repository."
)
INSTALL_COMMAND = "pip install -c constraints.txt -e .    # in the checkout"
USAGE = """import fastweights  # before the model is loaded: it makes the model known to transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {path}  # the folder of this card, seen from where you are, or the model's id on the hub
model = AutoModelForCausalLM.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained({tokenizer})
inputs = tokenizer("Fast weights are", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0], skip_special_tokens=True))"""
UNKNOWN_QUALITY = (
    "The quality of this model was not measured when this card was written. A converted model generates nonsense until "
    "it is trained."
)
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

    from fastweights.modeling.description import describe_source

    folder, found = Path(model_folder), read_results(results)
    described = describe_source(folder)
    if described.settings is None:
        raise ReportError(f"{folder} holds a model that is not converted: a card is written for converted ones")
    source = _source_of(folder)
    hub_id = base_name or _hub_id_in(found) or (source if _is_hub_id(source) else None)
    about = ModelCardData(
        # Not transformers: the hub would show code that loads the model without `import fastweights`.
        library_name="fastweights",
        pipeline_tag="text-generation",
        tags=["fastweights", "linear-attention", described.settings.rule],
        base_model=hub_id,
        license=license,
    )
    base = _plain_name(hub_id or source)
    title = f"{base or display_name(folder)}, {_kind(described)}"
    page = Page(title, _card_sections(found, folder, described, hub_id, base))
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


def _source_of(folder: Path) -> str:
    """The model it was converted from: a hub id, a path, or nothing."""
    name = read_json(folder / "config.json").get("fastweights_base")
    return name if isinstance(name, str) else ""


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and not Path(name).exists()


def _plain_name(source: str) -> str:
    """The name of a model without its owner or folder; of a GGUF file without its quantization."""
    path = Path(source)
    if path.parent.name == CHECKPOINTS:  # `best` of a training run is a link to such a folder
        return path.parent.parent.name
    return re.sub(r"[.-](I?Q\d\w*|B?F16|F32)$", "", path.stem, flags=re.I) if path.suffix == ".gguf" else path.name


def _kind(described: Description) -> str:
    """What the layers are now, in a few words."""
    hybrid = len(described.converted) < described.layers
    return _rule(described) + (f" in {len(described.converted)} of {described.layers} layers" if hybrid else "")


def _rule(described: Description) -> str:
    assert described.settings is not None
    rule = described.settings.rule
    return "local attention" if rule == LOCAL else f"{rule} fast weights"


def _card_sections(
    results: Sequence[LoadedResult], folder: Path, described: Description, hub_id: str | None, base: str
) -> list[Section]:
    from fastweights.modeling.description import summarize

    settings = Table(["setting", "value"], list(summarize(described).items()), names=2)
    return [
        Section("What it is", _what_it_is(described, hub_id or base)),
        Section("What was lost and won", _lost_and_won(results, described, display_name(folder))),
        Section("How to use it", [Text(INSTALL), Code("sh", INSTALL_COMMAND), _usage(folder, hub_id)]),
        Section("Settings", [settings]),
        *_measured(results),
        Section("Limits", [Bullets(LIMITS), *recall_tables(models_in(results))]),
        Section("Citation", [Text(PAPER), Code("bibtex", CITATION)]),
    ]


def _what_it_is(described: Description, base: str) -> list[Block]:
    made_from = f" made from {base}" if base else ""
    words = (
        f"A {described.family} model{made_from}: in {len(described.converted)} of its {described.layers} layers "
        f"softmax attention was replaced by {_rule(described)} with the library fastweights. Such a layer caches a "
        "fixed number of bytes instead of the keys and values of every token, so that a new token costs it the same "
        "time and memory, however long the context is."
    )
    return [Text(words)]


def _lost_and_won(results: Sequence[LoadedResult], described: Description, name: str) -> list[Block]:
    """Quality against the base, as far as the results say, then size and memory, which follow from the shape.

    Other converted models that were evaluated in the same files are left out, where one has the name of this model.
    """
    models = models_in(results)
    if any(entry.model.name == name for entry in models):
        models = [entry for entry in models if entry.model.name == name or not entry.converted]
    lost = [*losses(models), *outcomes(runs_in(results))] or [UNKNOWN_QUALITY]
    share = percent_text(described.added_parameters / described.base_parameters, 0)
    lost.append(f"It has {count_text(described.parameters)} parameters, {share} more than its base.")
    rows = [[whole(m.tokens), bytes_text(m.here), bytes_text(m.attention)] for m in described.memory]
    memory = Table(["tokens", "cache of this model", "KV cache of the base model"], rows, names=0)
    return [Bullets(lost, "Lost"), *_bullets(winnings(models, costs_in(results)), "Won"), memory]


def _usage(folder: Path, hub_id: str | None) -> Code:
    """Code that runs where the folder of the model is."""
    name = Path(os.path.abspath(folder)).name
    has_tokenizer = any(folder.glob("*tokenizer*"))
    tokenizer = "path" if has_tokenizer else json.dumps(hub_id or "the base model, whose tokenizer this model has")
    return Code("python", USAGE.format(path=json.dumps(name), tokenizer=tokenizer))


def _measured(results: Sequence[LoadedResult]) -> list[Section]:
    models = models_in(results)
    sections = [
        Section("Results", [*model_tables(models), *task_tables(models)]),
        Section("Training", training_tables(runs_in(results))),
        Section("Ranking of layers", ranking_tables(rankings_in(results))),
        Section("Where the numbers come from", [provenance_table(results)] if results else []),
    ]
    return [section for section in sections if section.blocks]


def _bullets(lines: Sequence[str], lead: str) -> list[Bullets]:
    return [Bullets(lines, lead)] if lines else []
