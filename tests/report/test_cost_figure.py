"""Results of `fastweights profile` with a layer in them: the report's words, tables and plots, and the figure."""

from __future__ import annotations

import copy
import itertools
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from helpers.sample_results import COST, PROVENANCE, report, section, svg_texts, table, tables

from fastweights.report import ReportError, cost_figure, fill_page
from fastweights.report.plots import NAME_HEIGHT
from fastweights.results import CostResult


def points(seconds: list[float], peak: list[int]) -> list[dict[str, Any]]:
    lengths = [128, 1024, 8192]
    return [
        {"length": n, "seconds": s, "bytes": p - 1000, "peak_bytes": p}
        for n, s, p in zip(lengths, seconds, peak, strict=False)
    ]


LAYER: dict[str, Any] = {
    "kind": "cost",
    "level": "layer",
    **PROVENANCE,
    "hardware": {"cpu": "x86_64", "gpu": "NVIDIA H200"},
    "seed": 0,
    "tokens": 15,
    "batch": 32,
    "heads": 1,
    "d": 64,
    "m": 64,
    "dtype": "bfloat16",
    "device": "cuda",
    "cheaper_from": {"seconds": 128, "bytes": 128, "peak_bytes": 128},
    "models": [
        {
            "name": "attention",
            "converted": False,
            "points": points([2e-5, 4e-5], [2_000_000, 16_000_000]),
            "left_out": [{"length": 8192, "reason": "out of memory: tried to allocate 9 GiB"}],
        },
        {"name": "decay", "converted": True, "points": points([1e-5] * 3, [600_000] * 3)}
        | {"cheaper_from": {"seconds": 128, "bytes": 128, "peak_bytes": 128}},
        {"name": "delta", "converted": True, "points": points([3e-5] * 3, [610_000] * 3)}
        | {"cheaper_from": {"seconds": 577, "bytes": 128, "peak_bytes": 128}},
    ],
}
BOTH = {"batch": 1, "device": "cpu", **COST, "layer": {n: v for n, v in LAYER.items() if n not in PROVENANCE}}


def with_peaks() -> dict[str, Any]:
    """Models whose peaks cross: 4.2 to 16.2 MB against 5 MB. Their cached bytes do not."""
    body = copy.deepcopy(COST) | {"cheaper_from": {"seconds": 449, "bytes": 256, "peak_bytes": 308}}
    base, decay = (model["points"] for model in body["models"])
    for point in base:
        point["peak_bytes"] = point["bytes"] + 200_000
    for point in decay:
        point["peak_bytes"] = 5_000_000
    return body


def drawn(body: dict[str, Any], folder: Path) -> tuple[bytes, str]:
    png, svg = cost_figure(CostResult.from_dict(body), folder / "cost.json")
    assert (png.name, svg.name) == ("cost.png", "cost.svg")
    return png.read_bytes(), svg.read_text()


def test_report_of_a_layer_has_times_peaks_and_missing_points(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, {"layer": LAYER})
    cost = section(markdown, "Cost of one more token")
    assert table(cost, "tokens")[1] == {
        "tokens": "1,024",
        "attention: time": "40 µs",
        "attention: peak": "16.0 MB",
        "decay: time": "10 µs",
        "decay: peak": "600.0 kB",
        "delta: time": "30 µs",
        "delta: peak": "610.0 kB",
    }
    assert table(cost, "tokens")[2]["attention: time"] == "–"
    assert "attention has no point at 8,192 tokens: out of memory: tried to allocate 9 GiB." in cost
    assert {path.stem for path in (tmp_path / "report" / "plots").iterdir()} == {"seconds", "peak_bytes"}
    assert "Time of one token, one layer" in svg_texts(tmp_path / "report" / "plots" / "seconds.svg")
    won = section(markdown, "Summary")
    assert "one decay layer: after 1,024 tokens one more token takes 10 µs, 4.00 × faster than with attention" in won
    assert "one delta layer: after 1,024 tokens one more token needs 610.0 kB, 26.2 × less than with attention" in won
    assert "faster from 577 tokens on" in won


def test_report_of_a_layer_and_models_has_plots_and_tables_of_both(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, {"both": BOTH})
    plots = {path.stem for path in (tmp_path / "report" / "plots").iterdir()}
    assert plots == {"seconds", "peak_bytes", "seconds_2", "bytes_2"}
    headers = [found[0] for found in tables(section(markdown, "Cost of one more token"))]
    assert [header[1] for header in headers] == ["attention: time", "gpt2: time"]
    assert "one decay layer: after" in markdown and "gpt2-decay: after 1,024 tokens one more token takes" in markdown


def test_report_of_models_with_peaks_has_a_table_of_peaks(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, {"cost": with_peaks()})
    assert {path.stem for path in (tmp_path / "report" / "plots").iterdir()} == {"seconds", "bytes", "peak_bytes"}
    cost = section(markdown, "Cost of one more token")
    assert table(cost, "gpt2: memory")[1]["gpt2: memory"] == "16.0 MB"
    assert table(cost, "gpt2: peak") == [
        {"tokens": "256", "gpt2: peak": "4.2 MB", "gpt2-decay: peak": "5.0 MB"},
        {"tokens": "1,024", "gpt2: peak": "16.2 MB", "gpt2-decay: peak": "5.0 MB"},
    ]
    assert (
        "gpt2-decay: after 1,024 tokens one more token needs 5.0 MB, 3.24 × less than with gpt2 (16.2 MB); "
        "less from 308 tokens on."
    ) in section(markdown, "Summary")


def test_page_is_filled_with_the_peaks_of_models(tmp_path: Path) -> None:
    (tmp_path / "both.json").write_text(json.dumps(with_peaks() | {"layer": BOTH["layer"]}))
    page = tmp_path / "page.md"
    marks = "".join(f"<!-- report: {name} -->\n<!-- end -->\n" for name in ("peak bytes 2", "peak bytes 2 plot"))
    page.write_text(f"<!-- results: both.json -->\n{marks}")
    fill_page(page)
    assert tables(page.read_text())[0][0] == ["tokens", "gpt2: peak", "gpt2-decay: peak"]
    assert "(page_peak_bytes_2.svg)" in page.read_text()


def test_older_result_without_peak_crossing_is_reported(tmp_path: Path) -> None:
    body = with_peaks()
    del body["cheaper_from"]["peak_bytes"]
    markdown, _ = report(tmp_path, {"cost": body})
    assert "3.24 × less than with gpt2 (16.2 MB).\n" in markdown and "for good" not in markdown
    drawn(body, tmp_path)
    assert "Peak memory of one token" in svg_texts(tmp_path / "cost.svg")


@pytest.mark.parametrize("lost", ["d", "m", "heads", "left_out", "cheaper_from", "peak_bytes", "hardware"])
def test_optional_fields_may_be_absent(tmp_path: Path, lost: str) -> None:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(item) for name, item in value.items() if name != lost}
        return [without(item) for item in value] if isinstance(value, list) else value

    body = without(LAYER) | {"cheaper_from": {}}
    report(tmp_path, {"layer": body})
    drawn(body, tmp_path)


def test_no_figure_is_drawn_without_points(tmp_path: Path) -> None:
    for models in ([], [model | {"points": []} for model in LAYER["models"]]):
        report(tmp_path, {"layer": LAYER | {"models": models}})
        with pytest.raises(ReportError, match="nothing to draw: the result has no point of any length"):
            drawn(LAYER | {"models": models}, tmp_path)


def test_figure_names_its_lines_and_conditions(tmp_path: Path) -> None:
    drawn(LAYER, tmp_path)
    shown = svg_texts(tmp_path / "cost.svg")
    assert "one layer, batch 32, heads 1, d = m = 64, bfloat16, NVIDIA H200" in shown
    assert [shown.count(name) for name in ("attention", "decay", "delta")] == [2, 2, 2]
    assert {"Time of one token", "Peak memory of one token", "128", "1,024", "8,192"} <= set(shown)
    assert all(any(text.endswith(unit) for text in shown) for unit in (" µs", " MB"))


def test_figure_of_a_layer_and_models_has_two_rows(tmp_path: Path) -> None:
    one, _ = drawn(LAYER, tmp_path)
    both, _ = drawn(BOTH, tmp_path)
    shown = svg_texts(tmp_path / "cost.svg")
    assert "whole models, batch 1, float32, x86_64" in shown and {"gpt2", "gpt2-decay", "delta"} <= set(shown)
    assert "Memory of the cache" in shown  # these models have no peaks
    (_, low), (_, high) = (struct.unpack(">II", png[16:24]) for png in (one, both))
    assert high == 2 * low


def test_figure_of_models_shows_their_peaks(tmp_path: Path) -> None:
    drawn(with_peaks(), tmp_path)
    shown = svg_texts(tmp_path / "cost.svg")
    assert "Peak memory of one token: less from 308 tokens" in shown
    assert not any("Memory of the cache" in text for text in shown)


def test_names_of_lines_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heights: list[float] = []
    from matplotlib.axes import Axes

    original = Axes.text

    def noted(self: Axes, x: float, y: float, *args: Any, **options: Any) -> Any:
        heights.append(y)
        return original(self, x, y, *args, **options)

    monkeypatch.setattr(Axes, "text", noted)
    drawn(LAYER, tmp_path)
    panels = [heights[:3], heights[3:]]
    for panel in panels:
        assert all(after - before >= NAME_HEIGHT - 1e-9 for before, after in itertools.pairwise(panel))
    assert 0.9 < panels[1][2] < 1  # attention needs the most memory: its name stands at its line's end


def test_figure_is_small_and_deterministic(tmp_path: Path) -> None:
    png, svg = drawn(BOTH, tmp_path)
    assert (png, svg) == drawn(copy.deepcopy(BOTH), tmp_path)
    assert png.startswith(b"\x89PNG") and len(png) < 400_000 and len(svg) < 200_000
    assert not re.search(r"\d{4}-\d\d-\d\d|<dc:date", svg.partition("<defs>")[2]) and b"tIME" not in png
    assert "prefers-color-scheme: dark" in svg
