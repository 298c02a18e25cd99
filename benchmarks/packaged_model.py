"""Make the model that is packaged for the quickstart: a tokenizer and a small GPT-2, from scratch, on books.

    python benchmarks/packaged_model.py BOOKS --work FOLDER [--export fastweights/packaged]

BOOKS is a text file (.xz) of books, with a line <|endoftext|> between them. Some are held out and
packaged, too, to train and to measure the converted model on.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from fastweights.loading import load, load_tokenizer, save
from fastweights.training.recipe import load_recipe
from fastweights.training.trainer import TrainConfig, resume, train

BORDER = "<|endoftext|>\n"
# First words of the books that the model never sees: for recovering a converted model, and for measuring.
RECOVERY = (
    "# Pride and Prejudice",
    "# Great Expectations",
    "# Treasure Island",
    "# Wuthering Heights",
    "# The War of the Worlds",
    "# The Call of the Wild",
)
VALIDATION = ("# The Picture of Dorian Gray", "# The Invisible Man")
# Neither for training nor for measuring. Parts of the first stand in other books, too. The others are not in the public
# domain everywhere, or may not be: an author, translator or editor died less than 70 years ago, or the scan does not
# say when it was published (fastweights/packaged/SOURCES.md).
LEFT_OUT = (
    "# The Adventures of Sherlock Holmes",
    "# A Room with a View",
    "# The Problems of Philosophy",
    "# The Jungle (Sinclair)",
    "# The Souls of Black Folk",
    "# Siddhartha",
    "# Oedipus King of Thebes",
    "# The Art of War",
    "# The Metamorphosis (Kafka)",
    "# The Enchiridion",
    "# Thus Spake Zarathustra",
    "# Ecce Homo",
    "# The Twilight of the Idols",
    "# The Birth of Tragedy",
    "# The Social Contract",
    "# Dead Souls",
    "# Audels Electric Library Vol 1",
    "# Audels Electric Library Vol 2",
    "# Audels New Electric Library",
)
SOURCES = "SOURCES.md"
VOCABULARY, POSITIONS = 2048, 512
SIZE = dict(n_layer=4, n_head=4, n_embd=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("books", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for the split text, the start and the run")
    parser.add_argument("--export", type=Path, help="folder to write the finished model and its text to")
    options = parser.parse_args()
    split_books(options.books, options.work)
    start, run = options.work / "start", options.work / "packaged"
    if not start.exists():
        lines = (line for line in (options.work / "train.txt").open(encoding="utf-8") if line != BORDER)
        save(new_model(VOCABULARY, POSITIONS, **SIZE), start, tokenizer(lines, VOCABULARY, POSITIONS))
    text = {"data": str(options.work / "train.txt"), "validation": str(options.work / "validation.txt.xz")}
    if (run / "run.json").is_file():
        resume(run)
    else:
        train(TrainConfig(str(start), recipe=load_recipe("packaged"), **text), run)
    shutil.copyfile(run / "result.json", "results/packaged_model.json")
    if options.export:
        export(run / "best", options.work, options.export)


def split_books(books: Path, work: Path) -> None:
    """train.txt, and the held-out books compressed."""
    work.mkdir(parents=True, exist_ok=True)
    if (work / "validation.txt.xz").is_file():
        return
    texts = [book for book in lzma.decompress(books.read_bytes()).decode().split(BORDER) if book.strip()]
    parts = {
        "recovery.txt.xz": [pick(texts, title) for title in RECOVERY],
        "validation.txt.xz": [pick(texts, title) for title in VALIDATION],
    }
    held_out = {book for part in parts.values() for book in part} | {pick(texts, title) for title in LEFT_OUT}
    (work / "train.txt").write_text(BORDER.join(book for book in texts if book not in held_out), encoding="utf-8")
    for name, part in parts.items():
        (work / name).write_bytes(lzma.compress(BORDER.join(part).encode(), preset=9 | lzma.PRESET_EXTREME))


def pick(books: list[str], title: str) -> str:
    return next(book for book in books if book.startswith(title))


def tokenizer(lines: Iterable[str], vocabulary: int, positions: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of our own."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BORDER.strip()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(lines, trainer)
    end = BORDER.strip()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end, model_max_length=positions)


def new_model(vocabulary: int, positions: int, **size: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    no_dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    special = dict(bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_positions=positions, **size, **no_dropout, **special))


def export(checkpoint: Path, work: Path, folder: Path) -> None:
    """Half precision: perplexity is the same to four digits, the file half as large."""
    sources = (folder / SOURCES).read_bytes() if (folder / SOURCES).is_file() else None
    save(load(checkpoint, dtype=torch.float16), folder, load_tokenizer(checkpoint), overwrite=True)
    for name in ("recovery.txt.xz", "validation.txt.xz"):
        shutil.copyfile(work / name, folder / name)
    if sources is not None:  # `overwrite` replaces the whole folder
        (folder / SOURCES).write_bytes(sources)


if __name__ == "__main__":
    main()
