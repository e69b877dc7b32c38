"""The OpenAI client library, unmodified: sync, streaming, async; and plain curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess

import openai
import pytest

from trivet.gateway import LocalServer


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("toy", "model", "trivet")
    assert model.model_dump()["root"] == "toy"
    assert model.model_dump()["max_model_len"] == 512
    assert client.models.retrieve("toy").id == "toy"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="hello", max_tokens=5, seed=3)
    [choice] = answer.choices
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == 10
    assert answer.model_dump()["seed"] == 3


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        ],
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
        user="someone",
    )
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.system_fingerprint is not None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 4
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.token == token.top_logprobs[0].token  # temperature 0 takes the best
        assert token.logprob == token.top_logprobs[0].logprob
        assert token.bytes is not None


def test_chat_stream_equals_whole(client: openai.OpenAI) -> None:
    fields = {
        "model": "toy",
        "messages": [{"role": "user", "content": "tell me"}],
        "max_tokens": 40,
        "seed": 11,
    }
    whole = client.chat.completions.create(**fields)  # type: ignore[call-overload]
    pieces = []
    with client.chat.completions.create(stream=True, **fields) as stream:  # type: ignore[call-overload]
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1


def test_include_usage(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=6,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_errors_become_typed_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="toy", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_async_client(server: LocalServer) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model="toy", prompt=f"p{n}", max_tokens=3, seed=n)
                    for n in range(8)
                )
            )
            assert all(answer.choices[0].finish_reason for answer in answers)
            stream = await client.completions.create(
                model="toy", prompt="x", max_tokens=5, stream=True, seed=1
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            again = await client.completions.create(model="toy", prompt="x", max_tokens=5, seed=1)
            assert text == again.choices[0].text

    asyncio.run(run())


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: LocalServer) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
    command = ["curl", "-sS", "--fail", f"{server.url}/v1/chat/completions", "-d", body]
    command += ["-H", "Content-Type: application/json", "-H", "Authorization: Bearer x"]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    streamed = subprocess.run(
        [*command[:-5], json.dumps({**json.loads(body), "stream": True}), *command[-4:]],
        capture_output=True,
        check=True,
    ).stdout
    assert streamed.endswith(b"data: [DONE]\n\n")
