"""Options that several verbs share, each written once.

A default of None means: the recipe's value when MODEL is a recipe, else the verb's default, which the
help names. Second names of an option are vLLM's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder in Hugging Face layout, .gguf file, hub id, recipe (.toml), or the word demo.",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="F",
        help="bf16, w8a8, w8a8-gN, w4a8-gN, w4a8-gN-zp, w4a8-gN-min (N: 32, 64, 128), or auto: "
        "the file's own grid.  [default: auto]",
    ),
]
KV = Annotated[
    str | None,
    typer.Option("--kv", "--kv-cache-dtype", metavar="K", help="bf16 or int8.  [default: bf16]"),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="T", help="[default: the cgroup's quota and affinity]"),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        metavar="N",
        help="Tokens of one request, prompt and output.  [default: the model's own]",
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option("--max-num-seqs", metavar="N", help="Requests that run at once.  [default: 32]"),
]
MaxStepTokens = Annotated[
    int | None,
    typer.Option(
        "--max-step-tokens",
        "--max-num-batched-tokens",
        metavar="N",
        help="Rows of one step.  [default: 512]",
    ),
]
MaxPrefillChunk = Annotated[
    int | None,
    typer.Option(
        "--max-prefill-chunk",
        metavar="N",
        help="Rows of one prompt in one step; 0: whole prompts.  [default: 256]",
    ),
]
MemoryUtilization = Annotated[
    float | None,
    typer.Option(
        "--memory-utilization",
        metavar="SHARE",
        help="Share of the memory that the cgroup or machine leaves.  [default: 0.9]",
    ),
]
KVBytes = Annotated[
    int | None,
    typer.Option("--kv-bytes", metavar="BYTES", help="Memory for KV, instead of a share."),
]
Draft = Annotated[
    str | None,
    typer.Option("--draft", metavar="D", help="Speculation: off or ngram.  [default: off]"),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        "--num-speculative-tokens",
        metavar="K",
        help="Most draft tokens of a request in one step.  [default: 4]",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object as the last line of standard output.")
]

_KV_NAMES = {"auto": "bf16", "bfloat16": "bf16"}  # vLLM's values that mean the same


def settings(model: str, **given: Any) -> tuple[str, dict[str, Any]]:
    """The model to load and the settings that are set: a recipe's, overridden by flags given.

    Settings that neither names are absent, so that the callee's defaults apply.
    """
    from trivet.recipe import is_recipe, load_recipe

    merged: dict[str, Any] = {}
    if is_recipe(model):
        recipe = load_recipe(Path(model))
        model = recipe.model
        merged = {name: value for name, value in recipe.settings().items() if name in given}
    merged.update({name: value for name, value in given.items() if value is not None})
    if "kv" in merged:
        merged["kv"] = _KV_NAMES.get(merged["kv"], merged["kv"])
    return model, merged
