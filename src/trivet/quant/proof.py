"""The coverage proof: what was done to every linear, checked before a folder may appear."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trivet.errors import QuantError

MAX_RAISED_SHARE = 0.05  # of all linears whose damp had to be raised to factor the Hessian
MAX_SIZE_DIFFERENCE = 0.001
DAMP_WARNING = 0.05


@dataclasses.dataclass(frozen=True)
class LinearProof:
    """One linear: what was asked, what was done, on how many tokens, and the error before and after.

    error_before, error_after  relative change of the output on held-out tokens, round to nearest and
                               this method (root of squared error over squared output); weights alone
                               when nothing was calibrated
    method       what made the codes in the end: a method that was no better than round to nearest
                 here is replaced by it, and `replaced` says so
    activations  with a rule for activations: `InputRule.as_json` and ``error``, rule -> relative change
                 of the output on held-out tokens by the rounding of activations alone, with the rule
                 and with ``row``
    """

    name: str
    target: str
    method: str
    tokens: int
    damp: float | None
    damp_raised: int
    error_before: float
    error_after: float
    bytes: int
    replaced: str = ""
    activations: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LinearProof:
        return cls(**data)


def check_proof(
    linears: Sequence[LinearProof],
    expected: Sequence[str],
    *,
    predicted_bytes: int,
    written_bytes: int,
    max_raised_share: float = MAX_RAISED_SHARE,
) -> list[str]:
    """The warnings of a sound proof.

    Raises QuantError in one line: a target untouched or done twice, an error that is no number, more
    Hessians whose damp was raised than allowed, a size that differs from the prediction.
    """
    names = [linear.name for linear in linears]
    missing = sorted(set(expected) - set(names))
    if missing:
        raise QuantError(f"{len(missing)} linears were left untouched, first {missing[0]}")
    if len(names) != len(set(names)) or set(names) - set(expected):
        raise QuantError("the proof names linears that were not to be done, or one twice")
    for linear in linears:
        activation_errors = (linear.activations or {}).get("error", {}).values()
        errors = (linear.error_after, linear.error_before, *activation_errors)
        if not all(map(math.isfinite, errors)):
            raise QuantError(f"{linear.name}: the error of the output is not a number")
    raised = [linear.name for linear in linears if linear.damp_raised]
    if len(raised) > max_raised_share * len(linears):
        raise QuantError(
            f"the damp of {len(raised)} of {len(linears)} Hessians had to be raised, more than"
            f" {max_raised_share:.0%}; use more --samples or a larger --damp"
        )
    difference = abs(written_bytes - predicted_bytes) / max(predicted_bytes, 1)
    if difference > MAX_SIZE_DIFFERENCE:
        raise QuantError(
            f"{written_bytes} bytes were written, {predicted_bytes} were predicted"
            f" ({difference:.2%} off)"
        )
    warnings = [f"damp was raised for {name}" for name in raised]
    damps = [linear.damp for linear in linears if linear.damp is not None]
    if damps and float(np.median(damps)) > DAMP_WARNING:
        warnings.append(f"median damp {np.median(damps):.3g} is above {DAMP_WARNING}")
    replaced = [linear.name for linear in linears if linear.replaced]
    if replaced:
        warnings.append(
            f"{len(replaced)} linears are rounded to nearest, where the method was no better:"
            f" {', '.join(replaced[:4])}"
        )
    return warnings
