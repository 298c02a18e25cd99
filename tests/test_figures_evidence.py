"""Figures of the evidence in sentences and in README's table: SmolLM2 made recurrent, and the paper's comparison."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil, log

import pytest
from figures import ROOT, WORDS, Json, after_stage, folder, million, rate, result, says

from fastweights.grid import load_grid
from fastweights.recipe import Recipe, load_recipe

SMOLLM2, PAPER = "docs/smollm2.md", "docs/paper.md"
RUNS = ("decay", "window")


def texts_of(path: str) -> tuple[list[float], list[Json]]:
    """Perplexities of wikitext, held-out wiki and books, and those by position."""
    model = result(f"{path}_text")["models"][0]
    return [row["token"] for row in model["perplexity"]], model["by_position"]


def score_of(path: str) -> float:
    """The mean score of the tasks, in percent."""
    scores = [task.get("acc_norm", task.get("acc")) for task in result(f"{path}_tasks")["models"][0]["tasks"].values()]
    return 100 * sum(scores) / len(scores)


def times(generation: str, name: str) -> list[str]:
    """Held-out wiki's and books' perplexity against that of the base that was tuned with it."""
    pairs = zip(texts_of(f"{generation}/{name}")[0], texts_of(f"{generation}/tuned")[0], strict=True)
    return [f"{found / tuned:.3f}" for found, tuned in pairs][1:]


def test_the_readme_has_smollm2s_results() -> None:
    readme, (tuned, _) = (ROOT / "README.md").read_text(), texts_of("smollm2_long/tuned")
    rows = {name: (f"smollm2_long/{name}",) * 2 for name in ("tuned", "decay", "window")}
    rows |= {"base": ("smollm2_base",) * 2, "hybrid": ("smollm2_long/hybrid", "smollm2_25m/hybrid")}
    for name, (text, tasks) in rows.items():
        compared = name not in ("base", "tuned")
        pairs = list(zip(texts_of(text)[0], tuned, strict=True))[1:]
        cells = [f"{x:.2f}, {x / t:.2f} ×" if compared else f"{x:.2f}" for x, t in pairs]
        score = f"{score_of(tasks):.1f} %"
        row = f"(results/{tasks}_tasks.json)) | {cells[0]} | {cells[1]} | {score if text == tasks else f'({score})'} |"
        assert row in readme and f"([text](results/{text}_text.json)" in readme, row
    runs = [result(f"smollm2_long/{name}") for name in ("decay", "window", "hybrid", "tuned")]
    a, b, c, _ = (million(run["tokens"]) for run in runs)
    seconds = [run["seconds"] for run in runs]
    says(
        "README.md",
        f"SmolLM2-135M after {a} million tokens ({b} with a window, then {c} more with three layers restored)",
        f"{(max(seconds[:2]) + sum(seconds[2:])) / 60:.0f} minutes of one H200 for the training of all",
        f"[one of {million(result('smollm2_25m/decay')['tokens'])} million tokens]",
    )


def test_quality_of_smollm2s_long_runs() -> None:
    names = (*RUNS, "hybrid")
    texts = {name: texts_of(f"smollm2_long/{name}")[1] for name in ("tuned", *names)}
    a, b, c = (" and ".join(times("smollm2_long", name)) for name in names)
    positions = {
        name: [row["perplexity"] for row in rows if row["data"] == "wiki.test.raw.xz"] for name, rows in texts.items()
    }
    near, *_, far = positions["tuned"]
    first, *others = positions["window"]
    before, base = score_of("smollm2_25m/hybrid"), score_of("smollm2_base")
    runs = {name: result(f"smollm2_long/{name}") for name in names}
    moved, ended = ({n: f"{f(runs[n]):.2f}" for n in RUNS} for f in (lambda r: after_stage(r, 0), _best))
    copied = [result(f"smollm2_long/{name}_tasks")["models"][0]["recall"]["copy"] for name in RUNS]
    assert all(row["accuracy"] == 0 for rows in copied for row in rows if row["distance"] >= 128)
    assert score_of("smollm2_long/window") > base
    for name in RUNS:
        twice = zip(texts_of(f"smollm2_long/{name}")[0], runs[name]["tests"], strict=True)
        assert max(abs(x - test["token"]) for x, test in twice) < 0.025, "other precisions differ by 0.01 or 0.02"
    tuned = texts_of("smollm2_long/tuned")[0][0]
    on_wikitext = [f"{texts_of(f'smollm2_long/{name}')[0][0] / tuned:.2f}" for name in names]
    recalled = [result(f"smollm2_25m/{n}_tasks")["models"][0]["recall"]["pairs"] for n in ("hybrid", "window")]
    pairs = [f"{100 * row['accuracy']:.0f}" for rows in recalled for row in rows if row["distance"] == 64]
    says(
        SMOLLM2,
        f"{a} times on held-out wiki and books for (a), {b} for (b), {c} for (c)",
        f"a way of its own, all are further off: {' and '.join(', '.join(on_wikitext).rsplit(', ', 1))} times",
        f"tokens (below) had {before:.1f} %, {100 * before / base:.1f} % of the base's",
        f"recalled {pairs[0]} % of the pairs at a distance of 64 tokens, where the (b) of its day recalled {pairs[1]}",
        f"falls from {near:.1f} on an article's first 64 tokens to {far:.1f} from token 4,096 on",
        f"starts at {first:.1f} and stays between {min(others):.1f} and {max(others):.1f}",
        f"{positions['hybrid'][-1]:.1f} from token 4,096 on. Recall",
        f"{moved['window']} after the transfer alone, {ended['window']} at the end, where the tuned base has "
        f"{runs['window']['base']['perplexity']:.2f}",
        f"{moved['decay']} after the transfer and {ended['decay']} at the end",
    )
    parameters = [result(f"smollm2_long/{name}_text")["models"][0]["parameters"] for name in names]
    parameters.append(result("smollm2_base_text")["models"][0]["parameters"])
    a, b, c, whole = (f"{2 * count / 1e6:.0f}" for count in parameters)
    says(SMOLLM2, f"in bfloat16 {a} MB for (a), {b} for (b) and {c} for (c), where the base has {whole}")


def _best(run: Json) -> float:
    return run["best"]["perplexity"]


def test_quality_of_smollm2_against_tokens() -> None:
    page, gaps = (ROOT / SMOLLM2).read_text(), {}
    for name, generation in (("first", "25m"), ("second", "36m"), ("third", "long")):
        path, cells = f"smollm2_{generation}", [f"[{name}](../results/smollm2_{generation})"]
        for run in RUNS:
            gaps[generation, run] = float(times(path, run)[0]) - 1
            score = f"{score_of(f'{path}/{run}'):.1f} %"
            cells += [f"{million(result(f'{path}/{run}')['tokens'])} M", *times(path, run), score]
        cells += ["–", "–"] if generation == "36m" else times(path, "hybrid")
        assert f"| {' | '.join(cells)} |" in page, cells
    grown = {run: result(f"smollm2_long/{run}")["tokens"] / result(f"smollm2_25m/{run}")["tokens"] for run in RUNS}
    left = {run: gaps["long", run] / gaps["25m", run] for run in RUNS}
    assert abs(left["decay"] - 3 / 5) < 0.02 and abs(left["window"] - 3 / 4) < 0.02 and 2 < grown["window"] < 2.3
    tokens = {generation: result(f"smollm2_{generation}/window")["tokens"] for generation in ("25m", "36m", "long")}
    least, most = (
        tokens["long"]
        * (gaps["long", "window"] / 0.05)
        ** (log(tokens["long"] / tokens[g]) / log(gaps[g, "window"] / gaps["long", "window"]))
        for g in ("36m", "25m")
    )
    tuned = [result(f"smollm2_{generation}/tuned")["tokens"] for generation in tokens]
    moves = [result(f"smollm2_{generation}/decay")["recipe"]["stages"][0]["tokens"] for generation in tokens]
    first, second = (result(f"smollm2_{generation}/window") for generation in ("25m", "36m"))
    transferred, raised, *_, last = [v["perplexity"] for v in first["validation"]][1:]
    for later in (second, result("smollm2_long/window")):
        moved = [v["perplexity"] for v in later["validation"]]
        assert moved == sorted(moved, reverse=True), "falls from the first step on"
    stage, rank = second["recipe"]["stages"][1], result("smollm2_36m/rank")
    *few, final = sorted(set(range(30)) - set(result("smollm2_25m/hybrid_text")["models"][0]["settings"]["layers"]))
    says(
        SMOLLM2,
        f"{million(moves[0])}, {million(moves[1])} and {million(moves[2])} M of them transfer",
        f"the bases tuned on {million(tuned[0])}, {million(tuned[1])} and {million(tuned[2])} M",
        f"(b) needs {round(least, -7) / 1e6:.0f} M (by the second and third) to {round(most, -7) / 1e6:.0f} M (by the",
        f"while its tokens grow to {grown['decay']:.1f} times",
        f"distilled at {rate(first['recipe']['stages'][1]['learning_rate'])} like (a)",
        f"rose from {transferred:.2f} after the transfer to {raised:.2f} before it fell to {last:.2f}",
        f"at {rate(stage['learning_rate'])} (with the body at {rate(stage['body_learning_rate'])}) it falls",
        f"with layers {', '.join(map(str, few))} and {final} as attention, on as many tokens as its (a) and (b)",
        f"({rank['chosen'][0]}, {rank['chosen'][1]} and {rank['chosen'][2]}, the divergence falls from "
        f"{rank['kl']:.3f} to {rank['kl_after'][-1]:.3f})",
    )


def test_short_runs_of_smollm2() -> None:
    runs, ranked = folder("smollm2"), result("smollm2_25m/rank")
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
    on_books = {name: runs[name]["tests"][2]["token"] for name in ("reference", "long_transfer")}
    on_wikitext = {
        name: runs[name]["tests"][0]["token"] for name in ("reference", "gated", "cross_entropy_alone", "both_alike")
    }
    assert on_books["long_transfer"] > on_books["reference"] and on_wikitext["gated"] < on_wikitext["reference"]
    assert best["window_64"] < reference["base"]["perplexity"]
    few = [run for run in runs.values() if len(run.get("tests", [])) == 1]
    moved_by = {name: after_stage(run, 0) for name, run in runs.items() if run in half}
    same_half, parameters = moved_by["rate_up_more"], {n: r["model"]["parameters"] / 1e6 for n, r in runs.items()}
    assert moved_by["output_norm"] < same_half and best["output_norm"] > best["reference"]
    assert moved_by["no_rotary"] > same_half and best["kv_states"] < best["reference"] < best["no_rotary"]
    worth = ["random_projections", "uniform", "output_norm", "no_transfer", "no_rotary", "gated"]
    assert [best[name] for name in worth] == sorted((best[name] for name in worth), reverse=True), "the page's order"
    assert best["reference"] - best["window_64"] > best["random_projections"] - best["reference"], "more than all else"
    thrown = runs["no_transfer"]["validation"][1]["perplexity"]
    assert on_wikitext["cross_entropy_alone"] == max(
        on_wikitext[name] for name in ("cross_entropy_alone", "both_alike", "reference")
    )
    says(
        SMOLLM2,
        f"from {starts['reference']:.1f} to {thrown:,.0f} before distillation began",
        f"and were not read there, and {WORDS[len(few)]} read wikitext's test text only",
        f"random ones end at {best['random_projections']:.2f}. m 32",
        f"rank-32 approximation, ends at {best['m_32']:.2f}",
        f"(after transfer {moved_by['m_32']:.1f}, where m 64 has {same_half:.1f})",
        f"without it {moved_by['no_rotary']:.2f} after transfer and {best['no_rotary']:.2f} at the end",
        f"{parameters['kv_states']:.0f} M parameters instead of {parameters['reference']:.0f}) ends as well",
        f"one per query head, {best['kv_states']:.2f}",
        f"ahead after transfer ({moved_by['output_norm']:.2f}) and behind at the end ({best['output_norm']:.2f})",
        f"and {WORDS[len(half)]} (those on the other half) cannot",
        f"run again, ended at {after_stage(runs['top_64'], 0):.2f} instead of {after_stage(reference, 0):.2f}",
        f"with 16 it ends at {best['window_16']:.2f}, with 64 at {best['window_64']:.2f}, below the base's",
        f"ends at {best['long_transfer']:.2f}, and no better than the reference on books",
        f"as good as that of all ({best['top_64']:.2f})",
        f"gated ends at {best['gated']:.2f}, a little behind decay",
        f"it starts at {starts['gated']:,.0f} where decay starts at {starts['reference']:.0f}",
    )
    says(
        SMOLLM2,
        f"a validation perplexity of {reference['base']['perplexity']:.2f}",
        f"its first step ({starts['window_32']:.2f}) ahead of where the reference is after transfer ({once})",
        f"({starts['reference']:.1f} against {starts['uniform']:.1f})",
        f"it chose layers {first}, {second} and {third} ([result](../results/smollm2_25m/rank.json))",
        f"falls from {ranked['kl']:.3f} to {ranked['kl_after'][-1]:.3f}",
        f"in runs of {million(reference['tokens'])} million tokens",
        f"{million(text)} M tokens of the model's own tokenizer",
        f"({WORDS[len(half)]} of the short runs and the first two of the long ones read one half of it)",
        f"{transfer} M tokens of transfer, then {distill} M of distillation, {sizes}",
        f"windows of {reference['tests'][0]['length']}; {WORDS[len(unread)]} runs had been trained when the time was",
        f"{up} is better than {low}, {more} a little better still; in the transfer {fast} is much better than {slow}",
        f"({moved} after it, where {slow} has {once} and, on the same half of the text, {again})",
        f"ends within {ceil(100 * (best['window_32'] / reference['base']['perplexity'] - 1))} % of the untouched base",
        f"The body at {rate(body['recipe']['stages'][1]['body_learning_rate'])} is too much",
        f"No layer alone is worth more than {max(layer['gain'] for layer in ranked['layers']):.3f}",
    )


def test_long_runs_of_smollm2() -> None:
    tuned, *runs = (result(f"smollm2_long/{name}") for name in ("tuned", "decay", "window", "hybrid"))
    decay, window, hybrid = runs
    settings, ranked, page = hybrid["model"]["settings"], result("smollm2_long/rank"), (ROOT / SMOLLM2).read_text()
    *few, last = sorted(set(range(len(ranked["layers"]))) - set(settings["layers"]))
    assert sorted(ranked["chosen"]) == [*few, last]
    says(SMOLLM2, f"with layers {', '.join(map(str, few))} and {last} restored")
    assert len({run["data"]["tokens"] for run in (tuned, *runs)}) == 1, "of the same text"
    heads = [
        f"| (a) decay, m {settings['m']} ([result](../results/smollm2_long/decay.json)) |",
        f"with an exact window of {settings['window']} tokens ([result](../results/smollm2_long/window.json)) |",
        f"{few[-1]} and {last} restored as attention ([result](../results/smollm2_long/hybrid.json)) |",
    ]
    for head, run in zip(heads, runs, strict=True):
        stages = run["recipe"]["stages"]
        transfer = [f"{million(stage['tokens'])} M" for stage in stages if stage["loss"] == "transfer"] or ["–"]
        body = ["–" if (value := stage["body_learning_rate"]) is None else rate(value, 1) for stage in stages]
        cells = [*transfer, f"{million(stages[-1]['tokens'])} M", ", ".join(rate(s["learning_rate"]) for s in stages)]
        cells += [", ".join(body), f"{run['seconds'] / 60:.0f}"]
        assert f"{head} {' | '.join(cells)} |" in page, cells
    (length,), (step,) = ({run["recipe"][name] for run in runs} for name in ("length", "batch_tokens"))
    minutes = (max(decay["seconds"], window["seconds"]) + tuned["seconds"] + hybrid["seconds"]) / 60
    more, start, ended = million(hybrid["tokens"]), hybrid["validation"][0]["perplexity"], _best(hybrid)
    says(
        SMOLLM2,
        f"longer runs of up to {million(decay['tokens'])} million tokens",
        f'("tuned": {million(tuned["tokens"])} M tokens',
        f"All of the same text, {length:,} tokens a row, {step:,} a step",
        f"the tuned base had {million(tuned['tokens'])} M tokens, (a) {million(decay['tokens'])} M after that, "
        f"(b) {million(window['tokens'])} M and (c) {more} M after (b)",
        f"(a), (b) and (c) below are {minutes:.0f} minutes of one GPU",
        f"it chose layers {ranked['chosen'][0]}, {ranked['chosen'][1]} and {ranked['chosen'][2]}",
        f"{ranked['seconds']:.0f} seconds beside two trainings",
        f"the teacher falls from {ranked['kl']:.3f} to {ranked['kl_after'][-1]:.3f} before anything is trained",
        f"a validation perplexity of {start:.2f} where (b) has {_best(window):.2f}, and {ended:.2f} after {more} M",
        f"there and {max(layer['gain'] for layer in ranked['layers']):.3f} here",
        f"--data work/validation.txt.xz --tokens {ranked['tokens']} --keep {ranked['settings']['keep']} --save",
    )


def test_the_command_that_made_the_hybrid() -> None:
    """The page's options on top of the recipe `finish` are the recipe that was run."""
    ran = Recipe.from_dict(result("smollm2_long/hybrid")["recipe"])
    shown = re.search(r"--recipe finish [^`]*--set distill\.tokens=([\d_]+)", (ROOT / SMOLLM2).read_text())
    assert shown
    for option in (
        "--compile",
        f"--validate-every {ran.validate_every}",
        f"--validation-tokens {ran.validation_tokens}",
    ):
        assert option in shown[0]
    finish = load_recipe("finish")
    (stage,) = finish.stages
    options: Json = dict(compile=True, validate_every=ran.validate_every, validation_tokens=ran.validation_tokens)
    assert replace(finish, stages=type(finish.stages)([replace(stage, tokens=int(shown[1]))]), **options) == ran


@pytest.mark.parametrize("grid", ["smollm2", "paper"])
def test_the_shipped_grid_is_what_was_run(grid: str) -> None:
    recipes = {variant.name: variant.recipe for variant in load_grid(grid)}
    for name, run in folder(grid).items():
        assert Recipe.from_dict(run["recipe"]) == recipes[name], name


def test_the_shipped_grid_of_long_runs_is_what_was_run() -> None:
    """To half a million tokens: these were as many as there was time for."""
    for variant in load_grid("smollm2_long"):
        run = Recipe.from_dict(result(f"smollm2_long/{variant.name}")["recipe"])
        half_millions = [round(stage.tokens / 5e5) for stage in run.stages]
        assert half_millions == [stage.tokens / 5e5 for stage in variant.recipe.stages], variant.name
        stages = [
            replace(stage, tokens=own.tokens) for stage, own in zip(run.stages, variant.recipe.stages, strict=True)
        ]
        assert replace(run, stages=type(run.stages)(stages)) == variant.recipe, variant.name


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
    tables = {name: f"{best[name]:.2f}" for name in ("gated_no_norm", "gated_plain", "decay_no_norm", "decay_plain")}
    gated, decay = (f"{tables[f'{rule}_plain']} after {tables[f'{rule}_no_norm']}" for rule in ("gated", "decay"))
    says(PAPER, f"ends a little above where it began, at {end:.2f} after {start:.2f}", f"worse here ({gated}, {decay})")
