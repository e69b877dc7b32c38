"""vLLM's CPU backend in this one process, driven step by step."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}

from protocol import serve

DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_num_batched_tokens": 4608,
    "kv_cache_dtype": "auto",
}
state: dict[str, Any] = {}


def load(message: dict[str, Any]) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[: message["threads"]]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    import vllm

    settings = DEFAULTS | message["settings"]
    state["llm"] = vllm.LLM(
        message["path"],
        max_model_len=message["context"],
        max_num_seqs=64,
        enable_prefix_caching=False,
        **settings,
    )
    state["next_id"] = 0
    return {"version": vllm.__version__, "settings": settings | {"threads": len(cores)}}


def _params(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **options)


def run(message: dict[str, Any]) -> dict[str, Any]:
    engine = state["llm"].llm_engine
    count = message["output_tokens"]
    names: list[str] = []
    start = time.perf_counter()
    for ids in message["prompts"]:
        names.append(str(state["next_id"]))
        state["next_id"] += 1
        engine.add_request(names[-1], {"prompt_token_ids": ids}, _params(max_tokens=count))
    tokens: dict[str, list[int]] = {}
    first = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if first is None and len(tokens) == len(names):
            first = time.perf_counter() - start
    total = time.perf_counter() - start
    return {"first_token_s": first, "total_s": total, "tokens": [tokens[n] for n in names]}


def nll(message: dict[str, Any]) -> dict[str, Any]:
    ids = message["ids"]
    params = _params(max_tokens=1, prompt_logprobs=0)
    prompt = {"prompt_token_ids": ids}
    [output] = state["llm"].generate([prompt], params, use_tqdm=False)
    entries = output.prompt_logprobs[1:]
    return {"nll": [-entry[t].logprob for entry, t in zip(entries, ids[1:], strict=True)]}


def text(message: dict[str, Any]) -> dict[str, Any]:
    return {"text": state["llm"].get_tokenizer().decode(message["ids"])}


if __name__ == "__main__":
    serve({"load": load, "run": run, "text": text, "nll": nll})
