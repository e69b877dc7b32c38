"""The gateway: OpenAI's API in front of workers. Text lives only here.

launch      what begins first: socket, workers, front
spawn       worker processes
front       the model's tokenizer, and its packed cache where there is none
server      LocalServer: the event loop from start to exit, signals, drain
app         routes and admission
protocol    bodies of requests and the errors that name their fields
errors      OpenAI's envelope of an error
tokens      what the gateway needs of a tokenizer; names of tokens
generation  one API call while it runs
answer      OpenAI's response objects
stream      a JSON body or server-sent events to one client
pool        workers: spawn, watch, restart
policy      which worker gets which request
metrics     Prometheus
log         lines on standard error
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.lazy import lazy_names

if TYPE_CHECKING:
    from trivet.config import ServerConfig
    from trivet.gateway.launch import Hooks
    from trivet.gateway.server import LocalServer
    from trivet.gateway.spawn import SpawnedWorker

__all__ = ["Hooks", "LocalServer", "serve"]


def serve(
    config: ServerConfig, hooks: Hooks | None = None, spawned: SpawnedWorker | None = None
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code: 0, or 1 when a worker cannot start.

    spawned  a worker of the ordinary kind that runs already; ended by the caller if this fails
    Prints ``ready http://host:port`` on standard error once /health is 200. The workers are spawned,
    and the model's front begins to load, before the gateway's own imports.
    Raises TrivetError: a setting or a model file is at fault (the caller prints it and exits with 2).
    """
    from trivet.gateway.launch import Hooks, Launch, listen

    hooks = hooks or Hooks()
    sock = listen(config.host, config.port)
    with sock:
        launch = Launch(config, hooks, () if spawned is None else (spawned,))
        try:
            from trivet.gateway.server import run_server

            return run_server(config, hooks, sock, launch)
        finally:
            launch.cancel()


if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, {"launch": ("Hooks",), "server": ("LocalServer",)})
