"""llama.cpp through llama-cpp-python, driven at the level of evaluated batches of token ids."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
import numpy as np
from protocol import serve

state: dict[str, Any] = {}


def load(message: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "n_ctx": message["context"],
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_threads": message["threads"],
        "n_threads_batch": message["threads"],
        "flash_attn": message.get("flash_attn", False),
    }
    state["model"] = llama_cpp.Llama(message["path"], verbose=False, **settings)
    info = llama_cpp.llama_print_system_info().decode()
    return {"ok": True, "version": llama_cpp.__version__, "settings": settings, "system": info}


def run(message: dict[str, Any]) -> dict[str, Any]:
    model = state["model"]
    if len(message["prompts"]) != 1:
        raise ValueError("one prompt at a time")
    model.reset()
    start = time.perf_counter()
    model.eval(message["prompts"][0])
    token = _argmax(model)
    first = time.perf_counter() - start
    tokens = [token]
    for _ in range(message["output_tokens"] - 1):
        model.eval([token])
        token = _argmax(model)
        tokens.append(token)
    return {"first_token_s": first, "total_s": time.perf_counter() - start, "tokens": [tokens]}


def _argmax(model: Any) -> int:
    pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return int(np.argmax(np.ctypeslib.as_array(pointer, shape=(model.n_vocab(),))))


def text(message: dict[str, Any]) -> dict[str, Any]:
    return {"text": state["model"].detokenize(message["ids"]).decode(errors="replace")}


if __name__ == "__main__":
    serve({"load": load, "run": run, "text": text})
