"""Step time of n rows of one request over that of one row: v(n), what verifying drafts costs.

The unit is the smaller of the one-row time and the time to read its bytes at the stream bandwidth, so
that a slow one-row step does not make many rows look cheap. Steps of every n and the stream take turns
in every round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trivet import native
from trivet.bench.ceiling import StepCosts
from trivet.bench.process import EngineProcess
from trivet.bench.profile import Phase
from trivet.bench.session import ROWS_CONTEXT

_ROUNDS = 9
_STEPS = 3  # of each n in a round, which counts with their median


def step_time_ratios(
    process: EngineProcess, rows: Sequence[int], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON values of ``--rows``.

    step_time_ratio  by n: median seconds of n rows over ``floor_s``
    row_times        seconds by n (median, low, high), the one-row step always among them; bandwidth
                     (median), moved_bytes of a one-row step, floor_s and what sets it, rounds
    """
    counts = sorted({1, *rows})
    times: dict[int, list[float]] = {count: [] for count in counts}
    bandwidths: list[float] = []
    for index in range(_ROUNDS):
        turn = index % len(counts)
        order = [*counts[turn:], *counts[:turn]]
        bandwidths += native.stream_rates(facts["step_bytes"], facts["threads"])
        for count, seconds in process.call("step_rows", rows=order, rounds=_STEPS):
            times[count].append(seconds)
    medians = {count: statistics.median(seconds) for count, seconds in times.items()}
    bandwidth = statistics.median(bandwidths)
    one_row = Phase(steps=1, logit_steps=1, rows=1, logit_rows=1, context=ROWS_CONTEXT + 1)
    moved = StepCosts(**facts["costs"]).bytes_of(one_row)
    floor = min(medians[1], moved / bandwidth)
    return {
        "step_time_ratio": {str(count): medians[count] / floor for count in rows},
        "row_times": {
            "seconds": {
                str(count): {
                    "median": medians[count],
                    "low": min(times[count]),
                    "high": max(times[count]),
                }
                for count in counts
            },
            "stream_bandwidth_bytes_s": bandwidth,
            "moved_bytes": moved,
            "floor_s": floor,
            "floor": "one row" if floor == medians[1] else "stream bandwidth",
            "context": ROWS_CONTEXT,
            "rounds": _ROUNDS,
        },
    }
