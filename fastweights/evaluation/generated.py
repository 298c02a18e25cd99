"""Tasks whose answers are generated, where likelihoods of given answers would hide what a model has lost.

Each item is a prompt and the answers that count as right. lm-eval runs them like any other of its tasks
(`generate_until`): the model continues the prompt greedily. All but `lambada_generate` are made from 64 passages of two
books in the public domain, passages.jsonl, so everybody measures on the same items and nothing is downloaded.
"""

from __future__ import annotations

import functools
import json
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASSAGES = Path(__file__).with_name("passages.jsonl")
# Names that occur in none of the passages.
NAMES = ("Abbott", "Baxter", "Chandler", "Dawson", "Ellis", "Fletcher", "Graham", "Hudson", "Ingram", "Jennings")
FACTS = 3
# Words that the model sees again, and words after them that it must copy.
SHOWN_WORDS, COPIED_WORDS = 12, 20
# An example shows models that never learned to answer what is asked for.
EXAMPLE = """Anna put the letter into the blue box and went home.

Question: Of which colour was the box?
Answer: blue

"""
ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class GeneratedTask:
    """One task.

    items: Makes the items from what `file` holds: {"prompt": ..., "answers": [...]}.
    scores: Metrics by name: a score from 0 to 1 for a text and the right answers.
    tokens: Most tokens to generate for an item; a line's end also ends it.
    file: The data file in the user's folder, without suffix; None for the passages of this package.
    """

    items: Callable[[Iterable[dict[str, Any]]], Iterator[dict[str, Any]]]
    scores: dict[str, Callable[[str, list[str]], float]]
    tokens: int
    file: str | None = None


# Items


def last_words(items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """LAMBADA: the last word of a text, which can only be known from the whole text."""
    for item in items:
        prompt, _, word = item["text"].rpartition(" ")
        yield {"prompt": prompt, "answers": [word]}


def facts(items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Three made-up facts, a passage, and the beginning of one of the facts again; an item for each fact."""
    for index, item in enumerate(items):
        generator = random.Random(index)
        names, numbers = generator.sample(NAMES, FACTS), generator.sample(range(10, 100), FACTS)
        known = [f"Mr. {name} lives at number {number}." for name, number in zip(names, numbers, strict=True)]
        for name, number in zip(names, numbers, strict=True):
            prompt = f"{' '.join(known)}\n\n{item['passage']}\n\nMr. {name} lives at number"
            yield {"prompt": prompt, "answers": [str(number)]}


def beginnings(items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A passage and its first words again, from which it has to be copied."""
    for item in items:
        words = item["passage"].split()
        shown, copied = words[:SHOWN_WORDS], words[SHOWN_WORDS : SHOWN_WORDS + COPIED_WORDS]
        yield {"prompt": f"{item['passage']}\n\n{' '.join(shown)}", "answers": [" ".join(copied)]}


def questions(items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """An example, a passage and a question whose short answer is in it."""
    for item in items:
        for question in item.get("questions", ()):
            prompt = f"{EXAMPLE}{item['passage']}\n\nQuestion: {question['question']}\nAnswer:"
            yield {"prompt": prompt, "answers": question["answers"]}


def summaries(items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A passage that has to be summarized in a sentence."""
    for item in items:
        if "summary" in item:
            yield {"prompt": f"{item['passage']}\n\nIn short, this passage says that", "answers": [item["summary"]]}


# Scores


def exact_match(text: str, answers: list[str]) -> float:
    """Whether the text is one of the answers, but for case, punctuation and articles."""
    return float(_plain(text) in map(_plain, answers))


def first_match(text: str, answers: list[str]) -> float:
    """The same for the first word of the text."""
    return exact_match(" ".join(text.split()[:1]), answers)


def f1(text: str, answers: list[str]) -> float:
    """The F1 score of the words that the text shares with the most similar answer."""
    return max(_rouge("rouge1", text, answer) for answer in answers)


def rouge_l(text: str, answers: list[str]) -> float:
    """ROUGE-L: the F1 score of the longest common subsequence of words, with no more words than the answer has."""
    return max(_rouge("rougeL", " ".join(text.split()[: len(answer.split())]), answer) for answer in answers)


def _plain(text: str) -> str:
    words = text.lower().translate(str.maketrans("", "", string.punctuation + "“”‘’—"))
    return " ".join(ARTICLES.sub(" ", words).split())


def _rouge(kind: str, text: str, answer: str) -> float:
    return _scorer().score(answer, text)[kind].fmeasure


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rougeL"])


GENERATED_TASKS = {
    "lambada_generate": GeneratedTask(last_words, {"exact_match": first_match}, tokens=8, file="lambada_openai"),
    "books_lookup": GeneratedTask(facts, {"exact_match": first_match}, tokens=8),
    "books_copy": GeneratedTask(beginnings, {"rouge_l": rouge_l}, tokens=64),
    "books_answer": GeneratedTask(questions, {"exact_match": exact_match, "f1": f1}, tokens=24),
    "books_summary": GeneratedTask(summaries, {"rouge_l": rouge_l}, tokens=64),
}


def passages() -> list[dict[str, Any]]:
    """The passages of this package."""
    return [json.loads(line) for line in PASSAGES.read_text(encoding="utf-8").splitlines()]


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The metrics of an item of any of the tasks, as lm-eval calls it (`process_results`)."""
    scores = GENERATED_TASKS[doc["task"]].scores
    return {metric: of(results[0], doc["answers"]) for metric, of in scores.items()}


def task_settings(name: str) -> dict[str, Any]:
    """The settings of a task for lm-eval, but for its data and `process_results`."""
    task = GENERATED_TASKS[name]
    metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in task.scores]
    return {
        "task": name,
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answers[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": task.tokens, "do_sample": False},
        "metric_list": metrics,
    }
