"""A decode step beside two busy processes: p99 over the quiet p99 of the same round, every round kept.

python benchmarks/busy_neighbours.py -o benchmarks/results/busy_neighbours.json [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from trivet.config import PAGE_TOKENS
from trivet.native import Arena, isa_report, load_model
from trivet.native.api import StepInput
from trivet.quant import load_packed

CONTEXT = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--weights", default="w4a8-g32-min")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    model = load_model(load_packed("demo", arguments.weights), threads=2)
    pages = CONTEXT // PAGE_TOKENS + 1
    arena = Arena(model.kv_geometry(), pages)
    step = StepInput(
        tokens=np.array([100], np.int32),
        segments=np.array([[0, 1, CONTEXT, 0]], np.int32),
        page_tables=np.arange(pages, dtype=np.int32)[None],
        logit_rows=np.array([0], np.int32),
    )

    def p99_s() -> float:
        times = []
        for _ in range(arguments.steps):
            start = time.perf_counter()
            model.forward(step, arena)
            times.append(time.perf_counter() - start)
        return float(np.quantile(times, 0.99))

    p99_s()
    rounds = []
    for _ in range(arguments.rounds):
        quiet = p99_s()
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        try:
            time.sleep(0.3)
            beside = p99_s()
        finally:
            for process in busy:
                process.kill()
                process.wait()
        rounds.append({"quiet_p99_s": quiet, "busy_p99_s": beside, "ratio": beside / quiet})
    ratios = [r["ratio"] for r in rounds]
    result = {
        "what": __doc__.splitlines()[0],
        "weights": arguments.weights,
        "isa": isa_report().active,
        "threads": 2,
        "steps": arguments.steps,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "rounds": rounds,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "rounds"}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
