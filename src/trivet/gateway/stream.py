"""Sends one generation to one client: a JSON body, or server-sent events.

The status line waits for the first news of the engine, so that an error before the first token is a
plain HTTP error. A client that leaves is noticed while nothing is being sent, too, and its requests are
aborted. A stream that fails after it has begun ends with one ``data: {"error": ...}`` event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trivet.gateway.answer import Answer
from trivet.gateway.errors import error_body, error_response, request_error_of
from trivet.gateway.generation import Delta, Generation

_encode = msgspec.json.Encoder().encode


class GenerationResponse(Response):
    """An ASGI response that owns a generation: whatever happens, nothing of it runs on afterwards."""

    def __init__(
        self,
        generation: Generation,
        answer: Answer,
        *,
        stream: bool,
        headers: dict[str, str],
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__()
        self._generation = generation
        self._answer = answer
        self._is_stream = stream
        self._extra_headers = headers
        self._on_begin = on_begin
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.ensure_future(self._watch(receive))
        self._on_begin()
        try:
            self._generation.start()
            if self._is_stream:
                await self._send_stream(scope, receive, send)
            else:
                await self._send_whole(scope, receive, send)
        finally:
            watcher.cancel()
            self._generation.close()
            self._on_end()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.disconnect()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        parts: dict[int, list[Delta]] = {choice.index: [] for choice in generation.choices}
        while not generation.is_done:
            for choice in await generation.changed():
                parts[choice.index].append(choice.take())
            if generation.is_disconnected:
                return
            if generation.error is not None:
                response = error_response(request_error_of(generation.error))
                await response(scope, receive, send)
                return
        body = _encode(self._answer.whole(generation, list(parts.values())))
        whole = Response(body, media_type="application/json", headers=self._answer_headers())
        await whole(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        is_begun = False
        while not generation.is_done:
            touched = await generation.changed()
            if generation.is_disconnected:
                return
            error = generation.error
            if error is not None and not is_begun:
                response = error_response(request_error_of(error))
                await response(scope, receive, send)
                return
            if not is_begun:
                is_begun = True
                await self._begin(send)
            events = bytearray()
            for choice in touched:
                if choice.error is None:
                    for chunk in self._answer.chunks(generation, choice, choice.take()):
                        events += _event(chunk)
            if error is not None:
                events += _event(error_body(request_error_of(error)))
                await _send_body(send, bytes(events), more=False)
                return
            if events:
                await _send_body(send, bytes(events), more=True)
        tail = b""
        if self._answer.info.include_usage:
            tail = _event(self._answer.usage_chunk(generation))
        await _send_body(send, tail + b"data: [DONE]\n\n", more=False)

    async def _begin(self, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._answer_headers(),
        }
        pairs = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})

    def _answer_headers(self) -> dict[str, str]:
        return {**self._extra_headers, "x-trivet-path": self._path()}

    def _path(self) -> str:
        """How the prompts were prefilled: in one step each, or in chunks, as far as is known now."""
        known = [choice for choice in self._generation.choices if choice.num_chunks is not None]
        if not known:
            return "local; reason=no token was drawn"
        longest = max(known, key=lambda choice: choice.num_chunks or 0)
        length = len(longest.prompt.token_ids) - (longest.cached_len or 0)
        if longest.num_chunks == 1:
            return f"local; reason={length} tokens in one step"
        return f"chunked; reason={length} tokens in {longest.num_chunks} steps"


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + _encode(fields) + b"\n\n"
