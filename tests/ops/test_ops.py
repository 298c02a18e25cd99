"""ops: the loop against the paper's equations written in numpy, the chunked form against the loop, and what both
promise about padding, packed documents, carried states and dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.relative_error import (
    CASES,
    MATRIX_CASES,
    assert_all_close,
    assert_close,
    case_name,
    op_flags,
    op_inputs,
    run_op,
    run_with_gradients,
)
from torch import Tensor

from fastweights import ops
from fastweights.rules import RULES
from fastweights.rules.base import MIN_GATE_LOGIT

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 100, 129)
FLAGS = ("none", "mask", "reset", "mask+reset")
BACKENDS = ("loop", "chunked")
OUTPUTS = ("y", "state")
# The gates that have a floor, and that have nothing to forget at the start of a document.
FORGET_GATES = {"gated": ("g_logit",), "decay": ("f_logit", "z_logit"), "gated_delta": ("f_logit",)}

every_rule = pytest.mark.parametrize("rule", RULES)
every_case = pytest.mark.parametrize(("rule", "normalize"), CASES, ids=[str(case_name(c)) for c in CASES])
every_matrix_case = pytest.mark.parametrize(
    ("rule", "normalize"), MATRIX_CASES, ids=[str(case_name(c)) for c in MATRIX_CASES]
)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def as_float32(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.float() for name, x in inputs.items()}


def cut(inputs: dict[str, Tensor], start: int, stop: int | None) -> dict[str, Tensor]:
    """Tokens start to stop of every input that has time; the state is left out."""
    return {name: x[:, start:stop] for name, x in inputs.items() if name != "state"}


# --- the truth: the equations of the paper, and of the gated delta rule, one sequence, one head, one token at a time


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def paper_update(
    rule: str, S: np.ndarray, n: np.ndarray, k: np.ndarray, v: np.ndarray, gates: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    if rule == "add":
        return S + np.outer(v, k), n + k
    if rule == "gated":
        (g,) = gates
        return g * S + (1 - g) * np.outer(v, k), g * n + (1 - g) * k
    if rule == "delta":
        (g,) = gates
        return S + g * np.outer(v - S @ k, k), n + k
    if rule == "gated_delta":
        f, g = gates
        S = S @ np.diag(f)
        return S + g * np.outer(v - S @ k, k), n
    f, z = gates
    return np.outer(z, f) * S + np.outer(v, k), n


def paper(rule: str, inputs: dict[str, Tensor], normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    arrays = {name: x.numpy() for name, x in inputs.items()}
    q, k, v, start = (arrays[name] for name in ("q", "k", "v", "state"))
    gates = [sigmoid(x) for name, x in arrays.items() if name.endswith("_logit")]
    batch, length, heads, m = k.shape
    d, groups = v.shape[3], q.shape[2] // heads
    y, end = np.zeros((*q.shape[:3], d)), np.zeros_like(start)
    for b in range(batch):
        for h in range(heads):
            S, n = start[b, h, :d], start[b, h, d] if normalize else np.zeros(m)
            for t in range(length):
                S, n = paper_update(rule, S, n, k[b, t, h], v[b, t, h], [g[b, t, h] for g in gates])
                for query in range(h * groups, (h + 1) * groups):
                    divisor = n @ q[b, t, query] if normalize else 1.0
                    y[b, t, query] = S @ q[b, t, query] / divisor
            end[b, h] = np.vstack([S, n]) if normalize else S
    return y, end


@every_matrix_case
@pytest.mark.parametrize("groups", [1, 3])
def test_loop_matches_equations_of_the_paper(rule: str, normalize: bool, groups: int) -> None:
    inputs = op_inputs(rule, T=12, dtype=torch.float64, groups=groups, normalize=normalize)
    y, state = run_op(rule, inputs, normalize=normalize, backend="loop")
    expected_y, expected_state = paper(rule, inputs, normalize)
    assert_close("y", y, expected_y, 1e-12)
    assert_close("state", state, expected_state, 1e-12)


# --- the chunked form against the loop


@every_matrix_case
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("state", [True, False], ids=["state", "empty"])
def test_chunked_matches_loop(rule: str, normalize: bool, T: int, kind: str, groups: int, state: bool) -> None:
    inputs = op_inputs(rule, T=T, dtype=torch.float64, groups=groups, normalize=normalize, state=state, seed=T)
    options = {"normalize": normalize, **op_flags(kind, 2, T, seed=T)}
    expected = run_with_gradients(rule, inputs, backend="loop", **options)
    assert_all_close(run_with_gradients(rule, inputs, backend="chunked", **options), expected, 1e-6)
    in_float32 = run_op(rule, as_float32(inputs), backend="chunked", **options)
    for name, found in zip(OUTPUTS, in_float32, strict=True):
        assert_close(f"{name} in float32", found, expected[name], 1e-5)


@every_case
@pytest.mark.parametrize("bias", [-6.0, -4.0, 0.0, 2.0, 6.0])
def test_chunked_gradients_in_float32_match_float64(rule: str, normalize: bool, bias: float) -> None:
    inputs = op_inputs(
        rule, T=150, d=24, m=12, dtype=torch.float64, low=bias - 1, high=bias + 1, normalize=normalize, seed=3
    )
    expected = run_with_gradients(rule, inputs, backend="loop", normalize=normalize)
    found = run_with_gradients(rule, as_float32(inputs), backend="chunked", normalize=normalize)
    assert_all_close(found, expected, 1e-4)


@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
def test_gradients_of_closed_gates_are_accurate(rule: str) -> None:
    """At the floor of the gates almost everything cancels; the sums are arranged so that it cancels exactly."""
    inputs = op_inputs(rule, T=150, d=24, m=12, dtype=torch.float64, low=-10, high=-9, seed=3)
    expected = run_with_gradients(rule, inputs, backend="loop")
    assert_all_close(run_with_gradients(rule, as_float32(inputs), backend="chunked"), expected, 1e-4)


@every_rule
def test_second_derivative_is_an_error(rule: str) -> None:
    """The chunked backward is written by hand and has no derivative of its own."""
    inputs = {name: x.requires_grad_() for name, x in op_inputs(rule, T=20).items() if name != "state"}
    y, _ = getattr(ops, rule)(**inputs, backend="chunked")
    (dq,) = torch.autograd.grad(y.square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|differentiate twice"):
        dq.square().sum().backward()


@pytest.mark.parametrize("rule", FORGET_GATES)
@every_backend
def test_gate_logits_below_floor_count_as_floor(rule: str, backend: str) -> None:
    """Below it a gate is the floor's, and has no gradient."""
    inputs = op_inputs(rule, T=40, low=MIN_GATE_LOGIT, high=MIN_GATE_LOGIT)
    below = {name: x - 40 if name in FORGET_GATES[rule] else x for name, x in inputs.items()}
    found = run_with_gradients(rule, below, backend=backend)
    expected = run_with_gradients(rule, inputs, backend=backend)
    expected |= {name: torch.zeros_like(expected[name]) for name in map("gradient of {}".format, FORGET_GATES[rule])}
    assert_all_close(found, expected, 0)


@every_backend
@pytest.mark.parametrize("rule", [rule for rule, normalize in CASES if normalize])
def test_zero_features_give_zero_output_and_finite_gradients(rule: str, backend: str) -> None:
    """Features that are all zero put out zero, with finite gradients."""
    inputs = op_inputs(rule, T=20, normalize=True, state=False)
    inputs |= {"q": torch.zeros_like(inputs["q"]), "k": torch.zeros_like(inputs["k"])}
    results = run_with_gradients(rule, inputs, normalize=True, backend=backend)
    assert_close("y", results["y"], torch.zeros_like(results["y"]), 0)
    for name, x in results.items():
        assert torch.isfinite(x).all(), name


# --- padding, documents, carried states


@every_case
@every_backend
@pytest.mark.parametrize("T", [1, 20, 100])
def test_padding_does_not_change_the_state(rule: str, normalize: bool, backend: str, T: int) -> None:
    inputs = op_inputs(rule, T=T, normalize=normalize)
    mask = torch.zeros(2, T, dtype=torch.bool)
    y, state = run_op(rule, inputs, normalize=normalize, mask=mask, backend=backend)
    assert torch.equal(state, inputs["state"])
    assert torch.equal(y, torch.zeros_like(y))


@every_case
@every_backend
def test_padded_sequence_matches_unpadded(rule: str, normalize: bool, backend: str) -> None:
    """Padding anywhere gives what the real tokens give by themselves."""
    T = 90
    inputs = op_inputs(rule, T=T, dtype=torch.float64, groups=2, normalize=normalize)
    mask = op_flags("mask", 2, T)["mask"]
    y, state = run_op(rule, inputs, normalize=normalize, mask=mask, backend=backend)
    for b, real in enumerate(mask):
        row = {name: x[b : b + 1] if name == "state" else x[b : b + 1, real] for name, x in inputs.items()}
        expected_y, expected_state = run_op(rule, row, normalize=normalize, backend="loop")
        assert_close(f"y of row {b}", y[b, real], expected_y[0], 1e-12)
        assert_close(f"state of row {b}", state[b], expected_state[0], 1e-12)


@every_case
@every_backend
def test_content_of_padding_has_no_effect(rule: str, normalize: bool, backend: str) -> None:
    T = 70
    inputs = op_inputs(rule, T=T, normalize=normalize)
    mask = op_flags("mask", 2, T)["mask"]
    other = op_inputs(rule, T=T, normalize=normalize, seed=1)
    for name in cut(inputs, 0, T):
        real = mask.view(2, T, *[1] * (inputs[name].ndim - 2))
        other[name] = torch.where(real, inputs[name], 50 * other[name])
    other["state"] = inputs["state"]
    found, expected = (
        run_with_gradients(rule, x, normalize=normalize, mask=mask, backend=backend) for x in (other, inputs)
    )
    assert_all_close(found, expected, 0)
    for name in cut(inputs, 0, T):
        at_padding = found[f"gradient of {name}"][~mask]
        assert_close(f"gradient of {name} at padding", at_padding, torch.zeros_like(at_padding), 0)


@every_case
@every_backend
@pytest.mark.parametrize(("first", "second"), [(1, 1), (5, 30), (16, 16), (40, 70), (64, 3)])
def test_packed_documents_match_separate_ones(
    rule: str, normalize: bool, backend: str, first: int, second: int
) -> None:
    inputs = op_inputs(rule, T=first + second, dtype=torch.float64, normalize=normalize)
    reset = torch.zeros(2, first + second, dtype=torch.bool)
    reset[:, first] = True
    y, state = run_op(rule, inputs, normalize=normalize, reset=reset, backend=backend)
    alone = {"state": inputs["state"], **cut(inputs, 0, first)}
    first_y, _ = run_op(rule, alone, normalize=normalize, backend=backend)
    second_y, second_state = run_op(rule, cut(inputs, first, None), normalize=normalize, backend=backend)
    assert_close("y of the first document", y[:, :first], first_y, 1e-12)
    assert_close("y of the second document", y[:, first:], second_y, 1e-12)
    assert_close("state", state, second_state, 1e-12)


@every_backend
@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
def test_forget_gates_of_first_token_get_no_gradient(rule: str, backend: str) -> None:
    """The forget gates of a document's first token get no gradient at all, not even a rounding error's."""
    inputs, reset = op_inputs(rule, T=90), op_flags("reset", 2, 90)["reset"]
    results = run_with_gradients(rule, inputs, reset=reset, backend=backend)
    for name in FORGET_GATES[rule]:
        assert (results[f"gradient of {name}"][reset] == 0).all()
        assert (results[f"gradient of {name}"][~reset] != 0).all()


@every_case
@pytest.mark.parametrize("split", [1, 15, 16, 17, 33, 64, 69])
@pytest.mark.parametrize("kind", FLAGS)
def test_split_sequence_matches_whole(rule: str, normalize: bool, split: int, kind: str) -> None:
    T = 70
    inputs = op_inputs(rule, T=T, dtype=torch.float64, groups=3, normalize=normalize)
    flags = op_flags(kind, 2, T)
    y, state = run_op(rule, inputs, normalize=normalize, **flags)
    chunks, carried = [], inputs["state"]
    for start, stop in ((0, split), (split, T)):
        chunk = {**cut(inputs, start, stop), "state": carried}
        out, carried = run_op(rule, chunk, normalize=normalize, **cut(flags, start, stop))
        chunks.append(out)
    assert_close("y", torch.cat(chunks, dim=1), y, 1e-12)
    assert_close("state", carried, state, 1e-12)


# --- dtypes, backends, errors


@every_case
@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_give_low_precision_outputs(
    rule: str, normalize: bool, backend: str, dtype: torch.dtype
) -> None:
    """y comes back in the input's dtype; everything between, and the state, is float32."""
    inputs = op_inputs(rule, T=70, dtype=dtype, normalize=normalize)
    y, state = run_op(rule, inputs, normalize=normalize, backend=backend)
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    expected_y, expected_state = run_op(rule, as_float32(inputs), normalize=normalize, backend=backend)
    assert torch.equal(y, expected_y.to(dtype))
    assert torch.equal(state, expected_state)


@every_case
@pytest.mark.parametrize("backward_inside", [False, True], ids=["forward", "forward and backward"])
def test_autocast_has_no_effect(rule: str, normalize: bool, backward_inside: bool) -> None:
    inputs = op_inputs(rule, T=70, groups=2, normalize=normalize)
    leaves = [x.requires_grad_() for x in inputs.values()]

    def run(forward: bool, backward: bool) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward):
            y, state = run_op(rule, inputs, normalize=normalize, backend="chunked")
            loss = y.square().sum() + state.square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward):
            return [y, state, *torch.autograd.grad(loss, leaves)]

    for found, expected in zip(run(True, backward_inside), run(False, False), strict=True):
        assert torch.equal(found, expected)


@every_rule
def test_float64_stays_float64(rule: str) -> None:
    y, state = run_op(rule, op_inputs(rule, dtype=torch.float64))
    assert y.dtype == state.dtype == torch.float64


def test_auto_uses_loop_for_one_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for name, run in dict(ops.BACKENDS).items():
        monkeypatch.setitem(ops.BACKENDS, name, lambda *args, name=name, run=run: used.append(name) or run(*args))
    for T in (1, 2):
        run_op("decay", op_inputs("decay", T=T))
    assert used == ["loop", "chunked"]


def test_use_backend_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = op_inputs("add")
    asked = []
    monkeypatch.setitem(ops.BACKENDS, "chunked", lambda *args: asked.append("chunked") or ops.BACKENDS["loop"](*args))
    with ops.use_backend("chunked"):
        run_op("add", inputs, backend="loop")
        with ops.use_backend("loop"):
            run_op("add", inputs, backend="chunked")
        run_op("add", op_inputs("add", T=1))
    run_op("add", inputs, backend="loop")
    assert asked == ["chunked", "chunked"]


def test_use_backend_ends_after_an_error() -> None:
    with pytest.raises(ValueError, match="k must be"), ops.use_backend("loop"):
        run_op("add", op_inputs("add") | {"k": torch.zeros(1)})
    assert not ops._override


def test_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match="'cuda' is not known; choose one of auto, loop, chunked"):
        run_op("add", op_inputs("add"), backend="cuda")
    with pytest.raises(ValueError, match="'cuda' is not known"), ops.use_backend("cuda"):
        pass


def test_unknown_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="'softmax' is not known; choose one of add, gated, delta, decay, gated_delta"):
        ops.apply("softmax", *op_inputs("add", state=False).values(), ())


@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
def test_normalization_of_a_rule_without_normalizer_is_an_error(rule: str) -> None:
    q, k, v, *gates = op_inputs(rule, state=False).values()
    with pytest.raises(ValueError, match=f"the {rule} rule has no normalizer: normalize must be False"):
        ops.apply(rule, q, k, v, tuple(gates), normalize=True)


@every_rule
@every_backend
def test_empty_sequence_is_an_error(rule: str, backend: str) -> None:
    with pytest.raises(ValueError, match=r"q must be \[B,T,H,m\] with T, H and m at least 1, found \[2, 0, 2, [57]\]"):
        run_op(rule, op_inputs(rule, T=0), backend=backend)


@every_backend
@pytest.mark.parametrize("shape", [(2, 20, 0, 5), (2, 20, 2, 0)], ids=["no heads", "m 0"])
def test_empty_queries_are_an_error(shape: tuple[int, ...], backend: str) -> None:
    with pytest.raises(ValueError, match=r"q must be \[B,T,H,m\] with T, H and m at least 1, found"):
        run_op("add", op_inputs("add") | {"q": torch.zeros(shape)}, backend=backend)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_integer_inputs_are_an_error(argument: str) -> None:
    inputs = op_inputs("decay")
    with pytest.raises(ValueError, match=f"decay: {argument} must be floating-point, found torch.int64"):
        run_op("decay", inputs | {argument: inputs[argument].long()})


def test_missing_gate_is_an_error() -> None:
    q, k, v, f_logit, _ = op_inputs("decay", state=False).values()
    with pytest.raises(ValueError, match=r"decay: z_logit must be \[2, 20, 2, 6\], found None"):
        ops.apply("decay", q, k, v, (f_logit, None))


@pytest.mark.parametrize(
    ("m", "dtype", "chosen"),
    [(5, torch.float32, "triton"), (5, torch.float64, "chunked"), (129, torch.float32, "chunked")],
)
def test_auto_on_gpu_falls_back_where_kernels_cannot_run(m: int, dtype: torch.dtype, chosen: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(1, 9, 2, width, dtype=dtype, device="cuda") for width in (m, m, 4))
    assert ops._choose("auto", q, k, v, m) == chosen
    if chosen != "triton":
        with pytest.raises(ValueError, match="backend='triton' cannot run here"):
            ops._choose("triton", q, k, v, m)


WRONG_SHAPES = [
    ("decay", "q", (2, 20, 2, 4)),
    ("decay", "q", (2, 20, 5)),
    ("decay", "q", (2, 19, 2, 5)),
    ("decay", "k", (2, 20, 3, 5)),
    ("decay", "k", (2, 20, 5)),
    ("decay", "v", (2, 20, 1, 6)),
    ("decay", "v", (2, 19, 2, 6)),
    ("decay", "v", (2, 20, 6)),
    ("decay", "f_logit", (2, 20, 2, 6)),
    ("decay", "z_logit", (2, 20, 2, 5)),
    ("decay", "state", (2, 2, 5, 6)),
    ("gated", "g_logit", (2, 20, 2, 1)),
    ("delta", "g_logit", (2, 20, 1)),
    ("gated_delta", "f_logit", (2, 20, 2, 6)),
    ("gated_delta", "g_logit", (2, 20, 2, 1)),
    ("add", "state", (1, 2, 6, 5)),
    ("add", "mask", (2, 19)),
    ("add", "reset", (20,)),
]


@pytest.mark.parametrize(("rule", "argument", "shape"), WRONG_SHAPES)
def test_error_for_wrong_shape_names_the_argument(rule: str, argument: str, shape: tuple[int, ...]) -> None:
    wrong = {argument: torch.zeros(shape, dtype=torch.bool if argument in ("mask", "reset") else torch.float32)}
    with pytest.raises(ValueError, match=rf"\b{argument} must be .*found.*{list(shape)}".replace("[", r"\[")):
        run_op(rule, op_inputs(rule) | wrong)


def test_normalized_state_has_one_more_row() -> None:
    with pytest.raises(ValueError, match=r"state must be \[2, 2, 7, 5\], found \[2, 2, 6, 5\]"):
        run_op("add", op_inputs("add"), normalize=True)


@pytest.mark.parametrize("argument", ["mask", "reset"])
def test_mask_and_reset_must_be_bool(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument} must be a bool tensor, found torch.int64"):
        run_op("add", op_inputs("add"), **{argument: torch.ones(2, 20, dtype=torch.long)})
