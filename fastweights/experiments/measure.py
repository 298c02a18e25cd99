"""What is measured of the best model of a trained run: its perplexity on the tests, and its recall."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastweights.data.readers import read_text
from fastweights.evaluation.perplexity import EvaluationError, perplexity
from fastweights.evaluation.recall import ordinary_tokens, recall_probe
from fastweights.loading import load, load_tokenizer
from fastweights.modeling.modes import autocast
from fastweights.results import PerplexityRow, Recall, TrainingResult
from fastweights.tokenization import bos_token
from fastweights.training import checkpoint as saved
from fastweights.training.recipe import Recipe
from fastweights.training.trainer import VALIDATION_BATCH_TOKENS

# Sequences of the recall probe at once, for each type of device.
RECALL_ROWS = {"cuda": 64}


def measure_run(
    training: str | os.PathLike,
    result: str | os.PathLike,
    name: str,
    tests: dict[str, str],
    recall: bool = False,
    device: str | None = None,
) -> None:
    """Write the result of a run whose training is over, with what is measured of its best model.

    Args:
        training: The folder of the training run.
        result: The file to write.
        name: Of the run.
        tests: Data sources by their names.
        recall: Whether to run the recall probe.
        device: "cpu" or "cuda"; by default a GPU where there is one.

    Raises:
        EvaluationError: The model has no finite losses, although its training did not diverge.
    """
    trained = TrainingResult.read(Path(training) / saved.RESULT)
    try:
        rows, recalled = _measure(Path(training), Recipe.from_dict(trained.recipe), tests, recall, device)
    except EvaluationError:
        if trained.diverged is None:
            raise
        rows, recalled = [], None  # its model may have no finite losses
    replace(trained, name=name, run=name, tests=rows, recall=recalled).write(Path(result))


def _measure(
    training: Path, recipe: Recipe, tests: dict[str, str], recall: bool, device: str | None
) -> tuple[list[PerplexityRow], Recall | None]:
    """The best model's perplexity of every test, and its recall. A run that diverged at once has no model."""
    best = saved.linked(training, saved.BEST) or saved.linked(training, saved.LAST)
    if best is None or not (tests or recall):
        return [], None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load(best, dtype=torch.float32).to(device), load_tokenizer(best)
    windows: dict[str, Any] = dict(length=recipe.length, batch_size=max(1, VALIDATION_BATCH_TOKENS // recipe.length))
    with autocast(model.device, recipe.precision):
        rows = [
            perplexity(model, tokenizer, read_text(source), progress=False, **windows).row(name)
            for name, source in tests.items()
        ]
        if not recall:
            return rows, None
        probed: dict[str, Any] = dict(vocabulary=ordinary_tokens(model, tokenizer), bos=bos_token(tokenizer))
        return rows, recall_probe(model, **probed, batch_size=RECALL_ROWS.get(model.device.type, 8), progress=False)
