"""Do texts loop more than the baseline's?

Small models repeat themselves at temperature 0, so the share of repeated 4-grams is compared with the
baseline's on the same prompts. Rejects a rise above MAX_RISE that is significant (lower end of its
interval above zero); a rise above it that is not is undecided.
"""

from __future__ import annotations

from collections.abc import Sequence

from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.evaluate.statistics import drop_of_scores
from trivet.evaluate.subject import Generated

MAX_RISE = 0.10
_GRAM = 4


def repeated_share(text: Generated) -> float:
    """Share of a text's 4-grams of tokens that came before."""
    tokens = text.tokens
    grams = [tuple(tokens[at : at + _GRAM]) for at in range(len(tokens) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def check(base: Sequence[Generated], own: Sequence[Generated], seed: int) -> CheckResult:
    """Compare the texts of both models after the same prompts."""
    return judge([repeated_share(t) for t in base], [repeated_share(t) for t in own], seed)


def judge(base: Sequence[float], own: Sequence[float], seed: int) -> CheckResult:
    """Compare the shares of repeated 4-grams of the same prompts."""
    rise = drop_of_scores(own, base, seed)
    shares = sum(base) / len(base), sum(own) / len(own)
    metrics = {
        "baseline_repeated": shares[0],
        "repeated": shares[1],
        "rise": rise.as_json(),
        "max_rise": MAX_RISE,
        "texts": len(base),
        "seed": seed,
    }
    finding = Finding.PASS
    if not rise.value <= MAX_RISE:
        finding = Finding.REJECT if rise.low > 0 else Finding.UNDECIDED
    reason = (
        f"repeated 4-grams {shares[0]:.0%} to {shares[1]:.0%} in {len(base)} texts"
        f" (a rise up to {100 * MAX_RISE:.0f} points is allowed)"
    )
    return CheckResult("repetition", "repetition", Kind.MODEL, finding, reason, metrics)
