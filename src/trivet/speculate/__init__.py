"""Speculative decoding: who proposes tokens, and when that pays.

Verification is not here: the engine's ordinary sampler draws the same tokens with and without drafts.
"""

from trivet.config import EngineConfig
from trivet.engine import Drafter
from trivet.engine.step_time import StepTime
from trivet.speculate.controller import ControlledDrafter, predicted_speedup
from trivet.speculate.ngram import NgramDrafter

__all__ = ["ControlledDrafter", "NgramDrafter", "make_drafter", "predicted_speedup"]


def make_drafter(config: EngineConfig, step_time: StepTime | None = None) -> Drafter | None:
    """The drafter that ``config.draft`` names, under the controller when step times are known."""
    if config.draft == "off":
        return None
    drafter = NgramDrafter()
    return drafter if step_time is None else ControlledDrafter(drafter, step_time)
