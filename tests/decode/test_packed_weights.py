"""Weights packed on a CPU, as float32, bfloat16 or int8: the logits are those of the float32 engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.engine import SETTINGS, converted, name, prompts_of
from helpers.relative_error import assert_close
from helpers.tiny import tokens

import fastweights as fw
from fastweights.config import ConfigError
from fastweights.decode.generation import generate_sequence
from fastweights.decode.prefill import prefill
from fastweights.modeling.cache import FastWeightsCache
from fastweights.ops.packed import WEIGHTS, pack, quantize

# Half of the distance between two numbers: 2^-9 in bfloat16, and in int8 1/254 of a row's largest weight, a few times
# its typical one.
TOLERANCES = {None: 1e-6, "bfloat16": 8e-3, "int8": 2e-2}


@pytest.mark.parametrize("weights", TOLERANCES)
@pytest.mark.parametrize("shape", [(3, 64, 48), (1, 7, 5), (2, 33, 100), (8, 594, 32)], ids=str)
def test_packed_product_equals_the_plain_one_within_rounding(shape: tuple[int, int, int], weights: str | None) -> None:
    rows, n, k = shape
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    for own_bias in (bias, None):
        product = pack(weight, own_bias, rows, weights)
        if product is None:
            pytest.skip("this build of torch has no packed float32 products")
        found = product(x)
        assert found.dtype == torch.float32
        assert_close("product", found, torch.nn.functional.linear(x, weight, own_bias), TOLERANCES[weights])


def test_quantized_rows_use_the_whole_range_and_zero_rows_stay_zero() -> None:
    weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 5)[:, None]
    weight[2] = 0
    numbers, scales = quantize(weight, weight.shape[1])
    found = numbers.float() * scales.float()
    # a scale in bfloat16 may be a little too small for the largest weight of its row
    error, largest = (found - weight).abs().amax(1), weight.abs().amax(1)
    assert (error <= 0.006 * largest).all()
    assert numbers[[0, 1, 3, 4]].abs().amax(1).min() >= 126
    assert not found[2].any()


@pytest.mark.parametrize("kernels", [None, False], ids=["c", "torch"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("settings", SETTINGS, ids=name)
def test_logits_are_those_of_the_float32_engine_within_rounding(
    settings: dict[str, Any], weights: str, kernels: bool | None
) -> None:
    model, prompt = converted("llama", **settings), tokens(40)
    logits = {}
    for kind in (None, weights):
        engine = fw.Engine(model, 2, weights=kind, kernels=kernels)
        for slot in range(2):
            engine.decoder.set_slot(slot, prefill(model, prompt)[1])
        engine.decoder.tokens.copy_(prompt[-2:])
        logits[kind] = engine.decoder.step().clone()
    error = float((logits[weights] - logits[None]).norm() / logits[None].norm())
    assert 0 < error < 6e-2


@pytest.mark.parametrize("kernels", [None, False], ids=["c", "torch"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_tokens_do_not_depend_on_the_other_sequences(weights: str, kernels: bool | None) -> None:
    model, prompts = converted(), prompts_of(3, 9, 20)
    together = fw.Engine(model, 3, weights=weights, kernels=kernels).generate(prompts, 8)
    engine = fw.Engine(model, 3, weights=weights, kernels=kernels)
    assert together == [engine.generate([prompt], 8)[0] for prompt in prompts]


def test_states_stay_in_the_models_dtype_and_can_be_continued_without_packed_weights() -> None:
    model = converted(rule="gated_delta", m=8, window=4)
    engine = fw.Engine(model, weights="int8")
    state = FastWeightsCache(model.config)
    engine.generate([tokens(9)], 4, states=[state])
    assert {tensor.dtype for layer in state.layers for tensor in layer.tensors.values()} <= {torch.float32, torch.bool}
    assert len(fw.Engine(model).generate([tokens(3)], 4, states=[state])[0]) == 4


@pytest.mark.parametrize("weights", ["int4", "float32", 8, ""])
def test_unknown_weights_are_refused_by_name(weights: Any) -> None:
    with pytest.raises(ConfigError, match=f"weights must be one of int8, bfloat16, found {weights!r}"):
        fw.Engine(converted(), weights=weights)


def test_weights_are_refused_on_another_device() -> None:
    with pytest.raises(ConfigError, match="weights='int8' works on a CPU only, and the model is on meta"):
        fw.Engine(converted().to("meta"), weights="int8")


def test_weights_are_refused_where_the_engine_packs_nothing() -> None:
    model = converted("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    model.get_output_embeddings = lambda: model.lm_head  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"weights='int8' needs a model that the engine can pack.*Sequential"):
        fw.Engine(model, weights="int8")


def test_weights_are_refused_where_transformers_generates() -> None:
    model = converted()
    with pytest.raises(ConfigError, match="weights='int8' is for the decode engine"):
        generate_sequence(model, tokens(1, 4), FastWeightsCache(model.config), num_beams=2, weights="int8")
