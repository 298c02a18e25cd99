"""The base of the paper's comparison: a GPT-2 of 14 M parameters, from scratch, on Wikipedia and books.

    python benchmarks/evidence_base.py TEXTS --work FOLDER [--prepare]

TEXTS holds wiki/part-{0..3}.txt.xz and books/gutenberg.txt.xz, documents separated by a line <|endoftext|>. The last
wiki part and some books are held out: FOLDER gets validation.txt.xz, held_out_wiki.txt.xz and held_out_books.txt.xz,
the start, the tokens, and the run (`base`). --prepare stops before training.
"""

from __future__ import annotations

import argparse
import itertools
import lzma
import shutil
from collections.abc import Iterator
from pathlib import Path

from packaged_model import BORDER, LEFT_OUT, RECOVERY, VALIDATION, new_model, tokenizer

from fastweights.data.readers import documents
from fastweights.data.token_files import prepare
from fastweights.loading import load_tokenizer, save
from fastweights.training.recipe import load_recipe
from fastweights.training.trainer import TrainConfig, resume, train

VOCABULARY, POSITIONS = 8192, 1024
SIZE = dict(n_layer=6, n_head=6, n_embd=384)
TOKENIZER_DOCUMENTS = 4_000
HELD_OUT_ARTICLES = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--prepare", action="store_true")
    options = parser.parse_args()
    work: Path = options.work
    split(options.texts, work)
    start, run, tokens = work / "start", work / "base", work / "tokens"
    if not start.exists():
        texts = itertools.islice(documents(work / "train"), TOKENIZER_DOCUMENTS)
        model = new_model(VOCABULARY, POSITIONS, **SIZE)
        save(model, start, tokenizer(itertools.chain(texts, held_in_books(work)), VOCABULARY, POSITIONS))
    if not tokens.exists():
        shutil.copytree(prepare(work / "train", load_tokenizer(start)).folder, tokens)
    if options.prepare:
        return
    if (run / "run.json").is_file():
        resume(run)
    else:
        texts_used = {"data": str(tokens), "validation": str(work / "validation.txt.xz")}
        train(TrainConfig(str(start), recipe=load_recipe("evidence_base"), **texts_used), run)
    shutil.copyfile(run / "result.json", "results/evidence_base.json")


def split(texts: Path, work: Path) -> None:
    """train/, and what is held out."""
    if (work / "held_out_books.txt.xz").is_file():
        return
    (work / "train").mkdir(parents=True, exist_ok=True)
    for number in range(3):
        shutil.copyfile(texts / f"wiki/part-{number}.txt.xz", work / f"train/wiki-{number}.txt.xz")
    books = [text for text in documents(texts / "books/gutenberg.txt.xz") if text.strip()]
    held_out = [book for book in books if book.startswith((*RECOVERY, *VALIDATION))]
    never = [book for book in books if book.startswith(LEFT_OUT)]
    write(work / "train/books.txt.xz", [book for book in books if book not in held_out and book not in never])
    articles = list(itertools.islice(documents(texts / "wiki/part-3.txt.xz"), 2 * HELD_OUT_ARTICLES))
    half = len(held_out) // 2
    write(work / "validation.txt.xz", [*articles[:HELD_OUT_ARTICLES], *held_out[:half]])
    write(work / "held_out_wiki.txt.xz", articles[HELD_OUT_ARTICLES:])
    write(work / "held_out_books.txt.xz", held_out[half:])


def held_in_books(work: Path) -> Iterator[str]:
    return itertools.islice(documents(work / "train/books.txt.xz"), 40)


def write(path: Path, texts: list[str]) -> None:
    path.write_bytes(lzma.compress(f"\n{BORDER}".join(texts).encode(), preset=6))


if __name__ == "__main__":
    main()
