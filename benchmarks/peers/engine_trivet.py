"""Trivet's own engine behind the same protocol, through the public Python API."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from protocol import serve

import trivet
from trivet import LLM, SamplingParams
from trivet.config import PAGE_TOKENS
from trivet.evaluate.scoring import LogSoftmax, Scorer

DEFAULTS: dict[str, Any] = {
    "kv": "bf16",
    "max_num_seqs": 64,
    "max_step_tokens": 2048,
    "max_prefill_chunk": None,
    "prefix_cache": False,
    "kv_bytes": 1 << 30,
}
state: dict[str, Any] = {}


def load(message: dict[str, Any]) -> dict[str, Any]:
    settings = DEFAULTS | {"weights": message["weights"], "threads": message["threads"]}
    settings |= message["settings"]
    start = time.perf_counter()
    llm = state["llm"] = LLM(message["path"], **settings)
    return {
        "version": trivet.__version__,
        "settings": settings,
        "form": llm.model.weights_form,
        "weight_bytes": llm.model.packed.weight_bytes,
        "kv_bytes_per_token": llm.model.kv_bytes_per_token,
        "load_s": time.perf_counter() - start,
    }


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


def nll(message: dict[str, Any]) -> dict[str, Any]:
    ids, model = message["ids"], state["llm"].model
    if "scorer" not in state:
        state["scorer"] = Scorer(model.runner, model.new_arena(-(-len(ids) // PAGE_TOKENS)))
    result: list[float] = []
    for logits in state["scorer"].chunks(ids[:-1], len(ids) - 1):
        start = 1 + len(result)
        targets = np.asarray(ids[start : start + len(logits)], np.int64)
        own = LogSoftmax.of(logits)
        result += (own.log_sum - own.shifted[np.arange(len(targets)), targets]).tolist()
    return {"nll": result}


def text(message: dict[str, Any]) -> dict[str, Any]:
    return {"text": state["llm"].model.tokenizer.decode(message["ids"])}


if __name__ == "__main__":
    serve({"load": load, "run": run, "text": text, "nll": nll})
