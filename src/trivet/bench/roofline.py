"""This machine's ceilings, measured once and kept: memory, arithmetic, and handing work to threads.

The file lies in the user's cache folder and is found by processor, usable levels, number of threads and
the native core's own bytes; a stream of another size is measured and added when it is first asked for.
What a kept figure says of a busy moment it says for ever: `measure` with ``fresh`` measures again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from trivet import files, native
from trivet.bench.ceiling import StepCosts
from trivet.bench.machine import cpu_name
from trivet.bench.matrix_rate import ARITHMETICS, matrix_rate
from trivet.checkpoint.cache import user_cache
from trivet.native import _core

DEFAULT_BYTES = 256 << 20  # streamed when there is no model: more than a cache holds
_ROUNDS = 3  # over all measurements in turn; medians count
_STREAM_REPEATS = 3
_RUNNING_LOOPS, _ASLEEP_LOOPS = 2000, 100
_PAUSE_S = 3e-4  # after which the pool's threads sleep
_LOOPS_PER_LAYER = 5  # pool loops of a decode step (HACKING.md, Threads)


class Stream(msgspec.Struct, frozen=True):
    """Bytes per second of reading ``num_bytes`` of memory once."""

    num_bytes: int
    threads: int
    bytes_s: float


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
    """What was measured, and on what: ``key`` says which machine, threads and core it holds for."""

    key: str
    cpu: str
    threads: int
    isa: str
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
    """A roofline, where it is kept (None: nowhere, the folder is read-only), whether it was there."""

    roofline: Roofline
    path: Path | None
    is_cached: bool


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
    elif not any(stream.num_bytes == num_bytes for stream in known.streams):
        streams = _streams(num_bytes, threads, advance)
        roofline = msgspec.structs.replace(known, streams=known.streams + streams)
    else:
        return Measured(known, path, True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, msgspec.json.encode(roofline))
    except OSError:  # a read-only folder: measured again next time
        return Measured(roofline, None, False)
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
    for _ in range(_ROUNDS):
        for which in matrices:
            rates[which].append(matrix_rate(*which))
            advance(0.8 / _ROUNDS / len(matrices))
        for count in counts:
            running[count] += native.pool_loops(count, _RUNNING_LOOPS)
            asleep[count] += native.pool_loops(count, _ASLEEP_LOOPS, _PAUSE_S)
    streams = _streams(num_bytes, threads, lambda share: advance(0.2 * share))
    return Roofline(
        key=key,
        cpu=cpu_name(),
        threads=threads,
        isa=report.active,
        streams=streams,
        matrices=[MatrixRate(*which, statistics.median(rates[which])) for which in matrices],
        handovers=[
            Handover(count, statistics.median(running[count]), statistics.median(asleep[count]))
            for count in counts
        ],
    )


def _streams(num_bytes: int, threads: int, advance: Callable[[float], None]) -> list[Stream]:
    counts = thread_counts(threads)
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(_ROUNDS):
        for count in counts:
            rates[count].append(native.stream_bandwidth(num_bytes, count, _STREAM_REPEATS))
            advance(1 / _ROUNDS / len(counts))
    return [Stream(num_bytes, count, statistics.median(rates[count])) for count in counts]


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4, ... and ``threads`` itself."""
    return sorted({threads} | {1 << bit for bit in range(threads.bit_length())})


def _load(path: Path, key: str) -> Roofline | None:
    """The kept roofline; None when there is none for this key, or a damaged one."""
    try:
        known = msgspec.json.decode(path.read_bytes(), type=Roofline)
    except (OSError, msgspec.MsgspecError):
        return None
    return known if known.key == key else None
