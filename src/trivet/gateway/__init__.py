"""The gateway: OpenAI's API in front of workers. Text lives only here.

server      serve, LocalServer: sockets, workers, signals, drain
app         routes and admission
protocol    bodies of requests and the errors that name their fields
generation  one API call while it runs
answer      OpenAI's response objects
stream      a JSON body or server-sent events to one client
pool        workers: spawn, watch, restart
policy      which worker gets which request
metrics     Prometheus
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivet.config import ServerConfig
    from trivet.gateway.server import Hooks, LocalServer

__all__ = ["Hooks", "LocalServer", "serve"]


def serve(config: ServerConfig, hooks: Hooks | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code: 0, or 1 when a worker cannot start.

    Prints ``ready http://host:port`` on standard error once /health is 200. The workers are spawned
    before the gateway's own imports, so that both are loaded at the same time.
    Raises TrivetError: a setting or a model file is at fault (the caller prints it and exits with 2).
    """
    from trivet.gateway.spawn import DEFAULT_FACTORY, num_workers_of, spawn_worker

    factory = DEFAULT_FACTORY if hooks is None else hooks.engine
    first = [spawn_worker(factory) for _ in range(num_workers_of(config.workers))]
    from trivet.gateway.server import Hooks, run_server

    return run_server(config, hooks or Hooks(), first)


def __getattr__(name: str) -> Any:
    """Import the rest on first use; see `serve`."""
    if name in ("Hooks", "LocalServer"):
        from trivet.gateway import server

        return getattr(server, name)
    raise AttributeError(f"module 'trivet.gateway' has no attribute {name!r}")
