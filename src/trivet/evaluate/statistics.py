"""Paired statistics: two models answered the same items; by how much is the second worse?

A *drop* is baseline minus candidate, in the unit of the scores (1.0 = all items). Counts of items that
only one model got right are tested exactly (McNemar's test as a sign test: of the items on which the
two differ, half are expected on each side). Scores that are no yes or no are resampled by item with a
fixed seed. Everything here is a pure function of its arguments.

Source: McNemar 1947; Clopper and Pearson 1934; Efron's percentile bootstrap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95  # of each end of an interval, unless another is asked for
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate with its ends: each end alone holds with the confidence asked for."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return dataclasses.asdict(self)


def binomial_tail(successes: int, trials: int) -> float:
    """P(X >= successes) for X ~ Binomial(trials, 1/2), exactly."""
    ways = sum(math.comb(trials, k) for k in range(max(successes, 0), trials + 1))
    return ways / (1 << trials)


def mcnemar(lost: int, gained: int) -> float:
    """One-sided exact p-value that the candidate is not worse: ``lost`` items only the baseline got."""
    return binomial_tail(lost, lost + gained)


def largest_share(successes: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """The one-sided Clopper-Pearson upper bound of a share, by bisection."""
    if successes >= trials:
        return 1.0
    low, high = successes / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _binomial_cdf(successes, trials, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _binomial_cdf(successes: int, trials: int, share: float) -> float:
    """P(X <= successes) for X ~ Binomial(trials, share)."""
    total = 0.0
    for k in range(successes + 1):
        log_ways = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        log_p = log_ways + k * math.log(share) + (trials - k) * math.log1p(-share)
        total += math.exp(log_p)
    return total


def drop_of_counts(
    baseline: Sequence[bool], candidate: Sequence[bool], confidence: float = CONFIDENCE
) -> Interval:
    """Drop in the share of right answers.

    The ends are conservative: the exact bound of the share of items lost, less what was gained, and
    the mirror image of it.
    """
    n = len(baseline)
    lost = sum(b and not c for b, c in zip(baseline, candidate, strict=True))
    gained = sum(c and not b for b, c in zip(baseline, candidate, strict=True))
    return Interval(
        (lost - gained) / n,
        lost / n - largest_share(gained, n, confidence),
        largest_share(lost, n, confidence) - gained / n,
    )


def drop_of_scores(
    baseline: Sequence[float] | NDArray[np.float64],
    candidate: Sequence[float] | NDArray[np.float64],
    seed: int,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Mean drop of paired scores with bootstrap ends; items are resampled ``_RESAMPLES`` times.

    The ends are widened by sqrt(n / (n - 1)), which the percentile bootstrap lacks at small n.
    """
    drops = np.asarray(baseline, np.float64) - np.asarray(candidate, np.float64)
    n = len(drops)
    mean = float(drops.mean())
    if n < 2:
        return Interval(mean, -math.inf, math.inf)
    rng = np.random.default_rng(seed)
    means = drops[rng.integers(0, n, (_RESAMPLES, n))].mean(axis=1)
    widen = math.sqrt(n / (n - 1))
    low, high = np.quantile(means, [1 - confidence, confidence])
    return Interval(mean, mean + (float(low) - mean) * widen, mean + (float(high) - mean) * widen)
