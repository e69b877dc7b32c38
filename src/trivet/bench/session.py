"""One model under measurement in this process: engines for the asked settings, one run at a time.

Lives in the measured process (see `trivet.bench.process`); every method returns plain JSON values.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from trivet.bench.ceiling import step_costs
from trivet.bench.measure import (
    BatchRun,
    MixedLoad,
    RecordingDrafter,
    are_identical,
    decode_ratio,
    draft_figures,
    run_batch,
    run_mixed,
)
from trivet.bench.profile import ProfiledRunner, TimedRunner, phases_json
from trivet.config import PAGE_TOKENS, EngineConfig, KVFormat, MemoryConfig, ModelConfig
from trivet.engine import pages_needed
from trivet.errors import ConfigError
from trivet.loader import LoadedModel, load_model
from trivet.native.api import Arena, SampleInput, StepInput
from trivet.request import SamplingParams

ROWS_CONTEXT = 128  # context at which `step_rows` measures
_ROWS_ROUNDS = 15
_WARMUP_TOKENS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A batch to run. ``prompts`` are token ids; ``batch`` of them run at the same time.

    max_prefill_chunk  None: whole prompts
    ignore_eos         run to output_tokens whatever the model says
    kv_bytes           KV memory; None: what the batch needs
    profile            whether to sort the time by phase and part; the model's timers are off otherwise
    """

    prompts: list[list[int]]
    batch: int
    output_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    draft: str = "off"
    draft_tokens: int = 4
    max_step_tokens: int = 512
    max_prefill_chunk: int | None = 256
    memory_utilization: float = 0.9
    kv_bytes: int | None = None
    profile: bool = False

    @property
    def longest(self) -> int:
        return max(len(prompt) for prompt in self.prompts) + self.output_tokens


class Session:
    """A loaded model and an arena that grows with the jobs."""

    def __init__(self, config: ModelConfig) -> None:
        self.model: LoadedModel = load_model(config)
        self._arena: Arena | None = None
        # Ready means that the next request is served at once: the tokenizer is there, and a step
        # has gone through the whole model.
        _ = self.model.tokenizer
        self.step_rows([1], rounds=1)

    def describe(self) -> dict[str, Any]:
        """Facts about what runs."""
        from trivet import native

        costs = step_costs(self.model)
        return {
            "isa": native.isa_report().active,
            "weights": self.model.weights_form,
            "kv": self.model.config.kv.value,
            "threads": self.model.threads,
            "weight_bytes": self.model.packed.weight_bytes,
            "kv_bytes_per_token": self.model.kv_bytes_per_token,
            "max_positions": self.model.runner.max_positions,
            "step_bytes": costs.step_bytes,
            "costs": dataclasses.asdict(costs),
            "numerics_id": self.model.runner.numerics_id,
        }

    def run(self, job: BatchJob) -> tuple[BatchRun, str]:
        """Run a batch on a fresh engine; returns the run and the drafter's name."""
        config = EngineConfig(
            max_model_len=self._checked_length(job.longest),
            num_pages=pages_needed(job.longest) * job.batch,
            max_num_seqs=job.batch,
            max_step_tokens=max(job.max_step_tokens, job.batch),
            max_prefill_chunk=job.max_prefill_chunk,
            max_waiting=len(job.prompts),
            prefix_cache=False,
            draft=job.draft,
            draft_tokens=job.draft_tokens,
        )
        config = self._fitted(config, job.memory_utilization, job.kv_bytes)
        arena = self._arena_of(config.num_pages)
        drafter = self.model.new_drafter(config, arena)
        recorder = None if drafter is None else RecordingDrafter(drafter)
        runner = cast("TimedRunner", self.model.runner)
        runner.set_timers(False)
        profile = ProfiledRunner(runner) if job.profile else None
        model = dataclasses.replace(self.model, runner=profile or runner)
        engine = model.new_engine(config, arena, recorder)
        params = SamplingParams(
            max_tokens=job.output_tokens,
            temperature=job.temperature,
            seed=job.seed,
            ignore_eos=job.ignore_eos,
        )
        run = run_batch(engine, job.prompts, params, recorder, job.batch, profile)
        return run, "off" if drafter is None else drafter.name

    def warm_up(self, job: BatchJob) -> None:
        """Touch what a job will touch: pages, step times and threads."""
        short = dataclasses.replace(
            job,
            prompts=job.prompts[: job.batch],
            output_tokens=min(_WARMUP_TOKENS, job.output_tokens),
        )
        self.run(short)

    def batch(self, job: BatchJob) -> dict[str, Any]:
        """The figures of one run, with the text's hash and, under speculation, the drafts'."""
        run, drafter = self.run(job)
        result: dict[str, Any] = dict(run.figures())
        result["token_ids"] = [trace.token_ids for trace in run.traces]
        if job.profile:
            result["phases"] = phases_json(run.phases)
        if job.draft != "off":
            result["draft"] = draft_figures(run.traces).as_json() | {"drafter": drafter}
        result["peak_rss_bytes"] = peak_rss_bytes()
        return result

    def compare_draft(self, job: BatchJob, off_first: bool) -> dict[str, Any]:
        """One paired run without and with speculation; figures are those with it."""
        plain_job = dataclasses.replace(job, draft="off")
        if off_first:
            plain, _ = self.run(plain_job)
            drafted, drafter = self.run(job)
        else:
            drafted, drafter = self.run(job)
            plain, _ = self.run(plain_job)
        return {
            **drafted.figures(),
            "phases": phases_json(drafted.phases),
            "off": plain.figures(),
            "speedup": decode_ratio(plain, drafted),
            "identical": are_identical(plain, drafted),
            "draft": draft_figures(drafted.traces).as_json() | {"drafter": drafter},
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def mixed(
        self,
        load: MixedLoad,
        chats: Sequence[Sequence[int]],
        longs: Sequence[Sequence[int]],
        max_prefill_chunk: int | None,
        draft: str = "off",
    ) -> dict[str, Any]:
        """Run the mixed load with one setting of chunked prefill; chats and longs are token ids."""
        long_tokens = max(map(len, longs))
        longest = max(
            max(map(len, chats)) + load.chat_output_tokens, long_tokens + load.long_output_tokens
        )
        num_seqs = load.streams + 4
        rows = num_seqs if draft == "off" else num_seqs * (1 + EngineConfig.draft_tokens)
        rows += long_tokens if max_prefill_chunk is None else max_prefill_chunk
        config = EngineConfig(
            max_model_len=self._checked_length(longest),
            num_pages=pages_needed(longest) * num_seqs,
            max_num_seqs=num_seqs,
            max_step_tokens=rows,
            max_prefill_chunk=max_prefill_chunk,
            prefix_cache=False,
            draft=draft,
        )
        config = self._fitted(config)
        arena = self._arena_of(config.num_pages)
        engine = self.model.new_engine(config, arena, self.model.new_drafter(config, arena))
        result: dict[str, Any] = dict(run_mixed(engine, chats, longs, load))
        result["peak_rss_bytes"] = peak_rss_bytes()
        return result

    def step_rows(self, rows: Sequence[int], rounds: int = _ROWS_ROUNDS) -> dict[int, float]:
        """Median seconds of a step of n rows of one request at context 128, as one that verifies
        n - 1 draft tokens and accepts them all: n rows of logits, n greedy draws.

        The counts take turns in the order given, so that a disturbance does not fall on one alone.
        """
        pages = pages_needed(ROWS_CONTEXT + max(rows))
        arena = self._arena_of(pages)
        table = np.arange(pages, dtype=np.int32)[None, :]
        runner = self.model.runner
        context = min(ROWS_CONTEXT, runner.max_positions - max(rows))
        if context < 0:
            raise ConfigError(
                "rows", max(rows), f"up to {runner.max_positions}, the model's context"
            )
        sampler = runner.new_sampler(SamplingParams(temperature=0.0, seed=0), 0, [0])
        times: dict[int, list[float]] = {count: [] for count in rows}
        for _ in range(rounds):
            for count in rows:
                step = StepInput(
                    tokens=np.arange(count, dtype=np.int32) % runner.vocab_size,
                    segments=np.array([[0, count, context, 0]], np.int32),
                    page_tables=table,
                    logit_rows=np.arange(count, dtype=np.int32),
                )
                begin = time.perf_counter()
                runner.forward(step, arena)
                runner.sample([SampleInput(sampler, row, 1) for row in range(count)])
                times[count].append(time.perf_counter() - begin)
        return {count: statistics.median(values) for count, values in times.items()}

    def _checked_length(self, length: int) -> int:
        limit = self.model.config.max_model_len or self.model.runner.max_positions
        if length > limit:
            raise ConfigError(
                "prompt_tokens + output_tokens", length, f"up to {limit}, the context"
            )
        return length

    def _fitted(
        self, config: EngineConfig, memory_utilization: float = 0.9, kv_bytes: int | None = None
    ) -> EngineConfig:
        """The config with the pages that ``kv_bytes`` allow.

        Raises ConfigError when its pages do not fit into memory.
        """
        page_bytes = self.model.runner.kv_geometry().page_bytes
        wanted = config.num_pages * page_bytes
        plan = self.model.plan(
            MemoryConfig(
                memory_utilization=memory_utilization,
                kv_bytes=wanted if kv_bytes is None else min(wanted, kv_bytes),
            ),
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
            max_model_len=config.max_model_len,
        )
        return dataclasses.replace(config, num_pages=plan.num_pages)

    def _arena_of(self, num_pages: int) -> Arena:
        if self._arena is None or self._arena.num_pages < num_pages:
            self._arena = None
            self._arena = self.model.new_arena(num_pages)
        return self._arena


def peak_rss_bytes() -> int:
    """Most memory this process has held, shared mappings included.

    For a single process that equals its peak PSS when nobody else maps the same files.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def make_config(fields: dict[str, Any]) -> ModelConfig:
    """A ModelConfig from JSON values."""
    return ModelConfig(**{**fields, "kv": KVFormat.parse(fields.get("kv", "bf16"))})


assert ROWS_CONTEXT % PAGE_TOKENS == 0, "the rows' context is a whole number of pages"
