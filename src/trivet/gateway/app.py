"""The HTTP side: routes, admission, and what is common to all requests (key, size, ids, errors).

`Gateway` holds the state of one server: its workers, its tokenizer (absent while loading), its metrics,
and whether it is draining. The order of checks of a generation is: key, body size, content coding,
form of the body, model name, readiness, tokens of the prompt, room in a queue. Prompts are never
logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import time
import traceback
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import trivet
from trivet.config import ServerConfig
from trivet.errors import EngineError, RequestError
from trivet.gateway import protocol
from trivet.gateway.answer import Answer, AnswerInfo, ChatAnswer, CompletionAnswer
from trivet.gateway.errors import error_response
from trivet.gateway.generation import Choice, Generation, Prompt
from trivet.gateway.log import say
from trivet.gateway.metrics import CONTENT_TYPE, Metrics
from trivet.gateway.policy import assign_least_loaded
from trivet.gateway.pool import WorkerHandle, WorkerPool
from trivet.gateway.stream import GenerationResponse
from trivet.gateway.tokens import ModelFront, Tokenizer, TokenNames
from trivet.request import Request
from trivet.worker.frames import Ready

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of the completions API
_OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
_OFFLOAD_CHARS = 16_384  # texts above this are tokenized off the event loop
_SHRINKING = 2  # characters that a tokenizer may drop or join: spaces, accents
_OFFLOAD_IDS = 1 << 14
_MESSAGE_CHARS = 64  # what a template costs for a message, in characters of text
_OFFLOAD_BYTES = 262_144  # and so are bodies above this
_DISCARD_S = 5.0
_SEED_BITS = 53  # seeds drawn here survive JSON numbers of every client
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}\Z")
_B = TypeVar("_B", bound=protocol.Body)
_EXPOSED_HEADERS = ["x-request-id", "x-trivet-path", "x-trivet-seed", "retry-after"]


class Gateway:
    """State of one server. Made on the event loop that serves it."""

    def __init__(self, config: ServerConfig, model_name: str) -> None:
        self.config = config
        self.model_name = model_name
        self.front: ModelFront | None = None
        self.names: TokenNames | None = None
        self.pool: WorkerPool | None = None
        self.metrics = Metrics(model_name, self.all_workers)
        self.created = int(time.time())
        self.is_draining = False
        self.num_generations = 0

    def all_workers(self) -> list[WorkerHandle]:
        """The workers, whatever their state; none before the pool is made."""
        return self.pool.workers if self.pool is not None else []

    def set_front(self, front: ModelFront) -> None:
        """The tokenizer is there."""
        self.front = front
        self.names = TokenNames(front.tokenizer)

    @property
    def is_ready(self) -> bool:
        """Whether /health is 200."""
        return (
            self.front is not None
            and self.pool is not None
            and self.pool.is_ready
            and not self.is_draining
        )

    def serving(self) -> tuple[ModelFront, TokenNames, WorkerPool, Ready]:
        """All that a request needs. Raises RequestError 503: loading, draining, or no live worker."""
        if self.is_draining:
            raise RequestError("the server is shutting down", status=503, code="shutting_down")
        ready = self.pool.first_ready() if self.pool is not None else None
        if self.front is None or self.names is None or self.pool is None or ready is None:
            raise RequestError("the model is being loaded", status=503, code="not_ready")
        return self.front, self.names, self.pool, ready

    def check_model(self, name: str | None) -> None:
        """Raises RequestError 404: another model was asked for."""
        if name is not None and name not in (self.model_name, self.config.model.model):
            raise RequestError(
                f"model: {name[:200]!r} is not served here; served: {self.model_name!r}",
                "model",
                status=404,
                code="model_not_found",
            )

    async def encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        """Token ids of a text, off the event loop when it is long.

        Raises RequestError: the text of ``field`` is so long that it cannot fit the context, whatever
        its tokens are; tokenizing it would take minutes and gigabytes.
        """
        front, _, _, ready = self.serving()
        if len(text) <= _OFFLOAD_CHARS:
            return front.tokenizer.encode(text, add_special_tokens)
        most = ready.max_model_len * front.tokenizer.max_token_chars * _SHRINKING
        if len(text) > most:
            raise RequestError(
                f"{field}: {len(text)} characters cannot fit the context of {ready.max_model_len} "
                f"tokens; at most {most} are tokenized",
                field,
                code="context_length_exceeded",
            )
        return await asyncio.to_thread(front.tokenizer.encode, text, add_special_tokens)

    async def encode_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, add_special_tokens: bool
    ) -> list[int]:
        """Token ids of a chat. Raises RequestError: the template refuses the messages."""
        front, *_ = self.serving()
        render = front.tokenizer.apply_chat_template
        if sum(len(message["content"]) + _MESSAGE_CHARS for message in messages) > _OFFLOAD_CHARS:
            text = await asyncio.to_thread(render, messages, add_generation_prompt)
        else:
            text = render(messages, add_generation_prompt)
        return await self.encode(text, add_special_tokens, "messages")

    # --- generations ----------------------------------------------------------------------------

    async def complete(self, http: HTTPRequest) -> Response:
        """POST /v1/completions."""
        arrived = time.monotonic()
        body = await _parsed(http, protocol.parse_completion)
        self.check_model(body.model)
        front, _, _, ready = self.serving()
        skip = body.skip_special_tokens is not False
        prompts = []
        for number, item in enumerate(body.prompts()):
            if number:
                await asyncio.sleep(0)  # thousands of prompts do not stop other clients' streams
            if isinstance(item, str):
                ids = await self.encode(item, body.add_special_tokens is not False, "prompt")
                prompt = Prompt(ids, item)
            else:
                protocol.check_token_ids(item, "prompt", ready.vocab_size)
                prompt = Prompt(item)
                if body.echo:
                    prompt.text = _text_of(front.tokenizer, item, skip)
            if not prompt.token_ids:
                raise RequestError(f"prompt: prompt {number} has no tokens", "prompt")
            prompts.append(prompt)
        drops_output = body.max_tokens == 0
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return self._generate(body, prompts, limit, arrived, drops_output=drops_output)

    async def chat(self, http: HTTPRequest) -> Response:
        """POST /v1/chat/completions."""
        arrived = time.monotonic()
        body = await _parsed(http, protocol.parse_chat)
        self.check_model(body.model)
        ids = await self.encode_chat(
            body.template_messages(),
            body.add_generation_prompt is not False,
            body.add_special_tokens is True,
        )
        if not ids:
            raise RequestError("messages: they have no tokens", "messages")
        limit = body.max_completion_tokens or body.max_tokens
        return self._generate(body, [Prompt(ids)], limit, arrived)

    def _generate(
        self,
        body: protocol.CompletionBody | protocol.ChatBody,
        prompts: list[Prompt],
        limit: int | None,
        arrived: float,
        *,
        drops_output: bool = False,
    ) -> GenerationResponse:
        """Admit the requests of one call, all or none, and return the response that serves them."""
        front, names, pool, ready = self.serving()
        is_chat = isinstance(body, protocol.ChatBody)
        echo = isinstance(body, protocol.CompletionBody) and bool(body.echo)
        n = body.num_choices()
        seed = body.seed if body.seed is not None else secrets.randbits(_SEED_BITS)
        answer_id = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex
        timeout = self.config.request_timeout_s
        choices: list[Choice] = []
        for prompt in prompts:
            max_tokens = _output_limit(
                limit, len(prompt.token_ids), ready, "messages" if is_chat else "prompt", body
            )
            params = body.sampling_params(
                vocab_size=ready.vocab_size,
                max_tokens=max_tokens,
                seed=seed,
                prompt_logprobs=echo and body.logprobs_wanted() is not None,
            )
            for number in range(n):
                index = len(choices)
                choices.append(
                    Choice(
                        index=index,
                        prompt=prompt,
                        request=Request(
                            request_id=f"{answer_id}-{index}",
                            prompt_ids=prompt.token_ids,
                            params=params,
                            choice_index=number,
                            deadline=None if timeout is None else arrived + timeout,
                            priority=-(body.priority or 0),
                            cache_salt=body.cache_salt or "",
                        ),
                        tokenizer=front.tokenizer,
                        stops=body.stops(),
                        skip_special_tokens=body.skip_special_tokens is not False,
                        arrived=arrived,
                        drop_output=drops_output,
                    )
                )
        backends = self._admit(pool, ready, len(prompts), n)
        generation = Generation(choices, backends, self.metrics)
        info = AnswerInfo(
            answer_id=answer_id,
            created=int(time.time()),
            model=body.model or self.model_name,
            fingerprint=f"trivet-{ready.numerics_id[:16]}",
            seed=seed,
            include_usage=body.include_usage(),
            continuous_usage=body.continuous_usage(),
            wants_logprobs=body.logprobs_wanted() is not None,
            wants_token_ids=bool(body.return_token_ids),
            echo=echo,
            skip_special_tokens=body.skip_special_tokens is not False,
        )
        kind = ChatAnswer if is_chat else CompletionAnswer
        answer: Answer = kind(info, front.tokenizer, names)
        for choice in choices:
            self.metrics.begun(choice, n)
        return GenerationResponse(
            generation,
            answer,
            stream=bool(body.stream),
            headers={"x-trivet-seed": str(seed)},
            on_begin=self._generation_begins,
            on_end=self._generation_ends,
        )

    def _admit(
        self, pool: WorkerPool, ready: Ready, num_prompts: int, n: int
    ) -> list[WorkerHandle]:
        """A worker for each request, in order."""
        total = sum(w.ready.max_num_seqs + w.ready.max_waiting for w in pool.workers if w.ready)
        if num_prompts * n > total:
            raise RequestError(
                f"{num_prompts * n} requests in one call; the queue holds {total}",
                "n" if n > 1 else "prompt",
            )
        try:
            chosen = assign_least_loaded(pool.workers, [n] * num_prompts)
        except RequestError:
            self.metrics.rejected()
            raise
        return [pool.workers[index] for index in chosen for _ in range(n)]

    def _generation_begins(self) -> None:
        self.num_generations += 1

    def _generation_ends(self) -> None:
        self.num_generations -= 1

    # --- everything else ------------------------------------------------------------------------

    async def models(self, http: HTTPRequest) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, http: HTTPRequest) -> Response:
        """GET /v1/models/{name}."""
        self.check_model(http.path_params["name"])
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        ready = self.pool.first_ready() if self.pool is not None else None
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "trivet",
            "root": self.config.model.model,
            "max_model_len": ready.max_model_len if ready else self.config.model.max_model_len,
            "weights": ready.weights if ready else None,
            "kv": ready.kv if ready else None,
        }

    async def tokenize(self, http: HTTPRequest) -> Response:
        """POST /tokenize."""
        body = await _parsed(http, protocol.parse_tokenize)
        self.check_model(body.model)
        front, _, _, ready = self.serving()
        if body.prompt is not None:
            ids = await self.encode(body.prompt, body.add_special_tokens is not False, "prompt")
        else:
            ids = await self.encode_chat(
                body.template_messages(),
                body.add_generation_prompt is not False,
                body.add_special_tokens is True,
            )
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": ready.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = [front.tokenizer.id_to_token(token_id) for token_id in ids]
        return await asyncio.to_thread(_json, answer) if len(ids) > _OFFLOAD_IDS else _json(answer)

    async def detokenize(self, http: HTTPRequest) -> Response:
        """POST /detokenize."""
        body = await _parsed(http, protocol.parse_detokenize)
        self.check_model(body.model)
        front, _, _, ready = self.serving()

        def text() -> str:
            protocol.check_token_ids(body.tokens, "tokens", ready.vocab_size)
            return front.tokenizer.decode(body.tokens, False)

        is_long = len(body.tokens) > _OFFLOAD_IDS
        return _json({"prompt": await asyncio.to_thread(text) if is_long else text()})

    async def tokenizer_info(self, http: HTTPRequest) -> Response:
        """GET /tokenizer_info."""
        front, _, _, ready = self.serving()
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        info: dict[str, Any] = {name: front.special_tokens.get(name) for name in names}
        info["vocab_size"] = front.tokenizer.vocab_size
        info["model_max_length"] = ready.max_model_len
        info["chat_template"] = front.tokenizer.chat_template
        return _json(info)

    async def version(self, http: HTTPRequest) -> Response:
        """GET /version."""
        return _json({"version": trivet.__version__})

    async def health(self, http: HTTPRequest) -> Response:
        """GET /health: 200 when requests are taken."""
        if self.is_ready:
            return _json({"status": "ok"})
        self.serving()
        raise RequestError("no worker is ready", status=503, code="not_ready")

    async def metrics_page(self, http: HTTPRequest) -> Response:
        """GET /metrics."""
        await asyncio.gather(*(worker.fetch_stats() for worker in self.all_workers()))
        return Response(self.metrics.render(), media_type=CONTENT_TYPE)

    async def workers(self, http: HTTPRequest) -> Response:
        """GET /workers."""
        workers = self.all_workers()
        await asyncio.gather(*(worker.fetch_stats() for worker in workers))
        return _json({"workers": [_worker_card(worker) for worker in workers]})

    async def worker_role(self, http: HTTPRequest) -> Response:
        """POST /workers/{id}/role."""
        body = await _parsed(http, protocol.parse_role)
        name = http.path_params["worker_id"]
        worker = next((w for w in self.all_workers() if w.worker_id == name), None)
        if worker is None:
            raise RequestError("there is no such worker", "id", status=404, code="worker_not_found")
        if body.role != worker.role:
            raise RequestError(
                f"role: {body.role[:60]!r} is not supported; allowed: 'mixed'",
                "role",
                code="unsupported_parameter",
            )
        return _json(_worker_card(worker))

    async def reset_prefix_cache(self, http: HTTPRequest) -> Response:
        """POST /reset_prefix_cache: free every cached page that no request uses."""
        _, _, pool, _ = self.serving()
        try:
            freed = await asyncio.gather(*(w.reset_prefix_cache() for w in pool.workers))
        except EngineError as error:
            raise RequestError(str(error), status=503, code="worker_died") from None
        return _json({"pages": sum(freed)})

    async def responses(self, http: HTTPRequest) -> Response:
        """POST /v1/responses: does not exist yet."""
        raise RequestError("the responses API is not supported", code="unsupported_api")


def build_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application of a gateway."""
    routes = [
        Route("/v1/completions", gateway.complete, methods=["POST"]),
        Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
        Route("/v1/responses", gateway.responses, methods=["POST"]),
        Route("/v1/models", gateway.models, methods=["GET"]),
        Route("/v1/models/{name:path}", gateway.model, methods=["GET"]),
        Route("/tokenize", gateway.tokenize, methods=["POST"]),
        Route("/detokenize", gateway.detokenize, methods=["POST"]),
        Route("/tokenizer_info", gateway.tokenizer_info, methods=["GET"]),
        Route("/version", gateway.version, methods=["GET"]),
        Route("/health", gateway.health, methods=["GET"]),
        Route("/metrics", gateway.metrics_page, methods=["GET"]),
        Route("/workers", gateway.workers, methods=["GET"]),
        Route("/workers/{worker_id}/role", gateway.worker_role, methods=["POST"]),
        Route("/reset_prefix_cache", gateway.reset_prefix_cache, methods=["POST"]),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(gateway.config.cors_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_EXPOSED_HEADERS,
    )
    return Starlette(
        routes=routes,
        middleware=[cors, Middleware(_Front, gateway=gateway)],
        exception_handlers={
            RequestError: _on_request_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
        },
    )


class _Front:
    """Before and after every route: request id, key, body limit, response count, last-resort 500."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        key = gateway.config.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        is_begun = False

        async def send_marked(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                self._gateway.metrics.responded(message["status"])
                pair = (b"x-request-id", request_id.encode("ascii"))
                message = {**message, "headers": [*message["headers"], pair]}
            await send(message)

        try:
            self._check(scope["path"], headers)
            _check_encoding(scope["headers"])
            scope["max_body_bytes"] = self._gateway.config.max_body_bytes
            await self._app(scope, receive, send_marked)
        except RequestError as error:
            if error.status == 413 and headers.get(b"expect", b"").lower() != b"100-continue":
                await _discard(receive)
            await error_response(error)(scope, receive, send_marked)
        except Exception as error:
            # The message of an exception may quote a prompt: only its type and place are logged.
            place = "".join(traceback.format_tb(error.__traceback__)[-3:])
            say(f"trivet: {type(error).__name__} in {scope['path']}\n{place}")
            if not is_begun:
                failure = RequestError("internal error", status=500, code="internal_error")
                await error_response(failure)(scope, receive, send_marked)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is not None and path not in _OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
                raise RequestError("missing or wrong API key", status=401, code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        limit = self._gateway.config.max_body_bytes
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)


def _check_encoding(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises RequestError 415: the body is compressed, which nobody here would undo."""
    for name, value in headers:
        coding = value.decode("latin-1").strip()
        if name == b"content-encoding" and coding.lower() not in ("", "identity"):
            raise RequestError(
                f"Content-Encoding: {coding[:60]!r} is not supported; allowed: identity",
                status=415,
                code="unsupported_content_encoding",
            )


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"the body is above the limit of {limit} bytes", status=413, code="body_too_large"
    )


def _request_id(given: bytes | None) -> str:
    """The client's id, if it is a sane header value, or a new one."""
    text = (given or b"").decode("latin-1")
    return text if _REQUEST_ID.match(text) else uuid.uuid4().hex


async def _discard(receive: Receive) -> None:
    """Take in the rest of a body, for a while.

    A client that still sends when the connection is closed sees a reset and not the answer.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while (message := await receive())["type"] == "http.request":
                if not message.get("more_body", False):
                    return


async def _read(http: HTTPRequest) -> bytes:
    """The body. Raises RequestError 413: longer than allowed, whatever its header said."""
    limit: int = http.scope["max_body_bytes"]
    data = bytearray()
    async for part in http.stream():
        data += part
        if len(data) > limit:
            raise _too_large(limit)
    return bytes(data)


async def _parsed(http: HTTPRequest, parse: Callable[[bytes], _B]) -> _B:
    """The body as a typed object; a long one is parsed off the event loop."""
    data = await _read(http)
    if len(data) <= _OFFLOAD_BYTES:
        return parse(data)
    return await asyncio.to_thread(parse, data)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _text_of(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
    return tokenizer.decode(ids, skip_special_tokens)


def _output_limit(
    limit: int | None,
    prompt_len: int,
    ready: Ready,
    param: str,
    body: protocol.GenerationBody,
) -> int:
    """Most output tokens of a prompt. Raises RequestError: the context or the pages cannot hold it."""
    context = ready.max_model_len
    field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    if limit is not None and limit > context:
        raise RequestError(f"{field}: {limit} is above the context of {context} tokens", field)
    needed = 0 if limit == 0 else 1
    if prompt_len + needed > context:
        raise RequestError(
            f"{param}: {prompt_len} tokens, and the context is {context} tokens, "
            "which must also hold the output",
            param,
            code="context_length_exceeded",
        )
    left = context - prompt_len
    output = left if limit is None else min(limit, left)
    capacity = ready.num_pages * ready.page_tokens
    if prompt_len + output > capacity:
        if limit is not None or prompt_len >= capacity:
            raise RequestError(
                f"{param}: {prompt_len} tokens and {output} of output need more than the "
                f"{capacity} tokens of KV there are",
                param if prompt_len >= capacity else field,
            )
        output = capacity - prompt_len
    return output


def _worker_card(worker: WorkerHandle) -> dict[str, Any]:
    stats = worker.stats
    return {
        "id": worker.worker_id,
        "role": worker.role,
        "pid": worker.pid,
        "state": worker.state,
        "queue": stats.num_waiting,
        "running": stats.num_running,
        "restarts": worker.restarts,
        "pages": {
            "free": stats.pages_free,
            "used": stats.pages_used,
            "cached": stats.pages_cached,
            "leased": stats.pages_leased,
        },
    }


async def _on_request_error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{http.method} {http.url.path[:200]}: {error.detail}"
    return error_response(RequestError(message, status=error.status_code, code=code))


async def _on_disconnect(http: HTTPRequest, error: Exception) -> Response:
    return PlainTextResponse("", status_code=499)
