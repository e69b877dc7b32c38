"""Reading server-sent events in tests."""

from __future__ import annotations

import json
from typing import Any

import httpx


def post_stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream that ends properly."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [block for block in response.text.split("\n\n") if block]
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
