"""`trivet serve`: the OpenAI API over HTTP."""

from __future__ import annotations

from typing import Any

import click

from trivet.cli import options
from trivet.cli.commands import Command


@click.command(cls=Command)
@options.model
@options.weights
@options.kv
@click.option("--host", metavar="H", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", metavar="P", default=8000, help="Port; 0 picks a free one.")
@click.option("--served-model-name", metavar="N", help="Name in the API.  [default: MODEL]")
@click.option(
    "--api-key",
    metavar="K",
    envvar="TRIVET_API_KEY",
    show_envvar=True,
    help="Bearer key that clients must send.",
)
@click.option("--workers", metavar="SPEC", help="mixed:N.  [default: mixed:1]")
@options.draft
@options.draft_tokens
@options.threads
@options.max_model_len
@options.max_num_seqs
@options.max_step_tokens
@options.max_prefill_chunk
@click.option(
    "--max-waiting",
    metavar="N",
    type=int,
    help="Queue length that answers 429.  [default: 1024]",
)
@click.option(
    "--prefix-cache/--no-prefix-cache",
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=True,
    help="Reuse the KV of prompts that begin alike.",
)
@options.memory_utilization
@options.kv_bytes
@options.several("--cors-origin", metavar="ORIGIN", help="Once for each.  [default: *]")
@click.option(
    "--drain-timeout",
    metavar="SECONDS",
    default=30.0,
    help="Time for running requests after SIGTERM.",
)
@click.option(
    "--request-timeout", metavar="SECONDS", type=float, help="Longest life of one request."
)
@options.json
@click.pass_context
def serve(
    context: click.Context,
    /,
    host: str,
    port: int,
    served_model_name: str | None,
    api_key: str | None,
    prefix_cache: bool,
    cors_origin: list[str] | None,
    drain_timeout: float,
    request_timeout: float | None,
    **others: object,
) -> int:
    """Serve the OpenAI API.

    Prints the memory plan, then "ready http://host:port" on standard error. SIGTERM drains.
    """
    from trivet.config import KVFormat, MemoryConfig, ModelConfig, ServerConfig
    from trivet.gateway import serve as run_server

    name, chosen = options.settings_of(context)

    def take(*names: str) -> dict[str, Any]:
        return {name: chosen.pop(name) for name in names if name in chosen}

    memory = MemoryConfig(**take("memory_utilization", "kv_bytes"))
    model_settings = take("weights", "threads", "max_model_len")
    model_settings["kv"] = KVFormat.parse(chosen.pop("kv", "bf16"))
    config = ServerConfig(
        model=ModelConfig(model=name, **model_settings),
        memory=memory,
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_key=api_key,
        prefix_cache=prefix_cache,
        cors_origins=tuple(cors_origin) if cors_origin else ("*",),
        drain_timeout_s=drain_timeout,
        request_timeout_s=request_timeout,
        **chosen,
    )
    _note_workers(config.workers, config.model.threads)
    return run_server(config, spawned=context.obj)


def _note_workers(workers: str, threads: int | None) -> None:
    """Say that the threads of all workers are more than the CPUs, where one worker's are not."""
    from trivet.gateway.spawn import num_workers_of
    from trivet.sizing import available_threads

    count = num_workers_of(workers)
    if count == 1:
        return
    cpus = available_threads()
    each = threads or max(1, cpus // count)  # as `trivet.worker.load` shares them out
    if each <= cpus:  # else the option has said it
        noun = "thread" if each == 1 else "threads"
        options.note_threads(count * each, f"--workers {workers} with {each} {noun} each")
