"""Where the time of steps goes: the parts of a phase add up, and each step is in the right phase."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from support.engine_driver import assert_idle, make_config
from support.toy_runner import ToyArena, ToyRunner
from trivet.bench.measure import BatchRun, run_batch
from trivet.bench.profile import PARTS, Phase, ProfiledRunner, TimedRunner, phases_json
from trivet.config import EngineConfig, ModelConfig
from trivet.engine import Engine
from trivet.loader import load_model
from trivet.native.api import Arena, Float32, SampleInput, SampleResult, StepInput, Taps
from trivet.request import SamplingParams

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "timer_cost.py"
# Parts are differences of clocks read by several hands; what is lost or counted twice between them.
TOLERANCE = 1e-3


def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, temperature=0.0, seed=0, ignore_eos=True)


class TimedToy(ToyRunner):
    """A toy that spends its time where it is told, and says so as the native model does."""

    def __init__(self, forward_s: dict[str, float], sample_s: float = 0.0) -> None:
        super().__init__()
        self._forward_s, self._sample_s = forward_s, sample_s
        self._times = dict.fromkeys(
            ("embedding", "prepare", "linear_qkv", "attention", "linear_o", "linear_gate_up",
             "linear_down", "head", "wait"), 0.0,
        )  # fmt: skip

    def forward(self, step: StepInput, arena: Arena, taps: Taps | None = None) -> Float32 | None:
        for name, seconds in self._forward_s.items():
            begin = time.perf_counter()
            time.sleep(seconds)
            self._times[name] += time.perf_counter() - begin
        return super().forward(step, arena, taps)

    def sample(self, inputs: Sequence[SampleInput]) -> list[SampleResult]:
        time.sleep(self._sample_s)
        return super().sample(inputs)

    def times_s(self) -> dict[str, float]:
        return dict(self._times)

    def set_timers(self, on: bool) -> None:
        """It always counts."""


def _run(
    runner: TimedRunner,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    at_once: int | None = None,
    **limits: object,
) -> BatchRun:
    profile = ProfiledRunner(runner)
    engine = Engine(profile, ToyArena(64), make_config(prefix_cache=False, **limits))
    run = run_batch(engine, prompts, _params(output_tokens), None, at_once, profile)
    assert engine.stats.num_steps == sum(phase.steps for phase in run.phases.values())
    assert_idle(engine)
    return run


def _assert_adds_up(run: BatchRun) -> None:
    """The phases are the run's time, and their parts are theirs; no part is negative."""
    total = sum(phase.wall_s for phase in run.phases.values())
    assert total == pytest.approx(run.wall_s, rel=TOLERANCE)
    for phase in run.phases.values():
        assert sum(phase.parts_s.values()) == pytest.approx(phase.wall_s, rel=TOLERANCE)
        assert min(phase.parts_s.values()) >= 0.0, phase.parts_s


@pytest.mark.parametrize("threads", [1, 2])
def test_the_parts_of_a_real_model_are_its_wall_time(tiny_model: Path, threads: int) -> None:
    model = load_model(ModelConfig(model=str(tiny_model), weights="w8a8", threads=threads))
    profile = ProfiledRunner(cast("TimedRunner", model.runner))
    config = EngineConfig(
        max_model_len=256,
        num_pages=32,
        max_num_seqs=4,
        max_step_tokens=64,
        max_prefill_chunk=32,
        prefix_cache=False,
    )
    engine = Engine(profile, model.new_arena(32), config)
    prompts = [[1 + (7 * i + j) % 300 for j in range(90)] for i in range(3)]
    run = run_batch(engine, prompts, _params(12), None, None, profile)
    _assert_adds_up(run)
    for name, phase in run.phases.items():
        assert phase.steps > 0, name
        for part in set(PARTS) - {"waiting"}:
            assert phase.parts_s[part] > 0.0, (name, part)
        # What the model counts lies within its calls, which are most of a step even of a tiny model.
        assert phase.parts_s["other"] < 0.5 * phase.wall_s, name
    assert_idle(engine)


def test_a_model_reads_no_clock_until_it_is_profiled(tiny_model: Path) -> None:
    model = load_model(ModelConfig(model=str(tiny_model), weights="w8a8", threads=1))
    runner = cast("TimedRunner", model.runner)
    config = EngineConfig(max_model_len=64, num_pages=4)

    def run() -> None:
        run_batch(model.new_engine(config, model.new_arena(4), None), [[1, 2, 3]], _params(3))

    run()
    assert set(runner.times_s().values()) == {0.0}
    ProfiledRunner(runner)
    run()
    assert runner.times_s()["linear_down"] > 0.0


def test_time_is_found_where_it_is_spent() -> None:
    runner = TimedToy({"attention": 0.02, "linear_o": 0.003, "linear_down": 0.003}, sample_s=0.01)
    run = _run(runner, [[1] * 20], 3)
    _assert_adds_up(run)
    decode = run.phases["decode"]
    order = sorted(PARTS, key=lambda part: -decode.parts_s[part])
    assert order[:3] == ["attention", "sampling", "linears"]
    assert decode.parts_s["attention"] >= 2 * 0.02


def test_work_of_one_request() -> None:
    run = _run(TimedToy({}), [list(range(1, 41))], 8)
    prefill, decode = run.phases["prefill"], run.phases["decode"]
    assert (prefill.steps, prefill.logit_steps) == (3, 1)  # chunks of 16
    assert (prefill.rows, prefill.logit_rows) == (40, 1)
    assert prefill.context == 16 + 32 + 40
    assert prefill.pairs == 40 * 41 // 2
    assert (decode.steps, decode.logit_steps, decode.rows, decode.logit_rows) == (7, 7, 7, 7)
    assert decode.context == decode.pairs == sum(range(41, 48))


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    run = _run(TimedToy({}), [[5], [6]], 4)
    assert (run.phases["prefill"].steps, run.phases["prefill"].rows) == (1, 2)
    assert (run.phases["decode"].steps, run.phases["decode"].rows) == (3, 6)


def test_steps_with_rows_of_a_prompt_are_prefill() -> None:
    """The second prompt's chunks share their steps with the first one's decodes."""
    prompts = [list(range(1, 11)), list(range(1, 49))]
    run = _run(TimedToy({}), prompts, 6, max_step_tokens=16)
    prefill, decode = run.phases["prefill"], run.phases["decode"]
    assert prefill.rows + decode.rows == 10 + 48 + 2 * 5
    assert prefill.rows > 10 + 48
    assert decode.rows >= decode.steps > 0
    _assert_adds_up(run)


def test_turns_are_profiled_too() -> None:
    run = _run(TimedToy({}), [[3] * 10, [4] * 12, [5] * 14], 5, at_once=1)
    assert run.phases["prefill"].steps == 3
    assert run.phases["decode"].steps == 3 * 4
    _assert_adds_up(run)


def test_one_output_token_leaves_no_decode() -> None:
    run = _run(TimedToy({}), [[3] * 10], 1)
    assert run.phases["decode"] == Phase()


def test_phases_survive_json() -> None:
    phases = _run(TimedToy({"head": 0.001}), [[3] * 10], 3).phases
    read = json.loads(json.dumps(phases_json(phases)))
    assert {name: Phase(**fields) for name, fields in read.items()} == phases


def test_the_cost_of_the_timers_can_be_measured(tiny_model: Path, tmp_path: Path) -> None:
    """The script's figures on a tiny model; its verdict, exit status 1, may be either here."""
    words = ["--model", str(tiny_model), "--pairs", "40", "-o", str(tmp_path / "cost.json")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "cost.json").read_text()) == result
    for name, pairs in (("prefill", 5), ("decode", 40)):
        row = result["phases"][name]
        assert row["pairs"] == pairs
        assert row["interval"][0] <= row["cost"] <= row["interval"][1]
        assert (done.returncode == 1) >= (row["interval"][0] > 0.01)
