"""Messages between gateway and worker, and their form on the socket.

One AF_UNIX stream per worker. A frame is a 4-byte little-endian length and a msgpack list of tagged
structs; a worker sends one frame per step for all requests. End-of-file is the death signal, so there
is no goodbye message. Nothing here touches a socket or a clock.

    gateway -> worker    Start, Add, Abort, Finish, GetStats, ResetPrefixCache
    worker -> gateway    Ready, LoadFailed, the four request events, Stats, PrefixCacheReset
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from trivet.engine.stats import EngineStats
from trivet.errors import EngineError
from trivet.request import CancelledEvent, ErrorEvent, FinishedEvent, Request, TokensEvent

MAX_FRAME_BYTES = 1 << 28  # a frame above this is a broken stream, not a message

_LENGTH = struct.Struct("<I")


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one worker runs."""

    model: str
    weights: str = "auto"
    kv: str = "bf16"
    threads: int | None = None
    max_model_len: int | None = None
    memory_utilization: float = 0.9
    kv_bytes: int | None = None
    num_workers: int = 1
    max_num_seqs: int = 32
    max_step_tokens: int = 512
    max_prefill_chunk: int | None = 256
    max_waiting: int = 1024
    prefix_cache: bool = True
    draft: str = "off"
    draft_tokens: int = 4


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message to a worker: what to load."""

    config: WorkerConfig


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Take a request; it ends in exactly one terminal event."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request before the next step; answered by a terminal event. Unknown ids are ignored."""

    request_id: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """End a request as if it had stopped after ``output_len`` output tokens (a stop string was found).

    Answered by a terminal event; unknown ids are ignored, because the request may have just ended.
    """

    request_id: str
    output_len: int


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Ask for a Stats message now."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Drop all cached pages that no request uses; answered by PrefixCacheReset."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine is loaded. Sizes as the worker decided them; ``weights`` is the full form that runs.

    ``page_bytes`` is the KV memory of one page; ``notes`` are lines for the operator, the memory plan
    among them.
    """

    pid: int
    numerics_id: str
    weights: str
    kv: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    page_tokens: int
    page_bytes: int
    max_num_seqs: int
    max_waiting: int
    threads: int
    isa: str = ""
    notes: list[str] = []


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The engine cannot be built. ``is_user_error``: a setting or a file is at fault, not Trivet."""

    message: str
    is_user_error: bool


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """State and counters of the engine after a step."""

    engine: EngineStats


class PrefixCacheReset(msgspec.Struct, frozen=True, tag="prefix_cache_reset"):
    """``num_pages`` cached pages were freed."""

    num_pages: int


ToWorker = Start | Add | Abort | Finish | GetStats | ResetPrefixCache
FromWorker = (
    Ready
    | LoadFailed
    | TokensEvent
    | FinishedEvent
    | ErrorEvent
    | CancelledEvent
    | Stats
    | PrefixCacheReset
)

_M = TypeVar("_M")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(messages: Sequence[ToWorker] | Sequence[FromWorker]) -> bytes:
    """One frame, length included."""
    body = _encoder.encode(messages)
    assert len(body) <= MAX_FRAME_BYTES, f"a frame of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cut a byte stream into frames: ``feed`` bytes as they come, get the bodies that are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises EngineError: a length above MAX_FRAME_BYTES."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise EngineError(f"a frame of {length} bytes: the stream is broken")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                yield bytes(self._buffer[start + _LENGTH.size : end])
                start = end
        finally:
            del self._buffer[:start]


_to_worker = msgspec.msgpack.Decoder(list[ToWorker])
_from_worker = msgspec.msgpack.Decoder(list[FromWorker])


def decode_to_worker(body: bytes) -> list[ToWorker]:
    """Messages of one frame sent by the gateway. Raises EngineError on anything else."""
    return _decode(_to_worker, body)


def decode_from_worker(body: bytes) -> list[FromWorker]:
    """Messages of one frame sent by a worker. Raises EngineError on anything else."""
    return _decode(_from_worker, body)


def _decode(decoder: msgspec.msgpack.Decoder[list[_M]], body: bytes) -> list[_M]:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise EngineError(f"a frame that is no list of messages: {error}") from None
