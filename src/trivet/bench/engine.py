"""`bench engine`: speeds of one configuration, alone on the machine, medians over repeats."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trivet.bench.ceiling import (
    Ceilings,
    StepCosts,
    measure_ceilings,
    nominal_mfu,
    nominal_peak_ops,
    note_of_shares,
    phase_figures,
)
from trivet.bench.machine import describe_machine
from trivet.bench.process import EngineProcess
from trivet.bench.profile import Phase
from trivet.bench.prompts import ChatEncoder, NaturalText, read_prompts
from trivet.bench.rows import step_time_ratios
from trivet.bench.session import BatchJob
from trivet.config import MemoryConfig, ModelConfig
from trivet.errors import ConfigError
from trivet.loader import Progress, load_model

_SPEEDS = ("decode_tok_s", "prefill_tok_s", "ttft_s", "tpot_s", "out_tok_s")
_MAX_STARTS = 5
AUTO_DRAFT_TOKENS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineBench:
    """What to measure. ``prompts_file`` replaces ``prompt_tokens``.

    rows          row counts for the step-time ratio; None: not measured
    max_num_seqs  requests that run at the same time, where that is fewer than ``batch``
    kv_bytes      KV memory; None: what the batch needs
    """

    batch: int = 1
    prompt_tokens: int = 128
    output_tokens: int = 128
    repeat: int = 5
    prompts_file: str | None = None
    draft: str = "off"
    draft_tokens: int = 4
    temperature: float = 0.0
    seed: int = 0
    rows: tuple[int, ...] | None = None
    max_step_tokens: int = 512
    max_prefill_chunk: int | None = 256
    max_num_seqs: int | None = None
    memory_utilization: float = 0.9
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in ("batch", "prompt_tokens", "output_tokens", "repeat", "draft_tokens"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "an integer >= 1")
        if self.max_num_seqs is not None and self.max_num_seqs < 1:
            raise ConfigError("max_num_seqs", self.max_num_seqs, "an integer >= 1")
        MemoryConfig(memory_utilization=self.memory_utilization, kv_bytes=self.kv_bytes)
        for count in self.rows or ():
            if not 1 <= count <= 512:
                raise ConfigError("rows", count, "1 to 512")


def bench_engine(
    config: ModelConfig,
    bench: EngineBench,
    *,
    loading: Progress | None = None,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Measure; returns the contract's keys, ``runs`` (every repeat) and ``spread`` (low, high).

    The packed cache is made first when there is none, so that every start measured is a cached one.
    progress  called with the share of the work just done
    """
    prompts = _prompts(bench, load_model(config, loading).tokenizer)
    advance = progress or (lambda _: None)
    starts = min(bench.repeat, _MAX_STARTS)
    total = 1 + bench.repeat + (starts - 1) + (1 if bench.rows or bench.draft != "off" else 0)
    with EngineProcess(config) as process:
        facts = process.facts
        job = _job(bench, prompts)
        process.call("warm_up", job=dataclasses.asdict(job))
        advance(1 / total)
        runs: list[dict[str, Any]] = []
        ceilings = [_ceilings(facts)]
        for index in range(bench.repeat):
            runs.append(_run(process, job, index))
            ceilings.append(_ceilings(facts))
            advance(1 / total)
        result = _summary(bench, facts, prompts, runs, ceilings)
        if bench.draft != "off":
            result |= _draft_summary(process, job.batch, bench, facts, runs)
        if bench.rows:
            result |= step_time_ratios(process, bench.rows, facts)
        if bench.rows or bench.draft != "off":
            advance(1 / total)
        start_times = [process.start_s]
    for _ in range(starts - 1):
        with EngineProcess(config) as process:
            start_times.append(process.start_s)
        advance(1 / total)
    result["start_s"] = statistics.median(start_times)
    result["spread"]["start_s"] = [min(start_times), max(start_times)]
    return result


def _prompts(bench: EngineBench, tokenizer: ChatEncoder) -> list[list[int]]:
    """Made here and not in the measured process, whose memory and start they would spoil."""
    if bench.prompts_file is not None:
        return read_prompts(bench.prompts_file, tokenizer)
    return NaturalText(tokenizer).prompts(bench.batch, bench.prompt_tokens)


def _ceilings(facts: Mapping[str, Any]) -> Ceilings:
    """What the machine does now, with the bytes of a step's weights, same level and threads."""
    return measure_ceilings(facts["step_bytes"], facts["isa"], facts["threads"])


def _job(bench: EngineBench, prompts: list[list[int]]) -> BatchJob:
    return BatchJob(
        prompts=prompts,
        batch=_at_once(bench, prompts),
        output_tokens=bench.output_tokens,
        temperature=bench.temperature,
        seed=bench.seed,
        ignore_eos=bench.prompts_file is None,
        draft=bench.draft,
        draft_tokens=bench.draft_tokens,
        max_step_tokens=bench.max_step_tokens,
        max_prefill_chunk=bench.max_prefill_chunk,
        memory_utilization=bench.memory_utilization,
        kv_bytes=bench.kv_bytes,
        profile=True,
    )


def _at_once(bench: EngineBench, prompts: Sequence[Sequence[int]]) -> int:
    """Requests that run at the same time."""
    return min(bench.batch, len(prompts), bench.max_num_seqs or bench.batch)


def _run(process: EngineProcess, job: BatchJob, index: int) -> dict[str, Any]:
    fields = dataclasses.asdict(job)
    if job.draft == "off":
        run = process.call("batch", job=fields)
    else:
        run = process.call("compare_draft", job=fields, off_first=index % 2 == 0)
    assert isinstance(run, dict)
    return run


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _spread(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None


def _summary(
    bench: EngineBench,
    facts: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    runs: Sequence[Mapping[str, Any]],
    ceilings: Sequence[Ceilings],
) -> dict[str, Any]:
    """ceilings: before every run, and after the last."""
    speeds = {name: _median([run[name] for run in runs]) for name in _SPEEDS}
    mean_prompt = statistics.fmean(len(prompt) for prompt in prompts)
    around = [before.between(after) for before, after in itertools.pairwise(ceilings)]
    costs = StepCosts(**facts["costs"])
    profiles = [{name: Phase(**fields) for name, fields in run["phases"].items()} for run in runs]
    phases = phase_figures(costs, profiles, around)
    prefill, decode = phases["prefill"], phases["decode"]
    peak = nominal_peak_ops(facts["isa"], facts["weights"], facts["threads"])
    shares: dict[str, float | None] = {
        "mbu": decode["mbu"] if decode else None,
        "mfu": prefill["mfu"] if prefill else None,
    }
    return {
        **speeds,
        "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
        "weight_bytes": facts["weight_bytes"],
        "kv_bytes_per_token": facts["kv_bytes_per_token"],
        "start_s": None,
        **shares,
        "note": note_of_shares(shares),
        "mfu_nominal": prefill and nominal_mfu(prefill, peak),
        "phases": phases,
        "isa": facts["isa"],
        "weights": facts["weights"],
        "kv": facts["kv"],
        "threads": facts["threads"],
        "repeat": bench.repeat,
        "batch": min(bench.batch, len(prompts)),
        "prompt_tokens": mean_prompt,
        "output_tokens": bench.output_tokens,
        "num_prompts": len(prompts),
        "temperature": bench.temperature,
        "seed": bench.seed,
        "machine": describe_machine(),
        "stream_bandwidth_bytes_s": _median([one.bytes_s for one in around]),
        "best_stream_bandwidth_bytes_s": _median([one.best_bytes_s for one in around]),
        "matrix_rate_macs_s": {
            "int8": _median([one.int8_macs_s for one in around]),
            "bf16": _median([one.bf16_macs_s for one in around]),
        },
        "nominal_peak_ops_s": peak,
        "spread": {name: _spread([run[name] for run in runs]) for name in _SPEEDS},
        "runs": [
            {name: value for name, value in run.items() if name != "token_ids"} for run in runs
        ],
    }


def _draft_summary(
    process: EngineProcess,
    at_once: int,
    bench: EngineBench,
    facts: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Speculation's keys: medians over the paired runs; drafts are the same in every one."""
    draft = runs[-1]["draft"]
    speedups = [run["speedup"] for run in runs]
    rows = {int(count): steps for count, steps in draft["rows_per_step"].items()}
    predicted = None
    if rows and draft["tokens_per_step"]:
        batch = min(at_once, facts["max_positions"] // (1 + max(rows)))
        counts = sorted({batch} | {min(batch * count, 512) for count in rows})
        seconds = dict(process.call("step_rows", rows=counts))
        plain = seconds[batch]
        mean = sum(steps * seconds[min(batch * count, 512)] for count, steps in rows.items())
        predicted = draft["tokens_per_step"] * plain / (mean / sum(rows.values()))
    return {
        "speedup": _median(speedups),
        "identical": all(run["identical"] for run in runs),
        "alpha": draft["alpha"],
        "mean_accepted_length": draft["mean_accepted_length"],
        "predicted_speedup": predicted,
        "drafter": draft["drafter"],
        "looped_share": draft["looped_share"],
        "draft_tokens": bench.draft_tokens,
        "tokens_per_step": draft["tokens_per_step"],
        "off": {name: _median([run["off"][name] for run in runs]) for name in _SPEEDS},
        "speedup_spread": _spread(speedups),
    }
