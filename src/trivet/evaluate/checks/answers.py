"""Generated answers, judged by what they do: worked sums, formats, SQL on SQLite, code in the sandbox.

The text is greedy and ends at the task's stop strings. Expected accuracy (`judge.py`) is the
probability of drawing one of the item's known right answers: the reference, and what either model wrote
and was right, each with its end where a task has one. Both models are held against the same texts, so
neither is favoured. It is a lower bound of the probability of any right answer.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sqlite3
from collections.abc import Callable, Sequence

from trivet.errors import ConfigError
from trivet.evaluate.checks.choice import probability
from trivet.evaluate.checks.judge import Answer
from trivet.evaluate.sandbox import run_program
from trivet.evaluate.sql import run_query
from trivet.evaluate.subject import Generated, Subject
from trivet.evaluate.task import Form, Item, Task, has_format

FORMS = (Form.WORKED, Form.FORMAT, Form.SQL, Form.CODE)
_SHORT_CHARS = 160  # references up to this length are scored for their probability
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def compare(
    baseline: Subject, candidate: Subject, task: Task, advance: Callable[[int], None]
) -> tuple[list[Answer], list[Answer]]:
    """The answers of both to all items of a task of one of FORMS, baseline first.

    Raises SandboxError: code cannot be run here.
    """
    base = answer(baseline, task, advance)
    own = answer(candidate, task, advance, base)
    if task.form is Form.WORKED:  # one of very many ways to reason: its probability says nothing
        return base, own
    texts = [
        _right_texts(task, item, pair) for item, *pair in zip(task.items, base, own, strict=True)
    ]
    return (
        _with_expectation(baseline, task, base, texts, advance),
        _with_expectation(candidate, task, own, texts, advance),
    )


def answer(
    subject: Subject,
    task: Task,
    advance: Callable[[int], None],
    baseline: Sequence[Answer] = (),
) -> list[Answer]:
    """One model's answers; ``expected`` is the reference's probability where it is short.

    A reference whose every token is the most likely one, up to a stop string, is what greedy decoding
    gives: nothing is generated there.
    baseline  the baseline's answers: guesses that save time (`Subject.generate`) and change nothing
    """
    items = task.items
    expected: list[float | None] = [None] * len(items)
    texts: list[Generated | None] = [None] * len(items)
    if task.form is not Form.WORKED and all(_is_short(item.answer) for item in items):
        scores = subject.score([[(item.prompts[0], item.answer)] for item in items], advance)
        expected = [
            probability(item.answer, found[0]) for item, found in zip(items, scores, strict=True)
        ]
        for at, [score] in enumerate(scores):
            if score.is_greedy and score.num_tokens <= task.max_tokens:
                texts[at] = _cut(items[at].answer, task.stops)
    open_ = [at for at, text in enumerate(texts) if text is None]
    guesses = [baseline[at].text for at in open_ if at < len(baseline)]
    generated = subject.generate(
        [items[at].prompts[0] for at in open_],
        task.max_tokens,
        task.stops,
        advance,
        [guess or Generated("", (), False) for guess in guesses],
    )
    for at, text in zip(open_, generated, strict=True):
        texts[at] = text
    judge = _JUDGES[task.form]
    return [
        Answer(judge(item, text.text), value, text)
        for item, text, value in zip(items, texts, expected, strict=True)
        if text is not None
    ]


def _is_short(text: str) -> bool:
    return 0 < len(text) <= _SHORT_CHARS


def _end(task: Task) -> str:
    """What ends an answer in a text. Code may end in more than one way, so it has none here."""
    return "" if task.form is Form.CODE or not task.stops else task.stops[0]


def _right_texts(task: Task, item: Item, answers: Sequence[Answer]) -> list[str]:
    """The beginnings of an item's known right answers, each once and with its end."""
    end = _end(task)
    found = [item.answer] + [a.text.text for a in answers if a.is_right and a.text is not None]
    ended = [text.rstrip().removesuffix(end.strip()).rstrip() + end for text in found if text]
    texts = sorted((text for text in dict.fromkeys(ended) if _is_short(text)), key=len)
    # Where one begins another, the longer one is drawn within it and would count twice.
    return [text for at, text in enumerate(texts) if not text.startswith(tuple(texts[:at]))]


def _with_expectation(
    subject: Subject,
    task: Task,
    answers: Sequence[Answer],
    texts: Sequence[Sequence[str]],
    advance: Callable[[int], None],
) -> list[Answer]:
    """The answers with the probability of any of ``texts``; what is known of references is kept."""
    known: list[dict[str, float]] = [
        {} if answer.expected is None else {item.answer: answer.expected}
        for item, answer in zip(task.items, answers, strict=True)
    ]
    asked = [
        (at, text) for at, of_item in enumerate(texts) for text in of_item if text not in known[at]
    ]
    by_item: dict[int, list[str]] = {}
    for at, text in asked:
        by_item.setdefault(at, []).append(text)
    scores = subject.score(
        [[(task.items[at].prompts[0], text) for text in new] for at, new in by_item.items()],
        advance,
    )
    for (at, new), found in zip(by_item.items(), scores, strict=True):
        for text, score in zip(new, found, strict=True):
            known[at][text] = probability(text, score)
    return [
        dataclasses.replace(answer, expected=min(1.0, sum(known[at][text] for text in of_item)))
        for at, (answer, of_item) in enumerate(zip(answers, texts, strict=True))
    ]


def _cut(answer: str, stops: Sequence[str]) -> Generated | None:
    """The text of a greedy reference; None where no stop string says that it ends there."""
    ends = [at for stop in stops if (at := answer.find(stop)) >= 0]
    return Generated(answer[: min(ends)], (), True) if ends else None


def _worked(item: Item, text: str) -> bool:
    """The last number of the answer is the reference's."""
    numbers = _NUMBER.findall(text.partition("####")[2] or text)
    if not numbers:
        return False
    try:
        return float(numbers[-1].replace(",", "")) == float(item.answer)
    except ValueError:
        return False


def follows_format(item: Item, text: str) -> bool:
    """Whether a text has the format of ``item.data["format"]``."""
    return has_format(text, item.data["format"])


def same_rows(item: Item, text: str) -> bool:
    """Whether a query gives the rows of the reference, in any order.

    Raises ConfigError: the reference itself does not run.
    """
    try:
        wanted = run_query(item.data["schema"], item.answer)
    except sqlite3.Error as error:
        allowed = f"SQL that runs on its schema ({error})"
        raise ConfigError("tasks", item.answer, allowed) from None
    try:
        return run_query(item.data["schema"], text) == wanted
    except sqlite3.Error:
        return False


def passes_tests(item: Item, text: str) -> bool:
    """Whether a function passes its tests in the sandbox. Raises SandboxError."""
    return _is_complete(f"{item.data['head']}{text}\n\n{item.data['tests']}")


@functools.lru_cache(maxsize=1024)
def _is_complete(program: str) -> bool:
    """Kept: two good models write the same function for most items."""
    return run_program(program).is_complete


_JUDGES: dict[Form, Callable[[Item, str], bool]] = {
    Form.WORKED: _worked,
    Form.FORMAT: follows_format,
    Form.SQL: same_rows,
    Form.CODE: passes_tests,
}
