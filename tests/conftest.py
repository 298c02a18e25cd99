"""Tests run side by side on few cores: one thread each. Where there is no GPU, Triton's interpreter runs the kernels;
it must be chosen before Triton is imported."""

import gc
import os
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Scripts that tests start import helpers, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Imported modules and collected tests stay until the end. Every collection of garbage would go through them, and
    each stage of a training run starts one."""
    gc.collect()
    gc.freeze()
