"""Tokenizer endpoints, workers, health, metrics, request ids, CORS, key and body limit."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from http.client import HTTPConnection

import httpx
import pytest

from support.toy_server import toy_server
from trivet.gateway import LocalServer


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "abc", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [98, 99, 100],
        "token_strs": ["a", "b", "c"],
    }
    assert http.post("/detokenize", json={"tokens": [98, 99]}).json() == {"prompt": "ab"}
    messages = [{"role": "user", "content": "hi"}]
    chat = http.post("/tokenize", json={"messages": messages}).json()
    text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "user: hi\nassistant:"
    bare = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})
    assert bare.json()["count"] == chat["count"] - len("assistant:")


def test_tokenizer_info_and_version(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<eos>"
    assert info["chat_template"] == "toy"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", http.get("/version").json()["version"])


def test_workers(http: httpx.Client) -> None:
    [worker] = http.get("/workers").json()["workers"]
    assert (worker["id"], worker["role"], worker["state"], worker["queue"]) == (
        "w0",
        "mixed",
        "ready",
        0,
    )
    pages = worker["pages"]
    assert set(pages) == {"free", "used", "cached", "leased"}
    assert sum(pages.values()) == 256
    assert http.post("/workers/w0/role", json={"role": "mixed"}).json()["id"] == "w0"


def test_request_id_is_echoed(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    first = http.get("/health").headers["x-request-id"]
    assert first != http.get("/health").headers["x-request-id"]
    bad = http.post("/v1/completions", content=b"{", headers={"x-request-id": "r2"})
    assert bad.headers["x-request-id"] == "r2"
    odd = http.get("/health", headers={"x-request-id": "x" * 300})
    assert odd.headers["x-request-id"] != "x" * 300


def test_cors(http: httpx.Client) -> None:
    preflight = http.options(
        "/v1/chat/completions",
        headers={
            "origin": "https://example.org",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "*"
    answer = http.get("/v1/models", headers={"origin": "https://example.org"})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "x-trivet-path" in answer.headers["access-control-expose-headers"]


def test_metrics(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "measure", "max_tokens": 4, "seed": 1})
    text = http.get("/metrics").text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    labels = '{engine="0",model_name="toy"}'
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ):
        assert name + labels in values
    assert values["vllm:prompt_tokens_total" + labels] >= 7
    assert values["vllm:generation_tokens_total" + labels] >= 4
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
    ):
        assert values[name + '_count{model_name="toy"}'] >= 1, name
    assert values["vllm:iteration_tokens_total_sum" + labels] >= 10
    assert values["trivet:step_seconds_count" + labels] >= 4
    success = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="toy"}'
    assert values[success] >= 1
    assert "vllm:cache_config_info{" in text


def test_key_is_needed() -> None:
    with toy_server(api_key="secret") as server, httpx.Client(base_url=server.url) as client:
        for path in ("/v1/models", "/workers", "/tokenizer_info"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            wrong = client.get(path, headers={"authorization": "Bearer other"})
            assert wrong.status_code == 401
            right = client.get(path, headers={"authorization": "Bearer secret"})
            assert right.status_code == 200
            lower = client.get(path, headers={"authorization": "bearer secret"})
            assert lower.status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert client.get(path).status_code == 200
        assert "secret" not in repr(server)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_limit(is_chunked: bool) -> None:
    with toy_server(max_body_bytes=2000) as server, httpx.Client(base_url=server.url) as client:
        body = b'{"prompt": "' + b"x" * 5000 + b'"}'
        content = iter([body]) if is_chunked else body
        answer = client.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert client.get("/health").status_code == 200


def test_a_client_that_sends_too_much_reads_the_answer() -> None:
    """It writes the whole body before it reads: 8 MB are more than any socket holds."""
    with toy_server(max_body_bytes=2000) as server:
        url = httpx.URL(server.url)
        with contextlib.closing(HTTPConnection(url.host, url.port)) as client:
            client.request("POST", "/v1/completions", body=b"x" * (8 << 20))
            answer = client.getresponse()
            assert answer.status == 413
            assert json.loads(answer.read())["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "GZIP", "gzip, identity", "br"])
def test_a_compressed_body_is_refused_by_name(coding: str) -> None:
    with toy_server() as server, httpx.Client(base_url=server.url) as client:
        body = gzip.compress(b'{"prompt": "hello", "max_tokens": 2}')
        answer = client.post("/v1/completions", content=body, headers={"content-encoding": coding})
        assert answer.status_code == 415
        error = answer.json()["error"]
        assert error["code"] == "unsupported_content_encoding"
        assert repr(coding) in error["message"]
        assert answer.headers["accept-encoding"] == "identity"
        plain = client.post(
            "/v1/completions",
            json={"prompt": "hello", "max_tokens": 2},
            headers={"content-encoding": "Identity"},
        )
        assert plain.status_code == 200


def test_two_workers_share_the_load() -> None:
    with toy_server(workers="mixed:2") as server, httpx.Client(base_url=server.url) as client:
        answer = client.post(
            "/v1/completions",
            json={"prompt": ["a", "b", "c", "d"], "max_tokens": 20, "n": 2, "seed": 1},
        ).json()
        assert len(answer["choices"]) == 8
        text = client.get("/metrics").text
        counts = dict(
            re.findall(
                r'vllm:generation_tokens_total\{engine="(\d)",model_name="toy"\} (\S+)', text
            )
        )
        assert all(float(counts[engine]) > 0 for engine in "01")


def test_server_url(server: LocalServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")


def test_long_texts_and_lists_do_not_stop_other_clients(http: httpx.Client) -> None:
    """What takes long is done beside the event loop: the answers stay the same."""
    ids = [65, 66, 67] * 10_000
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert http.post("/tokenize", json={"prompt": text}).json()["count"] > 0
    short = http.post("/detokenize", json={"tokens": ids[:3]}).json()["prompt"]
    assert text == short * 10_000
    message = {"role": "user", "content": "hello"}
    counts = [
        http.post("/tokenize", json={"messages": [message] * count}).json()["count"]
        for count in (1, 2, 12_000)
    ]
    assert counts[2] == counts[0] + (counts[1] - counts[0]) * 11_999
    bad = http.post("/detokenize", json={"tokens": [*ids, 10**9]})
    assert bad.status_code == 400
