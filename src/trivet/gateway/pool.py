"""The workers of a gateway: watch, restart; and the requests each of them holds.

End-of-file on the gateway's end of a worker's socket is the worker's death: every request it held ends
in an error event at once, the process is reaped, and a new one is started after a pause that doubles
while starts keep failing. Everything here runs on the event loop's thread; the only waiting done
elsewhere is for a dead process to be reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol, TypeVar, cast

from trivet.engine.stats import EngineStats
from trivet.errors import EngineError
from trivet.gateway.log import say
from trivet.gateway.spawn import SpawnedWorker, spawn_worker
from trivet.request import (
    CancelledEvent,
    ErrorEvent,
    Event,
    FinishedEvent,
    Request,
    TokensEvent,
)
from trivet.worker.frames import (
    Abort,
    Add,
    Finish,
    FrameReader,
    FromWorker,
    GetStats,
    LoadFailed,
    PrefixCacheReset,
    Ready,
    ResetPrefixCache,
    Stats,
    ToWorker,
    WorkerConfig,
    decode_from_worker,
    encode_frame,
)

_RESTART_PAUSE_S = 0.1
_RESTART_PAUSE_MAX_S = 10.0
_EXIT_S = 5.0  # a worker without a gateway has this long to exit by itself
_REPLY_S = 10.0
_STATS_S = 2.0
_WATCH_S = 0.5  # how often a worker's silence is looked at

_T = TypeVar("_T")


class Receiver(Protocol):
    """Who gets a request's events: one batch per frame, the terminal event last."""

    def deliver(self, event: Event) -> None: ...
    def wake(self) -> None: ...


class PoolObserver(Protocol):
    """Accounting of workers; see `trivet.gateway.metrics`."""

    def worker_ready(self, worker: WorkerHandle) -> None: ...
    def worker_stats(self, worker: WorkerHandle, new: EngineStats) -> None: ...


class _Link(asyncio.Protocol):
    """The gateway's end of one worker's socket."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker
        self._reader = FrameReader()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._worker.receive(decode_from_worker(body))
        except EngineError as error:
            say(f"trivet: worker {self._worker.worker_id}: {error}")
            if self.transport is not None:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._worker.link_lost.set()


class WorkerHandle:
    """One worker as the gateway sees it. ``state``: starting, ready, dead or stopped."""

    def __init__(self, worker_id: str, observer: PoolObserver) -> None:
        self.worker_id = worker_id
        self.role = "mixed"
        self.state = "dead"
        self.pid: int | None = None
        self.ready: Ready | None = None
        self.load_failure: LoadFailed | None = None
        self.stats = EngineStats()
        self.restarts = 0
        self.changed = asyncio.Event()  # ready, or given up
        self.link_lost = asyncio.Event()
        self._observer = observer
        self._spawned: SpawnedWorker | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._link: _Link | None = None
        self._heard_at = 0.0
        # Owners of live requests; None: the owner is gone and the events are dropped.
        self._receivers: dict[str, Receiver | None] = {}
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._reset_waiters: list[asyncio.Future[int]] = []

    @property
    def num_live(self) -> int:
        """Requests sent to this worker whose terminal event has not come yet."""
        return len(self._receivers)

    @property
    def room(self) -> int:
        """Requests this worker takes before its queue is full."""
        if self.state != "ready" or self.ready is None:
            return 0
        return max(0, self.ready.max_num_seqs + self.ready.max_waiting - self.num_live)

    async def adopt(self, spawned: SpawnedWorker) -> None:
        """Take over a process; it waits for `start` to say what to load, importing meanwhile."""
        self.state, self.ready, self.load_failure = "starting", None, None
        self.changed.clear()
        self.link_lost.clear()
        self._spawned = spawned
        self._process, self.pid = spawned.process, spawned.process.pid
        loop = asyncio.get_running_loop()
        _, self._link = await loop.create_unix_connection(lambda: _Link(self), sock=spawned.socket)

    def start(self, config: WorkerConfig) -> None:
        """Tell the process what to load, unless it was told so before it was adopted."""
        assert self._spawned is not None, "a process was adopted"
        self._spawned.start(config)

    def submit(self, request: Request, receiver: Receiver) -> None:
        """Send a request; its events go to ``receiver``, an error event if there is no worker."""
        request_id = request.request_id
        assert request_id not in self._receivers, "request ids are unique"
        if self.state != "ready":
            message = "the worker died; please retry"
            receiver.deliver(ErrorEvent(request_id=request_id, code="worker_died", message=message))
            receiver.wake()
            return
        if not self._receivers:
            self._heard_at = time.monotonic()  # the idle time before does not count
        self._receivers[request_id] = receiver
        self._send([Add(request)])

    def abort(self, request_id: str) -> None:
        """The owner wants no more events of this request; its pages are freed by the worker."""
        if self._receivers.get(request_id) is not None:
            self._receivers[request_id] = None
            self._send([Abort(request_id)])

    def finish(self, request_id: str, output_len: int) -> None:
        """The output ended in a stop string; the terminal event still goes to the owner."""
        if self._receivers.get(request_id) is not None:
            self._send([Finish(request_id, output_len)])

    async def fetch_stats(self) -> EngineStats:
        """The state now; the last known one when the worker does not answer in time."""
        if self.state != "ready":
            return self.stats
        waiter: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        self._send([GetStats()])
        with contextlib.suppress(TimeoutError, EngineError):
            return await asyncio.wait_for(waiter, _STATS_S)
        return self.stats

    async def reset_prefix_cache(self) -> int:
        """Cached pages freed. Raises EngineError: the worker died or did not answer."""
        if self.state != "ready":
            return 0
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reset_waiters.append(waiter)
        self._send([ResetPrefixCache()])
        try:
            return await asyncio.wait_for(waiter, _REPLY_S)
        except TimeoutError:
            raise EngineError(f"worker {self.worker_id} did not answer") from None

    def receive(self, messages: Sequence[FromWorker]) -> None:
        """Hand the messages of one frame to their owners, then wake each owner once."""
        self._heard_at = time.monotonic()
        woken: dict[int, Receiver] = {}
        for message in messages:
            match message:
                case TokensEvent():
                    receiver = self._receivers.get(message.request_id)
                case FinishedEvent() | ErrorEvent() | CancelledEvent():
                    receiver = self._receivers.pop(message.request_id, None)
                case _:
                    self._control(message)
                    continue
            if receiver is not None:
                receiver.deliver(message)
                woken[id(receiver)] = receiver
        for receiver in woken.values():
            receiver.wake()

    def _control(self, message: Ready | LoadFailed | Stats | PrefixCacheReset) -> None:
        match message:
            case Ready():
                self.ready, self.state = message, "ready"
                self._observer.worker_ready(self)
                self.changed.set()
            case LoadFailed():
                self.load_failure = message  # the end of the process follows
            case Stats(stats):
                self._observer.worker_stats(self, stats)
                self.stats = stats
                _answer(self._stats_waiters, stats)
            case PrefixCacheReset(num_pages):
                _answer(self._reset_waiters, num_pages)

    def _send(self, messages: Sequence[ToWorker]) -> None:
        if self._link is not None and self._link.transport is not None:
            self._link.transport.write(encode_frame(messages))

    def fail_requests(self, code: str, message: str) -> None:
        """End every request this worker holds in an error event."""
        receivers, self._receivers = self._receivers, {}
        for request_id, receiver in receivers.items():
            if receiver is not None:
                receiver.deliver(ErrorEvent(request_id=request_id, code=code, message=message))
                receiver.wake()
        _refuse(self._stats_waiters, message)
        _refuse(self._reset_waiters, message)

    def silence_s(self) -> float:
        """Seconds since the last frame of a worker that holds requests; 0 when it holds none."""
        return time.monotonic() - self._heard_at if self._receivers else 0.0

    async def wait_death(self, silence_limit_s: float) -> None:
        """Until the socket ends. A worker that is silent for too long is killed: that ends it, too."""
        while not self.link_lost.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.link_lost.wait(), _WATCH_S)
            if self.silence_s() > silence_limit_s and self._process is not None:
                self._process.kill()
                say(f"trivet: worker {self.worker_id} is silent: killed")

    async def stop(self, state: str = "stopped") -> int | None:
        """Close the socket, wait for the process, kill it if it stays; returns its exit status."""
        is_loading = self.state == "starting"  # it does not look at its socket: nothing to wait for
        self.state = state
        self._observer.worker_stats(self, EngineStats())
        self.stats = EngineStats()
        self.ready = None
        if self._link is not None and self._link.transport is not None:
            self._link.transport.abort()
        self._link = None
        process, self._process, self.pid = self._process, None, None
        if process is None:
            return None
        if is_loading:
            process.kill()
        try:
            return await asyncio.to_thread(process.wait, _EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return await asyncio.to_thread(process.wait)


def _answer(waiters: list[asyncio.Future[_T]], value: _T) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(value)
    waiters.clear()


def _refuse(waiters: list[asyncio.Future[_T]], message: str) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(EngineError(message))
    waiters.clear()


class WorkerPool:
    """All workers of one gateway and their restarts. A restarted one loads only after `start`.

    first            the spawned workers, one of each; the pool owns them from now on
    config           what each of them loads
    factory          ``module:function``, called in the worker: WorkerConfig -> LoadedEngine
    silence_limit_s  a worker with requests that says nothing for so long is killed
    """

    def __init__(
        self,
        first: Sequence[SpawnedWorker],
        config: WorkerConfig,
        factory: str,
        observer: PoolObserver,
        silence_limit_s: float,
    ) -> None:
        self._first = list(first)
        self._factory = factory
        self._silence_limit_s = silence_limit_s
        self.workers = [WorkerHandle(f"w{n}", observer) for n in range(len(first))]
        self.failure: LoadFailed | None = None  # the first start failed: give up
        self.is_stopping = False
        self._has_started = False
        self._config = config
        self._may_load = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._supervise(worker)) for worker in self.workers]

    def start(self) -> None:
        """Let the spawned workers load: their weights are packed."""
        self._may_load.set()

    @property
    def is_ready(self) -> bool:
        """Whether any worker takes requests."""
        return any(worker.state == "ready" for worker in self.workers)

    def first_ready(self) -> Ready | None:
        """What the first live worker said of itself; None without one."""
        return next((w.ready for w in self.workers if w.ready is not None), None)

    async def wait_ready(self) -> None:
        """Until every worker has been ready, or ``failure`` says why one cannot be."""
        for worker in self.workers:
            await worker.changed.wait()

    async def _supervise(self, worker: WorkerHandle) -> None:
        """Keep one worker alive. An error of the supervision itself counts as a failed start."""
        try:
            await self._keep_alive(worker)
        except (OSError, AssertionError) as error:
            self.failure = LoadFailed(f"worker {worker.worker_id}: {error!r}", False)
            worker.changed.set()

    async def _keep_alive(self, worker: WorkerHandle) -> None:
        pause = _RESTART_PAUSE_S
        while True:
            try:
                spawned = self._first.pop() if self._first else spawn_worker(self._factory)
            except OSError as error:  # no process or no memory to be had at this moment
                say(
                    f"trivet: worker {worker.worker_id} cannot be started: {error}; "
                    f"again in {pause:.1f} s"
                )
                await asyncio.sleep(pause)
                pause = min(pause * 2, _RESTART_PAUSE_MAX_S)
                continue
            await worker.adopt(spawned)
            await self._may_load.wait()
            worker.start(self._config)
            await worker.wait_death(self._silence_limit_s)
            was_ready = worker.state == "ready"
            worker.state = "dead"
            worker.fail_requests("worker_died", "the worker died; please retry")
            status = await worker.stop("dead")
            if self.is_stopping:
                break
            if not was_ready and not self._has_started:
                self.failure = worker.load_failure or LoadFailed(
                    f"worker {worker.worker_id} died while loading (exit status {status})", False
                )
                worker.changed.set()
                return
            worker.restarts += 1
            reason = f": {worker.load_failure.message}" if worker.load_failure is not None else ""
            say(
                f"trivet: worker {worker.worker_id} died (exit status {status}){reason}; "
                f"restart {worker.restarts} in {pause:.1f} s"
            )
            await asyncio.sleep(pause)
            pause = _RESTART_PAUSE_S if was_ready else min(pause * 2, _RESTART_PAUSE_MAX_S)

    def mark_started(self) -> None:
        """From now on a worker that fails to load is started again instead of ending the gateway."""
        self._has_started = True

    async def stop(self) -> None:
        """End all workers and their supervision; requests still held end in an error event."""
        self.is_stopping = True
        for worker in self.workers:
            worker.fail_requests("shutting_down", "the server is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        for spawned in self._first:
            spawned.discard()
