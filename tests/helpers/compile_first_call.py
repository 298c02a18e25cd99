"""The first call of a rule on a GPU that is not there: prints what is compiled, loaded and launched, by which thread.

TRITON_INTERPRET=0 PYTHONPATH=tests python -m helpers.compile_first_call RULE
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fastweights.ops.triton import launch, run_kernels
from fastweights.rules import RULES
from helpers.relative_error import op_inputs


class Hopper:
    """As much of a GPU as Triton asks for; devices but the first have no shared memory."""

    def __init__(self, loaded: list[str]) -> None:
        self.device, self.launched, self.loaded = 0, 0, loaded
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 1, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 0 if device else 227 * 1024},
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, *_: Any) -> Any:
        self.loaded.append(f"{here()} on device {getattr(chosen, 'device', None)}")

        def launcher(*_: Any) -> None:
            self.launched += 1

        return launcher


chosen = threading.local()


def here() -> str:
    return "the caller" if threading.current_thread() is threading.main_thread() else "a thread"


def main() -> None:
    import triton

    @contextlib.contextmanager
    def choose(device: torch.device) -> Iterator[None]:
        chosen.device = gpu.device
        yield
        del chosen.device

    compiled: list[str] = []
    gpu = Hopper([])
    triton.runtime.driver.set_active(gpu)
    triton.knobs.compilation.listener = lambda **_: compiled.append(here())
    torch.cuda.device = choose  # type: ignore[misc, assignment]
    launch._can_compile = lambda device: device.type == "cpu"
    inputs = op_inputs(sys.argv[1], B=1, T=300, H=1, m=16, d=16, dtype=torch.bfloat16, state=False)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    gates = tuple(x for name, x in leaves.items() if name.endswith("logit"))
    given = (RULES[sys.argv[1]], leaves["q"], leaves["k"], leaves["v"], gates)
    y, end = run_kernels(*given)
    torch.autograd.grad((y, end), list(leaves.values()), (torch.ones_like(y), torch.ones_like(end)))
    found = {"compiled": list(compiled), "loaded": list(gpu.loaded), "launched": gpu.launched}
    gpu.device = 1
    launch.plan_for.cache_clear()
    launch._compiled.clear()
    try:
        run_kernels(*given)
    except Exception as error:
        found["too large"] = type(error).__name__
    print(json.dumps(found))


if __name__ == "__main__":
    main()
