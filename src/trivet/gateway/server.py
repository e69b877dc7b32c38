"""One server from start to exit: sockets, workers, signals, drain.

The listening socket exists from the first moment, so that /health can say 503 while the model is being
loaded; what else begins early is in `trivet.gateway.launch`. SIGTERM and SIGINT drain: running requests
are finished, new ones get 503; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from trivet.config import ServerConfig
from trivet.errors import EngineError, TrivetError, printable
from trivet.gateway.app import Gateway, build_app
from trivet.gateway.launch import Hooks, Launch, listen
from trivet.gateway.log import say
from trivet.gateway.pool import WorkerHandle, WorkerPool
from trivet.gateway.spawn import num_workers_of
from trivet.worker.frames import Ready

_KEEP_ALIVE_S = 75  # longer than clients keep a connection in their pool
_DRAIN_POLL_S = 0.02
_MAX_MODEL_CHARS = 200


class _HTTPServer(uvicorn.Server):
    """Uvicorn without its own signal handling: signals mean drain here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """A gateway with its workers on one event loop. `run` serves until `request_stop`.

    sock      the listening socket, owned and closed by the server
    on_ready  called once, when /health is 200, with what a live worker says of itself
    """

    def __init__(
        self,
        config: ServerConfig,
        hooks: Hooks,
        sock: socket.socket,
        on_ready: Callable[[Ready | None], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.on_ready = on_ready
        self._hooks = hooks
        self._socket = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._num_stops = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self._socket.getsockname()[1]}"

    def run(self, launch: Launch, *, handle_signals: bool) -> None:
        """Serve until told to stop. Raises TrivetError: the model cannot be loaded."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main(launch, handle_signals))

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

    async def _main(self, launch: Launch, handle_signals: bool) -> None:
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
        gateway.pool = WorkerPool(
            launch.workers,
            launch.worker_config,
            self._hooks.engine,
            gateway.metrics,
            self._hooks.silence_limit_s,
        )
        serving = asyncio.ensure_future(http.serve([self._socket]))
        try:
            await self._load(gateway, launch)
            await self._stop.wait()
            await self._drain(gateway)
        finally:
            http.should_exit = True
            await gateway.pool.stop()
            await serving

    def _model_name(self) -> str:
        name = self.config.model.model
        return Path(name).name or name

    async def _load(self, gateway: Gateway, launch: Launch) -> None:
        """Wait for front and workers, or leave early when told to stop."""
        pool, loop = gateway.pool, self._loop
        assert pool is not None, "the pool was just made"
        assert loop is not None, "the loop is running"
        assert self._stop is not None, "the loop is running"

        def on_packed(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(pool.start)

        launch.packed.add_done_callback(on_packed)
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            front = asyncio.wrap_future(launch.front)
            first: set[asyncio.Future[Any]] = {front, stopped}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not front.done():
                launch.cancel_front()
                await asyncio.gather(front, return_exceptions=True)
                return
            gateway.set_front(front.result())
            ready = asyncio.ensure_future(pool.wait_ready())
            await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        finally:
            stopped.cancel()
        if self._stop.is_set():
            return
        failure = pool.failure
        if failure is not None:
            raise (
                TrivetError(failure.message)
                if failure.is_user_error
                else EngineError(failure.message)
            )
        pool.mark_started()
        for note in dict.fromkeys(note for w in pool.workers for note in _notes(w)):
            say(note)
        self.on_ready(pool.first_ready())

    async def _drain(self, gateway: Gateway) -> None:
        """Let running requests end, for a while; a second stop request cuts it short."""
        gateway.is_draining = True
        assert self._loop is not None, "the loop is running"
        deadline = self._loop.time() + self.config.drain_timeout_s
        while gateway.num_generations and self._num_stops < 2 and self._loop.time() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)


def _notes(worker: WorkerHandle) -> list[str]:
    return worker.ready.notes if worker.ready is not None else []


def settings_line(config: ServerConfig, ready: Ready) -> str:
    """The settings in force on one line, NAME=VALUE quoted as a shell would.

    Threads, isa and max_num_seqs are each worker's; KV is that of all workers.
    """
    count = num_workers_of(config.workers)
    draft = config.draft if config.draft == "off" else f"{config.draft}:{config.draft_tokens}"
    pages = count * ready.num_pages
    values = {
        "model": shlex.quote(printable(config.model.model, _MAX_MODEL_CHARS)),
        "weights": ready.weights,
        "kv": ready.kv,
        "threads": ready.threads,
        "isa": ready.isa,
        "max_model_len": ready.max_model_len,
        "max_num_seqs": ready.max_num_seqs,
        "kv_bytes": pages * ready.page_bytes,
        "kv_tokens": pages * ready.page_tokens,
        "workers": config.workers,
        "draft": draft,
    }
    return "settings " + " ".join(f"{name}={value}" for name, value in values.items())


def _release_free_memory() -> None:
    """Give the system back what building a tokenizer, or packing, has freed: glibc keeps it."""
    import ctypes

    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def run_server(config: ServerConfig, hooks: Hooks, sock: socket.socket, launch: Launch) -> int:
    """Serve until a signal; see `trivet.gateway.serve`."""
    server = Server(config, hooks, sock)

    def on_ready(ready: Ready | None) -> None:
        gc.freeze()  # what was imported stays: no collection needs to look at it again
        gc.enable()
        if ready is not None:  # else the worker died at once, and is started again
            say(settings_line(config, ready))
        say(f"ready {server.url}")
        threading.Thread(target=_release_free_memory, name="trivet-release").start()

    server.on_ready = on_ready
    try:
        server.run(launch, handle_signals=True)
    except EngineError as error:
        say(f"trivet: {error}")
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
        self._config, self._hooks = config, hooks or Hooks()
        sock = listen(config.host, config.port)
        self._server = Server(config, self._hooks, sock, lambda _: self._ready.set())
        self._error: BaseException | None = None
        self._wait_ready = wait_ready
        self._thread = threading.Thread(target=self._run, name="trivet-gateway")
        self.url = self._server.url

    def _run(self) -> None:
        try:
            launch = Launch(self._config, self._hooks)
            self._server.run(launch, handle_signals=False)
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
