"""The experiment of the paper's Table 3: its text, its pieces and its table."""

from __future__ import annotations

import dataclasses
import functools
import lzma
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import succeed

from fastweights.data.readers import read_text
from fastweights.experiments.grid import load_grid
from fastweights.loading import load, load_tokenizer
from fastweights.report.page import block_markdown
from fastweights.training.recipe import change, load_recipe

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import wikitext103
import wikitext_text

WORDS = ("the", "of", ",", ".", "=", "cat", "sat", "@-@")
ARTICLE = (
    "The cat\n\nThe cat sat, of the cat-house, on one of the mats.\nEarly life.\nIt was on 1,000 mats.\nCat list\n"
)


@pytest.mark.parametrize(
    ("plain", "split"),
    [
        ("A guest-starring role (2000–05).", "A guest @-@ starring role ( 2000 – 05 ) ."),
        ("It cost $5,000.50, or 7%.", "It cost $ 5 @,@ 000 @.@ 50 , or 7 % ."),
        ("Mr. J. Smith of the U.S. Navy didn't", "Mr. J. Smith of the U.S. Navy didn 't"),
        ("O'Brien's 1980s' dogs' \"end\"...", "O 'Brien 's 1980s ' dogs ' \" end \" ..."),
        ("No. 5 and no. He left.", "No. 5 and no . He left ."),
        ("km/h at 30°C & so_on", "km / h at 30 ° C & so _ on"),
    ],
)
def test_words_are_split_as_in_wikitext(plain: str, split: str) -> None:
    assert wikitext_text.split_words(plain) == split
    assert wikitext_text.split_words(wikitext_text.join_words(split)) == split


def test_an_article_has_the_layout_of_wikitext() -> None:
    """Headings between blank lines; no lines that are no sentences."""
    assert wikitext_text.layout(ARTICLE) == [
        " ",
        " = The cat = ",
        " ",
        " The cat sat , of the cat @-@ house , on one of the mats . ",
        " ",
        " = = Early life = = ",
        " ",
        " It was on 1 @,@ 000 mats . ",
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A small copy of what the experiment reads."""
    folder = tmp_path / "data"
    (folder / "wikitext-103").mkdir(parents=True)
    (folder / "wiki").mkdir()

    def write(name: str, text: str) -> None:
        (folder / name).write_bytes(lzma.compress(text.encode()))

    write("wikitext-103/dict.txt.xz", "".join(f"{word} 1\n" for word in (*WORDS, *(f"w{i}" for i in range(80)))))
    for split in ("valid", "test"):
        write(f"wikitext-103/wiki.{split}.tokens.xz", " \n = cat = \n \n the cat <unk> . \n" * 40)
    write("wikitext-103/wiki.test.raw.xz", " \n = cat = \n \n the cat sat @-@ of . \n")
    for part in range(2):
        write(f"wiki/part-{part}.txt.xz", "\n<|endoftext|>\n".join([ARTICLE] * 5))
    return folder


def test_text_is_measured_and_parts_that_exist_stay(data: Path, tmp_path: Path) -> None:
    wikitext_text.prepare_text(data, tmp_path / "work", parts=2, processes=1)
    first = tmp_path / "work/train/part-0.txt"
    before = first.stat().st_mtime_ns
    wikitext_text.prepare_text(data, tmp_path / "work", parts=2, processes=1)
    assert first.stat().st_mtime_ns == before and first.read_text().count("= The cat =") == 5
    found = wikitext_text.measure(data, tmp_path / "work", parts=2)
    test, training = found["texts"]["WikiText-103 test"], found["texts"]["training text"]
    assert (test["words"], test["unknown"], test["lines"]) == (7 * 40, 40, 160)
    words = first.read_text().split()
    assert training["words"] == 2 * len(words)
    assert training["unknown"] == 2 * sum(word not in WORDS for word in words) > 0
    assert found["round_trip"]["same"] == 1.0


def test_texts_and_start_of_the_experiment(data: Path, tmp_path: Path) -> None:
    size = dataclasses.replace(wikitext103.SIZES["tiny"], words=50, articles=2, lines=8)
    size = dataclasses.replace(size, model=size.model | {"cutoffs": [10, 20]})
    session = wikitext103.Session(data, tmp_path / "work", size, deadline=time.monotonic())
    for _ in range(2):
        wikitext103.make_texts(session)
        wikitext103.make_start(session)
    model, tokenizer = load(tmp_path / "work/start"), load_tokenizer(tmp_path / "work/start")
    assert len(tokenizer) == model.config.vocab_size == 50
    assert len(read_text(tmp_path / "work/test.txt.xz").split("\n")) == 8
    with pytest.raises(wikitext103.OutOfTime):
        wikitext103.pretrain(session)


def test_a_command_is_stopped_with_sigterm_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fastweights train` does it, the command saves when it is asked to stop."""
    program = tmp_path / "waits.py"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n    pathlib.Path(sys.argv[1], 'saved').touch()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\npathlib.Path(sys.argv[1], 'ready').touch()\ntime.sleep(60)\n"
    )
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, env: start([sys.executable, program, tmp_path]))
    session = wikitext103.Session(tmp_path, tmp_path, wikitext103.SIZES["tiny"], time.monotonic() + 2)
    with pytest.raises(wikitext103.OutOfTime):
        session.fastweights("train")
    assert (tmp_path / "saved").exists() or not (tmp_path / "ready").exists()


def test_full_size_recipe_is_the_papers_and_runs(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("wikitext103")
    (stage,) = recipe.stages
    assert (recipe.batch_tokens, recipe.length, recipe.steps_of(stage)) == (26 * 512, 512, 100_000)
    assert (stage.learning_rate, stage.clip, stage.warmup * 100_000) == (1e-4, 0.1, 4_000) and recipe.dropout
    assert stage.learning_rate * stage.final == pytest.approx(2e-6)
    shorter = functools.partial(change, recipe, {"length": 32, "batch_tokens": 64})
    monkeypatch.setattr(wikitext103, "load_recipe", lambda name: shorter())
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    size = wikitext103.SIZES["tiny"]
    size = dataclasses.replace(size, model=size.model | {"cutoffs": [10, 20]})
    session = wikitext103.Session(data, tmp_path, size, deadline=time.monotonic())
    found = wikitext103.full_size(session, steps=3)
    assert (found["steps"], found["tokens"]) == (3, 3 * 64) and found["seconds_of_a_step"] > 0


def test_grid_has_the_papers_table_and_equal_tokens() -> None:
    variants = load_grid("wikitext103")
    cells = {variant.name: variant.cell or {} for variant in variants}
    assert {name: (cell.get("paper"), cell.get("paper_480")) for name, cell in cells.items()} == {
        "base": (20.5, 19.0),
        "linformer_64": (27.2, 30.7),
        "abc_32": (21.9, 20.5),
        "decay_32": (22.1, 20.7),
        "decay_64": (21.9, 20.5),
        "gated_delta_64": (None, None),
    }
    assert len({variant.tokens for variant in variants}) == 1


def _measured(**test: tuple[float, float]) -> dict[str, Any]:
    runs = []
    for variant in load_grid("wikitext103"):
        at_0, at_480 = test[variant.name]
        found = {split: {"0": at_0 + extra, "480": at_480 + extra} for split, extra in (("valid", 1.0), ("test", 0.0))}
        runs.append({"name": variant.name, **(variant.cell or {}), "tokens": 60_000_000, "perplexity": found})
    return {"base": {"parameters": 47_000_000, "tokens": 400_000_000}, "runs": runs}


def test_table_has_our_values_beside_the_papers() -> None:
    values = dict(linformer_64=(54.0, 60.0), abc_32=(43.0, 41.0), decay_32=(44.0, 41.5), decay_64=(42.0, 40.5))
    table = wikitext103.table_3(_measured(base=(40.0, 38.0), gated_delta_64=(41.0, 39.0), **values))
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    assert rows["decay", "64"] == ["43.00", "41.50", "42.00", "40.50", "1.050 ×", "1.066 ×", "21.9", "20.5"]
    assert rows["gated delta", "64"][-2:] == ["–", "–"]
    assert "47.0 million parameters" in table.note and "60.0 million tokens" in table.note
    assert "at context 0 here base, decay_64, abc_32, decay_32, linformer_64" in table.note


def test_table_without_measurements_has_the_papers_values_alone() -> None:
    nothing = {"base": {"parameters": 1, "tokens": 1}, "runs": [{"name": "base", "row": "base", "perplexity": {}}]}
    assert "| base | – | – | – | – | – | – | – | – | – |" in block_markdown(wikitext103.table_3(nothing))


def test_base_is_pretrained_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    """Without conversion, from the start that the experiment makes."""
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    size = dataclasses.replace(wikitext103.SIZES["tiny"], words=50, articles=5)
    size = dataclasses.replace(size, model=size.model | {"cutoffs": [10, 20]})
    session = wikitext103.Session(data, tmp_path / "work", size, deadline=time.monotonic())
    wikitext103.make_texts(session)
    wikitext103.make_start(session)
    work, changes = tmp_path / "work", ("length=16", "batch_tokens=64", "compile=false", "finetune.tokens=2560")
    settings = [word for setting in changes for word in ("--set", setting)]
    texts = ("--data", work / "train", "--validation", work / "valid.txt.xz")
    ran = succeed("train", work / "start", *texts, "--recipe", "wikitext103_base", *settings, "-o", work / "base")
    assert "after 2,560 tokens" in ran.stdout
