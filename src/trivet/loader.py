"""A model ready to run in this process: packed weights, tokenizer, native runner, arenas, engines.

The one place that puts the parts together for the in-process users (`trivet.LLM`, evaluate, bench).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from trivet.config import EngineConfig, MemoryConfig, ModelConfig
from trivet.sizing import MachineMemory, MemoryPlan, available_threads, plan_memory

if TYPE_CHECKING:
    from trivet.checkpoint import Tokenizer
    from trivet.engine import Engine
    from trivet.native import Arena, ModelRunner
    from trivet.quant import PackedModel

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """The parts of one model. ``threads`` is the number the runner uses."""

    config: ModelConfig
    packed: PackedModel
    runner: ModelRunner
    tokenizer: Tokenizer
    threads: int

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
            max_model_len=self.config.max_model_len,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            memory=memory,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            num_workers=num_workers,
            draft_tokens=draft_tokens,
            machine=machine,
        )

    def new_engine(self, config: EngineConfig, arena: Arena) -> Engine:
        """An engine over this runner with the drafter its config names."""
        from trivet.engine import Engine
        from trivet.speculate import make_drafter

        return Engine(self.runner, arena, config, make_drafter(config))


def load_model(config: ModelConfig, progress: Progress | None = None) -> LoadedModel:
    """Find or make the packed cache of a model and map it.

    Raises ConfigError: a setting; CheckpointError: a file.
    """
    from trivet import native, quant

    packed = quant.load_packed(config.model, config.weights, progress=progress)
    threads = config.threads or available_threads()
    runner = native.load_model(packed, threads=threads, kv=config.kv)
    return LoadedModel(config, packed, runner, packed.tokenizer(), threads)
