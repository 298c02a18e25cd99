"""Losses of an adaptive softmax, against the exact log-probabilities of all words.

Shapes: hidden [N,D]   labels [N]   log-probabilities [N,V]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.relative_error import assert_close
from helpers.tiny import config_of, tokens
from helpers.training import STEP, Files, make_recipe, make_train_config, save_base, save_converted, write_text
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights.modeling.adaptive_input import AdaptiveInputForCausalLM, AdaptiveSoftmax
from fastweights.training import chunked_loss
from fastweights.training.checks import check_run
from fastweights.training.chunked_loss import LossConfig, head_loss
from fastweights.training.losses import next_token_loss
from fastweights.training.recipe import Recipe
from fastweights.training.run_folder import TrainingError
from fastweights.training.trainer import TrainConfig, train
from fastweights.utils.progress import Display

N, V, D = 37, 61, 32
CONFIGS = [LossConfig(), LossConfig(0.0), LossConfig(0.3)]


def _head(seed: int, **changes: Any) -> AdaptiveSoftmax:
    torch.manual_seed(seed)
    return AdaptiveInputForCausalLM(config_of("adaptive_input", **changes)).lm_head.double()


def _labels(highest: int = V) -> Tensor:
    labels = torch.randint(0, highest, (N,), generator=torch.Generator().manual_seed(1))
    labels[[0, 7, 8, N - 1]] = -100
    return labels


@pytest.mark.parametrize("at_once", [V, 2**24], ids=["token by token", "whole"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("cutoffs", [[20, 40], [13]], ids=str)
def test_loss_and_gradients_equal_autograd_on_all_words(
    at_once: int, config: LossConfig, cutoffs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divergence and cross-entropy of the distribution over all words, which the chunked loss never computes."""
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", at_once)
    own, teacher, labels = _head(0, cutoffs=cutoffs), _head(1, cutoffs=cutoffs), _labels()
    hidden, teacher_hidden = torch.randn(2, N, D, dtype=torch.float64).requires_grad_().unbind()
    leaves = [hidden.detach().requires_grad_(), *own.parameters()]
    counted = labels != -100
    teachers: list[tuple[Any, Any]] = [(teacher, teacher_hidden.detach())] + [(None, None)] * (config.cross_entropy > 0)
    for given in teachers:
        predicted = own(leaves[0])[counted]
        expected = config.cross_entropy * F.nll_loss(predicted, labels[counted], reduction="sum")
        if given[0] is not None:
            p = teacher(given[1])[counted].detach()
            expected = expected + (p.exp() * (p - predicted)).sum()
        found = head_loss(own, leaves[0], labels, config, *given)
        names = ["loss", "hidden", *(name for name, _ in own.named_parameters())]
        results = [(loss, *torch.autograd.grad(loss / 7, leaves)) for loss in (found, expected)]
        for name, mine, exact in zip(names, *results, strict=True):
            assert_close(name, mine, exact, 1e-12)


def test_every_parameter_has_a_gradient_without_rare_words() -> None:
    """As distributed training requires."""
    own, hidden = _head(0), torch.randn(N, D, dtype=torch.float64)
    head_loss(own, hidden, _labels(highest=20), LossConfig()).backward()
    assert all(parameter.grad is not None for parameter in own.parameters())
    assert not own.words[1].weight.grad.any() and own.words[0].weight.grad.any()


def test_losses_of_the_module_equal_its_log_probabilities() -> None:
    own, hidden, labels = _head(0), torch.randn(N, D, dtype=torch.float64), _labels()
    expected = F.nll_loss(own(hidden), labels, reduction="none")
    assert_close("losses", own.losses(hidden, labels), expected, 1e-12)
    assert_close("sum of probabilities", own(hidden).exp().sum(-1), torch.ones(N).double(), 1e-12)


def test_dropout_of_the_softmax_is_used_in_training_alone() -> None:
    own, hidden, labels = _head(0, softmax_dropout=0.5), torch.randn(N, D, dtype=torch.float64), _labels()
    dropped = [head_loss(own.train(), hidden, labels, LossConfig()) for _ in range(2)]
    exact = [head_loss(own.eval(), hidden, labels, LossConfig()) for _ in range(2)]
    assert dropped[0] != dropped[1] and exact[0] == exact[1]


class _Widest(TorchDispatchMode):
    """The longest dimension of all matrices that are computed in the block, but for sums over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim > 1:
            self.size = max(self.size, *result.shape)
        return result


def test_no_tensor_is_as_wide_as_the_vocabulary_in_training() -> None:
    model, ids = AdaptiveInputForCausalLM(config_of("adaptive_input", vocab_size=500, cutoffs=[100, 250])), tokens(2, 9)
    with _Widest() as whole:
        model(ids)
    assert whole.size == 500
    model.train()
    batch = {"input_ids": ids, "position_ids": torch.arange(9).expand(2, -1), "labels": ids}
    with _Widest() as seen:
        next_token_loss(model, batch).backward()
        loss = model(ids, labels=ids).loss
        loss.backward()
    assert seen.size == 250
    assert model(ids, labels=ids).logits is None and model.eval()(ids, labels=ids).logits.shape[-1] == 500
    assert_close("loss", loss, next_token_loss(model, batch) / 16, 1e-5)


def test_cuda_graphs_are_refused(tmp_path: Path) -> None:
    model = AdaptiveInputForCausalLM(config_of("adaptive_input"))
    recipe = Recipe.from_dict({"stages": [{"loss": "finetune"}], "cuda_graphs": True})
    config = TrainConfig("model", "text.txt", recipe)
    with pytest.raises(TrainingError, match=r"cuda_graphs cannot be used: model has an adaptive softmax"):
        check_run(config, model, processes=1, sharded=False)


def test_chain_of_stages_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit, transfer and distillation; and settings that an adaptive softmax does not have."""
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    base = save_base(tmp_path / "base", "adaptive_input")
    converted = save_converted(tmp_path / "converted", base, "adaptive_input", gate_init="log")
    texts = write_text(tmp_path / "text.txt", 60, seed=0), write_text(tmp_path / "validation.txt", 6, seed=1)
    files = Files(tmp_path, base, converted, *texts)
    stages = (
        dict(loss="transfer", tokens=4 * STEP, learning_rate=3e-3, fit="full"),
        dict(loss="distill", tokens=4 * STEP, learning_rate=1e-3, cross_entropy=0.3),
    )
    config = make_train_config(files, make_recipe(stages, checkpoint_every=100))
    losses = [point.loss for point in train(config, tmp_path / "run", display=Display(enabled=False)).validation]
    assert losses[-1] < losses[0]
    for name, value in (("temperature", 2.0), ("top_k", 5)):
        recipe = make_recipe((dict(loss="distill", tokens=STEP) | {name: value},))
        with pytest.raises(TrainingError, match=f"distill.{name}={value:g}: .* leave {name} out"):
            train(make_train_config(files, recipe), tmp_path / name, display=Display(enabled=False))
