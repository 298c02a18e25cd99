"""Nothing that is loaded runs code: not the Python files of a folder, not pickles, not kernels of the hub, not YAML.

Every hostile file would create a marker, and reading standard input fails the test.
"""

from __future__ import annotations

import ast
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import run, save_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fastweights.config import ConfigError
from fastweights.experiments.grid import load_grid
from fastweights.loading import load, load_tokenizer
from fastweights.modeling.description import describe_source
from fastweights.training.recipe import RecipeError, load_recipe, parse_changes
from fastweights.training.teacher import TeacherError, load_teacher
from fastweights.utils.errors import CheckpointError, FastWeightsError

OWN_CODE = "evil"


class _Stdin:
    """Standard input that must not be read; a prompt would read "yes" from it."""

    def __init__(self) -> None:
        self.reads = 0

    def readline(self, *_: Any) -> str:
        self.reads += 1
        return "yes\n"

    read = readline

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file that hostile code would create. After each test it must not exist, and nobody may have read stdin."""
    path, stdin = tmp_path / "code_was_run", _Stdin()
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr("builtins.input", lambda *_: stdin.readline().strip())
    yield path
    assert not path.exists() and stdin.reads == 0
    assert not [name for name in sys.modules if OWN_CODE in name and "transformers_modules" in name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", m=4)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | changes))


def write_code(folder: Path, marker: Path) -> None:
    """Code that creates the marker as soon as it is imported, and defines every class that could be asked for."""
    code = f"""open({str(marker)!r}, "w").close()
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
class EvilConfig(GPT2Config): model_type = "evil"
class EvilModel(GPT2LMHeadModel): config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast): pass
def generate(model, *args, **kwargs): return model
"""
    (folder / f"{OWN_CODE}.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)


def with_model_code(folder: Path, marker: Path) -> str:
    write_code(folder, marker)
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    edit(folder / "config.json", model_type="evil", auto_map=auto_map)
    return "evil.EvilConfig"


READERS: dict[str, Callable[[Path], Any]] = {
    "load": load,
    "load_tokenizer": load_tokenizer,
    "describe_source": describe_source,
}


@pytest.mark.parametrize("reader", ["load", "describe_source"])
def test_model_code_is_refused_with_folder_and_its_name(folder: Path, marker: Path, reader: str) -> None:
    asked = with_model_code(folder, marker)
    with pytest.raises(CheckpointError) as raised:
        READERS[reader](folder)
    assert str(folder) in str(raised.value) and asked in str(raised.value)


@pytest.mark.parametrize("command", ["info", "generate", "convert", "eval", "train"])
def test_commands_run_no_model_code(folder: Path, marker: Path, tmp_path: Path, command: str) -> None:
    """Not even if the first line of a piped prompt is `yes`."""
    with_model_code(folder, marker)
    text = tmp_path / "text.txt"
    text.write_text("Some words.\n" * 200)
    arguments = {
        "info": [folder],
        "generate": [folder, "--prompt", "-"],
        "convert": [folder, "-o", tmp_path / "out"],
        "eval": [folder, "--data", text],
        "train": [folder, "--data", text, "-o", tmp_path / "run"],
    }[command]
    result = run(command, *arguments, stdin="yes\nyes\n")
    assert result.exit_code == 2, (result.output, result.exception)
    assert str(folder) in result.stderr and result.stderr.count("\n") == 1 and result.stdout == ""
    assert not marker.exists()


def test_model_class_of_transformers_is_used_where_code_is_offered_too(folder: Path, marker: Path) -> None:
    """Many repositories have code that is part of transformers by now."""
    write_code(folder, marker)
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.EvilModel"})
    assert type(load(folder)).__name__ == "FastWeightsGPT2LMHeadModel"


def test_code_in_the_place_of_our_own_is_not_run(folder: Path, marker: Path, tmp_path: Path) -> None:
    """Saved folders have a module for readers without this package. Whoever has imported it runs none of it."""
    code = folder / "configuration_fastweights.py"
    assert code.is_file() and "auto_map" in json.loads((folder / "config.json").read_text())
    code.write_text(f"open({str(marker)!r}, 'w').close()\n" + code.read_text())
    load(folder)
    load_tokenizer(folder)
    describe_source(folder)
    for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        AutoModelForCausalLM.from_pretrained(folder, **options)
    assert run("generate", folder, "--prompt", "Hello", "--max-new-tokens", 2).exit_code == 0


@pytest.mark.parametrize("tokenizer_class", ["EvilTokenizer", "PreTrainedTokenizerFast", None])
def test_tokenizer_code_does_not_run(folder: Path, marker: Path, tokenizer_class: str | None) -> None:
    write_code(folder, marker)
    changes = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.EvilTokenizer"]}, **changes)
    try:
        assert type(load_tokenizer(folder)).__module__.startswith("transformers.")
    except CheckpointError as error:
        assert str(folder) in str(error) and "evil.EvilTokenizer" in str(error)


def test_code_of_another_repository_does_not_run(folder: Path, marker: Path) -> None:
    edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "someone/repository--evil.EvilConfig"})
    with pytest.raises(CheckpointError, match="someone/repository"):
        load(folder)


def test_custom_generate_does_not_run(folder: Path, marker: Path, tmp_path: Path) -> None:
    write_code(folder, marker)
    base = save_model(tmp_path / "base")
    write_code(base, marker)
    for each in (folder, base):
        edit(each / "generation_config.json", custom_generate=str(each))
        result = run("generate", each, "--prompt", "Hello", "--max-new-tokens", 2)
        assert result.exit_code in (0, 2) and not isinstance(result.exception, NameError)
        assert not marker.exists()


def test_generation_modes_that_need_code_of_the_hub_are_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    edit(base / "generation_config.json", penalty_alpha=0.5, top_k=4)
    result = run("generate", base, "--prompt", "Hello", "--max-new-tokens", 2)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "generation_config" in result.stderr


class _Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize("whole_file", [True, False], ids=["plain pickle", "torch.save"])
def test_pickled_weights_do_not_run_code(folder: Path, marker: Path, whole_file: bool) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights = folder / "pytorch_model.bin"
    if whole_file:
        weights.write_bytes(pickle.dumps(_Hostile(marker)))
    else:
        torch.save({**tensors, "extra": _Hostile(marker)}, weights)
    with pytest.raises(CheckpointError, match=str(folder)):
        load(folder)


def test_pickled_tensors_are_still_loaded(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    load(folder)


@pytest.mark.parametrize("argument", [{"trust_remote_code": True}, {"weights_only": False}])
def test_arguments_that_allow_code_are_refused(folder: Path, argument: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(argument))):
        load(folder, **argument)


@pytest.mark.parametrize(
    "changes",
    [
        {"_attn_implementation": "someone/kernel"},
        {"attn_implementation": "kernels-community/flash-attn2:flash_attn"},
        {"attn_implementation": "flash_attention_2"},
        {"_attn_implementation_internal": "someone/kernel@v1"},
        {"attn_implementation": {"": "someone/kernel"}},
        {"experts_implementation": "someone/kernel"},
        {"text_config": {"_attn_implementation": "someone/kernel"}},
        {"quantization_config": {"quant_method": "mxfp4"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("reader", ["load", "describe_source"])
def test_config_that_names_kernels_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reader: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a kernel was fetched")

    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", fail)
    edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=r"config\.json asks for .*never run") as raised:
        READERS[reader](folder)
    assert str(folder) in str(raised.value)


def test_attention_of_transformers_may_be_named(folder: Path) -> None:
    edit(folder / "config.json", attn_implementation="eager")
    load(folder)


def test_harmless_folder_that_points_at_hostile_base_runs_no_code(folder: Path, marker: Path, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    asked = with_model_code(base, marker)
    edit(folder / "config.json", fastweights_base=str(base))
    with pytest.raises(TeacherError) as raised:
        load_teacher(load(folder), str(folder), dtype=torch.float32)
    assert str(base) in str(raised.value) and asked in str(raised.value)
    result = run("profile", folder, "--lengths", "4", stdin="yes\n")
    assert result.exit_code == 0 and "measured without it" in result.stderr and not marker.exists()


@pytest.fixture
def hub_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of hosts that were looked up. None is reached."""
    asked: list[str] = []

    def look_up(host: str, *_: Any, **__: Any) -> None:
        asked.append(host)
        raise OSError("no network in tests")

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    return asked


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("base", ["someone/evil2", "base"])
def test_adapter_in_a_folder_loads_no_other_model(
    folder: Path, tmp_path: Path, hub_requests: list[str], reader: str, base: str
) -> None:
    adapter = folder / "adapter_config.json"
    edit(adapter, peft_type="LORA", base_model_name_or_path=base)
    with pytest.raises(CheckpointError, match=rf"{adapter} .*merge"):
        READERS[reader](folder)
    (folder / "config.json").unlink()  # without a whole model besides
    with pytest.raises(CheckpointError, match=rf"{adapter} .*merge"):
        READERS[reader](folder)
    assert hub_requests == []


def test_adapter_beside_a_gguf_file_loads_no_other_model(tmp_path: Path, hub_requests: list[str]) -> None:
    from helpers.tiny_gguf import write_tiny_llama

    file = tmp_path / "model.gguf"
    write_tiny_llama(file)
    load(file)
    edit(tmp_path / "adapter_config.json", peft_type="LORA", base_model_name_or_path="someone/evil2")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        load(file)
    assert hub_requests == []


def test_adapter_of_the_hub_whose_base_names_kernels_is_refused(tmp_path: Path) -> None:
    base, commit = save_model(tmp_path / "base"), "0" * 40
    edit(base / "config.json", attn_implementation="someone/kernel")
    repository = tmp_path / "cache" / "models--someone--adapter"
    for folder in ("refs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    edit(repository / "snapshots" / commit / "adapter_config.json", base_model_name_or_path=str(base))
    with pytest.raises(CheckpointError, match="someone/kernel"):
        load("someone/adapter", cache_dir=tmp_path / "cache", local_files_only=True)


def test_base_that_a_folder_names_is_printed_before_the_hub_is_asked(
    folder: Path, tmp_path: Path, hub_requests: list[str]
) -> None:
    edit(folder / "config.json", fastweights_base="someone/base")
    text = tmp_path / "text.txt"
    text.write_text("Some words.\n" * 200)
    short = ("--recipe", "distill", "--set", "length=32", "--set", "batch_tokens=64")
    for command in (
        ("train", folder, "--data", text, *short, "-o", tmp_path / "run", "--device", "cpu"),
        ("rank", folder, "--data", text),
        ("profile", folder, "--lengths", "4"),
    ):
        assert f"{folder} was converted from someone/base" in run(*command).stderr.splitlines()[0]
        assert hub_requests
        hub_requests.clear()


@pytest.mark.parametrize("tag", ["!!python/object/apply:builtins.open", "!!python/object/new:builtins.open"])
def test_yaml_tags_construct_no_objects(tmp_path: Path, marker: Path, tag: str) -> None:
    value = f"{tag} [{marker}, w]"
    (tmp_path / "recipe.yaml").write_text(f"seed: {value}\n")
    (tmp_path / "grid.yaml").write_text(f"recipe: paper\nruns:\n  a: {value}\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml is not YAML"):
        load_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(FastWeightsError, match=r"grid\.yaml is not YAML"):
        load_grid(tmp_path / "grid.yaml")
    with pytest.raises(RecipeError, match="no value"):
        parse_changes([f"seed={value}"])


def test_every_loader_of_transformers_is_called_without_trust() -> None:
    """Every call of from_pretrained and from_config in the package forbids code, but those of `super()`, which only
    pass on what their caller gave."""
    found = 0
    for file in (Path(__file__).parents[2] / "fastweights").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            method = call.func
            if not isinstance(method, ast.Attribute) or method.attr not in ("from_pretrained", "from_config"):
                continue
            if ast.unparse(method.value) == "super()":
                continue
            found += 1
            assert any(_forbids_code(argument) for argument in call.keywords), (file.name, call.lineno)
    assert found >= 4


def _forbids_code(argument: ast.keyword) -> bool:
    """Whether an argument is trust_remote_code=False, or ** of a dictionary whose last part is WITHOUT_CODE."""
    if argument.arg is None:
        return ast.unparse(argument.value).split("|")[-1].strip() == "WITHOUT_CODE"
    return argument.arg == "trust_remote_code" and ast.unparse(argument.value) == "False"
