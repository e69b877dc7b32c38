"""Options that several verbs share, each written once.

A default of None means: the recipe's value when MODEL is a recipe, else the verb's default, which the
help names. Second names of an option are vLLM's.

A verb lists its options as decorators, in the order of its help; where they differ between verbs in
their default, that is an argument. What a verb hands on as a whole, the settings and the sampling
parameters, it takes from click's context through `settings_of` and `sampling_of`; its signature names
what it reads itself and collects the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trivet.cli.commands import Argument

if TYPE_CHECKING:
    from trivet.request import SamplingParams

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any] | click.Command)


def _listed(context: click.Context, param: click.Parameter, value: tuple[Any, ...]) -> Any:
    return list(value) or None


def several(*names: str, **attrs: Any) -> Callable[[_Decorated], _Decorated]:
    """An option that may be given several times: the list of its values, or None."""
    return click.option(*names, multiple=True, callback=_listed, **attrs)


def note_threads(threads: int, what: str) -> None:
    """Say on standard error that so many threads are more than the CPUs that this process may use.

    what  the settings that ask for them
    """
    from trivet.sizing import cpu_limit

    limit = cpu_limit()
    if threads > limit.cpus:
        line = f"note: {what}: more than the {limit.cpus} CPUs allowed here ({limit.source})"
        print(f"{line}; threads will wait for each other", file=sys.stderr, flush=True)


def _noted(context: click.Context, param: click.Parameter, value: int | None) -> int | None:
    if value is not None and value <= 1024:  # above, it is refused
        note_threads(value, f"--threads {value}")
    return value


PATH = click.Path(path_type=Path)


def model(verb: _Decorated) -> _Decorated:
    """The argument MODEL. (Before 8.1.4, a decorator of click with a class works only once.)"""
    return click.argument(
        "model",
        cls=Argument,
        metavar="MODEL",
        help="Folder in Hugging Face layout, .gguf file, hub id, recipe (.toml), or the word demo.",
    )(verb)


weights = click.option(
    "--weights",
    metavar="F",
    help="bf16, w8a8, w8a8-gN, w4a8-gN, w4a8-row, with -zp or -min at the end of the last two (N: "
    "16, 32, 64, 128), w4a16 in place of w4a8 for bf16 activations, fp8-gN or fp8-row; auto: the "
    "file's own grids, 16-bit embedding and head of a quantized model in 8 bits; stored: these too as "
    "they are."
    "  [default: auto]",
)
kv = click.option(
    "--kv",
    "--kv-cache-dtype",
    metavar="K",
    help="bf16, int8, fp8 or int4; with +first at the end the first token stays in bf16.  "
    "[default: bf16]",
)
threads = click.option(
    "--threads",
    metavar="T",
    type=int,
    callback=_noted,
    help="[default: the cgroup's quota and affinity]",
)
max_model_len = click.option(
    "--max-model-len",
    metavar="N",
    type=int,
    help="Tokens of one request, prompt and output.  [default: the model's own]",
)
max_num_seqs = click.option(
    "--max-num-seqs", metavar="N", type=int, help="Requests that run at once.  [default: 32]"
)
max_step_tokens = click.option(
    "--max-step-tokens",
    "--max-num-batched-tokens",
    metavar="N",
    type=int,
    help="Rows of one step.  [default: 512]",
)
max_prefill_chunk = click.option(
    "--max-prefill-chunk",
    metavar="N",
    type=int,
    help="Rows of one prompt in one step; 0: whole prompts.  [default: 256]",
)
memory_utilization = click.option(
    "--memory-utilization",
    metavar="SHARE",
    type=float,
    help="Share of the memory that the cgroup or machine leaves.  [default: 0.9]",
)
kv_bytes = click.option(
    "--kv-bytes", metavar="BYTES", type=int, help="Memory for KV, instead of a share."
)
draft = click.option("--draft", metavar="D", help="Speculation: off or ngram.  [default: off]")
draft_tokens = click.option(
    "--draft-tokens",
    "--num-speculative-tokens",
    metavar="K",
    type=int,
    help="Most draft tokens of a request in one step.  [default: 4]",
)


def max_tokens(default: int) -> Callable[[_Decorated], _Decorated]:
    """How long an output may be, with a verb's default."""
    return click.option("--max-tokens", metavar="N", default=default, help="Most tokens produced.")


temperature = click.option(
    "--temperature", metavar="T", default=0.0, help="0 takes the most likely token."
)
top_k = click.option("--top-k", metavar="K", default=0, help="0: off.")
top_p = click.option("--top-p", metavar="P", default=1.0, help="1: off.")
min_p = click.option("--min-p", metavar="P", default=0.0, help="0: off.")
repetition_penalty = click.option("--repetition-penalty", metavar="R", default=1.0, help="1: off.")
presence_penalty = click.option("--presence-penalty", metavar="R", default=0.0)
frequency_penalty = click.option("--frequency-penalty", metavar="R", default=0.0)
seed = click.option("--seed", metavar="S", type=int, help="[default: drawn, and returned]")
stop = several("--stop", metavar="TEXT", help="Stop string; once for each.")
one_seq = click.option(
    "--max-num-seqs", metavar="N", default=1, help="Memory for so many requests at once."
)
ignore_eos = click.option("--ignore-eos", is_flag=True, help="Do not stop at the end token.")
json = click.option(
    "--json", is_flag=True, help="One JSON object as the last line of standard output."
)


def one_model(verb: _Decorated) -> _Decorated:
    """The options of a verb that runs a model in this process for one user."""
    ours = (
        weights, kv, draft, draft_tokens, threads, max_model_len, one_seq, memory_utilization,
        kv_bytes,
    )  # fmt: skip
    for option in reversed(ours):
        verb = option(verb)
    return verb


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


def settings_of(context: click.Context) -> tuple[str, dict[str, Any]]:
    """`settings` of a verb with a MODEL: all of its options that set something about it."""
    given = {name: value for name, value in context.params.items() if name in _SETTINGS}
    return settings(context.params["model"], **given)


def sampling_of(context: click.Context) -> SamplingParams:
    """The sampling parameters among a verb's options. Raises RequestError."""
    from trivet.request import SamplingParams

    names = frozenset(SamplingParams.__struct_fields__)
    given = {name: value for name, value in context.params.items() if name in names}
    return SamplingParams(**given)
