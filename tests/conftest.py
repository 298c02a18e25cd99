"""Tests run side by side on few cores: one thread each. Where there is no GPU, Triton's interpreter runs the kernels;
it must be chosen before Triton is imported."""

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


# Half of the computing time. Before Python 3.12 they take half as long again with coverage, and other tests run the
# same lines.
WITHOUT_COVERAGE = (
    *("ops/", "trust/", "modeling/test_parity.py", "modeling/test_window.py"),
    *("modeling/test_continuing.py", "modeling/test_backbone.py", "decode/test_slots.py", "decode/test_batch.py"),
    *("modeling/test_classes.py", "modeling/test_generation.py", "modeling/test_static_cache.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.path.relative_to(TESTS).as_posix().startswith(WITHOUT_COVERAGE):
            item.add_marker(pytest.mark.no_cover)
