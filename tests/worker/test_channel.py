"""The worker's end of the socket never blocks on a slow gateway and notices its death."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from trivet.request import TokensEvent
from trivet.worker.channel import Channel
from trivet.worker.frames import Abort, FrameReader, decode_from_worker, encode_frame


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        yield channel, theirs
    channel.close()


def test_receive_takes_all_that_arrived(ends: tuple[Channel, socket.socket]) -> None:
    channel, gateway = ends
    assert channel.receive(0.0) == []
    gateway.sendall(encode_frame([Abort("a")]) + encode_frame([Abort("b"), Abort("c")]))
    assert channel.receive(1.0) == [Abort("a"), Abort("b"), Abort("c")]
    assert not channel.is_closed


def test_receive_waits_no_longer_than_told(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    started = time.monotonic()
    assert channel.receive(0.05) == []
    assert time.monotonic() - started >= 0.04


def test_end_of_file_closes(ends: tuple[Channel, socket.socket]) -> None:
    channel, gateway = ends
    gateway.sendall(encode_frame([Abort("last")]))
    gateway.close()
    assert channel.receive(None) == [Abort("last")]
    assert channel.is_closed
    channel.send([TokensEvent(request_id="a", position=0, token_ids=[1])])


def test_send_to_a_slow_reader_keeps_the_rest(ends: tuple[Channel, socket.socket]) -> None:
    channel, gateway = ends
    events = [TokensEvent(request_id="a", position=n, token_ids=[1] * 200) for n in range(200)]
    num_frames = 60
    started = time.monotonic()
    for _ in range(num_frames):
        channel.send(events)
    assert time.monotonic() - started < 5.0
    gateway.setblocking(False)
    reader, received = FrameReader(), 0
    deadline = time.monotonic() + 20
    while received < num_frames:
        assert time.monotonic() < deadline
        channel.receive(0.0)  # also writes what is left
        try:
            data = gateway.recv(1 << 20)
        except BlockingIOError:
            continue
        for body in reader.feed(data):
            assert decode_from_worker(body) == events
            received += 1
