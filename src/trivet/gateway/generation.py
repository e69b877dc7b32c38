"""One API call while it runs: its choices, and the mailbox their events arrive in.

A `Choice` is one request of the engine turned into text: it takes events, cuts at stop strings and
hands out `Delta`s. A `Generation` holds all choices of one call, wakes whoever serves the client, and
ends what is still running when the client leaves. Neither knows HTTP, JSON or a worker's socket.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from trivet.gateway.tokens import CountingDetokenizer, Tokenizer
from trivet.request import (
    CancelledEvent,
    ErrorEvent,
    Event,
    FinishedEvent,
    FinishReason,
    Logprob,
    Request,
    StageTimes,
    TokensEvent,
)
from trivet.text import TextStream


class Backend(Protocol):
    """The worker a choice runs on."""

    def submit(self, request: Request, receiver: Generation) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def finish(self, request_id: str, output_len: int) -> None: ...


class Observer(Protocol):
    """Accounting of requests; see `trivet.gateway.metrics`."""

    def tokens(self, choice: Choice, now: float, num_tokens: int) -> None: ...
    def ended(self, choice: Choice, now: float, reason: str) -> None: ...
    def stages(self, choice: Choice, times: StageTimes) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """One output token as the client may see it. ``offset`` is its first character in the output."""

    token_id: int
    offset: int
    logprob: Logprob | None


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """What is new in a choice. ``finish_reason`` is set once, on the last one that says anything."""

    text: str
    tokens: list[Token]
    finish_reason: str | None


@dataclasses.dataclass
class Prompt:
    """One prompt of a call. ``text`` is set when it is echoed."""

    token_ids: list[int]
    text: str | None = None


class Choice:
    """One choice of an API call: request, text so far, ending.

    output_len counts up to the token that ended the output; tokens after a stop string do not exist.
    """

    def __init__(
        self,
        *,
        index: int,
        prompt: Prompt,
        request: Request,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        skip_special_tokens: bool,
        arrived: float,
        drop_output: bool = False,
    ) -> None:
        params = request.params
        silent = set(params.stop_token_ids) | (
            set() if params.ignore_eos else set(tokenizer.eos_ids)
        )
        self.index = index
        self.prompt = prompt
        self.request = request
        self.arrived = arrived
        self.backend: Backend | None = None
        self.output_len = 0
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.cached_len: int | None = None
        self.num_chunks: int | None = None
        self.prompt_logprobs: list[Logprob | None] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: ErrorEvent | None = None
        self.times: StageTimes | None = None
        self._detokenizer = CountingDetokenizer(tokenizer.detokenizer(skip_special_tokens))
        self._stream = TextStream(self._detokenizer, stops, silent)
        self._drop_output = drop_output
        self._text: list[str] = []
        self._shown_len = 0
        self._pending: list[Token] = []
        self._is_told = False  # the finish reason was handed out

    @property
    def is_ended(self) -> bool:
        """Whether the terminal event, or the stop string, has come."""
        return self.finish_reason is not None or self.error is not None

    def accept(self, event: Event) -> int:
        """Take one event; returns how many output tokens it added."""
        if self.is_ended:
            return 0
        match event:
            case TokensEvent():
                return self._accept_tokens(event)
            case FinishedEvent():
                self.cached_len = event.cached_len
                self.times = event.times
                self.stop_reason = event.stop_token_id
                self._show(self._stream.finish())
                if self._stream.stopped:
                    self.stop_reason = self._stream.stop_string
                    self.finish_reason = FinishReason.STOP.value
                else:
                    self.finish_reason = event.reason.value
            case ErrorEvent():
                self.error = event
            case CancelledEvent():
                self.error = ErrorEvent(
                    request_id=event.request_id,
                    code="cancelled",
                    message="the request was cancelled",
                )
        return 0

    def _accept_tokens(self, event: TokensEvent) -> int:
        if event.cached_len is not None:
            self.cached_len = event.cached_len
        if event.num_chunks is not None:
            self.num_chunks = event.num_chunks
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if self._drop_output:
            return 0
        added = 0
        for number, token_id in enumerate(event.token_ids):
            offset = self._detokenizer.num_chars
            delta = self._stream.push([token_id])
            logprob = event.logprobs[number] if event.logprobs is not None else None
            self._pending.append(Token(token_id, offset, logprob))
            self._show(delta.text)
            added += 1
            if self._stream.stopped:
                self.finish_reason = FinishReason.STOP.value
                self.stop_reason = self._stream.stop_string
                break
        self.output_len += added
        return added

    def _show(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._shown_len += len(text)

    def take(self) -> Delta:
        """What may be shown now and was not handed out before.

        A token goes out with the text it begins in; tokens of held-back text wait with it.
        """
        text = "".join(self._text)
        self._text.clear()
        ready = len(self._pending)
        if not self.is_ended and self._detokenizer.num_chars > self._shown_len:
            while ready and self._pending[ready - 1].offset >= self._shown_len:
                ready -= 1
        tokens, self._pending = self._pending[:ready], self._pending[ready:]
        reason = None if self._is_told else self.finish_reason
        self._is_told = reason is not None or self._is_told
        return Delta(text, tokens, reason)


class Generation:
    """All choices of one API call, and the mailbox of their events.

    The server side calls `start`, awaits `changed` and takes deltas; workers `deliver` and `wake`.
    ``backends`` is parallel to ``choices``.
    """

    def __init__(
        self, choices: Sequence[Choice], backends: Sequence[Backend], observer: Observer
    ) -> None:
        self.choices = list(choices)
        self.is_disconnected = False
        self._by_id = {choice.request.request_id: choice for choice in self.choices}
        self._observer = observer
        self._touched: dict[int, Choice] = {}
        self._wakeup = asyncio.Event()
        self._num_running = len(self.choices)
        for choice, backend in zip(self.choices, backends, strict=True):
            choice.backend = backend

    def start(self) -> None:
        """Send every choice to its backend."""
        for choice in self.choices:
            if choice.backend is not None:
                choice.backend.submit(choice.request, self)

    def deliver(self, event: Event) -> None:
        """Take one event of one of the choices."""
        choice = self._by_id[event.request_id]
        if isinstance(event, FinishedEvent):
            self._observer.stages(choice, event.times)
        if not choice.is_ended:
            self._take(choice, event)

    def _take(self, choice: Choice, event: Event) -> None:
        now = time.monotonic()
        added = choice.accept(event)
        if added:
            if choice.first_token_at is None:
                choice.first_token_at = now
            self._observer.tokens(choice, now, added)
            choice.last_token_at = now
        self._touched[choice.index] = choice
        if choice.is_ended:
            self._num_running -= 1
            self._observer.ended(choice, now, _outcome(choice))
            if isinstance(event, TokensEvent) and choice.backend is not None:
                # Cut at a stop string, of which the engine knows nothing.
                choice.backend.finish(event.request_id, choice.output_len)

    def wake(self) -> None:
        """The events of one frame are delivered."""
        self._wakeup.set()

    def disconnect(self) -> None:
        """The client is gone."""
        self.is_disconnected = True
        self._wakeup.set()

    @property
    def is_done(self) -> bool:
        """Every choice has ended and `changed` has told of it: it would wait for ever."""
        return self._num_running == 0 and not self._touched

    @property
    def error(self) -> ErrorEvent | None:
        """The first error of any choice: it ends the whole call."""
        return next((choice.error for choice in self.choices if choice.error), None)

    async def changed(self) -> list[Choice]:
        """Wait for news; the choices that have some, by index. [] when the client left."""
        while not (self._touched or self.is_disconnected):
            self._wakeup.clear()
            await self._wakeup.wait()
        touched, self._touched = self._touched, {}
        return [] if self.is_disconnected else [touched[index] for index in sorted(touched)]

    def close(self) -> None:
        """Abort what still runs; every choice has then ended."""
        now = time.monotonic()
        for choice in self.choices:
            if not choice.is_ended:
                if choice.backend is not None:
                    choice.backend.abort(choice.request.request_id)
                choice.finish_reason = "abort"
                self._observer.ended(choice, now, "abort")
        self._num_running = 0


def _outcome(choice: Choice) -> str:
    if choice.error is not None:
        return "abort" if choice.error.code == "cancelled" else "error"
    return choice.finish_reason or "error"
