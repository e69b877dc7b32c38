"""Perplexity by position in one long text: does the end of a long context stay as good as its start?

The text is read as one window and its tokens are put into bins by position. Each bin is held to the
corpora's limit; a rise within its interval of the limit is undecided, since a bin holds few tokens.
"""

from __future__ import annotations

import itertools

import numpy as np

from trivet.evaluate.checks.perplexity import delta_interval
from trivet.evaluate.gate import MAX_DELTA_PPL
from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.evaluate.scoring import TokenFigures

NUM_BINS = 4


def check(figures: TokenFigures, seed: int) -> CheckResult:
    """Judge the tokens of one long window, in order."""
    borders = np.linspace(0, len(figures.nll), NUM_BINS + 1).astype(int)
    bins: list[dict[str, object]] = []
    worse: list[str] = []
    unsure: list[str] = []
    for start, end in itertools.pairwise(borders.tolist()):
        part = TokenFigures(
            figures.nll[start:end],
            figures.baseline_nll[start:end],
            figures.kl[start:end],
            figures.agreed[start:end],
        )
        own, base = part.perplexities
        place = f"tokens {start} to {end}"
        entry: dict[str, object] = {"start": int(start), "end": int(end), "perplexity": own,
                                    "baseline_perplexity": base}  # fmt: skip
        bins.append(entry)
        if own is None or base is None:
            worse.append(f"{place}: not finite")
            continue
        interval = delta_interval(part, seed)
        entry["delta_ppl"] = interval.as_json()
        if interval.value > MAX_DELTA_PPL:
            (worse if interval.low > MAX_DELTA_PPL / 2 else unsure).append(
                f"{place}: {interval.value:+.2f}"
            )
    shown = f"perplexity by position, {len(figures.nll)} tokens"
    metrics = {"bins": bins, "max_delta_ppl": MAX_DELTA_PPL, "tokens": len(figures.nll)}
    name, kind = "perplexity by position", Kind.LONG_CONTEXT
    if worse:
        reason = f"{shown}: {'; '.join(worse)}, allowed up to +{MAX_DELTA_PPL}"
        return CheckResult("long_context", name, kind, Finding.REJECT, reason, metrics)
    if unsure:
        reason = f"{shown}: {'; '.join(unsure)}, too few tokens to tell"
        return CheckResult("long_context", name, kind, Finding.UNDECIDED, reason, metrics)
    reason = f"{shown}: no part rises by more than {MAX_DELTA_PPL}"
    return CheckResult("long_context", name, kind, Finding.PASS, reason, metrics)
