"""Costs are those of real caches; where one model becomes cheaper is what a hand would find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny import pretrained, tokens

from fastweights.config import ConfigError, FastWeightsConfig
from fastweights.conversion import convert
from fastweights.modeling.description import describe
from fastweights.modeling.positions import PositionError
from fastweights.profiling import model_cost as profiling
from fastweights.profiling.model_cost import STRETCHED, cheaper_from, decode_cost, stretched
from fastweights.report.cost import cost_panel
from fastweights.results import CostPoint, CostResult, SkippedLength

Points = list[CostPoint]


def converted(family: str, **settings: Any) -> Any:
    return convert(pretrained(family), FastWeightsConfig(**dict(m=8) | settings))


def cost(models: dict[str, Any], lengths: tuple[int, ...], **options: Any) -> CostResult:
    return decode_cost(models, lengths, timed_tokens=2, progress=False, **options)


def points_of(result: CostResult, name: str) -> Points:
    return next(entry.points for entry in result.models if entry.name == name)


def curve(*pairs: tuple[int, float]) -> Points:
    return [CostPoint(length=length, seconds=value, bytes=0) for length, value in pairs]


def test_bytes_are_the_state_and_the_keys_and_values() -> None:
    base, decay = pretrained("llama"), converted("llama", window=5)
    result = cost({"base": base, "decay": decay}, (20, 10))
    config = base.config
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert [(p.length, p.bytes) for p in points_of(result, "base")] == [
        (10, 10 * token_bytes),
        (20, 20 * token_bytes),
    ]
    with torch.no_grad():
        cache = decay(tokens(1, 20), use_cache=True).past_key_values
    assert {p.bytes for p in points_of(result, "decay")} == {cache.nbytes} == {describe(decay).state_bytes}
    assert all(p.seconds > 0 for name in ("base", "decay") for p in points_of(result, name))


def test_hybrid_caches_states_and_keys() -> None:
    hybrid = converted("gpt2", layers=(1,))
    result = cost({"hybrid": hybrid}, (10,))
    [point] = points_of(result, "hybrid")
    assert result.models[0].how == "engine"
    assert point.bytes == describe(hybrid).state_bytes + 10 * 2 * 32 * 4


def test_long_prefill_is_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.profiling.model_cost.CHUNK", 8)
    base = pretrained("llama")
    read: list[int] = []
    base.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    whole = points_of(cost({"base": base}, (20,)), "base")
    assert read == [8, 8, 4, 1, 1, 1]
    monkeypatch.undo()
    assert points_of(cost({"base": pretrained("llama")}, (20,)), "base")[0].bytes == whole[0].bytes


def test_models_are_timed_alternately() -> None:
    models = {"a": pretrained("llama"), "b": pretrained("gpt2")}  # both by their own forward
    order: list[str] = []
    for name, model in models.items():
        model.register_forward_pre_hook(lambda _, args, name=name: order.append(name))
    cost(models, (10,))
    assert order == ["a", "b"] * 4  # the text, the token for warming up, two timed ones


def test_result_records_conditions_and_crossings() -> None:
    result = cost({"base": pretrained("llama"), "decay": converted("llama")}, (1, 2, 400))
    assert (result.kind, result.seed, result.tokens) == ("cost", 0, 2)
    assert [entry.converted for entry in result.models] == [False, True]
    # 256 bytes of keys and values a token, a state of 2048 bytes: smaller from the ninth token on
    assert result.cheaper_from["bytes"] == 9
    assert result.models[1].cheaper_from == result.cheaper_from
    assert cost({"decay": converted("llama")}, (2,)).cheaper_from == dict.fromkeys(profiling.COMPARED)


def test_crossing_of_the_peaks_is_marked_in_the_plot() -> None:
    result = cost({"base": pretrained("llama"), "decay": converted("llama")}, (1, 400))
    start = cheaper_from(points_of(result, "base"), points_of(result, "decay"), "peak_bytes")
    assert start is not None and 1 < start < 400
    assert result.cheaper_from["peak_bytes"] == result.models[1].cheaper_from["peak_bytes"] == start
    [(length, _)] = cost_panel(result, "peak_bytes").circles
    assert length == start


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])  # the second has masks
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma3_text", "gpt_neox", "opt"])
def test_static_cache_step_equals_the_model(family: str, implementation: str) -> None:
    model, ids = pretrained(family), tokens(2, 21)  # windows of 7 in two of them
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        cache = model(ids[:, :20], use_cache=True).past_key_values
        step = profiling._forward_step(model, cache, ids[:, 20:])
        for _ in range(2):  # the same place again
            torch.testing.assert_close(step(), expected)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("layers", [None, (0,)], ids=["all", "hybrid"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_engine_step_equals_the_model(family: str, layers: tuple[int, ...] | None) -> None:
    model, ids = converted(family, window=5, layers=layers), tokens(2, 21)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        cache = model(ids[:, :20], use_cache=True).past_key_values
        found = profiling._engine_step(profiling.make_decode_model(model, 2, max_length=21), cache, ids[:, 20:])()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_timed_step_computes_no_attention_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Any] = []
    attention = profiling.sdpa_attention_forward

    def noted(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        masks.append(mask)
        return attention(module, q, k, v, mask, **options)

    monkeypatch.setitem(profiling.AttentionInterface._global_mapping, profiling.UNMASKED, noted)
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    cost({"base": pretrained("llama")}, (10,))
    assert masks == [None] * 2 * 3  # two layers; the token for warming up, two timed ones


def test_peak_is_the_cache_and_what_a_step_allocates() -> None:
    models = {"base": pretrained("llama"), "decay": converted("llama", window=5)}
    for entry in cost(models, (10, 200)).models:
        needs = [point.peak_bytes - point.bytes for point in entry.points]
        # a cache that grows by copying would need as much again as it keeps
        assert 0 < needs[0] <= needs[1] < 2 * needs[0]
        assert entry.how == ("engine" if entry.converted else "eager")


def test_rounded_weights_are_the_converted_models_alone_and_recorded() -> None:
    models = {"base": pretrained("llama"), "decay": converted("llama")}
    result = decode_cost(models, (4,), timed_tokens=1, weights="int8", progress=False)
    assert result.weights == "int8"
    assert [len(entry.points) for entry in result.models] == [1, 1]
    with pytest.raises(ConfigError, match="weights must be one of int8, bfloat16, found 'int4'"):
        decode_cost(models, (4,), weights="int4")


def test_cache_grows_with_the_batch() -> None:
    models = {"base": pretrained("llama"), "decay": converted("llama")}
    one, three = (cost(models, (10,), batch=batch) for batch in (1, 3))
    assert three.batch == 3
    for name in models:
        [alone], [together] = points_of(one, name), points_of(three, name)
        assert together.bytes == 3 * alone.bytes


def test_prefill_tokens_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    base, read = pretrained("llama"), []
    base.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    cost({"base": base}, (40,))
    assert len(read[0].unique()) > 10


def test_a_length_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    read = profiling._cache_after

    def full(model: Any, length: int, batch: int) -> Any:
        if length > 10 and model is base:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nSee")
        return read(model, length, batch)

    base = pretrained("llama")
    monkeypatch.setattr(profiling, "_cache_after", full)
    result = cost({"base": base, "decay": converted("llama")}, (10, 20))
    assert [p.length for p in points_of(result, "base")] == [10]
    assert result.models[0].left_out == [
        SkippedLength(length=20, reason="out of memory: CUDA out of memory. Tried to allocate 9 GiB.")
    ]
    assert [p.length for p in points_of(result, "decay")] == [10, 20]


def test_cpu_memory_is_checked_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 10_000}))
    models = {"base": pretrained("llama"), "decay": converted("llama"), "hybrid": converted("llama", layers=(1,))}
    base, decay, hybrid = cost(models, (10, 30, 400)).models
    # 256 bytes a token, of which the hybrid keeps half beside a state of 1024, three times while its engine is filled
    assert [p.length for p in base.points] == [10, 30]
    assert base.left_out == [
        SkippedLength(length=400, reason="out of memory: 102.7 kB are needed and 10.0 kB are free"),
    ]
    assert [p.length for p in decay.points] == [10, 30, 400] and decay.left_out == []
    assert [p.length for p in hybrid.points] == [10]
    assert hybrid.left_out[0].reason == "out of memory: 15.0 kB are needed and 10.0 kB are free"


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma3_text"])  # the last two have windows of 7
def test_checked_memory_equals_the_cache(family: str) -> None:
    hybrid, base = converted(family, window=5, layers=(0,)), pretrained(family)
    for model, copies in ((base, 1), (hybrid, 3)):
        with torch.no_grad():
            cached = profiling.cached_bytes(profiling._cache_after(model, 21, batch=2))
        assert profiling._needed_bytes(model, 20, batch=2) == copies * cached


def test_training_mode_is_restored() -> None:
    base, decay = pretrained("gpt2").train(), converted("gpt2")
    cost({"base": base, "decay": decay}, (4,))
    assert base.training and not decay.training
    assert base.transformer.h[0].training


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_lengths_past_a_position_table_are_left_out_unless_stretched(family: str) -> None:
    models = {"base": pretrained(family), "decay": converted(family), "clamp": converted(family, positions="clamp")}
    result = cost(models, (90, 120))  # the tables have 96 rows
    assert [[p.length for p in points_of(result, name)] for name in models] == [[90], [90], [90, 120]]
    assert result.models[0].left_out == [SkippedLength(length=120, reason="the position table ends at 96")]
    result = cost(models, (90, 250), stretch_positions=True)
    assert [[p.length for p in points_of(result, name)] for name in models] == [[90, 250]] * 3
    assert [entry.positions for entry in result.models] == [STRETCHED, STRETCHED, None]
    short, long = (p.bytes for p in points_of(result, "base"))
    assert long * 90 == short * 250


def test_length_whose_stretched_table_does_not_fit_into_memory_is_left_out() -> None:
    result = cost({"base": pretrained("gpt2"), "decay": converted("gpt2")}, (4, 10**14), stretch_positions=True)
    for entry in result.models:
        assert [point.length for point in entry.points] == [4]
        assert [left_out.length for left_out in entry.left_out] == [10**14]
        assert entry.left_out[0].reason.startswith("out of memory: ")


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_stretched_model_equals_the_model_within_its_table(family: str) -> None:
    model = pretrained(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = stretched(model, 300)
    ids = tokens(1, 60)
    with torch.no_grad():
        torch.testing.assert_close(twin(ids).logits, model(ids).logits)
    assert model.config.max_position_embeddings == 96 and twin.config.max_position_embeddings == 300
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    shared = {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    assert len(shared) == len(list(model.parameters())) - 1  # all but the table
    assert stretched(model, 96) is model


def test_invalid_arguments_are_refused_by_name() -> None:
    base = pretrained("gpt2")
    with pytest.raises(PositionError, match=r"base: .* 201: .* positions for 96 .* stretch_positions=True"):
        cost({"base": base}, (200, 300))
    with pytest.raises(ConfigError, match="found none"):
        cost({}, (10,))
    for lengths in ((), (0, 4)):
        with pytest.raises(ConfigError, match="lengths must be"):
            cost({"base": base}, lengths)
    with pytest.raises(ConfigError, match="timed_tokens must be at least 1, found 0"):
        decode_cost({"base": base}, (4,), timed_tokens=0)
    with pytest.raises(ConfigError, match="batch must be at least 1, found 0"):
        cost({"base": base}, (4,), batch=0)


@pytest.mark.parametrize(
    ("base", "decay", "expected"),
    [
        # base grows by 1 from 0 a token, decay is flat at 15: equal at 15, less from 16 on
        (curve((10, 10), (20, 20), (30, 30)), curve((10, 15), (20, 15), (30, 15)), 16),
        # the crossing lies between two tokens
        (curve((10, 10), (20, 20)), curve((10, 14.5), (20, 14.5)), 15),
        (curve((10, 10), (20, 20)), curve((10, 5), (20, 5)), 10),
        (curve((10, 10), (20, 20)), curve((10, 25), (20, 25)), None),
        # less, then more again: only what lasts counts
        (curve((10, 10), (20, 20), (30, 30), (40, 40)), curve((10, 5), (20, 5), (30, 35), (40, 35)), 36),
        (curve((10, 10), (20, 20)), curve((10, 5), (20, 20)), None),
        # equal at a measured length
        (curve((10, 10), (20, 20)), curve((10, 10), (20, 10)), 11),
        # measured at different lengths: only those in common count, in whatever order
        (curve((20, 20), (10, 10)), curve((30, 1), (20, 15), (10, 15), (5, 1)), 16),
        (curve((10, 10)), curve((20, 5)), None),
        ([], [], None),
    ],
)
def test_cheaper_from_interpolates_between_lengths(base: Points, decay: Points, expected: int | None) -> None:
    assert cheaper_from(base, decay, "seconds") == expected
