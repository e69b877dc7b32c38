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

from trivet.gateway.server import Hooks, LocalServer, serve

__all__ = ["Hooks", "LocalServer", "serve"]
