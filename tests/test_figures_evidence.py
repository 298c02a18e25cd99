"""Figures of the evidence in sentences and in README's table: SmolLM2 made recurrent, and the paper's comparison."""

from __future__ import annotations

from math import ceil

import pytest
from figures import ROOT, WORDS, Json, after_stage, folder, million, rate, result, says

from fastweights.grid import load_grid
from fastweights.recipe import Recipe

SMOLLM2, PAPER = "docs/smollm2.md", "docs/paper.md"


def measured(name: str, among: str = "smollm2_") -> tuple[list[float], list[Json], float]:
    """Perplexities of wikitext, held-out wiki and books, those by position, and the mean score of the tasks."""
    text, tasks = (result(f"{among}{name}_{kind}")["models"][0] for kind in ("text", "tasks"))
    scores = [task.get("acc_norm", task.get("acc")) for task in tasks["tasks"].values()]
    return [row["token"] for row in text["perplexity"]], text["by_position"], sum(scores) / len(scores)


def test_the_readme_has_smollm2s_results() -> None:
    readme, (tuned, _, _) = (ROOT / "README.md").read_text(), measured("tuned")
    for name in ("base", "tuned", "decay", "window", "hybrid"):
        found, _, score = measured(name)
        compared = name not in ("base", "tuned")
        cells = [f"{x:.2f}, {x / t:.2f} ×" if compared else f"{x:.2f}" for x, t in zip(found, tuned, strict=True)][1:]
        row = f"(results/smollm2_{name}_tasks.json)) | {cells[0]} | {cells[1]} | {100 * score:.1f} % |"
        assert row in readme, row


def test_quality_of_smollm2s_long_runs() -> None:
    (tuned, by_position, _), found = measured("tuned"), [measured(name) for name in ("decay", "window", "hybrid")]
    a, b, c = (f"{texts[1] / tuned[1]:.2f} and {texts[2] / tuned[2]:.2f}" for texts, _, _ in found)
    positions = [
        [row["perplexity"] for row in rows if row["data"] == "wiki.test.raw.xz"]
        for rows in (by_position, found[1][1], found[2][1])
    ]
    (near, *_, far), (first, *others), (*_, hybrid) = positions
    transferred, raised, *_, last = [v["perplexity"] for v in result("smollm2_long/window")["validation"]][1:]
    says(
        SMOLLM2,
        f"{a} times on held-out wiki and books for (a), {b} for (b), {c} for (c)",
        f"falls from {near:.1f} on an article's first 64 tokens to {far:.1f} from token 4,096 on",
        f"starts at {first:.1f} and stays between {min(others):.1f} and {max(others):.1f}",
        f"{hybrid:.1f} from token 4,096 on. Recall",
        f"is {transferred:.2f}; distillation at 1e-3 first raises it to {raised:.2f}",
        f"brings it to {last:.2f}",
    )
    names = ("decay", "window", "hybrid", "base")
    parameters = [result(f"smollm2_{name}_text")["models"][0]["parameters"] for name in names]
    a, b, c, base = (f"{2 * count / 1e6:.0f}" for count in parameters)
    says(SMOLLM2, f"in bfloat16 {a} MB for (a), {b} for (b) and {c} for (c), where the base has {base}")


def test_short_runs_of_smollm2() -> None:
    runs, ranked = folder("smollm2"), result("smollm2_rank")
    reference, best = runs["reference"], {name: run["best"]["perplexity"] for name, run in runs.items()}
    rates = {name: [stage["learning_rate"] for stage in run["recipe"]["stages"]] for name, run in runs.items()}
    transfer, distill = (million(stage["tokens"]) for stage in reference["recipe"]["stages"])
    body, text = runs["body_up"], reference["data"]["tokens"]
    half = [run for run in runs.values() if 0.49 < run["data"]["tokens"] / text < 0.51]
    unread = [run for run in runs.values() if not run.get("tests")]
    sizes = f"{reference['recipe']['length']} tokens a row, {reference['recipe']['batch_tokens']:,} a step"
    low, up, more = (rate(rates[name][1]) for name in ("reference", "rate_up", "rate_up_more"))
    slow, fast = (rate(rates[name][0]) for name in ("reference", "transfer_up"))
    moved, once, again = (f"{after_stage(runs[n], 0):.2f}" for n in ("transfer_up", "reference", "rate_up_more"))
    assert body["best"]["tokens"] < 0.6 * body["tokens"] and body["last"]["perplexity"] > 1.05 * best["body_up"]
    assert best["rate_up_more"] < best["rate_up"] < best["reference"] > best["transfer_up"]
    assert best["cross_entropy_alone"] < best["both_alike"] < best["reference"] < best["divergence_alone"]
    assert best["hidden"] < best["reference"] < best["no_transfer"] and best["reference"] < best["uniform"]
    starts = {name: run["validation"][0]["perplexity"] for name, run in runs.items()}
    first, second, third = ranked["chosen"]
    few = [run for run in runs.values() if len(run.get("tests", [])) == 1]
    moved_by = {name: after_stage(run, 0) for name, run in runs.items() if run in half}
    same_half, parameters = moved_by["rate_up_more"], {n: r["model"]["parameters"] / 1e6 for n, r in runs.items()}
    assert moved_by["output_norm"] < same_half and best["output_norm"] > best["reference"]
    assert moved_by["no_rotary"] > same_half and best["kv_states"] < best["reference"] < best["no_rotary"]
    assert best["random_projections"] > best["uniform"], "worth more than the gates"
    says(
        SMOLLM2,
        f"and were not read there, and {WORDS[len(few)]} read wikitext's test text only",
        f"random ones end at {best['random_projections']:.2f}. m 32 ends at {best['m_32']:.2f}",
        f"(after transfer {moved_by['m_32']:.1f}, where m 64 has {same_half:.1f})",
        f"without it {moved_by['no_rotary']:.2f} after transfer and {best['no_rotary']:.2f} at the end",
        f"{parameters['kv_states']:.0f} M parameters instead of {parameters['reference']:.0f}) ends as well",
        f"one per query head, {best['kv_states']:.2f}",
        f"ahead after transfer ({moved_by['output_norm']:.2f}) and behind at the end ({best['output_norm']:.2f})",
        f"and {WORDS[len(half)]} (those on the other half) cannot",
    )
    says(
        SMOLLM2,
        f"a validation perplexity of {reference['base']['perplexity']:.2f}",
        f"its first step ({starts['window_32']:.2f}) ahead of where the reference is after transfer ({once})",
        f"({starts['reference']:.1f} against {starts['uniform']:.1f})",
        f"chose layers {first}, {second} and {third}",
        f"falls from {ranked['kl']:.3f} to {ranked['kl_after'][-1]:.3f}",
        f"in runs of {million(reference['tokens'])} million tokens",
        f"{million(text)} M tokens of the model's own tokenizer",
        f"(the long runs and {WORDS[len(half)]} of the short ones read one half of it)",
        f"{transfer} M tokens of transfer, then {distill} M of distillation, {sizes}",
        f"windows of {reference['tests'][0]['length']}; {WORDS[len(unread)]} runs had been trained when the time was",
        f"{up} is better than {low}, {more} a little better still; in the transfer {fast} is much better than {slow}",
        f"({moved} after it, where {slow} has {once} and, on the same half of the text, {again})",
        f"ends within {ceil(100 * (best['window_32'] / reference['base']['perplexity'] - 1))} % of the untouched base",
        f"The body at {rate(body['recipe']['stages'][1]['body_learning_rate'])} is too much",
        f"No layer alone is worth more than {max(layer['gain'] for layer in ranked['layers']):.3f}",
    )


def test_long_runs_of_smollm2() -> None:
    runs, tuned = folder("smollm2_long"), result("smollm2_tuned")
    hybrid, layers = result("smollm2_hybrid_tasks")["models"][0]["settings"], result("smollm2_rank")["layers"]
    *few, last = sorted(set(range(len(layers))) - set(hybrid["layers"]))
    recipe, minutes = runs["window"]["recipe"], max(run["seconds"] for run in runs.values()) / 60
    transfer, distill = (million(stage["tokens"]) for stage in recipe["stages"])
    rates = [rate(stage["learning_rate"]) for stage in recipe["stages"]]
    assert all(run["data"]["tokens"] == tuned["data"]["tokens"] for run in runs.values()), "of the same text"
    says(
        SMOLLM2,
        f"longer runs of {million(runs['window']['tokens'])} million tokens",
        f'("tuned": {million(tuned["tokens"])} M tokens',
        f"(a) decay, m {hybrid['m']}, nothing else; (b) the same with an exact window of {hybrid['window']} tokens",
        f"with layers {', '.join(map(str, few))} and {last} left as attention",
        f"Each had {transfer} M tokens of transfer and {distill} M of distillation of the same text",
        f"{recipe['length']:,} a row, {recipe['batch_tokens']:,} a step, the three side by side on one H200",
        f"{minutes:.0f} minutes together; attention at {rates[0]} in the transfer and at {rates[1]} in the",
        f"After {transfer} M tokens of transfer its validation perplexity is",
    )


@pytest.mark.parametrize("grid", ["smollm2", "paper"])
def test_the_shipped_grid_is_what_was_run(grid: str) -> None:
    recipes = {variant.name: variant.recipe for variant in load_grid(grid)}
    for name, run in folder(grid).items():
        assert Recipe.from_dict(run["recipe"]) == recipes[name], name


def test_longer_runs_of_smollm2() -> None:
    runs = {name: result(f"smollm2_longer/{name}") for name in ("tuned", "decay", "window")}
    found = {name: measured(name, "smollm2_longer/") for name in runs}
    tuned, rank, page = found["tuned"][0], result("smollm2_longer/rank"), (ROOT / SMOLLM2).read_text()
    for name, run in runs.items():
        pairs = list(zip(found[name][0], tuned, strict=True))[1:]
        texts = [f"{x:.2f}" if name == "tuned" else f"{x:.2f}, {x / t:.2f} ×" for x, t in pairs]
        cells = [f"{million(run['tokens'])} M", f"{run['best']['perplexity']:.2f}", *texts]
        cells.append(f"{100 * found[name][2]:.1f} %")
        row = f"[tasks](../results/smollm2_longer/{name}_tasks.json)) | {' | '.join(cells)} |"
        assert row in page, row
    before = {name: measured(name)[0][1] / measured("tuned")[0][1] for name in ("decay", "window")}
    now = {name: found[name][0][1] / tuned[1] for name in before}
    stages, (_, *validations) = runs["window"]["recipe"]["stages"], runs["window"]["validation"]
    transferred, following, *_ = [v["perplexity"] for v in validations if v["tokens"] >= stages[0]["tokens"]]
    transfer, distill = (million(stage["tokens"]) for stage in stages)
    assert runs["decay"]["data"] == runs["tuned"]["data"] == runs["window"]["data"]
    says(
        SMOLLM2,
        f"from a base tuned on {million(runs['tuned']['tokens'])} M tokens",
        f"with {transfer} M tokens of transfer and {distill} M of distillation",
        f"(attention at {rate(stages[1]['learning_rate'])}, the body at {rate(stages[1]['body_learning_rate'])})",
        f"bring (a) from {before['decay']:.2f} to {now['decay']:.2f} on wiki and (b) from {before['window']:.2f} to",
        f"to {now['window']:.2f}; at these rates",
        f"({transferred:.2f} after the transfer, {following:.2f} at the next validation)",
        f"would keep layers {rank['chosen'][0]}, {rank['chosen'][1]} and {rank['chosen'][2]}",
        f"falls from {rank['kl']:.3f} to {rank['kl_after'][-1]:.3f} before anything is trained",
    )


def test_the_papers_comparison() -> None:
    runs, pretrained = folder("paper"), result("evidence_base")
    best = {name: run["best"]["perplexity"] for name, run in runs.items() if run["best"]}
    recipe, (stage,) = runs["base"]["recipe"], runs["base"]["recipe"]["stages"]
    (tokens,) = {million(run["recipe"]["stages"][0]["tokens"]) for run in runs.values()}
    learned, epochs = rate(stage["learning_rate"]), pretrained["tokens"] / pretrained["data"]["tokens"]
    rows = f"batches of {recipe['batch_tokens'] // recipe['length']} × {recipe['length']}"
    says(
        PAPER,
        f"Ours has {million(pretrained['model']['parameters'])} M (6 layers",
        f"it was pretrained on {million(pretrained['tokens'])} M tokens ({epochs:.1f} epochs)",
        f"each run below is **{tokens} million tokens**",
        f"learning rate {learned} (cosine to {stage['final']}), {rows}, gradient norm {stage['clip']:.0f},",
        f"two seeds at m = 32 lie {abs(best['decay_32_seed0'] - best['decay_32_seed1']):.1f} apart",
    )
    for size in ("plain", "no_norm", "16", "32_seed0", "32_seed1", "64"):
        assert best[f"gated_{size}"] < best[f"decay_{size}"], "at any m and in both seeds"
        pairs = zip(*(runs[f"{rule}_{size}"]["validation"][1:] for rule in ("decay", "gated")), strict=True)
        ahead = [decay["perplexity"] < gated["perplexity"] for decay, gated in pairs]
        assert size == "no_norm" or (ahead[0] and not any(ahead[1:])), "leads at the first validation and never after"
    assert best["gated_64"] < best["gated_32_seed1"] < best["gated_16"] < best["gated_plain"]
    assert best["gated_16"] < best["decay_16"] < best["local_32"] and best["decay_16"] < best["decay_plain"]
    assert runs["delta_plain"]["diverged"]["step"] == 0 and not runs["gated_baseline"]["diverged"]
    start, *_, end = (point["perplexity"] for point in runs["base"]["validation"])
    assert abs(end / start - 1) < 0.01, "the base ends where it began"
