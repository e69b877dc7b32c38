"""The gate's rules: may a configuration be used in the place of its baseline?

`judge_corpora` is the corpora rule by itself, for callers with little time (the ladder): perplexity may
not rise by more than MAX_DELTA_PPL on any corpus. It needs a baseline and at least MIN_CORPORA corpora
to pass; it can reject with less.

`judge_checks` makes one verdict of all checks of a gate (`gating.py` runs them): a verdict for each
kind of task, and one over the kinds that may block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from trivet.evaluate.quality import QualityReport
from trivet.evaluate.results import CheckResult, Finding, Kind, Verdict

MAX_DELTA_PPL = 0.5
MIN_CORPORA = 2
MIN_VOTES = 3


@dataclasses.dataclass(frozen=True)
class GateResult:
    """A verdict with the reasons for it and what to do next.

    metrics  the figures the verdict rests on, by name
    """

    verdict: Verdict
    reasons: list[str]
    next_step: str
    metrics: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "verdict": self.verdict.value}


def judge_corpora(report: QualityReport) -> GateResult:
    """Apply the corpora rule to measured quality."""
    deltas = {quality.corpus: quality.delta_ppl for quality in report.corpora}
    metrics: dict[str, Any] = {
        "max_delta_ppl": MAX_DELTA_PPL,
        "delta_ppl": deltas,
        "mean_kl": report.overall.mean_kl,
        "top1_agreement": report.overall.top1_agreement,
        "tokens": report.overall.tokens,
    }
    if report.overall.baseline_perplexity is None and report.overall.mean_kl is None:
        return GateResult(
            Verdict.UNDECIDED,
            ["no baseline: nothing to compare with"],
            "run again with --baseline MODEL or --baseline-weights bf16",
            metrics,
        )
    worse = [name for name, delta in deltas.items() if delta is None or delta > MAX_DELTA_PPL]
    if worse:
        reasons = [_reason(name, deltas[name]) for name in worse]
        step = "use more bits, smaller groups or a calibrated method for the weights"
        return GateResult(Verdict.REJECT, reasons, step, metrics)
    if len(deltas) < MIN_CORPORA:
        return GateResult(
            Verdict.UNDECIDED,
            [f"{len(deltas)} corpus measured, {MIN_CORPORA} are needed"],
            "add a second --corpus",
            metrics,
        )
    reason = f"perplexity rises by at most {max(d for d in deltas.values() if d is not None):+.3f}"
    return GateResult(Verdict.PASS, [f"{reason} on {len(deltas)} corpora"], "serve it", metrics)


def _reason(name: str, delta: float | None) -> str:
    if delta is None:
        return f"{name}: perplexity is not finite"
    return f"{name}: perplexity {delta:+.3f}, allowed up to +{MAX_DELTA_PPL}"


@dataclasses.dataclass(frozen=True)
class Ruling:
    """The verdict of a gate: one over all that may block, one for each kind of task, and why.

    kinds  per kind that was looked at: pass, reject, undecided, ``no signal`` or ``left out``
    """

    verdict: Verdict
    reasons: list[str]
    kinds: dict[Kind, Finding]
    num_votes: int


def judge_checks(results: Sequence[CheckResult], asked: Sequence[Kind] = ()) -> Ruling:
    """One verdict of all checks.

    asked  the kinds of task that may block; empty: all that were looked at. Checks of the model as a
           whole always may.
    A task that was left out for want of time says nothing: it blocks only where its kind was asked
    for. A pass names what was left out.
    """
    kinds = {
        kind: _finding_of([result for result in results if result.kind is kind])
        for kind in dict.fromkeys(result.kind for result in results)
    }
    blocking = [r for r in results if not asked or r.kind in asked or r.kind is Kind.MODEL]
    num_votes = sum(result.votes for result in results)
    rejected = [result.reason for result in blocking if result.finding is Finding.REJECT]
    if rejected:
        return Ruling(Verdict.REJECT, rejected, kinds, num_votes)
    open_ = [r.reason for r in blocking if r.finding in (Finding.UNDECIDED, Finding.NOT_RUN)]
    for kind in asked:
        found = kinds.get(kind, Finding.NO_SIGNAL)
        if found is Finding.LEFT_OUT:
            open_.append(f"{kind.value}: left out, the budget has no time for it")
        elif found is Finding.NO_SIGNAL:
            open_.append(f"{kind.value}: no task of this kind carries a signal; give --tasks DIR")
    if num_votes < MIN_VOTES:
        open_.append(f"{num_votes} tasks carry a signal, {MIN_VOTES} are needed")
    if open_:
        return Ruling(Verdict.UNDECIDED, open_, kinds, num_votes)
    passed = sum(result.finding is Finding.PASS for result in results)
    reasons = [f"{passed} checks pass, {num_votes} tasks voted"]
    left_out = [result.name for result in results if result.finding is Finding.LEFT_OUT]
    if left_out:
        reasons.append(f"left out, no time in the budget: {', '.join(left_out)}")
    return Ruling(Verdict.PASS, reasons, kinds, num_votes)


def _finding_of(results: Sequence[CheckResult]) -> Finding:
    """The worst of the findings that say something."""
    findings = {result.finding for result in results}
    if Finding.REJECT in findings:
        return Finding.REJECT
    if findings & {Finding.UNDECIDED, Finding.NOT_RUN}:
        return Finding.UNDECIDED
    if Finding.PASS in findings:
        return Finding.PASS
    return Finding.LEFT_OUT if Finding.LEFT_OUT in findings else Finding.NO_SIGNAL
