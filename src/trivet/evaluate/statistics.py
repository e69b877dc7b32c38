"""Paired statistics: two models answered the same items; by how much is the second worse?

A *drop* is baseline minus candidate, in the unit of the scores (1.0 = all items). Counts of items that
only one model got right are tested exactly (McNemar's test as a sign test: of the items on which the
two differ, half are expected on each side). Scores that are no yes or no are resampled by a fixed seed,
by item or by groups of items that err together. Everything here is a pure function of its arguments.

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
    groups: Sequence[int | None] = (),
) -> Interval:
    """Mean drop of paired scores with bootstrap ends; groups are resampled ``_RESAMPLES`` times.

    The ends are widened by sqrt(n / (n - 1)) for n groups, which the percentile bootstrap lacks at
    small n.

    groups  of each item: items of one group err together and are drawn together. None, or no groups at
            all: each item by itself
    Source: Field and Welsh 2007, "Bootstrapping clustered data" (the cluster bootstrap).
    """
    drops = np.asarray(baseline, np.float64) - np.asarray(candidate, np.float64)
    mean = float(drops.mean())
    members: dict[object, list[int]] = {}
    for at, group in enumerate(groups or [None] * len(drops)):
        members.setdefault(("alone", at) if group is None else group, []).append(at)
    n = len(members)
    if n < 2:
        return Interval(mean, -math.inf, math.inf)
    sums = np.array([drops[places].sum() for places in members.values()])
    counts = np.array([len(places) for places in members.values()])
    drawn = np.random.default_rng(seed).integers(0, n, (_RESAMPLES, n))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    widen = math.sqrt(n / (n - 1))
    low, high = np.quantile(means, [1 - confidence, confidence])
    return Interval(mean, mean + (float(low) - mean) * widen, mean + (float(high) - mean) * widen)
