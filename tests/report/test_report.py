"""A report says what the result files say, whichever of them there are, and shows it without help from outside."""

from __future__ import annotations

import base64
import builtins
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.sample_results import (
    ALL,
    COST,
    EVALUATION,
    INFINITY,
    NAN,
    PLOTS,
    TRAINING,
    Page,
    diverged,
    evaluated,
    report,
    section,
    svg_texts,
    table,
    tables,
    write,
)

from fastweights.report import ReportError, compare_curves, make_report
from fastweights.report.results import LoadedResult, models_in
from fastweights.results import EvaluatedModel, EvaluationResult, ResultError, TrainingResult


def test_quality_section_shows_the_values_of_the_result(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, ALL)
    quality = section(markdown, "Quality")
    rows = table(quality, "perplexity", "context")
    assert [(row["model"], row["context"], row["perplexity"], row["× base"]) for row in rows] == [
        ("gpt2", "0", "20.00", "–"),
        ("gpt2", "480", "16.00", "–"),
        ("gpt2-decay", "0", "25.00", "1.25 ×"),
        ("gpt2-decay", "480", "20.00", "1.25 ×"),
    ]
    assert rows[2]["by word"] == "31.50" and rows[2]["bits per byte"] == "1.016" and rows[3]["by word"] == "–"
    assert table(quality, "state")[1] == {
        "model": "gpt2-decay",
        "rule": "decay",
        "parameters": "134,515,008",
        "state": "2.2 MB",
    }
    assert table(quality, "from token")[1] == {"from token": "64", "to": "128", "gpt2": "18.25", "gpt2-decay": "22.81"}
    assert "From eval.json." in quality


def test_recall_and_task_tables_show_the_values_of_the_result(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, ALL)
    recall = section(markdown, "Recall")
    far = table(recall, "pairs recalled: distance")[1]
    assert far == {"pairs recalled: distance": "512", "gpt2": "95.0 %", "gpt2-decay": "38.9 %", "chance": "12.5 %"}
    copied = table(recall, "tokens copied: distance")[0]
    assert (copied["gpt2"], copied["chance"]) == ("50.0 %", "\\< 0.1 %")
    scores = {(row["task"], row["model"]): row for row in table(section(markdown, "Tasks"), "score")}
    assert scores["lambada", "gpt2"]["score"] == "43.0 ± 0.7 %"
    assert scores["lambada", "gpt2-decay"]["score"] == "34.4 ± 0.7 %"
    assert scores["lambada", "gpt2-decay"]["difference to the base"] == "-8.6 ± 1.0 points"
    assert scores["wikitext", "gpt2-decay"]["score"] == "33.2"


def test_tasks_have_an_average(tmp_path: Path) -> None:
    """Of those that all models have, by their normalized share where there is one."""
    assert "mean of" not in report(tmp_path, ALL)[0]
    changed = copy.deepcopy(EVALUATION)
    for model, share in zip(changed["models"], (0.5, 0.3), strict=True):
        model["tasks"] = {"b": {"acc": 0.9, "acc_norm": share}, "a": {"acc": 0.1}, "c": {"f1": 0.9}}
    changed["models"][1]["tasks"]["d"] = {"acc": 0.9}
    rows = table(report(tmp_path, {"eval": changed})[0], "mean of a, b")
    assert [(row["mean of a, b"], row["of the base's"]) for row in rows] == [("30.0 %", "–"), ("20.0 %", "66.7 %")]
    tuned = changed["models"][0] | {"name": "tuned", "tasks": {"b": {"acc": 0.7}, "a": {"acc": 0.1}}}
    changed["models"].insert(1, tuned)
    rows = table(report(tmp_path, {"eval": changed})[0], "mean of a, b")
    assert [row["of gpt2's"] for row in rows] == ["–", "133.3 %", "66.7 %"]
    assert [row["of tuned's"] for row in rows] == ["75.0 %", "–", "50.0 %"]


def test_cost_section_shows_the_values_of_the_result(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, ALL)
    cost = section(markdown, "Cost of one more token")
    assert table(cost, "tokens")[1] == {
        "tokens": "1,024",
        "gpt2: time": "12 ms",
        "gpt2: memory": "16.0 MB",
        "gpt2-decay: time": "6 ms",
        "gpt2-decay: memory": "500.0 kB",
    }
    assert "From cost.json. The position table of gpt2 was repeated for timing." in cost


def test_memory_is_compared_with_the_kv_cache_of_the_base(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, {"eval": EVALUATION})
    rows = table(section(markdown, "Memory of one sequence"), "KV cache of the base of gpt2-decay")
    assert [tuple(row.values()) for row in rows] == [("1,024", "2.2 MB", "47.2 MB"), ("65,536", "2.2 MB", "3.0 GB")]
    own = "gpt2-decay caches 2.2 MB, however long the context is"
    assert f"{own}; its base caches 47.2 MB after 1,024 tokens and 3.0 GB after 65,536 tokens." in markdown


def test_memory_of_a_hybrid_grows(tmp_path: Path) -> None:
    """Its attention layers have a KV cache: a report must not say that its memory is constant."""
    hybrid = copy.deepcopy(EVALUATION)
    hybrid["models"][1]["cache"][1]["bytes"] = 82_000_000
    summary = section(report(tmp_path, {"eval": hybrid})[0], "Summary")
    assert "gpt2-decay caches 2.2 MB after 1,024 tokens and 82.0 MB after 65,536 tokens;" in summary
    assert "however long" not in summary


def test_models_of_different_bases_each_have_their_kv_cache(tmp_path: Path) -> None:
    several = copy.deepcopy(EVALUATION)
    small, same = ({**several["models"][1], "name": name} for name in ("small", "same"))
    small["cache"] = [size | {"base_bytes": size["base_bytes"] // 2} for size in small["cache"]]
    several["models"] += [small, same]
    row = table(report(tmp_path, {"eval": several})[0], "cache after: tokens")[0]
    assert row == {
        "cache after: tokens": "1,024",
        **dict.fromkeys(("gpt2-decay", "small", "same"), "2.2 MB"),
        "KV cache of the base of gpt2-decay": "47.2 MB",
        "KV cache of the base of small": "23.6 MB",
    }


def test_training_section_shows_the_values_of_the_result(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, ALL)
    training = section(markdown, "Training")
    assert table(training, "best perplexity") == [
        {
            "run": "paper-run",
            "settings": "decay, m 32",
            "tokens": "3 M",
            "time": "2.1 h",
            "best perplexity": "17.33",
            "last": "17.40",
            "base": "14.50",
            "best × base": "1.20 ×",
        }
    ]
    stages = table(training, "stage")
    assert [(row["stage"], row["steps"], row["tokens"], row["time"]) for row in stages] == [
        ("transfer", "100", "1 M", "90 s"),
        ("finetune", "200", "2 M", "2.0 h"),
    ]


def test_summary_lists_losses_and_gains(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, ALL)
    lost, _, won = section(markdown, "Summary").partition("**What was won**")
    assert "gpt2-decay has a perplexity of 20.00 on wiki, 1.25 × that of gpt2 (16.00)." in lost
    assert "pairs recalled over 16 and 512 tokens: 97 % and 39 % (gpt2: 97 % and 95 %; chance 12.5 %)" in lost
    assert "paper-run reached a validation perplexity of 17.33 after 3 M tokens, 1.20 × the base model's 14.50" in lost
    assert "after 1,024 tokens one more token takes 6 ms, 2.00 × faster than with gpt2 (12 ms)" in won
    assert "faster from 449 tokens on" in won
    assert "500.0 kB, 32.0 × smaller than with gpt2 (16.0 MB); smaller at every length measured" in won


def test_summary_says_where_a_model_is_slower(tmp_path: Path) -> None:
    slow = copy.deepcopy(COST) | {"cheaper_from": {"seconds": None, "bytes": None}}
    for point in slow["models"][1]["points"]:
        point["seconds"] = 0.024
    markdown, _ = report(tmp_path, {"cost": slow})
    assert "24 ms, 2.00 × slower than with gpt2 (12 ms); not faster for good at any length measured" in markdown


def test_provenance_names_every_file(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, ALL)
    rows = table(section(markdown, "Where the numbers come from"), "file", "commit")
    assert [(row["file"], row["kind"], row["seed"], row["tokens"]) for row in rows] == [
        ("eval.json", "evaluation", "0", "5,000"),
        ("cost.json", "cost", "0", "16"),
        ("train.json", "training", "3", "3 M"),
        ("rank.json", "ranking", "0", "65,536"),
    ]
    for row in rows:
        assert (row["date"], row["commit"]) == ("2026-11-20", "abcdef123456")
        assert (row["versions"], row["hardware"]) == ("python 3.11.7, torch 2.13.0", "cpu x86_64, threads 2")


def test_files_of_one_name_get_different_labels(tmp_path: Path) -> None:
    runs = {f"{name}/result": TRAINING | {"name": "run", "seed": seed} for seed, name in enumerate("ab")}
    paths = write(tmp_path, runs)
    make_report([*paths, paths[0]], tmp_path / "report")
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert [row["file"] for row in table(markdown, "file")] == ["a/result.json", "b/result.json"]
    assert [row["run"] for row in table(markdown, "best perplexity")] == ["run, seed 0", "run, seed 1"]
    assert str(tmp_path) not in markdown


def test_models_of_several_files_share_a_base(tmp_path: Path) -> None:
    base, decay = EVALUATION["models"]
    files = {"a": EVALUATION | {"models": [decay]}, "base": EVALUATION | {"models": [base]}}
    files["b"] = EVALUATION | {"models": [base, evaluated("gpt2-decay", True, 1.5)]}
    rows = table(report(tmp_path, files)[0], "perplexity", "context")
    found = {row["model"]: row["× base"] for row in rows if row["context"] == "0"}
    assert found == {"gpt2": "–", "gpt2-decay (a.json)": "1.25 ×", "gpt2-decay (b.json)": "1.50 ×"}
    twice = {"c": EVALUATION | {"models": [base, decay, evaluated("gpt2-decay", True, 1.5)]}}
    models = [row["model"] for row in table(report(tmp_path, twice)[0], "state")]
    assert models == ["gpt2", "gpt2-decay (c.json)", "gpt2-decay (c.json, 2)"]


@pytest.mark.parametrize("change, together", [({}, True), ({"parameters": 7}, False), ({"tasks": {}}, False)])
def test_parts_of_one_model_in_several_files_are_joined(change: dict[str, Any], together: bool) -> None:
    facts = {"name": "a", "parameters": 5, "converted": True, "rule": "decay", "state_bytes": 8}
    parts = [facts | {"perplexity": [], "seconds": 1.0} | change, facts | {"tasks": {}, "seconds": 2.0}]
    results = [
        LoadedResult(
            f"{i}.json",
            EvaluationResult(seed=0, tokens=0, settings={}, models=[EvaluatedModel.from_dict(part)]),
        )
        for i, part in enumerate(parts)
    ]
    found = models_in(results)
    if together:
        assert [(entry.label, entry.file) for entry in found] == [("a", "0.json, 1.json")]
        assert found[0].model.to_dict() == facts | {"perplexity": [], "tasks": {}, "seconds": 2.0}
    else:
        assert [entry.label for entry in found] == ["a (0.json)", "a (1.json)"]


def test_plots_are_written_and_linked(tmp_path: Path) -> None:
    markdown, html = report(tmp_path, ALL)
    plots = tmp_path / "report" / "plots"
    assert {path.stem for path in plots.iterdir()} == PLOTS
    assert set(re.findall(r"\(plots/(\w+)\.svg\)", markdown)) == PLOTS
    assert Page(html).tags.count("img") == len(PLOTS)
    for name in PLOTS - {"loss", "validation", "ranking"}:
        assert {"gpt2", "gpt2-decay"} <= set(svg_texts(plots / f"{name}.svg"))
    assert "Time of one token: less from 449 tokens" in svg_texts(plots / "seconds.svg")
    assert "Memory of the cache" in svg_texts(plots / "bytes.svg")  # no crossing to mark
    assert "base model: 14.50" in svg_texts(plots / "validation.svg")
    assert "chance: 12.5 %" in svg_texts(plots / "recall_pairs.svg")
    assert {"tokens (1 transfer, 2 finetune)", "1", "2"} <= set(svg_texts(plots / "loss.svg"))


def test_plots_follow_a_dark_color_scheme(tmp_path: Path) -> None:
    report(tmp_path, {"cost": COST})
    svg = (tmp_path / "report" / "plots" / "seconds.svg").read_text()
    assert "prefers-color-scheme: dark" in svg and "fill: var(--paper)" in svg
    assert not re.search("(fill|stroke): #(24292f|ffffff)", svg)


def test_html_is_self_contained(tmp_path: Path) -> None:
    markdown, html = report(tmp_path, ALL, title="My model")
    page = Page(html)
    assert page.sources and all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert not {"script", "link", "iframe", "object", "a"} & set(page.tags)
    assert "url(" not in html and "@import" not in html
    assert "default-src 'none'" in html and 'name="viewport"' in html and "prefers-color-scheme: dark" in html
    embedded = {base64.b64decode(source.partition(",")[2]).decode() for source in page.sources}
    assert embedded == {path.read_text() for path in (tmp_path / "report" / "plots").iterdir()}
    assert markdown.startswith("# My model\n")


def test_markdown_and_html_have_the_same_cells(tmp_path: Path) -> None:
    markdown, html = report(tmp_path, ALL)
    cells = [cell.replace("\\", "") for found in tables(markdown) for row in found for cell in row]
    assert Page(html).cells == cells


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script> | $\\frac{ & \"_q\n# a*b*"
    results = json.loads(json.dumps(ALL).replace("gpt2-decay", json.dumps(hostile)[1:-1]))
    results["train"] |= {"name": hostile}
    markdown, html = report(tmp_path, results, title=hostile)
    page = Page(html)
    assert "script" not in page.tags and hostile in page.words
    assert "<script>" not in re.sub(r"\\<", "", markdown)
    assert {len(row) for found in tables(markdown) for row in found if "perplexity" in found[0]} == {9}
    shown = " ".join(svg_texts(tmp_path / "report" / "plots" / "seconds.svg"))
    assert "<script>alert('x')</script> | $\\frac{" in shown


@pytest.mark.parametrize("name", ["_private", "模型", "x" * 200, "", "$a$ $\\frac$", "- \\ -"])
def test_any_name_can_be_drawn(tmp_path: Path, name: str) -> None:
    results = json.loads(json.dumps({"cost": COST}).replace("gpt2-decay", json.dumps(name)[1:-1]))
    report(tmp_path, results)
    shown = " ".join(svg_texts(tmp_path / "report" / "plots" / "seconds.svg"))
    assert name[:40] in shown and "x" * 45 not in shown


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    def made(folder: Path) -> dict[str, bytes]:
        make_report(paths, folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    paths = write(tmp_path, ALL)
    first = made(tmp_path / "a")
    assert first == made(tmp_path / "b") == made(tmp_path / "a")
    assert set(first) == {"report.md", "report.html", *(f"plots/{name}.svg" for name in PLOTS)}  # no temporary files


@pytest.mark.parametrize("name", ALL)
def test_one_result_alone_makes_a_report(tmp_path: Path, name: str) -> None:
    markdown, html = report(tmp_path, {name: ALL[name]})
    titles = re.findall(r"^## (.*)$", markdown, re.MULTILINE)
    own = {
        "eval": ["Quality", "Recall", "Tasks", "Memory of one sequence"],
        "cost": ["Cost of one more token"],
        "train": ["Training"],
        "rank": ["Ranking of layers"],
    }[name]
    assert titles == ["Summary", *own, "Where the numbers come from"]
    missing = {"cost": "fastweights eval", "train": "fastweights profile", "rank": "fastweights eval"}.get(name)
    assert missing is None or missing in markdown
    assert Page(html).tags.count("h2") == len(titles)


def test_results_of_earlier_versions_have_the_size_of_the_state_alone(tmp_path: Path) -> None:
    earlier = copy.deepcopy(EVALUATION)
    del earlier["models"][1]["cache"]
    markdown, _ = report(tmp_path, {"eval": earlier})
    assert "gpt2-decay has a state of 2.2 MB, however long the context is." in markdown
    assert not section(markdown, "Memory of one sequence")


def _without(value: Any, lost: str) -> Any:
    if isinstance(value, dict):
        return {name: _without(item, lost) for name, item in value.items() if name != lost or name == "kind"}
    return [_without(item, lost) for item in value] if isinstance(value, list) else value


def _fields(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {name for item in value.values() for name in _fields(item)}
    return {name for item in value for name in _fields(item)} if isinstance(value, list) else set()


def _changed(value: Any, old: type, new: Any) -> Any:
    if isinstance(value, dict):
        return {name: item if name == "kind" else _changed(item, old, new) for name, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, old, new) for item in value]
    return new if type(value) is old else value


def test_missing_field_is_optional_or_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.report.parts.draw", lambda panel: "")  # drawing takes the time
    optional = set()
    for name in sorted(_fields(list(ALL.values())) - {"kind"}):
        try:
            tables(report(tmp_path, _without(ALL, name))[0])
            optional.add(name)
        except ResultError as error:
            assert re.search(rf"\.json: (\S*\.)?{re.escape(name)} is missing$", str(error)), name
    measures = {"perplexity", "by_position", "recall", "tasks", "word", "bits_per_byte", "positions"}
    assert {"date", "commit", "versions", "hardware"} | measures - {"perplexity"} <= optional


@pytest.mark.parametrize(
    ("kind", "value"), [(float, NAN), (float, INFINITY), (float, 0), (float, -1.5), (int, 0), (int, -1), (str, "")]
)
def test_report_accepts_extreme_and_non_finite_numbers(tmp_path: Path, kind: type, value: Any) -> None:
    markdown, html = report(tmp_path, {name: _changed(result, kind, value) for name, result in ALL.items()})
    tables(markdown)
    Page(html)
    if kind is float:
        assert not re.search(r"\b(nan|inf|None)\b", markdown)


def test_model_without_finite_perplexity_is_reported_as_diverged(tmp_path: Path) -> None:
    broken = copy.deepcopy(EVALUATION)
    broken["models"][1]["perplexity"] = [{"data": "wiki", "length": 1024, "context": 0, "tokens": 5000, "token": NAN}]
    markdown, _ = report(tmp_path, {"eval": broken})
    assert table(markdown, "context")[-1]["perplexity"] == "diverged"
    assert "gpt2-decay has no finite perplexity on wiki: it diverged." in markdown


def test_a_diverged_run_is_marked_with_its_reason(tmp_path: Path) -> None:
    markdown, html = report(tmp_path, {"good": TRAINING, "bad": diverged(name="add", curve=TRAINING["curve"][:2])})
    row = table(markdown, "best perplexity")[1]
    assert (row["run"], row["best perplexity"], row["last"]) == ("add\\*", "–", "diverged")
    reason = "add* diverged at step 120 (stage finetune): the loss is nan."
    assert reason in Page(html).words
    assert reason.replace("*", "\\*") in section(markdown, "Summary")
    assert "add*" in svg_texts(tmp_path / "report" / "plots" / "loss.svg")
    assert "tokens (1 transfer, 2 finetune)" in svg_texts(tmp_path / "report" / "plots" / "loss.svg")


def test_unfinished_run_is_reported_as_such(tmp_path: Path) -> None:
    assert "The run is not finished." in report(tmp_path, {"train": TRAINING | {"finished": False}})[0]


def test_compare_curves_draws_each_run_and_the_mean(tmp_path: Path) -> None:
    paths = write(tmp_path, {f"decay{seed}": TRAINING | {"seed": seed} for seed in range(3)})
    added = [TrainingResult.from_dict(body) for body in (TRAINING, diverged())]
    target = compare_curves({"decay": paths, "add": added}, tmp_path / "a" / "runs.svg", base=14.5)
    assert {"decay", "add* (1 of 2 diverged)", "base model: 14.50"} <= set(svg_texts(target))
    assert target.stat().st_size < 30_000
    first = target.read_bytes()
    assert compare_curves({"decay": paths, "add": added}, target, base=14.5).read_bytes() == first
    with pytest.raises(ReportError, match="nothing to compare: no run of decay has validation points"):
        compare_curves({"decay": [TrainingResult.from_dict(TRAINING | {"validation": []})]}, target)


def test_the_mean_is_over_the_runs_that_did_not_diverge() -> None:
    from fastweights.report.training import Curve, curves_panel

    def run(*perplexities: float, **changes: Any) -> Curve:
        first = TRAINING["validation"][0]
        points = [first | {"tokens": 10 * i, "perplexity": value} for i, value in enumerate(perplexities)]
        return Curve.of(TrainingResult.from_dict(TRAINING | {"validation": points} | changes))

    failed = run(90, 99, diverged={"step": 1, "stage": 0, "reason": "nan"})
    panel = curves_panel({"decay": [run(20, 10, 8), run(30, 14), failed]}, None)
    thick = [line for line in panel.lines if not line.faint]
    assert [list(line.points) for line in thick] == [[(0, 25), (10, 12)]]
    assert [line.ends_badly for line in panel.lines if line.faint] == [False, False, True]


def test_bad_files_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"kind": "cost"}')
    with pytest.raises(ResultError, match=r"bad\.json: seed is missing"):
        make_report([tmp_path / "bad.json"], tmp_path / "report")
    with pytest.raises(ReportError, match="none was given"):
        make_report([], tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    [path] = write(tmp_path, {"cost": COST})
    with pytest.raises(ReportError, match=r"cannot write .*cost\.json.*; choose another output folder"):
        make_report([path], path)
    with pytest.raises(ReportError, match="cannot write"):
        compare_curves({"decay": [TrainingResult.from_dict(TRAINING)]}, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["cost.json"]


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, before = report(tmp_path, {"cost": COST})

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ReportError, match="No space left on device"):
        report(tmp_path, ALL)
    assert (tmp_path / "report" / "report.html").read_text() == before
    assert not list((tmp_path / "report").rglob("*.tmp"))


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ReportError, match=r"pip install 'fastweights\[plot\]'"):
        make_report(write(tmp_path, ALL), tmp_path / "report")


def test_columns_without_a_number_are_left_out(tmp_path: Path) -> None:
    header = tables(section(report(tmp_path, _without({"eval": EVALUATION}, "word"))[0], "Quality"))[1][0]
    assert "bits per byte" in header and "by word" not in header


def test_curve_that_starts_in_the_millions_is_cut_off(tmp_path: Path) -> None:
    start = TRAINING["validation"][0] | {"tokens": 1000, "perplexity": 9.1e6}
    high = TRAINING | {"validation": [start, *TRAINING["validation"]]}
    for result, cut in ((TRAINING, False), (high, True)):
        report(tmp_path, {"train": result})
        labels = svg_texts(tmp_path / "report" / "plots" / "validation.svg")
        assert ("perplexity (cut off at 87)" in labels) == cut  # five times the best, 17.33


def test_models_are_not_compared_with_a_converted_one(tmp_path: Path) -> None:
    models = [evaluated("one", True, 1.0), evaluated("other", True, 2.0)]
    markdown, _ = report(tmp_path, {"eval": EVALUATION | {"models": models}})
    assert "that of one" not in markdown and "that of other" not in markdown
