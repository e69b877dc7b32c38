"""Multiple choice by likelihood, and answers that must be given exactly; nothing is generated.

Choice: the choice with the highest log-probability per byte; its share of the softmax over the
choices (scaled by their mean length) is the expected accuracy. Where the choices stand in the prompt,
plain sums of the common continuation are compared.
Exact: right when every token of the answer is the most likely one, which is what greedy decoding
gives; the expected accuracy is the answer's probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trivet.evaluate.checks.judge import Answer
from trivet.evaluate.subject import Prompt, Score, Subject
from trivet.evaluate.task import Form, Item, Task

FORMS = (Form.CHOICE, Form.EXACT)


def answer(subject: Subject, task: Task, advance: Callable[[int], None]) -> list[Answer]:
    """Answers to all items of a task of one of FORMS."""
    scores = subject.score([pairs_of(item) for item in task.items], advance)
    if task.form is Form.EXACT:
        return [
            Answer(found[0].is_greedy, probability(item.answer, found[0]))
            for item, found in zip(task.items, scores, strict=True)
        ]
    return [_choose(item, found) for item, found in zip(task.items, scores, strict=True)]


def pairs_of(item: Item) -> list[tuple[Prompt, str]]:
    """The (prompt, continuation) pairs whose scores answer an item."""
    if not item.choices:
        return [(item.prompts[0], item.answer)]
    return [(prompt, choice) for prompt in item.prompts for choice in item.choices]


def probability(text: str, score: Score) -> float:
    """Of drawing a text.

    White space at its end is not counted: a line can be ended in many ways, each as right.
    """
    has_end = score.num_tokens > 1 and text[-1:].isspace()
    return math.exp(min(0.0, sum(score.logprobs[:-1] if has_end else score.logprobs)))


def _choose(item: Item, scores: Sequence[Score]) -> Answer:
    values = [score.logprob for score in scores]
    if len(item.choices) > 1:
        lengths = [len(choice.encode()) for choice in item.choices]
        mean = sum(lengths) / len(lengths)
        values = [value / n * mean for value, n in zip(values, lengths, strict=True)]
    best = max(values)
    if not math.isfinite(best):
        return Answer(False, 0.0)
    weights = [math.exp(value - best) for value in values]
    is_right = values.index(best) == item.gold
    return Answer(is_right, weights[item.gold] / sum(weights))
