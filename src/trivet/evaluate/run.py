"""Evaluate a model from its name: load it and its baseline, read the corpora, measure, judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trivet.config import PAGE_TOKENS, ModelConfig
from trivet.errors import ConfigError
from trivet.evaluate.corpora import load_corpora
from trivet.evaluate.gate import GateResult, judge_corpora
from trivet.evaluate.quality import (
    CONTEXT,
    MAX_TOKENS,
    QualityReport,
    encode_corpora,
    measure_quality,
)
from trivet.evaluate.scoring import Scorer
from trivet.loader import LoadedModel, Progress, load_model

GATES = ("fast", "full")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was measured, on what, and the verdict when a gate was asked for.

    weights, kv, baseline_weights, baseline_kv  full forms that ran
    sources  per corpus: name, where its text came from, sha256 of the text
    """

    report: QualityReport
    model: str
    weights: str
    kv: str
    baseline: str | None
    baseline_weights: str | None
    baseline_kv: str | None
    context: int
    stride: int
    max_tokens: int
    sources: list[dict[str, str]]
    gate: GateResult | None

    def as_json(self) -> dict[str, Any]:
        """The contract's keys, then how they came about."""
        result = self.report.as_json()
        if self.gate is not None:
            result |= self.gate.as_json()
        for name in (
            "model", "weights", "kv", "baseline", "baseline_weights", "baseline_kv",
            "context", "stride", "max_tokens", "sources",
        ):  # fmt: skip
            result[name] = getattr(self, name)
        return result


def new_scorer(model: LoadedModel, context: int) -> Scorer:
    """A scorer with an arena that holds one window of ``context`` rows."""
    if context > model.runner.max_positions:
        raise ConfigError(
            "context", context, f"up to {model.runner.max_positions}, the model's own"
        )
    return Scorer(model.runner, model.new_arena(-(-context // PAGE_TOKENS)))


def evaluate_model(
    config: ModelConfig,
    baseline: ModelConfig | None = None,
    *,
    corpora: Sequence[str | Path] | None = None,
    max_tokens: int = MAX_TOKENS,
    context: int = CONTEXT,
    stride: int | None = None,
    gate: str | None = None,
    loading: Progress | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measure perplexity on the corpora, and the distance from ``baseline`` when there is one.

    corpora     text files, or names of built-in corpora; None: the two built-in ones
    max_tokens  tokens scored of each corpus
    stride      tokens from one window to the next; None: the context
    gate        ``fast`` or ``full``: judge the result; both apply the corpora rule
    progress    called with (tokens scored, all tokens)
    Raises ConfigError, CheckpointError; a baseline with another vocabulary is refused.
    """
    if gate is not None and gate not in GATES:
        raise ConfigError("gate", gate, ", ".join(GATES))
    stride = context if stride is None else stride
    texts = load_corpora(corpora)
    model = load_model(config, loading)
    base = None
    if baseline is not None:
        base = model if baseline == config else load_model(baseline, loading)
        if base.runner.vocab_size != model.runner.vocab_size:
            raise ConfigError(
                "baseline",
                baseline.model,
                f"a model with the same vocabulary of {model.runner.vocab_size} tokens",
            )
    encoded = encode_corpora(
        model.tokenizer, texts, max_tokens=max_tokens, context=context, stride=stride
    )
    total = sum(corpus.num_tokens for corpus in encoded)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    scorer = new_scorer(model, context)
    base_scorer = new_scorer(base, context) if base is not None else None
    report = measure_quality({"model": scorer}, encoded, base_scorer, advance)["model"]
    return Evaluation(
        report=report,
        model=config.model,
        weights=model.weights_form,
        kv=config.kv.value,
        baseline=baseline.model if baseline is not None else None,
        baseline_weights=base.weights_form if base is not None else None,
        baseline_kv=baseline.kv.value if baseline is not None else None,
        context=context,
        stride=stride,
        max_tokens=max_tokens,
        sources=[
            {"corpus": text.name, "source": text.source, "sha256": text.sha256} for text in texts
        ],
        gate=judge_corpora(report) if gate is not None else None,
    )
