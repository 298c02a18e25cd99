"""Decoding steps in C give the results of torch operators, and torch operators run where there is no compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.engine import SETTINGS, converted, greedy, name, prompts_of
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, tokens
from torch.nn import functional as F

import fastweights as fw
from fastweights.decode.prefill import prefill
from fastweights.modeling.cache import FastWeightsCache
from fastweights.ops import cpu
from fastweights.ops.cpu.program import Program, StoredWeight
from fastweights.ops.linear import ACTIVATIONS, Norm

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(isinstance(cpu._outcome(), str), reason=f"the C code cannot run here: {cpu._outcome()}")
TOLERANCES = {"float32": 2e-6, "bfloat16": 8e-3, "int8": 2e-2}


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The C file is looked for again within a test, and once more after it."""
    cpu._outcome.cache_clear()
    yield monkeypatch
    cpu._outcome.cache_clear()


def run_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weights: str,
    out: torch.Tensor,
    slots: list[int] | None = None,
    **options: Any,
) -> torch.Tensor:
    settings = dict(bias=None, norm=None, activation="none", add=False) | options
    program = Program(len(x))
    stored = StoredWeight(weight, weights, settings.pop("gated", False))
    program.linear(stored, x=x, out=out, **settings)
    program.run(slots)
    return out


@pytest.mark.parametrize("weights", TOLERANCES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (2, 33, 100), (5, 130, 64), (1, 64, 129)], ids=str)
def test_linear_matches_float64(shape: tuple[int, int, int], weights: str) -> None:
    rows, n, k = shape
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, k + 3)[:, :k], torch.randn(n, k) / k**0.5, torch.randn(n)
    expected = F.linear(x.double(), weight.double(), bias.double())
    found = run_linear(x, weight, weights, torch.full((rows, n), float("nan")), bias=bias)
    assert_close("y", found, expected, TOLERANCES[weights])
    residual = torch.randn(rows, n)
    found = run_linear(x, weight, weights, residual.clone(), bias=bias, add=True)
    assert_close("added", found, residual + expected, TOLERANCES[weights])


@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("gated", [False, True])
def test_norm_activation_and_gate_match_float64(activation: str, centered: bool, gated: bool) -> None:
    torch.manual_seed(0)
    rows, n, k = 2, 13, 70
    x, weight, bias = 3 * torch.randn(rows, k) + 1, torch.randn(n * (1 + gated), k), torch.randn(n * (1 + gated))
    norm = Norm(torch.randn(k), torch.randn(k) if centered else None, 1e-5, centered)
    found = run_linear(
        x,
        weight,
        "float32",
        torch.full((rows, n), float("nan")),
        bias=bias,
        norm=norm,
        activation=activation,
        gated=gated,
    )
    wide = Norm(norm.weight.double(), None if norm.bias is None else norm.bias.double(), norm.eps, centered)
    y = F.linear(wide(x.double()), weight.double(), bias.double())
    gate, *value = y.chunk(2, -1) if gated else (y,)
    expected = ACTIVATIONS[activation](gate) if activation != "none" else gate
    assert_close("y", found, expected * value[0] if gated else expected, 2e-6)


@pytest.mark.parametrize("weights", TOLERANCES)
def test_nan_reaches_every_result_of_its_row_and_no_other(weights: str) -> None:
    x = torch.randn(2, 70)
    x[0, 3] = float("nan")
    out = run_linear(x, torch.randn(9, 70), weights, torch.zeros(2, 9), activation="silu")
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_only_the_given_rows_are_computed() -> None:
    x, weight = torch.randn(4, 8), torch.randn(5, 8)
    out = run_linear(x, weight, "float32", torch.full((4, 5), 7.0), slots=[1, 3])
    assert (out[[0, 2]] == 7).all()
    assert_close("rows", out[[1, 3]], x[[1, 3]] @ weight.T, 1e-6)


def steps(model: Any, prompts: list[torch.Tensor], **options: Any) -> tuple[Any, list[torch.Tensor]]:
    """An engine after some steps in two of three slots, and the logits of these."""
    engine, found = fw.Engine(model, 3, max_length=40, **options), []
    for slot, prompt in zip((0, 2), prompts, strict=True):
        engine.decoder.set_slot(slot, prefill(model, prompt)[1])
    for step in range(6):
        engine.decoder.tokens.copy_(tokens(3, seed=step))
        found.append(engine.decoder.step([0, 2] if step < 4 else None)[[0, 2]].clone())
    return engine, found


def check_steps(model: Any, tolerance: float = 2e-5) -> None:
    prompts = prompts_of(3, 11)
    engine, found = steps(model, prompts)
    reference, expected = steps(model, prompts, kernels=False)
    assert engine.decoder.program is not None
    assert reference.decoder.program is None
    for y, y_expected in zip(found, expected, strict=True):
        assert_close("logits", y, y_expected, tolerance)
    fed = [int(tokens(3, seed=step)[2]) for step in range(6)]
    states = [e.decoder.get_slot(2, fed) for e in (engine, reference)]
    for own, other in zip(*(state.layers for state in states), strict=True):
        for key, tensor in getattr(own, "tensors", {}).items():
            assert tensor.dtype == other.tensors[key].dtype
            assert_close(key, tensor.float(), other.tensors[key].float(), tolerance)


@pytest.mark.parametrize(
    "settings",
    [s for s in SETTINGS if not s.get("output_norm") and s["rule"] not in ("delta", "abc", "linformer")]
    + [dict(rule="delta", m=6, rotary="drop", feature_map="none", normalize="unit"), dict(m=6, layers=(0,))],
    ids=name,
)
def test_steps_and_states_match_torch_operators_for_every_rule(settings: dict[str, Any]) -> None:
    check_steps(converted("llama", **settings))


@pytest.mark.parametrize("rule", ["add", "gated", "delta"])
def test_normalized_steps_match_torch_operators(rule: str) -> None:
    # features of either sign are divided by their sum, which may be small
    check_steps(converted("llama", rule=rule, m=5, normalize="attention", feature_map="none"), tolerance=5e-4)


@pytest.mark.parametrize("family", [f for f in CONFIGS if f not in ("qwen3", "gemma2", "gemma3_text")])
def test_steps_match_torch_operators_for_every_family(family: str) -> None:
    check_steps(converted(family, rule="gated_delta", m=8, window=4, sinks=1, mix="token"))


def test_a_bfloat16_model_decodes_in_c_with_bfloat16_weights() -> None:
    check_steps(converted("llama", rule="decay", m=8, window=4).to(torch.bfloat16), tolerance=3e-2)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("qwen3", dict(m=6), "norms of queries and keys"),
        ("gemma2", dict(m=6), "norms after"),
        ("llama", dict(rule="add", m=6, feature_map="elu"), "feature map elu"),
    ],
)
def test_models_that_the_c_code_does_not_know_decode_with_torch(
    family: str, settings: dict[str, Any], reason: str
) -> None:
    from fastweights.decode.model import c_code_unsupported_reason

    model = converted(family, **settings)
    assert reason in str(c_code_unsupported_reason(model))
    assert fw.Engine(model).decoder.program is None


def test_without_a_compiler_torch_operators_run(no_library: pytest.MonkeyPatch) -> None:
    no_library.setenv("CC", "no-such-compiler")
    assert cpu.unsupported_reason(CPU, torch.float32) == "there is no C compiler (no-such-compiler)"
    model, (prompt,) = converted(), prompts_of(5)
    engine = fw.Engine(model, weights="int8")
    assert engine.decoder.program is None
    assert len(engine.generate([prompt], 4)[0]) == 4
    assert fw.Engine(model).generate([prompt], 4) == [greedy(model, prompt, 4)]


def test_a_compiler_that_fails_is_reported_and_leaves_nothing(no_library: pytest.MonkeyPatch, tmp_path: Any) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such flag" >&2; exit 1\n')
    compiler.chmod(0o755)
    no_library.setenv("CC", str(compiler))
    no_library.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "cannot compile decode.c: no such flag" in str(cpu.unsupported_reason(CPU, torch.float32))
    assert list((tmp_path / "cache").rglob("*.so*")) == []


def test_a_folder_that_others_can_write_to_is_not_used(no_library: pytest.MonkeyPatch, tmp_path: Any) -> None:
    shared = tmp_path / "fastweights" / "compiled"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    no_library.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu.unsupported_reason(CPU, torch.float32) is None
    assert list(shared.iterdir()) == []


def test_the_folder_of_token_files_may_be_writable_for_a_group(no_library: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "fastweights").mkdir()
    (tmp_path / "fastweights").chmod(0o775)
    no_library.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu.unsupported_reason(CPU, torch.float32) is None
    assert len(list((tmp_path / "fastweights" / "compiled").glob("decode-*.so"))) == 1


def test_compiler_may_be_a_command_with_arguments(no_library: pytest.MonkeyPatch, tmp_path: Any) -> None:
    no_library.setenv("CC", "env LANG=C cc")
    no_library.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu.unsupported_reason(CPU, torch.float32) is None


def test_other_dtypes_decode_with_torch() -> None:
    assert "float64" in str(cpu.unsupported_reason(CPU, torch.float64))
    assert fw.Engine(converted().double()).decoder.program is None


def test_a_free_slot_keeps_its_state_while_others_generate() -> None:
    model, (prompt,) = converted(rule="gated_delta", m=8, window=4), prompts_of(6)
    engine = fw.Engine(model, 3)
    state = FastWeightsCache(model.config)
    before = [block.recurrence.state[1:].clone() for block in engine.decoder.blocks]
    (found,) = engine.generate([prompt], 5, states=[state])
    assert found == greedy(model, prompt, 5)
    for block, state_before in zip(engine.decoder.blocks, before, strict=True):
        assert torch.equal(block.recurrence.state[1:], state_before)
