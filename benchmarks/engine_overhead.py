"""Python time of an engine step outside native calls, per batch size, with and without drafting.

    python benchmarks/engine_overhead.py [-o out/engine_overhead.json] [--steps 1000]

The model is replaced by one that answers at once, so what is left is the engine itself: scheduling,
arrays, commit, events. With ``ngram`` every request drafts in every step and nothing is accepted, which
is the most work drafting can make. Prints a table, and JSON as the last line.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from trivet.config import PAGE_TOKENS, EngineConfig
from trivet.engine import Engine
from trivet.native.api import (
    Arena,
    Float32,
    KVGeometry,
    SampleInput,
    SampleResult,
    SamplerState,
    StepInput,
    Taps,
)
from trivet.request import Logprob, Request, SamplingParams
from trivet.speculate import NgramDrafter

_GEOMETRY = KVGeometry(1, 1, 2, "bf16", PAGE_TOKENS, 1)
_RESULT = SampleResult([5], None)


class _NoArena:
    num_pages = 4096
    geometry = _GEOMETRY


class _NoState:
    def commit(self, token_ids: Sequence[int]) -> None:
        """Nothing to count."""


class _NoModel:
    """Answers every step at once with the same token."""

    vocab_size = 64
    num_layers = hidden_size = 1
    max_positions = 4096
    numerics_id = "none"
    eos_ids: frozenset[int] = frozenset()

    def kv_geometry(self) -> KVGeometry:
        return _GEOMETRY

    def forward(self, step: StepInput, arena: Arena, taps: Taps | None = None) -> Float32 | None:
        return None

    def logits(self) -> Float32:
        raise AssertionError("nobody asks for logits")

    def nonfinite_logits(self) -> list[int]:
        return []

    def new_sampler(
        self, params: SamplingParams, choice_index: int, prompt_ids: Sequence[int]
    ) -> SamplerState:
        return _NoState()

    def sample(self, inputs: Sequence[SampleInput]) -> list[SampleResult]:
        return [_RESULT] * len(inputs)

    def token_logprobs(self, first_logit: int, token_ids: Sequence[int], top: int) -> list[Logprob]:
        raise AssertionError("nobody asks for log-probabilities")


def step_seconds(batch: int, draft: bool, num_steps: int) -> list[float]:
    """Seconds of each of ``num_steps`` decode steps of ``batch`` requests."""
    config = EngineConfig(max_model_len=4096, num_pages=4096, max_num_seqs=64, max_step_tokens=512)
    engine = Engine(_NoModel(), _NoArena(), config, NgramDrafter() if draft else None)
    for index in range(batch):
        prompt = [(i * i + index) % 61 + 1 for i in range(100)]
        params = SamplingParams(max_tokens=num_steps + 100, seed=0)
        engine.add(Request(request_id=str(index), prompt_ids=prompt, params=params), 0.0)
    for _ in range(50):
        engine.step(0.0)
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step(start, time.perf_counter)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    num_steps = options.steps
    rows = []
    print("draft   batch   median us   p10 us   p90 us")
    for draft in (False, True):
        for batch in (1, 8, 32, 64):
            micros = sorted(1e6 * s for s in step_seconds(batch, draft, num_steps))
            row = {
                "draft": "ngram" if draft else "off",
                "batch": batch,
                "median_us": round(statistics.median(micros), 1),
                "p10_us": round(micros[len(micros) // 10], 1),
                "p90_us": round(micros[9 * len(micros) // 10], 1),
            }
            rows.append(row)
            print("{draft:6}{batch:7}{median_us:12}{p10_us:9}{p90_us:9}".format(**row))
    machine = {"machine": platform.machine(), "python": platform.python_version()}
    result = {"steps": num_steps, **machine, "rows": rows}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
