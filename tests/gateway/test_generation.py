"""Choices without a server: stop strings and characters that are split over tokens and events."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import pytest
from starlette.types import Message

from support.toy_server import EOS, ToyTokenizer
from trivet.errors import RequestError
from trivet.gateway.answer import AnswerInfo, CompletionAnswer
from trivet.gateway.errors import error_body, request_error_of
from trivet.gateway.generation import Choice, Generation, Prompt
from trivet.gateway.stream import GenerationResponse
from trivet.gateway.tokens import TokenNames
from trivet.request import (
    ErrorEvent,
    Event,
    FinishedEvent,
    FinishReason,
    Request,
    SamplingParams,
    StageTimes,
    TokensEvent,
)

ID = "r0"


class Recorder:
    """Backend and observer in one: remembers what was asked of it."""

    def __init__(self, on_submit: Sequence[Event] = ()) -> None:
        self._on_submit = on_submit
        self.finished: list[tuple[str, int]] = []
        self.aborted: list[str] = []
        self.submitted: list[str] = []
        self.endings: list[str] = []
        self.num_tokens = 0

    def submit(self, request: Request, receiver: Generation) -> None:
        self.submitted.append(request.request_id)
        for event in self._on_submit:
            receiver.deliver(event)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def finish(self, request_id: str, output_len: int) -> None:
        self.finished.append((request_id, output_len))

    def tokens(self, choice: Choice, now: float, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def ended(self, choice: Choice, now: float, reason: str) -> None:
        self.endings.append(reason)

    def stages(self, choice: Choice, times: StageTimes) -> None: ...


def make_choice(stops: list[str] | None = None, index: int = 0) -> Choice:
    return Choice(
        index=index,
        prompt=Prompt([1]),
        request=Request(
            request_id=f"r{index}", prompt_ids=[1], params=SamplingParams(seed=0, max_tokens=99)
        ),
        tokenizer=ToyTokenizer(),
        stops=stops or [],
        skip_special_tokens=True,
        arrived=0.0,
    )


def tokens(ids: list[int], request_id: str = ID) -> TokensEvent:
    return TokensEvent(request_id=request_id, position=1, token_ids=ids)


def finished(reason: FinishReason = FinishReason.LENGTH, request_id: str = ID) -> FinishedEvent:
    return FinishedEvent(
        request_id=request_id,
        reason=reason,
        stop_token_id=None,
        prompt_len=1,
        output_len=1,
        cached_len=0,
        times=StageTimes(arrived=0.0),
    )


def ids_of(data: str | bytes) -> list[int]:
    return [byte + 1 for byte in (data.encode() if isinstance(data, str) else data)]


def play(choice: Choice, events: list[Event]) -> list[str]:
    """Text of the delta after each event."""
    shown = []
    for event in events:
        choice.accept(event)
        shown.append(choice.take().text)
    return shown


def test_character_split_over_tokens_is_held_back() -> None:
    choice = make_choice()
    rocket = ids_of("\N{ROCKET}!")
    shown = play(choice, [tokens([token]) for token in rocket])
    assert shown == ["", "", "", "\N{ROCKET}", "!"]


def test_incomplete_last_character_is_dropped() -> None:
    choice = make_choice()
    shown = play(choice, [tokens(ids_of("ok") + ids_of("\N{ROCKET}")[:2]), finished()])
    assert "".join(shown) == "ok"
    assert choice.output_len == 4


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_stop_string_is_cut_wherever_the_events_are_cut(size: int) -> None:
    choice = make_choice(["END", "\N{ROCKET}\N{ROCKET}"])
    ids = ids_of("a \N{ROCKET} b ENx ENDnever")
    shown = play(choice, [tokens(ids[i : i + size]) for i in range(0, len(ids), size)])
    assert "".join(shown) == "a \N{ROCKET} b ENx "
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == "END"
    assert choice.output_len == len(ids_of("a \N{ROCKET} b ENx END"))


def test_held_back_text_comes_out_at_the_end() -> None:
    choice = make_choice(["END"])
    assert play(choice, [tokens(ids_of("xEN")), finished()]) == ["x", "EN"]


def test_no_leak_in_random_texts() -> None:
    """Emoji, CJK and combining characters around stop strings, cut anywhere."""
    rng = random.Random(1)
    alphabet = ["a", "b", "\N{ROCKET}", "\u6f22", "e\u0301", "ab", "\N{ROCKET}a"]
    for _ in range(300):
        text = "".join(rng.choice(alphabet) for _ in range(30))
        stops = ["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 3))) for _ in range(2)]
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        choice = make_choice(stops)
        data, events, start = ids_of(text), [], 0
        while start < len(data):
            size = rng.randint(1, 6)
            events.append(tokens(data[start : start + size]))
            start += size
        shown = ""
        for piece in play(choice, [*events, finished()]):
            shown += piece
            assert not any(stop in shown for stop in stops)
        if ends:
            assert choice.finish_reason == "stop"
            assert text.startswith(shown)
            assert len(shown) < min(ends)
        else:
            assert shown == text


def test_eos_is_counted_and_not_shown() -> None:
    choice = make_choice()
    shown = play(choice, [tokens([*ids_of("hi"), EOS]), finished(FinishReason.STOP)])
    assert "".join(shown) == "hi"
    assert choice.output_len == 3


def test_tokens_wait_for_their_text() -> None:
    choice = make_choice(["END"])
    choice.accept(tokens(ids_of("xEN")))
    assert [token.token_id for token in choice.take().tokens] == ids_of("x")
    choice.accept(tokens(ids_of("q")))
    assert [token.offset for token in choice.take().tokens] == [1, 2, 3]


def test_generation_tells_the_backend_about_a_stop_string() -> None:
    async def run() -> None:
        recorder = Recorder()
        generation = Generation([make_choice(["b"])], [recorder], recorder)
        generation.start()
        generation.deliver(tokens(ids_of("abc")))
        generation.wake()
        [choice] = await generation.changed()
        assert generation.is_done
        assert choice.take().text == "a"
        assert recorder.finished == [(ID, 2)]
        generation.deliver(tokens(ids_of("more")))
        generation.deliver(finished())
        assert choice.take().text == ""
        generation.close()
        assert recorder.endings == ["stop"]
        assert recorder.aborted == []
        assert recorder.num_tokens == 2

    asyncio.run(run())


def test_close_aborts_what_runs_and_only_that() -> None:
    async def run() -> None:
        recorder = Recorder()
        choices = [make_choice(index=0), make_choice(index=1), make_choice(index=2)]
        generation = Generation(choices, [recorder] * 3, recorder)
        generation.start()
        generation.deliver(finished(request_id="r1"))
        generation.deliver(ErrorEvent(request_id="r2", code="deadline", message="late"))
        generation.disconnect()
        assert await generation.changed() == []
        generation.close()
        generation.close()
        assert recorder.aborted == ["r0"]
        assert sorted(recorder.endings) == ["abort", "error", "length"]

    asyncio.run(run())


class SlowClient:
    """An ASGI send that gives way after every message, so that events arrive between two sends."""

    def __init__(self, generation: Generation, events: list[Event]) -> None:
        self._generation = generation
        self._events = events
        self.body = b""
        self.status = 0

    async def receive(self) -> Message:
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
        if self._events:
            self._generation.deliver(self._events.pop(0))
            self._generation.wake()
        if len(self._events) == 1:  # the last one comes by itself
            asyncio.get_running_loop().call_later(0.01, self._last)
        await asyncio.sleep(0)

    def _last(self) -> None:
        if self._events:
            self._generation.deliver(self._events.pop(0))
            self._generation.wake()


def _serve(stream: bool, backend_events: list[Event], later: list[Event]) -> SlowClient:
    """Serve one choice: some events are there at once, the others come with each send."""

    async def run() -> SlowClient:
        recorder = Recorder(backend_events)
        generation = Generation([make_choice()], [recorder], recorder)
        info = AnswerInfo(
            answer_id="a",
            created=0,
            model="m",
            fingerprint="f",
            seed=1,
            include_usage=True,
            continuous_usage=False,
            wants_logprobs=False,
            wants_token_ids=False,
            echo=False,
            skip_special_tokens=True,
        )
        tokenizer = ToyTokenizer()
        response = GenerationResponse(
            generation,
            CompletionAnswer(info, tokenizer, TokenNames(tokenizer)),
            stream=stream,
            headers={},
            on_begin=lambda: None,
            on_end=lambda: None,
        )
        client = SlowClient(generation, later)
        await response({"type": "http"}, client.receive, client.send)
        return client

    return asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_events_that_come_while_sending_are_told_once(cut: int) -> None:
    events: list[Event] = [tokens(ids_of(letter)) for letter in "abc"]
    events.append(finished())
    client = _serve(True, events[: cut + 1], events[cut + 1 :])
    blocks = [block for block in client.body.decode().split("\n\n") if block]
    assert blocks[-1] == "data: [DONE]"
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "abc"
    assert choices[-1]["finish_reason"] == "length"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_at_submission_is_an_http_error(stream: bool) -> None:
    dead = ErrorEvent(request_id=ID, code="worker_died", message="gone")
    client = _serve(stream, [dead], [])
    assert client.status == 503
    assert json.loads(client.body)["error"]["code"] == "worker_died"


def test_an_engine_that_refuses_a_field_names_it() -> None:
    refused = ErrorEvent(request_id=ID, code="invalid_value", message="too long", param="prompt")
    client = _serve(False, [refused], [])
    assert client.status == 400
    error = json.loads(client.body)["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "prompt")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("m", "prompt"), 400),
        (RequestError("m"), 400),
        (RequestError("m", status=503, code="draining"), 503),
        (RequestError("m", status=429, code="queue_full"), 429),
        (RequestError("m", "prompt", code="context_length_exceeded"), 400),
    ],
)
def test_what_an_engine_refuses_keeps_its_status(error: RequestError, status: int) -> None:
    event = ErrorEvent(request_id=ID, code=error.code, message=error.message, param=error.param)
    assert request_error_of(event).status == error.status == status
    assert error_body(error)["error"]["code"]


def test_all_events_at_once() -> None:
    events: list[Event] = [tokens(ids_of("hi")), finished()]
    client = _serve(False, events, [])
    assert client.status == 200
    [choice] = json.loads(client.body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
