"""OpenVINO GenAI: one request through LLMPipeline, several through ContinuousBatchingPipeline."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import serve

state: dict[str, Any] = {}


def load(message: dict[str, Any]) -> dict[str, Any]:
    properties = {"INFERENCE_NUM_THREADS": message["threads"], **message.get("properties", {})}
    # Without a scheduler of its own LLMPipeline caches prefixes.
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = message.get("max_num_batched_tokens", 4096)
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    if message["batched"]:
        state["pipeline"] = genai.ContinuousBatchingPipeline(
            message["path"], scheduler, "CPU", properties
        )
    else:
        state["pipeline"] = genai.LLMPipeline(
            message["path"], "CPU", scheduler_config=scheduler, **properties
        )
    state["batched"] = message["batched"]
    settings = {**properties, "batched": message["batched"]}
    return {"ok": True, "version": genai.__version__, "settings": settings}


def _config(output_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = output_tokens
    config.min_new_tokens = output_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


def run(message: dict[str, Any]) -> dict[str, Any]:
    pipeline, config = state["pipeline"], _config(message["output_tokens"])
    inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in message["prompts"]]
    times: list[float] = []
    start = time.perf_counter()
    if state["batched"]:
        results = pipeline.generate(inputs, [config] * len(inputs))
        total = time.perf_counter() - start
        tokens = [list(r.m_generation_ids[0]) for r in results]
        return {"first_token_s": None, "total_s": total, "tokens": tokens}

    class Stamp(genai.StreamerBase):  # type: ignore[misc]
        def write(self, token: Any) -> Any:
            times.append(time.perf_counter() - start)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    result = pipeline.generate(inputs[0], config, Stamp())
    return {
        "first_token_s": times[0],
        "total_s": times[-1],
        "tokens": [list(map(int, result.tokens[0]))],
    }


def text(message: dict[str, Any]) -> dict[str, Any]:
    return {"text": state["pipeline"].get_tokenizer().decode(message["ids"])}


if __name__ == "__main__":
    serve({"load": load, "run": run, "text": text})
