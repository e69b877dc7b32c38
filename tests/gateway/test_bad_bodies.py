"""Every field that cannot be served answers 400 in OpenAI's envelope, and names the field."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
HELLO = [{"role": "user", "content": "hello"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2},
    TEXT: {"prompt": "hello", "max_tokens": 2},
    TOKENIZE: {},
}
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]

# (path, fields laid over a good body, the field that must be named)
CASES: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": 5}, "prompt"),
    (TEXT, {"prompt": 1.5}, "prompt"),
    (TEXT, {"prompt": True}, "prompt"),
    (TEXT, {"prompt": {}}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, "prompt"),
    (TEXT, {"prompt": ["a", None]}, "prompt"),
    (TEXT, {"prompt": [1, True]}, "prompt"),
    (TEXT, {"prompt": [1, 2.0]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [10**30]}, "prompt"),
    (TEXT, {"prompt": [268]}, "prompt"),
    (TEXT, {"prompt": [[1], ["a"]]}, "prompt"),
    (TEXT, {"prompt": ["a"] * 3000}, "prompt"),
    (TEXT, {"prompt": DEEP}, "prompt"),
    (TEXT, {"prompt": "a\ud800"}, "prompt"),
    (TEXT, {"prompt": ["ok", "\udfff"]}, "prompt[1]"),
    (TEXT, {"max_tokens": 10**12}, "max_tokens"),
    (TEXT, {"max_tokens": 513}, "max_tokens"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"max_tokens": -1}, "max_tokens"),
    (TEXT, {"max_tokens": 1.5}, "max_tokens"),
    (TEXT, {"max_tokens": "7"}, "max_tokens"),
    (TEXT, {"max_tokens": True}, "max_tokens"),
    (TEXT, {"max_tokens": [1]}, "max_tokens"),
    (TEXT, {"max_completion_tokens": 3}, "max_completion_tokens"),
    (TEXT, {"min_tokens": 3}, "min_tokens"),
    (TEXT, {"min_tokens": -3}, "min_tokens"),
    (TEXT, {"temperature": -1}, "temperature"),
    (TEXT, {"temperature": "hot"}, "temperature"),
    (TEXT, {"temperature": float("nan")}, "temperature"),
    (TEXT, {"temperature": float("inf")}, "temperature"),
    (TEXT, {"temperature": 10**400}, "temperature"),
    (TEXT, {"temperature": True}, "temperature"),
    (TEXT, {"top_p": 0}, "top_p"),
    (TEXT, {"top_p": 1.01}, "top_p"),
    (TEXT, {"top_p": float("nan")}, "top_p"),
    (TEXT, {"top_k": -2}, "top_k"),
    (TEXT, {"top_k": 0.5}, "top_k"),
    (TEXT, {"min_p": -0.1}, "min_p"),
    (TEXT, {"min_p": 2}, "min_p"),
    (TEXT, {"presence_penalty": 2.5}, "presence_penalty"),
    (TEXT, {"frequency_penalty": -2.5}, "frequency_penalty"),
    (TEXT, {"repetition_penalty": 0}, "repetition_penalty"),
    (TEXT, {"repetition_penalty": -1}, "repetition_penalty"),
    (TEXT, {"n": 0}, "n"),
    (TEXT, {"n": 129}, "n"),
    (TEXT, {"n": 2.0}, "n"),
    (TEXT, {"best_of": 2}, "best_of"),
    (TEXT, {"best_of": True}, "best_of"),
    (TEXT, {"use_beam_search": True}, "use_beam_search"),
    (TEXT, {"suffix": "end"}, "suffix"),
    (TEXT, {"suffix": ""}, "suffix"),
    (TEXT, {"seed": 2**64}, "seed"),
    (TEXT, {"seed": -(2**63) - 1}, "seed"),
    (TEXT, {"seed": "7"}, "seed"),
    (TEXT, {"seed": "HUGE"}, "seed"),
    (TEXT, {"stop": 5}, "stop"),
    (TEXT, {"stop": [5]}, "stop"),
    (TEXT, {"stop": {"a": 1}}, "stop"),
    (TEXT, {"stop": ""}, "stop"),
    (TEXT, {"stop": ["ok", ""]}, "stop"),
    (TEXT, {"stop": ["x"] * 10_000}, "stop"),
    (TEXT, {"stop": "x" * 10_000}, "stop"),
    (TEXT, {"stop": ["\ud83d"]}, "stop[0]"),
    (TEXT, {"stop_token_ids": [999]}, "stop_token_ids"),
    (TEXT, {"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    (TEXT, {"stop_token_ids": [1] * 5000}, "stop_token_ids"),
    (TEXT, {"allowed_token_ids": []}, "allowed_token_ids"),
    (TEXT, {"allowed_token_ids": [1] * 300}, "allowed_token_ids"),
    (TEXT, {"allowed_token_ids": [-1]}, "allowed_token_ids"),
    (TEXT, {"logit_bias": {"a": 1}}, "logit_bias"),
    (TEXT, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (TEXT, {"logit_bias": {"268": 1}}, "logit_bias"),
    (TEXT, {"logit_bias": {"1": 101}}, "logit_bias.1"),
    (TEXT, {"logit_bias": [1]}, "logit_bias"),
    (TEXT, {"logit_bias": {str(i): 0 for i in range(5000)}}, "logit_bias"),
    (TEXT, {"logprobs": 21}, "logprobs"),
    (TEXT, {"logprobs": -1}, "logprobs"),
    (TEXT, {"logprobs": True}, "logprobs"),
    (TEXT, {"echo": "yes"}, "echo"),
    (TEXT, {"stream": 1}, "stream"),
    (TEXT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"stream": True, "stream_options": 5}, "stream_options"),
    (TEXT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (
        TEXT,
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
    (TEXT, {"ignore_eos": "no"}, "ignore_eos"),
    (TEXT, {"priority": 10**20}, "priority"),
    (TEXT, {"cache_salt": 5}, "cache_salt"),
    (TEXT, {"cache_salt": "\ud800"}, "cache_salt"),
    (TEXT, {"prompt_logprobs": 1}, "prompt_logprobs"),
    (TEXT, {"guided_json": {}}, "guided_json"),
    (TEXT, {"messages": HELLO}, "messages"),
    (TEXT, {"temprature": 1}, "temprature"),
    (TEXT, {"unknown": None}, "unknown"),
    (TEXT, {"model": 7}, "model"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": HELLO * 20_000}, "messages"),
    (CHAT, {"messages": ["hello"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 3}, "max_tokens"),
    (CHAT, {"logprobs": 5}, "logprobs"),
    (CHAT, {"top_logprobs": 5}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"tools": []}, "tools"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"functions": []}, "functions"),
    (CHAT, {"function_call": "auto"}, "function_call"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"prediction": {}}, "prediction"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"prompt": "x"}, "prompt"),
    (TOKENIZE, {}, "prompt"),
    (TOKENIZE, {"prompt": "a", "messages": HELLO}, "prompt"),
    (TOKENIZE, {"prompt": 5}, "prompt"),
    (TOKENIZE, {"prompt": "\ud800"}, "prompt"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens"),
    ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
    ("/detokenize", {}, "tokens"),
    ("/workers/w0/role", {"role": "prefill"}, "role"),
    ("/workers/w0/role", {"role": 5}, "role"),
]


# The code of an error that names a field.
FIELD_CODES = (
    "invalid_value", "missing_required_parameter", "unknown_parameter", "unsupported_parameter",
)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": -1}, "invalid_value"),
        ({"max_tokens": 513}, "invalid_value"),
        ({"prompt": [-1]}, "invalid_value"),
        ({"prompt": []}, "invalid_value"),
        ({"stop": 5}, "invalid_value"),
        ({"prompt": None}, "missing_required_parameter"),
        ({"temprature": 1}, "unknown_parameter"),
        ({"suffix": "end"}, "unsupported_parameter"),
    ],
)
def test_the_code_says_what_is_wrong_with_the_field(
    http: httpx.Client, fields: dict[str, Any], code: str
) -> None:
    response = http.post(TEXT, json={**BASE[TEXT], **fields})
    assert _assert_envelope(response, 400)["code"] == code


def test_codes_of_messages(http: httpx.Client) -> None:
    part = {"type": "text", "text": "x", "extra": 1}
    for message, code in (
        ({"role": "user"}, "missing_required_parameter"),
        ({"role": "robot", "content": "x"}, "invalid_value"),
        ({"role": "user", "content": [part]}, "unknown_parameter"),
        ({"role": "user", "content": "refuse"}, "invalid_value"),  # by the template
    ):
        response = http.post(CHAT, json={"messages": [message]})
        assert _assert_envelope(response, 400)["code"] == code, message


def _assert_envelope(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    assert re.fullmatch(r"[a-z]+(_[a-z]+)+", error["code"]), error
    return error


def test_bad_field_is_named(http: httpx.Client) -> None:
    assert len(CASES) > 100
    for path, fields, param in CASES:
        body = json.dumps({**BASE.get(path, {}), **fields}).replace('"HUGE"', "9" * 5000)
        response = http.post(path, content=body)
        assert response.status_code == 400, (fields, response.text)
        error = _assert_envelope(response, 400)
        assert error["param"] == param, (fields, error)
        assert error["type"] == "invalid_request_error"
        assert error["code"] in FIELD_CODES, (fields, error)


def test_an_empty_conversation_is_refused_in_plain_words(http: httpx.Client) -> None:
    response = http.post(CHAT, content=json.dumps({"messages": []}))
    assert _assert_envelope(response, 400)["message"] == "messages: an empty list"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'"text"',
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\x00"}',
        b'{"a":' * 5000,
        b'{"seed": ' + b"9" * 5000 + b', "x":}',
        b'{"seed": ' + b"9" * 5000 + b"[" * 100_000,
        b"[" * 100_000,
        b'{"prompt": "x", "max_tokens": 1e}',
    ],
)
@pytest.mark.parametrize("path", [TEXT, CHAT, TOKENIZE])
def test_malformed_body(http: httpx.Client, path: str, body: bytes) -> None:
    error = _assert_envelope(http.post(path, content=body), 400)
    if error["param"] is None:
        assert error["code"] == "invalid_json"


def test_prompt_beyond_context_states_both_numbers(http: httpx.Client) -> None:
    error = _assert_envelope(http.post(TEXT, json={"prompt": "x" * 600}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "600" in error["message"]
    assert "512" in error["message"]
    message = [{"role": "user", "content": "x" * 600}]
    error = _assert_envelope(http.post(CHAT, json={"messages": message}), 400)
    assert error["param"] == "messages"
    assert "512" in error["message"]


def test_text_far_beyond_context_is_not_tokenized(http: httpx.Client) -> None:
    """The toy tokenizer breaks on texts of this length; tokenizing megabytes takes minutes."""
    text = "x" * 300_000
    most = str(512 * 200 * 2)
    for path, body, field in (
        (TEXT, {"prompt": text}, "prompt"),
        (TEXT, {"prompt": ["x", text]}, "prompt"),
        (TOKENIZE, {"prompt": text}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        error = _assert_envelope(http.post(path, json=body), 400)
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        assert most in error["message"]
        assert "512" in error["message"]


def test_other_model_is_404(http: httpx.Client) -> None:
    error = _assert_envelope(http.post(TEXT, json={"model": "gpt-4", "prompt": "x"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    _assert_envelope(http.get("/v1/models/gpt-4"), 404)


def test_unknown_path_and_method(http: httpx.Client) -> None:
    _assert_envelope(http.get("/v1/nothing"), 404)
    _assert_envelope(http.get(TEXT), 405)
    _assert_envelope(http.post("/v1/responses", json={"input": "x"}), 400)
    _assert_envelope(http.post("/workers/w7/role", json={"role": "mixed"}), 404)


def test_fields_that_change_nothing_are_accepted(http: httpx.Client) -> None:
    ignored = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "temperature": 0,
    }
    assert http.post(CHAT, json={**BASE[CHAT], **ignored}).status_code == 200
    assert http.post(TEXT, json={**BASE[TEXT], "best_of": 1}).status_code == 200


def test_null_means_absent(http: httpx.Client) -> None:
    names = [
        "model",
        "n",
        "stream",
        "stream_options",
        "seed",
        "stop",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "logprobs",
        "tools",
        "suffix",
        "best_of",
        "user",
        "response_format",
        "ignore_eos",
        "stop_token_ids",
        "echo",
        "guided_json",
    ]
    body: dict[str, Any] = {**dict.fromkeys(names), "prompt": "hello"}
    answer = http.post(TEXT, json=body).json()
    count, reason = answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]
    assert count == 16 if reason == "length" else count <= 16
    message: dict[str, Any] = {
        "role": "user",
        "content": "x",
        "name": None,
        "tool_calls": None,
        "refusal": None,
        "annotations": [],
    }
    chat_names = [name for name in names if name not in ("suffix", "best_of", "echo")]
    body = {**dict.fromkeys(chat_names), "messages": [message], "max_completion_tokens": 3}
    answer = http.post(CHAT, json={**body, "seed": 1}).json()
    assert answer["usage"]["completion_tokens"] == 3
