"""A run that was written before the optimizer's state went through torch.distributed.checkpoint.

old_run/ holds its last checkpoint (step 3 of 6) and the log of the same run, uninterrupted. Its text is `write_text`'s.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import numbers_logged, resume_in, write_text
from safetensors.torch import load_file

from fastweights.training import checkpoint

OLD = Path(__file__).with_name("old_run")


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    shutil.copytree(OLD, folder)
    run = json.loads((folder / "run.json").read_text())
    text = write_text(tmp_path / run["data"], 60, seed=0)
    (folder / "run.json").write_text(json.dumps(run | {"data": str(text)}))
    return folder


def test_checkpoint_of_earlier_version_resumes_with_its_optimizer_state(
    old_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: dict[str, torch.Tensor] = {}
    restore = checkpoint.restore_optimizer

    def note(folder: Path, student: Any, optimizer: Any) -> None:
        restore(folder, student, optimizer)
        restored.update({k: v.clone() for k, v in checkpoint.training_tensors(student, optimizer, False).items()})

    monkeypatch.setattr(checkpoint, "restore_optimizer", note)
    resume_in(old_run)
    expected = load_file(OLD / "last" / "training.safetensors")
    assert restored.keys() == expected.keys()
    assert all(torch.equal(restored[name], expected[name]) for name in expected)
    # not to the last bit: it was written on another machine
    for found, logged in zip(numbers_logged(old_run), numbers_logged(OLD), strict=True):
        assert found == pytest.approx(logged, rel=1e-4)
