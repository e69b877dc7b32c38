"""Perplexity on every corpus: it may not rise by more than MAX_DELTA_PPL on any.

The interval comes from resampling runs of RUN_TOKENS tokens, since neighbouring tokens share their
difficulty. The rule itself is on the measured rise: both models read the same tokens, so that the
difference of a good candidate is far smaller than the interval of either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from trivet.evaluate.gate import MAX_DELTA_PPL, MIN_CORPORA
from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.evaluate.scoring import Float64, TokenFigures
from trivet.evaluate.statistics import CONFIDENCE, Interval

RUN_TOKENS = 64
_RESAMPLES = 1000


def check(figures: Mapping[str, TokenFigures], seed: int) -> list[CheckResult]:
    """One result for each corpus by name."""
    results = [_check_corpus(name, figure, seed) for name, figure in figures.items()]
    if len(results) < MIN_CORPORA:
        results.append(
            CheckResult(
                "perplexity", "perplexity", Kind.MODEL, Finding.UNDECIDED,
                f"{len(results)} corpus measured, {MIN_CORPORA} are needed: add a second --corpus",
            )
        )  # fmt: skip
    return results


def _check_corpus(name: str, figures: TokenFigures, seed: int) -> CheckResult:
    own, base = figures.perplexities
    metrics: dict[str, object] = {
        "perplexity": own,
        "baseline_perplexity": base,
        "tokens": len(figures.nll),
        "max_delta_ppl": MAX_DELTA_PPL,
    }
    label = f"perplexity:{name}"
    if own is None or base is None:
        reason = f"{name}: perplexity is not finite"
        return CheckResult("perplexity", label, Kind.MODEL, Finding.REJECT, reason, metrics)
    interval = delta_interval(figures, seed)
    metrics |= {"delta_ppl": interval.as_json(), "seed": seed}
    finding = Finding.REJECT if interval.value > MAX_DELTA_PPL else Finding.PASS
    reason = f"{name}: perplexity {base:.3f} {interval.value:+.3f}, allowed up to +{MAX_DELTA_PPL}"
    return CheckResult("perplexity", label, Kind.MODEL, finding, reason, metrics)


def delta_interval(figures: TokenFigures, seed: int) -> Interval:
    """Rise of perplexity with its ends, from resampled runs of tokens."""
    own, base = _run_sums(figures.nll), _run_sums(figures.baseline_nll)
    lengths = _run_sums(np.ones(len(figures.nll)))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(lengths), (_RESAMPLES, len(lengths)))
    counts = lengths[drawn].sum(axis=1)
    with np.errstate(over="ignore"):
        rises = np.exp(own[drawn].sum(axis=1) / counts) - np.exp(base[drawn].sum(axis=1) / counts)
    low, high = np.quantile(rises, [1 - CONFIDENCE, CONFIDENCE])
    value = math.exp(float(figures.nll.mean())) - math.exp(float(figures.baseline_nll.mean()))
    return Interval(value, float(low), float(high))


def _run_sums(values: Float64) -> Float64:
    return np.add.reduceat(values, np.arange(0, len(values), RUN_TOKENS))
