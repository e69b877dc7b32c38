"""OpenVINO GenAI on a GGUF file that OpenVINO's own reader turned into its graph format (once).

Setting ``pipeline``: "paged" is ContinuousBatchingPipeline with paged attention, for any batch; "plain"
is LLMPipeline with its stateful attention (ATTENTION_BACKEND=SDPA), for one prompt.
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import serve

SCHEDULER = ("cache_size", "max_num_batched_tokens", "dynamic_split_fuse")
DEFAULTS: dict[str, Any] = {
    "pipeline": "paged",
    "cache_size": 2,
    "max_num_batched_tokens": 4096,
    "dynamic_split_fuse": True,
}
state: dict[str, Any] = {}


def _graph(source: Path) -> Path:
    """The folder with OpenVINO's graph of a GGUF file; made once."""
    target = source.with_name("openvino")
    if target.exists():
        return target
    temporary = source.with_name("openvino.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    link = temporary / source.name
    link.symlink_to(source)
    genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    link.unlink()
    if not (temporary / "openvino_model.xml").exists():
        raise RuntimeError(f"OpenVINO wrote no graph of {source}")
    temporary.rename(target)
    return target


def load(message: dict[str, Any]) -> dict[str, Any]:
    settings = DEFAULTS | message["settings"]
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": message["threads"]}
    properties |= {
        key: value for key, value in settings.items() if key not in SCHEDULER and key != "pipeline"
    }
    graph = _graph(Path(message["path"]))
    state.update(graph=graph, properties=properties, pipeline=None, settings=settings)
    if message.get("score_only"):  # the graph alone, see nll
        return {"version": genai.__version__, "settings": settings | properties}
    if settings["pipeline"] == "plain":
        state["pipeline"] = genai.LLMPipeline(
            str(graph), "CPU", ATTENTION_BACKEND="SDPA", **properties
        )
    else:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = False
        for key in SCHEDULER:
            setattr(scheduler, key, settings[key])
        state["pipeline"] = genai.ContinuousBatchingPipeline(
            str(graph), scheduler, "CPU", properties
        )
    return {
        "version": genai.__version__,
        "settings": settings | properties,
        "weight_bytes": (graph / "openvino_model.bin").stat().st_size,
        "capabilities": ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"),
    }


def _config(output_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = output_tokens
    config.min_new_tokens = output_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


class Stamp(genai.StreamerBase):
    """Notes the time of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, token: Any) -> Any:
        self.times.append(time.perf_counter())
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def run(message: dict[str, Any]) -> dict[str, Any]:
    pipeline, config = state["pipeline"], _config(message["output_tokens"])
    inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in message["prompts"]]
    is_plain = state["settings"]["pipeline"] == "plain"
    start = time.perf_counter()
    if len(inputs) > 1:
        results = pipeline.generate(inputs, [config] * len(inputs))
        total = time.perf_counter() - start
        tokens = [list(map(int, r.m_generation_ids[0])) for r in results]
        return {"first_token_s": None, "total_s": total, "tokens": tokens}
    stamp = Stamp()
    if is_plain:
        result = pipeline.generate(inputs[0], config, stamp)
        tokens = [list(map(int, result.tokens[0]))]
    else:
        results = pipeline.generate(inputs, [config], stamp)
        tokens = [list(map(int, results[0].m_generation_ids[0]))]
    first, total = stamp.times[0] - start, stamp.times[-1] - start
    return {"first_token_s": first, "total_s": total, "tokens": tokens}


def nll(message: dict[str, Any]) -> dict[str, Any]:
    """The graph in the plain runtime, same properties: GenAI gives no logits of a prompt."""
    if "request" not in state:
        model = ov.Core().read_model(str(state["graph"] / "openvino_model.xml"))
        compiled = ov.Core().compile_model(model, "CPU", state["properties"])
        state["request"] = compiled.create_infer_request()
    request = state["request"]
    request.reset_state()
    ids = np.array([message["ids"]], np.int64)
    count = ids.shape[1] - 1
    outputs = request.infer(
        {
            "input_ids": ids[:, :-1],
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    logits = next(iter(outputs.values()))[0]
    result: list[float] = []
    for row, target in zip(logits, ids[0, 1:].tolist(), strict=True):
        wide = row.astype(np.float64)
        top = wide.max()
        result.append(float(top + math.log(np.exp(wide - top).sum()) - wide[target]))
    return {"nll": result}


def text(message: dict[str, Any]) -> dict[str, Any]:
    return {"text": state["pipeline"].get_tokenizer().decode(message["ids"])}


if __name__ == "__main__":
    serve({"load": load, "run": run, "text": text, "nll": nll})
