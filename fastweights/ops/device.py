"""What the Triton kernels need, and what a device has of it."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
# Where there is no GPU to ask (the interpreter, a look at block sizes): a Hopper's.
PROCESSORS, SHARED_BYTES = 132, 227 * 1024
SMALLEST_SHARED_BYTES = 99 * 1024


def obstacle(device: torch.device, *dtypes: torch.dtype, interpreter: bool = False) -> str | None:
    """Why the kernels cannot run on such tensors; None if they can. `interpreter`: Triton's, on a CPU, would do."""
    if device.type != "cuda" and not (interpreter and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"it needs a CUDA device, and the tensors are on {device.type}"
    if torch.version.hip:
        return "it is written for NVIDIA GPUs"
    if not TRITON_INSTALLED:
        return "Triton is not installed (pip install 'fastweights[gpu]')"
    unknown = set(dtypes) - set(KERNEL_DTYPES)
    return f"it computes in float32, bfloat16 or float16, found {unknown.pop()}" if unknown else None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program can have."""
    if device.type != "cuda":
        return SHARED_BYTES
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SMALLEST_SHARED_BYTES)


@functools.cache
def has_warp_groups(device: torch.device) -> bool:
    """Whether its tensor cores can read tiles of 64 rows and more from shared memory."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
