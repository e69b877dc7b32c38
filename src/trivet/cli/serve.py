"""`trivet serve`: the OpenAI API over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trivet.cli import options


def serve(
    context: typer.Context,
    model: options.ModelArgument,
    weights: options.Weights = None,
    kv: options.KV = None,
    host: Annotated[str, typer.Option(metavar="H", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="P", help="Port; 0 picks a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="N", help="Name in the API.  [default: MODEL]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="K", envvar="TRIVET_API_KEY", help="Bearer key that clients must send."
        ),
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="SPEC", help="mixed:N.  [default: mixed:1]")
    ] = None,
    draft: options.Draft = None,
    draft_tokens: options.DraftTokens = None,
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_step_tokens: options.MaxStepTokens = None,
    max_prefill_chunk: options.MaxPrefillChunk = None,
    max_waiting: Annotated[
        int | None,
        typer.Option(metavar="N", help="Queue length that answers 429.  [default: 1024]"),
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse the KV of prompts that begin alike.",
        ),
    ] = True,
    memory_utilization: options.MemoryUtilization = None,
    kv_bytes: options.KVBytes = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Once for each.  [default: *]")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time for running requests after SIGTERM.")
    ] = 30.0,
    request_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Longest life of one request.")
    ] = None,
    json: options.Json = False,
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
    return run_server(config, spawned=context.obj)
