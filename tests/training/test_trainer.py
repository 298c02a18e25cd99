"""Training runs, in this process: a run that crashed and was resumed is the run that did not, to the last bit."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from helpers.cli import CHAT_TEMPLATE, tokenizer
from helpers.tiny import pretrained
from helpers.training import (
    CHAIN,
    FINETUNE,
    LENGTH,
    PEAK,
    STEP,
    WORDS,
    Files,
    assert_only_retained_checkpoints,
    assert_same_run,
    crash_after,
    log_of,
    losses_of,
    make_recipe,
    make_train_config,
    numbers_logged,
    resume_in,
    save_base,
    save_converted,
    train_in,
    training_files,
    weights_of,
)
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.data.batches import validation_rows
from fastweights.data.token_files import prepare
from fastweights.loading import load
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.layer import FastWeightsAttention
from fastweights.training import checkpoint, trainer
from fastweights.training.losses import StageLoss, next_token_loss
from fastweights.training.recipe import Stage
from fastweights.training.trainer import Diverged, Interrupted, Trainer, resume, train
from fastweights.utils.progress import Display

FITTED = tuple(dict(stage, fit="scale") for stage in CHAIN)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with training_files(tmp_path_factory.mktemp("train")) as made:
        yield made


@pytest.fixture(scope="module")
def chain(files: Files) -> Path:
    """The run that others are compared with: attention transfer, then distilling."""
    folder = files.folder / "chain"
    result = train_in(folder, make_train_config(files))
    assert result["finished"] and result["diverged"] is None
    return folder


@pytest.fixture(scope="module")
def fitted(files: Files) -> Path:
    """A run with every phase that there is."""
    train_in(files.folder / "fitted", make_train_config(files, make_recipe(FITTED)))
    return files.folder / "fitted"


@pytest.fixture(scope="module")
def peak(files: Files) -> Path:
    """A run whose best checkpoint is not its first or last one."""
    train_in(files.folder / "peak", make_train_config(files, make_recipe(PEAK)))
    return files.folder / "peak"


def assert_same_losses(found: Path, expected: Path, tolerance: float) -> None:
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=tolerance)


def test_finished_run_has_checkpoints_log_and_result(files: Files, chain: Path) -> None:
    expected = [".lock", "best", "checkpoints", "last", "log.jsonl", "result.json", "run.json"]
    assert sorted(os.listdir(chain)) == expected
    assert_only_retained_checkpoints(chain)
    result = json.loads((chain / "result.json").read_text())
    steps = [line for line in numbers_logged(chain) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["stage"] for line in steps] == [0] * 6 + [1] * 6
    assert [line["tokens"] for line in steps] == [STEP * n for n in range(1, 13)]
    assert result["curve"] == [{k: line[k] for k in ("step", "tokens", "stage", "loss")} for line in steps]
    assert result["tokens"] == 12 * STEP and result["processes"] == 1 and result["base"]["name"] == "base"
    assert [stage["steps"] for stage in result["stages"]] == [6, 6]
    assert result["model"]["name"] == "converted" and result["data"]["name"] == "text.txt"
    assert sum(stage["seconds"] for stage in result["stages"]) < result["seconds"]


def test_validation_at_start_at_intervals_and_at_stage_ends(chain: Path) -> None:
    result = json.loads((chain / "result.json").read_text())
    assert [found["step"] for found in result["validation"]] == [0, 4, 6, 10, 12]
    logged = [line["validation_loss"] for line in numbers_logged(chain) if "validation_loss" in line]
    assert logged == [found["loss"] for found in result["validation"]]
    assert result["last"] == result["validation"][-1]


@pytest.mark.parametrize(("run", "best"), [("chain", 0), ("peak", 4)])
def test_best_and_last_are_models_with_the_logged_validation_loss(
    files: Files, request: pytest.FixtureRequest, run: str, best: int
) -> None:
    """The best validation is a checkpoint, whenever it falls; either is an ordinary model with the loss in the log."""
    folder = request.getfixturevalue(run)
    result = json.loads((folder / "result.json").read_text())
    assert result["best"] == min(result["validation"], key=lambda found: found["loss"])
    assert result["best"]["step"] == best
    for name in ("best", "last"):
        assert int((folder / name).readlink().name.split("-")[1]) == result[name]["step"]
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        assert isinstance(model, FastWeightsMixin)
        assert validation_loss(files, model) == pytest.approx(result[name]["loss"], rel=1e-6)


def test_run_that_ends_worse_than_it_began_says_so(chain: Path, peak: Path, files: Files, tmp_path: Path) -> None:
    for folder, best in ((chain, "before the first step"), (peak, "step 4")):
        result = json.loads((folder / "result.json").read_text())
        start, end = (f"{result['validation'][i]['perplexity']:,.2f}" for i in (0, -1))
        assert all(part in result["warning"] for part in (start, end, best, "distill.learning_rate"))
    shown = io.StringIO()
    display = Display(console=Console(file=shown))
    train(make_train_config(files, make_recipe(FINETUNE)), tmp_path / "better", display=display)
    assert "warning" not in json.loads((tmp_path / "better" / "result.json").read_text())
    assert "worse" not in shown.getvalue()
    resume(chain, display=display)
    assert "ended worse than it began" in shown.getvalue()


@pytest.mark.parametrize("fit", ["none", "scale", "full"])
def test_best_model_may_be_that_before_the_first_step_as_fitted(files: Files, tmp_path: Path, fit: str) -> None:
    """Wherever the run is interrupted, what was fitted is not fitted again."""
    task = make_train_config(files, make_recipe((dict(PEAK[1], fit=fit, learning_rate=0.4),)))
    result = train_in(tmp_path / "whole", task)
    assert result["best"] == result["validation"][0] and (tmp_path / "whole" / "best").readlink().name == "0-0000000"
    crash_after(tmp_path / "run", task, 1)
    assert resume_in(tmp_path / "run")["best"] == result["best"]
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    moved = [
        n for n, w in weights_of(tmp_path / "whole" / "best").items() if not w.equal(weights_of(files.converted)[n])
    ]
    assert bool(moved) == (fit != "none") and all("o_proj" in name for name in moved)


@torch.no_grad()
def validation_loss(files: Files, model: Any) -> float:
    rows = validation_rows(prepare(files.validation, tokenizer(), progress=False), 32, 4 * 32)
    total = StageLoss(model.eval(), None, Stage())(rows)
    return float(total) / int((rows["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_processes_share_validation_rows_and_run_equally_often(
    files: Files, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are counted once, and every process runs the model equally often, as sharded models must be."""
    monkeypatch.setattr("fastweights.training.trainer.VALIDATION_BATCH_TOKENS", 32)
    rows = validation_rows(prepare(files.validation, tokenizer(), progress=False), 32, 4 * 32)
    runs, sums = [], torch.zeros(2, dtype=torch.float64)

    def reduce(own: torch.Tensor, _how: str) -> torch.Tensor:
        sums.add_(own)
        return own.clamp(min=1)

    for rank in range(world):
        scored: list[float] = []
        process: Any = SimpleNamespace(validation=rows, recipe=make_recipe(), world_size=world, rank=rank, device="cpu")
        process.accelerator = SimpleNamespace(reduce=reduce)
        process._autocast, process._on_device, process._stoppable = nullcontext, lambda part: part, nullcontext
        process.display, process.progress = Display(enabled=False), checkpoint.Progress()
        score = lambda part, seen=scored: seen.append(1.0) or part["input_ids"].sum()  # noqa: E731
        Trainer.validation_loss(process, score, "validating")
        runs.append(len(scored))
    assert runs == [-(-4 // world)] * world
    assert sums.tolist() == [float(rows["input_ids"].sum()), float((rows["labels"][:, 1:] != -100).sum())]


def test_tied_embeddings_are_saved_once(chain: Path, files: Files) -> None:
    assert weights_of(chain / "last").keys() == weights_of(files.converted).keys()
    assert "lm_head.weight" not in weights_of(chain / "last")


def test_losses_decrease(chain: Path) -> None:
    losses = losses_of(chain)
    assert losses[5] < 0.6 * losses[0] and losses[11] < 0.6 * losses[6]


def test_same_seed_repeats_the_run_and_another_does_not(files: Files, chain: Path, tmp_path: Path) -> None:
    train_in(tmp_path / "again", make_train_config(files))
    assert_same_run(tmp_path / "again", chain)
    train_in(tmp_path / "other", make_train_config(files, make_recipe(seed=1)))
    assert losses_of(tmp_path / "other")[0] != losses_of(chain)[0]


@pytest.mark.parametrize("after", [2, 4, 6, 7, 11])
def test_resume_after_crash_matches_uninterrupted_run(files: Files, chain: Path, tmp_path: Path, after: int) -> None:
    """Before the first checkpoint (3), after it, after the last step of a stage, in the next one."""
    crash_after(tmp_path / "run", make_train_config(files), after)
    result = resume_in(tmp_path / "run")
    assert_same_run(tmp_path / "run", chain)
    expected = json.loads((chain / "result.json").read_text())
    assert result["validation"] == expected["validation"] and result["curve"] == expected["curve"]


def test_resume_of_a_finished_run_changes_nothing(files: Files, chain: Path) -> None:
    before, result = log_of(chain), json.loads((chain / "result.json").read_text())
    again = resume_in(chain)
    assert log_of(chain) == before and {name: result[name] for name in again} == again


def test_truncated_log_line_is_written_again(files: Files, chain: Path, tmp_path: Path) -> None:
    crash_after(tmp_path / "run", make_train_config(files), 5)
    with (tmp_path / "run" / "log.jsonl").open("a") as log:
        log.write('{"step": 6, "sta')
    resume_in(tmp_path / "run")
    assert_same_run(tmp_path / "run", chain)


@pytest.mark.parametrize("stopped_at", ["best", "last"])
def test_resume_after_crash_between_links_matches_uninterrupted_run(
    files: Files, peak: Path, tmp_path: Path, stopped_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = checkpoint.link

    def stop(folder: Path, name: str, target: Path) -> None:
        if name == stopped_at and target.name == {"best": "0-0000004", "last": "1-0000006"}[name]:
            raise KeyboardInterrupt
        link(folder, name, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint, "link", stop)
        train_in(tmp_path / "run", make_train_config(files, make_recipe(PEAK)))
    resume_in(tmp_path / "run")
    assert_same_run(tmp_path / "run", peak)


@pytest.mark.parametrize(
    "settings",
    [dict(micro_batch=1), dict(micro_batch=3), dict(gradient_checkpointing=True)],
    ids=["micro-batches of 1", "micro-batches of 3", "gradient checkpointing"],
)
def test_micro_batches_and_gradient_checkpointing_do_not_change_losses(
    files: Files, chain: Path, tmp_path: Path, settings: Any
) -> None:
    train_in(tmp_path / "run", make_train_config(files, make_recipe(**settings)))
    assert_same_losses(tmp_path / "run", chain, 1e-5)


def test_gradient_checkpointing_recomputes(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    forward = FastWeightsAttention.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.training)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(FastWeightsAttention, "forward", counted)
    frozen = dict(loss="distill", tokens=STEP, body_learning_rate=0)
    recipe = make_recipe((dict(CHAIN[0], tokens=STEP), frozen), gradient_checkpointing=True)
    train_in(tmp_path / "run", make_train_config(files, recipe, validation=None))
    assert len(calls) == 2 * 2 * 2, "two layers, forwards and again backwards, in both stages"


def changed(before: Path, after: Path) -> dict[str, float]:
    """How far each tensor moved at most."""
    old, new = weights_of(before), weights_of(after)
    return {name: float((new[name] - old[name]).abs().max()) for name in old if not torch.equal(new[name], old[name])}


def test_transfer_trains_only_the_new_attention(files: Files, tmp_path: Path) -> None:
    train_in(tmp_path / "run", make_train_config(files, make_recipe(CHAIN[:1])))
    moved = changed(files.converted, tmp_path / "run" / "last")
    assert moved and all(".attn." in name for name in moved)
    assert not [name for name in moved if name.endswith(("key_scale", "planes"))]


@pytest.mark.parametrize("rate", [0.0, 1e-4])
def test_body_learning_rate_applies_to_the_body(files: Files, tmp_path: Path, rate: float) -> None:
    """Adam's first step is as long as the learning rate."""
    stage = dict(loss="distill", tokens=STEP, learning_rate=1e-3, body_learning_rate=rate, warmup=0)
    train_in(tmp_path / "run", make_train_config(files, make_recipe((stage,))))
    moved = changed(files.converted, tmp_path / "run" / "last")
    body = {name: size for name, size in moved.items() if ".attn." not in name}
    assert max(size for name, size in moved.items() if name not in body) == pytest.approx(1e-3, rel=1e-2)
    assert (max(body.values()) == pytest.approx(1e-4, rel=1e-2)) if rate else not body


def test_teacher_is_the_base_or_the_named_model(files: Files, chain: Path, tmp_path: Path) -> None:
    train_in(tmp_path / "named", make_train_config(files, teacher=str(files.base)))
    assert_same_run(tmp_path / "named", chain)
    other = save_base(tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(other)
    model.lm_head.weight.data *= 1.1
    model.save_pretrained(other)
    train_in(tmp_path / "another", make_train_config(files, teacher=str(other)))
    assert losses_of(tmp_path / "another")[6] != losses_of(chain)[6]


def test_finetuning_needs_no_teacher(files: Files, tmp_path: Path) -> None:
    result = train_in(tmp_path / "run", make_train_config(files, make_recipe(FINETUNE)))
    assert result["base"] is None and len(losses_of(tmp_path / "run")) == 6
    assert train_in(tmp_path / "named", make_train_config(files, make_recipe(FINETUNE), teacher=str(files.base)))[
        "base"
    ]


def test_unconverted_model_can_be_finetuned_and_resumed(files: Files, tmp_path: Path) -> None:
    task = make_train_config(files, make_recipe(FINETUNE), model=str(files.base))
    crash_after(tmp_path / "run", task, 4)
    assert resume_in(tmp_path / "run")["model"]["settings"] is None
    losses = losses_of(tmp_path / "run")
    assert losses[-1] < losses[0] and len(losses) == 6
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "last")) is type(pretrained("gpt2"))


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", dict(layers=(1,), window=4)), ("opt", {}), ("gemma3_text", {})]
)
def test_families_and_hybrids_train_and_resume(files: Files, tmp_path: Path, family: str, settings: Any) -> None:
    base = save_base(tmp_path / "base", family)
    student = save_converted(tmp_path / "student", base, family, **settings)
    task = make_train_config(files, model=str(student))
    train_in(tmp_path / "whole", task)
    losses = losses_of(tmp_path / "whole")
    assert losses[5] < losses[0] and losses[11] < losses[6]
    crash_after(tmp_path / "run", task, 8)
    resume_in(tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_resume_with_dropout_matches_uninterrupted_run(files: Files, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    model = str(save_converted(tmp_path / "student", base))
    tasks = {dropout: make_train_config(files, make_recipe(dropout=dropout), model=model) for dropout in (True, False)}
    for dropout, task in tasks.items():
        train_in(tmp_path / str(dropout), task)
    assert losses_of(tmp_path / "True") != losses_of(tmp_path / "False")
    crash_after(tmp_path / "run", tasks[True], 8)
    resume_in(tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "True")


RECALL_LENGTH = 64
RECALL = tuple(dict(stage, tokens=4 * 4 * RECALL_LENGTH, recall=0.5, window_dropout=0.5) for stage in CHAIN)


@pytest.fixture(scope="module")
def windowed(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model with a window, and documents that are long enough for recall."""
    folder = tmp_path_factory.mktemp("windowed")
    converted = save_converted(folder / "converted", files.base, window=4)
    (folder / "text.txt").write_text(files.data.read_text().replace("\n<|endoftext|>\n", " "))
    return files._replace(converted=converted, data=folder / "text.txt")


def recall_recipe(stages: tuple[dict[str, Any], ...] = RECALL, **settings: Any) -> Any:
    return make_recipe(stages, length=RECALL_LENGTH, batch_tokens=4 * RECALL_LENGTH, **settings)


@pytest.fixture(scope="module")
def recalling(windowed: Files) -> Path:
    """A run with recall and window dropout."""
    train_in(windowed.converted.parent / "recalling", make_train_config(windowed, recall_recipe()))
    return windowed.converted.parent / "recalling"


@pytest.mark.parametrize("after", [2, 5])
def test_resume_with_recall_and_window_dropout_matches_uninterrupted_run(
    windowed: Files, recalling: Path, tmp_path: Path, after: int
) -> None:
    crash_after(tmp_path / "run", make_train_config(windowed, recall_recipe()), after)
    resume_in(tmp_path / "run")
    assert_same_run(tmp_path / "run", recalling)


@pytest.mark.parametrize(
    "settings",
    [dict(micro_batch=1), dict(micro_batch=3), dict(gradient_checkpointing=True)],
    ids=["micro-batches of 1", "micro-batches of 3", "gradient checkpointing"],
)
def test_recall_and_window_dropout_do_not_depend_on_micro_batches_or_gradient_checkpointing(
    windowed: Files, recalling: Path, tmp_path: Path, settings: Any
) -> None:
    train_in(tmp_path / "run", make_train_config(windowed, recall_recipe(**settings)))
    assert_same_losses(tmp_path / "run", recalling, 1e-5)
    norms = [
        [line["gradient_norm"] for line in numbers_logged(run) if "loss" in line]
        for run in (tmp_path / "run", recalling)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("name", ["recall", "window_dropout"])
def test_recall_and_window_dropout_change_the_losses_but_not_the_validation_before(
    windowed: Files, recalling: Path, tmp_path: Path, name: str
) -> None:
    train_in(tmp_path / "run", make_train_config(windowed, recall_recipe(tuple(s | {name: 0} for s in RECALL))))
    assert losses_of(tmp_path / "run") != losses_of(recalling)
    assert (
        numbers_logged(tmp_path / "run")[0] == numbers_logged(recalling)[0]
        and "validation_loss" in numbers_logged(recalling)[0]
    )


def test_window_dropout_of_1_trains_states_alone(windowed: Files, recalling: Path, tmp_path: Path) -> None:
    stages = tuple(dict(stage, recall=0, window_dropout=1) for stage in RECALL)
    train_in(tmp_path / "run", make_train_config(windowed, recall_recipe(stages)))
    assert not [name for name in changed(windowed.converted, tmp_path / "run" / "last") if ".window." in name]
    assert [name for name in changed(windowed.converted, recalling / "last") if ".window." in name]


@pytest.mark.parametrize("fit", ["full", "scale"])
def test_fitted_outputs_start_with_a_lower_loss_in_both_precisions(
    files: Files, chain: Path, tmp_path: Path, fit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastweights.training.trainer.FIT_TOKENS", 1024)
    for precision in ("float32", "bfloat16"):
        recipe = make_recipe((dict(CHAIN[0], fit=fit), CHAIN[1]), precision=precision)
        train_in(tmp_path / precision, make_train_config(files, recipe))
    assert losses_of(tmp_path / "float32")[0] < 0.9 * losses_of(chain)[0]
    assert_same_losses(tmp_path / "bfloat16", tmp_path / "float32", 0.1)
    crash_after(tmp_path / "run", make_train_config(files, make_recipe((dict(CHAIN[0], fit=fit), CHAIN[1]))), 4)
    resume_in(tmp_path / "run")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "float32")


def test_memory_lengths_come_from_the_teacher_in_a_fit(files: Files, tmp_path: Path) -> None:
    """Without one the run says that they do not, and they stay log-spaced."""
    student = str(save_converted(tmp_path / "student", files.base, gate_init="teacher", window=4))
    shown = {}
    for fit in ("none", "full"):
        text = io.StringIO()
        # a rate that leaves the gates where the fit put them
        config = make_train_config(files, make_recipe((dict(CHAIN[0], fit=fit, learning_rate=1e-9),)), model=student)
        train(config, tmp_path / fit, display=Display(console=Console(file=text, width=400)))
        shown[fit] = text.getvalue()
    assert "gate_init='teacher'" in shown["none"] and "gate_init='teacher'" not in shown["full"]
    gates = {fit: weights_of(tmp_path / fit / "last") for fit in shown}
    name = "transformer.h.0.attn.rule.gates.f.bias"
    assert torch.allclose(gates["none"][name], weights_of(Path(student))[name], atol=1e-6)
    assert not torch.allclose(gates["full"][name], gates["none"][name], atol=0.1)


def test_resume_after_a_fit_of_memory_lengths_matches_uninterrupted_run(files: Files, tmp_path: Path) -> None:
    """From the checkpoint of a later step, and again from the start where there is none."""
    student = str(save_converted(tmp_path / "student", files.base, gate_init="teacher", window=4))
    stages = tuple(dict(stage, fit="full") for stage in CHAIN)
    for name, settings in (("validated", {}), ("unvalidated", dict(validation=None))):
        config = make_train_config(files, make_recipe(stages), model=student, **settings)
        train_in(tmp_path / f"{name} whole", config)
        for steps in (1, 4):
            crash_after(tmp_path / f"{name} {steps}", config, steps)
            resume_in(tmp_path / f"{name} {steps}")
            assert losses_of(tmp_path / f"{name} {steps}") == losses_of(tmp_path / f"{name} whole")


def test_bfloat16_keeps_the_weights_in_float32(files: Files, chain: Path, tmp_path: Path) -> None:
    train_in(tmp_path / "run", make_train_config(files, make_recipe(precision="bfloat16")))
    assert losses_of(tmp_path / "run") != losses_of(chain)
    assert_same_losses(tmp_path / "run", chain, 0.1)
    weights = weights_of(tmp_path / "run" / "last")
    assert {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values())


def test_lora_trains_low_rank_updates_and_saves_a_merged_model(files: Files, tmp_path: Path) -> None:
    student = save_converted(tmp_path / "student", files.base, window=3)
    task = make_train_config(files, make_recipe(lora=2), model=str(student))
    train_in(tmp_path / "whole", task)
    assert weights_of(tmp_path / "whole" / "last").keys() == weights_of(student).keys()
    moved = changed(student, tmp_path / "whole" / "last")
    small = ("gates.f.", "gates.z.", "mix.", "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    assert moved and all(any(part in name for part in small) for name in moved)
    assert {part for part in small if any(part in name for name in moved)} == set(small)
    for name in (n for n in moved if "proj.weight" in n):
        update = weights_of(tmp_path / "whole" / "last")[name] - weights_of(student)[name]
        assert int(torch.linalg.matrix_rank(update, rtol=1e-3)) <= 2 * 2, "two stages, each of rank 2"
    for after in (4, 6, 8):
        crash_after(tmp_path / f"run {after}", task, after)
        resume_in(tmp_path / f"run {after}")
        assert_same_run(tmp_path / f"run {after}", tmp_path / "whole")


def test_result_counts_the_parameters_of_the_saved_model(files: Files, tmp_path: Path) -> None:
    """Without the low-rank updates that are merged into it, also where a run diverges before that."""
    wild = make_recipe((FINETUNE[0] | {"learning_rate": 1e6},), lora=2)
    with pytest.raises(Diverged):
        train(make_train_config(files, wild), tmp_path / "wild", display=Display(enabled=False))
    diverged = json.loads((tmp_path / "wild/result.json").read_text())
    finished = train_in(tmp_path / "run", make_train_config(files, make_recipe(FINETUNE, lora=2)))
    expected = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(files.converted).parameters())
    assert diverged["model"]["parameters"] == finished["model"]["parameters"] == expected


def test_student_is_loaded_once_for_each_stage(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage but the first starts from a checkpoint. Nothing follows the last one."""
    loaded: list[str] = []

    def counting(source: Any, **options: Any) -> Any:
        loaded.append(Path(source).name)
        return load(source, **options)

    monkeypatch.setattr(trainer, "load", counting)
    train_in(tmp_path / "run", make_train_config(files))
    assert loaded == ["converted", "1-0000006"]


class SignallingDisplay(Display):
    """Sends this process a signal in the phase of a name, when that has come some times."""

    def __init__(self, phase: str, number: int, times: int = 1) -> None:
        self.shown = io.StringIO()
        super().__init__(console=Console(file=self.shown))
        self.expected, self.number, self.left = phase, number, times

    @contextmanager
    def phase(self, name: str, total: int | None = None, announce: bool = True) -> Iterator[Callable[[], None]]:
        with super().phase(name, total, announce) as advance:
            self.left -= name.startswith(self.expected)
            if name.startswith(self.expected) and self.left == 0:
                signal.raise_signal(self.number)
                pytest.fail(f"{name} was not interrupted")
            yield advance


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, found)


@pytest.mark.parametrize(
    ("phase", "times", "number", "saved"),
    [
        ("loading the model", 1, signal.SIGINT, None),
        ("loading the teacher", 1, signal.SIGTERM, None),
        ("measuring the base", 1, signal.SIGINT, None),
        ("fitting", 1, signal.SIGTERM, None),
        ("validating", 1, signal.SIGINT, None),
        ("validating", 2, signal.SIGTERM, "0-0000004"),
        ("validating", 3, signal.SIGINT, "0-0000006"),
        ("loading the checkpoint", 1, signal.SIGTERM, "1-0000006"),
        ("validating", 5, signal.SIGINT, "1-0000012"),
    ],
)
def test_signal_stops_a_phase_at_once_and_the_run_resumes_to_the_bit(
    files: Files, fitted: Path, tmp_path: Path, default_sigint: None, phase: str, times: int, number: int, saved: str
) -> None:
    display, folder = SignallingDisplay(phase, number, times), tmp_path / "run"
    task = make_train_config(files, make_recipe(FITTED))
    with pytest.raises(Interrupted, match=signal.Signals(number).name) as stopped:
        train(task, folder, display=display)
    assert stopped.value.exit_code == 128 + number and "stopping" in display.shown.getvalue()
    assert (folder / "last").exists() == (saved is not None)
    if saved:
        assert (folder / "last").readlink().name == saved
    if folder.exists():
        assert f"resume({str(folder)!r})" in str(stopped.value)
        resume_in(folder)
    else:
        assert "start it again" in str(stopped.value)
        train_in(folder, task)
    assert_same_run(folder, fitted)


def test_signal_while_a_checkpoint_is_written_waits_for_it(
    files: Files, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.write_checkpoint

    def stop_and_write(*args: Any) -> None:
        if args[-1].step == 3:
            signal.raise_signal(signal.SIGTERM)
        write(*args)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(checkpoint, "write_checkpoint", stop_and_write)
        train_in(tmp_path / "run", make_train_config(files))
    assert (tmp_path / "run" / "last").readlink().name == "0-0000003"
    resume_in(tmp_path / "run")
    assert_same_run(tmp_path / "run", chain)


def test_run_in_a_thread_ignores_signals(files: Files, tmp_path: Path) -> None:
    results: list[dict[str, Any]] = []
    task = make_train_config(files, make_recipe((dict(FINETUNE[0], tokens=STEP),)))
    thread = threading.Thread(target=lambda: results.append(train_in(tmp_path / "run", task)))
    thread.start()
    thread.join()
    assert results[0]["finished"]


def test_stage_may_have_its_own_sequence_length(files: Files, tmp_path: Path) -> None:
    recipe = make_recipe((dict(CHAIN[0], length=16), CHAIN[1]))
    train_in(tmp_path / "run", make_train_config(files, recipe))
    assert len(losses_of(tmp_path / "run")) == 12


class FakeTracker(GeneralTracker):
    """Records its calls."""

    name = "fake"
    requires_logging_directory = False
    calls: ClassVar[list[tuple[str, Any]]] = []

    def __init__(self, project: str) -> None:
        super().__init__()
        self.calls.append(("project", project))

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict) -> None:
        self.calls.append(("recipe", json.loads(values["recipe"])))

    def log(self, values: dict, step: int | None, **_: Any) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_tracker_receives_the_log(files: Files, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "fake", FakeTracker)
    monkeypatch.setattr(FakeTracker, "calls", calls := [])
    task = make_train_config(files, report_to="fake")
    train_in(tmp_path / "run", task)
    assert calls[:2] == [("project", "fastweights"), ("recipe", task.recipe.to_dict())] and calls[-1][0] == "finish"
    logged = [what for kind, what in calls if kind == "log"]
    assert [step for step, _ in logged] == [line["step"] for line in numbers_logged(chain)]
    assert [values["loss"] for _, values in logged if "loss" in values] == losses_of(chain)
    calls.clear()
    crash_after(tmp_path / "crashed", task, 2)
    assert calls[-1][0] == "finish"


def test_display_shows_stages_and_validations(files: Files, chain: Path, tmp_path: Path) -> None:
    shown = io.StringIO()
    display = Display(console=Console(file=shown, width=120))
    result = train(make_train_config(files), tmp_path / "run", display=display).to_dict()
    text = shown.getvalue()
    for found in result["validation"]:
        ratio = found["perplexity"] / result["base"]["perplexity"]
        expected = f"after {found['tokens']:,} tokens: validation perplexity {found['perplexity']:,.2f}, {ratio:.3f} ×"
        assert expected in text
    assert "1/2 transfer" in text and "2/2 distill" in text and "6/6" in text and "tokens/s" in text
    assert re.search(r"about \d+ s left of \d+ s in all.*steps: 9, validations: 4", text)
    assert re.search(r"about \d+ s left of \d+ s in all.*steps: 3, validations: 2", text)


@pytest.mark.parametrize("terminal", [True, False])
def test_every_phase_is_shown(files: Files, tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal only what takes some time, and nothing that is done as often as a step."""
    monkeypatch.setattr("fastweights.utils.progress.LINE_AFTER", 0.0)
    shown = io.StringIO()
    console = Console(file=shown, width=200, force_terminal=terminal)
    recipe = make_recipe((dict(CHAIN[0], fit="full"),))
    train(make_train_config(files, recipe), tmp_path / "run", display=Display(console=console))
    phases = ("loading the model converted", "loading the teacher", "measuring the base model", "fitting", "validating")
    assert all(phase in shown.getvalue() for phase in phases)
    assert ("saving a checkpoint" in shown.getvalue()) == terminal


@pytest.mark.parametrize(("length", "noticed"), [(5, True), (200, False)])
def test_recall_that_changes_nothing_is_noticed(files: Files, tmp_path: Path, length: int, noticed: bool) -> None:
    """The words of a document are random, so that only its length matters."""
    draw, text, said = random.Random(0), tmp_path / "text.txt", []
    documents = (" ".join(draw.choice(WORDS) for _ in range(length)) for _ in range(4000 // length))
    text.write_text("\n<|endoftext|>\n".join(documents))
    display = Display(enabled=False)
    display.print = said.append  # type: ignore[method-assign]
    stage = FINETUNE[0] | {"recall": 1.0, "tokens": 4 * 64}
    config = make_train_config(files, make_recipe((stage,), length=64, batch_tokens=256), data=str(text))
    train(config, tmp_path / "run", display=display)
    assert any("finetune.recall=1" in line for line in said) == noticed


def test_disabled_display_prints_nothing(files: Files, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    train_in(tmp_path / "run", make_train_config(files, make_recipe(FINETUNE)))
    assert capfd.readouterr() == ("", "")


def chat_config(files: Files, folder: Path, *conversations: tuple[str, str], **settings: Any) -> Any:
    """A run on chats of a question and its answer, with a tokenizer that has a chat template."""
    made = tokenizer()
    made.chat_template = CHAT_TEMPLATE
    made.save_pretrained(shutil.copytree(files.converted, folder / "student"))
    turns = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in conversations
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    data = str(folder / "chat.jsonl")
    return make_train_config(files, model=str(folder / "student"), data=data, validation=data, **settings)


def test_chats_are_trained_and_validated_on_their_answers(files: Files, tmp_path: Path) -> None:
    chats = [(f"Who is {name}?", f"{name} is a cat.") for name in ("Anna", "Ben", "Cleo", "Dora")] * 12
    config = chat_config(files, tmp_path, *chats, recipe=make_recipe((*FINETUNE, CHAIN[1])))
    found = train_in(tmp_path / "run", config)["validation"][0]["loss"]
    student, made = (auto.from_pretrained(config.model) for auto in (AutoModelForCausalLM, AutoTokenizer))
    rows = validation_rows(prepare(config.data, made, progress=False), config.recipe.length, 4 * config.recipe.length)
    labels = rows["labels"][:, 1:]
    assert made.decode(labels[labels != -100]).startswith("Anna is a cat.Ben is a cat.")
    with torch.no_grad():
        expected = next_token_loss(student, rows) / (labels != -100).sum()
    assert found == pytest.approx(float(expected), rel=1e-5)
    crash_after(tmp_path / "crashed", config, 8)
    resume_in(tmp_path / "crashed")
    assert_same_run(tmp_path / "crashed", tmp_path / "run")


def test_batch_of_questions_only_has_the_loss_zero(files: Files, tmp_path: Path) -> None:
    recipe = make_recipe(FINETUNE, batch_tokens=LENGTH, validation_tokens=10**6)
    train_in(tmp_path / "run", chat_config(files, tmp_path, *[("why " * 100, "Yes.")] * 2, recipe=recipe))
    losses = losses_of(tmp_path / "run")
    assert 0.0 in losses and all(math.isfinite(loss) for loss in losses)
