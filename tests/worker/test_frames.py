"""Frames: every message survives the trip, however the stream is cut; broken streams are refused."""

from __future__ import annotations

import random

import msgspec
import pytest

from trivet.engine.stats import EngineStats
from trivet.errors import EngineError
from trivet.request import (
    CancelledEvent,
    ErrorEvent,
    FinishedEvent,
    FinishReason,
    Logprob,
    Request,
    SamplingParams,
    StageTimes,
    TokensEvent,
)
from trivet.worker.frames import (
    MAX_FRAME_BYTES,
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
    decode_to_worker,
    encode_frame,
)

TO_WORKER: list[ToWorker] = [
    Start(WorkerConfig(model="m", kv_bytes=5)),
    Add(
        Request(
            request_id="a",
            prompt_ids=[1, 2],
            params=SamplingParams(seed=-7, logit_bias={3: -1.5}, stop_token_ids=[4]),
            emitted_ids=[9],
            deadline=1.5,
        )
    ),
    Abort("a"),
    Finish("a", 3),
    GetStats(),
    ResetPrefixCache(),
]
FROM_WORKER: list[FromWorker] = [
    Ready(
        pid=1,
        numerics_id="n",
        weights="w8a8",
        kv="int8",
        max_model_len=8,
        vocab_size=9,
        num_pages=10,
        page_tokens=32,
        page_bytes=4096,
        max_num_seqs=2,
        max_waiting=3,
        threads=5,
        notes=["x"],
    ),
    LoadFailed("no", True),
    TokensEvent(
        request_id="a",
        position=2,
        token_ids=[5],
        logprobs=[Logprob(5, -0.5, 1, [5, 6], [-0.5, -1.0])],
        prompt_logprobs=[None, Logprob(1, float("-inf"), 7, [], [])],
        cached_len=0,
        num_chunks=1,
    ),
    FinishedEvent(
        request_id="a",
        reason=FinishReason.STOP,
        stop_token_id=None,
        prompt_len=2,
        output_len=1,
        cached_len=0,
        times=StageTimes(arrived=0.5, first_token=0.75),
    ),
    ErrorEvent(request_id="b", code="deadline", message="late"),
    CancelledEvent(request_id="c"),
    Stats(EngineStats(num_running=3, finished={"stop": 1})),
    PrefixCacheReset(4),
]


def test_all_messages_survive_any_cut() -> None:
    stream = encode_frame(TO_WORKER) + encode_frame([]) + encode_frame(TO_WORKER[1:2])
    rng = random.Random(0)
    for _ in range(50):
        reader, frames, start = FrameReader(), [], 0
        while start < len(stream):
            end = start + rng.randint(1, 40)
            frames += [decode_to_worker(body) for body in reader.feed(stream[start:end])]
            start = end
        assert frames == [TO_WORKER, [], TO_WORKER[1:2]]


def test_events_survive() -> None:
    [body] = FrameReader().feed(encode_frame(FROM_WORKER))
    assert decode_from_worker(body) == FROM_WORKER


def test_absurd_length_is_refused_before_it_is_read() -> None:
    with pytest.raises(EngineError, match="broken"):
        list(FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91\x80", msgspec.msgpack.encode([{"type": "no"}])]
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(EngineError):
        decode_from_worker(body)
    with pytest.raises(EngineError):
        decode_to_worker(body)
