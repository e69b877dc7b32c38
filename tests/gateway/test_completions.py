"""/v1/completions in detail: prompts of every form, echo, log-probabilities, n, seeds, stop strings."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.sse import post_stream
from support.toy_server import ToyTokenizer

PATH = "/v1/completions"


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(http: httpx.Client, **body: Any) -> str:
    text: str = post(http, **body)["choices"][0]["text"]
    return text


def test_forms_of_the_prompt_agree(http: httpx.Client) -> None:
    ids = ToyTokenizer().encode("hello")
    options = {"max_tokens": 6, "seed": 5}
    text = text_of(http, prompt="hello", **options)
    assert text_of(http, prompt=["hello"], **options) == text
    assert text_of(http, prompt=ids, **options) == text
    assert text_of(http, prompt=[ids], **options) == text


def test_batch_of_prompts_with_choices(http: httpx.Client) -> None:
    answer = post(http, prompt=["one", "two2"], n=3, max_tokens=8, seed=2, return_token_ids=True)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [bytes(i - 1 for i in c["prompt_token_ids"]) for c in choices] == [b"one"] * 3 + [
        b"two2"
    ] * 3
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 6
    assert answer["usage"]["prompt_tokens"] == 3 + 4
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)


def test_seed_reproduces_and_is_returned(http: httpx.Client) -> None:
    response = http.post(PATH, json={"prompt": "abc", "max_tokens": 12, "n": 2})
    answer = response.json()
    seed = answer["seed"]
    assert response.headers["x-trivet-seed"] == str(seed)
    again = post(http, prompt="abc", max_tokens=12, n=2, seed=seed)
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in answer["choices"]]
    other = post(http, prompt="abc", max_tokens=12, n=2)
    assert other["seed"] != seed
    assert post(http, prompt="abc", max_tokens=12, seed=-5)["seed"] == -5


def test_temperature_zero_ignores_the_seed(http: httpx.Client) -> None:
    texts = {text_of(http, prompt="abc", max_tokens=9, temperature=0, seed=n) for n in range(4)}
    assert len(texts) == 1


def test_echo_and_logprobs_as_lm_eval_reads_them(http: httpx.Client) -> None:
    """The wire pattern of lm-eval 0.4.13's local-completions loglikelihood."""
    contexts, continuations = [[10, 20, 30], [40, 50]], [[60, 70], [80]]
    prompts = [a + b for a, b in zip(contexts, continuations, strict=True)]
    answer = post(
        http,
        model="toy",
        prompt=prompts,
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, prompt, context in zip(choices, prompts, contexts, strict=True):
        logprobs = choice["logprobs"]
        values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
        assert len(values) == len(tops) == len(logprobs["tokens"]) == len(prompt) + 1
        assert values[0] is None
        assert tops[0] is None
        for value, top, token in zip(values[1:], tops[1:], logprobs["tokens"][1:], strict=True):
            assert top[token] == value
            assert len(top) <= 2
            assert max(top.values()) >= value
        scored = values[len(context) : -1]
        assert len(scored) == len(prompt) - len(context)
        assert values[-1] == max(tops[-1].values())  # the generated token is the greedy one
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(choice["text"])


def test_prompt_scores_do_not_depend_on_the_form(http: httpx.Client) -> None:
    body = {"max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0}
    text = "a long prompt " * 30
    [whole] = post(http, prompt=text, **body)["choices"]
    [by_ids] = post(http, prompt=ToyTokenizer().encode(text), **body)["choices"]
    assert whole["text"] == by_ids["text"] == text
    assert whole["logprobs"] == by_ids["logprobs"]
    assert len(whole["logprobs"]["tokens"]) == len(text)
    assert whole["finish_reason"] == "length"


def test_echo_without_logprobs(http: httpx.Client) -> None:
    answer = post(
        http, prompt="caf\N{LATIN SMALL LETTER E WITH ACUTE}", max_tokens=2, echo=True, seed=1
    )
    plain = post(http, prompt="caf\N{LATIN SMALL LETTER E WITH ACUTE}", max_tokens=2, seed=1)
    prefix = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
    assert answer["choices"][0]["text"] == prefix + plain["choices"][0]["text"]
    nothing = post(http, prompt="abc", max_tokens=0, echo=True)
    assert nothing["choices"][0]["text"] == "abc"
    assert nothing["usage"]["completion_tokens"] == 0


def test_stream_equals_whole(http: httpx.Client) -> None:
    body: dict[str, Any] = {
        "prompt": ["ab", "cd"],
        "n": 2,
        "max_tokens": 30,
        "seed": 4,
        "logprobs": 2,
        "echo": True,
    }
    whole = post(http, **body)["choices"]
    chunks = post_stream(http, PATH, body)
    for choice in whole:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            assert [x for part in parts for x in part["logprobs"][name]] == values, name


@pytest.mark.parametrize("start", [3, 7, 12])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_string_never_leaks(http: httpx.Client, start: int, length: int) -> None:
    body: dict[str, Any] = {"prompt": "stop test", "max_tokens": 40, "seed": 9}
    full = text_of(http, **body)
    stop = full[start : start + length]
    cut = full[: full.index(stop)]
    [choice] = post(http, stop=["never there", stop], **body)["choices"]
    assert choice["text"] == cut
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    chunks = post_stream(http, PATH, {**body, "stop": stop})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_stop_string_ends_usage_and_tokens(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 40, "seed": 21, "return_token_ids": True}
    full = post(http, **body)["choices"][0]
    stop = full["text"][10]
    answer = post(http, stop=stop, logprobs=0, **body)
    [choice] = answer["choices"]
    count = answer["usage"]["completion_tokens"]
    assert count < 40
    assert choice["token_ids"] == full["token_ids"][:count]
    assert len(choice["logprobs"]["tokens"]) == count


def test_stop_token_is_counted_and_not_shown(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "y", "max_tokens": 30, "seed": 2, "return_token_ids": True}
    ids = post(http, **body)["choices"][0]["token_ids"]
    answer = post(http, stop_token_ids=[ids[4]], **body)
    [choice] = answer["choices"]
    first = ids.index(ids[4])
    assert choice["token_ids"] == ids[: first + 1]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ids[4]
    assert answer["usage"]["completion_tokens"] == first + 1
    bytes_shown = b"".join(ToyTokenizer().token_bytes(i) for i in ids[:first])
    assert choice["text"] == bytes_shown.decode("utf-8", "ignore") or "\ufffd" in choice["text"]


def test_min_tokens_and_ignore_eos(http: httpx.Client) -> None:
    bias = {"0": 100.0}  # EOS at once
    assert post(http, prompt="z", logit_bias=bias, max_tokens=8)["usage"]["completion_tokens"] == 1
    answer = post(http, prompt="z", logit_bias=bias, max_tokens=8, min_tokens=5)
    assert answer["usage"]["completion_tokens"] == 6
    answer = post(http, prompt="z", logit_bias=bias, max_tokens=8, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["text"] == ""
    shown = post(
        http, prompt="z", logit_bias=bias, max_tokens=2, ignore_eos=True, skip_special_tokens=False
    )
    assert shown["choices"][0]["text"] == "<eos><eos>"


def test_allowed_tokens_only(http: httpx.Client) -> None:
    allowed = ToyTokenizer().encode("ab")
    text = text_of(http, prompt="q", allowed_token_ids=allowed, max_tokens=30, seed=1)
    assert set(text) <= {"a", "b"}


def test_usage_chunks(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "abcdef", "max_tokens": 10, "seed": 3}
    plain = post_stream(http, PATH, body)
    assert all("usage" not in chunk for chunk in plain)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = post_stream(http, PATH, {**body, "stream_options": options})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 10
    assert set(chunks[-1]["metrics"]) >= {"queue_time_ms", "time_to_first_token_ms"}
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert all(chunk["usage"]["prompt_tokens"] == 6 for chunk in chunks)
    only = post_stream(http, PATH, {**body, "stream_options": {"continuous_usage_stats": True}})
    assert all(chunk["choices"] for chunk in only)


def test_cached_tokens_are_true(http: httpx.Client) -> None:
    http.post("/reset_prefix_cache")
    body: dict[str, Any] = {"prompt": "cache me " * 12, "max_tokens": 2, "n": 2}
    first = post(http, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    second = post(http, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    salted = post(http, cache_salt="tenant", **body)["usage"]["prompt_tokens_details"]
    assert (first, second, salted["cached_tokens"]) == (0, 96, 0)
    freed = http.post("/reset_prefix_cache").json()["pages"]
    assert freed > 0
    [worker] = http.get("/workers").json()["workers"]
    assert worker["pages"]["cached"] == 0


def test_path_header(http: httpx.Client) -> None:
    short = http.post(PATH, json={"prompt": "x" * 40, "max_tokens": 1})
    long = http.post(PATH, json={"prompt": "y" * 300, "max_tokens": 1})
    assert short.headers["x-trivet-path"] == "local; reason=40 tokens in one step"
    assert long.headers["x-trivet-path"] == "chunked; reason=300 tokens in 2 steps"
    again = http.post(PATH, json={"prompt": "y" * 300, "max_tokens": 1})
    assert again.headers["x-trivet-path"] == "local; reason=12 tokens in one step"


def test_logprobs_zero_gives_only_the_token(http: httpx.Client) -> None:
    [choice] = post(http, prompt="k", max_tokens=3, logprobs=0, seed=1)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1, 1, 1]
