"""Every way of running a converted model gives the same logits, state and tokens.

The ways: loop, chunked, one token at a time through the cache, split at random points, left-padded batch, packed
documents, greedy generation and beam search. The models: rules x feature maps x normalizers x families x (all layers
converted, one layer retained as attention). By default every pair of these values is covered; `make test-full` runs
the whole product.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import zlib
from typing import Any

import pytest
import torch
from helpers.pairwise import pairs_of, pairwise_cover
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, VOCAB, depend_on_input, pretrained, tokens
from torch import Tensor

import fastweights as fw
from fastweights.config import FEATURE_MAPS, NORMALIZERS, RULES, SLOT_RULES, ConfigError
from fastweights.modeling.cache import StateLayer
from fastweights.modeling.initialization import DELTA_GATE
from fastweights.rules import DELTA_RULES

TOLERANCE = 1e-5
LENGTH = 37
M = 6
HEAD_DIM = 8  # of all tiny models


OPTIONS = [
    dict(rule="decay", m=M, window=4, sinks=3, output_norm=True),
    dict(rule="decay", m=M, rotary="drop", state_heads="kv", gate_init="log"),
    dict(rule="gated", m=11, state_heads="kv", window=1, mix="token"),
    dict(rule="delta", m=1, state_heads="kv", window=5),
    dict(rule="gated_delta", m=M, window=4, output_norm=True),
    dict(rule="gated_delta", m=11, rotary="drop", state_heads="kv", gate_init="uniform"),
    dict(rule="add", m=M, state_heads="kv", output_norm=True),
    dict(rule="gated_delta", m=HEAD_DIM, window=4, sinks=2, mix="token", projections="shared", gate_rank=3),
    dict(rule="decay", m=HEAD_DIM, gate_init="log", window=9, projections="shared", state_heads="kv", gate_rank=32),
    dict(rule="gated", m=HEAD_DIM, window=3, projections="shared", output_norm=True),
    dict(rule="add", m=HEAD_DIM, window=3, projections="shared", mix="token", gate_rank=1),
    dict(rule="delta", m=M, gate_rank=2),
    dict(rule="abc", m=11, window=4, sinks=2, mix="token", projections="shared", gate_rank=3),
    dict(rule="linformer", m=M, rotary="drop", state_heads="kv", output_norm=True, train_length=20),
    dict(rule="local", window=1),
    dict(rule="local", window=50),
    dict(rule="local", window=6, sinks=2),
    dict(rule="local", window=4, sinks=1, wide_window=20),
    dict(rule="gated_delta", m=HEAD_DIM, window=3, sinks=2, wide_window=11, mix="token", projections="shared"),
]
PLACES = [dict(family=family, hybrid=hybrid) for family in CONFIGS for hybrid in (False, True)]


def _defined() -> list[dict[str, Any]]:
    """Every combination of rule, feature map and normalizer that the config accepts."""
    found = []
    for rule, feature_map, normalize in itertools.product(RULES, FEATURE_MAPS, NORMALIZERS):
        settings = dict(rule=rule, feature_map=feature_map, normalize=normalize)
        try:
            fw.FastWeightsConfig(m=M, **settings)
        except ConfigError:
            continue
        found.append(settings)
    return found


DEFINED = _defined()
BEAM_SETTINGS = [
    dict(rule="decay", m=M),
    dict(rule="gated", m=M, window=3, mix="token"),
    dict(rule="delta", m=M),
    dict(rule="gated_delta", m=HEAD_DIM, window=3, projections="shared", gate_rank=3),
    dict(rule="add", m=M, feature_map="elu", normalize="attention"),
    dict(rule="local", window=5, sinks=2),
    dict(rule="linformer", m=M, window=3, train_length=8),
]


def _with_option(options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options, each one value of one factor."""
    return [dict(option=index) | place for index in range(len(options)) for place in PLACES]


MATRIX = [settings | place for settings in DEFINED for place in PLACES]
OPTIONS_MATRIX, BEAMS_MATRIX = _with_option(OPTIONS), _with_option(BEAM_SETTINGS)
MATRICES = {"settings": MATRIX, "options": OPTIONS_MATRIX, "beams": BEAMS_MATRIX}


def _parameters(cases: list[dict[str, Any]]) -> list[Any]:
    """Every case; those beyond the pairwise cover have the mark `full`."""
    default = set(pairwise_cover(cases))
    marks = [() if index in default else pytest.mark.full for index in range(len(cases))]
    return [
        pytest.param(case, id="-".join(map(str, case.values())), marks=mark)
        for case, mark in zip(cases, marks, strict=True)
    ]


def _model(settings: dict[str, Any], case: dict[str, Any]) -> Any:
    retained = zlib.crc32(str(case).encode()) % 2  # in a hybrid: the first layer or the second
    layers = (1 - retained,) if case["hybrid"] else None
    model = fw.convert(pretrained(case["family"]), fw.FastWeightsConfig(layers=layers, **settings))
    depend_on_input(model)
    _keep_delta_stable(model, settings)
    return model


@pytest.mark.parametrize("case", _parameters(MATRIX))
def test_parallel_recurrent_and_cached_passes_agree(case: dict[str, Any]) -> None:
    _check_all(dict(m=M) | {name: case[name] for name in ("rule", "feature_map", "normalize")}, case)


@pytest.mark.parametrize("case", _parameters(OPTIONS_MATRIX))
def test_parallel_recurrent_and_cached_passes_agree_with_options(case: dict[str, Any]) -> None:
    _check_all(OPTIONS[case["option"]], case)


@torch.no_grad()
def _check_all(settings: dict[str, Any], case: dict[str, Any]) -> None:
    model = _model(settings, case)
    _check_outputs(model, tokens(2, LENGTH), settings)
    _check_packed(model, tokens(1, LENGTH, seed=1), settings)
    _check_greedy(model)


@pytest.mark.parametrize("case", _parameters(BEAMS_MATRIX))
def test_beam_search_with_cache_matches_without(case: dict[str, Any]) -> None:
    model = _model(BEAM_SETTINGS[case["option"]], case)
    prompts, mask, rows = _unequal_batch()
    options = dict(max_new_tokens=3, num_beams=3, do_sample=False)
    generated = model.generate(prompts, attention_mask=mask, **options)[:, 9:]
    for index, row in enumerate(rows):
        expected = model.generate(row, use_cache=False, **options)[:, row.shape[1] :]
        assert generated[index].tolist() == expected[0].tolist(), f"beams of row {index}"


@torch.no_grad()
def _keep_delta_stable(model: Any, settings: dict[str, Any]) -> None:
    """Keys longer than sqrt(2 / g), which only sum and unit normalization prevent, make the delta rules diverge, on
    every path alike."""
    if settings["rule"] in DELTA_RULES and settings.get("normalize") in ("none", "attention"):
        for name, parameter in model.named_parameters():
            if "rule.projections.q" in name or "rule.projections.k" in name:
                parameter *= 0.3
            if settings["rule"] == "gated_delta" and "rule.gates.g.bias" in name:  # its steps are larger than delta's
                parameter.fill_(math.log(DELTA_GATE))


def _tolerance(model: Any, ids: Tensor, settings: dict[str, Any]) -> float:
    """Features of either sign can sum to a divisor near zero. There float32 is the limit: four times the
    error of its plain loop against float64."""
    if settings.get("feature_map") not in ("none", "rfa") or "attention" not in settings["normalize"]:
        return TOLERANCE
    with fw.ops.use_backend("loop"):
        found, exact = model(ids, use_cache=True), copy.deepcopy(model).double()(ids, use_cache=True)
    return min(2e-3, max(TOLERANCE, 4 * float((found.logits - exact.logits).norm() / exact.logits.norm())))


def _state(cache: Any, settings: dict[str, Any]) -> Tensor:
    """The state of all converted layers; window entries not yet filled count as zero."""
    parts = []
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            seen = layer.tensors.get("mask", torch.ones(1, 1))[..., None, None]
            tensors = dict(layer.tensors)
            if settings["rule"] in SLOT_RULES:  # totals far larger than the rest would hide it
                state = tensors["state"]
                tensors["state"] = torch.cat([state[:, :, :-1], state[:, :, -1:].log1p()], dim=2)
            parts += [t * seen if name in "kv" else t for name, t in tensors.items() if name != "mask"]
    return torch.cat([part.float().flatten() for part in parts])


def _check_outputs(model: Any, ids: Tensor, settings: dict[str, Any]) -> None:
    tolerance = _tolerance(model, ids, settings)
    with fw.ops.use_backend("loop"):
        truth = model(ids, use_cache=True)
    expected, state = truth.logits, _state(truth.past_key_values, settings)
    for way, (logits, cache) in {
        "chunked": _in_chunks(model, ids, [LENGTH]),
        "step by step": _in_chunks(model, ids, [1] * LENGTH),
        "split": _in_chunks(model, ids, _random_split(LENGTH)),
        "left-padded": _left_padded(model, ids, [LENGTH]),
        "left-padded, split": _left_padded(model, ids, _random_split(LENGTH + 5)),
    }.items():
        assert_close(f"logits, {way}", logits, expected, tolerance)
        assert_close(f"state, {way}", _state(cache, settings), state, tolerance)


def _random_split(length: int) -> list[int]:
    points = sorted(random.Random(length).sample(range(1, length), 4))
    return [b - a for a, b in itertools.pairwise([0, *points, length])]


def _in_chunks(model: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> tuple[Tensor, Any]:
    cache, logits, end = None, [], 0
    for size in sizes:
        end += size
        masks = {} if mask is None else {"attention_mask": mask[:, :end]}
        out = model(ids[:, end - size : end], past_key_values=cache, use_cache=True, **masks)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, dim=1), cache


def _left_padded(model: Any, ids: Tensor, sizes: list[int]) -> tuple[Tensor, Any]:
    padding = 5
    sizes = [sizes[0] + padding] if len(sizes) == 1 else sizes
    padded = torch.cat([torch.zeros(len(ids), padding, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(padded.shape[1]) >= padding).long().expand_as(padded)
    logits, cache = _in_chunks(model, padded, sizes, mask)
    return logits[:, padding:], cache


def _check_packed(model: Any, ids: Tensor, settings: dict[str, Any]) -> None:
    first, tolerance = 14, _tolerance(model, ids, settings)
    positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])[None]
    apart = torch.cat([model(ids[:, :first]).logits, model(ids[:, first:]).logits], dim=1)
    assert_close("logits, packed documents", model(ids, position_ids=positions).logits, apart, tolerance)


def _unequal_batch() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Two prompts of different lengths: left-padded ids and mask, and each prompt by itself."""
    rows = [tokens(1, length, seed=length) for length in (9, 5)]
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, 9 - row.shape[1] :], mask[index, 9 - row.shape[1] :] = row[0], 1
    return ids, mask, rows


def _check_greedy(model: Any) -> None:
    ids, mask, rows = _unequal_batch()
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)[:, 9:]
    for index, row in enumerate(rows):
        whole = torch.cat([row, generated[index : index + 1]], dim=1)
        with fw.ops.use_backend("loop"):
            best = model(whole).logits[:, row.shape[1] - 1 : -1].argmax(-1)
        assert generated[index].tolist() == best[0].tolist(), f"greedy tokens of row {index}"


def test_product_has_every_combination_the_config_accepts() -> None:
    """A combination that the config newly refuses must not shrink the product unnoticed."""
    by_rule = {rule: sum(settings["rule"] == rule for settings in DEFINED) for rule in RULES}
    assert by_rule.pop("abc") == by_rule.pop("linformer") == by_rule.pop("local") == 1
    assert by_rule == {"decay": 6, "gated": 20, "delta": 26, "gated_delta": 16, "add": 20}
    assert len(CONFIGS) == 10 and VOCAB > 2
    assert {name: len(matrix) for name, matrix in MATRICES.items()} == {"settings": 1820, "options": 380, "beams": 140}


@pytest.mark.parametrize("matrix", MATRICES)
def test_default_cases_cover_every_valid_pair(matrix: str) -> None:
    cases = MATRICES[matrix]
    default = [case.values[0] for case in _parameters(cases) if not case.marks]
    covered = set().union(*(pairs_of(case) for case in default))
    assert covered == set().union(*(pairs_of(case) for case in cases))
    assert len(default) < len(cases)
