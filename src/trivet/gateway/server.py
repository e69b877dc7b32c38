"""One server from start to exit: sockets, workers, signals, drain.

The listening socket exists from the first moment, so that /health can say 503 while the model is being
loaded. The worker is spawned at once and imports while the gateway finds (or makes) the packed weights.
SIGTERM and SIGINT drain: running requests are finished, new ones get 503; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import uvicorn
import uvloop

from trivet.config import ServerConfig
from trivet.errors import ConfigError, EngineError, TrivetError
from trivet.gateway.app import Gateway, ModelFront, build_app
from trivet.gateway.pool import SILENCE_LIMIT_S, WorkerHandle, WorkerPool
from trivet.gateway.spawn import DEFAULT_FACTORY, SpawnedWorker, num_workers_of
from trivet.worker.frames import WorkerConfig

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than clients keep a connection in their pool
_DRAIN_POLL_S = 0.02
DEFAULT_FRONT = "trivet.gateway.front:load_front"


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """Where engine and tokenizer come from, as ``module:function``; tests put toys here.

    silence_limit_s  a worker that holds requests and says nothing for so long is killed

    engine  WorkerConfig -> LoadedEngine, called in the worker
    front   (ServerConfig, on_packed) -> ModelFront, called in the gateway, off the event loop; calls
            on_packed() when workers can begin to load
    """

    engine: str = DEFAULT_FACTORY
    front: str = DEFAULT_FRONT
    silence_limit_s: float = SILENCE_LIMIT_S


FrontLoader = Callable[[ServerConfig, Callable[[], None]], ModelFront]


def find_front(name: str) -> FrontLoader:
    """The function named ``module:function``."""
    module_name, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module_name), attribute)
    return cast(FrontLoader, function)


def worker_config(config: ServerConfig, num_workers: int) -> WorkerConfig:
    """The part of the server's settings that each worker gets."""
    model, memory = config.model, config.memory
    return WorkerConfig(
        model=model.model,
        weights=model.weights,
        kv=model.kv.value,
        threads=model.threads,
        max_model_len=model.max_model_len,
        memory_utilization=memory.memory_utilization,
        kv_bytes=memory.kv_bytes,
        num_workers=num_workers,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_waiting=config.max_waiting,
        prefix_cache=config.prefix_cache,
        draft=config.draft,
        draft_tokens=config.draft_tokens,
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises ConfigError: the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        allowed = f"a free local address ({error.strerror or error})"
        raise ConfigError("host, port", f"{host}:{port}", allowed) from None
    return sock


class _HTTPServer(uvicorn.Server):
    """Uvicorn without its own signal handling: signals mean drain here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """A gateway with its workers on one event loop. `run` serves until `request_stop`.

    url         where it listens, known before `run`
    on_ready    called once, when /health is 200
    first       workers that were spawned already
    """

    def __init__(
        self,
        config: ServerConfig,
        hooks: Hooks,
        on_ready: Callable[[], None] = lambda: None,
        first: Sequence[SpawnedWorker] = (),
    ) -> None:
        self.config = config
        self.on_ready = on_ready
        self._hooks = hooks
        self._first = first
        self._socket = listen(config.host, config.port)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._num_stops = 0

    def close(self) -> None:
        """Close the listening socket of a server that was never run."""
        self._socket.close()

    def run(self, *, handle_signals: bool) -> None:
        """Serve until told to stop. Raises TrivetError: the model cannot be loaded."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main(handle_signals))

    def request_stop(self) -> None:
        """Drain and end `run`; a second call ends it at once. Safe from any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(self._on_stop)

    def _on_stop(self) -> None:
        self._num_stops += 1
        if self._stop is not None:
            self._stop.set()

    async def _main(self, handle_signals: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if handle_signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._on_stop)
        gateway = Gateway(self.config, self.config.served_model_name or self._model_name())
        http = _HTTPServer(
            uvicorn.Config(
                build_app(gateway),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        num_workers = num_workers_of(self.config.workers)
        gateway.pool = WorkerPool(
            num_workers,
            worker_config(self.config, num_workers),
            self._hooks.engine,
            gateway.metrics,
            self._hooks.silence_limit_s,
            self._first,
        )
        serving = asyncio.ensure_future(http.serve([self._socket]))
        try:
            await self._load(gateway)
            await self._stop.wait()
            await self._drain(gateway)
        finally:
            http.should_exit = True
            await gateway.pool.stop()
            await serving

    def _model_name(self) -> str:
        name = self.config.model.model
        return Path(name).name or name

    def _load_front(self, pool: WorkerPool) -> ModelFront:
        """On a thread of its own: the tokenizer is built while the workers load."""
        loop = self._loop
        assert loop is not None, "the loop is running"

        def on_packed() -> None:
            loop.call_soon_threadsafe(pool.start)

        return find_front(self._hooks.front)(self.config, on_packed)

    async def _load(self, gateway: Gateway) -> None:
        """Load tokenizer and workers, or leave early when told to stop."""
        assert gateway.pool is not None, "the pool was just made"
        assert self._stop is not None, "the loop is running"
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            front = asyncio.ensure_future(asyncio.to_thread(self._load_front, gateway.pool))
            await asyncio.wait({front, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not front.done():
                await asyncio.gather(front, return_exceptions=True)
                return
            gateway.set_front(front.result())
            ready = asyncio.ensure_future(gateway.pool.wait_ready())
            await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        finally:
            stopped.cancel()
        if self._stop.is_set():
            return
        failure = gateway.pool.failure
        if failure is not None:
            raise (
                TrivetError(failure.message)
                if failure.is_user_error
                else EngineError(failure.message)
            )
        gateway.pool.mark_started()
        for note in dict.fromkeys(note for w in gateway.pool.workers for note in _notes(w)):
            print(note, file=sys.stderr, flush=True)
        self.on_ready()

    async def _drain(self, gateway: Gateway) -> None:
        """Let running requests end, for a while; a second stop request cuts it short."""
        gateway.is_draining = True
        assert self._loop is not None, "the loop is running"
        deadline = self._loop.time() + self.config.drain_timeout_s
        while gateway.num_generations and self._num_stops < 2 and self._loop.time() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)


def _notes(worker: WorkerHandle) -> list[str]:
    return worker.ready.notes if worker.ready is not None else []


def run_server(config: ServerConfig, hooks: Hooks, first: Sequence[SpawnedWorker]) -> int:
    """Serve until a signal; see `trivet.gateway.serve`. Owns the workers that were spawned already."""
    try:
        server = Server(config, hooks, first=first)
    except TrivetError:
        for spawned in first:
            spawned.discard()
        raise
    server.on_ready = lambda: print(f"ready {server.url}", file=sys.stderr, flush=True)
    try:
        server.run(handle_signals=True)
    except EngineError as error:
        print(f"trivet: {error}", file=sys.stderr)
        return 1
    return 0


class LocalServer:
    """A server on a thread of this process, on a free port of the loopback; a context manager.

    For tests, `bench` and `ladder`. The worker is a process of its own, as always. ``wait_ready``
    False: enter while the model is still being loaded.
    """

    def __init__(
        self, config: ServerConfig, hooks: Hooks | None = None, *, wait_ready: bool = True
    ) -> None:
        self._ready = threading.Event()
        self._server = Server(config, hooks or Hooks(), self._ready.set)
        self._error: BaseException | None = None
        self._wait_ready = wait_ready
        self._thread = threading.Thread(target=self._run, name="trivet-gateway")
        self.url = self._server.url

    def _run(self) -> None:
        try:
            self._server.run(handle_signals=False)
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    def __enter__(self) -> LocalServer:
        self._thread.start()
        if self._wait_ready:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Until /health is 200. Raises TrivetError: the model cannot be loaded."""
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Drain and end."""
        while self._thread.is_alive():
            self._server.request_stop()
            self._thread.join(0.5)
