"""transformers with torch on the CPU: a plain reference, and the peer that needs no environment."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from protocol import serve

DEFAULTS: dict[str, Any] = {"dtype": "float32", "attn_implementation": "sdpa"}
state: dict[str, Any] = {}


def load(message: dict[str, Any]) -> dict[str, Any]:
    settings = DEFAULTS | message["settings"]
    torch.set_num_threads(message["threads"])
    path = Path(message["path"])
    options: dict[str, Any] = {
        "dtype": getattr(torch, settings["dtype"]),
        "attn_implementation": settings["attn_implementation"],
    }
    source = path
    if path.is_file():
        source, options["gguf_file"] = path.parent, path.name
    state["model"] = transformers.AutoModelForCausalLM.from_pretrained(source, **options).eval()
    state["tokenizer"] = (source, {"gguf_file": path.name} if path.is_file() else {})
    return {
        "version": f"{transformers.__version__}, torch {torch.__version__}",
        "settings": settings | {"threads": message["threads"]},
    }


def run(message: dict[str, Any]) -> dict[str, Any]:
    model = state["model"]
    ids = torch.tensor(message["prompts"])
    with torch.inference_mode():
        start = time.perf_counter()
        output = model(ids, use_cache=True, logits_to_keep=1)
        step = output.logits[:, -1].argmax(-1, keepdim=True)
        steps = [step]
        first = time.perf_counter() - start
        for _ in range(message["output_tokens"] - 1):
            output = model(step, past_key_values=output.past_key_values, use_cache=True)
            step = output.logits[:, -1].argmax(-1, keepdim=True)
            steps.append(step)
        total = time.perf_counter() - start
    return {"first_token_s": first, "total_s": total, "tokens": torch.cat(steps, 1).tolist()}


def nll(message: dict[str, Any]) -> dict[str, Any]:
    ids = torch.tensor([message["ids"]])
    with torch.inference_mode():
        logits = state["model"](ids[:, :-1]).logits[0].double()
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    return {"nll": losses.tolist()}


def text(message: dict[str, Any]) -> dict[str, Any]:
    source, options = state["tokenizer"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    return {"text": tokenizer.decode(message["ids"])}


if __name__ == "__main__":
    serve({"load": load, "run": run, "text": text, "nll": nll})
