"""Mutations of every kind of file that the library reads, and what becomes of each one.

A mutation flips bits, cuts a file short, deletes or renames fields, changes types, nests deeply or writes huge numbers.
Reading the file must give the same result as before, another valid value (where a file has no checksum, an edit
cannot be told from the original), or one error that names the file, in one line.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fastweights.data.token_files import check_vocabulary, prepare
from fastweights.decode.generation import generate_sequence
from fastweights.decode.prefill import prefill
from fastweights.experiments.grid import load_grid
from fastweights.loading import load, load_tokenizer
from fastweights.modeling import state_format
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.description import describe_source
from fastweights.report import tables_of
from fastweights.results import read_result
from fastweights.serve.snapshot import Snapshot, from_bytes, to_bytes
from fastweights.training.recipe import load_recipe
from fastweights.utils.errors import FastWeightsError
from fastweights.utils.manifest import write_manifest
from helpers import fairseq
from helpers.cli import save_model, tokenizer
from helpers.sample_results import COST, EVALUATION, RANKING, TRAINING
from helpers.tiny import tokens
from helpers.tiny_gguf import write_tiny_llama

SECONDS = 5.0
SAME, CHANGED, REFUSED, UNNAMED, TRACEBACK, HANG = "same", "changed", "refused", "unnamed", "traceback", "hang"

# Values that are put in the place of any other.
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 10_000, 10**9, 2**31, 2**63, 10**30, -(10**30), 10**400, 0.5, 1e300, 1e-320),
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        "x",
        "x" * 5000,
        "../../x",
        "None",
        "1e3",
        "a/b",
        "\u0000",
        "\ud83d",
    ),
    *([], {}, [None], [[]], [0] * 100, {"": 0}, {"a": {"b": []}}, [1, "a", None, 0.5]),
]


class TimedOut(BaseException):
    """No Exception, so that nothing that is tested can catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimedOut

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@dataclass
class FileKind:
    """A kind of file.

    file: The file that is mutated.
    read: Reads it as the library does; the result is compared with that of the intact file.
    mutate: (intact content, random generator) -> damaged content.
    has_checksum: Another result than that of the intact file is an error.
    """

    file: Path
    read: Callable[[], Any]
    mutate: Callable[[bytes, random.Random], bytes]
    has_checksum: bool = False


# mutations


def flip_bits(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut_short(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def zero_block(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    size = min(rng.choice((1, 16, 4096)), len(content) - start)
    return content[:start] + bytes(size) + content[start + size :]


def repeat_block(content: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.randrange(len(content)) for _ in range(2))
    return content[:end] + content[start:end] + content[end:]


def insert_bytes(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + rng.randbytes(rng.randrange(1, 20)) + content[at:]


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    return rng.choice((flip_bits, flip_bits, cut_short, zero_block, repeat_block, insert_bytes))(content, rng)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """A copy of a nested value with one item deleted, renamed, doubled or replaced."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        items = [(item, key) for item in level for key in (item if isinstance(item, dict) else range(len(item)))]
        places += items
        level = [item[key] for item, key in items if isinstance(item[key], dict | list)]
    if not places:
        return rng.choice(VALUES)
    parent, key = rng.choice(places)
    action = rng.randrange(6)
    if action == 0:
        del parent[key]
    elif action == 1 and isinstance(parent, dict):
        parent[f"{key}{rng.choice(('', '_', '.', ' '))}x"] = parent.pop(key)
    elif action == 2 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = parent[key] * rng.choice((-1, 2, 1000, 10**9, 0.5))
    else:
        parent[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def nest(text: str, rng: random.Random, opening: str = "[", closing: str = "]") -> str:
    """Put a deeply nested list in the place of a number."""
    depth = rng.choice((70, 3000, 100_000))
    places = [i for i, character in enumerate(text) if character.isdigit()] or [0]
    at = rng.choice(places)
    return text[:at] + opening * depth + closing * depth + text[at + 1 :]


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    choice = rng.randrange(10)
    if choice < 3:
        return mutate_bytes(content, rng)
    if choice == 3:
        return nest(content.decode(), rng).encode()
    return json.dumps(mutate_value(json.loads(content), rng)).encode()


def mutate_yaml(content: bytes, rng: random.Random) -> bytes:
    text, choice = content.decode(), rng.randrange(12)
    if choice < 2:
        return mutate_bytes(content, rng)
    if choice == 2:
        return nest(text, rng).encode()
    if choice == 3:
        return text.replace(": ", f": {rng.choice(YAML_TAGS)} ", rng.randrange(1, 4)).encode()
    if choice == 4:
        return (text + rng.choice(YAML_ALIASES)).encode()
    if choice == 5:
        return text.replace(": ", ": " + rng.choice(("9" * 400, "9" * 5000, "0x" + "f" * 400, "1e999 ")), 1).encode()
    value = mutate_value(yaml.safe_load(text), rng)
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


YAML_TAGS = (
    "!!python/object/apply:os.system",
    "!!python/name:os.system",
    *("!!int", "!!float", "!!bool", "!!timestamp", "!!binary", "!!set", "!!omap", "!!null", "!x", "&a"),
)
BOMB = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))
YAML_ALIASES = (
    f"\na0: &a0 [x, x]\n{BOMB}\n",
    f"\nset: {{a0: &a0 [x, x], {', '.join(BOMB.splitlines())}}}\n",
    "\nset: &s {a: *s}\n",
    "\nseed: *missing\n",
    "\n<<: {seed: 1}\n",
    "\n<<: [1]\n",
    "\n2001-99-99: 1\n",
    "\n? [a, b]\n: 1\n",
)


def mutate_state(content: bytes, rng: random.Random) -> bytes:
    """A damaged state file, or a forged one whose checksum is right."""
    if rng.random() < 0.5:
        return mutate_header(content, rng) if rng.random() < 0.4 else mutate_bytes(content, rng)
    tensors, metadata = _parse_tensors(content)
    _forge(tensors, metadata, rng)
    return _write_tensors(tensors, metadata)


def mutate_header(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header."""
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    text = json.dumps(mutate_value(header, rng)).encode()
    claimed = rng.choice((len(text),) * 4 + (0, 1, 2**40, 2**63, 100_000_000))
    return struct.pack("<Q", claimed) + text + data


def _forge(tensors: dict[str, torch.Tensor], metadata: dict[str, str], rng: random.Random) -> None:
    name = rng.choice(sorted(tensors))
    held = tensors[name]
    action = rng.randrange(9)
    if action == 0:
        del tensors[name]
    elif action == 1:
        field = name.partition(".")[2] or name
        names = (
            f"99.{field}",
            f"-1.{field}",
            f"x.{field}",
            field,
            f"{field}.0",
            "0.__class__",
            "0.tensors",
            "1.is_sliding",
        )
        tensors[rng.choice(names)] = tensors.pop(name)
    elif action == 2:
        tensors[name] = held.to(rng.choice([d for d in _DTYPES if d != held.dtype]))
    elif action == 3:
        tensors[name] = held[None].clone()
    elif action == 4:
        tensors[name] = torch.cat([held.reshape(-1), held.reshape(-1)])
    elif action == 5:
        floats = [n for n, t in tensors.items() if t.is_floating_point() and t.numel() and n != "model"]
        if floats:
            tensors[rng.choice(floats)].view(-1)[0] = rng.choice((float("nan"), float("inf")))
    elif action == 6:
        tensors["lengths"] = tensors["lengths"] + tensors["seen"] + rng.choice((1, 10**12))
    elif action == 7:
        tensors["seen"] = torch.tensor(rng.choice((-1, 0, -(2**60))))
    else:
        tensors[rng.choice(("0.extra", "layers", "1.keys_", "lengths2"))] = torch.zeros(3)
    if "sha256" in metadata:
        metadata["sha256"] = state_format.checksum(tensors)


_DTYPES = (torch.uint8, torch.int64, torch.bool, torch.int32)


def _parse_tensors(content: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    (size,) = struct.unpack("<Q", content[:8])
    return load_tensors(content), json.loads(content[8 : 8 + size])["__metadata__"]


def _write_tensors(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    return save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)


def mutate_tensors(content: bytes, rng: random.Random) -> bytes:
    return mutate_header(content, rng) if rng.random() < 0.5 else mutate_bytes(content, rng)


# kinds of files


def file_kinds(folder: Path) -> dict[str, FileKind]:
    """Intact files of every kind under a folder."""
    kinds = {"state": _state_kind(folder / "state", "gpt2", m=4, window=3, rule="gated")}
    kinds["hybrid state"] = _state_kind(folder / "hybrid", "mistral", m=4, layers=(0,))
    kinds["snapshot"] = _snapshot_kind(folder / "snapshot", "gpt2", m=4, window=3, rule="gated")
    kinds["hybrid snapshot"] = _snapshot_kind(folder / "hybrid_snapshot", "mistral", m=4, layers=(0,))
    model = save_model(folder / "model", m=4)
    for name, mutate in (
        ("config.json", mutate_json),
        ("model.safetensors", mutate_tensors),
    ):
        kinds[name] = FileKind(model / name, lambda: _logits_and_description(model), mutate)
    for folder_kind, parent in (
        ("generation_config.json", model),
        ("base generation_config.json", save_model(folder / "base")),
    ):
        file = parent / "generation_config.json"
        kinds[folder_kind] = FileKind(file, lambda parent=parent: _generated(parent), mutate_json)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        kinds[name] = FileKind(model / name, lambda: _encoded(model), mutate_json)
    kinds |= _foreign_kinds(folder)
    kinds |= _token_kinds(folder / "tokens", folder)
    for name, content, read in (
        ("recipe", RECIPE, lambda path: load_recipe(path).to_dict()),
        ("grid", GRID, load_grid),
    ):
        path = folder / f"{name}.yaml"
        path.write_text(content)
        kinds[name] = FileKind(path, lambda path=path, read=read: repr(read(path)), mutate_yaml)
    for name, result in (("cost", COST), ("evaluation", EVALUATION), ("ranking", RANKING), ("training", TRAINING)):
        path = folder / f"{name}_result.json"
        path.write_text(json.dumps(result))
        kinds[f"{name} result"] = FileKind(path, lambda path=path: repr(tables_of(read_result(path))), mutate_json)
    return kinds


RECIPE = """stages:
  - {loss: transfer, tokens: 20_000_000, learning_rate: 3.0e-3, fit: full}
  - {loss: distill, tokens: 80_000_000, learning_rate: 1.0e-3, cross_entropy: 0.3}
length: 1024
batch_tokens: 16_384
seed: 1
"""
GRID = """recipe: distill
set: {length: 1024, transfer.tokens: 8_000_000, transfer.learning_rate: 3e-3}
defaults: {m: 64, gate_init: log}
runs:
  decay: {rule: decay, seeds: [0, 1], set: {distill.tokens: 56_000_000}, cell: {table: A, row: a}}
  window: {rule: decay, window: 64, cell: {table: A, row: b}}
"""


def _state_kind(folder: Path, family: str, **settings: Any) -> FileKind:
    model = load(save_model(folder, family, **settings))
    cache, file = FastWeightsCache(model.config), folder / "state.safetensors"
    with torch.no_grad():
        model(tokens(1, 9), past_key_values=cache)
    cache.save(file, model)

    def read() -> Any:
        loaded = FastWeightsCache.load(file, model)
        ids = tokens(1, 2, seed=1)
        with torch.no_grad():
            return model(ids, past_key_values=loaded, attention_mask=loaded.mask_for(ids)).logits.tolist()

    return FileKind(file, read, mutate_state, has_checksum=True)


def _snapshot_kind(folder: Path, family: str, **settings: Any) -> FileKind:
    """A state with the logits of the next token, as the server reads it from memory."""
    model, file = load(save_model(folder, family, **settings)), folder / "snapshot.safetensors"
    logits, state = prefill(model, tokens(9))
    file.write_bytes(to_bytes(Snapshot(state, logits[0]), model))

    def read() -> Any:
        snapshot = from_bytes(file.read_bytes(), model, str(file))
        following, _ = prefill(model, tokens(2, seed=1), snapshot.state)
        # A file without logits is a snapshot, too.
        return (logits[0] if snapshot.logits is None else snapshot.logits).tolist(), following.tolist()

    return FileKind(file, read, mutate_state, has_checksum=True)


def _foreign_kinds(folder: Path) -> dict[str, FileKind]:
    """Models in the formats of other programs, and a model in a manifest's care."""
    write_tiny_llama(folder / "tiny.gguf")
    kinds = {
        "GGUF": FileKind(folder / "tiny.gguf", lambda: _logits_and_description(folder / "tiny.gguf"), mutate_bytes)
    }
    parent = folder / "fairseq"
    parent.mkdir()
    checkpoint = fairseq.save(parent / "model.pt", fairseq.state_dict())
    words = fairseq.dictionary(parent / "dict.txt")
    kinds["fairseq checkpoint"] = FileKind(checkpoint, lambda: _logits_and_description(checkpoint), mutate_bytes)
    kinds["fairseq dictionary"] = FileKind(words, lambda: _encoded(checkpoint), mutate_bytes)
    pickled = save_model(folder / "pickled", m=4)
    torch.save(load(pickled).state_dict(), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    file = pickled / "pytorch_model.bin"
    kinds["pytorch_model.bin"] = FileKind(file, lambda: _logits_and_description(pickled), mutate_bytes)
    listed = save_model(folder / "listed", m=4)
    write_manifest(listed)
    file = listed / "model.safetensors"
    kinds["weights of a checkpoint"] = FileKind(file, lambda: _logits_and_description(listed), mutate_tensors, True)
    return kinds


def _logits_and_description(folder: Path) -> Any:
    described = repr(describe_source(folder))
    with torch.no_grad():
        return described, repr(load(folder)(tokens(1, 5)).logits.tolist())


def _generated(folder: Path) -> Any:
    """Tokens of the decode engine, or of transformers' generate where the model is not converted."""
    model = load(folder)
    state = FastWeightsCache(model.config) if hasattr(model.config, "fastweights") else None
    return generate_sequence(model, tokens(1, 4), state, max_new_tokens=3)[0].tolist()


def _encoded(folder: Path) -> Any:
    loaded = load_tokenizer(folder)
    return None if loaded is None else loaded("Hello, you.").input_ids


def _token_kinds(folder: Path, cache: Path) -> dict[str, FileKind]:
    text = cache / "text.txt"
    text.write_text("Some words of a document.\n<|endoftext|>\nAnother one, with words.\n" * 20)
    shutil.copytree(prepare(text, tokenizer(), cache=cache / "cache", progress=False).folder, folder)
    config = load(cache / "model").config

    def read() -> Any:
        found = prepare(folder, tokenizer())
        check_vocabulary(found, tokenizer(), config)
        counts = [found.meta[name] for name in ("tokens", "documents", "words", "bytes")]
        return found.tokens.tolist(), found.starts.tolist(), counts

    mutations = {"meta.json": mutate_json, "starts.npy": mutate_bytes, "tokens.bin": mutate_bytes}
    return {name: FileKind(folder / name, read, mutate, has_checksum=True) for name, mutate in mutations.items()}


# outcomes


def outcome_of(
    kind: FileKind, content: bytes, expected: Any, seconds: float = SECONDS
) -> tuple[str, BaseException | None]:
    """What becomes of a file with this content, and the error if there was one."""
    intact = kind.file.read_bytes()
    kind.file.write_bytes(content)
    try:
        with time_limit(seconds):
            return (SAME if kind.read() == expected else CHANGED), None
    except TimedOut as error:
        return HANG, error
    except FastWeightsError as error:
        named = any(str(name) in str(error) for name in (kind.file, kind.file.parent))
        return (REFUSED if named and "\n" not in str(error) else UNNAMED), error
    except ValueError as error:  # of another library, or one that does not say what is wrong
        return UNNAMED, error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return TRACEBACK, error
    finally:
        kind.file.write_bytes(intact)


def is_failure(kind: FileKind, outcome: str) -> bool:
    """Whether a mutation must not end like this."""
    return outcome in (UNNAMED, TRACEBACK, HANG) or (kind.has_checksum and outcome == CHANGED)


def mutations_of(kind: FileKind, count: int, seed: int = 0) -> Iterator[bytes]:
    """Damaged contents of a file, always the same for one seed. None is the intact content."""
    intact = kind.file.read_bytes()
    rng = random.Random(f"{seed} {kind.file.name}")
    made = 0
    while made < count:
        content = kind.mutate(intact, rng)
        if content != intact:
            made += 1
            yield content


def count_outcomes(kind: FileKind, count: int, seconds: float = SECONDS) -> Counter[str]:
    """How many of `count` mutations ended how."""
    expected = kind.read()
    return Counter(outcome_of(kind, content, expected, seconds)[0] for content in mutations_of(kind, count))
