"""Sharing a GPU among the runs of a comparison. No GPU is needed: a script stands for NVIDIA's daemon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fastweights.experiments import gpu_sharing
from fastweights.experiments.gpu_sharing import CONTROL, FOLDER, shared_gpu

# It writes down what it is called with, and what it reads.
SCRIPT = """#!/bin/sh
echo "$*|$(cat)|$CUDA_MPS_PIPE_DIRECTORY|$CUDA_VISIBLE_DEVICES" >> "{log}"
{ending}
"""


def install_daemon(folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str = "exit 0") -> Path:
    """Put a daemon on the PATH of a machine that seems to have a GPU; returns the file of its calls."""
    log, program = folder / "calls", folder / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(SCRIPT.format(log=log, ending=ending))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_sharing, "USE_GPU", "")
    return log


def test_daemon_runs_while_processes_share_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install_daemon(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    said: list[str] = []
    with shared_gpu(4, None, said.append) as environment:
        folder = environment[FOLDER]
        assert Path(folder).is_dir()
        assert log.read_text().startswith("-d|") and "quit" not in log.read_text()
    assert not said and not Path(folder).exists()
    calls = [line.split("|") for line in log.read_text().splitlines()]
    assert calls[-1][1].startswith("quit") and {call[2] for call in calls} == {folder}
    assert {call[3] for call in calls} == {""}, "the daemon sees all GPUs"


def test_daemon_ends_when_the_comparison_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install_daemon(tmp_path, monkeypatch)
    with pytest.raises(KeyError), shared_gpu(2, "cuda", print):
        raise KeyError
    assert "quit" in log.read_text().splitlines()[-1]


@pytest.mark.parametrize("ending", ["echo no permission; exit 1", "[ $1 ] && sleep 5"])
def test_daemon_that_fails_is_named_and_runs_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    log = install_daemon(tmp_path, monkeypatch, ending)
    monkeypatch.setattr(gpu_sharing, "PROGRAM_SECONDS", 0.5)
    said: list[str] = []
    with shared_gpu(4, None, said.append) as environment:
        assert environment == {}
    assert len(said) == 1 and ("no permission" in said[0] or "timed out" in said[0])
    assert "quit" in log.read_text().splitlines()[-1]


def test_daemon_without_a_usable_gpu_is_ended_and_runs_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install_daemon(tmp_path, monkeypatch)
    monkeypatch.setattr(gpu_sharing, "USE_GPU", "raise SystemExit('no server')")
    said: list[str] = []
    with shared_gpu(4, None, said.append) as environment:
        assert environment == {} and len(said) == 1 and "no server" in said[0]
    assert "quit" in log.read_text().splitlines()[-1]


def test_missing_daemon_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_daemon(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    with shared_gpu(4, None, said.append) as environment:
        assert environment == {}
    assert len(said) == 1 and CONTROL in said[0]


@pytest.mark.parametrize("case", ["one process", "CPU", "daemon of the user", "no GPU"])
def test_no_daemon_where_nothing_is_to_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    log = install_daemon(tmp_path, monkeypatch)
    if case == "daemon of the user":
        monkeypatch.setenv(FOLDER, str(tmp_path))
    if case == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    processes, device = 1 if case == "one process" else 4, "cpu" if case == "CPU" else None
    with shared_gpu(processes, device, print) as environment:
        assert environment == {}
    assert not log.exists()
