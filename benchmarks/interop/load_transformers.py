"""Runs in the environment of transformers and compressed-tensors: JOB.json OUT.json.

Loads a folder in float32 on the CPU, and writes the most likely tokens after every token of each
window and the greedy continuation of each prompt.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def main(job_file: str, out_file: str) -> None:
    """Load, run, write."""
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(2)
    config = json.loads((Path(job["model"]) / "config.json").read_text())
    options = {}
    if config["quantization_config"]["quant_method"] == "compressed-tensors":
        # Decompressed as they load: compressed ones expect zero points that are not packed.
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, **options)
    model.eval().float()
    top: list[list[Any]] = []
    greedy = []
    with torch.inference_mode():
        for window in job["windows"]:
            logits = model(torch.tensor([window])).logits[0]
            values, ids = logits.log_softmax(-1).topk(job["top"])
            rows = zip(ids.tolist(), values.tolist(), strict=True)
            top.append([list(zip(*row, strict=True)) for row in rows])
        for prompt in job["prompts"]:
            tokens, cache, made = torch.tensor([prompt]), None, []
            for _ in range(job["new_tokens"]):
                out = model(tokens, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                made.append(int(out.logits[0, -1].argmax()))
                tokens = torch.tensor([[made[-1]]])
            greedy.append(made)
    names = ("transformers", "compressed-tensors", "torch")
    said = " ".join(f"{name} {version(name)}" for name in names)
    Path(out_file).write_text(json.dumps({"version": said, "top": top, "greedy": greedy}))


if __name__ == "__main__":
    main(*sys.argv[1:])
