"""Perplexity by position in one long text: does the end of a long context stay as good as its start?

The text is read as one window and its tokens are put into bins by position. Each bin is held to the
corpora's limit; a rise within its interval of the limit is undecided, since a bin holds few tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from trivet.evaluate.checks.perplexity import RUN_TOKENS, delta_interval
from trivet.evaluate.gate import MAX_DELTA_PPL
from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.evaluate.scoring import TokenFigures, make_windows, score_tokens
from trivet.evaluate.subject import Subject

NUM_BINS = 4
_CHECK, _NAME = "long_context", "perplexity by position"
MIN_TOKENS = NUM_BINS * RUN_TOKENS  # below, a bin has no interval


def check(
    candidate: Subject,
    baseline: Subject,
    text_ids: Sequence[int],
    num_tokens: int,
    seed: int,
    advance: Callable[[int], None] | None = None,
) -> CheckResult:
    """Read up to ``num_tokens`` of a text with both, as far as the baseline's context goes.

    advance  called with the number of tokens just read
    """
    length = min(num_tokens, baseline.max_tokens, len(text_ids) - 1)
    too_short = None
    if length < MIN_TOKENS:
        too_short = f"{max(0, length)} tokens of text and context, at least {MIN_TOKENS} are needed"
    elif length > candidate.max_tokens:
        too_short = (
            f"the candidate's context has {candidate.max_tokens} tokens, {length} are needed"
        )
    if too_short is not None:
        return CheckResult(
            _CHECK, _NAME, Kind.LONG_CONTEXT, Finding.NOT_RUN, f"{_NAME}: not run, {too_short}"
        )
    windows = make_windows(text_ids[: length + 1], context=length, stride=length)
    return judge(score_tokens(baseline, candidate, windows[:1], advance), seed)


def judge(figures: TokenFigures, seed: int) -> CheckResult:
    """Judge the tokens of one long window, in order."""
    borders = np.linspace(0, len(figures.nll), NUM_BINS + 1).astype(int)
    bins: list[dict[str, object]] = []
    worse: list[str] = []
    unsure: list[str] = []
    for start, end in itertools.pairwise(borders.tolist()):
        part = figures.cut(start, end)
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
    shown = f"{_NAME}, {len(figures.nll)} tokens"
    metrics = {"bins": bins, "max_delta_ppl": MAX_DELTA_PPL, "tokens": len(figures.nll)}
    kind = Kind.LONG_CONTEXT
    if worse:
        reason = f"{shown}: {'; '.join(worse)}, allowed up to +{MAX_DELTA_PPL}"
        return CheckResult(_CHECK, _NAME, kind, Finding.REJECT, reason, metrics)
    if unsure:
        reason = f"{shown}: {'; '.join(unsure)}, too few tokens to tell"
        return CheckResult(_CHECK, _NAME, kind, Finding.UNDECIDED, reason, metrics)
    reason = f"{shown}: no part rises by more than {MAX_DELTA_PPL}"
    return CheckResult(_CHECK, _NAME, kind, Finding.PASS, reason, metrics)
