"""The verdict on one task from paired answers of baseline and candidate.

Each answer is right or wrong and, where it can be had, carries *expected accuracy*: the probability
that the model gives the right answer if it draws from its own distribution. Both are in points of
accuracy. Right or wrong moves only when an answer flips, so a small sample says little; the expectation
moves with every item and tells a small drop from none at a tenth of the items.

- The baseline must be right on MIN_SIGNAL more than chance, else the task has no vote.
- Reject: either drop is above MAX_DROP and significant (McNemar's exact test; the lower end of the
  bootstrap interval above zero), at the level that the gate hands down.
- A gate looks at a task up to LOOKS times, again with more items when the first are too few to tell.
  Each look gets its share of every error (Bonferroni): ends hold with 1 - 0.05 / LOOKS. A drop of the
  expectation that may still lie at or below MAX_DROP waits for the last look.
- Pass: the upper end of the drop's interval is at most MAX_DROP; the expectation's interval where it is
  informative, else the exact one of the counts.
- Undecided: anything else, the sample is too small to tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.evaluate.statistics import CONFIDENCE, Interval, drop_of_counts, drop_of_scores, mcnemar
from trivet.evaluate.subject import Generated

MAX_DROP = 0.03
MIN_SIGNAL = 0.10
MIN_ITEMS = 20
LOOKS = 2
_CONFIDENCE = 1 - (1 - CONFIDENCE) / LOOKS  # of each end at each look
_MIN_EXPECTED = 0.10  # of the baseline, for the expectation to be informative,
_MIN_SHARE = 0.2  # and of its accuracy: what greedy decoding finds and drawing hardly ever


@dataclasses.dataclass(frozen=True)
class Answer:
    """One model's answer to one item. ``expected`` None: only the answer is known.

    text  what was generated, for another model's guess; None: nothing was
    """

    is_right: bool
    expected: float | None = None
    text: Generated | None = None


def judge_answers(
    check: str,
    name: str,
    kind: Kind,
    chance: float,
    baseline: Sequence[Answer],
    candidate: Sequence[Answer],
    *,
    seed: int,
    level: float,
    groups: Sequence[int | None] = (),
    is_last: bool = True,
) -> CheckResult:
    """Compare answers to the same items.

    level    of significance over all looks, one-sided
    groups   of each item (`Item.group`); empty: each item by itself
    is_last  no more items can follow
    """
    n = len(baseline)
    level /= LOOKS
    right = [answer.is_right for answer in baseline]
    own_right = [answer.is_right for answer in candidate]
    accuracy, own_accuracy = sum(right) / n, sum(own_right) / n
    counts = drop_of_counts(right, own_right, _CONFIDENCE)
    lost = sum(b and not c for b, c in zip(right, own_right, strict=True))
    gained = sum(c and not b for b, c in zip(right, own_right, strict=True))
    p_value = mcnemar(lost, gained)
    expected = _expected_drop(baseline, candidate, seed, level, groups, accuracy)
    metrics: dict[str, object] = {
        "items": n,
        "chance": chance,
        "baseline_accuracy": accuracy,
        "accuracy": own_accuracy,
        "drop": counts.as_json(),
        "lost": lost,
        "gained": gained,
        "p_value": p_value,
        "level": level,
        "confidence": _CONFIDENCE,
        "expected_drop": None if expected is None else expected[0].as_json(),
        "seed": seed,
    }

    def result(finding: Finding, reason: str) -> CheckResult:
        return CheckResult(check, name, kind, finding, reason, metrics, is_task=True)

    shown = f"{name}: accuracy {accuracy:.0%} to {own_accuracy:.0%} on {n} items"
    if accuracy < chance + MIN_SIGNAL:
        limit = f"{MIN_SIGNAL:.0%} above chance ({chance:.0%})"
        return result(
            Finding.NO_SIGNAL, f"{name}: the baseline has {accuracy:.0%}, less than {limit}"
        )
    if counts.value > MAX_DROP and p_value < level:
        return result(Finding.REJECT, f"{shown}, {lost} lost and {gained} gained, p {p_value:.2g}")
    if expected is not None:
        drop, strict_low = expected
        points = f"expected accuracy drops by {_points(drop)}"
        is_clear = drop.low > MAX_DROP
        if drop.value > MAX_DROP and strict_low > 0 and (is_last or is_clear):
            return result(Finding.REJECT, f"{shown}, {points}")
        if n >= MIN_ITEMS and drop.high <= MAX_DROP:
            return result(Finding.PASS, f"{shown}, {points}")
        return result(Finding.UNDECIDED, f"{shown}, {points}: too few items to tell")
    if counts.high <= MAX_DROP:
        return result(Finding.PASS, f"{shown}, drop {_points(counts)}")
    return result(Finding.UNDECIDED, f"{shown}, drop {_points(counts)}: too few items to tell")


def _points(drop: Interval) -> str:
    return f"{100 * drop.value:.1f} points (between {100 * drop.low:.1f} and {100 * drop.high:.1f})"


def _expected_drop(
    baseline: Sequence[Answer],
    candidate: Sequence[Answer],
    seed: int,
    level: float,
    groups: Sequence[int | None],
    accuracy: float,
) -> tuple[Interval, float] | None:
    """The drop of the expectation, and its lower end at ``level``; None where it says nothing.

    accuracy  of the baseline
    """
    base = [answer.expected for answer in baseline]
    own = [answer.expected for answer in candidate]
    if any(value is None for value in (*base, *own)):
        return None
    base_values = [value for value in base if value is not None]
    own_values = [value for value in own if value is not None]
    if sum(base_values) / len(base_values) < max(_MIN_EXPECTED, _MIN_SHARE * accuracy):
        return None
    strict = drop_of_scores(base_values, own_values, seed, 1 - level, groups)
    return drop_of_scores(base_values, own_values, seed, _CONFIDENCE, groups), strict.low
