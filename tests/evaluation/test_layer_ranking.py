"""Layers made attention again: the same as a hybrid that was converted so, ranked, chosen, saved."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from helpers.batches import batch_of, packed
from helpers.cli import save_model, tokenizer
from helpers.tiny import CONFIGS, config_of, pretrained, tokens
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from typer.testing import CliRunner, Result

import fastweights as fw
from fastweights.cli.rank import rank
from fastweights.conversion import convert
from fastweights.evaluation import layer_ranking as ranking
from fastweights.evaluation.layer_ranking import RankingError, batches_of, hybrid_from, rank_layers, restored
from fastweights.loading import save
from fastweights.modeling.families import family_of
from fastweights.modeling.layer import converted_layers
from fastweights.training.losses import run_model
from fastweights.training.output_fit import fit_outputs
from fastweights.utils.errors import CheckpointError

SETTINGS = dict(rule="decay", m=5, window=3)
QUIET = dict(progress=False)


def converted(base: Any, noise: float = 0.0, **settings: Any) -> Any:
    """Converted, and with noise on every parameter, as if it had been trained."""
    model = convert(base, fw.FastWeightsConfig(**SETTINGS | settings)).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=draw)
    return model


def inputs() -> list[dict[str, Any]]:
    return [batch_of(tokens(2, 20)), packed()[0]]


@torch.no_grad()
def logits(model: Any) -> list[torch.Tensor]:
    return [run_model(model, batch).logits for batch in inputs()]


def deep_base() -> Any:
    """A Llama of four layers, made as the tiny ones are."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(config_of("llama", num_hidden_layers=4)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.25) + ("norm" in name))
    return model


def spoil(student: Any, layers: dict[int, float]) -> None:
    """Attention that fits its base exactly, but for noise on the outputs of some layers."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for index, noise in layers.items():
            weight = converted_layers(student)[index].o_proj.weight
            weight += noise * torch.randn(weight.shape, generator=draw)


def nearly_the_base() -> Any:
    """A window as long as the text is the pretrained attention: what is then spoiled is known."""
    return convert(deep_base(), fw.FastWeightsConfig(rule="local", window=64)).eval()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layer", [0, 1])
def test_restored_layer_equals_that_of_a_hybrid(family: str, layer: int) -> None:
    """One that was converted without it, with the other weights of the student."""
    student, teacher = converted(pretrained(family), noise=0.05), pretrained(family)
    hybrid = converted(pretrained(family), layers=(1 - layer,))
    attention = f"{family_of(student).layers}.{layer}.{family_of(student).attention}."
    trained = {name: x for name, x in student.state_dict().items() if not name.startswith(attention)}
    missing = hybrid.load_state_dict(trained, strict=False)
    assert not missing.unexpected_keys and all(name.startswith(attention) for name in missing.missing_keys)
    expected, before = logits(hybrid), logits(student)
    with restored(student, teacher, [layer]):
        found = logits(student)
    for one, other, plain in zip(found, expected, before, strict=True):
        assert torch.equal(one, other) and not torch.equal(one, plain)
    assert all(map(torch.equal, logits(student), before))


@pytest.mark.parametrize("family", CONFIGS)
def test_all_layers_restored_give_the_base_model(family: str) -> None:
    student, teacher = converted(pretrained(family)), pretrained(family)
    with restored(student, teacher, [0, 1]):
        found = logits(student)
    assert all(map(torch.equal, found, logits(teacher)))


def test_modules_settings_and_modes_are_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = converted(pretrained("llama")).train(), pretrained("llama")
    settings, layers = student.config.fastweights, converted_layers(student)
    tensors = {name: x.clone() for name, x in student.state_dict().items()}

    def fail(*_: Any) -> float:
        if len(converted_layers(student)) == 1:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(ranking, "_divergence", fail)
    with pytest.raises(KeyboardInterrupt):
        rank_layers(student, teacher, inputs(), fit=True, **QUIET)
    assert converted_layers(student) == layers and student.config.fastweights is settings
    assert settings["layers"] is None and not converted_layers(teacher)
    assert all(module.training for module in student.modules()) and not teacher.training
    assert all(torch.equal(x, tensors[name]) for name, x in student.state_dict().items())


def test_divergence_matches_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the tokens that have a successor in their document; in whatever chunks, and batches of any size."""
    student, teacher = converted(pretrained("gpt2")), pretrained("gpt2")
    total, count = 0.0, 0
    for batch, p, q in zip(inputs(), logits(teacher), logits(student), strict=True):
        for row, column in (batch["labels"][:, 1:] != -100).nonzero().tolist():
            wanted, found = (x[row, column].double().log_softmax(0) for x in (p, q))
            total, count = total + float((wanted.exp() * (wanted - found)).sum()), count + 1
    assert rank_layers(student, teacher, inputs(), **QUIET).kl == pytest.approx(total / count, rel=1e-5)
    monkeypatch.setattr("fastweights.training.chunked_loss.LOGITS_AT_ONCE", 3 * 61)
    monkeypatch.setattr(ranking, "BATCH_TOKENS", 20)
    parts = [part for batch in inputs() for part in batches_of(batch)]
    assert [len(part["labels"]) for part in parts] == [1, 1, 1, 1]
    assert rank_layers(student, teacher, parts, **QUIET).kl == pytest.approx(total / count, rel=1e-5)


def test_damaged_layer_ranks_first_and_restoring_it_repairs_the_model() -> None:
    student, teacher = nearly_the_base(), deep_base()
    spoil(student, {2: 0.3})
    found = rank_layers(student, teacher, inputs(), **QUIET)
    first, *others = found.layers
    assert first.layer == 2 and first.kl < 1e-6 * found.kl
    assert sorted(row.layer for row in others) == [0, 1, 3]
    assert [row.kl for row in found.layers] == sorted(row.kl for row in found.layers)
    for row in found.layers:
        assert row.gain == pytest.approx(found.kl - row.kl)
        with restored(student, teacher, [row.layer]):
            assert row.kl == pytest.approx(rank_layers(student, teacher, inputs(), **QUIET).kl, abs=1e-12)
    assert (found.chosen, found.kl_after) == ([], [])


def divergence(student: Any, teacher: Any, layers: list[int]) -> float:
    """Written out in float64, with these layers restored."""
    with restored(student, teacher, layers):
        assert set(converted_layers(student)) == set(range(4)) - set(layers)
        pairs = zip(inputs(), logits(teacher), logits(student), strict=True)
        values = []
        for batch, wanted, found in pairs:
            p, q = (x[:, :-1].double().log_softmax(-1) for x in (wanted, found))
            values.append((p.exp() * (p - q)).sum(-1)[batch["labels"][:, 1:] != -100])
    return float(torch.cat(values).mean())


def test_greedy_choice_is_the_best_beside_the_layers_chosen_before() -> None:
    student, teacher = nearly_the_base(), deep_base()
    spoil(student, {0: 0.05, 1: 0.3, 2: 0.1, 3: 0.2})
    found = rank_layers(student, teacher, inputs(), keep=4, **QUIET)
    chosen: list[int] = []
    for kl in found.kl_after:
        each = {i: divergence(student, teacher, [*chosen, i]) for i in range(4) if i not in chosen}
        chosen.append(min(each, key=lambda i: each[i]))
        assert kl == pytest.approx(each[chosen[-1]], rel=1e-5, abs=1e-9)
    assert found.chosen == chosen and found.kl_after[-1] == 0.0, "the last one is the base itself"
    assert found.kl_after[0] == found.layers[0].kl
    fewer = rank_layers(student, teacher, inputs(), keep=2, **QUIET)
    assert (fewer.chosen, fewer.kl_after) == (chosen[:2], found.kl_after[:2])


def test_a_hybrid_can_be_ranked_further() -> None:
    teacher, hybrid = deep_base(), converted(deep_base(), layers=(0, 2, 3))
    found = rank_layers(hybrid, teacher, inputs(), keep=3, **QUIET)
    assert sorted(found.chosen) == [0, 2, 3] and found.kl_after[-1] == 0.0


@pytest.mark.parametrize("gate_init", ["uniform", "teacher"])
def test_fit_is_done_before_ranking_and_undone_after(gate_init: str) -> None:
    student, teacher = converted(pretrained("gpt2"), window=0, gate_init=gate_init), pretrained("gpt2")
    before = {name: x.clone() for name, x in student.state_dict().items()}
    fitted, plain = (rank_layers(student, teacher, inputs(), fit=fit, **QUIET) for fit in (True, False))
    assert all(torch.equal(x, before[name]) for name, x in student.state_dict().items())
    fit_outputs(student, teacher, inputs(), "full")
    assert rank_layers(student, teacher, inputs(), **QUIET) == fitted
    assert fitted.kl < 0.9 * plain.kl


def test_text_that_a_fit_would_reproduce_exactly_is_refused() -> None:
    student, teacher = converted(pretrained("gpt2")), pretrained("gpt2")
    few = [batch_of(tokens(1, student.config.n_embd))]
    with pytest.raises(RankingError, match="needs more tokens"):
        rank_layers(student, teacher, few, fit=True, **QUIET)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "opt"])
def test_all_layers_restored_give_the_base_model_in_bfloat16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(ranking, "autocast", lambda device: torch.autocast(device.type, torch.bfloat16))
    student, teacher = converted(pretrained(family)), pretrained(family)
    found = rank_layers(student, teacher, inputs(), keep=2, fit=True, **QUIET)
    assert found.kl > 0.01 and found.kl_after[-1] == 0.0


def test_divergence_that_is_not_finite_is_refused() -> None:
    student = converted(pretrained("gpt2"))
    spoil(student, {1: math.inf})
    with pytest.raises(RankingError, match=r"nan with nothing restored: .* first, fit, or train it"):
        rank_layers(student, pretrained("gpt2"), inputs(), **QUIET)


def test_teachers_that_are_not_the_base_are_refused() -> None:
    student, teacher = converted(pretrained("gpt2")), pretrained("gpt2")
    eager = pretrained("gpt2")
    eager.set_attn_implementation("eager")
    for other, reason in (
        (pretrained("llama"), "teacher is a LlamaForCausalLM: give the GPT2LMHeadModel that"),
        (converted(pretrained("gpt2")), "teacher is a FastWeightsGPT2LMHeadModel: give"),
        (pretrained("gpt2").double(), "has dtype torch.float64, the converted model torch.float32: load both alike"),
        (eager, "has attn_implementation eager, the converted model sdpa"),
    ):
        with pytest.raises(RankingError, match=reason):
            rank_layers(student, other, inputs(), **QUIET)
    with pytest.raises(RankingError, match="a GPT2LMHeadModel is not converted"):
        rank_layers(teacher, teacher, inputs(), **QUIET)
    with pytest.raises(RankingError, match="keep 3: choose from 0 to 2"):
        rank_layers(student, teacher, inputs(), keep=3, **QUIET)
    with pytest.raises(RankingError, match="no next tokens to compare"):
        rank_layers(student, teacher, [], **QUIET)


# hybrids, saved


def save_student(folder: Path, base: Path, family: str, **settings: Any) -> Path:
    student = converted(pretrained(family), noise=0.05, **settings)
    student.config.fastweights_base = str(base)
    save(student, folder, tokenizer())
    return folder


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "opt"])
def test_saved_hybrid_loads_with_auto_classes(family: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", family)
    folder = save_student(tmp_path / "student", base, family)
    hybrid_from(folder, [1], tmp_path / "hybrid")
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid")
    assert list(converted_layers(hybrid)) == [0] and hybrid.config.fastweights["layers"] == [0]
    assert hybrid.config.fastweights_base == str(base)
    assert AutoTokenizer.from_pretrained(tmp_path / "hybrid").get_vocab() == tokenizer().get_vocab()
    student, teacher = AutoModelForCausalLM.from_pretrained(folder), pretrained(family)
    with restored(student, teacher, [1]):
        assert all(map(torch.equal, logits(hybrid), logits(student)))
    ids = tokens(2, 7)
    made = hybrid.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    again = ids
    for _ in range(9):
        with torch.no_grad():
            again = torch.cat([again, hybrid(again, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(made, again)


def test_layers_that_are_attention_already_do_not_change(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    folder = save_student(tmp_path / "student", base, "llama", layers=(1,))
    with pytest.raises(RankingError, match="nothing is left converted: that is the base model itself"):
        hybrid_from(folder, [1], tmp_path / "hybrid")
    hybrid_from(folder, [0], tmp_path / "hybrid")
    found, expected = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tmp_path / "hybrid", folder))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_failed_hybrid_leaves_no_folder(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    folder = save_student(tmp_path / "student", base, "gpt2")
    for layers, reason in (([2, 5], r"layers \[2, 5\] do not exist: the model has 2"), ([0, 1], "nothing is left")):
        with pytest.raises(RankingError, match=reason):
            hybrid_from(folder, layers, tmp_path / "deep" / "hybrid")
    with pytest.raises(CheckpointError, match="is not empty"):
        hybrid_from(folder, [1], folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "student"]


# the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("A quick brown fox.\nWhy\n<|endoftext|>\nJumps over the lazy dog?\n" * 10)
    return save_student(tmp_path / "student", save_model(tmp_path / "base"), "gpt2")


def run(*arguments: Any) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(rank)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_of(*arguments: Any) -> str:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "", (result.output, result.exception)
    *notices, line = result.stderr.splitlines()
    assert all(" was converted from " in notice for notice in notices)
    return line.removeprefix("error: ")


def test_rank_command_prints_writes_and_saves(folder: Path) -> None:
    options = ["--data", "text.txt", "--length", 24, "--tokens", 200, "--fit", "--keep", 1, "--device", "cpu"]
    done = run(folder, *options, "-o", "result.json", "--save", "hybrid")
    assert done.exit_code == 0, (done.output, done.exception)
    result = json.loads(Path("result.json").read_text())
    assert (result["kind"], result["seed"], result["tokens"]) == ("ranking", 0, 192)
    assert result["settings"] == {"keep": 1, "fit": True, "length": 24, "device": "cpu"}
    assert (result["model"]["name"], result["model"]["base"], result["data"]["name"]) == ("student", "base", "text.txt")
    best, other = result["layers"]
    assert result["chosen"] == [best["layer"]] and result["kl_after"] == [best["kl"]]
    lines = done.stdout.splitlines()
    assert f"{result['kl']:.4f}" in lines[0]
    shown = [line.split() for line in lines[2:4]]
    assert shown == [[str(row["layer"]), f"{row['kl']:.4f}", f"{row['gain']:+.4f}"] for row in (best, other)]
    assert lines[-2].split() == [str(best["layer"]), f"{best['kl']:.4f}"] and lines[-1] == "hybrid"
    assert AutoConfig.from_pretrained("hybrid").fastweights["layers"] == [other["layer"]]


def test_rank_command_limits_rows_to_the_position_table(folder: Path) -> None:
    assert run(folder, "--data", "text.txt", "-o", "result.json").exit_code == 0
    result = json.loads(Path("result.json").read_text())
    assert result["settings"]["length"] == 96 and "hybrid" not in {path.name for path in Path.cwd().iterdir()}


def test_rank_command_errors_name_the_flag(folder: Path, tmp_path: Path) -> None:
    text = ["--data", "text.txt"]
    Path("empty.txt").write_text("\n")
    Path("file").touch()
    for arguments, reason in (
        (["base", *text], "base is not converted: give a folder that fastweights convert or train wrote"),
        (["missing/or/not", *text], "no folder at missing/or/not"),
        ([folder, *text, "--keep", 3], f"--keep 3: {folder} has 2 converted layers, choose at most 2"),
        ([folder, *text, "--keep", 2, "--save", "new"], "choose at most 1, so that --save has a layer left to convert"),
        ([folder, *text, "--save", "new"], "--save new: give --keep, how many layers"),
        ([folder, *text, "--keep", 1, "--save", "base"], "--save base exists and is not an empty folder"),
        ([folder, *text, "--keep", 1, "--save", "file"], "--save file exists and is not an empty folder"),
        ([folder, "--data", "empty.txt"], "--data empty.txt has no text in it"),
        ([folder, "--data", "missing.txt"], "--data missing.txt: there is no such file or folder"),
        ([folder, *text, "--length", 97], "--length 97: gpt2 has learned positions for 96 tokens"),
        ([folder, *text, "--tokens", 20, "--length", 30], "--tokens 20 are fewer than one row: give at least --length"),
        ([folder, *text, "--output", "none/x.json"], "--output none/x.json cannot be written"),
        ([folder, *text, "--device", "abc"], "--device abc cannot be used here"),
        ([folder, *text, "--teacher", "none/or/so"], "--teacher: no folder at none/or/so"),
        ([folder, *text, "--teacher", folder], f"--teacher {folder} is a FastWeightsGPT2LMHeadModel: give the GPT2LMH"),
    ):
        assert reason in error_of(*arguments), arguments
    assert "new" not in {path.name for path in tmp_path.iterdir()}


def test_rank_command_refuses_a_teacher_of_another_size_or_none(folder: Path, tmp_path: Path) -> None:
    other = type(pretrained("gpt2"))(config_of("gpt2", n_layer=3))
    other.save_pretrained("other")
    found = error_of(folder, "--data", "text.txt", "--teacher", "other")
    assert found.startswith("--teacher other (vocabulary 61, 3 layers, width 32) is not the")
    assert "(vocabulary 61, 2 layers," in found
    (tmp_path / "base").rename("moved")
    found = error_of(folder, "--data", "text.txt")
    assert f"the base of {folder} is not found, name it with --teacher: no folder at {tmp_path}/base" in found
    assert run(folder, "--data", "text.txt", "--teacher", "moved").exit_code == 0
    save(converted(pretrained("gpt2")), "unnamed")
    found = error_of("unnamed", "--data", "text.txt")
    assert found == "unnamed does not say which model it was converted from: name it with --teacher"
    assert "unnamed has no tokenizer" in error_of("unnamed", "--data", "text.txt", "--teacher", "moved")
