"""Micro-batches as CUDA graphs: the host starts one graph in place of some thousand kernels.

A graph repeats exactly what was captured, at the same addresses. So each shape of micro-batch has a graph of its own
with its own inputs, into which the rows are copied, and gradients stay where they were: they are set to 0, not freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
# Runs before the capture: kernels are compiled, and libraries choose theirs.
WARM_UPS = 3


def capture(run: Callable[[], None], pool: list[Any]) -> Callable[[], None]:
    """Capture what `run` does on the GPU. Returns what repeats it.

    Args:
        run: It must have run before.
        pool: Memory that the graphs share: they never run at the same time. The first capture enters its own.
    """
    graph = torch.cuda.CUDAGraph()
    # "thread_local": the thread that prepares the next rows may pin memory meanwhile, which "global" does not allow.
    with torch.cuda.graph(graph, pool=pool[0] if pool else None, capture_error_mode="thread_local"):
        run()
    pool[:] = [graph.pool()]
    return graph.replay


class GraphedBackward:
    """Back-propagates micro-batches with graphs.

    Args:
        backward: Computes the loss of a micro-batch, adds its gradients to those of the parameters, and adds the loss
            to the tensor that it is given. It must not read from the device.
        parameters: What is trained. Those without a gradient after the first micro-batch never get one.
        device: The GPU.
    """

    def __init__(
        self, backward: Callable[[Batch, Tensor], None], parameters: Iterable[nn.Parameter], device: torch.device
    ) -> None:
        self.backward, self.parameters = backward, list(parameters)
        self.total = torch.zeros((), device=device)
        self._graphs: dict[tuple, tuple[Batch, Callable[[], None]]] = {}
        self._pool: list[Any] = []

    def start(self) -> None:
        """Begin a step: the loss and all gradients are 0."""
        self.total.zero_()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)

    def __call__(self, batch: Batch) -> None:
        """Back-propagate a micro-batch, which may be in pinned memory."""
        key = tuple((name, rows.shape, rows.dtype) for name, rows in sorted(batch.items()))
        if key not in self._graphs:
            self._graphs[key] = self._captured(batch)
        inputs, replay = self._graphs[key]
        for name, rows in batch.items():
            inputs[name].copy_(rows, non_blocking=True)
        replay()

    def _captured(self, batch: Batch) -> tuple[Batch, Callable[[], None]]:
        """Inputs of the batch's shape and what runs with them; loss and gradients are as they were before."""
        inputs = {name: rows.to(self.total.device, copy=True) for name, rows in batch.items()}
        before = self.total.clone(), [None if p.grad is None else p.grad.clone() for p in self.parameters]

        def run() -> None:
            self.backward(inputs, self.total)

        warm_up(run, self.total.device)
        replay = capture(run, self._pool)
        self.total.copy_(before[0])
        for parameter, gradient in zip(self.parameters, before[1], strict=True):
            if parameter.grad is not None and gradient is not None:
                parameter.grad.copy_(gradient)
            elif parameter.grad is not None:
                parameter.grad.zero_()
        return inputs, replay


def warm_up(run: Callable[[], None], device: torch.device) -> None:
    """Run some times on a stream of its own, as a capture will."""
    if device.type != "cuda":
        run()
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
