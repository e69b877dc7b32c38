"""The worker: one process that owns one engine and speaks frames with the gateway.

    frames    the typed messages and how they lie on the socket
    channel   the worker's blocking end of the socket
    process   the loop: drain the socket, run one step, send one frame
    load      build an engine for a model (the default factory)

A worker is spawned as ``python -m trivet.worker --fd N`` and never forked. It knows token ids only.
"""

from __future__ import annotations

from trivet.worker.frames import WorkerConfig

__all__ = ["WorkerConfig"]
