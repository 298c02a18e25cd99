"""Damaged and hostile files end in the same result or in one line that names the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import error_of, run, save_model, succeed
from helpers.damaged_files import CHANGED, FileKind, file_kinds, is_failure, mutations_of, outcome_of
from helpers.tiny import pretrained, tokens
from safetensors import safe_open
from safetensors.torch import save_file

import fastweights as fw
from fastweights.decode.batch import GenerationError
from fastweights.decode.engine import Engine
from fastweights.decode.generation import generate_sequence
from fastweights.loading import load
from fastweights.modeling.cache import FastWeightsCache, StateError
from fastweights.modeling.description import describe_source
from fastweights.modeling.source_files import check_source
from fastweights.utils.errors import CheckpointError
from fastweights.utils.parsing import ParseError, parse_json, parse_yaml

KINDS = [
    *(
        "state",
        "hybrid state",
        "snapshot",
        "hybrid snapshot",
        "config.json",
        "model.safetensors",
        "generation_config.json",
    ),
    *("GGUF", "fairseq checkpoint", "fairseq dictionary", "pytorch_model.bin", "weights of a checkpoint"),
    *(
        "base generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "meta.json",
        "starts.npy",
        "tokens.bin",
    ),
    *("recipe", "grid", "cost result", "evaluation result", "ranking result", "training result"),
]
NAN = math.nan


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileKind]:
    return file_kinds(tmp_path_factory.mktemp("files"))


def assert_no_failure(kind: FileKind, count: int, seed: int) -> None:
    expected = kind.read()
    for number, content in enumerate(mutations_of(kind, count, seed)):
        outcome, error = outcome_of(kind, content, expected)
        if is_failure(kind, outcome):
            raise AssertionError(f"mutation {number} of seed {seed} of {kind.file} ended in: {outcome}") from error


def test_every_kind_of_file_is_mutated(kinds: dict[str, FileKind]) -> None:
    assert set(kinds) == set(KINDS)


@pytest.mark.filterwarnings("ignore")  # transformers warns about settings that it ignores
@pytest.mark.parametrize("name", KINDS)
def test_mutated_file_is_read_as_before_or_refused_by_name(kinds: dict[str, FileKind], name: str) -> None:
    assert_no_failure(kinds[name], 30, seed=0)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_500_mutations_are_read_as_before_or_refused_by_name(kinds: dict[str, FileKind], name: str) -> None:
    assert_no_failure(kinds[name], 500, seed=1)


def test_mutations_are_found_where_nothing_is_checked(kinds: dict[str, FileKind]) -> None:
    """The suite itself would notice a state whose damage changes the result."""
    kind = kinds["state"]
    unchecked = FileKind(kind.file, lambda: kind.file.read_bytes(), kind.mutate, has_checksum=True)
    outcome, _ = outcome_of(unchecked, next(mutations_of(kind, 1)), kind.file.read_bytes())
    assert outcome == CHANGED and is_failure(unchecked, outcome)


# states


def saved_state(folder: Path, **settings: Any) -> tuple[Any, Path]:
    model = load(save_model(folder / "model", **settings))
    cache = FastWeightsCache(model.config)
    with torch.no_grad():
        model(tokens(1, 5), past_key_values=cache)
    cache.save(folder / "state", model)
    return model, folder / "state"


def test_state_without_checksum_is_still_read(tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    model, path = saved_state(tmp_path, m=4, window=3)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["sha256"]
    save_file(tensors, path, metadata)
    assert int(FastWeightsCache.load(path, model).seen) == 5
    tensors["0.state"][0, 0, 0, 0] = NAN
    save_file(tensors, path, metadata)
    with pytest.raises(StateError, match=r"state is a damaged state file: 0\.state contains NaN"):
        FastWeightsCache.load(path, model)


def test_unused_state_is_saved_and_loaded(tmp_path: Path) -> None:
    model = load(save_model(tmp_path / "model", m=4))
    FastWeightsCache(model.config).save(tmp_path / "state", model)
    assert FastWeightsCache.load(tmp_path / "state", model).lengths is None


def test_flipped_bit_of_a_state_is_one_line_on_the_command_line(tmp_path: Path) -> None:
    _, path = saved_state(tmp_path, m=4)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    message = error_of("generate", tmp_path / "model", "--prompt", "x", "--load-state", path)
    assert message.startswith(f"--load-state: {path} is a damaged state file")


# sizes


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_layer", 10_000), ("n_layer", 500), ("vocab_size", 10**9), ("n_embd", 2**20), ("n_positions", 10**8)],
)
def test_config_that_asks_for_more_than_the_files_hold_is_refused(tmp_path: Path, field: str, value: int) -> None:
    folder = save_model(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {field: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/tmp/model.safetensors", "a/model.safetensors", 5])
def test_index_that_names_files_of_other_folders_is_refused(tmp_path: Path, shard: Any) -> None:
    folder = save_model(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": shard}}))
    for read in (load, describe_source, check_source):
        with pytest.raises(CheckpointError, match=r"index\.json must name files of this folder"):
            read(folder)


# YAML and JSON


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("a: " * 3 + "1", "is not YAML"),
        ("a: &a [*a]", "a value that contains it"),
        ("a: " + "9" * 400, "more than 300 digits"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a: 1\na: 2", "line 2: a is given twice"),
        (
            "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 9)),
            "too large",
        ),
        ("x: " + "y" * 2**19, None),
    ],
)
def test_yaml_beyond_the_limits_is_refused(text: str, message: str | None) -> None:
    if message is None:  # the size of a file is limited where it is read, not that of a string
        assert parse_yaml(text)
        return
    with pytest.raises(ParseError, match=message):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * 70 + "]" * 70, "nested too deeply"),
        ("9" * 301, "300 digits"),
        ("{", "line 1"),
    ],
)
def test_json_beyond_the_limits_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse_json(text)


# NaN


def with_nan(model: Any) -> Any:
    with torch.no_grad():
        next(model.parameters()).fill_(NAN)
    return model


@pytest.mark.parametrize("settings", [dict(m=4), dict(m=4, layers=(0,)), {}], ids=["converted", "hybrid", "ordinary"])
@pytest.mark.parametrize(
    "flags", [[], ["--temperature", 1, "--top-k", 5], ["--num-beams", 2]], ids=["greedy", "sampled", "beams"]
)
def test_generate_stops_at_nan_weights(tmp_path: Path, settings: dict[str, Any], flags: list[Any]) -> None:
    folder = save_model(tmp_path, **settings)
    with_nan(load(folder)).save_pretrained(folder)
    result = run("generate", folder, "--prompt", "Hello", "--max-new-tokens", 5, *flags)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "logits are NaN after 0 new tokens" in result.stderr


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"top_p": 0.5}, {"repetition_penalty": 2.0}])
def test_engine_stops_at_nan_in_one_slot(options: dict[str, float]) -> None:
    sampling = fw.Sampling(**options)
    model = fw.convert(pretrained("gpt2"), fw.FastWeightsConfig(m=4))
    state = FastWeightsCache(model.config)
    with torch.no_grad():
        model(tokens(1, 3), past_key_values=state)
    state.layers[0].tensors["state"].fill_(NAN)
    engine = Engine(model, batch_size=2)
    with pytest.raises(GenerationError, match="logits are NaN"):
        engine.generate([[5, 6], [5, 6]], 4, sampling, states=[None, state])
    assert len(engine.generate([[5, 6]], 4, sampling)[0]) == 4


def test_engine_stops_at_nan_in_the_middle_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fw.convert(pretrained("gpt2"), fw.FastWeightsConfig(m=4)))
    (expected,) = engine.generate([[5, 6]], 6)
    steps, step = iter((1.0, 1.0, NAN)), engine.decoder.step
    monkeypatch.setattr(engine.decoder, "step", lambda slots: step(slots) * next(steps))
    received: list[int] = []
    with pytest.raises(GenerationError, match="after 3 new tokens"):
        engine.generate([[5, 6]], 6, on_token=lambda _, token: received.append(token))
    assert received == expected[:3]


def test_finite_models_generate_as_before(tmp_path: Path) -> None:
    folder = save_model(tmp_path, m=4)
    assert succeed("generate", folder, "--prompt", "Hello", "--max-new-tokens", 3).exit_code == 0
    model = load(folder)
    assert generate_sequence(model, tokens(1, 4), FastWeightsCache(model.config), max_new_tokens=3)[0].shape == (1, 7)
