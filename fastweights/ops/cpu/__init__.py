"""Decoding steps on a CPU in C: the operations of a step run in one call, by threads that stay together.

The C file is compiled with the machine's compiler when it is first needed, in about a second, and kept in a folder of
the user's. Without a compiler, steps run as torch operators.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from fastweights.utils.files import atomic_file

SOURCE = Path(__file__).with_name("decode.c")
# Sums may be reordered where the source says so. Nothing else that -ffast-math allows, since NaN must stay NaN.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-shared", "-fPIC")
# The others are for compilers without OpenMP: steps then run in one thread, with the last one without its vectors, too.
OPENMP_FLAGS = ("-fopenmp", "-fopenmp-simd", "-Wno-unknown-pragmas")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_SECONDS = 120
DTYPES = (torch.float32, torch.bfloat16)


class Unavailable(Exception):
    """The C file cannot be compiled or loaded here, with the reason."""


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why models of this dtype on this device cannot decode with the C code; None if they can."""
    if device.type != "cpu":
        return f"it is for CPUs, and the model is on {device}"
    if dtype not in DTYPES:
        return f"it is for float32 and bfloat16, and the model is in {dtype}"
    try:
        library()
    except Unavailable as error:
        return str(error)
    return None


@functools.cache
def _outcome() -> ctypes.CDLL | str:
    """The compiled file, or the reason why there is none."""
    try:
        return _load()
    except (Unavailable, OSError, ValueError, subprocess.SubprocessError) as error:
        return str(error)


def library() -> ctypes.CDLL:
    """The compiled C file.

    Raises:
        Unavailable: There is no compiler, or it fails.
    """
    outcome = _outcome()
    if isinstance(outcome, str):
        raise Unavailable(outcome)
    return outcome


def _load() -> ctypes.CDLL:
    compiler = _compiler()
    folder = _folder()
    path = folder / f"decode-{_fingerprint(compiler)}.so"
    if not path.exists():
        with atomic_file(path) as file:
            _compile(compiler, file)
    loaded = ctypes.CDLL(str(path))
    loaded.run.restype = None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.run.argtypes = [pointer, number, pointer, number, pointer, number, number]
    return loaded


def _compiler() -> list[str]:
    """The compiler and its first arguments: CC may be a command such as "ccache gcc"."""
    commands = [shlex.split(os.environ["CC"])] if os.environ.get("CC", "").strip() else [[name] for name in COMPILERS]
    for name, *arguments in commands:
        if found := shutil.which(name):
            return [found, *arguments]
    raise Unavailable(f"there is no C compiler ({', '.join(name for name, *_ in commands)})")


def _compile(compiler: list[str], target: Path) -> None:
    for openmp in OPENMP_FLAGS:
        command = [*compiler, *FLAGS, openmp, "-o", str(target), str(SOURCE), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
        if done.returncode == 0:
            return
    line = next(iter(done.stderr.splitlines()), f"exit status {done.returncode}")
    raise Unavailable(f"{' '.join(compiler)} cannot compile {SOURCE.name}: {line}")


def _folder() -> Path:
    """A folder of the user's that nobody else can write to: what is in it is run."""
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(cache) if cache else Path.home() / ".cache") / "fastweights" / "compiled"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # such as a home that does not exist
        pass
    return Path(_temporary_folder().name)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, for users without one."""
    return tempfile.TemporaryDirectory(prefix="fastweights-")


def _fingerprint(compiler: list[str]) -> str:
    """What a compiled file depends on: source, flags, compiler, and the processor, whose instructions it uses."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=COMPILE_SECONDS, check=True).stdout
    command = repr((compiler, FLAGS, OPENMP_FLAGS))
    parts = [SOURCE.read_bytes(), command.encode(), version, _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        shown = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
        return platform.machine() + "".join(dict.fromkeys(shown))
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
