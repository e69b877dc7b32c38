"""Build the engine of a model: packed weights, runner, KV pages, drafter."""

from __future__ import annotations

import os

from trivet import native, quant
from trivet.config import PAGE_TOKENS, EngineConfig, KVFormat, MemoryConfig, ModelConfig
from trivet.engine import Engine
from trivet.loader import load_model
from trivet.sizing import available_threads, render_plan
from trivet.worker.frames import Ready, WorkerConfig
from trivet.worker.process import LoadedEngine

_PRELOADED = (quant,)  # used by the loader; imported while the gateway still prepares


def load_engine(config: WorkerConfig) -> LoadedEngine:
    """The engine that ``config`` describes, with as many pages as fit beside the other workers.

    Raises ConfigError: a setting, or it does not fit; CheckpointError: a file.
    """
    threads = config.threads or max(1, available_threads() // config.num_workers)
    model = load_model(
        ModelConfig(
            model=config.model,
            weights=config.weights,
            kv=KVFormat.parse(config.kv),
            threads=threads,
            max_model_len=config.max_model_len,
        )
    )
    draft_tokens = config.draft_tokens if config.draft != "off" else 0
    plan = model.plan(
        MemoryConfig(memory_utilization=config.memory_utilization, kv_bytes=config.kv_bytes),
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        draft_tokens=draft_tokens,
        num_workers=config.num_workers,
    )
    engine_config = EngineConfig(
        max_model_len=plan.max_model_len,
        num_pages=plan.num_pages,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_waiting=config.max_waiting,
        prefix_cache=config.prefix_cache,
        draft=config.draft,
        draft_tokens=config.draft_tokens,
    )
    arena = model.new_arena(plan.num_pages)
    drafter = model.new_drafter(engine_config, arena)
    engine = model.new_engine(engine_config, arena, drafter)
    ready = ready_message(
        engine,
        numerics_id=model.runner.numerics_id,
        weights=model.weights_form,
        kv=config.kv,
        vocab_size=model.runner.vocab_size,
        page_bytes=model.runner.kv_geometry().page_bytes,
        threads=threads,
        isa=native.isa_report().active,
        notes=[*model.packed.notes, render_plan(plan)],
    )
    return LoadedEngine(engine, ready)


def ready_message(
    engine: Engine,
    *,
    numerics_id: str,
    weights: str,
    kv: str,
    vocab_size: int,
    page_bytes: int,
    threads: int,
    isa: str = "",
    notes: list[str] | None = None,
) -> Ready:
    """What the gateway is told about a loaded engine."""
    config = engine.config
    return Ready(
        pid=os.getpid(),
        numerics_id=numerics_id,
        weights=weights,
        kv=kv,
        max_model_len=config.max_model_len,
        vocab_size=vocab_size,
        num_pages=config.num_pages,
        page_tokens=PAGE_TOKENS,
        page_bytes=page_bytes,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        threads=threads,
        isa=isa,
        notes=notes or [],
    )
