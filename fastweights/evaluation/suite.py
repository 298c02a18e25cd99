"""Everything that `fastweights eval` measures of several models, as one result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from fastweights.evaluation.checks import EvaluationError, check_measures
from fastweights.evaluation.lm_eval import check_tasks, run_tasks
from fastweights.evaluation.perplexity import check_windows, perplexity, perplexity_by_position
from fastweights.evaluation.recall import ordinary_tokens, recall_probe
from fastweights.modeling import modes
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.description import describe
from fastweights.modeling.positions import check_length
from fastweights.results import CacheSize, EvaluatedModel, EvaluationResult
from fastweights.tokenization import bos_token
from fastweights.utils.errors import Argument, error_context

Measure = Callable[[Any, Any], Any]


def evaluate(
    models: Mapping[str, tuple[Any, Any]],
    *,
    data: Mapping[str, str] | None = None,
    length: int = 1024,
    contexts: Sequence[int] = (0,),
    tasks: Sequence[str] = (),
    recall: bool = False,
    recall_samples: int = 64,
    by_position: bool = False,
    without_window: bool = False,
    position_length: int | None = None,
    limit: int | None = None,
    task_folder: str | os.PathLike | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> EvaluationResult:
    """Evaluate models on texts, on the recall probe and on lm-eval tasks.

    Args:
        models: Pairs of a model and its tokenizer, by name.
        data: Texts by name, for perplexity.
        length: Tokens of a window.
        contexts: Tokens of a window that are seen and not scored; perplexity is measured with each.
        tasks: Names of lm-eval tasks.
        recall: Whether to run the recall probe, with `recall_samples` sequences for each distance.
        by_position: Whether to measure loss by position, in windows of `position_length` tokens (by default `length`).
        without_window: Whether to measure every converted model once more, with the window of its layers left out: how
            good its states are alone.
        limit: Items of each task, at most.
        task_folder: Folder with the data of the tasks; by default lm-eval downloads them.
        batch_size: Windows or sequences in a forward pass.
        progress: Whether to show progress bars.

    Returns:
        The measurements, without provenance.

    Raises:
        EvaluationError, PositionError: If there is nothing to measure, or a model cannot be measured with these
            arguments. As much as possible is checked before the first model is measured.
    """
    data = data or {}
    check_measures(data, tasks, recall, by_position)
    position_length = length if position_length is None else position_length
    if tasks:
        check_tasks(tasks, task_folder)
    _check_models(models, length, contexts if data else (), position_length if by_position else None, without_window)
    batches: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    measures: dict[str, Measure] = {}
    if data:
        measures["perplexity"] = lambda model, tokenizer: [
            _on_text(name, perplexity, model, tokenizer, text, length=length, context=context, **batches).row(name)
            for name, text in data.items()
            for context in contexts
        ]
    if by_position:
        measures["by_position"] = lambda model, tokenizer: [
            replace(bucket, data=name)
            for name, text in data.items()
            for bucket in _on_text(
                name, perplexity_by_position, model, tokenizer, text, length=position_length, **batches
            )
        ]
    if recall:
        measures["recall"] = lambda model, tokenizer: _recall(model, tokenizer, samples=recall_samples, **batches)
    if tasks:
        measures["tasks"] = lambda model, tokenizer: run_tasks(
            model, tokenizer, tasks, task_folder=task_folder, limit=limit, **batches
        )
    measured = []
    for name, (model, tokenizer) in models.items():
        measured.append(_measure(name, model, tokenizer, measures))
        if without_window and isinstance(model, FastWeightsMixin):
            measured.append(_measure(name, model, tokenizer, measures, without_window=True))
    settings = {"length": length, "contexts": list(contexts), "batch_size": batch_size}
    settings |= {"position_length": position_length} if by_position else {}
    settings |= {"tasks": list(tasks), "limit": limit, "local_files": task_folder is not None} if tasks else {}
    return EvaluationResult(seed=0, tokens=scored_tokens(measured), settings=settings, models=measured)


def _check_models(
    models: Mapping[str, tuple[Any, Any]],
    length: int,
    contexts: Sequence[int],
    position_length: int | None,
    without_window: bool,
) -> None:
    """Check windows and positions of all models, before the first one is measured."""
    for name, (model, _) in models.items():
        with error_context(f"{name}: "):
            for context in contexts:
                check_windows(model, length, context)
            if position_length is not None:
                check_length(model, position_length, Argument("position_length"))
    if without_window:
        _check_without_window({name: model for name, (model, _) in models.items()})


def _check_without_window(models: Mapping[str, Any]) -> None:
    """Refuse converted models that have no window beside a state, and an evaluation without any converted model."""
    flag, converted = Argument("without_window"), 0
    for name, model in models.items():
        if isinstance(model, FastWeightsMixin):
            converted += 1
            reason = modes.no_window_reason(model)
            if reason is not None:
                raise EvaluationError(flag, f": {name} {reason}: it can be measured only as it is")
    if not converted:
        raise EvaluationError(flag, f": {', '.join(models)}: no model is converted, so none has a window to leave out")


def scored_tokens(models: Sequence[EvaluatedModel]) -> int:
    """Tokens whose loss was measured, over all models."""
    return sum(row.tokens for model in models for row in [*(model.perplexity or ()), *(model.by_position or ())])


def _on_text(name: str, measure: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with error_context(Argument("data"), f" {name}: "):
        return measure(*arguments, **options)


def _recall(model: Any, tokenizer: Any, **options: Any) -> Any:
    with error_context(Argument("recall"), ": "):
        vocabulary, bos = ordinary_tokens(model, tokenizer), bos_token(tokenizer)
        return recall_probe(model, vocabulary=vocabulary, bos=bos, **options)


def _measure(
    name: str, model: Any, tokenizer: Any, measures: Mapping[str, Measure], without_window: bool = False
) -> EvaluatedModel:
    started, facts = time.perf_counter(), _facts(model)
    if without_window:  # its cache is the model's own, and shown there
        name, facts = f"{name} without the window", facts | {"cache": None, "without_window": True}
    with error_context(f"{name}: "), modes.without_window(model) if without_window else nullcontext():
        found = {measure: run(model, tokenizer) for measure, run in measures.items()}
    return EvaluatedModel(name=name, **facts, **found, seconds=round(time.perf_counter() - started, 2))


def _facts(model: Any) -> dict[str, Any]:
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    if not isinstance(model, FastWeightsMixin):
        return facts | {"converted": False, "rule": "attention", "state_bytes": 0}
    settings, described = model.config.fastweights, describe(model)
    cache = [CacheSize(tokens=use.tokens, bytes=use.here, base_bytes=use.attention) for use in described.memory]
    facts |= {"state_bytes": described.state_bytes, "cache": cache}
    return facts | {"converted": True, "rule": settings["rule"], "settings": settings}
