"""The worker's loop: drain the socket, run one step, send one frame.

The loop knows the engine only through `WorkerEngine`, so that tests run it on a toy. It has no threads
and no asyncio. An exception out of a step is a broken invariant: it ends the process, and the gateway
turns the end-of-file into an error event for every request of this worker.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Protocol, cast

from trivet.engine.stats import EngineStats
from trivet.errors import EngineError, RequestError, TrivetError
from trivet.request import ErrorEvent, Event, Request
from trivet.worker.channel import Channel
from trivet.worker.frames import (
    Abort,
    Add,
    Finish,
    FromWorker,
    GetStats,
    LoadFailed,
    PrefixCacheReset,
    Ready,
    ResetPrefixCache,
    Start,
    Stats,
    ToWorker,
    WorkerConfig,
)

STATS_INTERVAL_S = 0.1  # a running worker reports its state at least this often
_DRAIN_S = 5.0
_PR_SET_PDEATHSIG = 1


class WorkerEngine(Protocol):
    """What the loop needs of `trivet.engine.Engine`. Times are seconds on the monotonic clock."""

    def add(self, request: Request, now: float) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def finish(self, request_id: str, output_len: int, now: float) -> bool: ...
    def step(self, now: float, clock: Callable[[], float] | None = None) -> list[Event]: ...
    def reset_prefix_cache(self) -> None: ...
    def check(self) -> None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def stats(self) -> EngineStats: ...


@dataclasses.dataclass
class LoadedEngine:
    """Result of a factory: the engine and what the gateway is told about it."""

    engine: WorkerEngine
    ready: Ready


Factory = Callable[[WorkerConfig], LoadedEngine]


def find_factory(name: str) -> Factory:
    """The function named ``module:function``. Raises EngineError: there is no such function."""
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise EngineError(f"worker factory {name}: {error}") from None
    return cast(Factory, factory)


class Worker:
    """One engine behind one channel."""

    def __init__(self, channel: Channel, engine: WorkerEngine) -> None:
        self._channel = channel
        self._engine = engine
        self._outbox: list[FromWorker] = []
        self._stats_sent_at = 0.0
        self._stats_wanted = True

    def run(self) -> None:
        """Serve until the gateway is gone."""
        self._report(time.monotonic())
        while True:
            timeout = 0.0 if self._is_busy() else None
            for message in self._channel.receive(timeout):
                self._handle(message)
            if self._channel.is_closed:
                return
            if self._is_busy():
                self._outbox += self._engine.step(time.monotonic(), time.monotonic)
                self._stats_wanted = True
                if not self._is_busy():
                    self._engine.check()  # the ledger of pages, whenever the engine comes to rest
            self._report(time.monotonic())

    def _is_busy(self) -> bool:
        return self._engine.has_work

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Add(request):
                try:
                    self._engine.add(request, time.monotonic())
                except RequestError as error:
                    self._outbox.append(
                        ErrorEvent(
                            request_id=request.request_id,
                            code=error.code,
                            message=error.message,
                            param=error.param,
                        )
                    )
            case Abort(request_id):
                self._engine.abort(request_id)
            case Finish(request_id, output_len):
                self._engine.finish(request_id, output_len, time.monotonic())
            case GetStats():
                self._stats_sent_at = 0.0
                self._stats_wanted = True
            case ResetPrefixCache():
                num_cached = self._engine.stats.pages_cached
                self._engine.reset_prefix_cache()
                num_pages = num_cached - self._engine.stats.pages_cached
                self._outbox.append(PrefixCacheReset(num_pages))
                self._stats_wanted = True
            case Start():
                raise EngineError("a second Start message")

    def _report(self, now: float) -> None:
        """Send the outbox; with it the state, when it is due or the engine has come to rest."""
        is_due = now - self._stats_sent_at >= STATS_INTERVAL_S or not self._is_busy()
        if self._stats_wanted and is_due:
            self._outbox.append(Stats(self._engine.stats))
            self._stats_sent_at = now
            self._stats_wanted = False
        if self._outbox:
            self._channel.send(self._outbox)
            self._outbox = []


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies, however the parent dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent_pid is not None and os.getppid() != parent_pid:
        raise SystemExit(1)


def main(fd: int, parent_pid: int, factory_name: str) -> int:
    """Run a worker on the inherited socket ``fd``; returns the exit status.

    The factory is imported before the gateway says what to load: it may still be packing weights.
    """
    gc.disable()  # nothing that is made until the engine is there is garbage
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the gateway drains
    channel = Channel(socket.socket(fileno=fd))
    try:
        try:
            factory = find_factory(factory_name)
            config = _wait_for_start(channel)
            if config is None:
                return 0
            loaded = factory(config)
        except TrivetError as error:
            channel.send([LoadFailed(str(error), not isinstance(error, EngineError))])
            channel.drain(_DRAIN_S)
            return 2
        gc.freeze()  # what was loaded stays: no collection needs to look at it again
        gc.enable()
        channel.send([loaded.ready])
        Worker(channel, loaded.engine).run()
        return 0
    finally:
        channel.close()


def _wait_for_start(channel: Channel) -> WorkerConfig | None:
    """The configuration; None when the gateway went away before sending one."""
    while True:
        for message in channel.receive(None):
            if not isinstance(message, Start):
                raise EngineError(f"{type(message).__name__} before Start")
            return message.config
        if channel.is_closed:
            return None
