"""Scores of continuations do not depend on what is scored together; greedy texts are greedy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from support.toy_model import make_toy_model
from trivet.errors import ConfigError
from trivet.evaluate.scoring import LogSoftmax, Scorer
from trivet.evaluate.subject import LocalSubject, Prompt, Score


def _naive(text: str, continuation: str) -> tuple[float, bool]:
    """One pass over the whole text, alone."""
    model = make_toy_model()
    head, tail = model.tokenizer.encode(text), model.tokenizer.encode(continuation)
    ids = head + tail
    scorer = Scorer(model.runner, model.new_arena(32))
    logits = np.concatenate(list(scorer.chunks(ids[:-1], len(tail))))
    nll = LogSoftmax.of(logits).nll_rows(np.asarray(tail, np.int64))
    return -float(nll.sum()), bool((logits.argmax(axis=1) == tail).all())


def _nothing(_count: int) -> None:
    pass


LONG = "the quick brown fox jumps over the lazy dog again and again " * 3
ITEMS = [
    [(Prompt("to be"), " or not"), (Prompt("to be"), " x"), (Prompt("to be"), " never mind that")],
    [(Prompt(LONG), "a"), (Prompt(LONG), "bc")],
    [(Prompt("one context"), " same"), (Prompt("another, longer context"), " same")],
    [(Prompt(LONG + "end"), "a")],
]


@pytest.mark.parametrize("order", [1, -1])
def test_scores_equal_a_pass_over_each_text_alone(order: int) -> None:
    subject = LocalSubject(make_toy_model(), 512)
    items = ITEMS[::order]
    done: list[int] = []
    scores = subject.score(items, done.append)
    assert [len(found) for found in scores] == [len(item) for item in items]
    for item, found in zip(items, scores, strict=True):
        for (prompt, continuation), score in zip(item, found, strict=True):
            logprob, is_greedy = _naive(prompt.text, continuation)
            assert score.logprob == pytest.approx(logprob, rel=1e-5)
            assert score.num_tokens == len(continuation)
            assert score.is_greedy == is_greedy
    assert done


def test_many_items_are_scored_in_batches_that_fit_the_pages() -> None:
    subject = LocalSubject(make_toy_model(), 512)
    items = [[(Prompt("a" * (1 + n % 200)), "bc")] for n in range(90)]
    scores = subject.score(items, _nothing)
    assert len(scores) == 90
    assert math.isclose(scores[7][0].logprob, _naive("a" * 8, "bc")[0], rel_tol=1e-5)


def test_generation_is_what_exact_scoring_calls_greedy() -> None:
    subject = LocalSubject(make_toy_model(), 256)
    [text] = subject.generate([Prompt("to be or")], 8, (), _nothing)
    assert len(text.tokens) <= 8
    [[score]] = subject.score([[(Prompt("to be or"), text.text)]], _nothing)
    assert score.is_greedy or not text.text
    assert isinstance(score, Score)


def test_a_prompt_too_long_for_the_context_is_named() -> None:
    subject = LocalSubject(make_toy_model(), 64)
    with pytest.raises(ConfigError, match="up to 64 tokens"):
        subject.score([[(Prompt("word " * 40), "a")]], _nothing)
    with pytest.raises(ConfigError, match="tasks"):
        subject.generate([Prompt("word " * 40)], 4, (), _nothing)
