"""Bodies of API requests, typed, and what is done with each field.

Four kinds of fields: supported ones (declared below, range-checked), ones that cannot change the output
(`IGNORED`: accepted and dropped), ones that would change it and do not exist here (`UNSUPPORTED`:
refused by name unless null or a value that asks for nothing), and everything else (refused by name).
null on an optional field means absent. A body becomes either a typed object or a RequestError whose
``param`` names the field; no text is tokenized here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from trivet.errors import RequestError
from trivet.request import SamplingParams

MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_MESSAGES = 1 << 14
MAX_STOPS = 64
MAX_STOP_CHARS = 1024  # of one stop string
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 4096
MAX_STOP_IDS = 4096
MAX_TOKENS = 1 << 24  # an upper bound of any context
MAX_BIAS = 100.0
ROLES = ("system", "developer", "user", "assistant")
_INT64 = 1 << 63
_EMPTY_IN_MESSAGE = frozenset(
    {"refusal", "tool_calls", "function_call", "tool_call_id", "audio", "annotations"}
)

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""Fields that cannot change the output."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("none",),
    "functions": (),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "lora": (),
    "documents": (),
}
"""Fields that do not exist here, with the values that ask for nothing and are let through."""


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all bodies: no coercion, no unknown fields. Floats have bounds: no NaN or infinity."""


class StreamOptions(Body, frozen=True, kw_only=True):
    """``include_obfuscation`` exists only to be switched off."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body, frozen=True, kw_only=True):
    """Fields that completions and chat completions share. Defaults are OpenAI's.

    ``priority`` is vLLM's: a lower value is served earlier.
    """

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    stop: Any = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=10)] | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None

    def stops(self) -> list[str]:
        """The stop strings; [] when there are none."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def num_choices(self) -> int:
        """How many choices each prompt gets."""
        return self.n or 1

    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def logprobs_wanted(self) -> int | None:
        """How many alternatives per token: None means no log-probabilities at all."""
        raise NotImplementedError

    def sampling_params(
        self, *, vocab_size: int, max_tokens: int, seed: int, prompt_logprobs: bool = False
    ) -> SamplingParams:
        """The engine's parameters. Raises RequestError: a token id outside the vocabulary."""
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens: {min_tokens} is above the limit of {max_tokens} output tokens",
                "min_tokens",
            )
        logprobs = self.logprobs_wanted()
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=_or(self.temperature, 1.0),
            top_k=max(0, self.top_k or 0),
            top_p=_or(self.top_p, 1.0),
            min_p=self.min_p or 0.0,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_logit_bias(self.logit_bias or {}, vocab_size),
            allowed_token_ids=_allowed_ids(self.allowed_token_ids, vocab_size),
            stop_token_ids=_stop_ids(self.stop_token_ids or [], vocab_size),
            ignore_eos=bool(self.ignore_eos),
            seed=seed % (1 << 64),
            logprobs=logprobs,
            prompt_logprobs=logprobs if prompt_logprobs else None,
        )


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one per `index`; `prompt` was checked by `parse_completion`."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)


class ChatMessage(Body, frozen=True, kw_only=True):
    """One message. ``role`` and ``content`` (a string or a list of text parts) are checked apart."""

    role: str
    content: Any = None
    name: Annotated[str, Meta(max_length=256)] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None

    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[dict[str, str]]:
        """The messages as chat templates expect them: text content, ``developer`` as ``system``."""
        return [_template_message(message) for message in self.messages]


class TokenizeBody(Body, frozen=True, kw_only=True):
    """POST /tokenize: ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    def template_messages(self) -> list[dict[str, str]]:
        return [_template_message(message) for message in self.messages or []]


class DetokenizeBody(Body, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class RoleBody(Body, frozen=True, kw_only=True):
    """POST /workers/{id}/role."""

    role: str


B = TypeVar("B", bound=Body)


def parse_json(data: bytes) -> dict[str, Any]:
    """The body as an object. Raises RequestError: malformed, too deep, or not an object."""
    try:
        try:
            value = json.loads(data)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:  # an integer of thousands of digits: the field's own check refuses it
            value = json.loads(data, parse_int=_parse_int)
    except RecursionError:
        raise _not_json("is nested too deeply") from None
    except UnicodeDecodeError:
        raise _not_json("is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise _not_json(
            f"is not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos}"
        ) from None
    if not isinstance(value, dict):
        raise _not_json("must be a JSON object")
    return value


def _not_json(what: str) -> RequestError:
    return RequestError(f"the body {what}", code="invalid_json")


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) < 40 else math.inf


def parse_completion(data: bytes) -> CompletionBody:
    """Raises RequestError naming the field at fault."""
    body = _validate(CompletionBody, parse_json(data))
    _check_prompt(body.prompt)
    _check_generation(body)
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens: 0 needs echo", "max_tokens")
    return body


def parse_chat(data: bytes) -> ChatBody:
    """Raises RequestError naming the field at fault."""
    body = _validate(ChatBody, parse_json(data))
    _check_messages(body.messages)
    _check_generation(body)
    if body.max_tokens == 0:
        raise RequestError("max_tokens: 0 is not allowed; allowed: >= 1", "max_tokens")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ", "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return body


def parse_tokenize(data: bytes) -> TokenizeBody:
    """Raises RequestError naming the field at fault."""
    body = _validate(TokenizeBody, parse_json(data))
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("exactly one of prompt and messages is needed", "prompt")
    if body.prompt is not None:
        _check_text(body.prompt, "prompt")
    else:
        _check_messages(body.messages or [])
    return body


def parse_detokenize(data: bytes) -> DetokenizeBody:
    """Raises RequestError naming the field at fault."""
    return _validate(DetokenizeBody, parse_json(data))


def parse_role(data: bytes) -> RoleBody:
    """Raises RequestError naming the field at fault."""
    return _validate(RoleBody, parse_json(data))


def check_token_ids(ids: Sequence[int], param: str, vocab_size: int) -> None:
    """Raises RequestError: an id outside [0, vocab_size)."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{param}: token id {_short(bad)} is outside the vocabulary of {vocab_size}", param
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge integer"
    return text if len(text) <= 60 else text[:57] + "..."


def _known_fields(model: type[Body], fields: dict[str, Any]) -> dict[str, Any]:
    """Drop nulls of known fields and all ignored fields; refuse unsupported ones by name."""
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in UNSUPPORTED:
            if value is not None and not _asks_nothing(name, value):
                raise _unsupported(name, value)
        elif name in IGNORED or (value is None and name in model.__struct_fields__):
            continue
        elif name == "messages" and isinstance(value, list):
            kept[name] = [_known_message(index, message) for index, message in enumerate(value)]
        else:
            kept[name] = value
    return kept


def _known_message(index: int, message: Any) -> Any:
    """Drop what clients echo back with an assistant message when it is empty."""
    if not isinstance(message, dict):
        return message
    kept: dict[str, Any] = {}
    for name, value in message.items():
        if name not in _EMPTY_IN_MESSAGE:
            kept[name] = value
        elif value is not None and value != []:
            raise _unsupported(f"messages[{index}].{name}", value)
    return kept


def _unsupported(param: str, value: Any) -> RequestError:
    return RequestError(
        f"{param}: {_short(value)} is not supported by this server",
        param,
        code="unsupported_parameter",
    )


def _missing(param: str) -> RequestError:
    return RequestError(f"{param}: this field is needed", param, code="missing_required_parameter")


def _asks_nothing(name: str, value: Any) -> bool:
    return any(type(value) is type(v) and value == v for v in UNSUPPORTED[name])


def _validate(model: type[B], fields: dict[str, Any]) -> B:
    known = _known_fields(model, fields)
    try:
        return msgspec.convert(known, model)
    except msgspec.ValidationError as error:
        what, where = _split(str(error))
    except UnicodeEncodeError:
        raise _not_json("has a lone surrogate, which is no character") from None
    if field := _MISSING.fullmatch(what):
        param = _joined(where, field[1])
        raise _missing(param)
    if field := _UNKNOWN.fullmatch(what):
        param = _joined(where, field[1])
        raise RequestError(f"{param}: unknown field", param, code="unknown_parameter")
    if known.get(where) == []:
        raise RequestError(f"{where}: an empty list", where)
    reason = what.replace("Expected ", "must be ").replace("`", "").replace(" | ", " or ")
    if where in known and ", got " not in reason:
        reason += f", not {_short(known[where])}"
    raise RequestError(f"{where}: {reason}", where)


# msgspec names the fault in words only.
_FAULT = re.compile(r"(.*?)(?: - at `\$\.?([^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


def _split(message: str) -> tuple[str, str]:
    """What is wrong, and the path of the field (``messages[0].role``; "" for the body itself)."""
    found = _FAULT.fullmatch(message)
    assert found is not None  # the pattern matches any text
    return found[1], found[2] or ""


def _joined(where: str, name: str) -> str:
    """The path of a field of an object; safe to send back."""
    path = f"{where}.{name}" if where else name
    return path[:200].encode("utf-8", "replace").decode("utf-8")


def _check_text(text: str, param: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{param}: has a lone surrogate, which is no character", param) from None


def _check_prompt(prompt: Any) -> None:
    kinds = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    if isinstance(prompt, str):
        return _check_text(prompt, "prompt")
    if not isinstance(prompt, list):
        raise RequestError(f"prompt: must be {kinds}", "prompt")
    if not prompt:
        raise RequestError("prompt: an empty list", "prompt")
    if _is_ids(prompt):
        return None
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt: {len(prompt)} prompts; allowed: {MAX_PROMPTS}", "prompt")
    if all(isinstance(item, str) for item in prompt):
        for index, item in enumerate(prompt):
            _check_text(item, f"prompt[{index}]")
        return None
    if not all(isinstance(item, list) and _is_ids(item) for item in prompt):
        raise RequestError(f"prompt: must be {kinds}", "prompt")
    return None


def _is_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _check_generation(body: GenerationBody) -> None:
    stop = body.stop
    if stop is not None:
        if isinstance(stop, str):
            stop = [stop]
        if not isinstance(stop, list) or not all(isinstance(item, str) for item in stop):
            raise RequestError("stop: must be a string or a list of strings", "stop")
        if len(stop) > MAX_STOPS:
            raise RequestError(f"stop: {len(stop)} strings; allowed: {MAX_STOPS}", "stop")
        for index, item in enumerate(stop):
            _check_text(item, f"stop[{index}]")
            if not 1 <= len(item) <= MAX_STOP_CHARS:
                raise RequestError(
                    f"stop[{index}]: {len(item)} characters; allowed: 1 to {MAX_STOP_CHARS}", "stop"
                )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    if body.seed is not None and not -_INT64 <= body.seed < 2 * _INT64:
        raise RequestError(
            f"seed: {_short(body.seed)} is not an integer from {-_INT64} to {2 * _INT64 - 1}",
            "seed",
        )
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise _unsupported("stream_options.include_obfuscation", True)
    for key, value in (body.logit_bias or {}).items():
        if type(value) not in (int, float) or not -MAX_BIAS <= value <= MAX_BIAS:
            param = _joined("logit_bias", key)
            raise RequestError(
                f"{param}: {_short(value)} is not a number from {-MAX_BIAS:g} to {MAX_BIAS:g}",
                param,
            )
    if body.cache_salt is not None:
        _check_text(body.cache_salt, "cache_salt")


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages: {len(messages)} messages; allowed: {MAX_MESSAGES}", "messages"
        )
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise RequestError(
                f"{where}.role: {_short(message.role)} is not one of {', '.join(ROLES)}",
                f"{where}.role",
            )
        if message.name is not None:
            _check_text(message.name, f"{where}.name")
        content = message.content
        if content is None:
            raise _missing(f"{where}.content")
        if isinstance(content, str):
            _check_text(content, f"{where}.content")
        elif isinstance(content, list):
            for number, part in enumerate(content):
                _check_part(part, f"{where}.content[{number}]")
        else:
            raise RequestError(
                f"{where}.content: must be a string or a list of text parts", f"{where}.content"
            )


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f"{where}: must be an object with a type", where)
    if part["type"] != "text":
        raise _unsupported(f"{where}.type", part["type"])
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text: must be a string", f"{where}.text")
    _check_text(part["text"], f"{where}.text")
    for name in part:
        if name not in ("type", "text"):
            raise RequestError(
                f"{where}: unknown field {_short(name)}", where, code="unknown_parameter"
            )


def _template_message(message: ChatMessage) -> dict[str, str]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    role = "system" if message.role == "developer" else message.role
    fields = {"role": role, "content": content}
    if message.name is not None:
        fields["name"] = message.name
    return fields


def _token_ids(ids: list[int], param: str, vocab_size: int) -> list[int]:
    check_token_ids(ids, param, vocab_size)
    return ids


def _stop_ids(ids: list[int], vocab_size: int) -> list[int]:
    if len(ids) > MAX_STOP_IDS:
        raise RequestError(
            f"stop_token_ids: {len(ids)} ids; allowed: {MAX_STOP_IDS}", "stop_token_ids"
        )
    return _token_ids(ids, "stop_token_ids", vocab_size)


def _allowed_ids(ids: list[int] | None, vocab_size: int) -> list[int] | None:
    if ids is None:
        return None
    if not ids:
        raise RequestError("allowed_token_ids: an empty list", "allowed_token_ids")
    if len(ids) > vocab_size:
        raise RequestError(
            f"allowed_token_ids: {len(ids)} ids; allowed: {vocab_size}, the vocabulary",
            "allowed_token_ids",
        )
    return _token_ids(ids, "allowed_token_ids", vocab_size)


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias: {len(bias)} entries; allowed: {MAX_LOGIT_BIAS}", "logit_bias"
        )
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) >= vocab_size:
            raise RequestError(
                f"logit_bias: {_short(key)} is no token id below {vocab_size}", "logit_bias"
            )
        result[int(key)] = value
    return result
