"""The worker's loop over a socket pair, and the worker as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.toy_runner import ToyArena, ToyRunner
from trivet.config import EngineConfig
from trivet.engine import Engine
from trivet.errors import EngineError
from trivet.request import (
    CancelledEvent,
    ErrorEvent,
    FinishedEvent,
    FinishReason,
    Request,
    SamplingParams,
    TokensEvent,
)
from trivet.worker.channel import Channel
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
    Start,
    Stats,
    ToWorker,
    WorkerConfig,
    decode_from_worker,
    encode_frame,
)
from trivet.worker.process import Worker, find_factory

TESTS = Path(__file__).parents[1]
FACTORY = "support.toy_server:load_engine"


class Peer:
    """The gateway's side in a test: blocking, with a time limit."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.settimeout(30)
        self._reader = FrameReader()
        self.inbox: list[FromWorker] = []

    def send(self, messages: Sequence[ToWorker]) -> None:
        self._socket.sendall(encode_frame(messages))

    def read_until(self, kind: type, count: int = 1) -> list[FromWorker]:
        """Read frames until ``count`` messages of a kind have come; returns all that came."""
        while sum(isinstance(message, kind) for message in self.inbox) < count:
            data = self._socket.recv(1 << 16)
            assert data, "the worker went away"
            for body in self._reader.feed(data):
                self.inbox += decode_from_worker(body)
        messages, self.inbox = self.inbox, []
        return messages

    def read_end(self) -> None:
        while self._socket.recv(1 << 16):
            pass


def request(request_id: str, max_tokens: int, prompt_ids: list[int] | None = None) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return Request(request_id=request_id, prompt_ids=prompt_ids or [1, 2, 3], params=params)


@pytest.fixture
def peer() -> Iterator[Peer]:
    """The other end of a worker loop that runs on a thread with a toy engine of 16 pages."""
    engine = Engine(
        ToyRunner(step_seconds=0.001),
        ToyArena(16),
        EngineConfig(max_model_len=256, num_pages=16, max_num_seqs=4),
    )
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    thread = threading.Thread(target=Worker(channel, engine).run)
    thread.start()
    with ours:
        yield Peer(ours)
    thread.join(20)
    assert not thread.is_alive()
    channel.close()
    engine.check()


def last_stats(messages: list[FromWorker]) -> Stats:
    return [message for message in messages if isinstance(message, Stats)][-1]


def test_a_request_runs_and_the_state_follows(peer: Peer) -> None:
    assert isinstance(peer.read_until(Stats)[0], Stats)
    peer.send([Add(request("a", 5))])
    messages = peer.read_until(FinishedEvent)
    ids = [t for m in messages if isinstance(m, TokensEvent) for t in m.token_ids]
    assert len(ids) == 5
    peer.inbox += messages
    peer.send([GetStats()])
    stats = last_stats(peer.read_until(Stats, 2)).engine
    assert (stats.num_running, stats.pages_used) == (0, 0)


def test_one_frame_per_step_for_all_requests(peer: Peer) -> None:
    peer.read_until(Stats)
    peer.send([Add(request(f"r{n}", 8)) for n in range(4)])
    messages = peer.read_until(FinishedEvent, 4)
    assert {m.request_id for m in messages if isinstance(m, FinishedEvent)} == {
        "r0",
        "r1",
        "r2",
        "r3",
    }


def test_abort_frees_pages_before_the_next_step(peer: Peer) -> None:
    peer.read_until(Stats)
    peer.send([Add(request("a", 200))])
    peer.read_until(TokensEvent)
    peer.send([Abort("a"), Abort("unknown"), GetStats()])
    messages = peer.read_until(CancelledEvent)
    if not any(isinstance(message, Stats) for message in messages):
        messages = peer.read_until(Stats)
    assert last_stats(messages).engine.pages_used == 0


def test_finish_ends_as_a_stop(peer: Peer) -> None:
    peer.send([Add(request("a", 200))])
    peer.read_until(TokensEvent)
    peer.send([Finish("a", 1), Finish("unknown", 1)])
    [event] = [m for m in peer.read_until(FinishedEvent) if isinstance(m, FinishedEvent)]
    assert (event.reason, event.output_len) == (FinishReason.STOP, 1)


def test_a_refused_request_ends_in_an_error_event(peer: Peer) -> None:
    peer.send([Add(request("a", 5, [99_999])), Add(request("b", 5, [1] * 300))])
    errors = [m for m in peer.read_until(ErrorEvent, 2) if isinstance(m, ErrorEvent)]
    assert [error.request_id for error in errors] == ["a", "b"]
    assert [error.code for error in errors] == ["invalid_value", "context_length_exceeded"]
    assert [error.param for error in errors] == ["prompt", "prompt"]


def test_prefix_cache_reset_counts_pages(peer: Peer) -> None:
    peer.send([Add(request("a", 2, [5] * 70))])
    peer.read_until(FinishedEvent)
    peer.send([ResetPrefixCache()])
    [reset] = [m for m in peer.read_until(PrefixCacheReset) if isinstance(m, PrefixCacheReset)]
    assert reset.num_pages == 2


def test_unknown_factory() -> None:
    for name in ("no_such_module:f", "trivet.worker.load:nothing", "trivet"):
        with pytest.raises(EngineError, match="factory"):
            find_factory(name)


def _spawn(sock: socket.socket) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-W", "error", "-m", "trivet.worker"]
    command += ["--fd", str(sock.fileno()), "--parent", str(os.getpid()), "--factory", FACTORY]
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    return subprocess.Popen(
        command, pass_fds=[sock.fileno()], env={**os.environ, "PYTHONPATH": path}
    )


def _config(model: str) -> WorkerConfig:
    return WorkerConfig(model=model)


def test_process_serves_and_ends_with_its_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, _spawn(theirs) as process:
        theirs.close()
        peer = Peer(ours)
        peer.send([Start(_config("toy"))])
        ready = peer.read_until(Ready)[0]
        assert isinstance(ready, Ready)
        assert ready.pid == process.pid
        process.send_signal(signal.SIGINT)  # Ctrl-C goes to the whole group: not for a worker
        peer.send([Add(request("a", 3))])
        peer.read_until(FinishedEvent)
        ours.close()
        assert process.wait(20) == 0


def test_process_reports_a_failed_load() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, _spawn(theirs) as process:
        theirs.close()
        peer = Peer(ours)
        peer.send([Start(_config("toy:fail=1"))])
        failed = peer.read_until(LoadFailed)[0]
        assert failed == LoadFailed("toy.safetensors: is made to fail", True)
        peer.read_end()
        assert process.wait(20) == 2


def test_process_without_a_gateway_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, _spawn(theirs) as process:
        theirs.close()
        ours.close()
        assert process.wait(20) == 0
