"""Processes of a comparison are forked from one that has imported everything, which saves seconds for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.training import launch_from_server

from fastweights.experiments import runner


@pytest.fixture(scope="module", autouse=True)
def quick_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", launch_from_server)
        yield
