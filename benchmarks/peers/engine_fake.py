"""A stand-in with a fixed speed and no model, for `run.py --quick`: it tests run.py, nothing else."""

from __future__ import annotations

import time
from typing import Any

from protocol import serve

TOKEN_S = 0.001


def load(message: dict[str, Any]) -> dict[str, Any]:
    return {"version": "0", "settings": message["settings"], "weight_bytes": 1}


def run(message: dict[str, Any]) -> dict[str, Any]:
    time.sleep(TOKEN_S)
    first = TOKEN_S
    time.sleep(TOKEN_S * (message["output_tokens"] - 1))
    count = message["output_tokens"]
    tokens = [(ids * count)[:count] for ids in message["prompts"]]  # the prompt again and again
    return {"first_token_s": first, "total_s": TOKEN_S * count, "tokens": tokens}


def text(message: dict[str, Any]) -> dict[str, Any]:
    return {"text": f"{len(message['ids'])} tokens"}


if __name__ == "__main__":
    serve({"load": load, "run": run, "text": text})
