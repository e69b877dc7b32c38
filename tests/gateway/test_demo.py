"""The demo model behind the server: the same token ids as `trivet.LLM`, and true prompt scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.data import demo_file
from trivet import LLM, SamplingParams
from trivet.config import KVFormat, ModelConfig, ServerConfig
from trivet.gateway import LocalServer

pytestmark = pytest.mark.demo
SETTINGS: dict[str, Any] = {"weights": "w4a8-g32-min", "max_model_len": 512}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    demo_file()
    config = ServerConfig(
        model=ModelConfig(model="demo", kv=KVFormat.INT8, **SETTINGS),
        port=0,
        max_num_seqs=8,
        draft="ngram",
    )
    with LocalServer(config) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    demo_file()
    with LLM("demo", kv="int8", max_num_seqs=8, **SETTINGS) as model:
        yield model


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_same_ids_as_in_process(http: httpx.Client, llm: LLM, temperature: float) -> None:
    """With n-gram speculation in the server and none in process."""
    prompts = ["One two three four five, one two three four", "The capital of France is"]
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5, logprobs=1)
    expected = llm.generate(prompts, params)
    body = {
        "prompt": prompts,
        "temperature": temperature,
        "max_tokens": 24,
        "seed": 5,
        "logprobs": 1,
        "return_token_ids": True,
    }
    answer = http.post("/v1/completions", json=body).json()
    for choice, output in zip(answer["choices"], expected, strict=True):
        assert choice["token_ids"] == output.token_ids
        assert choice["text"] == output.text
        assert choice["finish_reason"] == output.finish_reason
        assert output.logprobs is not None
        values = [entry.logprob for entry in output.logprobs]
        assert choice["logprobs"]["token_logprobs"] == values


def test_chat_uses_the_template(http: httpx.Client, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=12))
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["prompt_token_ids"] == output.prompt_token_ids
    assert choice["token_ids"] == output.token_ids
    assert choice["message"]["content"] == output.text


def test_prompt_scores_equal_generation_scores(http: httpx.Client) -> None:
    """Echoed log-probabilities of generated tokens are those they were generated with."""
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 10, "logprobs": 1}
    [made] = http.post("/v1/completions", json={**body, "return_token_ids": True}).json()["choices"]
    ids = made["prompt_token_ids"] + made["token_ids"]
    echo = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
    [scored] = http.post("/v1/completions", json=echo).json()["choices"]
    count = len(made["token_ids"])
    assert scored["logprobs"]["token_logprobs"][-count:] == made["logprobs"]["token_logprobs"]
    assert scored["logprobs"]["tokens"][-count:] == made["logprobs"]["tokens"]


def test_tokenizer_round_trip(http: httpx.Client) -> None:
    text = "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{ROCKET} \u6f22\u5b57\n  x"
    ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "im_start" in info["chat_template"]
