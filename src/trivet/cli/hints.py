"""What a flag of another engine is called here, for those that are not accepted as aliases.

vLLM's names are accepted where the meaning is the same (see `trivet.cli.options`). These either mean
something else or have no counterpart; a wrong flag gets the right one in the message.
"""

from __future__ import annotations

_HINTS = {
    "--model": "MODEL is the first argument: trivet serve MODEL.",
    "--quantization": "Use --weights w8a8, w4a8-g32, ...; the file's own grid is --weights auto.",
    "--dtype": "Use --weights bf16.",
    "--gpu-memory-utilization": "Use --memory-utilization, a share of the memory that is left.",
    "--kv-cache-memory-bytes": "Use --kv-bytes.",
    "--tensor-parallel-size": "One engine uses all cores: --threads T.",
    "--pipeline-parallel-size": "One engine uses all cores: --threads T.",
    "--data-parallel-size": "Use --workers mixed:N.",
    "--speculative-config": "Use --draft ngram --draft-tokens K.",
    "--enable-chunked-prefill": "Chunked prefill is on; --max-prefill-chunk 0 turns it off.",
    "--no-enable-chunked-prefill": "Use --max-prefill-chunk 0.",
    "--long-prefill-token-threshold": "Use --max-prefill-chunk.",
    "--max-num-partial-prefills": "Use --max-prefill-chunk.",
    "--block-size": "A KV page has 32 tokens.",
    "--swap-space": "There is no swap; preempted requests are computed again.",
    "--cpu-offload-gb": "Weights are mapped from the packed cache; nothing is offloaded.",
    "--tokenizer": "The tokenizer comes with the model.",
    "--trust-remote-code": "Code from a model repository never runs.",
    "--disable-log-requests": "Prompts are never logged.",
    "--enforce-eager": "There are no graphs to capture.",
    "--seed": 'The seed belongs to a request: generate --seed, or "seed" in the API.',
    "--allowed-origins": "Use --cors-origin, once for each origin.",
    "--n-gpu-layers": "Trivet runs on the CPU.",
    "--ctx-size": "Use --max-model-len.",
    "--parallel": "Use --max-num-seqs.",
    "--n-predict": "Use --max-tokens.",
    "--context-length": "Use --max-model-len.",
    "--mem-fraction-static": "Use --memory-utilization.",
    "--chunked-prefill-size": "Use --max-prefill-chunk.",
    "--model-path": "MODEL is the first argument: trivet serve MODEL.",
    "--tp": "One engine uses all cores: --threads T.",
    "--dp": "Use --workers mixed:N.",
}


def hint_for(option: str) -> str | None:
    """One sentence for an unknown option, or None."""
    return _HINTS.get(option.replace("_", "-"))
