"""What a user can get wrong: each is one line that names the flag or file, what was found and what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from helpers.cli import error_of, run, save_model, succeed, tokenizer
from helpers.tiny import pretrained, tokens
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from fastweights.config import ConfigError, FastWeightsConfig
from fastweights.conversion import convert
from fastweights.loading import load, save
from fastweights.model_paths import new_model_folder
from fastweights.modeling.cache import FastWeightsCache, StateError
from fastweights.modeling.families import UnknownFamilyError
from fastweights.utils.errors import CheckpointError

# settings in Python, as flags, and what the message must say
UNDEFINED: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "unknown rule": (dict(rule="lstm"), ["--rule", "lstm"], "rule='lstm' is not known; choose one of decay"),
    "unknown map": (dict(feature_map="x"), ["--feature-map", "x"], "feature_map='x' is not known; choose one of none"),
    "m of zero": (dict(m=0), ["--m", 0], "m must be between 1 and 65,536, found 0"),
    "negative m": (dict(m=-4), ["--m", -4], "m must be between 1 and 65,536, found -4"),
    "negative window": (dict(window=-1), ["--window", -1], "window must be between 0 and 1,048,576, found -1"),
    "local without a window": (
        dict(rule="local", window=0),
        ["--rule", "local", "--window", 0],
        "window must be at least 1 for the local rule, found 0",
    ),
    "decay with a normalizer": (
        dict(feature_map="relu", normalize="sum"),
        ["--feature-map", "relu", "--normalize", "sum"],
        "the decay rule has no normalizer",
    ),
    "dpfp with an odd m": (
        dict(rule="add", feature_map="dpfp", m=7),
        ["--rule", "add", "--feature-map", "dpfp", "--m", 7],
        "dpfp makes an even number of features",
    ),
    "rfa with an odd m": (
        dict(rule="add", feature_map="rfa", m=7),
        ["--rule", "add", "--feature-map", "rfa", "--m", 7],
        "m must be even",
    ),
    "sums without a positive map": (
        dict(rule="add", normalize="sum"),
        ["--rule", "add", "--normalize", "sum"],
        "sum normalization divides by the sum of the features, which must be positive: use one of the maps relu",
    ),
    "log gates without gates": (
        dict(rule="add", gate_init="log"),
        ["--rule", "add", "--gate-init", "log"],
        "use one of the rules decay, gated, gated_delta",
    ),
    "unit length for a rule that does not overwrite": (
        dict(rule="gated", normalize="unit"),
        ["--rule", "gated", "--normalize", "unit"],
        "use one of the rules delta, gated_delta",
    ),
    "attention normalization of gated_delta": (
        dict(rule="gated_delta", normalize="attention"),
        ["--rule", "gated_delta", "--normalize", "attention"],
        "the gated_delta rule has no attention normalization",
    ),
    "a map for local attention": (
        dict(rule="local", feature_map="relu"),
        ["--rule", "local", "--feature-map", "relu"],
        "local attention is a softmax over its window",
    ),
    "sinks that fill the window": (
        dict(window=4, sinks=4),
        ["--window", 4, "--sinks", 4],
        "the first tokens that a window of the last ones sees, too",
    ),
    "a share of no window": (dict(mix="token"), ["--mix", "token"], "it needs both"),
    "projections shared with no window": (
        dict(rule="gated", projections="shared"),
        ["--rule", "gated", "--projections", "shared"],
        "needs a window and a state",
    ),
    "shared projections with uniform gates of decay": (
        dict(window=4, projections="shared"),
        ["--window", 4, "--projections", "shared"],
        "need values that start smaller than the window's",
    ),
    "a rank of no gates": (dict(rule="add", gate_rank=2), ["--rule", "add", "--gate-rank", 2], "is for gates"),
    "a negative gate rank": (dict(gate_rank=-1), ["--gate-rank", -1], "must be between 0 and"),
    "a layer twice": (dict(layers=(1, 1)), ["--layers", "1,1"], "each only once"),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", m=8)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output folder in a folder of its own, which must be empty again after a failure."""
    (tmp_path / "outputs").mkdir()
    return tmp_path / "outputs" / "out"


def assert_nothing_left(out: Path) -> None:
    assert list(out.parent.iterdir()) == []


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was loaded before the settings and the output folder were checked")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)


# settings


@pytest.mark.parametrize(("settings", "flags", "message"), UNDEFINED.values(), ids=UNDEFINED)
def test_undefined_settings_are_refused_by_name_before_loading(
    settings: dict, flags: list, message: str, base: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        FastWeightsConfig(**settings)
    forbid_loading(monkeypatch)
    found = error_of("convert", base, "-o", out, "--preset", "paper", *flags)
    assert message.replace("feature_map=", "--feature-map=") in found
    assert flags[-2] in found
    assert_nothing_left(out)


@pytest.mark.parametrize("typed", ["one", "3-1", "0;1"])
def test_malformed_layers_name_the_flag(typed: str, base: Path, out: Path) -> None:
    assert f"--layers must be numbers and ranges from low to high such as 0,2,5-7, found '{typed}'" == error_of(
        "convert", base, "-o", out, "--layers", typed
    )
    assert_nothing_left(out)


def test_missing_layers_are_named(base: Path, out: Path) -> None:
    message = "layers=[2, 5] do not exist: the model has 2 layers, numbered 0 to 1"
    with pytest.raises(ConfigError, match=re.escape(message)):
        convert(pretrained("gpt2"), FastWeightsConfig(layers=(0, 2, 5)))
    assert error_of("convert", base, "-o", out, "--layers", "0,2,5") == f"--{message}"
    assert_nothing_left(out)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(gate_rank=33), "gate_rank=33 is larger than the model's width, 32: choose a smaller one"),
        (
            dict(rule="gated", window=4, projections="shared", m=6),
            "projections='shared' needs m equal to the model's head dimension: found 6 and 8; use m=8",
        ),
    ],
)
def test_settings_that_do_not_fit_the_models_sizes_are_named(
    settings: dict[str, Any], message: str, base: Path, out: Path
) -> None:
    model = pretrained("gpt2")
    with pytest.raises(ConfigError, match=re.escape(message)):
        convert(model, FastWeightsConfig(**settings))
    assert type(model) is type(pretrained("gpt2")), "the model is left as it was"
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", value)]
    found = error_of("convert", base, "-o", out, *flags)
    assert found.startswith(f"--{message.split('=')[0].replace('_', '-')}=") and message[-2:] in found
    assert_nothing_left(out)


def test_word_for_a_number_names_the_flag(base: Path, out: Path) -> None:
    result = run("convert", base, "-o", out, "--m", "many")
    assert result.exit_code == 2
    assert "--m" in result.stderr


# models


def test_unknown_family_is_refused(tmp_path: Path, out: Path) -> None:
    model = BloomForCausalLM(BloomConfig(n_layer=1, hidden_size=32, n_head=4, vocab_size=61))
    model.save_pretrained(tmp_path / "bloom")
    with pytest.raises(UnknownFamilyError, match="cannot convert a BloomForCausalLM"):
        convert(model)
    found = error_of("convert", tmp_path / "bloom", "-o", out)
    assert "cannot convert a BloomForCausalLM: supported families are gpt2" in found
    assert "docs/add_a_family.md" in found
    assert "BloomForCausalLM" in error_of("info", tmp_path / "bloom")
    assert_nothing_left(out)


def test_converted_model_is_not_converted_again(model_folder: Path, out: Path) -> None:
    assert "already converted: start from the pretrained model" in error_of("convert", model_folder, "-o", out)
    assert_nothing_left(out)


def test_missing_folder_is_named(tmp_path: Path, out: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(CheckpointError, match="no folder at"):
        load(missing)
    assert error_of("convert", missing, "-o", out).startswith(f"no folder at {missing}: give a model's folder")
    assert f"no folder at {missing}" in error_of("generate", missing, "--prompt", "x")
    assert f"no folder at {missing}" in error_of("info", missing)
    assert_nothing_left(out)


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["info"], ["convert", "-o", "out"]])
def test_name_that_is_neither_a_folder_nor_on_the_hub_is_refused_after_one_request(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks for each file of a model, each several times."""
    requests = []

    def not_found(*args: Any, **kwargs: Any) -> None:
        requests.append(args)
        raise RepositoryNotFoundError("404", response=MagicMock())

    def unreachable(*args: Any, **kwargs: Any) -> None:
        requests.append(args)
        raise ConnectionError("no network")

    monkeypatch.chdir(tmp_path)
    for answer, reason in ((not_found, "the hub has no such model"), (unreachable, "cannot be reached: no network")):
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", answer)
        found = error_of(command[0], "modle", *command[1:])
        assert found.startswith("modle: there is no such folder here, and ") and reason in found
    assert len(requests) == 2
    with pytest.raises(CheckpointError, match="no network"):
        load("modle")
    assert error_of(command[0], "no model", *command[1:]).startswith("no folder at no model")


def test_missing_gguf_file_is_named(tmp_path: Path, out: Path) -> None:
    assert f"no GGUF file at {tmp_path}/x.gguf" == error_of("convert", tmp_path / "x.gguf", "-o", out)
    assert_nothing_left(out)


def test_file_instead_of_folder_is_refused(base: Path, out: Path) -> None:
    assert "is a file: give the folder it lies in" in error_of("convert", base / "model.safetensors", "-o", out)
    assert_nothing_left(out)


def test_empty_folder_is_refused(tmp_path: Path, out: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(empty)
    for command in (["convert", empty, "-o", out], ["generate", empty, "--prompt", "x"], ["info", empty]):
        assert re.search(rf"{empty} is not a checkpoint: .*no config\.json", error_of(*command))
    assert_nothing_left(out)


def test_folder_without_weights_is_refused(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "config"
    pretrained("gpt2").config.save_pretrained(folder)
    message = f"{folder} is not a checkpoint: it has a config.json but no model.safetensors"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(folder)
    assert error_of("convert", folder, "-o", out) == message
    assert error_of("generate", folder, "--prompt", "x") == message
    assert_nothing_left(out)


@pytest.mark.parametrize("settings", [{"rule": "lstm"}, {"rule": "decay", "widht": 3}, {"rule": "decay", "m": 0}])
def test_damaged_settings_name_the_config_file(model_folder: Path, settings: dict[str, Any]) -> None:
    config = model_folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"fastweights": settings}))
    for command in (["generate", model_folder, "--prompt", "x"], ["info", model_folder]):
        found = error_of(*command)
        assert "config.json" in found
        assert str(model_folder) in found


# weights


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_truncated_base_weights_are_named(base: Path, out: Path) -> None:
    truncate(base)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(base)
    found = error_of("convert", base, "-o", out)
    assert f"{base}: model.safetensors cannot be read" in found
    assert "copy or save it again" in found
    assert_nothing_left(out)


def test_truncated_converted_weights_are_named(model_folder: Path) -> None:
    truncate(model_folder)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(model_folder)
    found = error_of("generate", model_folder, "--prompt", "x")
    assert f"{model_folder}: model.safetensors cannot be read" in found


GATE = "transformer.h.0.attn.rule.gates.f.weight"
BAD_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(GATE), f"missing tensors: {GATE}"),
    "extra": (lambda tensors: tensors.update(extra=torch.zeros(2)), "tensors the model does not have: extra"),
}


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_missing_and_unexpected_tensors_are_named(model_folder: Path, change: Callable, message: str) -> None:
    edit(model_folder, change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(model_folder)
    found = error_of("generate", model_folder, "--prompt", "x")
    assert message in found
    assert str(model_folder) in found


def test_tensor_of_wrong_shape_names_the_folder(model_folder: Path) -> None:
    edit(model_folder, lambda tensors: tensors.update({GATE: torch.zeros(3, 3)}))
    with pytest.raises(CheckpointError, match=re.escape(str(model_folder))):
        load(model_folder)
    assert str(model_folder) in error_of("generate", model_folder, "--prompt", "x")


def test_program_prints_one_line_without_transformers_warnings(model_folder: Path) -> None:
    """Nothing of what transformers says about the same checkpoint."""
    edit(model_folder, BAD_TENSORS["missing"][0])
    program = Path(sys.executable).with_name("fastweights")
    done = subprocess.run([program, "generate", model_folder, "--prompt", "x"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*missing tensors.*\n", done.stderr)


# generating


def test_prompt_longer_than_the_position_table_is_refused(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="clamp"):
        load(model_folder)(tokens(1, 97))
    found = error_of("generate", model_folder, "--prompt", "x" * 97)
    assert "gpt2 has learned positions for 96 tokens" in found
    assert "--positions clamp" in found


def test_more_tokens_than_an_unconverted_model_has_positions_for_are_refused(base: Path) -> None:
    command = ("generate", base, "--prompt", "x", "--max-new-tokens")
    succeed(*command, 95)
    expected = "--max-new-tokens 96 after 2 tokens makes a sequence of 97: gpt2 has learned positions for 96 tokens"
    assert error_of(*command, 96).startswith(expected)


def test_clamped_positions_have_no_limit(tmp_path: Path) -> None:
    folder = save_model(tmp_path, m=8, positions="clamp")
    assert "9 tokens" in succeed("generate", folder, "--prompt", "x" * 97, "--max-new-tokens", 9).stderr


@pytest.mark.parametrize("settings", [{}, {"m": 8}], ids=["ordinary", "converted"])
def test_missing_tokenizer_is_named(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = save_model(tmp_path, with_tokenizer=False, **settings)
    assert f"{folder} has no tokenizer" in error_of("generate", folder, "--prompt", "x")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "x", "--temperature", 0], "--temperature must be above 0, found 0.0"),
        (["--prompt", "x", "--repetition-penalty", 0], "--repetition-penalty must be above 0, found 0.0"),
        (["--prompt", "x", "--device", "abacus"], "--device abacus cannot be used here"),
        (["--prompt", "x", "--save-state", "no/such/folder/s"], "--save-state no/such/folder/s cannot be written"),
    ],
)
def test_bad_generation_options_name_the_flag(model_folder: Path, flags: list[Any], message: str) -> None:
    assert message in error_of("generate", model_folder, *flags)


# states


@pytest.fixture
def state(model_folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "state"
    succeed("generate", model_folder, "--prompt", "Hello", "--max-new-tokens", 2, "--save-state", path)
    return path


def load_state_error(folder: Path, state: Path) -> str:
    """The same message from Python and from the command line."""
    with pytest.raises(StateError) as raised:
        FastWeightsCache.load(state, load(folder))
    found = error_of("generate", folder, "--prompt", "x", "--load-state", state)
    assert found == f"--load-state: {raised.value}"
    return found


def test_state_of_another_model_is_refused(state: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", m=8, seed=1)
    assert f"the state in {state} belongs to another model" in load_state_error(other, state)


def test_unreadable_state_is_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"garbage" * 99)
    assert f"{tmp_path}/state is not a readable state file" in load_state_error(model_folder, tmp_path / "state")


def test_empty_prompt_is_refused(model_folder: Path, state: Path) -> None:
    assert "--prompt is empty" in error_of("generate", model_folder, "--prompt", "", "--load-state", state)


def test_truncated_state_is_refused(model_folder: Path, state: Path) -> None:
    state.write_bytes(state.read_bytes()[:-100])
    assert f"{state} is not a readable state file" in load_state_error(model_folder, state)


def test_weights_are_refused_as_a_state(model_folder: Path) -> None:
    weights = model_folder / "model.safetensors"
    assert f"{weights} is a safetensors file, but not a state" in load_state_error(model_folder, weights)


def test_missing_state_is_named(model_folder: Path, tmp_path: Path) -> None:
    assert f"no state file at {tmp_path}/none" in load_state_error(model_folder, tmp_path / "none")


@pytest.mark.parametrize("flag", ["--load-state", "--save-state"])
def test_state_flags_need_a_converted_model(base: Path, tmp_path: Path, flag: str) -> None:
    if flag == "--load-state":
        (tmp_path / "state").touch()
    before = list(tmp_path.iterdir())
    found = error_of("generate", base, "--prompt", "x", flag, tmp_path / "state")
    assert found == f"{flag} needs a converted model, and {base} is an ordinary one: run fastweights convert"
    assert list(tmp_path.iterdir()) == before


# output folders


def test_output_folder_below_a_file_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    forbid_loading(monkeypatch)
    for target in (file / "x", file / "x" / "y"):
        found = error_of("convert", base, "-o", target)
        assert found == f"cannot write to {target}: Not a directory; choose another output folder"
        with pytest.raises(CheckpointError, match="cannot write to"):
            save(pretrained("gpt2"), target)
    assert file.read_text() == "old"


def test_output_folder_that_is_a_file_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    forbid_loading(monkeypatch)
    found = error_of("convert", base, "-o", tmp_path / "file", "--overwrite")
    assert found == f"{tmp_path}/file exists and is not a folder: choose another output folder"


def test_output_folder_that_is_not_empty_is_refused(base: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.mkdir()
    (out / "precious").write_text("old")
    message = f"{out} exists and is not empty: choose another output folder, or pass "
    with pytest.raises(CheckpointError, match=re.escape(f"{message}overwrite")):
        save(pretrained("gpt2"), out)
    forbid_loading(monkeypatch)
    assert error_of("convert", base, "-o", out) == f"{message}--overwrite"
    assert [p.name for p in out.iterdir()] == ["precious"]


def full_disk(self: Any, folder: Any, **kwargs: Any) -> None:
    (Path(folder) / "half").write_text("half a model")
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("saved", [PreTrainedModel, PreTrainedTokenizerFast])
def test_full_disk_is_reported_and_leaves_nothing(
    base: Path, out: Path, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "save_pretrained", full_disk)
    for target in (out, out / "deeper" / "still"):
        found = error_of("convert", base, "-o", target, "--m", 8)
        assert f"cannot write to {target}" in found
        assert "No space left on device" in found
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(pretrained("gpt2"), target, tokenizer())
        assert_nothing_left(out)


def test_full_disk_leaves_the_old_model_unchanged(base: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(out, rule="add", m=8)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full_disk)
    assert "No space left" in error_of("convert", base, "-o", out, "--m", 8, "--overwrite")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_interrupted_save_leaves_nothing(out: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_model_folder(out / "deeper") as folder:
        (folder / "half").touch()
        raise KeyboardInterrupt
    assert_nothing_left(out)


def test_settings_that_would_be_ignored_are_refused() -> None:
    for settings, reason in (
        (dict(rule=None), "rule=None is not known"),
        (dict(state_heads=None), "state_heads=None is not known"),
        (dict(rule="local", output_norm=True), "takes no output_norm"),
        (dict(rule="local", projection_init="random"), "has no projection_init"),
        (dict(rule="local", rotary="drop"), "keeps rotary"),
        (dict(layers=5), "layers must be whole numbers"),
    ):
        with pytest.raises(ConfigError, match=reason):
            FastWeightsConfig(**settings)


def test_convert_refuses_a_name_instead_of_a_model() -> None:
    with pytest.raises(ConfigError, match=r"fw.load\('gpt2'\)"):
        convert("gpt2")
