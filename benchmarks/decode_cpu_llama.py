"""llama.cpp for decode_cpu_peers.py: answers commands on standard input, one JSON line each.

Long contexts are not read, which would take minutes: CHUNK tokens are read, and their keys and values are copied to
later positions, for which llama.cpp rotates the keys. They cost the same time as those of a text.

Shapes: tokens of B texts [B]   logits [B,V]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np

CHUNK, ROOM = 1024, 256
FTYPES = {"Q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0, "BF16": api.LLAMA_FTYPE_MOSTLY_BF16, "F32": api.LLAMA_FTYPE_ALL_F32}


class Context:
    """A context of some sequences, with room for `length` tokens of each."""

    def __init__(self, model: Any, length: int, sequences: int, threads: int, unified: bool = False) -> None:
        options = api.llama_context_default_params()
        options.n_ctx = (length + ROOM) * (1 if unified else sequences)
        options.n_seq_max, options.kv_unified = sequences, unified
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = threads
        self.context = api.llama_init_from_model(model, options)
        if not self.context:
            raise MemoryError(f"llama.cpp cannot make a context of {options.n_ctx} tokens")
        self.memory = api.llama_get_memory(self.context)
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def decode(self, tokens: list[int], positions: list[int], sequences: list[int], all_logits: bool) -> np.ndarray:
        """Feed tokens; the logits [N,V] of all of them, or of the last one."""
        found = []
        for start in range(0, len(tokens), 512):
            part = slice(start, start + 512)
            batch = api.llama_batch_init(len(tokens[part]), 0, 1)
            batch.n_tokens = len(tokens[part])
            for i, (token, position, sequence) in enumerate(
                zip(tokens[part], positions[part], sequences[part], strict=True)
            ):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
                batch.logits[i] = all_logits or start + i == len(tokens) - 1
            if code := api.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            for i in range(batch.n_tokens):
                if batch.logits[i]:
                    row = api.llama_get_logits_ith(self.context, i)
                    found.append(np.ctypeslib.as_array(row, (self.vocabulary,)).copy())
            api.llama_batch_free(batch)
        return np.stack(found)

    def step(self, tokens: list[int], position: int) -> list[int]:
        """Feed one token of each text and choose the likeliest next ones."""
        count = len(tokens)
        return self.decode(tokens, [position] * count, list(range(count)), True).argmax(1).tolist()

    def state(self) -> ctypes.Array[Any]:
        """The keys and values of the first sequence."""
        size = api.llama_state_seq_get_size(self.context, 0)
        buffer = (ctypes.c_uint8 * size)()
        api.llama_state_seq_get_data(self.context, buffer, size, 0)
        return buffer

    def set_state(self, buffer: ctypes.Array[Any], sequence: int) -> None:
        if not api.llama_state_seq_set_data(self.context, buffer, len(buffer), sequence):
            raise RuntimeError("llama.cpp refuses the state")

    def close(self) -> None:
        api.llama_free(self.context)


class Worker:
    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.models: dict[str, Any] = {}
        self.prepared: dict[str, tuple[Context, int, int]] = {}

    def load(self, name: str, file: str) -> dict[str, Any]:
        self.models[name] = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
        if not self.models[name]:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        return {"bytes": Path(file).stat().st_size}

    def quantize(self, source: str, target: str, ftype: str) -> dict[str, Any]:
        options = api.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize, options.nthread = FTYPES[ftype], True, self.threads
        if api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options)):
            raise RuntimeError(f"llama.cpp cannot write {target}")
        return {}

    def about(self) -> dict[str, Any]:
        return {"version": api.__version__, "system": api.llama_print_system_info().decode()}

    def logits(self, name: str, tokens: list[int]) -> dict[str, Any]:
        context = Context(self.models[name], len(tokens), 1, self.threads)
        found = context.decode(tokens, list(range(len(tokens))), [0] * len(tokens), False)
        context.close()
        return {"logits": found[0].tolist()}

    def nll(self, name: str, texts: list[list[int]]) -> dict[str, Any]:
        """The sum of -log p of all tokens but the first of each text."""
        total = 0.0
        for text in texts:
            context = Context(self.models[name], len(text), 1, self.threads)
            rows = context.decode(text, list(range(len(text))), [0] * len(text), True)[:-1].astype(np.float64)
            context.close()
            top = rows.max(1)
            chosen = rows[np.arange(len(rows)), text[1:]]
            total += float((top + np.log(np.exp(rows - top[:, None]).sum(1)) - chosen).sum())
        return {"nll": total, "tokens": sum(len(text) - 1 for text in texts)}

    def prepare(self, name: str, length: int, batch: int) -> dict[str, Any]:
        """Give each of `batch` texts keys and values of `length` tokens."""
        state = _for_streams(self._state(self.models[name], length), batch)
        context = Context(self.models[name], length, batch, self.threads)
        for sequence in range(batch):
            context.set_state(state, sequence)
        self.prepared[name] = context, length, batch
        context.step([1] * batch, length)
        return {}

    def _state(self, model: Any, length: int) -> ctypes.Array[Any]:
        tokens = np.random.default_rng(0).integers(0, 40000, min(CHUNK, length)).tolist()
        copies = -(-length // CHUNK)
        builder = Context(model, copies * CHUNK, copies, self.threads, unified=True)
        builder.decode(tokens, list(range(len(tokens))), [0] * len(tokens), False)
        if copies > 1:
            chunk = builder.state()
            for i in range(1, copies):
                builder.set_state(chunk, i)
                api.llama_memory_seq_add(builder.memory, i, 0, -1, i * CHUNK)
            for i in range(1, copies):
                api.llama_memory_seq_cp(builder.memory, i, 0, -1, -1)
            builder.decode([1], [copies * CHUNK], [0], False)  # rotates the keys to their new positions
            api.llama_memory_seq_rm(builder.memory, 0, length, -1)
        state = builder.state()
        builder.close()
        return state

    def measure(self, name: str, tokens: int, most: float) -> dict[str, Any]:
        """Seconds of some steps, which end early after `most` seconds."""
        context, length, batch = self.prepared[name]
        for sequence in range(batch):
            api.llama_memory_seq_rm(context.memory, sequence, length, -1)
        fed, seconds, started = [1] * batch, [], time.perf_counter()
        for i in range(tokens):
            before = time.perf_counter()
            fed = context.step(fed, length + i)
            seconds.append(time.perf_counter() - before)
            if time.perf_counter() - started > most and len(seconds) >= 3:
                break
        return {"seconds": seconds}

    def free(self, name: str) -> dict[str, Any]:
        self.prepared.pop(name)[0].close()
        return {}


def _for_streams(state: ctypes.Array[Any], streams: int) -> ctypes.Array[Any]:
    """A sequence's state as a context reads it that stores each of its sequences on its own.

    The state begins with two words and the number of such stores; then come their cells, none in the other ones.
    """
    if streams == 1:
        return state
    wide = (ctypes.c_uint8 * (len(state) + 4 * (streams - 1)))()
    ctypes.memmove(wide, state, len(state))
    words = ctypes.cast(wide, ctypes.POINTER(ctypes.c_uint32))
    assert words[2] == 1
    words[2] = streams
    return wide


@api.llama_log_callback
def _quiet(level: int, text: bytes, data: Any) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    worker = Worker(parser.parse_args().threads)
    api.llama_log_set(_quiet, ctypes.c_void_p())
    api.llama_backend_init()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
