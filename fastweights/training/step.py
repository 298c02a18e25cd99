"""One training step: its rows in micro-batches, their gradients, and the update of the parameters.

The host does not wait for the device: nothing that the device computes in a step is read here. The loss is returned as
a Readback, which the caller reads when the next step has begun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fastweights.data.batches import PackedBatches, count_targets
from fastweights.modeling.modes import autocast, without_window
from fastweights.training.graphs import GraphedBackward
from fastweights.training.losses import Batch, without_plain_positions
from fastweights.training.micro_batch import split
from fastweights.training.optimizer import clip_gradients, set_learning_rate
from fastweights.training.readback import Readback
from fastweights.training.recipe import Recipe, Stage

# Third number of the seed of a step's window dropout, besides the run's seed and the step.
WINDOW_DROPOUT = 2
# Key of a batch: the rows [B] bool that are trained without the window.
WITHOUT_WINDOW = "without_window"
# Key of a micro-batch that runs as a graph: what its loss is divided by, [rows] float32, all equal.
DIVISOR = "divisor"
# Devices whose micro-batches may run as graphs.
GRAPH_DEVICES = ("cuda",)


class StepData(NamedTuple):
    """A step's rows, prepared on the host.

    parts: This process's rows, in micro-batches.
    divisor: What the sum of the loss is divided by.
    """

    parts: list[Batch]
    divisor: int


class StepRunner:
    """Makes the steps of one stage.

    Args:
        recipe: The recipe of the run.
        stage: The stage.
        batches: Its batches.
        student: The model.
        module: Its StageLoss, distributed over the processes.
        optimizer: Of the parameters that are trained.
        accelerator: The processes and the device.
        rows_at_once: Sequences of a micro-batch. The first step may find that fewer fit.
        steps_before: Steps of the stages before.
        announce: Gets a line if micro-batches become smaller.
    """

    def __init__(
        self,
        recipe: Recipe,
        stage: Stage,
        batches: PackedBatches,
        student: Any,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
        rows_at_once: int,
        steps_before: int,
        announce: Callable[[str], None],
    ) -> None:
        self.recipe, self.stage, self.batches, self.student = recipe, stage, batches, student
        self.module, self.optimizer, self.accelerator = module, optimizer, accelerator
        self.rows_at_once, self.steps_before, self.announce = rows_at_once, steps_before, announce
        self.device = accelerator.device
        self.world_size, self.rank = accelerator.num_processes, accelerator.process_index
        # Rows at once, at most: fewer when memory was short.
        self._most_rows = sys.maxsize
        # What back-propagates micro-batches as CUDA graphs. None: nothing does.
        self._graphed: GraphedBackward | None = None
        if recipe.cuda_graphs and self.device.type in GRAPH_DEVICES and self.world_size == 1:
            self._graphed = self._new_graphs()

    def _new_graphs(self) -> GraphedBackward:
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]

        def backward(part: Batch, total: Tensor) -> None:
            self._backward(part, part[DIVISOR][0], total)

        return GraphedBackward(backward, trained, self.device)

    def prepare(self, step: int) -> StepData:
        """This process's rows of a step, as micro-batches in the host's memory, pinned for a GPU."""
        batch = self._batch(step)
        if self.stage.loss == "transfer":
            count = self.batches.rows
        elif self.world_size > 1:
            count = self.batches.targets(step)
        else:
            count = count_targets(batch)
        # a batch of a conversation's questions has no targets, and the loss 0
        parts = [without_plain_positions(part) for part in split(batch, self.rows_at_once)]
        if self._graphed is not None:
            # one for each row, so that parts can be split again
            parts = [part | {DIVISOR: torch.full((len(part["input_ids"]),), float(max(1, count)))} for part in parts]
        if self.device.type == "cuda":
            parts = [{name: rows.pin_memory() for name, rows in part.items()} for part in parts]
        return StepData(parts, max(1, count))

    def _batch(self, step: int) -> Batch:
        """This process's rows of a step, and which of them are trained without the window."""
        batches = self.batches
        batch = batches.batch(step, self.rank, self.world_size)
        if self.stage.window_dropout:
            drawn = np.random.default_rng([batches.seed, step, WINDOW_DROPOUT]).random(batches.rows)
            own = np.split(drawn < self.stage.window_dropout, self.world_size)[self.rank]
            batch[WITHOUT_WINDOW] = torch.from_numpy(own)
        return batch

    def run(self, data: StepData, step: int, share: float, stop_signal: Callable[[], int]) -> Readback:
        """Make one update.

        Args:
            data: What `prepare` returned for the step.
            step: Its number in the stage, from 0.
            share: The learning rate, as a share of the stage's.
            stop_signal: The signal that this process has received when its gradients are ready, 0 for none.

        Returns:
            The loss of the whole batch, the number of processes that received a signal, and the norm of the gradient.
        """
        seed = (self.recipe.seed * 1_000_003 + self.steps_before + step) * self.world_size + self.rank
        loss_and_stop = None
        while loss_and_stop is None:
            torch.manual_seed(seed)
            loss_and_stop = self._try_to_accumulate_gradients(data, stop_signal)
        norm = clip_gradients(self.optimizer, self.stage.clip)
        values = Readback(torch.cat([loss_and_stop.double(), norm.double()[None]]))
        set_learning_rate(self.optimizer, share)
        self.optimizer.step()
        if self._graphed is None:
            self.optimizer.zero_grad(set_to_none=True)
        return values

    def _try_to_accumulate_gradients(self, data: StepData, stop_signal: Callable[[], int]) -> Tensor | None:
        """`_accumulate_gradients`; None where memory was short: then try again, which takes fewer rows at once.

        The first step finds what fits: the estimate of `micro_batch_size` may be too high for a model.
        """
        rows = min(self._most_rows, max(len(part["input_ids"]) for part in data.parts))
        try:
            return self._accumulate_gradients(data, stop_signal)
        except torch.OutOfMemoryError:
            if rows == 1 or self.recipe.micro_batch is not None or self.world_size > 1:
                raise
        # After the except block: the error holds on to the tensors of the forward pass.
        self._most_rows = rows // 2
        self.optimizer.zero_grad(set_to_none=True)
        if self._graphed is not None:
            self._graphed = self._new_graphs()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.announce(f"out of memory with {rows} sequences at once: goes on with {self._most_rows}")
        return None

    def _accumulate_gradients(self, data: StepData, stop_signal: Callable[[], int]) -> Tensor:
        """Back-propagate this process's rows of a step.

        Returns:
            On the device, the same in all processes: the loss of the whole batch, and how many processes have received
            a signal. One that arrives after this waits for the next step.
        """
        parts = [smaller for part in data.parts for smaller in split(part, self._most_rows)]
        if self._graphed is not None:
            self._graphed.start()
            for part in parts:
                self._graphed(part)
            total = self._graphed.total
        else:
            total = torch.zeros((), device=self.device)
            for number, part in enumerate(parts):
                with self._gradient_sync(number == len(parts) - 1):
                    on_device = {name: rows.to(self.device, non_blocking=True) for name, rows in part.items()}
                    self._backward(on_device, data.divisor, total)
        signalled = torch.full_like(total, float(stop_signal() > 0))
        return self.accelerator.reduce(torch.stack([total, signalled]), "sum")

    def _backward(self, part: Batch, divisor: int | Tensor, total: Tensor) -> None:
        """Back-propagate a micro-batch on the device, and add its share of the loss to a total."""
        with self._window_dropout(part):
            with autocast(self.device, self.recipe.precision):
                loss = self.module(part) / divisor
            # DDP and FSDP take the mean over processes; the loss is a sum over them
            (loss * self.world_size).backward()
        total += loss.detach()

    def _window_dropout(self, part: Batch) -> AbstractContextManager[None]:
        rows = part.get(WITHOUT_WINDOW)
        return nullcontext() if rows is None else without_window(self.student, rows)

    @contextmanager
    def _gradient_sync(self, enabled: bool) -> Iterator[None]:
        """Processes exchange gradients after the last micro-batch only."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(enabled)
        usual = enabled or self.world_size == 1 or isinstance(self.module, FSDPModule)
        with nullcontext() if usual else self.accelerator.no_sync(self.module):
            yield
