"""Trivet's own engine behind the same protocol, through the public Python API."""

from __future__ import annotations

import time
from typing import Any

from protocol import serve

import trivet
from trivet import LLM, SamplingParams

state: dict[str, Any] = {}


def load(message: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "weights": message["weights"],
        "kv": message["kv"],
        "threads": message["threads"],
        "max_num_seqs": 64,
        "max_step_tokens": 2048,
        "max_prefill_chunk": None,
        "prefix_cache": False,
    }
    state["llm"] = LLM(message["path"], **settings)
    return {"ok": True, "version": trivet.__version__, "settings": settings}


def run(message: dict[str, Any]) -> dict[str, Any]:
    llm, count = state["llm"], message["output_tokens"]
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    if len(message["prompts"]) == 1:
        first, tokens = None, []
        for delta in llm.stream(message["prompts"][0], params):
            if first is None and delta.token_ids:
                first = time.perf_counter() - start
            tokens += delta.token_ids
        return {"first_token_s": first, "total_s": time.perf_counter() - start, "tokens": [tokens]}
    outputs = llm.generate(message["prompts"], params)
    total = time.perf_counter() - start
    return {"first_token_s": None, "total_s": total, "tokens": [o.token_ids for o in outputs]}


def text(message: dict[str, Any]) -> dict[str, Any]:
    return {"text": state["llm"].model.tokenizer.decode(message["ids"])}


if __name__ == "__main__":
    serve({"load": load, "run": run, "text": text})
