"""One toy server for the tests that need no settings of their own, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from support.toy_server import toy_server
from trivet.gateway import LocalServer


@pytest.fixture(scope="session")
def server() -> Iterator[LocalServer]:
    with toy_server() as running:
        yield running


@pytest.fixture
def http(server: LocalServer) -> Iterator[httpx.Client]:
    """A plain client; afterwards no request runs and no page is in use."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
        workers = client.get("/workers").json()["workers"]
    for worker in workers:
        assert worker["running"] == worker["queue"] == 0
        assert worker["pages"]["used"] == 0


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
