"""KL(baseline || candidate) and agreement of the most likely token, over the corpora.

Perplexity may stay while the model changes; these two see any change. The mean over the worst run of
RUN_TOKENS tokens has a limit of its own, so that damage in one place cannot hide in a long text.

MAX_KL, MIN_TOP1 and MAX_RUN_KL were chosen, not calibrated: no set of good and bad models was measured
to find them. They are coarse on purpose and stand behind the perplexity and task checks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trivet.evaluate.checks.perplexity import RUN_TOKENS
from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.evaluate.scoring import Float64, TokenFigures
from trivet.evaluate.statistics import drop_of_scores

MAX_KL = 0.1
MIN_TOP1 = 0.85
MAX_RUN_KL = 0.4


def check(figures: Mapping[str, TokenFigures], seed: int) -> list[CheckResult]:
    """One result for KL and one for agreement, over all corpora together."""
    joined = TokenFigures.joined(list(figures.values()))
    share = float(joined.agreed.mean())
    agrees = CheckResult(
        "divergence", "top-1", Kind.MODEL, Finding.PASS if share >= MIN_TOP1 else Finding.REJECT,
        f"the most likely token is the same at {share:.1%} (at least {MIN_TOP1:.0%})",
        {"top1_agreement": share, "min_top1": MIN_TOP1, "tokens": len(joined.agreed)},
    )  # fmt: skip
    return [_check_kl(joined.kl, seed), agrees]


def _check_kl(kl: Float64 | None, seed: int) -> CheckResult:
    if kl is None:
        reason = "mean KL: not run, it needs every token's log-probability; endpoints give the best"
        return CheckResult("divergence", "mean KL", Kind.MODEL, Finding.NOT_RUN, reason)
    mean_kl = float(kl.mean())
    runs = np.add.reduceat(kl, np.arange(0, len(kl), RUN_TOKENS))
    worst = float(np.max(runs[: max(1, len(kl) // RUN_TOKENS)]) / RUN_TOKENS)
    metrics: dict[str, object] = {"mean_kl": mean_kl, "worst_run_kl": worst, "run_tokens": RUN_TOKENS,
               "max_kl": MAX_KL, "max_run_kl": MAX_RUN_KL, "tokens": len(kl)}  # fmt: skip
    if np.isfinite(mean_kl):
        zeros = np.zeros(len(runs))
        metrics["interval"] = drop_of_scores(runs / RUN_TOKENS, zeros, seed).as_json()
    is_close = mean_kl <= MAX_KL and worst <= MAX_RUN_KL  # False for NaN
    return CheckResult(
        "divergence", "mean KL", Kind.MODEL, Finding.PASS if is_close else Finding.REJECT,
        f"mean KL {mean_kl:.4f} (up to {MAX_KL}), worst run {worst:.3f} (up to {MAX_RUN_KL})",
        metrics,
    )  # fmt: skip
