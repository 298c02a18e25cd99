"""`fastweights convert`: replace the attention of a model with fast weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from fastweights.cli.options import DTYPE_HELP, Dtype, UsageError, model_source, reports_errors, takes_settings
from fastweights.cli.output import print_description
from fastweights.model_paths import FAIRSEQ, dictionary_beside, new_model_folder
from fastweights.presets import PRESET_HELP, preset_config

Preset = Literal["recommended", "paper"]
ANY_SIZES = 64, 1024


@reports_errors
@takes_settings
def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Pretrained model: a hub id, a folder, a GGUF file or a fairseq checkpoint (.pt)."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the converted model to.")],
    settings: dict[str, Any],
    preset: Annotated[Preset, typer.Option(help=PRESET_HELP)] = "recommended",
    dictionary: Annotated[
        Path | None,
        typer.Option("--dict", help="Dictionary of a fairseq checkpoint; by default dict.txt beside it."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output folder if it already holds a saved model.")
    ] = False,
) -> None:
    """Replace the attention of a model with fast weights. The tokenizer, if there is one, is saved with the model."""
    preset_config(preset, *ANY_SIZES, **settings)  # errors of settings come before the model is loaded
    if dictionary is not None and not model.endswith(FAIRSEQ):
        raise UsageError(f"--dict is for fairseq checkpoints (.pt), and {model} is none: leave it out")
    source = model_source(model)
    dictionary = _dictionary(source, dictionary)
    with (
        new_model_folder(output, overwrite, source=source) as folder,
        Console(stderr=True).status(f"loading {escape(model)}") as status,
    ):
        from transformers.utils import logging

        from fastweights.conversion import attention_sizes
        from fastweights.conversion import convert as converter
        from fastweights.loading import load, load_tokenizer
        from fastweights.modeling.description import describe

        logging.disable_progress_bar()
        pretrained = load(source, dtype=dtype)
        if dictionary is None:
            tokenizer = load_tokenizer(source)
        else:
            from fastweights.modeling.fairseq import dictionary_tokenizer

            tokenizer = dictionary_tokenizer(dictionary, pretrained.config.vocab_size)
        status.update("converting")
        converted = converter(pretrained, preset_config(preset, *attention_sizes(pretrained), **settings))
        converted.config.fastweights_base = str(Path(source).resolve()) if Path(source).exists() else source
        status.update(f"saving to {escape(str(output))}")
        converted.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    print_description(describe(converted), str(output))


def _dictionary(source: str, given: Path | None) -> Path | None:
    """The dictionary of a fairseq checkpoint: the given file, or the one beside it. None for other models."""
    if not source.endswith(FAIRSEQ):
        return None
    found = given or dictionary_beside(source)
    if found is None:
        raise UsageError(f"{source} has no dictionary beside it: name fairseq's dict.txt with --dict")
    if not found.is_file():
        raise UsageError(f"--dict {found}: there is no such file; give fairseq's dict.txt")
    return found
