"""New parameters made from pretrained ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, config_of, depend_on_input, pretrained, tokens
from torch import Tensor

import fastweights as fw
from fastweights.modeling.families import family_of
from fastweights.modeling.initialization import exact_factors, log_gate, query_key_factors, uniform_gate
from fastweights.modeling.layer import FastWeightsAttention

HEADS, D, WIDTH = 4, 8, 32


def _factors(family: str, width: int, pairs: int, states: int = HEADS) -> tuple[Any, Any]:
    model = pretrained(family)
    table = family_of(model)
    attention = table.attention_of(table.blocks(model)[0])
    shape = table.shape(attention, model.config)
    weights = table.weights(attention, shape)
    generator = torch.Generator().manual_seed(0)
    return query_key_factors(weights, shape, states, width, pairs, generator), exact_factors(weights, shape, states)


def _form(factors: Any) -> Tensor:
    """Each query head's bilinear form over [x, 1]."""
    return (factors.q.mT @ factors.k[:, None]).flatten(0, 1)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "llama", "qwen2"])
@pytest.mark.parametrize("m", [1, 3, 7])
def test_narrow_projections_are_best_low_rank_approximation(family: str, m: int) -> None:
    new, exact = _factors(family, m, pairs=0)
    u, values, v = torch.linalg.svd(_form(exact))
    best = u[..., :m] * values[:, None, :m] @ v[:, :m]
    assert_close("query-key form", _form(new), best, 1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_shared_keys_are_best_for_their_query_group(family: str) -> None:
    new, exact = _factors(family, 3, pairs=0, states=2)
    stacked = _form(exact).unflatten(0, (2, 2)).flatten(1, 2)
    u, values, v = torch.linalg.svd(stacked, full_matrices=False)
    best = u[..., :3] * values[:, None, :3] @ v[:, :3]
    assert_close("form of a group", _form(new).unflatten(0, (2, 2)).flatten(1, 2), best, 1e-9)


@pytest.mark.parametrize("m", [D, D + 1, 3 * D])
def test_wide_projections_represent_query_key_form_exactly(m: int) -> None:
    for family in CONFIGS:
        new, exact = _factors(family, m, pairs=0)
        assert_close(f"form of {family}", _form(new), _form(exact), 1e-12)
        assert not new.q[:, :, D:].any() and bool(new.k[:, D:, :-1].all())


def test_query_key_form_equals_pretrained_logits() -> None:
    """Scale and biases included: [x,1] Q^T K [y,1] is what GPT-2's softmax sees."""
    model = pretrained("gpt2")
    attention = model.transformer.h[0].attn
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    q, k, _ = attention.c_attn(x).split(WIDTH, dim=-1)
    q, k = (t.unflatten(-1, (HEADS, D)).transpose(0, 1) for t in (q, k))
    expected = q @ k.mT * D**-0.5
    _, exact = _factors("gpt2", D, pairs=0)
    one = torch.cat([x, torch.ones(5, 1)], dim=-1).double()
    assert_close("logits", one @ _form(exact) @ one.mT, expected.double(), 1e-5)


def test_strongest_rotary_pairs_are_retained_as_pairs() -> None:
    new, exact = _factors("llama", 4, pairs=2)
    half = D // 2
    strength = exact.q[:, 0].square().sum(-1), exact.k.square().sum(-1)
    strength = [s[:, :half] + s[:, half:] for s in strength]
    best = (strength[0] * strength[1]).topk(2, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(new.pairs, best)
    for head in range(HEADS):
        rows = torch.cat([best[head], best[head] + half])
        assert torch.equal(new.q[head, 0], exact.q[head, 0, rows])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox"])
def test_full_width_layer_with_rope_has_pretrained_logits(family: str) -> None:
    """Queries and keys after norm and rotation, against a window that sees everything."""
    base, ids = pretrained(family), tokens(1, 9)
    model = fw.convert(base, fw.FastWeightsConfig(rule="add", m=D, window=9))
    layer = family_of_converted(model)
    seen: dict[str, Any] = {}
    for part in ("rule", "window"):
        getattr(layer, part).projections.register_forward_hook(lambda _m, _i, out, part=part: seen.update({part: out}))
    with torch.no_grad():
        model(ids)
    for index, name in ((0, "q"), (1, "k")):
        expected = seen["window"][index]
        expected = expected.repeat_interleave(seen["rule"][index].shape[2] // expected.shape[2], dim=2)
        assert_close(f"{name} of {family}", seen["rule"][index], expected, 1e-6)


def family_of_converted(model: Any) -> Any:
    return model.family.attention_of(model.family.blocks(model)[0])


def _rule(**settings: Any) -> Any:
    return family_of_converted(fw.convert(pretrained("gpt2"), fw.FastWeightsConfig(**settings))).rule


def _pretrained_values() -> Tensor:
    return pretrained("gpt2").transformer.h[0].attn.c_attn.weight.detach().T[2 * WIDTH :]


def test_uniform_gate_init_rescales_values() -> None:
    rule = _rule(rule="decay", m=6)
    f, z = (rule.gates[name].bias.sigmoid() for name in "fz")
    assert bool((f >= 1 / 6).all() and (f <= 5 / 6).all()) and bool((z >= 1 / D).all() and (z <= 1 - 1 / D).all())
    assert not rule.gates["f"].weight.any() and not rule.gates["z"].weight.any()
    assert_close("values", rule.projections.v_proj.weight, _pretrained_values() * (1 - z)[:, None], 1e-6)


RANDOM = [dict(rule="decay", gate_init="log", window=4), dict(rule="add", feature_map="favor+", normalize="attention")]


@pytest.mark.parametrize("settings", RANDOM, ids=["decay", "add"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_random_projections_have_size_of_pretrained_ones(family: str, settings: dict[str, Any]) -> None:
    """All else is as it would be; another seed draws others."""
    drawn, again, other, own = (
        family_of_converted(fw.convert(pretrained(family), fw.FastWeightsConfig(m=6, **settings, **more)))
        for more in [dict(projection_init="random")] * 2 + [dict(projection_init="random", seed=1), {}]
    )
    for name in ("q_proj", "k_proj"):
        x, same, x_other, model_s = (getattr(layer.rule.projections, name) for layer in (drawn, again, other, own))
        assert torch.equal(x.weight, same.weight) and not torch.equal(x.weight, x_other.weight)
        sizes = [linear.weight.unflatten(0, (HEADS, -1)).square().mean((1, 2)).sqrt() for linear in (x, model_s)]
        assert_close(f"size of {name}", *sizes, 0.2)
        both = torch.stack([x.weight.flatten(), model_s.weight.flatten()]).detach()
        assert abs(float(both.corrcoef()[0, 1])) < 0.15
        assert x.bias is None or not x.bias.any()
    own_state = own.state_dict()
    for name, numbers in drawn.state_dict().items():
        is_drawn = name.startswith(("rule.projections.q_proj", "rule.projections.k_proj"))
        assert is_drawn or torch.equal(numbers, own_state[name]), name


def test_uniform_gates_are_uniformly_distributed() -> None:
    drawn = uniform_gate((20_000,), 64, torch.Generator().manual_seed(0)).sigmoid()
    expected = torch.linspace(1 / 64, 1 - 1 / 64, 20_000)
    assert float((drawn.sort().values - expected).abs().max()) < 0.02
    assert torch.isfinite(uniform_gate((5,), 1, torch.Generator().manual_seed(0))).all()


def test_log_gates_remember_from_one_token_to_training_length() -> None:
    rule = _rule(rule="decay", m=6, gate_init="log", train_length=256)
    f = rule.gates["f"].bias.detach().unflatten(0, (HEADS, 6))
    lengths = (f.exp()).sort(dim=1).values
    assert_close("memory lengths", lengths, torch.tensor([256 ** (i / 5) for i in range(6)]).expand(HEADS, -1), 1e-5)
    assert bool((rule.gates["z"].bias > math.log(256)).all()), "the value gate stays open longer than any key gate"
    plain = _rule(rule="add", m=6, normalize="attention")
    assert_close("key projection", rule.projections.k_proj.weight, plain.projections.k_proj.weight, 1e-6)
    assert_close("scale of the keys", rule.key_scale, (-f).sigmoid(), 1e-6)
    assert "key_scale" in rule.state_dict() and _rule(rule="decay", m=6).key_scale is None
    assert_close("values", rule.projections.v_proj.weight, _pretrained_values(), 1e-6)
    assert torch.isfinite(log_gate(2, 1, 100, torch.Generator())).all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_both_elements_of_a_rotary_pair_have_one_gate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are scaled by how long the state remembers them; rotation must not mix a long memory into a short one."""
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(rule="decay", m=6, gate_init="log"))
    plain = fw.convert(pretrained(family), fw.FastWeightsConfig(rule="gated", m=6))
    rule = family_of_converted(model).rule
    pairs = rule.projections.planes.shape[1]
    f = rule.gates["f"].bias.detach().unflatten(0, (HEADS, 6))
    assert pairs and torch.equal(f[:, :pairs], f[:, pairs : 2 * pairs])
    keys = [_first_keys(m, monkeypatch) for m in (model, plain)]
    assert_close("keys", keys[0], keys[1] * (-f).sigmoid(), 1e-5)


def _first_keys(model: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The keys that the first layer's rule is given."""
    keys, apply = [], fw.ops.apply

    def listening(rule: str, q: Tensor, k: Tensor, *arguments: Any, **options: Any) -> Any:
        keys.append(k)
        return apply(rule, q, k, *arguments, **options)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(fw.ops, "apply", listening)
        model(tokens(4, 90))
    return keys[0]


def test_add_without_value_scale_overflows_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the paper's 1/512 is for: float16 ends at 65504."""

    def largest_output() -> float:
        model = pretrained("gpt2")
        for parameter in model.parameters():
            parameter.data *= 2
        model, seen = fw.convert(model, fw.FastWeightsConfig(rule="add", m=4)), []
        family_of_converted(model).rule.register_forward_hook(lambda _m, _i, out: seen.append(out.abs().max()))
        with torch.no_grad():
            model(tokens(1, 96))
        return float(seen[0])

    assert largest_output() < 65504
    monkeypatch.setattr("fastweights.modeling.initialization.ADD_VALUE_SCALE", 1.0)
    assert largest_output() > 65504


def test_delta_and_add_start_as_in_the_paper() -> None:
    assert_close("delta's gate", _rule(rule="delta", m=4).gates["g"].bias.sigmoid(), torch.full((HEADS,), 0.007), 1e-5)
    assert_close("add's values", _rule(rule="add", m=4).projections.v_proj.weight, _pretrained_values() / 512, 1e-6)
    mapped = _rule(rule="add", m=4, feature_map="relu").projections.v_proj.weight
    assert_close("add's values with a map", mapped, _pretrained_values(), 1e-6)


def test_gated_delta_starts_with_log_gates_and_half_steps() -> None:
    rule = _rule(rule="gated_delta", m=6, train_length=256, rotary="drop")
    lengths = rule.gates["f"].bias.exp().view(HEADS, 6).sort(dim=-1).values
    assert_close("memory lengths", lengths, 256 ** (torch.arange(6) / 5).expand(HEADS, -1), 1e-5)
    assert_close("step sizes", rule.gates["g"].bias.sigmoid(), torch.full((HEADS,), 0.5), 1e-6)
    assert not any(gate.weight.any() for gate in rule.gates.values())
    assert rule.key_scale is None  # keys have unit length


def test_new_parameters_depend_only_on_seed() -> None:
    def biases(seed: int) -> Tensor:
        return _rule(rule="decay", m=4, seed=seed).gates["f"].bias

    assert torch.equal(biases(1), biases(1)) and not torch.equal(biases(1), biases(2))


PAPER = [
    dict(rule=rule, feature_map=feature_map, normalize=normalize)
    for rule, sums in (("add", ""), ("gated", ""), ("delta", "sum"), ("decay", ""))
    for feature_map, normalize in (
        ("relu", "attention+sum" if sums else "attention"),
        ("relu", sums or "none"),
        ("none", "none"),
    )
    if not (rule == "decay" and "attention" in normalize)
] + [dict(rule="gated_delta", feature_map="none", normalize="unit"), dict(rule="abc"), dict(rule="linformer")]


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text"])
@pytest.mark.parametrize("settings", PAPER, ids=lambda s: "-".join(s.values()))
def test_no_overflow_in_bfloat16_after_conversion(family: str, settings: dict[str, Any]) -> None:
    """Four layers, 1024 tokens, the paper's configurations in the paper's initialization."""
    model = pretrained(family)
    small = dict(n_layer=4, n_positions=1024) if family == "gpt2" else dict(num_hidden_layers=4)
    torch.manual_seed(0)
    model = type(model)(config_of(family, **small))
    model = fw.convert(model, fw.FastWeightsConfig(m=4, **settings)).to(torch.bfloat16).train()
    loss = model(tokens(1, 1024), labels=tokens(1, 1024)).loss
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


SHARED_RULES = [
    dict(rule="gated_delta"),
    dict(rule="gated_delta", state_heads="kv"),
    dict(rule="decay", gate_init="log"),
    dict(rule="gated", state_heads="kv", output_norm=True),
    dict(rule="delta", feature_map="none", normalize="unit"),
    dict(rule="add"),
]


@pytest.mark.parametrize("settings", SHARED_RULES, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_shared_projections_start_as_a_states_own(family: str, settings: dict[str, Any]) -> None:
    """With biases, norms of queries and keys, a cap on the logits, sliding windows and groups of heads."""
    own, shared = (
        fw.convert(pretrained(family), fw.FastWeightsConfig(m=D, window=3, projections=kind, **settings)).eval()
        for kind in ("own", "shared")
    )
    for layer in (x for model in (own, shared) for x in model.modules() if isinstance(x, FastWeightsAttention)):
        layer.mix.logit.zero_()  # half of the output is the state's
    ids = tokens(2, 19)
    assert_close("logits", shared(ids).logits, own(ids).logits, 1e-5)
    names = [name for name, _ in shared.named_parameters() if ".rule.projections." in name]
    assert not names and any(".rule.projections." in name for name, _ in own.named_parameters())


@pytest.mark.parametrize("rule", ["decay", "gated", "delta", "gated_delta"])
def test_low_rank_gates_start_as_full_rank_and_learn(rule: str) -> None:
    settings = dict(rule=rule, m=D, window=3, mix="token")
    full, low, other = (
        fw.convert(pretrained("llama"), fw.FastWeightsConfig(**settings, **more))
        for more in ({}, dict(gate_rank=3), dict(gate_rank=3, seed=1))
    )
    ids = tokens(2, 9)
    assert torch.equal(low(ids).logits, full(ids).logits)
    layer, (down, other_down) = family_of_converted(low), (family_of_converted(x).gate_down for x in (low, other))
    assert down.weight.shape == (3, WIDTH) and not torch.equal(down.weight, other_down.weight)
    linears = [*layer.rule.gates.values(), layer.mix.from_token]
    optimizer = torch.optim.SGD(low.parameters(), lr=1.0)
    for _ in range(2):
        low(ids, labels=ids).loss.backward()
        optimizer.step()
    assert all(linear.weight.any() for linear in linears) and down.weight.grad.any()


def test_a_share_from_the_token_starts_as_the_constant_one() -> None:
    constant, token = (
        fw.convert(pretrained("llama"), fw.FastWeightsConfig(m=6, window=3, mix=mix)).eval()
        for mix in ("constant", "token")
    )
    ids = tokens(2, 9)
    assert torch.equal(token(ids).logits, constant(ids).logits)
    depend_on_input(token)
    assert not torch.allclose(token(ids).logits, constant(ids).logits)


def test_rules_with_unit_keys_start_with_more_of_the_state() -> None:
    """Their outputs are no larger than attention's; those of decay and gated are many times larger."""
    unit = [dict(rule="gated_delta"), dict(rule="delta", feature_map="none", normalize="unit")]
    for share, settings in [(0.9, unit), (0.98, [dict(rule="decay"), dict(rule="delta"), dict(rule="gated")])]:
        for chosen in settings:
            model = fw.convert(pretrained("gpt2"), fw.FastWeightsConfig(m=6, window=3, **chosen))
            logit = family_of_converted(model).mix.logit
            assert_close(f"share of {chosen}", logit.sigmoid(), torch.full((HEADS,), share), 1e-6)
