"""Speed: what one configuration reaches, and what each technique adds.

prompts.py  natural text to measure with
measure.py  run an engine and record when tokens came
session.py  one model under measurement
process.py  the process it lives in, seen from its parent; child.py is its inside
machine.py  the machine and versions a number comes from
provenance.py  the build of Trivet
profile.py  where the time of steps goes, by phase
ceiling.py  what steps must read and multiply, against what the machine can
matrix_rate.py  how fast a level's kernels multiply
roofline.py the machine's ceilings, measured once
rows.py     step time of n rows over one
engine.py   `bench engine`
rung.py     what a ladder is asked for and what comes out
gain.py     whether the rounds agree that a change pays
ladder.py   technique after technique, with quality at every rung
report.py   the ladder's report
"""

from __future__ import annotations

from trivet.bench.engine import EngineBench, bench_engine
from trivet.bench.ladder import climb
from trivet.bench.report import write_report
from trivet.bench.rung import Ladder, LadderOptions, Rung

__all__ = [
    "EngineBench",
    "Ladder",
    "LadderOptions",
    "Rung",
    "bench_engine",
    "climb",
    "write_report",
]
