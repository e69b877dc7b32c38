"""What `bench engine`'s timers cost: steps with and without them, in turns, as a share of the step.

    python benchmarks/timer_cost.py [-o out/timer_cost.json] [--weights w8a8] [--pairs 400]

Two engines on one model serve the same request, one profiled and with the model's timers on, one plain
and with them off. They step in turns (on off, off on, ...), so that both meet the same machine. The
cost is the median over pairs of (on - off), over the median step without timers, with a bootstrap
interval of 95 %; the fastest tenth of each side is compared too. Decode steps at a
context of 128 and up, and prefill steps of 128 tokens. On a machine that others use too, `--clock cpu
--threads 1` counts the CPU time of the one thread. Prints a table and, as the last line, JSON. Exits
with 1 when the cost of a phase is certainly above 1 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from trivet.bench.machine import describe_machine
from trivet.bench.profile import ProfiledRunner, TimedRunner
from trivet.bench.prompts import NaturalText
from trivet.config import EngineConfig, ModelConfig
from trivet.engine import Engine
from trivet.errors import TrivetError
from trivet.json_values import plain
from trivet.loader import LoadedModel, load_model
from trivet.request import Request, SamplingParams

PROMPT_TOKENS = 128
ALLOWED = 0.01
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


class Side:
    """An engine with one request at a time, profiled or not."""

    def __init__(
        self, model: LoadedModel, is_profiled: bool, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        self.is_profiled = is_profiled
        self._clock = clock
        self._timed = cast("TimedRunner", model.runner)
        self._profile = ProfiledRunner(self._timed)
        pages = -(-max_model_len // 32)
        config = EngineConfig(
            max_model_len=max_model_len,
            num_pages=pages,
            max_num_seqs=1,
            max_step_tokens=PROMPT_TOKENS,
            prefix_cache=False,
        )
        self._arena = model.new_arena(pages)
        runner = self._profile if is_profiled else self._timed
        self._engine = Engine(runner, self._arena, config, None)
        self._count = 0

    def add(self, prompt: list[int], output_tokens: int) -> None:
        """Begin a request."""
        self._count += 1
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, seed=0, ignore_eos=True)
        request = Request(request_id=str(self._count), prompt_ids=prompt, params=params)
        self._engine.add(request, time.monotonic())
        self._profile.begin(time.monotonic())

    def step(self) -> float:
        """Seconds of one step, its timers included."""
        self._timed.set_timers(self.is_profiled)
        begin = self._clock()
        self._engine.step(time.monotonic(), time.monotonic)
        if self.is_profiled:
            self._profile.end_step(time.monotonic(), 1)
        return self._clock() - begin


def in_turns(sides: tuple[Side, Side], index: int) -> tuple[float, float]:
    """One step of each side: seconds with and without timers."""
    first, second = sides if index % 2 == 0 else sides[::-1]
    seconds = {first.is_profiled: first.step(), second.is_profiled: second.step()}
    return seconds[True], seconds[False]


def figures(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Cost of the timers as a share of the step without them, and its interval."""
    on, off = np.array(pairs).T
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(pairs), (2000, len(pairs)))
    base = float(np.median(off))
    costs = np.median((on - off)[picks], axis=1) / base
    low, high = np.quantile(costs, (0.025, 0.975))
    fast_on, fast_off = np.quantile(on, 0.1), np.quantile(off, 0.1)
    return {
        "pairs": len(pairs),
        "step_s": base,
        "cost_s": float(np.median(on - off)),
        "cost": float(np.median(on - off)) / base,
        "interval": [float(low), float(high)],
        "fast_step_s": float(fast_off),
        "cost_of_fast_steps": float(fast_on / fast_off) - 1,
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--weights", default="w8a8")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    model = load_model(
        ModelConfig(model=options.model, weights=options.weights, threads=options.threads)
    )
    longest = PROMPT_TOKENS + options.pairs + 2
    clock = CLOCKS[options.clock]
    sides = Side(model, True, longest, clock), Side(model, False, longest, clock)
    prompt = NaturalText(model.tokenizer).prompts(1, PROMPT_TOKENS)[0]
    phases: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    for index in range(options.pairs // 8 + 1):
        for side in sides:
            side.add(prompt, 1)
        pair = in_turns(sides, index)
        if index:  # the first warms up
            phases["prefill"].append(pair)
    for side in sides:
        side.add(prompt, options.pairs + 1)
    in_turns(sides, 0)
    phases["decode"] = [in_turns(sides, index) for index in range(options.pairs)]
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "model": options.model,
        "weights": model.weights_form,
        "threads": model.threads,
        "clock": options.clock,
        "phases": {name: figures(pairs) for name, pairs in phases.items()},
    }
    heads = f"{'phase':<10}{'pairs':>8}{'step ms':>10}{'timers us':>11}{'cost':>9}"
    print(f"{heads}   {'95 % interval':<18}fastest")
    for name, row in result["phases"].items():
        low, high = row["interval"]
        print(
            f"{name:<10}{row['pairs']:>8}{1e3 * row['step_s']:>10.3f}{1e6 * row['cost_s']:>11.1f}"
            f"{row['cost']:>9.2%}   {f'{low:.2%} to {high:.2%}':<18}{row['cost_of_fast_steps']:.2%}"
        )
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(plain(result), indent=1) + "\n")
    print(json.dumps(plain(result)))
    return int(any(row["interval"][0] > ALLOWED for row in result["phases"].values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrivetError as error:
        sys.exit(f"timer_cost.py: {error}")
