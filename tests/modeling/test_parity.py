"""Every way of running a converted model gives the same answer: loop = chunked = step by step through the cache = split
at random points = left-padded batch = packed documents, for rules x feature maps x normalisations x families x
(all layers, one layer kept as attention); and generate picks the same tokens on each of these ways."""

from __future__ import annotations

import copy
import itertools
import random
import zlib
from typing import Any

import pytest
import torch
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, VOCAB, pretrained, tokens
from torch import Tensor

import fastweights as fw
from fastweights.config import FEATURE_MAPS, NORMALIZERS, RULES, ConfigError
from fastweights.modeling.cache import StateLayer

TOLERANCE = 1e-5
LENGTH = 37
M = 6


def _defined() -> list[dict[str, Any]]:
    """Every combination the config does not refuse, and the settings that change the layer."""
    found = []
    for rule, feature_map, normalize in itertools.product(RULES, FEATURE_MAPS, NORMALIZERS):
        settings = dict(rule=rule, m=M, feature_map=feature_map, normalize=normalize)
        try:
            fw.FastWeightsConfig(**settings)
        except ConfigError:
            continue
        found.append(settings)
    return found


DEFINED = _defined()
OPTIONS = [
    dict(rule="decay", m=M, window=4, output_norm=True),
    dict(rule="decay", m=M, rotary="drop", state_heads="kv", gate_init="log"),
    dict(rule="gated", m=11, state_heads="kv", window=1),
    dict(rule="delta", m=1, state_heads="kv", window=5),
    dict(rule="add", m=M, state_heads="kv", output_norm=True),
    dict(rule="local", window=1),
    dict(rule="local", window=50),
]


def _name(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values())


@pytest.mark.parametrize("hybrid", [False, True], ids=["full", "hybrid"])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("settings", DEFINED + OPTIONS, ids=_name)
def test_every_way_of_running_agrees(settings: dict[str, Any], family: str, hybrid: bool) -> None:
    kept = zlib.crc32(f"{_name(settings)} {family}".encode()) % 2  # now the first layer, now the second
    layers = (1 - kept,) if hybrid else None
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(layers=layers, **settings))
    _give_gates_an_input(model)
    with torch.no_grad():
        _keep_delta_stable(model, settings)
        _check_outputs(model, tokens(2, LENGTH), settings)
        _check_packed(model, tokens(1, LENGTH, seed=1), settings)
        _check_greedy(model)
        _check_beams(model)


def _give_gates_an_input(model: Any) -> None:
    """Gates start independent of the token; make them depend on it."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".gates." in name and name.endswith("weight"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def _keep_delta_stable(model: Any, settings: dict[str, Any]) -> None:
    """Without sum normalisation the delta rule diverges for keys longer than sqrt(2 / g), on every path alike."""
    if settings["rule"] == "delta" and "sum" not in settings.get("normalize", "sum"):
        for name, parameter in model.named_parameters():
            if "rule.projections.q" in name or "rule.projections.k" in name:
                parameter *= 0.3


def _tolerance(model: Any, ids: Tensor, settings: dict[str, Any]) -> float:
    """Features of either sign can sum to a divisor near zero. There float32 itself is the limit: what its plain loop
    misses against float64, times four."""
    if settings.get("feature_map") not in ("none", "rfa") or "attention" not in settings["normalize"]:
        return TOLERANCE
    with fw.ops.use_backend("loop"):
        found, exact = model(ids, use_cache=True), copy.deepcopy(model).double()(ids, use_cache=True)
    return min(2e-3, max(TOLERANCE, 4 * float((found.logits - exact.logits).norm() / exact.logits.norm())))


def _state(cache: Any) -> Tensor:
    """All that the converted layers keep; what a window has not seen counts as nothing."""
    parts = []
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            seen = layer.tensors.get("mask", torch.ones(1, 1))[..., None, None]
            parts += [t * seen if name in "kv" else t for name, t in layer.tensors.items() if name != "mask"]
    return torch.cat([part.float().flatten() for part in parts])


def _check_outputs(model: Any, ids: Tensor, settings: dict[str, Any]) -> None:
    tolerance = _tolerance(model, ids, settings)
    with fw.ops.use_backend("loop"):
        truth = model(ids, use_cache=True)
    expected, state = truth.logits, _state(truth.past_key_values)
    for way, (logits, cache) in {
        "chunked": _in_pieces(model, ids, [LENGTH]),
        "step by step": _in_pieces(model, ids, [1] * LENGTH),
        "split": _in_pieces(model, ids, _random_split(LENGTH)),
        "left-padded": _left_padded(model, ids, [LENGTH]),
        "left-padded, split": _left_padded(model, ids, _random_split(LENGTH + 5)),
    }.items():
        assert_close(f"logits, {way}", logits, expected, tolerance)
        assert_close(f"state, {way}", _state(cache), state, tolerance)


def _random_split(length: int) -> list[int]:
    points = sorted(random.Random(length).sample(range(1, length), 4))
    return [b - a for a, b in itertools.pairwise([0, *points, length])]


def _in_pieces(model: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> tuple[Tensor, Any]:
    cache, logits, end = None, [], 0
    for size in sizes:
        end += size
        piece = {} if mask is None else {"attention_mask": mask[:, :end]}
        out = model(ids[:, end - size : end], past_key_values=cache, use_cache=True, **piece)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, dim=1), cache


def _left_padded(model: Any, ids: Tensor, sizes: list[int]) -> tuple[Tensor, Any]:
    padding = 5
    sizes = [sizes[0] + padding] if len(sizes) == 1 else sizes
    padded = torch.cat([torch.zeros(len(ids), padding, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(padded.shape[1]) >= padding).long().expand_as(padded)
    logits, cache = _in_pieces(model, padded, sizes, mask)
    return logits[:, padding:], cache


def _check_packed(model: Any, ids: Tensor, settings: dict[str, Any]) -> None:
    first, tolerance = 14, _tolerance(model, ids, settings)
    positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])[None]
    apart = torch.cat([model(ids[:, :first]).logits, model(ids[:, first:]).logits], dim=1)
    assert_close("logits, packed documents", model(ids, position_ids=positions).logits, apart, tolerance)


def _unequal_batch() -> tuple[Tensor, Tensor, list[Tensor]]:
    texts = [tokens(1, length, seed=length) for length in (9, 5)]
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, 9 - text.shape[1] :], mask[row, 9 - text.shape[1] :] = text[0], 1
    return ids, mask, texts


def _check_greedy(model: Any) -> None:
    ids, mask, texts = _unequal_batch()
    made = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)[:, 9:]
    for row, text in enumerate(texts):
        whole = torch.cat([text, made[row : row + 1]], dim=1)
        with fw.ops.use_backend("loop"):
            best = model(whole).logits[:, text.shape[1] - 1 : -1].argmax(-1)
        assert made[row].tolist() == best[0].tolist(), f"greedy tokens of row {row}"


def _check_beams(model: Any) -> None:
    ids, mask, texts = _unequal_batch()
    options = dict(max_new_tokens=3, num_beams=3, do_sample=False)
    made = model.generate(ids, attention_mask=mask, **options)[:, 9:]
    for row, text in enumerate(texts):
        again = model.generate(text, use_cache=False, **options)[:, text.shape[1] :]
        assert made[row].tolist() == again[0].tolist(), f"beams of row {row}, with the state and without it"


def test_the_matrix_is_whole() -> None:
    """A refused combination must not shrink the matrix unnoticed."""
    by_rule = {rule: sum(settings["rule"] == rule for settings in DEFINED) for rule in RULES}
    assert by_rule == {"decay": 6, "gated": 20, "delta": 20, "add": 20, "local": 1}
    assert len(CONFIGS) == 9 and VOCAB > 2
