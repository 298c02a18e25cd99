"""One more token on a CPU: SmolLM2 converted, beside its base in llama.cpp and in transformers.

    python benchmarks/decode_cpu_peers.py SmolLM2-135M-Instruct.Q4_1.gguf --llama-python PYTHON --text FILE [--quick]

PYTHON is an interpreter that has llama-cpp-python (pip install llama-cpp-python). FILE is a text or an .xz of texts
separated by lines <|endoftext|>, on which perplexity is measured. Each library runs in a process of its own, and they
alternate. What each contender computes is checked first; one that fails has no times.

- fastweights: the model that `fastweights convert` makes, with its default settings, in the decode engine: a step and
  the likeliest token. Its state is that after 256 tokens, with its positions moved to the length, since a step costs
  the same after any length.
- llama.cpp: the base as it comes (Q4_1), and as Q8_0 and BF16, made from it by llama.cpp: a step and the likeliest
  token.
- transformers: the base's own greedy `generate`, with random keys and values before.

Perplexity with rounded weights is that of the base: its attention as windows as long as the texts, in the engine.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from fastweights.profiling.model_cost import cheaper_from
from fastweights.utils.provenance import provenance, write_result

SEED, PREFIX = 0, 256
LENGTHS, BATCHES = (256, 1024, 4096, 16384, 65536), (1, 8)
WEIGHTS = {"float32": None, "bfloat16": "bfloat16", "int8": "int8"}
GGUFS = ("Q8_0", "Q4_1", "BF16")
# Bytes of a token's keys and values: 30 layers, 3 heads of 64, keys and values.
CACHED_NUMBERS = 30 * 2 * 3 * 64
# Largest relative errors of logits: of the engine against the converted model's forward, and of the others against the
# base in float32. llama.cpp rounds activations, too.
TOLERANCES = {
    "fastweights": {"float32": 1e-4, "bfloat16": 2e-2, "int8": 1e-1},
    "llama.cpp": {"Q4_1": 1e-1, "Q8_0": 1e-1, "BF16": 5e-2},
    "transformers": {"float32": 0.0, "bfloat16": 1e-1},
}
# Of the memory that is free, what contenders may use together.
MEMORY_SHARE = 0.8
TEXTS, TEXT_TOKENS, CHECK_TOKENS = 8, 512, 48
SHARED = "busy with other work, so that only large ratios mean something"


# the processes


class Worker:
    """A process that answers commands, one at a time."""

    def __init__(self, command: list[str], threads: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{do}: the process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{do}: {answer['error']}")
        return answer

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Engines:
    """The converted model in the decode engine."""

    def __init__(self, gguf: str) -> None:
        import torch

        import fastweights as fw

        self.torch, self.fw, self.gguf = torch, fw, gguf
        self.model = fw.convert(fw.load(gguf, dtype="float32").eval())
        self.base: Any = None
        self.prepared: dict[str, Any] = {}
        self.made: dict[tuple[str, int], Any] = {}

    def check(self, tokens: list[int]) -> dict[str, Any]:
        """Relative errors of the logits after a text, whose last 16 tokens are fed as steps."""
        from fastweights.decode.prefill import prefill

        torch, ids = self.torch, self.torch.tensor(tokens)
        with torch.no_grad():
            expected = self.model(ids[None]).logits[0, -1]
        errors = {}
        for name, weights in WEIGHTS.items():
            decoder = self.fw.Engine(self.model, weights=weights).decoder
            decoder.set_slot(0, prefill(self.model, ids[:-16])[1])
            for token in ids[-16:]:
                decoder.tokens.fill_(int(token))
                logits = decoder.step()
            errors[name] = float((logits[0] - expected).norm() / expected.norm())
        return {"errors": errors, "in_c": decoder.program is not None}

    def nll(self, name: str, texts: list[list[int]]) -> dict[str, Any]:
        """The sum of -log p of all tokens but the first of each text, with the base's attention as windows."""
        torch, fw = self.torch, self.fw
        if self.base is None:
            settings = fw.FastWeightsConfig("local", window=TEXT_TOKENS)
            self.base = fw.convert(fw.load(self.gguf, dtype="float32").eval(), settings)
        decoder = fw.Engine(self.base, len(texts), weights=WEIGHTS[name]).decoder
        ids, total = torch.tensor(texts), 0.0
        for i in range(ids.shape[1] - 1):
            decoder.tokens.copy_(ids[:, i])
            logprobs = decoder.step().double().log_softmax(-1)
            total -= float(logprobs.gather(1, ids[:, i + 1, None]).sum())
        return {"nll": total, "tokens": len(texts) * (ids.shape[1] - 1)}

    def prepare(self, name: str, length: int, batch: int) -> dict[str, Any]:
        from fastweights.decode.prefill import prefill

        if (name, batch) not in self.made:
            self.made = {key: engine for key, engine in self.made.items() if key[1] == batch}
            engine = self.made[name, batch] = self.fw.Engine(self.model, batch, weights=WEIGHTS[name])
            ids = self.torch.randint(40000, (PREFIX,), generator=self.torch.Generator().manual_seed(SEED))
            _, state = prefill(self.model, ids)
            for slot in range(batch):
                engine.decoder.set_slot(slot, state)
        engine = self.prepared[name] = self.made[name, batch]
        engine.decoder.positions.fill_(length)
        engine.step()
        return {}

    def measure(self, name: str, tokens: int, most: float) -> dict[str, Any]:
        engine, seconds, started = self.prepared[name], [], time.perf_counter()
        while len(seconds) < tokens and (len(seconds) < 3 or time.perf_counter() - started < most):
            before = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - before)
        return {"seconds": seconds}

    def free(self, name: str) -> dict[str, Any]:
        del self.prepared[name]
        return {}


class Transformers:
    """The base in transformers."""

    def __init__(self, gguf: str) -> None:
        import copy

        import torch

        import fastweights as fw

        self.torch, model = torch, fw.load(gguf, dtype="float32").eval()
        self.models = {"float32": model, "bfloat16": copy.deepcopy(model).to(torch.bfloat16)}
        self.prepared: dict[str, Any] = {}

    def logits(self, name: str, tokens: list[int]) -> dict[str, Any]:
        with self.torch.no_grad():
            return {"logits": self.models[name](self.torch.tensor([tokens])).logits[0, -1].tolist()}

    def nll(self, name: str, texts: list[list[int]]) -> dict[str, Any]:
        total, torch = 0.0, self.torch
        for text in texts:
            ids = torch.tensor([text])
            with torch.no_grad():
                logprobs = self.models[name](ids).logits[0, :-1].double().log_softmax(-1)
            total -= float(logprobs.gather(1, ids[0, 1:, None]).sum())
        return {"nll": total, "tokens": sum(len(text) - 1 for text in texts)}

    def prepare(self, name: str, length: int, batch: int) -> dict[str, Any]:
        from transformers import DynamicCache

        model, torch = self.models[name], self.torch
        config, cache = model.config, DynamicCache(config=model.config)
        shape = batch, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads
        generator = torch.Generator().manual_seed(SEED)
        for layer in range(config.num_hidden_layers):
            keys, values = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
            cache.update(keys, values, layer)
        self.prepared[name] = cache, torch.randint(40000, (batch, length + 1), generator=generator)
        return {}

    def measure(self, name: str, tokens: int, most: float) -> dict[str, Any]:
        """Times between the tokens of `generate`, in as many calls as there are lengths of the cache to go back to."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        torch, (cache, ids) = self.torch, self.prepared[name]
        times: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
                times.append(time.perf_counter())
                late = len(times) > 3 and times[-1] - times[0] > most
                return torch.full((len(input_ids),), late, dtype=torch.bool)

        options = dict(max_new_tokens=tokens + 1, min_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
        self.models[name].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            stopping_criteria=StoppingCriteriaList([Clock()]),
            **options,
        )
        cache.crop(ids.shape[1] - 1 - cache.get_seq_length())  # a negative number of tokens is removed
        return {"seconds": [after - before for before, after in pairwise(times)]}

    def free(self, name: str) -> dict[str, Any]:
        del self.prepared[name]
        return {}


def serve(worker: Any) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


# the measurement


@contextmanager
def workers(options: argparse.Namespace) -> Iterator[dict[str, Worker]]:
    own = [sys.executable, __file__, options.gguf, "--worker"]
    llama = [options.llama_python, str(Path(__file__).with_name("decode_cpu_llama.py"))]
    commands = {"fastweights": [*own, "Engines"], "transformers": [*own, "Transformers"]}
    commands["llama.cpp"] = [*llama, "--threads", str(options.threads)]
    started = {name: Worker(command, options.threads) for name, command in commands.items()}
    try:
        yield started
    finally:
        for worker in started.values():
            worker.close()


def load_ggufs(llama: Worker, gguf: str, folder: str) -> dict[str, int]:
    """The base in each format; the bytes of the files."""
    sizes = {}
    for name in GGUFS:
        file = gguf if name == "Q4_1" else f"{folder}/{name}.gguf"
        if name != "Q4_1":
            llama("quantize", source=gguf, target=file, ftype=name)
        sizes[name] = llama("load", name=name, file=file)["bytes"]
    return sizes


def read_texts(file: str, gguf: str, count: int) -> list[list[int]]:
    """The first tokens of texts that are long enough."""
    from fastweights.loading import load_tokenizer

    open_text = lzma.open if file.endswith(".xz") else open
    with open_text(file, "rt", encoding="utf-8") as opened:
        documents = opened.read(2_000_000).split("<|endoftext|>\n")
    tokenizer, found = load_tokenizer(gguf), []
    for document in documents:
        ids = tokenizer(document[: 20 * TEXT_TOKENS]).input_ids[:TEXT_TOKENS]
        if len(ids) == TEXT_TOKENS:
            found.append(ids)
        if len(found) == count:
            return found
    raise SystemExit(f"{file} has {len(found)} texts of {TEXT_TOKENS} tokens, and {count} are needed")


def relative_error(found: list[float], expected: list[float]) -> float:
    import numpy as np

    return float(np.linalg.norm(np.subtract(found, expected)) / np.linalg.norm(expected))


def check(running: dict[str, Worker], texts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Mean relative errors of the logits after texts: what rounding costs differs several times between texts."""
    found = [check_text(running, text) for text in texts]
    return {
        library: {name: statistics.mean(errors[library][name] for errors in found) for name in names}
        for library, names in found[0].items()
    }


def check_text(running: dict[str, Worker], tokens: list[int]) -> dict[str, dict[str, float]]:
    """Relative errors of the logits after a text."""
    base = running["transformers"]("logits", name="float32", tokens=tokens)["logits"]
    errors = {
        library: {
            name: relative_error(running[library]("logits", name=name, tokens=tokens)["logits"], base) for name in names
        }
        for library, names in TOLERANCES.items()
        if library != "fastweights"
    }
    own = running["fastweights"]("check", tokens=tokens)
    if not own["in_c"]:
        print("the engine's C code does not run here: torch operators are measured", file=sys.stderr)
    return {"fastweights": own["errors"]} | errors


def perplexities(running: dict[str, Worker], texts: list[list[int]]) -> list[dict[str, Any]]:
    import math

    kinds = {"fastweights": WEIGHTS, "llama.cpp": GGUFS, "transformers": ("float32",)}
    rows = []
    for library, names in kinds.items():
        for name in names:
            found = running[library]("nll", name=name, texts=texts)
            rows.append({"library": library, "weights": name, "perplexity": math.exp(found["nll"] / found["tokens"])})
    return rows


def cached_bytes(library: str, weights: str, length: int, batch: int) -> int:
    """Memory that a contender needs for its context; llama.cpp and transformers make copies of a part."""
    if library == "fastweights":
        return 0
    size = 4 if weights == "float32" else 2
    return CACHED_NUMBERS * size * length * (batch + (2 if library == "llama.cpp" else batch / 8))


def measure(
    running: dict[str, Worker], contenders: list[tuple[str, str]], length: int, batch: int, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The times of all contenders that fit into memory together, and the others with the reason."""
    ready, left_out = [], []
    for library, name in contenders:
        place = {"library": library, "weights": name, "batch": batch, "length": length}
        needed, free = cached_bytes(library, name, length, batch), psutil.virtual_memory().available
        if needed > MEMORY_SHARE * free:
            reason = f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free beside the other contenders"
            left_out.append(place | {"reason": reason})
            continue
        running[library]("prepare", name=name, length=length, batch=batch)
        ready.append((place, library, name))
    seconds: dict[tuple[str, str], list[float]] = {(library, name): [] for _, library, name in ready}
    for _ in range(options.rounds):
        for _, library, name in ready:
            answer = running[library]("measure", name=name, tokens=options.tokens, most=options.most_seconds)
            seconds[library, name] += answer["seconds"][1:]  # the first one finds the other's data in the caches
    for _, library, name in ready:
        running[library]("free", name=name)
    points = [
        place | {"seconds": statistics.median(seconds[key]), "fastest": min(seconds[key]), "steps": len(seconds[key])}
        for place, *key_parts in ready
        for key in [tuple(key_parts)]
    ]
    return points, left_out


def crossings(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of the engine's weights and each other contender: from which length on the engine is faster."""
    lines: dict[tuple[int, str, str], list[Any]] = {}
    for point in points:
        key = point["batch"], point["library"], point["weights"]
        lines.setdefault(key, []).append(SimpleNamespace(length=point["length"], seconds=point["seconds"]))
    return [
        {
            "batch": batch,
            "weights": weights,
            "library": other,
            "other_weights": other_weights,
            "faster_from": cheaper_from(theirs, own, "seconds"),
        }
        for (batch, library, weights), own in lines.items()
        if library == "fastweights"
        for (other_batch, other, other_weights), theirs in lines.items()
        if other != "fastweights" and other_batch == batch
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", help="SmolLM2-135M as GGUF")
    parser.add_argument("--llama-python", default="python3", help="Python that has llama-cpp-python")
    parser.add_argument("--text", help="text for perplexity; without it, that is not measured")
    parser.add_argument("--texts", type=int, default=TEXTS, help=f"how many of its texts, of {TEXT_TOKENS} tokens each")
    parser.add_argument("--out", default="results/decode_cpu_peers.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender has its turn")
    parser.add_argument("--tokens", type=int, default=16, help="steps of a turn")
    parser.add_argument(
        "--most-seconds", type=float, default=1.5, help="after which a turn ends, but not before 3 steps"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--most-tokens", type=int, help="leave out lengths that are more, times the texts")
    parser.add_argument("--shared", action="store_true", help="say in the result that the machine did other work, too")
    parser.add_argument("--quick", action="store_true", help="256 and 4,096 tokens before, one text, one short turn")
    parser.add_argument("--worker", choices=("Engines", "Transformers"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(globals()[options.worker](options.gguf))
        return
    if options.quick:
        options.lengths, options.batches, options.rounds, options.tokens = (256, 4096), (1,), 1, 8
    result = provenance()
    contenders = [("fastweights", name) for name in WEIGHTS] + [("llama.cpp", name) for name in GGUFS]
    contenders += [("transformers", name) for name in ("float32", "bfloat16")]
    with workers(options) as running, tempfile.TemporaryDirectory() as folder:
        sizes = load_ggufs(running["llama.cpp"], options.gguf, folder)
        llama = running["llama.cpp"]("about")
        texts = read_texts(options.text, options.gguf, options.texts) if options.text else []
        checked = [text[:CHECK_TOKENS] for text in texts] or [list(range(1000, 1000 + CHECK_TOKENS))]
        errors = check(running, checked)
        failed = [pair for pair in contenders if not errors[pair[0]][pair[1]] <= TOLERANCES[pair[0]][pair[1]]]
        print("relative errors of the logits:", json.dumps(errors))
        found = perplexities(running, texts) if texts else []
        points, left_out = [], []
        for batch in options.batches:
            for length in options.lengths:
                if options.most_tokens and batch * length > options.most_tokens:
                    continue
                fitting = [pair for pair in contenders if pair not in failed]
                more, not_fitting = measure(running, fitting, length, batch, options)
                points, left_out = points + more, left_out + not_fitting
                times = ", ".join(f"{p['library']} {p['weights']} {1e3 * p['seconds']:.1f}" for p in more)
                print(f"{batch} texts after {length:,} tokens, ms a step: {times}", flush=True)
    result["versions"] |= {"llama-cpp-python": llama["version"]}
    result["hardware"] |= {"threads": options.threads, "cpu": _processor()}
    result |= {
        "what": "median seconds of a step, which is one token of each of `batch` texts, after `length` others",
        "seed": SEED,
        "model": Path(options.gguf).name,
        "llama.cpp": llama["system"],
        "machine": SHARED if options.shared else "otherwise idle",
        "gguf bytes": sizes,
        "rounds": options.rounds,
        "relative errors": errors,
        "tolerances": TOLERANCES,
        "failed": [" ".join(pair) for pair in failed],
        "perplexity": {"texts": len(texts), "tokens": TEXT_TOKENS, "models": found} if texts else None,
        "points": points,
        "left_out": left_out,
        "crossings": crossings(points),
    }
    write_result(options.out, result)


def _processor() -> str:
    """The processor's name where the system tells it."""
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
