"""lm-eval: its tasks, stock or on local files, those of generated.py, and its own perplexity of a text, for models
converted or not.

lm-eval is an extra and slow to import, so it is imported where it is used.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import importlib.util
import io
import itertools
import json
import logging
import lzma
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.progress import Progress

from fastweights.evaluation.checks import EvaluationError
from fastweights.evaluation.generated import GENERATED_TASKS, passages, score, task_settings
from fastweights.loading import require_tokenizer
from fastweights.modeling.modes import evaluating
from fastweights.tokenization import adds_eos, bos_token, set_special_tokens
from fastweights.utils.errors import Argument
from fastweights.utils.progress import progress_bar

# Standard errors without a formula (that of lambada's perplexity) are bootstrapped; lm-eval's 100,000 take minutes.
BOOTSTRAPS = 1000


@dataclass(frozen=True)
class LocalTask:
    """A stock task of lm-eval, the data file it can be run on (.jsonl or .jsonl.xz) and the fields it reads there."""

    stock: str
    file: str
    fields: tuple[str, ...]


_CHOICES = ("choices", "answerKey")
LOCAL_TASKS = {
    "lambada": LocalTask("lambada/lambada_openai", "lambada_openai", ("text",)),
    "hellaswag": LocalTask(
        "hellaswag/hellaswag", "hellaswag_val", ("activity_label", "ctx_a", "ctx_b", "endings", "label")
    ),
    "piqa": LocalTask("piqa/piqa", "piqa_val", ("goal", "sol1", "sol2", "label")),
    "arc_easy": LocalTask("arc/arc_easy", "arc_easy_val", ("question", *_CHOICES)),
    "arc_challenge": LocalTask("arc/arc_challenge", "arc_challenge_val", ("question", *_CHOICES)),
    "winogrande": LocalTask("winogrande/default", "winogrande_val", ("sentence", "option1", "option2", "answer")),
    "openbookqa": LocalTask("openbookqa/openbookqa", "openbookqa_val", ("question_stem", *_CHOICES)),
}


# The data file of every task that needs no network; None for data of this package.
FILES = {name: task.file for name, task in (LOCAL_TASKS | GENERATED_TASKS).items()}


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    task_folder: str | os.PathLike | None = None,
    length: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    progress: bool = False,
) -> dict[str, dict[str, float]]:
    """Run lm-eval tasks.

    Args:
        model: Any causal model.
        tokenizer: Its tokenizer.
        tasks: Names of GENERATED_TASKS, and of lm-eval's tasks, or with a folder of LOCAL_TASKS.
        task_folder: Folder with the data of the tasks; by default lm-eval downloads them. Tasks whose data is part of
            the package do not need it.
        length: Most tokens of a sequence. Of a longer one only the end is used.
        limit: Items of each task, at most.
        batch_size: Sequences in a forward pass.
        progress: Whether to show a progress bar.

    Returns:
        The metrics of each task.

    Raises:
        EvaluationError: If a task is not known or its data cannot be loaded.
    """
    check_tasks(tasks, task_folder)
    with tempfile.TemporaryDirectory(prefix="fastweights-tasks-", ignore_cleanup_errors=True) as temporary:
        folder = None if task_folder is None else Path(task_folder)
        stock = [task for task in tasks if not _is_local(task, folder)]
        _write_tasks([task for task in tasks if task not in stock], folder, Path(temporary), limit)
        with _bar(progress) as bar, _undisturbed(model):
            adapter = _adapter(model, tokenizer, length, batch_size, bar)
            if adapter.eot_token_id is None and not GENERATED_TASKS.keys().isdisjoint(tasks):
                raise EvaluationError("tasks whose answers are generated need an eos token, and the tokenizer has none")
            manager = _tasks_in(temporary, with_stock=bool(stock))
            return _plain(_simple_evaluate(adapter, manager, tasks, limit)["results"])


def rolling_perplexity(model: Any, tokenizer: Any, text: str, length: int, *, batch_size: int = 8) -> tuple[float, int]:
    """(negative log-likelihood, tokens) of a text by lm-eval's own loglikelihood_rolling, without special tokens."""
    _check_installed()
    with _undisturbed(model):
        from lm_eval.api.instance import Instance

        # Its cache takes the losses of the wrong tokens where the last window repeats an earlier one (lm-eval 0.4.13).
        adapter = _adapter(model, tokenizer, length, batch_size, logits_cache=False)
        if adapter.prefix_token_id is None:
            raise EvaluationError("lm-eval needs a bos or eos token, and the tokenizer has neither")
        request = Instance("loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
        (log_likelihood,) = adapter.loglikelihood_rolling([request], disable_tqdm=True)
        return -float(log_likelihood), len(adapter.tok_encode(text, add_special_tokens=False))


def check_tasks(tasks: Sequence[str], task_folder: str | os.PathLike | None = None) -> None:
    """Refuse tasks that cannot be run, before anything is."""
    _check_installed()
    folder = None if task_folder is None else Path(task_folder)
    for task in tasks:
        if _is_local(task, folder):
            _data_file(task, folder)
        elif task not in _stock_tasks().task_index:
            near = difflib.get_close_matches(task, _stock_tasks().task_index)
            hint = f"near it are {', '.join(near)}" if near else "`lm-eval ls tasks` lists them"
            raise EvaluationError(Argument("tasks"), f" {task}: lm-eval has no such task; {hint}")


def _check_installed() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise EvaluationError("lm-eval is not installed: pip install 'fastweights[eval]'")


@functools.cache
def _stock_tasks() -> Any:
    """The tasks of lm-eval. To list them it reads thousands of files, which takes about ten seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _tasks_in(folder: str, with_stock: bool) -> Any:
    """The tasks that were written to a folder. With those of lm-eval only where they are needed: that takes as long."""
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it asks the network to count even the reading of a local file
    if with_stock and not any(Path(folder).iterdir()):
        return _stock_tasks()
    return TaskManager(include_path=folder, include_defaults=with_stock)


def _is_local(task: str, folder: Path | None) -> bool:
    """Whether the data of a task are in the user's folder or in this package."""
    return folder is not None or task in GENERATED_TASKS


def _adapter(
    model: Any, tokenizer: Any, length: int | None, batch_size: int, bar: Progress | None = None, **settings: Any
) -> Any:
    """lm-eval's Hugging Face model around ours. It may give the tokenizer a padding token, so it gets a copy.

    Of its own accord lm-eval has no bos where it cuts a sequence, nor before the second window of a text.
    """
    from lm_eval.models.huggingface import HFLM

    require_tokenizer(tokenizer)
    bos, own = bos_token(tokenizer), copy.deepcopy(tokenizer)
    if adds_eos(tokenizer):  # contexts must not end with it
        set_special_tokens(own, bos=bos is not None, eos=False)

    class Adapter(HFLM):
        add_bos_token: bool | None

        def loglikelihood_rolling(self, *args: Any, **kwargs: Any) -> Any:
            before, self.add_bos_token = self.add_bos_token, False  # special tokens are not scored
            try:
                return super().loglikelihood_rolling(*args, **kwargs)
            finally:
                self.add_bos_token = before

        def tok_batch_encode(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            ids, mask = super().tok_batch_encode(*args, **kwargs)
            if bos is not None:
                ids[mask[:, 0] == 1, 0] = bos
            return ids, mask

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            longest = max(len(continuation) for _, _, continuation in requests)
            if longest > self.max_length:
                raise EvaluationError(f"a continuation has {longest} tokens: allow more than length {self.max_length}")
            if bar is not None:
                bar.update(bar.task_ids[0], total=len(requests), completed=0)
            if bos is not None:
                requests = [
                    (text, _starting_with(bos, context, self.max_length + 1 - len(continuation)), continuation)
                    for text, context, continuation in requests
                ]
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

        def generate_until(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            if bar is not None:
                bar.update(bar.task_ids[0], total=len(requests), completed=0)
            return super().generate_until(requests, *args, **kwargs)

        def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            found = super()._model_generate(context, *args, **kwargs)
            if bar is not None:
                bar.advance(bar.task_ids[0], len(context))
            return found

        def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if bar is not None:
                bar.advance(bar.task_ids[0], len(inps))
            return super()._model_call(inps, *args, **kwargs)

    settings |= {"max_length": length, "batch_size": batch_size, "softmax_dtype": "float32", "trust_remote_code": False}
    return Adapter(pretrained=model, tokenizer=own, **settings)


def _starting_with(bos: int, context: list[int], length: int) -> list[int]:
    """The last `length` tokens of a context, the first of them replaced by bos."""
    return [bos, *context[-length:][1:]]


def _simple_evaluate(adapter: Any, manager: Any, tasks: Sequence[str], limit: int | None) -> Any:
    import lm_eval
    from datasets.exceptions import DatasetsError

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's own: forking beside torch's threads can hang
    settings: dict[str, Any] = {"limit": limit, "bootstrap_iters": BOOTSTRAPS, "log_samples": False}
    try:
        return lm_eval.simple_evaluate(adapter, tasks=list(dict.fromkeys(tasks)), task_manager=manager, **settings)
    except (OSError, DatasetsError) as error:
        raise EvaluationError(
            Argument("tasks"),
            f" {','.join(tasks)}: data cannot be loaded: {str(error).partition(chr(10))[0]}; lm-eval fetches them from "
            "the hub: connect to the network, or give a folder with the files, ",
            Argument("task_folder"),
        ) from error


def _plain(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """{"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": ...} of each task -> {"acc": 0.5}."""

    def numbers(metrics: dict[str, Any]) -> dict[str, float]:
        found = {name: value for name, value in metrics.items() if "," in name and not isinstance(value, str)}
        return {name.removesuffix(",none"): float(value) for name, value in found.items()}

    return {task: numbers(metrics) for task, metrics in results.items()}


def _write_tasks(tasks: Sequence[str], folder: Path | None, temporary: Path, limit: int | None) -> None:
    """Write a YAML file for each task, and its items. That of a stock task includes it and changes its data files."""
    import lm_eval

    stock = Path(str(lm_eval.__file__)).parent / "tasks"
    for task in tasks:
        data, file = temporary / f"{task}.jsonl", _data_file(task, folder)
        lines = _generated_items(task, file, limit) if task in GENERATED_TASKS else _items(task, file, limit)
        data.write_text("".join(lines), encoding="utf-8")
        splits = {"training_split": None, "validation_split": "validation", "test_split": None}
        files = {"data_files": {"validation": str(data)}, "cache_dir": str(temporary / "cache")}
        source = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files}
        if task in GENERATED_TASKS:
            settings, scored = task_settings(task), f"process_results: !function {score.__module__}.{score.__name__}\n"
        else:
            settings = {"include": str(stock / f"{LOCAL_TASKS[task].stock}.yaml"), "task": task, "tag": None}
            scored = ""
        (temporary / f"{task}.yaml").write_text(yaml.safe_dump(settings | source | splits) + scored, encoding="utf-8")


def _data_file(task: str, folder: Path | None) -> Path | None:
    """The file with the data of a task; None for data of this package."""
    if task not in FILES:
        raise EvaluationError(Argument("tasks"), f" {task}: not known for local files; known are {', '.join(FILES)}")
    name = FILES[task]
    if name is None:
        return None
    if folder is None:
        needs = f" {task}: it needs a folder with the file {name}.jsonl or {name}.jsonl.xz: give "
        raise EvaluationError(Argument("tasks"), needs, Argument("task_folder"))
    for file in (folder / f"{name}.jsonl", folder / f"{name}.jsonl.xz"):
        if file.is_file():
            return file
    there = sorted(file.name for file in folder.glob("*.jsonl*")) or ["no JSONL files"]
    raise EvaluationError(
        Argument("tasks"), f" {task}: no {name}.jsonl or {name}.jsonl.xz in {folder}: found {', '.join(there)}"
    )


def _generated_items(task: str, file: Path | None, limit: int | None) -> list[str]:
    """The items of a task whose answers are generated, a line of JSON each."""
    found = passages() if file is None else [json.loads(line) for line in _items("lambada", file, limit)]
    items = itertools.islice(GENERATED_TASKS[task].items(found), limit)
    return [json.dumps(item | {"task": task}) + "\n" for item in items]


def _items(task: str, file: Path | None, limit: int | None) -> list[str]:
    """The lines of a data file, each an item with the fields that the task reads."""
    assert file is not None
    reader: Any = lzma.open if file.suffix == ".xz" else open
    try:
        with reader(file, "rt", encoding="utf-8") as stream:
            lines = [line.strip() + "\n" for line in itertools.islice(stream, limit)]
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{file} cannot be read: {error}") from error
    if not lines:
        raise EvaluationError(f"{file}: no items to run, ", Argument("limit"), f" {limit}")
    for number, line in enumerate(lines, start=1):
        if problem := _problem(line, LOCAL_TASKS[task].fields):
            raise EvaluationError(f"{file}, line {number}: not an item of {task}, {problem}")
    return lines


def _problem(line: str, fields: tuple[str, ...]) -> str:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    missing = [field for field in fields if not isinstance(item, dict) or field not in item]
    return f"without {', '.join(missing)}" if missing else ""


@contextlib.contextmanager
def _bar(progress: bool) -> Iterator[Progress]:
    console = Console(file=sys.stderr)  # stderr as it is now, before lm-eval's output is discarded
    with progress_bar(console=console, enabled=progress) as bar:
        bar.add_task("lm-eval", total=None)
        yield bar


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """lm-eval prints and logs much, seeds every generator and leaves the model in eval mode."""
    generators, logs = (random.getstate(), np.random.get_state()), logging.root.manager.disable
    nowhere, seeds = io.StringIO(), torch.random.fork_rng([model.device] if model.device.type == "cuda" else [])
    try:
        logging.disable(logging.WARNING)
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), evaluating(model), seeds:
            yield
    finally:
        logging.disable(logs)
        random.setstate(generators[0])
        np.random.set_state(generators[1])
