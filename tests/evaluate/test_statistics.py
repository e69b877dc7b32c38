"""Exact tails, bounds and bootstrap ends against figures worked out by other means."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trivet.evaluate.statistics import (
    binomial_tail,
    drop_of_counts,
    drop_of_scores,
    largest_share,
    mcnemar,
)


def test_mcnemar_is_the_exact_sign_test() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 0) == 1 / 32
    assert mcnemar(8, 2) == pytest.approx((45 + 10 + 1) / 1024)
    assert binomial_tail(0, 7) == 1.0
    assert mcnemar(2, 8) > 0.9


@pytest.mark.parametrize("trials", [10, 100, 870])
def test_no_success_bounds_the_share_by_the_rule_of_three(trials: int) -> None:
    assert largest_share(0, trials) == pytest.approx(1 - 0.05 ** (1 / trials), rel=1e-6)
    assert largest_share(trials, trials) == 1.0


def test_identical_answers_of_a_small_sample_do_not_prove_much() -> None:
    drop = drop_of_counts([True] * 20, [True] * 20)
    assert drop.value == 0.0
    assert drop.high > 0.13
    assert drop_of_counts([True] * 200, [True] * 200).high < 0.015


def test_lost_and_gained_items_count() -> None:
    drop = drop_of_counts([True, True, False, False], [True, False, True, False])
    assert drop.value == 0.0
    assert drop.low < 0 < drop.high


def test_bootstrap_ends_hold_the_mean_and_repeat_with_the_seed() -> None:
    rng = np.random.default_rng(1)
    base = rng.random(200)
    own = base - 0.05 + 0.1 * rng.standard_normal(200)
    first, again = drop_of_scores(base, own, 3), drop_of_scores(base, own, 3)
    assert first == again
    assert first.low < 0.05 < first.high
    half = 1.645 * float((base - own).std(ddof=1)) / math.sqrt(200)
    assert first.high - first.value == pytest.approx(half, rel=0.15)
    assert drop_of_scores([1.0], [0.0], 0).high == math.inf


def test_items_of_one_group_are_one_sample() -> None:
    rng = np.random.default_rng(2)
    shared = 0.1 * rng.standard_normal(12)
    base = np.ones(48)
    own = base - np.repeat(shared, 4)
    groups = [at // 4 for at in range(48)]
    grouped = drop_of_scores(base, own, 3, groups=groups)
    alone = drop_of_scores(base, own, 3)
    assert grouped.value == pytest.approx(shared.mean())
    half = 1.645 * shared.std(ddof=1) / math.sqrt(12)
    assert grouped.high - grouped.value == pytest.approx(half, rel=0.2)
    assert grouped.high - grouped.low > 1.7 * (alone.high - alone.low)
    assert drop_of_scores(base, own, 3, groups=[None] * 48) == alone
    assert drop_of_scores(base, own, 3, groups=[0] * 48).high == math.inf
