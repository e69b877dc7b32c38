"""The exception tree. Each class is one kind of mistake; the message is the one line a user reads.

TrivetError
├── ConfigError        a setting: the field, its value and what is allowed
├── CheckpointError    a model file: the file, the tensor and what is wrong with it
├── RequestError       a request: the field (``param``), why, and the HTTP status it maps to
├── QuantError         a weight that cannot be quantized as asked
├── EndpointError      a server behind a URL: its address and what it does or lacks
└── EngineError        the engine or a worker failed while running

Broken invariants are assertions, not members of this tree. The command line turns every TrivetError
into one line on standard error and exit code 2 (EngineError: 1).
"""

from __future__ import annotations

# Characters of a line about a file or a server: of its path or address, a tensor's name, the reason.
_MAX_PATH, _MAX_NAME, _MAX_REASON = 4096, 120, 400


def printable(text: str, most: int) -> str:
    """One line of at most ``most`` characters of a text from a file or a server.

    What cannot be printed (line ends, control characters, lone surrogates) is written as escapes.
    """
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:most]
    )
    return shown if len(text) <= most and len(shown) <= most else shown[: most - 3] + "..."


class TrivetError(Exception):
    """Base of all errors that carry a message for the user."""


class ConfigError(TrivetError):
    """A setting has a value outside what is allowed.

    ``ConfigError("threads", 0, "an integer >= 1")`` reads
    ``threads: 0 is not allowed; allowed: an integer >= 1``.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field}: {shown} is not allowed; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class CheckpointError(TrivetError):
    """A model file or folder cannot be used; names the file and, where there is one, the tensor."""

    def __init__(self, path: object, reason: str, tensor: str | None = None) -> None:
        reason = printable(reason, _MAX_REASON)
        where = printable(str(path), _MAX_PATH)
        if tensor is not None:
            where += f": tensor {printable(tensor, _MAX_NAME)}"
        super().__init__(f"{where}: {reason}")
        self.path = str(path)
        self.tensor = tensor
        self.reason = reason


class RequestError(TrivetError):
    """A request cannot be served as written.

    ``param`` names the field of the API request (None when no single field is at fault), ``status``
    is the HTTP status the gateway answers with and ``code`` OpenAI's machine-readable code; without
    one it is ``invalid_value`` for a field and ``invalid_request`` for the whole.
    """

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code or ("invalid_request" if param is None else "invalid_value")

    @classmethod
    def refused(cls, field: str, value: object, allowed: str) -> RequestError:
        """A field whose value or type is not allowed, in `ConfigError`'s words."""
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return cls(f"{field}: {shown} is not allowed; allowed: {allowed}", field)


class QuantError(TrivetError):
    """A weight cannot be quantized as asked."""


class EndpointError(TrivetError):
    """A server behind a URL cannot be used; names the address and what is wrong with the answers."""

    def __init__(self, url: str, reason: str) -> None:
        reason = printable(reason, _MAX_REASON)
        super().__init__(f"{printable(url, _MAX_PATH)}: {reason}")
        self.url = url
        self.reason = reason


class EngineError(TrivetError):
    """The engine or a worker failed; every request it held ends with this error."""
