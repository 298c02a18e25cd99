"""What the Triton kernels need from a device, and what a device offers."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
# Assumed where there is no GPU (Triton's interpreter, inspection of block sizes): the values of an H100.
PROCESSORS, SHARED_BYTES = 132, 227 * 1024
SMALLEST_SHARED_BYTES = 99 * 1024


def unsupported_reason(device: torch.device, *dtypes: torch.dtype, interpreter: bool = False) -> str | None:
    """Why the Triton kernels cannot run on tensors of this device and these dtypes; None if they can.

    Args:
        device: the device of the tensors.
        *dtypes: their dtypes.
        interpreter: accept a CPU if Triton's interpreter is on (TRITON_INTERPRET=1).
    """
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
    """Number of multiprocessors of the device."""
    if device.type != "cuda":
        return PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one program can use."""
    if device.type != "cuda":
        return SHARED_BYTES
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SMALLEST_SHARED_BYTES)


@functools.cache
def has_warp_groups(device: torch.device) -> bool:
    """Whether the device has warp-group matrix products: tiles of 64 rows and more, read from shared memory."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
