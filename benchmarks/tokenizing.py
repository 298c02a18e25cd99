"""How fast text is tokenized, in CPU time: alone, and shared out to processes.

    python benchmarks/tokenizing.py TEXT --tokenizer MODEL [-o results/tokenizing.json]

CPU time does not change when other programs run. With processes, each of them is as fast as its own CPU time says, and
all of them together are at most as fast as the one that reads the text and writes the tokens.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from fastweights.data import encoding, token_files
from fastweights.loading import load_tokenizer
from fastweights.utils.provenance import write_result


def cpu_seconds() -> tuple[float, float]:
    """Of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time(), children.ru_utime + children.ru_stime


def measure(text: Path, tokenizer: Any, processes: int) -> dict[str, Any]:
    token_files.usable_processes = lambda: processes
    with tempfile.TemporaryDirectory() as cache:
        before = cpu_seconds()
        tokens = len(token_files.prepare(text, tokenizer, cache=cache, progress=False))
        own, children = (after - start for after, start in zip(cpu_seconds(), before, strict=True))
    found = {"tokens": tokens, "own CPU s": own, "tokens per own CPU s": tokens / own}
    if processes > 1:
        found |= {"children's CPU s": children, "tokens per CPU s of the children": tokens / children}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/tokenizing.json"))
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    encoding.BATCHES_BEFORE = 1
    measured = {
        "alone": measure(options.text, tokenizer, 1),
        "two processes": measure(options.text, tokenizer, 2),
    }
    settings = {"text": options.text.name, "bytes": options.text.stat().st_size, "tokenizer": len(tokenizer)}
    write_result(options.output, {"settings": settings, "measured": measured})
    for name, found in measured.items():
        print(name, {key: round(value, 2) for key, value in found.items()})


if __name__ == "__main__":
    main()
