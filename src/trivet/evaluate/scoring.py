"""Logits of a known text, chunk by chunk with bounded memory, and the numbers taken from them.

A `Scorer` runs one request alone on its own small arena. `score_windows` walks the windows of a text,
asks the baseline and every candidate for the same rows and keeps sums only: never more than CHUNK_ROWS
rows of logits per model exist.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trivet.config import PAGE_TOKENS
from trivet.native.api import Arena, Float32, ModelRunner, StepInput

CHUNK_ROWS = 64
_ROWS_AT_ONCE = 4
_FOLDED = 768  # columns from which sums are in float64
Float64 = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Window:
    """One pass through the model: ``input_ids`` go in, the last len(target_ids) rows are scored."""

    input_ids: list[int]
    target_ids: list[int]


def make_windows(
    ids: Sequence[int], *, context: int, stride: int, bos_id: int | None = None
) -> list[Window]:
    """Cut a text into windows of at most ``context`` rows so that every token is scored once.

    Each window begins ``stride`` tokens after the one before and scores the tokens that the one before
    did not. Without ``bos_id`` the text's first token has nothing before it and is not scored; with it
    every window begins with that token instead, as the model was trained.

    A token is therefore predicted from at least context - stride tokens before it (fewer at the
    beginning of the text), and with stride == context from none to context - 1 of its own window.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"stride {stride} outside 1..{context}")
    head = [] if bos_id is None else [bos_id]
    stream = [*head, *ids]
    windows: list[Window] = []
    scored = 1  # stream[:scored] need no score: the first token, or BOS
    start = 0
    while scored < len(stream):
        first = start + 1 if bos_id is not None and start > 0 else start
        rows = context - 1 if first > start else context
        end = min(first + rows, len(stream) - 1)  # input rows [first, end) predict [first+1, end+1)
        inputs = (head if first > start else []) + list(stream[first:end])
        windows.append(Window(inputs, list(stream[scored : end + 1])))
        scored = end + 1
        start += stride
    return windows


class Scorer:
    """One model that reads texts: a runner and an arena of its own.

    arena  at least ceil(longest window / PAGE_TOKENS) pages; overwritten by every window
    """

    def __init__(self, runner: ModelRunner, arena: Arena) -> None:
        self._runner = runner
        self._arena = arena
        self._table = np.arange(arena.num_pages, dtype=np.int32)[None, :]

    @property
    def max_rows(self) -> int:
        return min(self._arena.num_pages * PAGE_TOKENS, self._runner.max_positions)

    def chunks(self, input_ids: Sequence[int], num_scored: int) -> Iterator[Float32]:
        """Run one window; yield the logits of its last ``num_scored`` rows, CHUNK_ROWS at a time.

        Chunk borders depend on len(input_ids) and num_scored only, so several models can be walked
        in step. Each float32 [<= CHUNK_ROWS, V].
        """
        assert 0 < num_scored <= len(input_ids) <= self.max_rows, "window outside the arena"
        first_scored = len(input_ids) - num_scored
        borders = [
            *range(0, first_scored, CHUNK_ROWS),
            *range(first_scored, len(input_ids), CHUNK_ROWS),
        ]
        for start, end in zip(borders, [*borders[1:], len(input_ids)], strict=True):
            wanted = range(end - start) if start >= first_scored else range(0)
            self._runner.forward(
                StepInput(
                    tokens=np.asarray(input_ids[start:end], np.int32),
                    segments=np.array([[0, end - start, start, 0]], np.int32),
                    page_tables=self._table,
                    logit_rows=np.asarray(wanted, np.int32),
                ),
                self._arena,
            )
            if len(wanted):
                yield self._runner.logits()

    def read(self, window: Window) -> Iterator[Rows]:
        """The scored tokens of a window, CHUNK_ROWS at a time.

        Logits that are no numbers give figures that are none either; nothing is raised.
        """
        count = len(window.target_ids)
        for start, logits in zip(
            range(0, count, CHUNK_ROWS), self.chunks(window.input_ids, count), strict=True
        ):
            targets = np.asarray(window.target_ids[start : start + CHUNK_ROWS], np.int64)
            with np.errstate(invalid="ignore", over="ignore"):
                whole = LogSoftmax.of(logits)
                yield Rows(whole.nll_rows(targets), logits.argmax(axis=1), whole)


@dataclasses.dataclass
class Tally:
    """Running sums over scored tokens. ``kl_sum`` and ``agreed`` stay zero for the baseline itself."""

    tokens: int = 0
    nll_sum: float = 0.0
    kl_sum: float = 0.0
    agreed: int = 0

    def add(self, other: Tally) -> None:
        self.tokens += other.tokens
        self.nll_sum += other.nll_sum
        self.kl_sum += other.kl_sum
        self.agreed += other.agreed

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-probability; None when nothing was scored or it overflows."""
        mean = self.nll_sum / self.tokens if self.tokens else math.inf
        return math.exp(mean) if mean < 700 else None


def _row_blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _ROWS_AT_ONCE):
        yield slice(start, min(count, start + _ROWS_AT_ONCE))


def _row_sums(values: Float32) -> Float64:
    """Sums of rows [R, V], float64. ``values`` are overwritten: halves are added up in float32, which
    rounds each term a few times only, and what is left in float64.
    """
    width = values.shape[1]
    while width > _FOLDED:
        half = width // 2
        values[:, :half] += values[:, width - half : width]
        width -= half
    return np.asarray(values[:, :width].sum(axis=1, dtype=np.float64))


@dataclasses.dataclass(frozen=True)
class LogSoftmax:
    """Rows of logits prepared once: shifted by their maximum, and the log of the exponentials' sum.

    shifted  float32 [R, V]      log_sum  float64 [R]
    Single terms are float32, an error near 1e-7 of each, and so are the first foldings of their sums.
    A few rows are worked on at a time, so that what is thrown away stays in the processor's cache.
    """

    shifted: Float32
    log_sum: Float64

    @classmethod
    def of(cls, logits: Float32) -> LogSoftmax:
        shifted = logits - logits.max(axis=1, keepdims=True)
        sums = np.empty(len(logits))
        scratch = np.empty((_ROWS_AT_ONCE, logits.shape[1]), np.float32)
        for part in _row_blocks(len(logits)):
            block = scratch[: part.stop - part.start]
            np.exp(shifted[part], out=block)
            sums[part] = _row_sums(block)
        return cls(shifted, np.log(sums))

    def nll(self, targets: NDArray[np.int64]) -> float:
        """Sum of the targets' negative log-probabilities."""
        return float(self.nll_rows(targets).sum())

    def nll_rows(self, targets: NDArray[np.int64]) -> Float64:
        """Negative log-probability of each row's target, [R]."""
        rows = np.arange(len(targets))
        return np.asarray(self.log_sum - self.shifted[rows, targets].astype(np.float64))

    def kl_to(self, other: LogSoftmax) -> float:
        """Sum over rows of KL(self || other)."""
        return float(self.kl_rows(other).sum())

    def kl_rows(self, other: LogSoftmax) -> Float64:
        """KL(self || other) of each row, [R]."""
        terms = np.empty(len(self.log_sum))
        scratch = np.empty((2, _ROWS_AT_ONCE, self.shifted.shape[1]), np.float32)
        for part in _row_blocks(len(terms)):
            difference, weight = scratch[:, : part.stop - part.start]
            np.subtract(self.shifted[part], other.shifted[part], out=difference)
            np.exp(self.shifted[part], out=weight)
            difference *= weight
            terms[part] = _row_sums(difference)
        rows = terms / np.exp(self.log_sum) - (self.log_sum - other.log_sum)
        return np.asarray(np.maximum(rows, 0.0))

    def agreement(self, other: LogSoftmax) -> int:
        """Rows in which both have the same most likely token (ties: the lowest id)."""
        return int(self.agreement_rows(other).sum())

    def agreement_rows(self, other: LogSoftmax) -> NDArray[np.bool_]:
        """Whether both have the same most likely token, for each row, [R]."""
        return np.asarray(self.shifted.argmax(axis=1) == other.shifted.argmax(axis=1))


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a model says of tokens that follow each other in a text.

    nll    negative log-probability of each token in nats, float64 [R]
    best   the most likely token at each place [R]: ids, or names where only those are known
    whole  log-probabilities of the whole vocabulary; None where a model does not give them
    """

    nll: Float64
    best: NDArray[Any]
    whole: LogSoftmax | None = None


class Reader(Protocol):
    """A model that reads texts: a `Scorer`, or a model behind a URL."""

    def read(self, window: Window) -> Iterator[Rows]:
        """The scored tokens of a window in order, in runs of CHUNK_ROWS and a rest."""


def score_windows(
    baseline: Scorer | None,
    candidates: Mapping[str, Scorer],
    windows: Sequence[Window],
    progress: Callable[[int], None] | None = None,
) -> tuple[Tally, dict[str, Tally]]:
    """Walk all models through the windows in step; return the baseline's sums and each candidate's.

    progress  called with the number of tokens just scored
    """
    base_tally, tallies = Tally(), {name: Tally() for name in candidates}
    for window in windows:
        count = len(window.target_ids)
        base_chunks = baseline.chunks(window.input_ids, count) if baseline is not None else None
        walks = {
            name: scorer.chunks(window.input_ids, count) for name, scorer in candidates.items()
        }
        for start in range(0, count, CHUNK_ROWS):
            targets = np.asarray(window.target_ids[start : start + CHUNK_ROWS], np.int64)
            base = LogSoftmax.of(next(base_chunks)) if base_chunks is not None else None
            if base is not None:
                base_tally.add(Tally(len(targets), base.nll(targets)))
            for name, walk in walks.items():
                own = LogSoftmax.of(next(walk))
                tally = Tally(len(targets), own.nll(targets))
                if base is not None:
                    tally.kl_sum = base.kl_to(own)
                    tally.agreed = base.agreement(own)
                tallies[name].add(tally)
            if progress is not None:
                progress(len(targets))
    return base_tally, tallies


@dataclasses.dataclass(frozen=True)
class TokenFigures:
    """Figures of every scored token of a text, in order; all [T].

    nll, baseline_nll  float64, nats      agreed  bool
    kl  float64, nats; None where a model does not give the whole vocabulary
    """

    nll: Float64
    baseline_nll: Float64
    kl: Float64 | None
    agreed: NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: Sequence[TokenFigures]) -> TokenFigures:
        """The parts one after the other."""
        kl = [part.kl for part in parts if part.kl is not None]
        return cls(
            np.concatenate([part.nll for part in parts]),
            np.concatenate([part.baseline_nll for part in parts]),
            np.concatenate(kl) if len(kl) == len(parts) else None,
            np.concatenate([part.agreed for part in parts]),
        )

    def cut(self, start: int, end: int) -> TokenFigures:
        """Tokens [start, end)."""
        return TokenFigures(
            self.nll[start:end],
            self.baseline_nll[start:end],
            None if self.kl is None else self.kl[start:end],
            self.agreed[start:end],
        )

    @property
    def perplexities(self) -> tuple[float | None, float | None]:
        """(candidate, baseline); None when it overflows or is not a number."""
        return perplexity_of(self.nll), perplexity_of(self.baseline_nll)


def perplexity_of(nll: Float64) -> float | None:
    """exp of the mean of negative log-probabilities, None when that is no finite number."""
    mean = float(nll.mean()) if len(nll) else math.inf
    return math.exp(mean) if mean < 700 else None


def score_tokens(
    baseline: Reader,
    candidate: Reader,
    windows: Sequence[Window],
    progress: Callable[[int], None] | None = None,
) -> TokenFigures:
    """`score_windows` for one candidate, token by token, for any two readers of the same tokens."""
    parts: list[TokenFigures] = []
    for window in windows:
        for base, own in zip(baseline.read(window), candidate.read(window), strict=True):
            kl = None
            if base.whole is not None and own.whole is not None:
                with np.errstate(invalid="ignore", over="ignore"):
                    kl = base.whole.kl_rows(own.whole)
            parts.append(TokenFigures(own.nll, base.nll, kl, base.best == own.best))
            if progress is not None:
                progress(len(own.nll))
    return TokenFigures.joined(parts)
