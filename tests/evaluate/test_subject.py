"""Scores of continuations do not depend on what is scored together; greedy texts are greedy."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from support.toy_model import make_toy_model
from support.toy_runner import ToyRunner
from trivet.errors import ConfigError
from trivet.evaluate.scoring import LogSoftmax, Scorer
from trivet.evaluate.subject import Generated, KnownAnswers, LocalSubject, Prompt, Score


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


def test_prompts_of_several_families_are_scored_as_alone() -> None:
    families = ["one beginning of some length, shared by a few " * 3, "another that is shared " * 6]
    items = [
        [(Prompt(f"{family}and end {n}:"), " so"), (Prompt(f"{family}and end {n}:"), " or so")]
        for family in [*families, "short ", families[0]]
        for n in range(3)
    ]
    scores = LocalSubject(make_toy_model(), 512).score(items, _nothing)
    for item, found in zip(items, scores, strict=True):
        for (prompt, continuation), score in zip(item, found, strict=True):
            logprob, is_greedy = _naive(prompt.text, continuation)
            assert score.logprob == pytest.approx(logprob, rel=1e-5)
            assert score.is_greedy == is_greedy


PROMPTS = [Prompt("to be or"), Prompt("the dog"), Prompt("a"), Prompt("never mind")]


@pytest.mark.parametrize("stops", [(), ("e",), ("a", "o")])
def test_a_guess_changes_nothing_whether_it_is_right_or_wrong(stops: tuple[str, ...]) -> None:
    plain = LocalSubject(make_toy_model(), 256).generate(PROMPTS, 12, stops, _nothing)
    tokens = [[int(token) for token in text.tokens] for text in plain]
    wrong = [[*ids[:4], (ids[4] + 1) % 64, *ids[5:]] if len(ids) > 4 else [3] for ids in tokens]
    none: list[list[int]] = [[] for _ in tokens]
    for guessed in (tokens, [list(ids[:3]) for ids in tokens], wrong, none):
        guesses = [Generated("", ids, False) for ids in guessed]
        done: list[int] = []
        subject = LocalSubject(make_toy_model(), 256)
        found = subject.generate(PROMPTS, 12, stops, done.append, guesses)
        assert [(t.text, list(t.tokens), t.is_complete) for t in found] == [
            (t.text, list(t.tokens), t.is_complete) for t in plain
        ]
        assert sum(done) >= len(PROMPTS)


def test_known_answers_are_those_of_the_model_and_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    known = KnownAnswers.load(path)
    first = LocalSubject(make_toy_model(), 512, known)
    scores, texts = first.score(ITEMS, _nothing), first.generate(PROMPTS, 6, ("e",), _nothing)
    known.save(path)
    again = KnownAnswers.load(path)
    assert again == known
    model = make_toy_model()
    second = LocalSubject(model, 512, again)
    assert second.score(ITEMS, _nothing) == scores
    found = second.generate(PROMPTS, 6, ("e",), _nothing)
    assert [(t.text, list(t.tokens)) for t in found] == [(t.text, list(t.tokens)) for t in texts]
    assert isinstance(model.runner, ToyRunner)
    assert model.runner.num_steps == 0
    path.write_text("[1, 2]")
    assert KnownAnswers.load(path) == KnownAnswers()


def test_a_prompt_too_long_for_the_context_is_named() -> None:
    subject = LocalSubject(make_toy_model(), 64)
    with pytest.raises(ConfigError, match="up to 64 tokens"):
        subject.score([[(Prompt("word " * 40), "a")]], _nothing)
    with pytest.raises(ConfigError, match="tasks"):
        subject.generate([Prompt("word " * 40)], 4, (), _nothing)
