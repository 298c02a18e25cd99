"""Figures in the sentences of README and docs are those of the result files. Tables filled by a program are checked in
test_pages.py, the evidence in test_figures_evidence.py, the ranking in test_rank.py."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from figures import ROOT, WORDS, Json, after_stage, million, rate, result, says, target
from rich.filesize import decimal

from fastweights.convert import convert, load
from fastweights.describe import describe
from fastweights.quickstart import PACKAGED, SETTINGS, figure
from fastweights.recipe import load_recipe
from fastweights.report.results import perplexity_text, times_text

README, SPEED, EXPERIMENTS = "README.md", "docs/speed.md", "docs/experiments.md"


def test_quickstart() -> None:
    found, parameters = result("quickstart"), result("packaged_model")["model"]["parameters"]
    base, decay = found["cost"]
    converted = describe(convert(load(PACKAGED, dtype=torch.float32), SETTINGS)).parameters
    says(
        README,
        f"a GPT-2 of {parameters:,} parameters",
        f"trained back on books that neither has seen: distill, {found['tokens']:,} tokens",
        f"({found['seconds']:.0f} s in all)",
        f"trains it back on {WORDS[found['hardware']['threads']]} CPU cores",
    )
    points, of_base = found["validation"]["points"], found["validation"]["base"]
    for point in (*points[:2], points[-1]):
        perplexity, ratio = figure(point["perplexity"], 2), f"{point['perplexity'] / of_base:.3f}"
        says(README, f"after {point['tokens']:,} tokens: validation perplexity {perplexity}, {ratio} × the base")
    for points in zip(base["points"], decay["points"], strict=True):
        cells = [cell for p in points for cell in (f"{1e3 * p['seconds']:.1f} ms", decimal(p["bytes"]))]
        says(README, " ".join([f"{points[0]['length']:,}", *cells]))
    (cache,) = (point["bytes"] for point in base["points"] if point["length"] == 1024)
    state, sizes = decay["points"][0]["bytes"], {"base": (parameters, cache, 64 * cache)}
    for name, perplexity in found["perplexity"].items():
        size, near, far = sizes.get(name, (converted, state, state))
        cells = [figure(perplexity, 2), figure(perplexity / found["perplexity"]["base"], 3), f"{size:,}"]
        says(README, " ".join([name, *cells, decimal(near), decimal(far)]))
    assert found["ratio"] <= 1.10


def test_own_model() -> None:
    found = result("own_model")
    training, (base, swapped, best) = found["training"], found["models"]
    says(
        README,
        f"{swapped['parameters']:,} ({swapped['parameters'] - base['parameters']:+,} against the base model)",
        f"state {swapped['state_bytes']:,} bytes, however long the text",
        f"tokens/s, state {best['state_bytes']:,} bytes",
        f"only {sum(stage['steps'] for stage in training['stages'])} small steps",
        *(f"{length:,} {decimal(swapped['state_bytes'])}" for length in (1024, 8192, 65536)),
    )
    teacher = training["base"]["perplexity"]
    for point in training["validation"]:
        reached = f"validation perplexity {point['perplexity']:.2f}, {point['perplexity'] / teacher:.3f}"
        says(README, f"after {point['tokens']:,} tokens: {reached} × the base")
    says(README, f"{reached} times the base's {training['tokens']:,} tokens in {training['seconds']:.0f} s; model:")
    for model in found["models"]:
        state = decimal(model["state_bytes"]) if model["converted"] else "–"
        says(README, f"{model['name']} {model['rule']} {model['parameters']:,} {state}")
        (row,) = model["perplexity"]
        times = times_text(row["token"] / base["perplexity"][0]["token"]) if model["converted"] else "–"
        cells = [perplexity_text(row["token"]), times, perplexity_text(row["word"]), f"{row['bits_per_byte']:.3f}"]
        name = model["name"] if model["converted"] else f"{model['name'][:24]}…"
        says(README, f"{name} {row['data']} {row['length']} {row['context']} {' '.join(cells)} {row['tokens']:,}")


def test_training_in_the_readme() -> None:
    compared = result("recipes_compared")
    ends = [[run["last"]["perplexity"] for run in runs] for runs in compared["runs"].values()]
    taught, tuned = (f"{sum(end) / len(end) / compared['base']:.3f}" for end in ends)
    seeds = f"mean of {WORDS[len(compared['seed'])]} seeds"
    plain = f"plain fine-tuning on the same {compared['tokens']:,} tokens at {tuned} ({seeds}"
    says(README, f"transfer and distillation end at {taught} times the base's perplexity, {plain}")
    tokens = million(sum(stage.tokens for stage in load_recipe("distill").stages))
    hybrid, ranked = result("smollm2_25m/hybrid_tasks")["models"][0], len(result("smollm2_25m/rank")["layers"])
    says(
        README,
        f"the recipe `distill` then takes {tokens} million tokens",
        f"the mean score of {WORDS[len(hybrid['tasks'])]} tasks",
        f"and {ranked - len(hybrid['settings']['layers'])} of {ranked} layers attention",
    )


def test_cost_in_the_readme_and_the_page_of_the_profile() -> None:
    layer, cpu = result("profile_layer"), result("profile_cpu")
    attention, decay = (model["points"] for model in layer["models"][:2])
    first, last = decay[0], decay[-1]
    assert 0.95 < first["seconds"] / last["seconds"] < 1.05 and first["peak_bytes"] == last["peak_bytes"]
    peer = f"{1e6 * attention[-1]['seconds']:.0f} µs and {attention[-1]['peak_bytes'] / 1e6:.0f} MB"
    ours = f"{1e6 * last['seconds']:.1f} µs and {last['peak_bytes'] / 1e6:.2f} MB, as after {first['length']:,}"
    says(README, f"after {last['length']:,} tokens attention takes {peer}, decay {ours}")
    says(README, f"of the paper's shape (batch {layer['batch']}, d = m = {layer['d']}) on an H200")
    shape = f"(`batch` {layer['batch']}, {WORDS[layer['heads']]} head, d = m = {layer['m']}, the shape"
    says("docs/profile.md", shape, f"On {WORDS[cpu['hardware']['threads']]} CPU cores, with the packaged model")


def test_speed_in_the_readme() -> None:
    kernels, training = result("gpu_kernels")["parts"]["kernels"], result("gpu_training")["parts"]["training"]
    short, _, long = ours = [row for row in kernels["ops"] if (row["rule"], row["m"]) == ("decay", 32)]
    flash = {row["shape"]: row["forward+backward ms"] for row in kernels["peers"]}
    (rows, steps, *_), (batch, length, heads, d) = (map(int, re.findall(r"\d+", row["shape"])) for row in (short, long))
    assert all(row["forward+backward ms"] < flash[row["shape"]] for row in ours), "with Python's launches, too"
    peak = max(row["peak extra MiB"] for row in ours)
    states = 4 * batch * length * heads * d * long["m"]
    times = [row["graph forward+backward ms"] for row in (short, long)]
    says(
        README,
        f"of {rows} × {steps} tokens: {times[0]:.2f} ms, flash attention {flash[short['shape']]:.2f} in the same run",
        f"of {batch} × {length:,} tokens {times[1]:.2f} against {flash[long['shape']]:.1f} ms",
        f"in at most {peak:.0f} MiB where every state in float32 is {states / 1e9:.1f} GB",
    )
    attention, decay = (round(training["models"][name]["tokens/s"], -3) for name in ("attention", "decay"))
    decode = result("gpu_decode")["parts"]["decode"]
    near, *_, far = sorted({row["context"] for row in decode["decay"]})
    made = {(row["batch"], row["context"]): row["tokens/s"] for row in decode["decay"]}
    one, few, many = round(made[1, near], -1), round(made[32, 16384], -3), round(made[256, far], -3)
    says(README, f"{one:,.0f} tokens/s for one text, {few:,.0f} for 32 and {many:,.0f} for 256")
    (peer,) = (row for row in decode["attention"] if "tokens/s" in row)
    slower = f"attention makes {peer['tokens/s']:,.0f} for {peer['batch']} texts of {peer['context']:,} tokens"
    says(README, f"compiled: {decay:,.0f} tokens/s, attention {attention:,.0f} (")
    says(README, f"after {near:,} tokens as after {far:,}; {slower}")
    cpu = result("decode_cpu")
    point, threads = cpu["points"][0], WORDS[cpu["hardware"]["threads"]]
    faster = f"{1e3 * point['engine']:.1f} against {1e3 * point['attention']:.1f} ms"
    start = f"on {threads} CPU core the packaged model is at {point['length']} tokens already faster"
    says(README, f"{start} than with attention and its cache, {faster}")
    says(SPEED, f"On a CPU, {threads} thread, the packaged model")


def test_chunked_forms_on_a_cpu() -> None:
    cpu = result("cpu")
    rules, shape = cpu["operations"], cpu["shape"]
    sizes = ", ".join(f"{name} {size}" for name, size in shape.items())
    wide, narrow = (4 * shape["B"] * shape["T"] * shape["H"] * shape[name] / 1e6 for name in ("d", "m"))
    least, most = 2 * wide + 2 * narrow, 3 * wide + 3 * narrow
    (states,) = {rule["states"] for rule in rules.values()}
    short = [rule for rule in rules if not cpu["targets reached"][f"{rule} at least 8 times below the loop's memory"]]
    for rule, row in rules.items():
        chunked, loop, split = (row["seconds"][way] for way in ("chunked", "loop", "split loop"))
        here, loops = (f"{row['peak bytes'][way] / 1e6:.0f} MB" for way in ("chunked", "split loop"))
        times = f"{1e3 * chunked:.0f} ms | {1e3 * loop:.0f} ms, {loop / chunked:.1f} ×"
        says(README, f"| {rule} | {times} | {1e3 * split:.0f} ms, {split / chunked:.1f} × | {here} | {loops} |")
    first, last = cpu["decoding"]["seconds a token"].values()
    (near, after_few), (far, after_many) = cpu["decoding"]["state bytes"].items()
    assert after_few == after_many
    says(
        README,
        f"forward + backward on {cpu['hardware']['threads']} CPU cores, {sizes} (",
        f"output and gradients, {least:.0f} to {most:.0f} MB, are in it for both",
        f"Every S_t alone, in float32, is {states / 1e6:.0f} MB",
        f"8 times below the loop with every rule: {' and '.join(short)} stop short of it",
        f"One token after {int(far):,} others takes as long as after {int(near):,} (ratio {last / first:.3f}",
    )
    gained = [rule["seconds"]["loop"] / rule["seconds"]["split loop"] for rule in rules.values()]
    says(EXPERIMENTS, f"is {min(gained):.0f} to {max(gained):.0f} times faster than the plain one")
    chunked = [rule["seconds"]["split loop"] / rule["seconds"]["chunked"] for rule in rules.values()]
    says(EXPERIMENTS, f"chunked forms are about {min(chunked):.0f} to {max(chunked):.0f} times faster, not 15")


def test_kernels_in_the_page_of_speed() -> None:
    files = {name: result(f"gpu_{name}") for name in ("kernels", "training", "decode", "first_call")}
    for file in files.values():
        versions = [".".join(file["versions"][name].split(".")[:2]) for name in ("torch", "triton")]
        says(SPEED, f"one {file['hardware']['gpu']} (torch {versions[0]}, Triton {versions[1]})")
    ways = [target(files["kernels"], f"decay, m 32: graph {part} ms") for part in ("forward", "forward+backward")]
    assert all(found > float(wanted) for found, wanted in ways)
    says(SPEED, f"to reach: {ways[0][1]} ms forward and {ways[1][1]} ms forward + backward at all three shapes")
    coarse, fine = (target(files["kernels"], f"relative error, {dtype}")[1] for dtype in ("bfloat16", "float32"))
    says(SPEED, f"Meant: {rate(float(coarse))} in bfloat16, {rate(float(fine))} in float32")
    for rows in list(files["kernels"]["parts"]["kernels"]["profiles"].values())[1:]:
        finding = sum(row["share"] for row in rows if row["kernel"] in ("segment_sums", "scan_segments"))
        assert 0.25 < finding < 1 / 3, "over a quarter"
    # of a token and head: m and d numbers of q, k, f and v, z, y, then their gradients, and a state every 16 tokens
    copied, tokens = result("gpu_decode")["parts"]["decode"]["copy bytes/s"], 32 * 1024 * 12
    read = 2 * tokens * (3 * 32 + 3 * 64)
    moved = read + 2 * tokens * (3 * 32 + 2 * 64 + 32 * 64 / 16)
    forward_ms, backward_ms = (f"{1e3 * count / copied:.3f} ms" for count in (read, moved))
    says(SPEED, f"would take {forward_ms} forward without a backward pass and {backward_ms} backward")
    code = result("kernel_code")
    backward, triton = code["kernels"]["backward"], ".".join(code["versions"]["triton"].split(".")[:2])
    says(SPEED, f"the backward pass issues {backward['instructions a token']:.0f} instructions a token")
    says(SPEED, f"needs all {backward['registers']} registers of a thread ([compiled for sm_90 with Triton {triton}]")
    shapes = files["first_call"]["parts"]["first_call"]["shapes"].values()
    _, meant = target(files["first_call"], "first call on a new shape: seconds")
    first, second = (f"{shape['waited seconds']:.1f}" for shape in shapes)
    says(SPEED, f"the first call of a new process took {first} s, of the next shape {second} (meant: {meant};")


def test_tables_in_the_page_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from speed_page import PAGE, filled

    assert filled(PAGE.read_text()) == PAGE.read_text(), "run benchmarks/speed_page.py"


def test_random_shapes_in_the_page_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = result("random_shapes")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from random_shapes import KINDS, LIMITS, RULES, draw_case

    drawn = [draw_case(seed) for seed in range(found["asked"])]
    every = set(itertools.product(RULES, LIMITS, (16, 32, 64, 128)))
    missing = every - {(case["rule"], case["dtype"], max(16, 1 << (case["m"] - 1).bit_length())) for case in drawn}
    left_out = sorted(set(range(1, 257)) - {case["d"] for case in drawn})
    assert left_out == list(range(left_out[0], left_out[-1] + 1))
    with_wide = [case["m"] for case in drawn if case["d"] > 128]
    says(
        SPEED,
        f"shapes come in {KINDS} kinds",
        f"d from {left_out[0]} to {left_out[-1]} is not",
        f"d over 128 only with m from {min(with_wide)} to {max(with_wide)}",
        f"of {len(every)} combinations of rule, dtype and padded m {WORDS[len(missing)]} are missing",
    )
    page = " ".join((ROOT / SPEED).read_text().split())
    for rule, dtype, m in missing:
        assert re.search(rf"{rule} [^;)]*{dtype} {m}", page), (rule, dtype, m)
    assert found["cases"] == found["asked"] and not (found["failed"] or found["broken processes"])
    says(SPEED, f"Of {found['cases']:,} random shapes, gates and flags none failed")


def test_flash_linear_attention_in_the_page_of_speed() -> None:
    found = result("gpu_fla")["parts"]["fla"]
    assert all(row["passed"] for row in found["ops"])
    chunked, attention = ([r for r in found["peers"] if r["peer"].startswith(n)] for n in ("fla chunk_gla", "torch"))
    ours = found["ops"]

    def times(rows: list[Json], at: int) -> str:
        return f"{rows[at]['forward ms']:.2f} and {rows[at]['forward+backward ms']:.2f}"

    first, *_ = rows = [row for row in chunked if row["m"] == 32]
    says(
        SPEED,
        f"chose its blocks for {first['first seconds']:.0f} s at its first call",
        f"then took {times(rows, 0)} ms at {', '.join(first['shape'].split(', ')[:2])} and {times(rows, 2)} at B 2",
        f"attention took {times(attention, 0)}, and {times(attention, 2)}, and decay",
        f"launched from Python, {times(ours, 0)}, and {times(ours, 2)} ([result]",
    )


def test_training_and_decoding_in_the_page_of_speed() -> None:
    training, file = result("gpu_training")["parts"]["training"], result("gpu_decode")
    parameters, batch = million(training["models"]["attention"]["parameters"]), training["batch"]
    says(SPEED, f"GPT-2 small ({parameters} M, random weights), {batch} × {training['length']} tokens a step")
    (one, low), (many, high) = (target(file, f"decode, batch {batch}: times the floor") for batch in (1, 256))
    more, least = target(file, "decode, batch 32, context 16384: tokens/s over attention's")
    assert one <= float(low) and many > float(high) and more >= float(least)
    floors = f"at most {low} times the floor at batch 1, which is reached, and {high} times at batch 256"
    rates = f"{least} times attention's rate at batch 32 after 16,384 tokens, where it is {more:.0f} times"
    says(SPEED, f"Meant: {floors}, where it stops short; {rates}")
    alone, *others = result("decode_prefetch")["batches"]["256"].values()
    says(SPEED, f"batch 256 took {alone:.0f} µs", f"({min(others):,.0f} to {max(others):,.0f} µs, [result]")
    whole, *fewer = result("decode_streams")["rows"].values()
    assert all(min(parts.values()) == parts["1"] for parts in fewer)
    undivided, halves, quarters = (f"{whole[parts]:.0f}" for parts in "124")
    says(SPEED, f"{undivided} µs as one, {halves} as halves and {quarters} as quarters at 256 rows")
    steps = result("window_step")["rows"].values()
    ours, torchs = ([f"{step[way]:,.0f}" for step in steps] for way in ("kernel", "torch"))
    says(
        SPEED,
        f"{ours[0]} µs for one text, {ours[1]} for 32 and {ours[2]} for 256",
        f"operators took {torchs[0]}, {torchs[1]} and {torchs[2]}",
    )


def test_generation_and_evaluation() -> None:
    prompt = result("long_prompt")
    point, cores = prompt["points"][-1], WORDS[prompt["hardware"]["threads"]]
    assert round(point["length"] / 1e6) == 1
    memory = f"{point['more peak bytes'] / 1e6:.0f} MB, {8 * point['length'] / 1e6:.0f} of them the tokens"
    read = f"a million tokens took the packaged model {point['seconds']:.0f} s on {cores} cores"
    says("docs/generation.md", f"{read} and {memory}")
    found = result("perplexity_three_ways")
    perplexities = [way["perplexity"] for way in found["ways"].values()]
    assert max(perplexities) < (1 + 1e-4) * min(perplexities)
    ours, harness, plain = (f"{perplexity:.5f}" for perplexity in perplexities)
    low = (found["ways"]["fastweights"]["nll"] - found["ways"]["lm-eval"]["nll"]) / found["tokens"]
    (samples,) = {row["samples"] for row in result("smollm2_base_tasks")["models"][0]["recall"]["pairs"]}
    says(
        "docs/evaluation.md",
        f"On {found['text']['bytes'] / 1e3:.0f} kB of WikiText-103's test text",
        f"({found['tokens']:,} tokens), we find {ours}, lm-eval {harness} and a plain loop of ten lines {plain}",
        f"is low by about {rate(low)} nats a token",
        f"With {samples} samples the standard error is up to {0.5 / samples**0.5:.2f}",
    )


def test_recovery_in_the_experiments() -> None:
    search, cpu, packaged = result("recovery_search"), result("recovery_cpu")["runs"], result("packaged_model")
    runs = {name.removeprefix("small-"): run for part in ("before", "after") for name, run in search[part].items()}
    base, lines = runs["T3_D1"]["base"], (ROOT / EXPERIMENTS).read_text().splitlines()
    table = {line.split(" | ")[0]: re.findall(r"\d\.\d{3}", line) for line in lines if line.startswith("| ")}

    def reached(run: Json, point: int = -1, digits: int = 3) -> str:
        return f"{run['validation'][point][1] / (run['base'] or base):.{digits}f}"

    for row, names in {
        "D 1, projections fitted": "log_D1e-3 fit_D1",
        "D 1, nothing fitted": "log_D1e-3_fit_none D1",
        "T 3, D 1": "log_T3e-3_fit_none T3_D1",
        "T 3, D 1, projections fitted": "log_T3e-3 T3fit_D1",
        f"large model, {search['tokens']['large']:,} tokens: D 1, fitted": "large-log_D1e-3 large-fit_D1",
        "large model: window 32, D 1, fitted": "large-log_w32_D1e-3 large-w32_fit_D1",
        "the paper's way: uniform gates, fine-tuning": "paper",
        "log gates, fine-tuning": "log_finetune",
        "transfer, then fine-tuning": "T3_ft1",
        "uniform gates, T 3, D 1": "uniform_T3_D1",
        "no transfer (D 1) / with one scale a head fitted / projections fitted": "D1 scale_D1 fit_D1",
        "D 2 / D 0.5 / T 10": "T3_D2 T3_D.5 T10_D1",
        "transfer for 15 % / 60 % of the tokens": "T3_D1_.15 T3_D1_.6",
        "batches of 8,192 / 2,048 tokens": "T3_D1_bt8192 T3_D1_bt2048",
        "cross-entropy added, weight 0.3": "T3_D1_ce.3",
        "body at 0.3": "T3_D1_body.3",
        "log gates up to 128 / 32 tokens": "log128_T3_D1 log32_T3_D1",
        "m = 64": "m64_T3_D1",
        "output norm": "norm_T3_D1",
        "last layer kept as attention (first, second layer kept)": "hybrid_T3_D1 hybrid0_T3_D1 hybrid1_T3_D1",
        "window 16, fitted, D 1": "w16_fit_D1",
        "window 32, fitted, D 1 / D 0.5 / D 1, body at 0.3": "w32_fit_D1 w32_fit_D.5 w32_fit_D1_body.3",
    }.items():
        assert table[f"| {row}"] == [reached(runs[name]) for name in names.split()], row
    swapped, windowed = (reached(runs[name], 0, 0) for name in ("T3_D1", "w32_T3_D1"))
    batch = runs["w32_fit_D1"]["batch_tokens"]
    early, late = packaged["stages"][0]["tokens"], packaged["tokens"]
    first, second = (after_stage(packaged, stage) for stage in (0, 1))
    quickstart, read = result("quickstart"), packaged["data"]["tokens"]
    parameters, tokens = re.findall(r"large: ([\d.]+) M parameters after (\d+) M", search["what"])[0]
    says(
        EXPERIMENTS,
        f"on an H200, {search['tokens']['small']:,} tokens (a third of them transfer",
        f"T 3, D 1 = {reached(runs['T3_D1'])}; second seed {reached(runs['T3_D1_seed1'])})",
        f"from {swapped} times the base's perplexity to {reached(runs['fit_D1'], 0)} × without a window",
        f"from {windowed} to {reached(runs['w32_fit_D1'], 0)} × with one of 32 (fitted on {batch:,} tokens",
        f"on the final base, {reached(cpu['b3'], 0)}), in seconds",
        f"The same recipe, {round(cpu['l']['tokens'], -4):,} tokens on a CPU: {reached(cpu['l'])} on the base after",
        f"after {million(early)} M tokens of pretraining, {reached(cpu['p'])} after {round(late / 1e6, -1):,.0f} M",
        f"(its perplexity is {100 * (1 - second / first):.0f} % lower)",
        f"a constant feature at the start: {reached(cpu['A'])}; one scale a head fitted: {reached(cpu['u'])};",
        f"projections fitted on one batch only: {reached(cpu['v'])} (",
        f"distill at 2e-3: {reached(cpu['o'])}. With a window of 32, fitted: {reached(cpu['w'])};",
        f"recipe at {round(cpu['b3']['tokens'], -4):,} tokens: {reached(cpu['b3'])}, and as shipped",
        f"at {quickstart['tokens']:,} tokens and measured on both books, {quickstart['ratio']:.3f} (",
        f"A GPT-2 of {million(packaged['model']['parameters'], 1)} M parameters",
        f"{million(read, 1)} M tokens. {million(early)} M tokens took it to a perplexity of {first:.2f}",
        f"{second:.2f} after {million(late)} M tokens ({late / read:.0f} epochs, {packaged['seconds']:.0f} s on one",
        f"A model of {parameters} M parameters reached {runs['large-fit_D1']['base']:.2f} after {tokens} M",
    )
    compared = result("recipes_compared")
    ratios = [[run["last"]["perplexity"] / compared["base"] for run in runs] for runs in compared["runs"].values()]
    taught, tuned = (", ".join(f"{ratio:.3f}" for ratio in recipe) for recipe in ratios)
    said = f"{compared['tokens']:,} tokens. Fit, transfer for a fifth of them, then distillation: {taught}."
    says(EXPERIMENTS, said, f"from the swap as it is: {tuned}.")


def test_ratios_of_the_experiments_are_those_of_the_result_files() -> None:
    page = (ROOT / "docs/experiments.md").read_text()
    section = page[page.index("## Recovering quality") : page.index("## How a window joins")]
    search, cpu = result("recovery_search"), result("recovery_cpu")
    runs = [*search["before"].values(), *search["after"].values(), *cpu["runs"].values()]
    base = next(run["base"] for run in search["after"].values() if run["base"] and run["length"] == 512)
    known = {f"{perplexity / (run['base'] or base):.3f}" for run in runs for _, perplexity in run["validation"]}
    compared = result("recipes_compared")
    ends = [run["last"]["perplexity"] for runs in compared["runs"].values() for run in runs]
    known |= {f"{end / compared['base']:.3f}" for end in ends} | {f"{result('quickstart')['ratio']:.3f}"}
    written = re.findall(r"\b\d\.\d{3}\b", section)
    assert len(written) > 40
    assert not set(written) - known


def test_windows_in_the_experiments() -> None:
    mix, swap = result("window_mix"), result("after_swap")

    def words(perplexity: float) -> str:
        if perplexity > 1e6:
            million = perplexity / 1e6
            return f"{million:.{int(million < 100)}f} million"
        return f"{perplexity:,.0f}" if perplexity > 100 else f"{perplexity:.1f}"

    names = {
        "window alone": "window alone (`rule=local`)",
        "share from 0.98": "share of the window from 0.98",
        "sum from 1.0": "sum, rule + w · window, w from 1",
    }
    for name, run in mix["runs"].items():
        cells = [words(run[key]) for key in run if key.startswith("after")]
        if name == "share from 0.98":
            best, share = cells[-1], run["window at the end"]
            cells[-1] = f"**{best}**"
        says(EXPERIMENTS, f"| {names.get(name, name)} | {' | '.join(cells)} |")
    settings, alone = mix["settings"], words(mix["runs"]["window alone"]["after 999424 tokens"])
    says(
        EXPERIMENTS,
        f"teacher's attention output for {settings['tokens'] / 1e6:.1f} M tokens of Wikipedia",
        f"({settings['length']} tokens × {settings['batch']}, AdamW {rate(settings['learning_rate'])})",
        f"The base has {words(mix['base'])}.",
        f"far below the window alone ({best} against {alone})",
        f"(0.98 stayed within {share['min']:.4f}–{share['max']:.4f})",
    )
    found = {name.replace("decay m 32, ", ""): words(value) for name, value in swap["perplexity"].items()}
    add, delta = (f"{round(swap['perplexity'][f'{rule} m 32'], -3):,.0f}" for rule in ("add", "delta"))
    says(
        EXPERIMENTS,
        f"on {swap['tokens']:,} tokens of the same text (base {found['base']};",
        f"decay alone is at {found['log gates']} with log gates, {found['uniform gates']} with uniform ones and",
        f"{found['log gates, rotary dropped']} with log gates and rotary dropped",
        f"{found['log gates, window 32']} (log) and {found['uniform gates, window 32']} (uniform)",
        f"the window alone {found['local, window 32']}; gated {found['gated m 32']}, add {add}, delta {delta} (",
    )
