"""The host of a training step does not wait for its device: losses are read a step late, rows prepared in a thread."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import (
    CHAIN,
    FINETUNE,
    LENGTH,
    STEP,
    Crash,
    Files,
    assert_same_run,
    crash_after,
    make_recipe,
    make_train_config,
    resume_in,
    save_converted,
    train_in,
    training_files,
    weights_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights import ops
from fastweights.data.batches import PackedBatches
from fastweights.data.prefetch import prefetch
from fastweights.training import step
from fastweights.training.readback import Readback
from fastweights.training.step import StepRunner
from fastweights.training.trainer import UNREAD_STEPS, Diverged

aten = torch.ops.aten
# Operators whose result, or its shape, is known to the host only when the device has finished.
READS = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.nonzero_numpy,
    aten.masked_select,
    aten.unique_dim,
    aten._unique2,
    aten.bincount,
    aten.argwhere,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Waits(Exception):
    pass


class NoReads(TorchDispatchMode):
    """Raises where the host would have to wait if its tensors were on a GPU."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = operator.overloadpacket
        reads = packet in READS or operator is aten.repeat_interleave.Tensor
        if packet in INDEXING:
            reads = any(index is not None and index.dtype == torch.bool for index in args[1])
        if reads:
            raise Waits(str(operator))
        return operator(*args, **kwargs or {})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with training_files(tmp_path_factory.mktemp("waiting")) as made:
        yield made


@pytest.fixture(scope="module")
def chain(files: Files) -> Path:
    train_in(files.folder / "chain", make_train_config(files))
    return files.folder / "chain"


@pytest.fixture
def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setitem(UNREAD_STEPS, "cpu", 1)


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every step of a trainer runs without reading what it computes; returns the numbers of the steps."""
    made, run, adamw = [], StepRunner.run, torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **options: adamw(groups, **options | {"fused": True}))

    def refuse(*_: Any, **__: Any) -> Any:
        raise Waits("a tensor is copied to the host, or from memory that is not pinned")

    def strict(runner: StepRunner, *args: Any) -> Readback:
        with NoReads(), pytest.MonkeyPatch.context() as patch:
            for owner, name in ((torch.Tensor, "tolist"), (torch.Tensor, "numpy"), (torch.Tensor, "cpu")):
                patch.setattr(owner, name, refuse)
            patch.setattr(torch, "tensor", refuse)
            values = run(runner, *args)
        made.append(args[1])
        return values

    monkeypatch.setattr(StepRunner, "run", strict)
    return made


@pytest.mark.parametrize("stage", [*CHAIN, *FINETUNE], ids=lambda stage: stage["loss"])
def test_step_reads_nothing_from_the_device(
    files: Files,
    tmp_path: Path,
    no_reads: list[int],
    read_late: None,
    stage: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a window, sinks, rows without the window and documents that end inside a row; with the kernels that run on a
    GPU, because transformers' own masks are made by reading positions."""
    settings = dict(window=4, sinks=2, gate_init="log", rule="gated_delta", mix="token")
    student = save_converted(tmp_path / "student", files.base, **settings)
    stages = (dict(stage, tokens=LENGTH, window_dropout=0.5),)
    recipe = make_recipe(stages, batch_tokens=LENGTH)
    config = make_train_config(files, recipe, model=str(student), validation=None)
    monkeypatch.setattr(ops, "runs_window_kernels", lambda q, k, v: True)
    train_in(tmp_path / "run", config)
    assert no_reads == [0]
    assert "attn_implementation" not in (tmp_path / "run" / "last" / "config.json").read_text()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.add_(torch.tensor(1.0)),
        lambda x: x.repeat_interleave(torch.ones(len(x), dtype=torch.long)),
    ],
    ids=["float", "any", "mask", "nonzero", "tolist", "cpu", "new tensor", "repeats"],
)
def test_a_read_inside_a_step_is_noticed(
    files: Files, tmp_path: Path, no_reads: list[int], read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = step.clip_gradients

    def reading(optimizer: torch.optim.Optimizer, largest: float) -> torch.Tensor:
        read(optimizer.param_groups[0]["params"][0].detach().flatten())
        return clip(optimizer, largest)

    monkeypatch.setattr(step, "clip_gradients", reading)
    recipe = make_recipe((dict(FINETUNE[0], tokens=STEP),), validate_every=100)
    with pytest.raises(Waits):
        train_in(tmp_path / "run", make_train_config(files, recipe, validation=None))


def test_losses_read_late_give_the_same_run(files: Files, chain: Path, tmp_path: Path, read_late: None) -> None:
    train_in(tmp_path / "run", make_train_config(files))
    assert_same_run(tmp_path / "run", chain)
    for name in os.listdir(chain / "checkpoints"):
        progress = [
            json.loads((run / "checkpoints" / name / "progress.json").read_text()) for run in (tmp_path / "run", chain)
        ]
        times = {"seconds": 0, "stage_seconds": 0}
        assert progress[0] | times == progress[1] | times


@pytest.mark.parametrize("after", [1, 2, 4, 7, 11])
def test_run_that_reads_losses_late_resumes_to_the_bit(
    files: Files, chain: Path, tmp_path: Path, read_late: None, after: int
) -> None:
    crash_after(tmp_path / "run", make_train_config(files), after)
    resume_in(tmp_path / "run")
    assert_same_run(tmp_path / "run", chain)


def diverged(folder: Path, config: Any) -> dict[str, Any]:
    with pytest.raises(Diverged):
        train_in(folder, config)
    return json.loads((folder / "result.json").read_text())["diverged"]


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("what", ["nan", "watch"])
def test_divergence_that_is_read_late_is_logged_and_saved_as_if_it_were_not(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, every: int
) -> None:
    """The broken step is the fifth: no checkpoint holds it, and no line of the log follows it."""
    if what == "watch":
        wild = dict(FINETUNE[0], tokens=50 * STEP, learning_rate=0.3, warmup=0)
        recipe = make_recipe((wild,), diverged_above=0.5, diverged_for=5, checkpoint_every=every)
    else:
        recipe = make_recipe(FINETUNE, checkpoint_every=every)
        add, made = StepRunner._accumulate_gradients, Counter[StepRunner]()

        def broken(runner: StepRunner, *arguments: Any) -> torch.Tensor:
            made[runner] += 1
            return add(runner, *arguments) * (float("nan") if made[runner] == 5 else 1.0)

        monkeypatch.setattr(StepRunner, "_accumulate_gradients", broken)
    config, found = make_train_config(files, recipe, validation=None), []
    for late in (0, 1):
        monkeypatch.setitem(UNREAD_STEPS, "cpu", late)
        found.append(diverged(tmp_path / str(late), config))
    assert found[0] == found[1]
    if what == "nan":
        assert found[0]["step"] == 4 and "step 5: the loss is nan" in found[0]["reason"]
    logs = [(tmp_path / str(late) / "log.jsonl").read_text() for late in (0, 1)]
    assert logs[0] == logs[1] and len(logs[0].splitlines()) == found[0]["step"]
    folders = [tmp_path / str(late) / "checkpoints" for late in (0, 1)]
    assert not folders[0].exists() or sorted(os.listdir(folders[0])) == sorted(os.listdir(folders[1]))
    for name in os.listdir(folders[1]) if folders[1].exists() else ():
        assert int(name.split("-")[1]) <= found[0]["step"]
        assert all(bool(torch.isfinite(x).all()) for x in weights_of(folders[1] / name).values())


def test_readback_is_a_copy_of_the_numbers() -> None:
    values = torch.tensor([1.5, float("nan")], requires_grad=True)
    read = Readback(values).read()
    assert read[0] == 1.5 and read[1] != read[1]


def test_items_are_prepared_in_order_and_ahead() -> None:
    made: list[int] = []

    def make(key: int) -> int:
        made.append(key)
        return 10 * key

    with closing(prefetch(make, range(7), ahead=2)) as items:
        assert next(items) == 0
        for thread in threading.enumerate():
            if thread.name.startswith("prefetch"):
                break
        else:
            pytest.fail("nothing is prepared in a thread")
        assert [*items] == [10, 20, 30, 40, 50, 60]
    assert made == [*range(7)]
    assert [*prefetch(make, [], ahead=2)] == []


def prefetching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_error_while_preparing_is_raised_where_its_item_is_asked_for() -> None:
    with closing(prefetch(lambda key: 1 // (2 - key), range(9))) as items:
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(ZeroDivisionError):
            next(items)
    assert not prefetching()


def test_closing_ends_the_thread_and_leaves_items_unmade() -> None:
    made: list[int] = []
    with pytest.raises(KeyboardInterrupt), closing(prefetch(made.append, range(1000), ahead=3)) as items:
        next(items)
        raise KeyboardInterrupt
    assert not prefetching() and len(made) <= 5


@pytest.mark.parametrize("ends", ["crash", "data"])
def test_run_that_ends_with_an_error_leaves_no_thread(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    if ends == "crash":
        crash_after(tmp_path / "run", make_train_config(files), 2)
    else:
        batch = PackedBatches.batch

        def broken(batches: PackedBatches, step: int, *args: int) -> Any:
            if step == 3:
                raise Crash
            return batch(batches, step, *args)

        monkeypatch.setattr(PackedBatches, "batch", broken)
        with pytest.raises(Crash):
            train_in(tmp_path / "run", make_train_config(files))
        assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 4  # a validation, three steps
    assert not prefetching()
