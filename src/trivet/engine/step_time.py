"""The one cost model of the project: seconds of a step as a function of what it computes.

    seconds = c0 + c1 rows + c2 max(0, rows - KNEE_ROWS) + c3 context + c4 pairs + c5 logit_rows

The constant is the price of streaming the weights once; the knee separates steps bound by memory
from steps bound by arithmetic; `context` is KV read and `pairs` attention work (see `StepLoad`).
Coefficients are never negative, so more work never looks cheaper. They are fitted to steps measured on
this machine by least squares on *relative* errors, with outliers weighted down (Huber), because a
disturbed step may be many times too long and never too short.

Used by the draft controller, the planner and the simulator. `measure` takes the clock as an argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from trivet import files
from trivet.config import PAGE_TOKENS
from trivet.engine.pages import pages_needed
from trivet.errors import ConfigError
from trivet.native.api import Arena, ModelRunner, SampleInput, StepInput
from trivet.request import SamplingParams

KNEE_ROWS = 16
_HUBER = 1.345  # times the scale of the residuals: 95 % efficient for normal errors
_MIN_ROUNDS, _MAX_ROUNDS = 2, 8
_MIN_LOADS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step does, as far as its cost goes.

    rows         tokens computed
    segments     requests with rows
    context      sum over segments of the tokens attended by its last row (KV that is read)
    pairs        sum over rows of the tokens each attends
    logit_rows   rows whose logits are computed
    """

    rows: int = 0
    segments: int = 0
    context: int = 0
    pairs: int = 0
    logit_rows: int = 0

    def plus(self, start: int, count: int, logit_rows: int) -> StepLoad:
        """The load with one more segment: ``count`` rows from absolute position ``start``."""
        return StepLoad(
            self.rows + count,
            self.segments + 1,
            self.context + start + count,
            self.pairs + count * start + count * (count + 1) // 2,
            self.logit_rows + logit_rows,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured step."""

    load: StepLoad
    seconds: float


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted cost model and how well it fits.

    key                    what it was measured on (numerics, threads, machine); a model with another
                           key must not be used
    coefficients           seconds per feature, in the order of the formula above
    num_samples            steps it was fitted to
    median_relative_error  of |predicted - measured| / measured
    p90_relative_error     likewise
    """

    key: str
    coefficients: tuple[float, float, float, float, float, float]
    num_samples: int
    median_relative_error: float
    p90_relative_error: float

    def predict(self, load: StepLoad) -> float:
        """Seconds of a step with this load; 0 for an empty one."""
        if load.rows == 0:
            return 0.0
        c = self.coefficients
        return (
            c[0]
            + c[1] * load.rows
            + c[2] * max(0, load.rows - KNEE_ROWS)
            + c[3] * load.context
            + c[4] * load.pairs
            + c[5] * load.logit_rows
        )

    def save(self, path: Path) -> None:
        """Write as JSON, in one step for readers."""
        files.write(path, msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path, key: str) -> StepTime | None:
        """Read what `save` wrote; None when there is no file or it was measured on something else.

        Raises ConfigError: the file is not one of ours.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            model = msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(str(path), str(error), "a file written by StepTime.save") from None
        return model if model.key == key else None


def fit(steps: Sequence[MeasuredStep], key: str) -> StepTime:
    """Fit the model to measured steps; needs at least as many as there are coefficients."""
    assert len(steps) >= 6, "six coefficients need at least six measured steps"
    features = np.array([_features(step.load) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    relative = features / seconds[:, None]
    ones = np.ones(len(steps))
    weights = ones
    for _ in range(10):
        root = np.sqrt(weights)
        coefficients = _non_negative_least_squares(relative * root[:, None], ones * root)
        residuals = np.abs(relative @ coefficients - 1.0)
        scale = max(1.4826 * float(np.median(residuals)), 1e-6)
        weights = np.minimum(1.0, _HUBER * scale / np.maximum(residuals, 1e-12))
    c0, c1, c2, c3, c4, c5 = coefficients.tolist()
    return StepTime(
        key=key,
        coefficients=(c0, c1, c2, c3, c4, c5),
        num_samples=len(steps),
        median_relative_error=float(np.median(residuals)),
        p90_relative_error=float(np.quantile(residuals, 0.9)),
    )


def _features(load: StepLoad) -> tuple[float, ...]:
    knee = max(0, load.rows - KNEE_ROWS)
    return (1.0, load.rows, knee, load.context, load.pairs, load.logit_rows)


def _non_negative_least_squares(
    a: NDArray[np.float64], b: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares of a·x = b with x >= 0, by leaving out the most negative unknown again and again.

    Columns are scaled to unit length first, so that "most negative" compares like with like.
    """
    lengths = np.linalg.norm(a, axis=0)
    usable = [i for i in range(a.shape[1]) if lengths[i] > 0]
    solution = np.zeros(a.shape[1])
    while usable:
        scaled = a[:, usable] / lengths[usable]
        values = np.linalg.lstsq(scaled, b, rcond=None)[0]
        if (values >= 0).all():
            solution[usable] = values / lengths[usable]
            break
        del usable[int(np.argmin(values))]
    return solution


def measure(
    runner: ModelRunner,
    arena: Arena,
    clock: Callable[[], float],
    *,
    max_rows: int = 256,
    max_context: int = 1024,
    budget_s: float = 2.0,
) -> list[MeasuredStep]:
    """Time real steps (forward and a greedy draw) over a grid of loads, for about ``budget_s``.

    Overwrites pages of the arena, so it runs before the engine holds any; the contents of pages do not
    change the time. Rounds over the whole grid are interleaved, so that a disturbance does not fall on
    one load alone. The first round, from the smallest load up, warms caches and is not counted; loads
    that do not fit a third of the budget are left out, and at least two rounds follow.
    """
    grid = _grid(arena.num_pages, max_rows, min(max_context, runner.max_positions))
    sampler = runner.new_sampler(SamplingParams(temperature=0.0, seed=0), 0, [0])
    begin = clock()

    def run(segments: list[_Segment]) -> MeasuredStep:
        step, load = _synthetic_step(segments)
        start = clock()
        runner.forward(step, arena)
        runner.sample([SampleInput(sampler, row, 1) for row in range(load.logit_rows)])
        return MeasuredStep(load, max(clock() - start, 1e-9))

    num_loads = 0
    for segments in grid:
        if num_loads >= _MIN_LOADS and clock() - begin > budget_s / 3:
            break
        run(segments)
        num_loads += 1
    steps: list[MeasuredStep] = []
    for round_index in range(_MAX_ROUNDS):
        if round_index >= _MIN_ROUNDS and clock() - begin > budget_s:
            break
        steps += [run(segments) for segments in grid[:num_loads]]
    return steps


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    count: int
    num_logits: int


def _grid(num_pages: int, max_rows: int, max_context: int) -> list[list[_Segment]]:
    """Loads to measure, smallest first: batches of decodes, drafts to verify, prefill chunks.

    Left out is what the pages or the limits do not allow.
    """
    contexts = [c for c in (16, 256, 1024, 4096) if c < max_context] or [0]
    loads = [
        [_Segment(context, rows, rows)] * batch
        for context in contexts
        for batch, rows in (
            (1, 1),
            (2, 1),
            (4, 1),
            (8, 1),
            (16, 1),
            (32, 1),
            (1, 2),
            (1, 4),
            (1, 8),
        )
    ]
    loads += [
        [_Segment(start, rows, 1)]
        for start in (0, *contexts[1:])
        for rows in (8, 16, 32, 64, 128, 256, 512)
        if start + rows <= max_context
    ]
    allowed = [
        load for load in loads if _rows_of(load) <= max_rows and _pages_of(load) <= num_pages
    ]
    return sorted(allowed, key=_rows_of)


def _rows_of(segments: Sequence[_Segment]) -> int:
    return sum(segment.count for segment in segments)


def _pages_of(segments: Sequence[_Segment]) -> int:
    """Pages of a load whose segments share the pages before their own rows."""
    first = segments[0]
    shared = first.start // PAGE_TOKENS
    return shared + len(segments) * (pages_needed(first.start + first.count) - shared)


def _synthetic_step(segments: Sequence[_Segment]) -> tuple[StepInput, StepLoad]:
    first = segments[0]
    num_columns = pages_needed(first.start + first.count)
    shared = first.start // PAGE_TOKENS
    own = num_columns - shared
    tables = np.full((len(segments), num_columns), -1, np.int32)
    rows, load = 0, StepLoad()
    logit_rows: list[int] = []
    table = np.empty((len(segments), 4), np.int32)
    for index, segment in enumerate(segments):
        tables[index, :shared] = np.arange(shared)
        tables[index, shared:] = np.arange(own) + shared + index * own
        table[index] = (rows, segment.count, segment.start, index)
        rows += segment.count
        logit_rows.extend(range(rows - segment.num_logits, rows))
        load = load.plus(segment.start, segment.count, segment.num_logits)
    step = StepInput(
        tokens=np.ones(rows, np.int32),
        segments=table,
        page_tables=tables,
        logit_rows=np.array(logit_rows, np.int32),
    )
    return step, load
