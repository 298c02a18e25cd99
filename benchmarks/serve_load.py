"""The server under load, and over a long conversation, with the packaged model on the CPU.

    python benchmarks/serve_load.py [--parts streams speed reading turns] [--seconds 300] [--threads 1] [--note TEXT]

A real `fastweights serve` process on 127.0.0.1 serves the packaged model, converted with the recommended preset. Parts:

- streams: 64 clients for --seconds, which hang up at random. Every finished answer is compared with the one that the
  same request got alone; afterwards slots, files, handles and memory of the server are compared with those before.
- speed: tokens a second of 1 to 64 streams, and of Engine.generate with the same prompts, in turn.
- reading: time to the first token of a short prompt while a long one is read.
- turns: 200 turns through /v1/responses, and those of the unconverted base in `transformers serve`, in turn. The base's
  position table is repeated, so that it can read all of them.

The first three go to results/serving_load.json, the last one to results/serving_turns.json; other parts of a file stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from serving import Process, Reply, ask, started, store_counts

import fastweights as fw
from fastweights.conversion import attention_sizes
from fastweights.decode.prefill import PREFILL_CHUNK
from fastweights.loading import load_tokenizer, save
from fastweights.presets import RECOMMENDED, preset_config
from fastweights.profiling.model_cost import stretched
from fastweights.quickstart import PACKAGED, VALIDATION_TEXT
from fastweights.utils.provenance import provenance, write_result

RESULTS = Path(__file__).parent.parent / "results"
STREAMS, SEED = 64, 0
CHATS, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Texts:
    """Pieces of the packaged books, drawn by a seed."""

    def __init__(self, tokenizer: Any, seed: int = SEED) -> None:
        self.tokenizer, self.random = tokenizer, random.Random(seed)
        text = lzma.decompress(VALIDATION_TEXT.read_bytes()).decode()
        self.tokens = tokenizer(text[:1_000_000]).input_ids

    def ids(self, count: int) -> list[int]:
        start = self.random.randrange(len(self.tokens) - count)
        return self.tokens[start : start + count]

    def text(self, count: int) -> str:
        return self.tokenizer.decode(self.ids(count))


def greedy(count: int, **fields: Any) -> dict[str, Any]:
    """The body of a request whose answer is streamed, with its numbers of tokens."""
    usage = {"stream_options": {"include_usage": True}}
    return {"max_tokens": count, "temperature": 0, "stream": True, **usage, **fields}


def serve(folder: Path, threads: int, *options: Any) -> Any:
    """A server of the converted model."""
    return started(["-m", "fastweights", "serve", str(folder), "--dtype", "float32", *map(str, options)], threads)


# 64 streams


class Talk:
    """What one client asks: one request, or a conversation of several that the server stores."""

    def __init__(self, texts: Texts) -> None:
        draw = texts.random
        self.path = draw.choice((COMPLETIONS, CHATS, RESPONSES))
        self.messages = [texts.text(draw.choice((4, 16, 64, 400))) for _ in range(draw.randint(1, 3))]
        self.counts = [draw.choice((1, 8, 32, 128)) for _ in self.messages]
        self.prompt = texts.ids(draw.choice((1, 16, 100, 1500)))
        self.expected: list[tuple[str, int]] = []

    def body(self, turn: int, before: list[Reply]) -> dict[str, Any]:
        count = self.counts[turn]
        if self.path == COMPLETIONS:
            return greedy(count, prompt=self.prompt)
        if self.path == CHATS:
            roles = ("system", "user", "assistant", "user")
            said = zip(roles, self.messages * 2, strict=False)
            return greedy(count, messages=[{"role": role, "content": text} for role, text in said])
        named = {"previous_response_id": before[-1].response_id} if before else {}
        return {"input": self.messages[turn], "max_output_tokens": count, "temperature": 0, "stream": True} | named

    async def run(self, port: int, hang_up: float | None = None) -> list[Reply]:
        """The replies until the end, or until the client hangs up during one of them."""
        replies: list[Reply] = []
        for turn in range(len(self.messages) if self.path == RESPONSES else 1):
            reply = await ask(port, self.path, self.body(turn, replies), hang_up)
            if not reply.complete:
                break
            replies.append(reply)
        return replies


def found_in(replies: Sequence[Reply]) -> list[tuple[str, int]]:
    return [(reply.text, reply.new_tokens) if reply.status == 200 else (reply.body, 0) for reply in replies]


async def load(port: int, talks: list[Talk], seconds: float) -> dict[str, int]:
    """64 clients at a time, of which a third hang up."""
    counts, end, draw = Counter[str](), time.monotonic() + seconds, random.Random(SEED)

    async def client() -> None:
        while time.monotonic() < end:
            talk = draw.choice(talks)
            hang_up = draw.expovariate(1.0) + 0.01 if draw.random() < 1 / 3 else None
            replies = await talk.run(port, hang_up)
            found = found_in(replies)
            counts["clients that hung up"] += len(found) < len(talk.expected)
            counts["answers"] += len(found)
            counts["tokens"] += sum(count for _, count in found)
            counts["answers that differ"] += sum(a != b for a, b in zip(found, talk.expected, strict=False))
            counts["errors"] += sum(reply.status != 200 for reply in replies)

    await asyncio.gather(*(client() for _ in range(STREAMS)))
    return dict(counts)


def streams(folder: Path, threads: int, seconds: float) -> dict[str, Any]:
    texts = Texts(load_tokenizer(folder))
    talks = [Talk(texts) for _ in range(60)]
    limits = ("--slots", STREAMS, "--queue", STREAMS, "--store-memory-mb", 64, "--store-states", 2000)
    with serve(folder, threads, *limits) as alone:
        for talk in talks:
            talk.expected = found_in(asyncio.run(talk.run(alone.port)))
    with tempfile.TemporaryDirectory() as name, serve(folder, threads, *limits, "--store", name) as server:
        asyncio.run(load(server.port, talks, min(10.0, seconds / 5)))  # all buffers have their size afterwards
        before, samples = _settled(server), list[tuple[float, int]]()
        result = asyncio.run(_sampled(server, load(server.port, talks, seconds), samples))
        after = _settled(server)
        store = store_counts(Path(name))
    third = len(samples) // 3
    early, late = (statistics.median(size for _, size in part) for part in (samples[:third], samples[-third:]))
    return {
        "streams": STREAMS,
        "seconds": seconds,
        **result,
        "still running or waiting": after["active"],
        "open files and sockets": {"before": before["files"], "after": after["files"]},
        "threads": {"before": before["threads"], "after": after["threads"]},
        "store": store,
        "resident bytes": {"first third": early, "last third": late, "ratio": late / early},
        "memory over time": [{"seconds": round(s), "bytes": b} for s, b in samples[:: max(1, len(samples) // 30)]],
    }


async def _sampled(server: Process, work: Any, samples: list[tuple[float, int]]) -> Any:
    working, begun = asyncio.ensure_future(work), time.monotonic()
    while not working.done():
        samples.append((time.monotonic() - begun, server.resident_bytes()))
        await asyncio.wait([working], timeout=1.0)
    return working.result()


def _settled(server: Process) -> dict[str, int]:
    """What the server holds when nobody asks for anything."""
    end = time.monotonic() + 20
    while server.active() and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(2)
    return {"active": server.active(), **server.handles()}


# speed


def speed(folder: Path, threads: int, rounds: int, streams: Sequence[int], count: int) -> dict[str, Any]:
    """The server and the engine in turn, with prompts that are new in each round."""
    tokenizer = load_tokenizer(folder)
    texts, model = Texts(tokenizer), fw.load(folder, dtype=torch.float32).eval()
    points, differ = [], 0
    for number in streams:
        engine, measured = fw.Engine(model, number), list[dict[str, float]]()
        with serve(folder, threads, "--slots", number) as server:
            for warm_up in (True, *[False] * rounds):
                prompts = [texts.ids(32) for _ in range(number)]
                begun = time.perf_counter()
                expected = engine.generate(prompts, count)
                engine_speed = sum(map(len, expected)) / (time.perf_counter() - begun)
                begun, spent = time.perf_counter(), server.cpu_seconds()
                replies = asyncio.run(_at_once(server.port, [greedy(count, prompt=prompt) for prompt in prompts]))
                seconds = time.perf_counter() - begun
                shown = [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
                differ += sum(reply.text != text for reply, text in zip(replies, shown, strict=True))
                if not warm_up:
                    own = sum(reply.new_tokens for reply in replies) / seconds
                    first = statistics.median(reply.first_seconds for reply in replies)
                    cores = (server.cpu_seconds() - spent) / seconds
                    measured.append(
                        {"engine": engine_speed, "server": own, "ratio": own / engine_speed, "first": first}
                        | {"cores of the server": cores}
                    )
        point = {name: statistics.median(row[name] for row in measured) for name in measured[0]}
        best = {f"best {name}": max(row[name] for row in measured) for name in ("engine", "server")}
        points.append({"streams": number} | point | best)
        print(points[-1], flush=True)
    return {"rounds": rounds, "tokens of an answer": count, "answers that differ": differ, "points": points}


async def _at_once(port: int, bodies: list[dict[str, Any]]) -> list[Reply]:
    return await asyncio.gather(*(ask(port, COMPLETIONS, body) for body in bodies))


# a short prompt while a long one is read


def reading(folder: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Time to the first token, in times of a step with a chunk of a prompt in it."""
    texts, length = Texts(load_tokenizer(folder)), 20_000

    async def long(server: Process) -> float:
        reply = await ask(server.port, COMPLETIONS, greedy(1, prompt=texts.ids(length)))
        return reply.seconds

    async def both(server: Process) -> tuple[float, list[float]]:
        first, running = list[float](), asyncio.ensure_future(long(server))
        await asyncio.sleep(0.1)
        while True:
            await asyncio.sleep(texts.random.uniform(0, 0.1))
            reply = await ask(server.port, COMPLETIONS, greedy(1, prompt=texts.ids(16)))
            if running.done():
                return running.result(), first
            first.append(reply.first_seconds)

    with serve(folder, threads) as server:
        alone, steps, waits = list[float](), list[float](), list[float]()
        for _ in range(rounds):
            alone.append(asyncio.run(ask(server.port, COMPLETIONS, greedy(1, prompt=texts.ids(16)))).first_seconds)
            steps.append(asyncio.run(long(server)) / (length / PREFILL_CHUNK))
            waits += asyncio.run(both(server))[1]
    step = statistics.median(steps)
    return {
        "long prompt": length,
        "tokens read in a step": PREFILL_CHUNK,
        "step seconds": step,
        "first token seconds": statistics.median(waits),
        "first token seconds without the long prompt": statistics.median(alone),
        "steps until the first token": statistics.median(waits) / step,
        "steps in 9 of 10 cases": statistics.quantiles(waits, n=10)[-1] / step,
        "short prompts": len(waits),
    }


# a long conversation


def turns(folder: Path, base: Path, threads: int, count: int, repeats: int) -> dict[str, Any]:
    tokenizer, new = load_tokenizer(folder), 16
    texts = Texts(tokenizer)
    messages = [texts.text(16) for _ in range(count)]
    others: list[dict[str, str]] = []
    points, ids = [], list[str]()
    # The other server has no /health until its model is loaded with the first request.
    command = ["-c", "from transformers.cli.transformers import main; main()", "serve", str(base), "--device", "cpu"]
    with serve(folder, threads) as server, started(command, threads, "/v1/models") as other:

        def turn(message: str, before: str | None) -> Reply:
            body = {"input": message, "max_output_tokens": new, "temperature": 0, "stream": True}
            return asyncio.run(ask(server.port, RESPONSES, body | ({"previous_response_id": before} if before else {})))

        def other_turn(message: str) -> Reply:
            others.append({"role": "user", "content": message})
            body = {"model": str(base), "messages": others, "max_tokens": new, "temperature": 0, "stream": True}
            reply = asyncio.run(ask(other.port, CHATS, body))
            others.append({"role": "assistant", "content": reply.text})
            return reply

        asyncio.run(ask(other.port, CHATS, {"model": str(base), "messages": [{"role": "user", "content": "Hello"}]}))
        for number, message in enumerate(messages, 1):
            reply, theirs = turn(message, ids[-1] if ids else None), other_turn(message)
            assert reply.status == theirs.status == 200, (reply.body, theirs.body)
            ids.append(reply.response_id)
            lengths = {"new tokens": reply.new_tokens, "new tokens of the base": len(tokenizer(theirs.text).input_ids)}
            sizes = {"turn": number, "tokens": reply.usage["total_tokens"], **lengths}
            points.append(sizes | {"server": reply.seconds, "base": theirs.seconds})
        # The same message after one turn and after all but one: states stay as they are, so it can be repeated.
        second, last = [], []
        for _ in range(repeats):
            second.append(turn(messages[1], ids[0]).seconds)
            last.append(turn(messages[1], ids[-2]).seconds)
    early, late = statistics.median(second), statistics.median(last)
    around = {
        name: statistics.median(point[name] for point in points[-10:])
        / statistics.median(point[name] for point in points[1:11])
        for name in ("server", "base")
    }
    return {
        "turns": count,
        "new tokens of a turn": new,
        "same message": {"repeats": repeats, "turn 2": early, f"turn {count}": late, "ratio": late / early},
        "last ten against turns 2 to 11": around,
        "points": points,
    }


def prepare(folder: Path, base: Path, longest: int, source: Path = PACKAGED) -> None:
    """Write the converted model, and the base with a longer position table and a chat template."""
    model, tokenizer = fw.load(source, dtype=torch.float32).eval(), load_tokenizer(source)
    settings = preset_config(RECOMMENDED, *attention_sizes(model), positions="clamp")
    save(fw.convert(model, settings), folder, tokenizer)
    if source != PACKAGED:
        return
    tokenizer.chat_template = TEMPLATE
    longer = stretched(fw.load(PACKAGED, dtype=torch.float32).eval(), longest)
    longer.generation_config.eos_token_id = None  # all answers have the same number of tokens
    save(longer, base, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("streams", "speed", "reading", "turns")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seconds", type=float, default=300.0, help="that the 64 streams last")
    parser.add_argument("--rounds", type=int, default=5, help="of speed and reading")
    parser.add_argument("--model", type=Path, default=PACKAGED, help="whose speed is measured: a folder or a GGUF file")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 2, 4, 8, 16, 32, 64), help="at once, for speed")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, for speed")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each process")
    parser.add_argument("--note", default="no other work ran", help="what else ran on the machine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if options.model != PACKAGED and options.parts != ["speed"]:
        parser.error("--model: other models than the packaged one are for --parts speed")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder, base = Path(name) / "converted", Path(name) / "base"
        prepare(folder, base, 64 * options.turns + 1024, options.model)
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "streams": lambda: streams(folder, options.threads, options.seconds),
            "speed": lambda: speed(folder, options.threads, options.rounds, options.streams, options.tokens),
            "reading": lambda: reading(folder, options.threads, options.rounds),
            "turns": lambda: turns(folder, base, options.threads, options.turns, 5 * options.rounds),
        }
        for part in options.parts:
            measured = measures[part]()
            named = part if options.model == PACKAGED else f"{part} with {options.model.name}"
            _write(options.out, named, measured | {"note": options.note, "commit": provenance()["commit"]})
            Console().print(part, {k: v for k, v in measured.items() if k not in ("points", "memory over time")})


def _write(folder: Path, part: str, measured: dict[str, Any]) -> None:
    path = folder / f"serving_{'turns' if part == 'turns' else 'load'}.json"
    before = json.loads(path.read_text())["parts"] if path.is_file() else {}
    what = "fastweights serve with the packaged model, recommended preset, float32, on the CPU; clients on the same CPU"
    write_result(path, {"what": what, "seed": SEED, "parts": before | {part: measured}})


if __name__ == "__main__":
    main()
