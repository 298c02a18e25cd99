"""Wikipedia articles as plain text, brought into the tokenisation and layout of WikiText-103.

    python benchmarks/wikitext_text.py DATA --work FOLDER [--parts N] [--output results/wikitext103_text.json]

DATA holds wiki/part-{0..3}.txt.xz, articles separated by a line <|endoftext|>, and wikitext-103/ with dict.txt.xz and
wiki.{valid,test}.tokens.xz, wiki.test.raw.xz. FOLDER gets train/part-{0..3}.txt, streams of lines without borders
between articles, as fairseq reads WikiText.

Words are split as by the Moses tokenizer, whose conventions WikiText follows; hyphens between letters and separators in
numbers become @-@, @,@ and @.@. Two measures say how close that is: the share of unknown words, and how much of
WikiText's own test text comes back when its words are joined to plain text and split again.
"""

from __future__ import annotations

import argparse
import difflib
import json
import multiprocessing
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastweights.data.readers import documents, read_text
from fastweights.modeling.fairseq import UNKNOWN, read_dictionary
from fastweights.utils.files import atomic_file, write_json
from fastweights.utils.parsing import read_json
from fastweights.utils.provenance import write_result

PARTS = 4
LETTER = r"[^\W\d_]"
# Words before which a period is no end of a sentence, besides single letters.
ABBREVIATIONS = frozenset(
    (
        *("Adm", "al", "approx", "b", "Bros", "Brig", "c", "ca", "Capt", "cf", "Cmdr", "Co", "Col", "Corp", "Dr", "ed"),
        *("Fr", "Gen", "Gov", "Hon", "Inc", "Jr", "Lt", "Ltd", "m", "Maj", "Messrs", "Mr", "Mrs", "Ms", "Mt", "Op"),
        *("p", "Ph", "Prof", "r", "Rep", "Rev", "Sen", "Sgt", "Sr", "St", "v", "var", "viz", "vol", "vs"),
    )
)
BEFORE_NUMBERS = frozenset(("Art", "No", "Nos", "Nr", "pp"))
MOST_HEADING_WORDS, FEWEST_WORDS = 8, 6
# The articles' headings end with a period, like short sentences, which have one of these words.
IN_SENTENCES = re.compile(r"\b(was|were|is|are|has|had|have|did|died|became|he|she|it|they|will|can)\b", re.I)
SENTENCE_END = tuple('.!?"”:;)')


def split_words(line: str) -> str:
    """A line in WikiText's tokenisation: words and punctuation with single spaces between them."""
    line = re.sub(r"([^\w\s.'`,-]|_)", r" \1 ", line)
    line = re.sub(r"(?<=[^\W_])-(?=[^\W_])", " @-@ ", line)
    line = re.sub(r"\.{2,}", r" \g<0> ", line)
    line = re.sub(r"(?<=\d)([.,])(?=\d)", r" @\1@ ", line)
    line = re.sub(r"(?<!@),(?!@)", " , ", line)
    line = re.sub(rf"(?<={LETTER})'(?={LETTER})|(?<=\d)'(?=s\b)|(')", lambda m: " ' " if m[1] else " '", line)
    line = re.sub(r"(\S+)\.(?= +(\S)|\s*$)", _period, line)
    return " ".join(line.split())


def _period(match: re.Match[str]) -> str:
    word, following = match[1], match[2] or ""
    is_abbreviation = ("." in word and any(map(str.isalpha, word))) or word in ABBREVIATIONS
    is_abbreviation |= len(word) == 1 and word.isalpha() and word.isupper()
    is_abbreviation |= following.islower() or (word in BEFORE_NUMBERS and following.isdigit())
    return match[0] if is_abbreviation or not word.strip(".") else f"{word} ."


def layout(article: str) -> list[str]:
    """An article's lines as WikiText has them: blank ones around headings, every line between spaces. Short lines that
    are no sentences, which come from lists and tables, are left out."""
    title, _, body = article.strip().partition("\n")
    lines = [" ", f" = {split_words(title)} = ", " "]
    for line in filter(None, map(str.strip, body.split("\n"))):
        if _is_heading(line):
            lines += [*([" "] if lines[-1] != " " else []), f" = = {split_words(line.removesuffix('.'))} = = ", " "]
        elif line.endswith(SENTENCE_END) or len(line.split()) >= FEWEST_WORDS:
            lines.append(f" {split_words(line)} ")
    return lines


def _is_heading(line: str) -> bool:
    inner = line.removesuffix(".")
    is_short = line.endswith(".") and len(line.split()) <= MOST_HEADING_WORDS
    return is_short and not re.search(r"[.!?;]", inner) and not IN_SENTENCES.search(inner) and not inner[:1].islower()


def convert(source: Path) -> Iterator[str]:
    """The lines of a file of articles."""
    for article in documents(source):
        if article.strip():
            yield from layout(article)


def join_words(line: str) -> str:
    """Tokenised text as it may have been written: what `split_words` is tried on."""
    line = re.sub(r" @([-.,])@ ", r"\1", line)
    line = re.sub(r' " ([^"]*) " ', r' "\1" ', line)
    line = re.sub(r"([(\[$£€]) ", r"\1", line)
    line = re.sub(r" ([)\],.;:!?%]|'s\b|'t\b|'m\b|'re\b|'ve\b|'d\b|'ll\b|')", r"\1", line)
    line = re.sub(rf"(?<={LETTER}) (?='{LETTER})", "", line)
    return re.sub(r" ([/–]) (?=\d)", r"\1", line)


class Counts:
    """Words and lines of a text, and words that are unknown: not in the dictionary, or <unk> in the text."""

    def __init__(self, known: frozenset[str]) -> None:
        self.known, self.words, self.lines, self.unknown = known, 0, 0, 0

    def add(self, line: str) -> None:
        words = line.split()
        self.words, self.lines = self.words + len(words), self.lines + 1
        self.unknown += sum(word not in self.known for word in words)

    def to_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("words", "lines", "unknown")}


def known_words(data: Path) -> frozenset[str]:
    """The words of WikiText's dictionary."""
    return frozenset(read_dictionary(data / "wikitext-103/dict.txt.xz")) - {UNKNOWN}


def write_part(data: Path, work: Path, part: int) -> None:
    """One file of the training text, and its counts beside it. What is there already stays."""
    target, counts = work / f"train/part-{part}.txt", Counts(known_words(data))
    if counts_file(work, part).is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for line in convert(data / f"wiki/part-{part}.txt.xz"):
            file.write(f"{line}\n")
            counts.add(line)
    write_json(counts_file(work, part), counts.to_dict())


def counts_file(work: Path, part: int) -> Path:
    """Where the counts of a part are. It exists once the part is whole."""
    return work / f"part-{part}.json"


def round_trip(text: str) -> dict[str, Any]:
    """How much of a tokenised text comes back from `split_words` after `join_words`."""
    words, same, differences = 0, 0, dict[str, int]()
    for line in filter(str.strip, text.split("\n")):
        if line.strip().startswith("= "):
            continue
        before, after = line.split(), split_words(join_words(line)).split()
        words += len(before)
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        same += sum(block.size for block in matcher.get_matching_blocks())
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind != "equal":
                key = f"{' '.join(before[a:b])} -> {' '.join(after[c:d])}"
                differences[key] = differences.get(key, 0) + 1
    most = sorted(differences.items(), key=lambda item: -item[1])[:20]
    return {"words": words, "same": same / words, "most_frequent_differences": dict(most)}


def measure(data: Path, work: Path, parts: int) -> dict[str, Any]:
    """How close the training text is to WikiText: unknown words of both, and the round trip of the test text."""
    known, texts = known_words(data), {}
    for split in ("valid", "test"):
        counts = Counts(known)
        for line in read_text(data / f"wikitext-103/wiki.{split}.tokens.xz").split("\n"):
            counts.add(line)
        texts[f"WikiText-103 {split}"] = counts.to_dict()
    of_parts = [read_json(counts_file(work, part)) for part in range(parts)]
    texts["training text"] = {name: sum(part[name] for part in of_parts) for name in of_parts[0]}
    for row in texts.values():
        row["unknown_share"] = row["unknown"] / row["words"]
    return {"texts": texts, "round_trip": round_trip(read_text(data / "wikitext-103/wiki.test.raw.xz"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--parts", type=int, default=PARTS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("results/wikitext103_text.json"))
    options = parser.parse_args()
    started = time.perf_counter()
    prepare_text(options.data, options.work, options.parts, options.processes)
    result = {
        "what": "Wikipedia articles in WikiText-103's tokenisation: unknown words, and how much of WikiText's test "
        "text comes back when it is joined to plain text and split again",
        "seed": 0,
        **measure(options.data, options.work, options.parts),
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(result, indent=1, ensure_ascii=False))
    write_result(options.output, result | {"tokens": result["texts"]["training text"]["words"]})


def prepare_text(data: Path, work: Path, parts: int, processes: int) -> None:
    """Write the parts that are not there yet."""
    tasks = [(data, work, part) for part in range(parts)]
    if processes == 1:
        for task in tasks:
            write_part(*task)
        return
    with multiprocessing.Pool(processes) as pool:
        pool.starmap(write_part, tasks)


if __name__ == "__main__":
    main()
