"""A worker loads what its engine runs on and nothing of the gateway's."""

from __future__ import annotations

from pathlib import Path

from support.tiny_models import Variant, build_folder
from trivet.gateway.spawn import spawn_worker
from trivet.worker.frames import FrameReader, Ready, WorkerConfig, decode_from_worker
from trivet.worker.load import load_engine

# Packages that a worker has no use for, and trivet's own parts that belong to somebody else.
FOREIGN = frozenset(
    (
        "asyncio", "uvloop", "uvicorn", "starlette", "anyio", "h11", "httpx", "pydantic", "typer",
        "click", "rich", "jinja2", "tokenizers", "transformers", "torch", "huggingface_hub", "gguf",
        "safetensors", "matplotlib", "prometheus_client", "psutil", "trivet.bench", "trivet.cli",
        "trivet.evaluate", "trivet.gateway", "trivet.llm", "trivet.speculate", "trivet.text",
        "trivet.checkpoint.gguf", "trivet.checkpoint.tokenizer", "trivet.models.load",
        "trivet.quant.pack",
    )
)  # fmt: skip


def test_a_worker_imports_nothing_of_the_gateway(tmp_path: Path) -> None:
    model = build_folder(tmp_path / "model", Variant())
    load_engine(WorkerConfig(model=str(model), kv_bytes=1 << 20))  # packs it
    worker = spawn_worker("support.telling_engine:load_telling_engine")
    try:
        worker.start(WorkerConfig(model=str(model), kv_bytes=1 << 20))
        ready = None
        reader = FrameReader()
        while ready is None:
            data = worker.socket.recv(1 << 16)
            assert data, "the worker died"
            for body in reader.feed(data):
                ready = next((m for m in decode_from_worker(body) if isinstance(m, Ready)), ready)
    finally:
        worker.discard()
    assert "trivet.native._core" in ready.notes
    assert not FOREIGN & set(ready.notes)
