"""The base of a comparison: it is loaded once, and a GGUF file is copied for the processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import run, succeed
from helpers.comparisons import processes_of, result_of, typed, write_grid
from helpers.tiny_gguf import write_tiny_llama
from helpers.training import (
    CHAIN,
    FINETUNE,
    STEP,
    Files,
    Program,
    lines_in,
    log_of,
    make_recipe,
    make_train_config,
    save_base,
    train_in,
    training_files,
    wait_until,
)

from fastweights.config import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.data.token_files import _tokenizer_fingerprint
from fastweights.experiments import base_model
from fastweights.experiments.base_model import ComparisonBase
from fastweights.experiments.grid import Variant
from fastweights.experiments.job import Job, Setup
from fastweights.loading import load, load_tokenizer, save
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.families import FAMILIES
from fastweights.training import checkpoint

RUNS: dict[str, Any] = {
    "base": {"recipe": "finetune.yaml"},
    "decay": {"rule": "decay", "gate_init": "log"},
    "plain": {"rule": "add", "recipe": "finetune.yaml"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    """With a GGUF file as the base."""
    with training_files(tmp_path_factory.mktemp("base")) as made:
        path = made.folder / "tiny.Q8_0.gguf"
        write_tiny_llama(path, {"model": "llama"})
        yield made._replace(base=path)


def write_runs(folder: Path, runs: dict[str, Any] = RUNS) -> Path:
    grid = write_grid(folder, runs, make_recipe(CHAIN))
    (folder / "finetune.yaml").write_text(json.dumps(make_recipe(FINETUNE).to_dict()))
    return grid


def copies_in(output: Path) -> list[Path]:
    return sorted((output / "base").glob("*/*"))


@pytest.fixture()
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that this process loads bases from."""
    sources: list[str] = []

    def counting(source: str, **options: Any) -> Any:
        sources.append(source)
        return load(source, **options)

    monkeypatch.setattr(base_model, "load", counting)
    return sources


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_conversion_leaves_the_tensors_that_it_shares(tmp_path: Path, family: str) -> None:
    """Conversions of such a model are those of one of their own."""
    base = ComparisonBase(str(save_base(tmp_path / family, family)), tmp_path)
    before = {name: x.clone() for name, x in base.model.state_dict().items()}
    config = FastWeightsConfig(rule="gated_delta", m=4, window=3, wide_window=6, sinks=1, mix="token")
    for _ in range(2):
        found, expected = (convert(model, config).state_dict() for model in (base.for_conversion(), load(base.source)))
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        after = base.model.state_dict()
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_base_is_loaded_once_and_stays_as_it_was(files: Files, tmp_path: Path, loaded: list[str]) -> None:
    folder = str(files.folder / "base")
    setup, base = Setup(tmp_path, folder, str(files.data), str(files.validation)), ComparisonBase(folder, tmp_path)
    before = {name: x.clone() for name, x in base.model.state_dict().items()}
    for name, rule in (("one", "decay"), ("two", "delta")):
        job = Job(setup, Variant(name, name, make_recipe(), FastWeightsConfig(rule=rule, m=4)))
        job.folder.mkdir(parents=True)
        job.prepare(base, 1.0, pytest.fail)
        assert load(job.converted).config.fastweights["rule"] == rule
        assert json.loads((job.training / checkpoint.RUN).read_text())["teacher"] is None
    assert loaded == [folder] and not isinstance(base.model, FastWeightsMixin)
    after = base.model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    base.release()
    assert not isinstance(base.model, FastWeightsMixin) and loaded == [folder] * 2
    assert base.quick_source() == folder and not (tmp_path / "base").exists(), "only a GGUF file is copied"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_is_the_model_of_the_file(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, {"model": kind, "add_bos_token": True})
    copy = ComparisonBase(str(path), tmp_path).quick_source()
    assert Path(copy).name == path.name and Path(copy).is_dir()
    found, expected = load(copy, dtype=dtype), load(path, dtype=dtype)
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {name: x.dtype for name, x in ours.items()} == {name: x.dtype for name, x in theirs.items()}
    assert {name for name, x in found.named_buffers()} == {name for name, x in expected.named_buffers()}
    assert all(torch.equal(x, dict(expected.named_buffers())[name]) for name, x in found.named_buffers())
    configs = [
        model.config.to_dict() | dict.fromkeys(("_name_or_path", "architectures")) for model in (found, expected)
    ]
    assert configs[0] == configs[1]
    assert _tokenizer_fingerprint(load_tokenizer(copy)) == _tokenizer_fingerprint(load_tokenizer(path))


def test_runs_are_those_of_the_file(files: Files, tmp_path: Path) -> None:
    """To the last bit, and with the same names."""
    succeed(*typed(files, write_runs(tmp_path / "grid"), tmp_path / "out", "--jobs", 2, "--keep"))
    copy = copies_in(tmp_path / "out")[0]
    for name, settings in RUNS.items():
        stages = CHAIN if name == "decay" else FINETUNE
        source = files.base
        if name != "base":
            source = tmp_path / f"{name} converted"
            chosen = {key: value for key, value in settings.items() if key != "recipe"}
            model = convert(load(files.base, dtype=torch.float32), FastWeightsConfig(**{"m": 4} | chosen))
            model.config.fastweights_base = str(files.base)
            save(model, source, load_tokenizer(files.base))
            made = tmp_path / "out/runs" / name / "converted"
            assert (made / "config.json").read_bytes() == (source / "config.json").read_bytes()
        expected = train_in(tmp_path / name, make_train_config(files, make_recipe(stages), model=str(source)))
        training, found = tmp_path / "out/runs" / name / "training", result_of(tmp_path / "out", name)
        assert log_of(training) == log_of(tmp_path / name)
        for key in ("validation", "best", "last", "curve", "recipe", "data"):
            assert found[key] == expected[key], key
        assert found.get("base") == expected.get("base")
        assert found["model"]["parameters"] == expected["model"]["parameters"]
        assert json.loads((training.parent / "begun.json").read_text())["model"] == str(files.base)
        started = json.loads((training / checkpoint.RUN).read_text())
        assert started["model"] == (str(copy) if name == "base" else str(training.parent / "converted"))
        assert started["teacher"] == (str(copy) if name == "decay" else None)
    assert result_of(tmp_path / "out", "decay")["base"]["name"] == files.base.name
    assert result_of(tmp_path / "out", "base")["model"]["name"] == files.base.name


def test_copy_is_deleted_when_all_runs_are_done(files: Files, tmp_path: Path) -> None:
    command = typed(files, write_runs(tmp_path / "grid"), tmp_path / "out")
    succeed(*command, "--only", "plain")
    assert not (tmp_path / "out/base").exists(), "a run without a teacher needs no copy"
    base = ComparisonBase(str(files.base), tmp_path / "out")
    with base:  # another comparison in this folder
        succeed(*command, "--only", "decay")
        assert copies_in(tmp_path / "out")
    succeed(*command, "--only", "decay")
    assert not (tmp_path / "out/base").exists()


def test_only_the_copy_is_deleted(files: Files, tmp_path: Path) -> None:
    """The user's own files may be in a folder of this name, even the GGUF file."""
    own = tmp_path / "out/base/tiny.gguf"
    own.parent.mkdir(parents=True)
    shutil.copy(files.base, own)
    command = typed(files._replace(base=own), write_runs(tmp_path / "grid"), tmp_path / "out", "--only", "decay")
    succeed(*command)
    assert os.listdir(own.parent) == [own.name] and own.read_bytes() == files.base.read_bytes()


def test_replaced_file_is_copied_anew(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    shutil.copy(files.base, path)
    before = ComparisonBase(str(path), tmp_path).quick_source()
    os.utime(path, (1, 1))
    after = ComparisonBase(str(path), tmp_path).quick_source()
    assert before != after and Path(after).is_dir()


def test_interrupted_copy_is_made_again(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = ComparisonBase(str(files.base), tmp_path)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(base.tokenizer), "save_pretrained", stop)
        with pytest.raises(KeyboardInterrupt):
            base.quick_source()
    assert not (tmp_path / "base").exists()
    assert load(base.quick_source()).config.hidden_size == base.model.config.hidden_size


@pytest.mark.parametrize("old", [False, True])
def test_resumed_comparison_uses_the_copy(files: Files, tmp_path: Path, loaded: list[str], old: bool) -> None:
    """Also where an earlier version started the run, which had no copy."""
    chain = make_recipe((CHAIN[0] | {"tokens": 4 * STEP}, CHAIN[1] | {"tokens": 30 * STEP}))
    grid, output = (
        write_grid(tmp_path / "grid", {"one": {"rule": "decay", "gate_init": "log"}}, chain),
        tmp_path / "out",
    )
    command = typed(files, grid, output)
    program = Program(tmp_path / "printed.txt", *command)
    training = output / "runs/one/training"
    wait_until(lambda: lines_in(training) > 8, program.running)
    for pid in (program.pid, *processes_of(output).values()):
        os.kill(pid, signal.SIGKILL)
    program.wait()
    (copy,) = copies_in(output)
    assert loaded == []
    if old:
        shutil.rmtree(output / "base")
        started = json.loads((training / checkpoint.RUN).read_text())
        (training / checkpoint.RUN).write_text(json.dumps(started | {"teacher": None}))
    succeed(*command)
    assert loaded == [str(files.base) if old else str(copy)]
    alone = typed(files, grid, tmp_path / "alone")
    succeed(*alone)
    assert log_of(training) == log_of(tmp_path / "alone/runs/one/training")
    assert "resumed\n" in (output / "runs/one/log.txt").read_text() and not (output / "base").exists()


def test_copy_stays_while_runs_are_left(files: Files, tmp_path: Path) -> None:
    runs = {"one": {"rule": "decay"}, "large": {"rule": "decay", "set": {"batch_tokens": 2**20}}}
    command = typed(files, write_runs(tmp_path / "grid", runs), tmp_path / "out")
    assert run(*command).exit_code == 1 and len(copies_in(tmp_path / "out")) == 1
    write_runs(tmp_path / "grid", {"one": {"rule": "decay"}, "large": {"rule": "decay"}})
    succeed(*command)
    assert not (tmp_path / "out/base").exists()
