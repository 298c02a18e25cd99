"""Converted models in vLLM: `make test-vllm` makes an environment with vLLM and runs these tests there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from typing import Any

import pytest
from vllm_plugin.generate import CASES, REFUSED

pytestmark = pytest.mark.skipif(
    "vllm" not in packages_distributions(), reason="vLLM is not installed: run make test-vllm"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vllm")
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process for all models is faster
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "vllm_plugin.generate", str(folder), str(folder / "out.json")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("case", [case for case in CASES if case != "bfloat16"])
def test_vllm_generates_the_engines_tokens(case: str, results: dict[str, Any]) -> None:
    for run in ("vllm", "again"):
        assert results[case][run]["tokens"] == results[case]["engine_tokens"]


@pytest.mark.parametrize("case", CASES)
def test_vllm_computes_the_models_probabilities(case: str, results: dict[str, Any]) -> None:
    tolerance = 0.1 if case == "bfloat16" else 1e-3
    for run in ("vllm", "again"):
        for ours, theirs in zip(
            results[case]["log_probabilities"], results[case][run]["log_probabilities"], strict=True
        ):
            assert theirs == pytest.approx(ours, abs=tolerance)


def test_cached_prefixes_are_used(results: dict[str, Any]) -> None:
    assert results["window and sinks, prefixes cached"]["again"]["cached"] > 0


@pytest.mark.parametrize("setting", REFUSED)
def test_unsupported_settings_are_refused_by_name(setting: str, results: dict[str, Any]) -> None:
    message = results["refused"][setting]
    assert "converted models do not support" in message
    assert setting in message
