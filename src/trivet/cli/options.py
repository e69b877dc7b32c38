"""Options that several verbs share, each written once.

A default of None means: the recipe's value when MODEL is a recipe, else the verb's default, which the
help names. Second names of an option are vLLM's.

A verb names its options in its signature, where typer looks for them; what it hands on as a whole, the
settings and the sampling parameters, it takes from typer's context through `settings_of` and
`sampling_of`, so that the names stand once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trivet.request import SamplingParams

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
        help="bf16, w8a8, w8a8-gN, w4a8-gN, w4a8-row, with -zp or -min at the end of the last two (N: "
        "16, 32, 64, 128), w4a16 in place of w4a8 for bf16 activations, or auto: the file's own grid."
        "  [default: auto]",
    ),
]
KV = Annotated[
    str | None,
    typer.Option(
        "--kv",
        "--kv-cache-dtype",
        metavar="K",
        help="bf16, int8, fp8 or int4; with +first at the end the first token stays in bf16.  "
        "[default: bf16]",
    ),
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
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Most tokens produced.")]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="T", help="0 takes the most likely token.")
]
TopK = Annotated[int, typer.Option("--top-k", metavar="K", help="0: off.")]
TopP = Annotated[float, typer.Option("--top-p", metavar="P", help="1: off.")]
MinP = Annotated[float, typer.Option("--min-p", metavar="P", help="0: off.")]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", metavar="R", help="1: off.")
]
PresencePenalty = Annotated[float, typer.Option("--presence-penalty", metavar="R")]
FrequencyPenalty = Annotated[float, typer.Option("--frequency-penalty", metavar="R")]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="S", help="[default: drawn, and returned]")
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop string; once for each.")
]
OneSeq = Annotated[
    int, typer.Option("--max-num-seqs", metavar="N", help="Memory for so many requests at once.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end token.")]
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


_SETTINGS = frozenset(
    (
        "weights", "kv", "workers", "draft", "draft_tokens", "threads", "max_model_len",
        "max_num_seqs", "max_step_tokens", "max_prefill_chunk", "max_waiting",
        "memory_utilization", "kv_bytes",
    )
)  # fmt: skip


def settings_of(context: typer.Context) -> tuple[str, dict[str, Any]]:
    """`settings` of a verb with a MODEL: all of its options that set something about it."""
    given = {name: value for name, value in context.params.items() if name in _SETTINGS}
    return settings(context.params["model"], **given)


def sampling_of(context: typer.Context) -> SamplingParams:
    """The sampling parameters among a verb's options. Raises RequestError."""
    from trivet.request import SamplingParams

    names = frozenset(SamplingParams.__struct_fields__)
    given = {name: value for name, value in context.params.items() if name in names}
    return SamplingParams(**given)
