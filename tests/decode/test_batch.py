"""Continuous batching: whatever joins and leaves, each sequence has the tokens, states and logits that it has alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.engine import SETTINGS, converted, name, prompts_of
from helpers.relative_error import assert_close
from helpers.tiny import tokens

import fastweights as fw
from fastweights.decode.batch import Batch, Border, End, Event, Generation, GenerationError, Snapshot, Token
from fastweights.decode.device_sampler import MODES
from fastweights.decode.prefill import prefill

SAMPLINGS = [
    fw.Sampling(),
    fw.Sampling(temperature=1.5, seed=5),
    fw.Sampling(top_k=9, top_p=0.9, seed=6),
    fw.Sampling(repetition_penalty=1.4),
]
OVERLAP = pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapping"])


def batch_of(model: Any, slots: int, overlaps: bool = False, **options: Any) -> Batch:
    """A batch that works as on a GPU if it overlaps: a step starts before the tokens of the last one are read."""
    batch = fw.Engine(model, slots, **options).batch
    batch.overlaps = overlaps
    batch.prepare(MODES)
    return batch


def generation_of(prompt: Any, count: int = 5, sampling: fw.Sampling | None = None, **options: Any) -> Generation:
    sampling = sampling or fw.Sampling()
    stops = options.pop("stops", ())
    return Generation(torch.as_tensor(prompt, dtype=torch.long), count, sampling, sampling.seed or 0, stops, **options)


def run(batch: Batch, *generations: Generation) -> dict[Generation, list[Event]]:
    """The events of sequences that are added at once."""
    for generation in generations:
        batch.add(generation)
    events: dict[Generation, list[Event]] = {generation: [] for generation in generations}
    while batch.busy:
        for generation, event in batch.step():
            events[generation].append(event)
    assert batch.free == len(batch.slots)
    return events


def ids_of(events: list[Event]) -> list[int]:
    return [event.id for event in events if isinstance(event, Token)]


# equality


@OVERLAP
@pytest.mark.parametrize("settings", [SETTINGS[1], dict(m=6, layers=(0,))], ids=name)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_what_joins_and_leaves(seed: int, settings: dict[str, Any], overlaps: bool) -> None:
    """Sequences join at random steps; some are removed or ended early and have the first of their tokens alone."""
    model, chance = converted(**settings), random.Random(seed)
    engine = fw.Engine(model, max_length=60)
    batch = batch_of(model, 3, overlaps, prefill_chunk=4, max_length=60)
    waiting, expected, events, left_early = [], {}, {}, set()
    for i in range(12):
        prompt, sampling, count = tokens(chance.randint(1, 20), seed=i), chance.choice(SAMPLINGS), chance.randint(1, 9)
        wanted = dict(final_snapshot=chance.random() < 0.5, top_logprobs=chance.choice([None, None, 3]))
        generation = generation_of(prompt, count, sampling, **wanted)
        waiting.append(generation)
        expected[generation] = engine.generate([prompt], count, [sampling])[0]
        events[generation] = []
    while waiting or batch.busy:
        while waiting and batch.free and chance.random() < 0.6:
            batch.add(waiting.pop())
        running = [generation for generation in (*batch.slots, *batch.readers) if generation is not None]
        if running and chance.random() < 0.15:
            leaving = chance.choice(running)
            left_early.add(leaving)
            if chance.random() < 0.5:
                batch.remove(leaving)
            else:
                batch.finish(leaving, "deadline")
        for generation, event in batch.step():
            events[generation].append(event)
    assert batch.free == 3 and left_early
    for generation, found in events.items():
        new = ids_of(found)
        assert new == (expected[generation][: len(new)] if generation in left_early else expected[generation])
        ends = [event for event in found if isinstance(event, End)]
        assert ends == found[-1:] or (generation in left_early and not ends)
        if ends and generation.final_snapshot and new:
            check_snapshot(model, ends[0].snapshot, torch.cat([generation.prompt, torch.tensor(new)]))


def check_snapshot(model: Any, snapshot: Snapshot | None, ids: torch.Tensor) -> None:
    """A snapshot after ids [T]."""
    assert snapshot is not None and snapshot.state.is_start_of(ids[None]) and int(snapshot.state.seen) == len(ids)
    logits, _ = prefill(model, ids)
    assert snapshot.logits is not None and snapshot.logits.dtype == torch.float32
    assert_close("logits", snapshot.logits, logits[0].float(), 1e-4)
    more = tokens(3, seed=4)
    expected, _ = prefill(model, torch.cat([ids, more]))
    assert_close("logits after more", prefill(model, more, snapshot.state.fork())[0], expected, 1e-4)


@OVERLAP
def test_stop_token_is_the_last_one_and_is_in_the_final_snapshot(overlaps: bool) -> None:
    model, (prompt,) = converted(), prompts_of(5)
    (whole,) = fw.Engine(model).generate([prompt], 8)
    stop = next(token for i, token in enumerate(whole) if i > 1 and token not in whole[:i])
    generation = generation_of(prompt, 8, stops={stop}, final_snapshot=True)
    *_, end = run(batch_of(model, 2, overlaps), generation)[generation]
    new = whole[: whole.index(stop) + 1]
    assert generation.new_tokens == new and end.finish_reason == "stop"
    check_snapshot(model, end.snapshot, torch.cat([prompt, torch.tensor(new)]))


def test_log_probabilities_are_those_of_the_logits_before_sampling() -> None:
    model, (prompt, other) = converted(m=6, window=3), prompts_of(5, 9)
    sampled = fw.Sampling(temperature=2.0, top_k=20, repetition_penalty=1.3, seed=3)
    for overlaps in (False, True):
        three, none, zero = (
            generation_of(ids, 6, sampled, top_logprobs=top) for ids, top in ((prompt, 3), (other, None), (other, 0))
        )
        events = run(batch_of(model, 3, overlaps), three, none, zero)
        for generation in (three, zero):
            sequence = generation.prompt
            for event in events[generation][:-1]:
                with torch.no_grad():
                    expected = model(sequence[None]).logits[0, -1].log_softmax(-1)
                assert event.logprob == pytest.approx(float(expected[event.id]), abs=1e-4)
                values, ids = expected.topk(generation.top_logprobs)
                assert [token for token, _ in event.top] == ids.tolist()
                assert [value for _, value in event.top] == pytest.approx(values.tolist(), abs=1e-4)
                sequence = torch.cat([sequence, torch.tensor([event.id])])
        assert all(event == Token(event.id, None, ()) for event in events[none][:-1])


def test_log_probabilities_are_computed_only_when_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = torch.Tensor.log_softmax
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    batch = batch_of(converted(), 2)
    run(batch, generation_of([3, 4]))
    assert not calls
    run(batch, generation_of([3, 4]), generation_of([3, 4], 2, top_logprobs=1))
    assert len(calls) == 2, "in the two steps of the sequence that wants them"


# snapshots


@pytest.mark.parametrize("settings", [SETTINGS[1], dict(m=6, layers=(0,))], ids=name)
def test_snapshot_at_a_border_is_that_of_a_fresh_prefill(settings: dict[str, Any]) -> None:
    model, prompt = converted(**settings), tokens(23)
    generation = generation_of(prompt, 4, borders=(3, 8, 9, 23))
    events = run(batch_of(model, 2, prefill_chunk=8, max_length=60), generation)[generation]
    borders = [event for event in events if isinstance(event, Border)]
    assert [border.count for border in borders] == [3, 8, 9, 23] and events[: len(borders)] == borders
    assert generation.new_tokens == fw.Engine(model, max_length=60).generate([prompt], 4)[0]
    for border in borders:
        check_snapshot(model, border.snapshot, prompt[: border.count])


def test_empty_prompt_continues_from_stored_logits() -> None:
    """Two continuations of one snapshot are those of the whole prompt, and leave it as it is."""
    model, (prompt,) = converted(), prompts_of(7)
    logits, state = prefill(model, prompt)
    engine, batch = fw.Engine(model), batch_of(model, 2)
    for sampling in SAMPLINGS[:3]:
        generations = [generation_of([], 6, sampling, state=state.fork(), logits=logits) for _ in range(2)]
        run(batch, *generations)
        expected = engine.generate([prompt], 6, [sampling])[0]
        assert [generation.new_tokens for generation in generations] == [expected, expected]


def test_prompt_is_only_read_without_new_tokens() -> None:
    model, prompt = converted(), tokens(9)
    generation = generation_of(prompt, 0, borders=(4,), final_snapshot=True)
    batch = batch_of(model, 1, prefill_chunk=5)
    border, end = run(batch, generation)[generation]
    assert (border.count, end.finish_reason, batch.steps) == (4, "length", 0)
    check_snapshot(model, border.snapshot, prompt[:4])
    check_snapshot(model, end.snapshot, prompt)
    nothing = generation_of([], 0, state=end.snapshot.state.fork(), logits=end.snapshot.logits[None])
    assert [type(event) for event in run(batch, nothing)[nothing]] == [End]


# prompts are read between steps


def test_running_text_gets_a_token_in_every_step_while_a_long_prompt_is_read() -> None:
    batch = batch_of(converted(), 3, prefill_chunk=4)
    running, long = generation_of([5, 6], 100), generation_of(tokens(60), 1)
    batch.add(running)
    batch.step()
    batch.add(long)
    for step in range(15):
        assert not long.new_tokens and len(running.new_tokens) == step + 1
        before = batch.read_tokens
        batch.step()
        assert batch.read_tokens - before == 4, "one chunk between two steps"
    assert len(long.new_tokens) == 1


@pytest.mark.parametrize("step_of_arrival", range(4))
def test_short_prompt_gets_its_first_token_within_two_steps_while_long_ones_are_read(step_of_arrival: int) -> None:
    batch = batch_of(converted(), 4, prefill_chunk=4)
    for seed in range(2):
        batch.add(generation_of(tokens(200, seed=seed), 1))
    for _ in range(step_of_arrival):
        batch.step()
    short = generation_of([5, 6, 7], 2)
    batch.add(short)
    batch.step()
    batch.step()
    assert short.new_tokens


def test_long_prompt_is_read_although_short_ones_never_end() -> None:
    batch = batch_of(converted(), 2, prefill_chunk=4)
    long = generation_of(tokens(40), 1)
    batch.add(long)
    for step in range(22):
        if batch.free:
            batch.add(generation_of(tokens(4, seed=step), 1))
        batch.step()
    assert long.new_tokens


def test_short_prompts_are_read_together_up_to_one_chunk() -> None:
    batch = batch_of(converted(), 8, prefill_chunk=16)
    generations = [generation_of(tokens(4, seed=i), 9) for i in range(8)]
    for generation in generations:
        batch.add(generation)
    batch.step()
    assert sum(bool(generation.new_tokens) for generation in generations) == 4
    batch.step()
    assert all(generation.new_tokens for generation in generations)


# errors


@OVERLAP
def test_error_of_one_sequence_leaves_the_others_alone(overlaps: bool) -> None:
    """NaN in a state shows after the prompt, or after a step; a model that fails shows while a prompt is read."""
    model, (prompt, other) = converted("gpt2"), prompts_of(5, 9)
    expected = fw.Engine(model).generate([prompt], 9)[0]
    state = prefill(model, other)[1]
    for layer in state.layers:
        layer.tensors["state"].fill_(torch.nan)
    bad = generation_of([3], 5, state=state)
    late = generation_of([], 5, state=state.fork(), logits=torch.zeros(1, 61))
    border = generation_of([3, 4], 5, state=state.fork(), borders=(1,))
    too_long = generation_of(tokens(97), 5)
    good = generation_of(prompt, 9)
    events = run(batch_of(model, 5, overlaps), bad, late, border, too_long, good)
    assert ids_of(events[good]) == expected
    for failed, count in ((bad, 0), (late, 1), (border, 0), (too_long, 0)):
        *before, end = events[failed]
        assert len(before) == count and end.finish_reason == "error" and end.snapshot is None
    for failed, message in ((bad, "NaN after 0 new tokens"), (late, "NaN after 1 new tokens"), (border, "NaN")):
        error = events[failed][-1].error
        assert isinstance(error, GenerationError) and message in str(error)
    assert "learned positions for 96 tokens" in str(events[too_long][-1].error)


def test_sequence_that_left_is_ignored() -> None:
    batch = batch_of(converted(), 1)
    generation, other = generation_of([3], 1), generation_of([4], 3)
    run(batch, generation)
    batch.add(other)
    batch.step()
    for _ in range(2):
        batch.remove(generation)
        batch.finish(generation, "deadline")
    assert [type(event) for _, event in batch.step()] == [Token] and batch.slots == [other]
