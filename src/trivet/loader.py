"""A model ready to run in this process: packed weights, tokenizer, native runner, arenas, engines.

The one place that puts the parts together for the in-process users (`trivet.LLM`, evaluate, bench).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from trivet.config import EngineConfig, MemoryConfig, ModelConfig
from trivet.errors import ConfigError
from trivet.sizing import MachineMemory, MemoryPlan, available_threads, plan_memory

if TYPE_CHECKING:
    from trivet.checkpoint import Tokenizer
    from trivet.engine import Drafter, Engine
    from trivet.engine.step_time import StepTime
    from trivet.native.api import Arena, ModelRunner
    from trivet.quant import PackedModel

Progress = Callable[[str, int, int], None]
_STEP_TIME_PAGES = 72  # hold 32 decodes at a context of 1024 that share their prefix
_STEP_TIME_S = 1.5  # time spent on measuring step times, once per model and machine


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """The parts of one model. ``threads`` is the number the runner uses."""

    config: ModelConfig
    packed: PackedModel
    runner: ModelRunner
    threads: int

    @property
    def tokenizer(self) -> Tokenizer:
        """Built when first asked for: a worker never asks."""
        return self.packed.tokenizer()

    @property
    def weights_form(self) -> str:
        """The full form that runs, activation rule included."""
        return self.packed.weights_form

    @property
    def kv_bytes_per_token(self) -> int:
        geometry = self.runner.kv_geometry()
        return geometry.page_bytes // geometry.page_tokens

    def new_arena(self, num_pages: int) -> Arena:
        """KV pages of its own; the caller keeps it as long as anything runs on it."""
        from trivet.native import Arena

        return Arena(self.runner.kv_geometry(), num_pages)

    def plan(
        self,
        memory: MemoryConfig,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        max_model_len: int | None = None,
        draft_tokens: int = 0,
        num_workers: int = 1,
        machine: MachineMemory | None = None,
    ) -> MemoryPlan:
        """The memory plan of engines of this model. Raises ConfigError: it does not fit."""
        spec = self.packed.spec
        return plan_memory(
            geometry=self.runner.kv_geometry(),
            weight_bytes=self.packed.weight_bytes,
            max_positions=self.runner.max_positions,
            max_model_len=max_model_len or self.config.max_model_len,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            memory=memory,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            num_workers=num_workers,
            draft_tokens=draft_tokens,
            machine=machine,
        )

    def step_time(self, arena: Arena) -> StepTime:
        """The step-time model of this model on this machine: measured once, kept beside the cache.

        arena  not in use by an engine; its pages are overwritten while measuring. One that is too
               small for the loads of interest is left alone and another one made for the moment.
        """
        from trivet.engine import step_time

        key = f"{self.runner.numerics_id} {self.config.kv.value} threads={self.threads} {_cpu()}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        path = self.packed.path.with_name(f"{self.packed.path.name}.{digest}.steps.json")
        try:
            known = step_time.StepTime.load(path, key)
        except ConfigError:
            known = None  # not ours or damaged: measured again
        if known is not None:
            return known
        if arena.num_pages < _STEP_TIME_PAGES:
            arena = self.new_arena(_STEP_TIME_PAGES)
        measured = step_time.measure(self.runner, arena, time.perf_counter, budget_s=_STEP_TIME_S)
        fitted = step_time.fit(measured, key)
        with contextlib.suppress(OSError):  # a read-only cache: measured again next time
            fitted.save(path)
        return fitted

    def new_drafter(self, config: EngineConfig, arena: Arena) -> Drafter | None:
        """The drafter that ``config.draft`` names, under the controller; None for ``off``."""
        if config.draft == "off":
            return None
        from trivet.speculate import make_drafter

        return make_drafter(config, self.step_time(arena))

    def new_engine(self, config: EngineConfig, arena: Arena, drafter: Drafter | None) -> Engine:
        """An engine over this runner."""
        from trivet.engine import Engine

        return Engine(self.runner, arena, config, drafter)


def _cpu() -> str:
    """What step times depend on besides the model: the processor and the ISA level."""
    from trivet import native

    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return f"{names[0] if names else 'unknown'} {native.isa_report().active}"


def load_model(config: ModelConfig, progress: Progress | None = None) -> LoadedModel:
    """Find or make the packed cache of a model and map it.

    Raises ConfigError: a setting; CheckpointError: a file.
    """
    from trivet import native, quant

    packed = quant.load_packed(config.model, config.weights, progress=progress)
    threads = config.threads or available_threads()
    runner = native.load_model(packed, threads=threads, kv=config.kv)
    runner.set_timers(False)  # nobody reads them but `trivet.bench.profile`, which turns them on
    # The native runner takes native arenas only, which the protocol cannot say.
    return LoadedModel(config, packed, cast("ModelRunner", runner), threads)
