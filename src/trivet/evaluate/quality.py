"""Perplexity of a model, and its distance from a baseline, on a list of corpora.

Both models read the same token ids. Perplexity is exp of the mean negative log-probability over the
scored tokens; divergence is the mean over the same tokens of KL(baseline || model) in nats; agreement
is the share of tokens at which both have the same most likely next token. `overall` pools the tokens
of all corpora.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from trivet.errors import ConfigError
from trivet.evaluate.corpora import Corpus
from trivet.evaluate.scoring import (
    Float64,
    Reader,
    Scorer,
    Tally,
    TokenFigures,
    Window,
    make_windows,
    perplexity_of,
    score_tokens,
    score_windows,
)

CONTEXT = 1024
STRIDE = 1024
MAX_TOKENS = 8192
_CHARS_PER_TOKEN = 24  # text tokenized at first for each wanted token; more when that is too short


class TextEncoder(Protocol):
    """What is needed of `trivet.checkpoint.Tokenizer`."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Quality:
    """Figures of one corpus (or ``overall``); everything about a baseline is None without one."""

    corpus: str
    perplexity: float | None
    baseline_perplexity: float | None
    mean_kl: float | None
    top1_agreement: float | None
    tokens: int

    @property
    def delta_ppl(self) -> float | None:
        if self.perplexity is None or self.baseline_perplexity is None:
            return None
        return self.perplexity - self.baseline_perplexity

    def as_json(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus,
            "perplexity": self.perplexity,
            "baseline_perplexity": self.baseline_perplexity,
            "delta_ppl": self.delta_ppl,
            "mean_kl": self.mean_kl,
            "top1_agreement": self.top1_agreement,
            "tokens": self.tokens,
        }


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """The corpora in order, and all of them pooled."""

    corpora: list[Quality]
    overall: Quality

    def as_json(self) -> dict[str, Any]:
        return {
            "corpora": [quality.as_json() for quality in self.corpora],
            "overall": self.overall.as_json(),
        }


@dataclasses.dataclass(frozen=True)
class EncodedCorpus:
    """A corpus cut into windows."""

    corpus: Corpus
    windows: list[Window]

    @property
    def num_tokens(self) -> int:
        return sum(len(window.target_ids) for window in self.windows)


def encode_corpora(
    tokenizer: TextEncoder,
    corpora: Sequence[Corpus],
    *,
    max_tokens: int = MAX_TOKENS,
    context: int = CONTEXT,
    stride: int = STRIDE,
) -> list[EncodedCorpus]:
    """Tokenize the beginning of each corpus and cut it into windows.

    When the tokenizer puts special tokens first (BOS), the first of them begins every window.
    Raises ConfigError: max_tokens, context or stride out of range; a corpus of fewer than two tokens.
    """
    if max_tokens < 1:
        raise ConfigError("max_tokens", max_tokens, "an integer >= 1")
    if context < 1:
        raise ConfigError("context", context, "an integer >= 1")
    if not 1 <= stride <= context:
        raise ConfigError("stride", stride, f"1 to context ({context})")
    special = tokenizer.encode("", add_special_tokens=True)
    bos_id = special[0] if special else None
    encoded: list[EncodedCorpus] = []
    for corpus in corpora:
        wanted = max_tokens + (1 if bos_id is None else 0)
        ids = tokenizer.encode(corpus.text[: wanted * _CHARS_PER_TOKEN], add_special_tokens=False)
        if len(ids) < wanted:
            ids = tokenizer.encode(corpus.text, add_special_tokens=False)
        windows = make_windows(ids[:wanted], context=context, stride=stride, bos_id=bos_id)
        if not windows:
            raise ConfigError("corpus", corpus.name, "a text of at least two tokens")
        encoded.append(EncodedCorpus(corpus, windows))
    return encoded


def measure_quality(
    candidates: Mapping[str, Scorer],
    corpora: Sequence[EncodedCorpus],
    baseline: Scorer | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, QualityReport]:
    """Measure every candidate against the baseline in one pass over the corpora.

    The baseline's logits are computed once for all candidates.
    progress  called with the number of tokens just scored
    """
    rows: dict[str, list[Quality]] = {name: [] for name in candidates}
    totals = {name: Tally() for name in candidates}
    base_total = Tally()
    for encoded in corpora:
        base, tallies = score_windows(baseline, candidates, encoded.windows, progress)
        base_total.add(base)
        for name, tally in tallies.items():
            totals[name].add(tally)
            rows[name].append(_quality(encoded.corpus.name, tally, base))
    return {
        name: QualityReport(rows[name], _quality("overall", totals[name], base_total))
        for name in candidates
    }


def _quality(name: str, tally: Tally, base: Tally) -> Quality:
    compared = base.tokens > 0
    return Quality(
        corpus=name,
        perplexity=tally.perplexity,
        baseline_perplexity=base.perplexity if compared else None,
        mean_kl=tally.kl_sum / tally.tokens if compared else None,
        top1_agreement=tally.agreed / tally.tokens if compared else None,
        tokens=tally.tokens,
    )


def read_quality(
    candidate: Reader,
    baseline: Reader | None,
    corpora: Sequence[EncodedCorpus],
    progress: Callable[[int], None] | None = None,
) -> QualityReport:
    """`measure_quality` of one model of any kind; divergence is None where it cannot be had."""
    if baseline is not None:
        figures = {
            encoded.corpus.name: score_tokens(baseline, candidate, encoded.windows, progress)
            for encoded in corpora
        }
        return quality_of(figures)
    nll: list[Float64] = []
    rows: list[Quality] = []
    for encoded in corpora:
        parts = []
        for window in encoded.windows:
            for read in candidate.read(window):
                parts.append(read.nll)
                if progress is not None:
                    progress(len(read.nll))
        nll.append(np.concatenate(parts))
        rows.append(_alone(encoded.corpus.name, nll[-1]))
    return QualityReport(rows, _alone("overall", np.concatenate(nll)))


def _alone(name: str, nll: Float64) -> Quality:
    return Quality(name, perplexity_of(nll), None, None, None, len(nll))


def quality_of(figures: Mapping[str, TokenFigures]) -> QualityReport:
    """The figures of each corpus and of all tokens together."""
    rows = [_compared(name, figure) for name, figure in figures.items()]
    return QualityReport(rows, _compared("overall", TokenFigures.joined(list(figures.values()))))


def unmeasured(names: Sequence[str]) -> QualityReport:
    """Corpora that were not read to the end: no figures."""
    rows = [Quality(name, None, None, None, None, 0) for name in (*names, "overall")]
    return QualityReport(rows[:-1], rows[-1])


def _compared(name: str, figures: TokenFigures) -> Quality:
    own, base = figures.perplexities
    return Quality(
        corpus=name,
        perplexity=own,
        baseline_perplexity=base,
        mean_kl=None if figures.kl is None else float(figures.kl.mean()),
        top1_agreement=float(figures.agreed.mean()),
        tokens=len(figures.nll),
    )
