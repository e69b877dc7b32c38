"""At least 2,000 mutated bodies: never a 500, never a hang, always an answer in the right form."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx

from trivet.gateway import LocalServer

NUM_BODIES = 2400
CONNECTIONS = 8

WEIRD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    10**12,
    10**30,
    -(10**400),
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "\ud800",
    "\x00",
    "\N{ROCKET}" * 50,
    "a" * 5000,
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    ["a", "b"],
    [1, 2, 3],
    [[1], [2]],
    {"a": {"b": [1]}},
    {"type": "text"},
    {"1": 5},
    [{"role": "user", "content": "x"}],
    [{"type": "text", "text": "x"}],
    ["x"] * 100,
]
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 2, "logprobs": 1, "echo": True}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 3, "n": 2, "stop": ["a", "b"]}),
    (
        "/v1/completions",
        {
            "prompt": "x",
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "logit_bias": {"5": 1.0},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
            ],
            "max_tokens": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_completion_tokens": 2,
            "stream": True,
            "tools": None,
            "stop": "q",
            "presence_penalty": 1,
            "top_k": 5,
            "min_p": 0.1,
        },
    ),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """One body: fields replaced, dropped, renamed or added at any depth, or bytes broken."""
    path, seed = rng.choice(SEEDS)
    body: Any = json.loads(json.dumps(seed))
    for _ in range(rng.choice([1, 1, 2, 3])):
        body = _mutate(rng, body)
    if path.startswith("/v1") and isinstance(body, dict) and body.get("max_tokens") is None:
        body["max_tokens"] = 2  # keep what is still good short
    data = bytearray(json.dumps(body).encode())
    if rng.random() < 0.15:
        for _ in range(rng.randint(1, 5)):
            position = rng.randrange(len(data) + 1)
            if rng.random() < 0.5 and position < len(data):
                data[position] = rng.randrange(256)
            else:
                data[position:position] = rng.choice([b"[", b"{", b'"', b"\\u", b"\xff", b"1e9"])
    return path, bytes(data)


def _mutate(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.8:
        copy = dict(value)
        name = rng.choice(list(copy))
        kind = rng.random()
        if kind < 0.5:
            copy[name] = rng.choice(WEIRD)
        elif kind < 0.6:
            del copy[name]
        elif kind < 0.7:
            copy[name + rng.choice(["x", "\ud800", ""])] = copy.pop(name)
        elif kind < 0.8:
            copy[rng.choice(["n", "stop", "seed", "tools", "zz", "echo"])] = rng.choice(WEIRD)
        else:
            copy[name] = _mutate(rng, copy[name])
        return copy
    if isinstance(value, list) and value and rng.random() < 0.8:
        items = list(value)
        index = rng.randrange(len(items))
        items[index] = _mutate(rng, items[index])
        return items
    return rng.choice(WEIRD)


def _post_all(url: str, bodies: Iterable[tuple[str, bytes]]) -> Counter[int]:
    """Post the bodies over one connection; count the statuses and check the form of each answer."""
    address = urlsplit(url)
    assert address.hostname is not None
    statuses: Counter[int] = Counter()
    connection = HTTPConnection(address.hostname, address.port, timeout=30)
    with contextlib.closing(connection):
        for path, body in bodies:
            connection.request("POST", path, body)
            response = connection.getresponse()
            text = response.read()
            statuses[response.status] += 1
            assert response.status in (200, 400, 404), (path, body, text)
            if response.status != 200:
                error = json.loads(text)["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert isinstance(error["code"], str)
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert text.endswith(b"data: [DONE]\n\n"), body
    return statuses


def test_mutated_bodies(server: LocalServer, http: httpx.Client) -> None:
    rng = random.Random(0)
    bodies = [mutated(rng) for _ in range(NUM_BODIES)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        parts = [bodies[start::CONNECTIONS] for start in range(CONNECTIONS)]
        statuses = sum(pool.map(lambda part: _post_all(server.url, part), parts), Counter())
    assert sum(statuses.values()) == NUM_BODIES
    assert statuses[400] > NUM_BODIES // 3
    assert statuses[200] > NUM_BODIES // 20
    assert http.get("/health").status_code == 200
