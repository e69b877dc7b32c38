"""The worker's end of the socket: blocking only when there is nothing to do.

The engine must never wait for a gateway that is slow to read, nor leave a message unread while it
computes: `receive` takes what has arrived, `send` writes what the kernel accepts and keeps the rest.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

from trivet.worker.frames import (
    FrameReader,
    FromWorker,
    ToWorker,
    decode_to_worker,
    encode_frame,
)

_READ_BYTES = 1 << 18
_SEND_BUFFER_BYTES = 1 << 20


class Channel:
    """Frames over one connected stream socket, which this object owns and closes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._poll = select.poll()
        self.is_closed = False  # the peer is gone

    def receive(self, timeout_s: float | None) -> list[ToWorker]:
        """Messages that have arrived, in order; waits up to ``timeout_s`` (None: for ever) for one.

        Also writes what `send` could not. Sets ``is_closed`` at end-of-file.
        """
        events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        self._poll.register(self._socket, events)
        timeout_ms = None if timeout_s is None else timeout_s * 1000.0
        for _, event in self._poll.poll(timeout_ms):
            if event & select.POLLOUT:
                self._flush()
        messages: list[ToWorker] = []
        while not self.is_closed:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                self.is_closed = True
                break
            for body in self._reader.feed(data):
                messages += decode_to_worker(body)
        return messages

    def send(self, messages: Sequence[FromWorker]) -> None:
        """Send one frame. Never blocks; what the kernel does not take now is sent later."""
        self._unsent += encode_frame(messages)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.is_closed = True
            self._unsent.clear()

    def drain(self, timeout_s: float) -> None:
        """Write what is left, waiting up to ``timeout_s``; used before an exit."""
        self._poll.register(self._socket, select.POLLOUT)
        while self._unsent and not self.is_closed and self._poll.poll(timeout_s * 1000.0):
            self._flush()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
