"""The engine: token ids in, events out.

engine.py         Engine: the step
scheduler.py      which rows of which requests the next step computes
pages.py          the page pool and its ledger
prefix.py         the prefix cache
request_state.py  what is known about one live request
step_input.py     arrays of a step
commit.py         where a run of drawn tokens ends
drafter.py        the Drafter protocol
step_time.py      the cost model: seconds of a step
stats.py          counters
"""

from typing import TYPE_CHECKING

from trivet.lazy import lazy_names

if TYPE_CHECKING:
    from trivet.engine.drafter import DraftAsk, Drafter
    from trivet.engine.engine import Engine
    from trivet.engine.pages import pages_needed
    from trivet.engine.stats import EngineStats, Histogram, SpeculationStats
    from trivet.engine.step_time import StepLoad, StepTime

__all__ = [
    "DraftAsk",
    "Drafter",
    "Engine",
    "EngineStats",
    "Histogram",
    "SpeculationStats",
    "StepLoad",
    "StepTime",
    "pages_needed",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "drafter": ("DraftAsk", "Drafter"),
            "engine": ("Engine",),
            "pages": ("pages_needed",),
            "stats": ("EngineStats", "Histogram", "SpeculationStats"),
            "step_time": ("StepLoad", "StepTime"),
        },
    )
