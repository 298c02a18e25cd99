"""The log of a run, while it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastweights.training import log as log_module
from fastweights.training.log import last_logged


def test_last_logged_ignores_incomplete_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    assert last_logged(log) == {}
    lines = [{"step": 1, "tokens": 8, "loss": 3.0}, {"step": 1, "validation_loss": 2.0}, {"step": 2, "tokens": 16}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "tok')
    assert last_logged(log) == {"step": 2, "tokens": 16, "loss": 3.0, "validation_loss": 2.0}
    monkeypatch.setattr(log_module, "TAIL_BYTES", 60)
    assert last_logged(log) == {"step": 2, "tokens": 16}
