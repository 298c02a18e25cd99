"""Numbers that a device computes and the host reads later, so that the host need not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """A copy of a small tensor on its way to the host.

    From a GPU the copy goes into pinned memory, in the order of the current stream: starting it does not wait.

    Args:
        values: Numbers on any device.
    """

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._host = values.detach()
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """The numbers. Waits until the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
