"""Every command, as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import error_of, run, save_model, succeed, tokenizer
from helpers.tiny import pretrained

import fastweights
from fastweights.cli.options import parse_layers
from fastweights.config import LAYER_LISTS, ConfigError, FastWeightsConfig
from fastweights.loading import load, load_tokenizer
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.generation import FastWeightsGenerationMixin
from fastweights.presets import preset_config
from fastweights.tokenization import set_special_tokens
from fastweights.training.recipe import RECIPE_FOLDER, load_recipe


def settings_of(folder: Path) -> FastWeightsConfig:
    return FastWeightsConfig.from_dict(json.loads((folder / "config.json").read_text())["fastweights"])


HYBRID = dict(m=8, layers=(1,), window=3)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", dict(m=8)),
    "llama": ("llama", dict(rule="delta", m=8, window=4)),
    "hybrid": ("llama", HYBRID),
    "sliding hybrid": ("mistral", HYBRID),
}


def words(text: str) -> str:
    """Text without the line breaks, and the hyphenation at them, that a narrow terminal brings."""
    return re.sub(r"\s+", "", text)


def test_installed_program_runs() -> None:
    program = Path(sys.executable).with_name("fastweights")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fastweights.__version__


def test_version_is_printed() -> None:
    assert succeed("--version").stdout.strip() == fastweights.__version__


def test_help_lists_the_commands() -> None:
    text = succeed("--help").stdout
    assert all(command in text for command in ("convert", "generate", "info"))


def test_help_lists_shipped_grids_and_recipes() -> None:
    grids = ", ".join(sorted(file.stem for file in (RECIPE_FOLDER / "grids").glob("*.yaml")))
    assert words(f"({grids})") in words(succeed("compare", "--help").stdout)
    recipes = [load_recipe(name) and name for name in ("distill", "finetune", "finish", "paper")]
    assert words(f"({', '.join(recipes)})") in words(succeed("train", "--help").stdout)


@pytest.mark.parametrize("name", [f.name for f in fields(FastWeightsConfig)])
def test_every_setting_is_an_option_with_its_description(name: str) -> None:
    text = words(succeed("convert", "--help").stdout)
    assert f"--{name.replace('_', '-')}" in text
    assert words(FastWeightsConfig.help(name)) in text


@pytest.mark.parametrize(
    ("text", "layers"), [("0", (0,)), ("0,2,5-7", (0, 2, 5, 6, 7)), (" 1 , 3-3", (1, 3)), ("4-5,0", (4, 5, 0))]
)
def test_layers_are_parsed_as_numbers_and_ranges(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "-1", "1-", "0;1", "0,2-1"])
def test_malformed_layers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 0,2,5-7"):
        parse_layers(text)


def test_convert_saves_model_and_tokenizer_and_prints_info(tmp_path: Path) -> None:
    source, target = save_model(tmp_path / "base"), tmp_path / "some" / "where"
    printed = succeed("convert", source, "-o", target).stdout
    assert isinstance(load(target), FastWeightsMixin)
    assert replace(settings_of(target), wide_layers=None) == preset_config("recommended", head_dim=8, width=32)
    assert load_tokenizer(target).get_vocab() == tokenizer().get_vocab()
    assert printed == succeed("info", target).stdout


def test_layers_with_a_wide_window_are_named_as_a_list(tmp_path: Path) -> None:
    source, target = save_model(tmp_path / "base"), tmp_path / "out"
    succeed("convert", source, "-o", target, "--wide-window", 300, "--wide-layers", "0-1")
    assert (settings_of(target).wide_window, settings_of(target).wide_layers) == (300, (0, 1))
    for value, message in (
        ("0,7", "--wide-layers=[7] do not exist"),
        ("x", "--wide-layers must be numbers and ranges"),
    ):
        error = error_of("convert", source, "-o", tmp_path / "other", "--wide-layers", value)
        assert error.startswith(message)
    error = error_of("convert", source, "-o", tmp_path / "other", "--window", 300, "--wide-window", 200)
    assert error.startswith("--wide-window must be larger than --window")


def test_convert_command_matches_the_function(tmp_path: Path) -> None:
    succeed("convert", save_model(tmp_path / "base"), "-o", tmp_path / "out", "--preset", "paper", "--seed", 3)
    expected = fastweights.convert(pretrained("gpt2"), FastWeightsConfig(seed=3)).state_dict()
    found = load(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Shared projections exclude some other settings, and log gates the ablations.
SHARED = dict(projections="shared", m=8, feature_map="none", projection_init="attention", rotary="keep")
SHARED |= dict(gate_init="log", ablation=None)


@pytest.mark.parametrize("changes", [{}, SHARED], ids=["own", "shared"])
def test_every_option_is_passed_to_the_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(
        rule="gated",
        m=6,
        feature_map="elu",
        normalize="attention",
        gate_init="uniform",
        ablation="one_gate",
        projection_init="random",
        window=5,
        sinks=2,
        wide_window=30,
        wide_layers=(1,),
        mix="token",
        projections="own",
        gate_rank=3,
        output_norm=True,
        rotary="drop",
        state_heads="kv",
        layers=(1,),
        train_length=77,
        positions="clamp",
        seed=9,
    )
    assert settings.keys() == {f.name for f in fields(FastWeightsConfig)}
    settings |= changes
    flags: list[Any] = []
    for name, value in settings.items():
        if value is None:
            continue
        typed = ["1"] if name in LAYER_LISTS else [] if value is True else [value]
        flags += [f"--{name.replace('_', '-')}", *typed]
    succeed("convert", save_model(tmp_path / "base", "llama"), "-o", tmp_path / "out", *flags)
    assert settings_of(tmp_path / "out") == FastWeightsConfig(**settings)


def test_convert_saves_the_given_dtype(tmp_path: Path) -> None:
    succeed("convert", save_model(tmp_path / "base"), "-o", tmp_path / "out", "--m", 8, "--dtype", "bfloat16")
    assert load(tmp_path / "out").dtype == torch.bfloat16


def test_convert_works_without_a_tokenizer(tmp_path: Path) -> None:
    succeed("convert", save_model(tmp_path / "base", with_tokenizer=False), "-o", tmp_path / "out", "--m", 8)
    assert load_tokenizer(tmp_path / "out") is None


def test_overwrite_replaces_the_folder(tmp_path: Path) -> None:
    source, target = save_model(tmp_path / "base"), save_model(tmp_path / "out", rule="add", m=8)
    (target / "old").touch()
    succeed("convert", source, "-o", target, "--overwrite")
    assert replace(settings_of(target), wide_layers=None) == preset_config("recommended", head_dim=8, width=32)
    assert not (target / "old").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out"]


def state_bytes(folder: Path) -> int:
    with torch.no_grad():
        return load(folder)(torch.tensor([[5]]), use_cache=True).past_key_values.nbytes


def test_info_describes_a_converted_model(tmp_path: Path) -> None:
    text = succeed("info", save_model(tmp_path, m=8, window=3)).stdout
    for part in ("gpt2", "decay", "window", "2 of 2", "float32", "against the base model", "1,024", "8,192", "65,536"):
        assert part in text
    assert f"{state_bytes(tmp_path):,} bytes" in text


def test_info_describes_an_unconverted_model(tmp_path: Path) -> None:
    assert "not converted" in succeed("info", save_model(tmp_path)).stdout


def ids_of(text: str, begins: bool = True) -> torch.Tensor:
    return tokenizer()(text, return_tensors="pt", add_special_tokens=begins).input_ids


def continuation(model: Any, ids: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    """The mask is given because transformers takes a token that looks like padding for padding."""
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)[:, ids.shape[1] :]


def printed(ids: torch.Tensor) -> str:
    return tokenizer().decode(ids[0], skip_special_tokens=True)


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def folder(request: Any, tmp_path: Path) -> Path:
    family, settings = request.param
    return save_model(tmp_path / "model", family, **settings)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generate_prints_what_the_model_generates(folder: Path, num_beams: int) -> None:
    result = succeed("generate", folder, "--prompt", "Hello", "--max-new-tokens", 12, "--num-beams", num_beams)
    expected = continuation(load(folder), ids_of("Hello"), 12, num_beams=num_beams)
    assert result.stdout.removesuffix("\n") == printed(expected)
    assert re.fullmatch(r"12 tokens, [\d.]+ tokens/s, state [\d,]+ bytes.*\n", result.stderr)


def test_prompt_of_a_tokenizer_that_adds_eos_ends_without_it(tmp_path: Path) -> None:
    outputs = []
    for adds_eos in (False, True):
        folder = save_model(tmp_path / str(adds_eos), m=4)
        made = tokenizer()
        made.eos_token = "?"
        set_special_tokens(made, bos=True, eos=adds_eos)
        made.save_pretrained(folder)
        outputs.append(succeed("generate", folder, "--prompt", "Hello", "--max-new-tokens", 20).stdout)
    assert outputs[0] == outputs[1]


def test_generate_reports_the_described_state_size(tmp_path: Path) -> None:
    folder = save_model(tmp_path, m=8, window=3)
    state = f"state {state_bytes(folder):,} bytes\n"
    for count in (2, 30):
        result = succeed("generate", folder, "--prompt", "Hi", "--max-new-tokens", count)
        assert result.stderr.endswith(state)


@pytest.mark.parametrize("first_beams", [1, 3])
@pytest.mark.parametrize("second_beams", [1, 3])
def test_saved_state_continues_the_sequence(folder: Path, tmp_path: Path, first_beams: int, second_beams: int) -> None:
    model, saved = load(folder), tmp_path / "state"
    first = ("generate", folder, "--prompt", "Hello", "--max-new-tokens", 10, "--save-state", saved)
    succeed(*first, "--num-beams", first_beams)
    ids = ids_of("Hello")
    text = torch.cat([ids, continuation(model, ids, 10, num_beams=first_beams)], dim=1)
    assert_same_state(FastWeightsCache.load(saved, model), model, text)

    second = ("generate", folder, "--prompt", " more", "--max-new-tokens", 10, "--load-state", saved)
    result = succeed(*second, "--num-beams", second_beams, "--save-state", tmp_path / "later")
    text = torch.cat([text, ids_of(" more", begins=False)], dim=1)
    expected = continuation(model, text, 10, num_beams=second_beams)
    assert result.stdout.removesuffix("\n") == printed(expected)
    text = torch.cat([text, expected], dim=1)
    assert_same_state(FastWeightsCache.load(tmp_path / "later", model), model, text)


def assert_same_state(found: FastWeightsCache, model: Any, text: torch.Tensor) -> None:
    """The state that reading the whole text at once leaves, and the logits after one more token."""
    whole, more = FastWeightsCache(model.config), torch.tensor([[7]])
    with torch.no_grad():
        model(text, past_key_values=whole)
        assert found.seen == whole.seen == text.shape[1]
        logits = [model(more, past_key_values=cache.fork()).logits for cache in (found, whole)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_two_calls_with_a_state_match_one_call(folder: Path, tmp_path: Path) -> None:
    """The second call's prompt is the eleventh token, as if a user had typed it."""
    whole = continuation(load(folder), ids_of("Hello"), 21)
    succeed("generate", folder, "--prompt", "Hello", "--max-new-tokens", 10, "--save-state", tmp_path / "state")
    typed = tokenizer().decode(whole[0, 10])
    second = ("generate", folder, "--prompt", typed, "--max-new-tokens", 10, "--load-state", tmp_path / "state")
    assert succeed(*second).stdout.removesuffix("\n") == printed(whole[:, 11:])


def test_prompt_is_read_from_standard_input(tmp_path: Path) -> None:
    command = ("generate", save_model(tmp_path, m=8), "--max-new-tokens", 5, "--prompt")
    assert succeed(*command, "-", stdin="Hello\n").stdout == succeed(*command, "Hello").stdout


@pytest.mark.parametrize("options", [("--temperature", 2), ("--top-k", 5), ("--top-p", 0.9), ()])
def test_sampling_is_reproducible_by_seed(tmp_path: Path, options: tuple[Any, ...]) -> None:
    command = ("generate", save_model(tmp_path, m=8), "--prompt", "Hello", "--max-new-tokens", 30, *options, "--seed")
    first, again, other = (succeed(*command, seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_top_k_of_one_is_greedy(tmp_path: Path) -> None:
    command = ("generate", save_model(tmp_path, m=8), "--prompt", "Hello", "--max-new-tokens", 20)
    assert succeed(*command, "--top-k", 1).stdout == succeed(*command).stdout


def test_sampling_uses_all_tokens_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' default of the 50 likeliest would cut the tail of the distribution. It is transformers that
    generates where there are beams."""
    given: dict[str, Any] = {}
    real = FastWeightsGenerationMixin.generate

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        given.update(kwargs)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(FastWeightsGenerationMixin, "generate", spy)
    folder = save_model(tmp_path, m=8)
    succeed("generate", folder, "--prompt", "Hi", "--max-new-tokens", 2, "--temperature", 0.5, "--num-beams", 2)
    assert (given["do_sample"], given["temperature"], given["top_k"], given["top_p"]) == (True, 0.5, 0, 1.0)


@pytest.mark.parametrize("settings", [dict(m=8), dict(m=8, layers=(0,))], ids=["engine", "hybrid"])
def test_repetition_penalty_matches_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = save_model(tmp_path, **settings)
    result = succeed("generate", folder, "--prompt", "Hello", "--max-new-tokens", 12, "--repetition-penalty", 1.5)
    expected = continuation(load(folder), ids_of("Hello"), 12, repetition_penalty=1.5)
    assert result.stdout.removesuffix("\n") == printed(expected)


def test_generate_takes_dtype_and_device(tmp_path: Path) -> None:
    folder = save_model(tmp_path, m=8)
    command = ("generate", folder, "--prompt", "Hello", "--max-new-tokens", 3, "--device", "cpu")
    assert "3 tokens" in succeed(*command, "--dtype", "bfloat16").stderr


def test_unconverted_model_generates(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    result = succeed("generate", folder, "--prompt", "Hello", "--max-new-tokens", 8)
    assert result.stdout.removesuffix("\n") == printed(continuation(load(folder), ids_of("Hello"), 8))
    assert "not converted" in result.stderr


def test_no_arguments_show_help() -> None:
    assert "Usage" in run().output
