"""The corpora rule: pass, reject, undecided."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trivet.evaluate import Quality, QualityReport, Verdict, judge_corpora


def _quality(name: str, delta: float | None, base: float | None = 10.0) -> Quality:
    perplexity = None if delta is None else 10.0 + delta
    kl = None if base is None else 0.01
    return Quality(name, perplexity, base, kl, None if base is None else 0.9, 100)


def _report(*deltas: float | None) -> QualityReport:
    corpora = [_quality(f"corpus{i}", delta) for i, delta in enumerate(deltas)]
    return QualityReport(corpora, _quality("overall", 0.0))


@pytest.mark.parametrize(
    ("deltas", "verdict"),
    [
        ((0.1, 0.5), Verdict.PASS),
        ((-0.1, 0.0), Verdict.PASS),
        ((0.1, 0.501), Verdict.REJECT),
        ((0.6,), Verdict.REJECT),
        ((0.1,), Verdict.UNDECIDED),
        ((0.1, None), Verdict.REJECT),
    ],
)
def test_perplexity_decides(deltas: tuple[float | None, ...], verdict: Verdict) -> None:
    result = judge_corpora(_report(*deltas))
    assert result.verdict is verdict
    assert result.reasons
    assert result.next_step
    assert set(result.as_json()) == {"verdict", "reasons", "next_step", "metrics"}


def test_without_a_baseline_nothing_is_decided() -> None:
    report = QualityReport([_quality("a", 0.0, None)] * 2, _quality("overall", 0.0, None))
    result = judge_corpora(report)
    assert result.verdict is Verdict.UNDECIDED
    assert "--baseline" in result.next_step


def test_a_rejection_names_the_corpus() -> None:
    [reason] = judge_corpora(_report(0.1, 0.9)).reasons
    assert reason.startswith("corpus1:")
    assert "+0.900" in reason


def test_a_plain_evaluation_loads_no_checks() -> None:
    program = "import sys, trivet.evaluate.run; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    loaded = set(ran.stdout.decode().split())
    assert "trivet.evaluate.scoring" in loaded
    assert not loaded & {"trivet.evaluate.gating", "trivet.evaluate.checks", "sqlite3", "httpx"}
