"""This machine's ceilings, measured once and kept: memory, arithmetic, and handing work to threads.

The file lies in the user's cache folder and is found by processor, usable levels, number of threads and
the native core's own bytes; a stream of another size is measured and added when it is first asked for.
A ceiling is the best of several rounds. What was measured while the machine was busy, or in rounds that
do not agree, is returned and not kept, so that it is measured again next time.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trivet import files, native
from trivet.bench.ceiling import StepCosts
from trivet.bench.machine import busy_seconds, cpu_name
from trivet.bench.matrix_rate import ARITHMETICS, matrix_rate
from trivet.checkpoint.cache import user_cache
from trivet.native import _core

DEFAULT_BYTES = 256 << 20  # streamed when there is no model: more than a cache holds
_ROUNDS = 3  # over all measurements in turn; the best counts, of hand-overs the median
_QUIET_LOAD = 0.1  # share of the CPUs that other processes may use
_AGREEMENT = 0.1  # how far the second best round may lie below the best
_STREAM_PASSES = 3
_RUNNING_LOOPS, _ASLEEP_LOOPS = 2000, 100
_PAUSE_S = 3e-4  # after which the pool's threads sleep
_LOOPS_PER_LAYER = 5  # pool loops of a decode step (HACKING.md, Threads)


class Conditions(msgspec.Struct, frozen=True):
    """When figures were measured, and whether they can be the machine's own.

    date    UTC, ISO 8601
    load    share of the CPUs that other processes used meanwhile; None: the system does not say
    spread  how far the second best round lies below the best, of the figure where that is most
    """

    date: str
    load: float | None
    spread: float

    @property
    def doubt(self) -> str | None:
        """Why the figures may be too low; None: the machine was quiet and the rounds agree."""
        reasons = []
        if self.load is not None and self.load > _QUIET_LOAD:
            reasons.append(f"other processes used {self.load:.0%} of the CPUs")
        if self.spread > _AGREEMENT:
            reasons.append(f"the rounds differ by {self.spread:.0%}")
        return " and ".join(reasons) or None


class Stream(msgspec.Struct, frozen=True):
    """Bytes per second of reading ``num_bytes`` of memory once."""

    num_bytes: int
    threads: int
    bytes_s: float
    conditions: Conditions


class MatrixRate(msgspec.Struct, frozen=True):
    """Multiply-adds per second of a level's linear kernels, weights in cache."""

    level: str
    arithmetic: str
    threads: int
    macs_s: float


class Handover(msgspec.Struct, frozen=True):
    """Seconds of a pool loop without work in which every thread takes part.

    running_s  the threads are still spinning after the loop before
    asleep_s   they have to be woken
    """

    threads: int
    running_s: float
    asleep_s: float


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and on what: ``key`` says which machine, threads and core it holds for.

    conditions  of the matrices and hand-overs; every stream has its own
    """

    key: str
    cpu: str
    threads: int
    isa: str
    conditions: Conditions
    streams: list[Stream]
    matrices: list[MatrixRate]
    handovers: list[Handover]

    def bytes_s(self, num_bytes: int) -> float:
        """Bandwidth of all threads together at that size."""
        return next(
            stream.bytes_s
            for stream in self.streams
            if (stream.num_bytes, stream.threads) == (num_bytes, self.threads)
        )

    def macs_s(self, level: str, arithmetic: str) -> float:
        """Multiply-adds per second of all threads together."""
        wanted = (level, arithmetic, self.threads)
        return next(
            rate.macs_s
            for rate in self.matrices
            if (rate.level, rate.arithmetic, rate.threads) == wanted
        )

    def limits(self, costs: StepCosts) -> dict[str, Any]:
        """What the ceilings allow a model at one request and no context, as JSON values.

        decode_tok_s   one pass over the weights for every token
        prefill_tok_s  the layers' multiply-adds of every token
        handover_s     pool loops of one decode step
        """
        rate = self.macs_s(self.isa, costs.arithmetic)
        handover = next(one for one in self.handovers if one.threads == self.threads)
        return {
            "step_bytes": costs.step_bytes,
            "macs_per_token": costs.layer_macs,
            "arithmetic": costs.arithmetic,
            "decode_tok_s": self.bytes_s(costs.step_bytes) / costs.step_bytes,
            "prefill_tok_s": rate / costs.layer_macs,
            "handover_s": _LOOPS_PER_LAYER * costs.num_layers * handover.running_s,
        }


@dataclasses.dataclass(frozen=True)
class Measured:
    """A roofline, where it is kept (None: nowhere), whether it was there, and why it is not kept."""

    roofline: Roofline
    path: Path | None
    is_cached: bool
    not_kept: str | None = None


def measure(
    num_bytes: int,
    threads: int,
    *,
    fresh: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Measured:
    """This machine's roofline with the stream of ``num_bytes``: the kept one, or measured now.

    num_bytes  streamed; a model's `StepCosts.step_bytes`
    threads    most threads; fewer (1, 2, 4, ...) are measured too
    fresh      measure everything again
    progress   called with the share of the work just done
    Raises ConfigError: TRIVET_CACHE is not a folder.
    """
    advance = progress or (lambda _: None)
    key = _key(threads)
    name = f"roofline.{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    path = user_cache() / name
    known = None if fresh else _load(path, key)
    if known is None:
        roofline = _measure(key, num_bytes, threads, advance)
        doubts = [roofline.conditions.doubt, roofline.streams[0].conditions.doubt]
    elif not any(stream.num_bytes == num_bytes for stream in known.streams):
        streams = _streams(num_bytes, threads, advance)
        roofline = msgspec.structs.replace(known, streams=known.streams + streams)
        doubts = [streams[0].conditions.doubt]
    else:
        return Measured(known, path, True)
    doubt = next(filter(None, doubts), None)
    if doubt is not None:
        return Measured(roofline, None, False, f"measured while the machine was busy: {doubt}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, msgspec.json.encode(roofline))
    except OSError as error:
        return Measured(roofline, None, False, f"{path}: {error.strerror or error}")
    return Measured(roofline, path, False)


def _key(threads: int) -> str:
    """What the figures depend on."""
    report = native.isa_report()
    core = hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()[:16]
    levels = ",".join(report.usable)
    return f"{cpu_name()} levels={levels} active={report.active} threads={threads} core={core}"


def _measure(key: str, num_bytes: int, threads: int, advance: Callable[[float], None]) -> Roofline:
    report, counts = native.isa_report(), thread_counts(threads)
    matrices = [
        (level, arithmetic, count)
        for level in report.usable
        for arithmetic in ARITHMETICS
        for count in counts
    ]
    rates: dict[tuple[str, str, int], list[float]] = {which: [] for which in matrices}
    running: dict[int, list[float]] = {count: [] for count in counts}
    asleep: dict[int, list[float]] = {count: [] for count in counts}
    watch = _Watch()
    for _ in range(_ROUNDS):
        for which in matrices:
            rates[which].append(matrix_rate(*which))
            advance(0.8 / _ROUNDS / len(matrices))
        for count in counts:
            running[count] += native.pool_loops(count, _RUNNING_LOOPS)
            asleep[count] += native.pool_loops(count, _ASLEEP_LOOPS, _PAUSE_S)
    conditions = watch.conditions(rates.values())
    streams = _streams(num_bytes, threads, lambda share: advance(0.2 * share))
    return Roofline(
        key=key,
        cpu=cpu_name(),
        threads=threads,
        isa=report.active,
        conditions=conditions,
        streams=streams,
        matrices=[MatrixRate(*which, max(rates[which])) for which in matrices],
        handovers=[
            Handover(count, statistics.median(running[count]), statistics.median(asleep[count]))
            for count in counts
        ],
    )


def _streams(num_bytes: int, threads: int, advance: Callable[[float], None]) -> list[Stream]:
    counts = thread_counts(threads)
    rates: dict[int, list[float]] = {count: [] for count in counts}
    watch = _Watch()
    for _ in range(_ROUNDS):
        for count in counts:
            rates[count].append(max(native.stream_rates(num_bytes, count, _STREAM_PASSES)))
            advance(1 / _ROUNDS / len(counts))
    conditions = watch.conditions(rates.values())
    return [Stream(num_bytes, count, max(rates[count]), conditions) for count in counts]


class _Watch:
    """What other processes do from now on."""

    def __init__(self) -> None:
        self._date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds that CPUs have worked, that they have been there, and that this process has had."""
        busy = busy_seconds()
        return None if busy is None else (*busy, time.process_time())

    def conditions(self, rounds: Iterable[Sequence[float]]) -> Conditions:
        """Those of figures measured since the watch was made; of each, what every round gave."""
        begin, end = self._begin, self._now()
        load = None
        if begin is not None and end is not None:
            busy, there, ours = (after - before for before, after in zip(begin, end, strict=True))
            load = max(0.0, busy - ours) / there if there > 0 else None
        return Conditions(self._date, load, max(map(_spread, rounds), default=0.0))


def _spread(rates: Sequence[float]) -> float:
    """How far the second best lies below the best, as a share; 0 for a single one."""
    best, *others = sorted(rates, reverse=True)
    return 1 - others[0] / best if others else 0.0


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4, ... and ``threads`` itself."""
    return sorted({threads} | {1 << bit for bit in range(threads.bit_length())})


def _load(path: Path, key: str) -> Roofline | None:
    """The kept roofline; None: none for this key, a damaged one, or one of another form."""
    try:
        known = msgspec.json.decode(path.read_bytes(), type=Roofline)
    except (OSError, msgspec.MsgspecError):
        return None
    return known if known.key == key else None
