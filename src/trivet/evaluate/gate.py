"""The gate: may a configuration be used in the place of its baseline?

The corpora rule: perplexity may not rise by more than MAX_DELTA_PPL on any corpus. It needs a baseline
and at least MIN_CORPORA corpora to pass; it can reject with less.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from trivet.evaluate.quality import QualityReport

MAX_DELTA_PPL = 0.5
MIN_CORPORA = 2


class Verdict(enum.StrEnum):
    PASS = "pass"
    REJECT = "reject"
    UNDECIDED = "undecided"


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
