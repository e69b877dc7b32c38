"""Errors in OpenAI's envelope ``{"error": {message, type, param, code}}``, with an HTTP status."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from trivet.errors import RequestError
from trivet.request import ErrorEvent

RETRY_AFTER_S = 1

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_STATUS_OF_CODE = {
    "queue_full": 429,
    "deadline": 504,
    "worker_died": 503,
    "shutting_down": 503,
    "draining": 503,
    "invalid_request": 400,
    "invalid_value": 400,
    "context_length_exceeded": 400,
}


def error_body(error: RequestError) -> dict[str, Any]:
    """The envelope."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.status, kind),
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: RequestError) -> JSONResponse:
    """The whole response; 429 and 503 say when to come back."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 415:
        headers["accept-encoding"] = "identity"
    if error.status == 413:
        headers["connection"] = "close"
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def request_error_of(event: ErrorEvent) -> RequestError:
    """The HTTP error that an engine's error event means."""
    status = _STATUS_OF_CODE.get(event.code, 500)
    return RequestError(event.message, event.param, status=status, code=event.code)
