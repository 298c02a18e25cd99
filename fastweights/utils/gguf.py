"""The metadata in the header of a GGUF file.

The gguf package reads a large vocabulary for seconds before it returns any field. Here arrays are passed over.
"""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO

MAGIC = b"GGUF"
LONGEST_STRING = 2**24  # chat templates have a few kilobytes; memory for a damaged length is not reserved
_STRING, _ARRAY = 8, 9
# Codes of value types in the file, as formats of the struct module.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """The fields of a GGUF file's header that are numbers, flags or strings.

    Raises:
        ValueError: If the file is not a GGUF file, or is cut short.
    """
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{path} does not start with {MAGIC.decode()}")
        try:
            _, _, count = _unpack(file, "<IQQ")
            found = {_string(file): _value(file, *_unpack(file, "<I")) for _ in range(count)}
        except struct.error as error:
            raise ValueError(f"{path} is cut short") from error
    return {name: value for name, value in found.items() if value is not None}


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    if length > LONGEST_STRING:
        raise ValueError(f"a field has {length:,} bytes, more than {LONGEST_STRING:,}")
    return file.read(length).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """One value, after which the file is at the next field. None for an array."""
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        return _pass_over(file, *_unpack(file, "<IQ"))
    if kind not in _SCALARS:
        raise ValueError(f"a field has the unknown type {kind}")
    return _unpack(file, f"<{_SCALARS[kind]}")[0]


def _pass_over(file: BinaryIO, kind: int, count: int) -> None:
    if kind in _SCALARS:
        file.seek(count * struct.calcsize(f"<{_SCALARS[kind]}"), os.SEEK_CUR)
        return
    for _ in range(count):
        if kind == _STRING:
            file.seek(_unpack(file, "<Q")[0], os.SEEK_CUR)
        else:
            _value(file, kind)
