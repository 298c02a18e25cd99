"""Which parameters learn how fast, what is left out while training, and when a run has diverged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.tiny import CONFIGS, config_of, pretrained, tokens

import fastweights as fw
from fastweights.modeling.layer import converted_layers
from fastweights.training.optimizer import (
    WATCHED_STEPS,
    Diverged,
    DivergenceWatch,
    clip_gradients,
    learning_rate_share,
    make_optimizer,
    set_learning_rate,
    set_mode,
)
from fastweights.training.recipe import Recipe, Stage


def student_of(family: str = "qwen3", **settings: Any) -> Any:
    return fw.convert(pretrained(family), fw.FastWeightsConfig(m=4, output_norm=True, window=3, **settings))


def prepared(student: Any, recipe: Recipe | None = None, **stage: Any) -> torch.optim.Optimizer:
    set_mode(student, recipe or Recipe(), Stage(**stage))
    return make_optimizer(student, Stage(**stage))


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    """Ten steps, three of them rising to the highest, then half a cosine down to a tenth."""
    stage = Stage(warmup=0.3, final=0.1)
    shares = [learning_rate_share(step, 10, stage) for step in range(10)]
    assert shares[:4] == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1])
    assert shares[4:] == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * i / 6)) for i in range(1, 7)])
    assert shares[6] == pytest.approx(0.55) and shares[9] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("stage", "steps", "expected"),
    [
        (dict(warmup=0, final=1.0), 3, [1, 1, 1]),
        (dict(warmup=0, final=0.0), 3, [1, 0.5, 0]),
        (dict(warmup=1, final=0.0), 3, [1 / 4, 2 / 4, 3 / 4]),
        (dict(warmup=0.05, final=0.2), 1, [1]),
    ],
)
def test_warmup_and_decay_of_the_schedule_are_optional(
    stage: dict[str, float], steps: int, expected: list[float]
) -> None:
    found = [learning_rate_share(step, steps, Stage(**stage)) for step in range(steps)]
    assert found == pytest.approx(expected)


def rates(student: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Each trained parameter's learning rate, by name."""
    set_learning_rate(optimizer, 1.0)
    names = {parameter: name for name, parameter in student.named_parameters()}
    return {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize(
    ("stage", "attention", "body"),
    [
        (dict(loss="transfer", learning_rate=0.3), 0.3, None),
        (dict(loss="transfer", learning_rate=0.3, body_learning_rate=0.2), 0.3, None),
        (dict(loss="distill", learning_rate=0.3), 0.3, 0.3),
        (dict(loss="distill", learning_rate=0.3, body_learning_rate=0.2), 0.3, 0.2),
        (dict(loss="finetune", learning_rate=0.3, body_learning_rate=0.0), 0.3, None),
        (dict(loss="finetune", learning_rate=0.0, body_learning_rate=0.2), None, 0.2),
    ],
)
def test_attention_and_body_have_separate_learning_rates(
    stage: dict[str, Any], attention: float | None, body: float | None
) -> None:
    student = student_of(layers=(1,))
    found = rates(student, prepared(student, **stage))
    new = {id(p) for layer in converted_layers(student).values() for p in layer.parameters()}
    assert new
    for name, parameter in student.named_parameters():
        expected = attention if id(parameter) in new else body
        assert found.get(name) == expected, name
        assert parameter.requires_grad == (expected is not None), name


def test_unconverted_model_has_one_learning_rate() -> None:
    student = pretrained("gpt2")
    assert set(rates(student, prepared(student, learning_rate=0.3)).values()) == {0.3}


def test_weight_decay_applies_to_matrices_only() -> None:
    student = student_of()
    names = {parameter: name for name, parameter in student.named_parameters()}
    groups = prepared(student, weight_decay=0.1).param_groups
    decaying = {names[p] for group in groups if group["weight_decay"] == 0.1 for p in group["params"]}
    resting = {names[p] for group in groups if group["weight_decay"] == 0.0 for p in group["params"]}
    assert decaying | resting == set(names.values())
    assert {name.rpartition(".")[2] for name in decaying} == {"weight"}
    assert not [name for name in decaying if "norm" in name]
    assert [name for name in resting if "output_norm" in name] and [name for name in resting if "logit" in name]


def test_gradients_are_clipped_and_their_norm_is_returned() -> None:
    student = student_of()
    optimizer = prepared(student)
    student(tokens(2, 16), labels=tokens(2, 16)).loss.backward()
    before = torch.cat([p.grad.flatten() for p in student.parameters()])
    norm = float(before.norm())
    assert norm > 0.01
    assert float(clip_gradients(optimizer, 0.01)) == pytest.approx(norm, rel=1e-5)
    after = torch.cat([p.grad.flatten() for p in student.parameters()])
    assert float(after.norm()) == pytest.approx(0.01, rel=1e-3)
    assert float(clip_gradients(optimizer, 1.0)) == pytest.approx(0.01, rel=1e-3)


DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    "gpt_neox": dict(attention_dropout=0.5, hidden_dropout=0.5),
    "opt": dict(dropout=0.5, attention_dropout=0.5, layerdrop=0.5),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("hybrid", [False, True])
def test_dropout_is_off_unless_the_recipe_enables_it(family: str, hybrid: bool) -> None:
    changes = DROPOUT.get(family, dict(attention_dropout=0.5))
    model = type(pretrained(family))(config_of(family, **changes))
    if hybrid:
        model = fw.convert(model, fw.FastWeightsConfig(m=4, layers=(1,)))
    ids = tokens(2, 12)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    expected = logits() if not model.training else model.eval() and logits()
    set_mode(model, Recipe(dropout=True), Stage())
    assert model.training and not torch.allclose(logits(), expected, atol=1e-4)
    set_mode(model, Recipe(), Stage())
    assert model.training and torch.allclose(logits(), expected, atol=1e-6)


def seen(watch: DivergenceWatch, losses: list[float]) -> int | None:
    """The number of losses after which a watch calls the run diverged."""
    for count, loss in enumerate(losses, 1):
        try:
            watch.update(loss)
        except Diverged:
            return count
    return None


def test_smoothed_loss_above_its_best_for_long_is_divergence() -> None:
    """Means of 20 losses: after 30 of 1.0, a loss of 5.0 lifts the mean above 1 + 1 with the sixth, and the run is
    given up when it has been there ten times on end."""
    assert WATCHED_STEPS == 20
    assert seen(DivergenceWatch(1.0, 10), [1.0] * 30 + [5.0] * 30) == 30 + 6 + 9
    with pytest.raises(Diverged, match=r"more than 1.0 above its best, 1.000, for 10 steps: it is at 4.000"):
        seen_all = DivergenceWatch(1.0, 10)
        for loss in [1.0] * 30 + [5.0] * 15:
            seen_all.update(loss)


@pytest.mark.parametrize(
    "losses",
    [
        [10.0 - i / 20 for i in range(200)],
        [1.0] * 30 + ([5.0] * 8 + [1.0] * 42) * 10,  # spikes that pass
        [1.0] * 30 + [1.9] * 100,
        [1.0] * 30 + [9.0] * 5 + [1.0] * 100,
    ],
)
def test_falling_losses_and_short_spikes_are_no_divergence(losses: list[float]) -> None:
    assert seen(DivergenceWatch(1.0, 30), losses) is None


def test_divergence_has_its_own_exit_code() -> None:
    assert Diverged.exit_code == 3
