"""Whether a change pays, by its gain in each of a few interleaved rounds.

Rounds on a shared machine differ by more than most changes gain, and a median of two or three of them
says little by itself. So the rounds have to agree: all of them while there are fewer than five, four
of five beyond.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from trivet.evaluate import Verdict

LEAST_GAIN = 1.02  # of the median; and the rounds above 1
LEAST_KV_GAIN = 0.95  # of int8 KV, which is there for memory: it may cost this much speed
LEAST_ROUNDS = 3  # fewer prove nothing
_ALL_BELOW = 5  # rounds; while there are fewer, every one has to agree
_AGREEING = 0.8  # of the rounds otherwise


def judge_gain(
    ratios: Sequence[float], least: float, floor: float | None = None
) -> tuple[Verdict, str]:
    """A verdict on a gain from its value in each round, and the reason.

    least  what the median has to reach for a pass
    floor  what the rounds have to be above, each for itself; None: ``least``
    Pass: the median reaches ``least`` and enough rounds are above ``floor``. Reject: enough rounds are
    below ``least``. Undecided: neither, or fewer than LEAST_ROUNDS rounds.
    """
    floor = least if floor is None else floor
    shown = describe_gain(ratios)
    if len(ratios) < LEAST_ROUNDS:
        few = "1 round tells" if len(ratios) == 1 else f"{len(ratios)} rounds tell"
        shown = f" (x{statistics.median(ratios):.2f})" if ratios else ""
        return Verdict.UNDECIDED, f"{few} nothing{shown}; give a larger --budget"
    enough = len(ratios)
    if len(ratios) >= _ALL_BELOW:
        enough = math.ceil(_AGREEING * len(ratios))
    if statistics.median(ratios) >= least and sum(ratio > floor for ratio in ratios) >= enough:
        return Verdict.PASS, shown
    if sum(ratio < least for ratio in ratios) >= enough:
        return Verdict.REJECT, f"does not pay here: {shown}"
    return Verdict.UNDECIDED, f"the rounds do not agree: {shown}"


def describe_gain(ratios: Sequence[float]) -> str:
    """The median with the lowest and highest round."""
    if not ratios:
        return "no gain"
    return (
        f"x{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f} "
        f"in {len(ratios)} round{'s' * (len(ratios) != 1)}"
    )
