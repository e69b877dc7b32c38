"""Many streams at once, some of whose clients leave: at the end every KV page must be free.

    python benchmarks/soak.py --model demo --seconds 60 --concurrency 64 --leave 0.2 -o soak.json
    python benchmarks/soak.py --url http://127.0.0.1:8000 --seconds 60

Starts a server of its own unless ``--url`` names one. Every stream must end in ``[DONE]`` or be left by
its client. Prompts are distinct natural text (the topics of pydoc). The last line of standard output is
the result as JSON; the exit code is 1 when a stream failed or a page is not free.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pydoc_data.topics
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from trivet.bench.machine import describe_machine
from trivet.config import KVFormat, ModelConfig, ServerConfig
from trivet.gateway import LocalServer

SETTLE_S = 10.0  # time for the server to notice the last clients that left
_TEXT = " ".join(" ".join(text.split()) for _, text in sorted(pydoc_data.topics.topics.items()))


class Soak:
    """The load and what became of it."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url = url
        self.options = options
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.num_tokens = 0
        self.first_token_s: list[float] = []

    async def run(self) -> dict[str, Any]:
        """Load for the asked time, then look at the pages."""
        options = self.options
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.concurrency)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=120, limits=limits, trust_env=False
        ) as client:
            started = time.monotonic()
            end = started + options.seconds
            await asyncio.gather(
                *(self._stream_until(client, end, number) for number in range(options.concurrency))
            )
            seconds = time.monotonic() - started
            workers = await self._settled(client)
            await client.post("/reset_prefix_cache")
            after = (await client.get("/workers")).json()["workers"]
        are_free = all(
            pages["used"] == pages["cached"] == pages["leased"] == 0 < pages["free"]
            for pages in (worker["pages"] for worker in after)
        )
        first = sorted(self.first_token_s)
        return {
            "model": options.url or options.model,
            "seconds": round(seconds, 3),
            "concurrency": options.concurrency,
            "leave": options.leave,
            "seed": options.seed,
            "requests": sum(self.counts.values()),
            "completed": self.counts["completed"],
            "left": self.counts["left"],
            "failed": self.counts["failed"],
            "errors": self.errors[:10],
            "output_tokens": self.num_tokens,
            "out_tok_s": round(self.num_tokens / seconds, 1),
            "ttft_p50_s": round(first[len(first) // 2], 4) if first else None,
            "workers_at_rest": workers,
            "workers_after_reset": after,
            "all_pages_free": are_free,
            "machine": describe_machine(),
        }

    async def _settled(self, client: httpx.AsyncClient) -> list[dict[str, Any]]:
        """The workers once nothing runs; as they are when that takes too long."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            workers: list[dict[str, Any]] = (await client.get("/workers")).json()["workers"]
            is_idle = all(w["running"] == w["queue"] == w["pages"]["used"] == 0 for w in workers)
            if is_idle or time.monotonic() > deadline:
                return workers
            await asyncio.sleep(0.02)

    async def _stream_until(self, client: httpx.AsyncClient, end: float, number: int) -> None:
        rng = random.Random(f"{self.options.seed}-{number}")
        while time.monotonic() < end:
            try:
                self.counts[await self._one_stream(client, rng)] += 1
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self.counts["failed"] += 1
                self.errors.append(f"{type(error).__name__}: {error}"[:300])

    async def _one_stream(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        start = rng.randrange(len(_TEXT) - 500)
        max_tokens = rng.randint(8, self.options.max_tokens)
        body = {
            "prompt": _TEXT[start : start + rng.randint(20, self.options.prompt_chars)],
            "max_tokens": max_tokens,
            "stream": True,
            "seed": rng.randrange(1 << 31),
            "stream_options": {"include_usage": True},
        }
        leaves_after = rng.randint(0, max_tokens) if rng.random() < self.options.leave else None
        sent, num_chunks = time.monotonic(), 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, f"status {response.status_code}"
            last: dict[str, Any] = {}
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    self.num_tokens += last["usage"]["completion_tokens"]
                    return "completed"
                last = json.loads(line.removeprefix("data: "))
                assert "error" not in last, str(last)
                if num_chunks == 0:
                    self.first_token_s.append(time.monotonic() - sent)
                num_chunks += 1
                if leaves_after is not None and num_chunks > leaves_after:
                    return "left"
        raise AssertionError("the stream ended without [DONE]")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", help="a running server; otherwise one is started")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--leave", type=float, default=0.2, help="share of clients that leave")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-chars", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, help="also write the JSON here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; returns the exit code."""
    options = parse(arguments)
    with contextlib.ExitStack() as stack:
        url = options.url
        if url is None:
            model = ModelConfig(
                model=options.model, weights=options.weights, kv=KVFormat.parse(options.kv)
            )
            url = stack.enter_context(LocalServer(ServerConfig(model=model, port=0))).url
        result = asyncio.run(Soak(url, options).run())
    text = json.dumps(result)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if result["all_pages_free"] and not result["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
