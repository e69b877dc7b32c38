"""`trivet generate`: complete one prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trivet.cli import options
from trivet.cli.output import Output

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


def generate(
    model: options.ModelArgument,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Raw text to continue.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="F", help="File with raw text to continue; - for stdin.")
    ] = None,
    chat: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A user's message, put in the chat template.")
    ] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Annotated[
        int | None, typer.Option(metavar="K", help="With --json: the K most likely of each token.")
    ] = None,
    weights: options.Weights = None,
    kv: options.KV = None,
    draft: options.Draft = None,
    draft_tokens: options.DraftTokens = None,
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: OneSeq = 1,
    memory_utilization: options.MemoryUtilization = None,
    kv_bytes: options.KVBytes = None,
    json: options.Json = False,
) -> int:
    """Complete one prompt and print the text."""
    from trivet.errors import ConfigError
    from trivet.llm import LLM
    from trivet.request import SamplingParams

    given = {"--prompt": prompt, "--prompt-file": prompt_file, "--chat": chat}
    sources = [flag for flag, value in given.items() if value is not None]
    if len(sources) != 1:
        raise ConfigError("prompt", " ".join(sources), f"exactly one of {', '.join(given)}")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    text = _read_prompt(prompt_file) if prompt_file is not None else prompt
    name, chosen = options.settings(
        model,
        weights=weights,
        kv=kv,
        draft=draft,
        draft_tokens=draft_tokens,
        threads=threads,
        max_model_len=max_model_len,
        memory_utilization=memory_utilization,
        kv_bytes=kv_bytes,
    )
    out = Output(json)
    with out.loading() as loading:
        llm = LLM(name, max_num_seqs=max_num_seqs, progress=loading, **chosen)
    with llm:
        ids = (
            llm.chat_prompt([{"role": "user", "content": chat}])
            if text is None
            else llm.model.tokenizer.encode(text)
        )
        output = None
        with out.progress("generate", max_tokens) as bar:
            for delta in llm.stream(ids, params, stop=stop or ()):
                if json:
                    bar.advance(len(delta.token_ids))
                else:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                output = delta.output or output
        assert output is not None, "a stream ends with an output"
        if not json and not output.text.endswith("\n"):
            sys.stdout.write("\n")
        out.result({**output_json(output), "weights": llm.model.weights_form, "kv": llm.kv})
    return 0


def output_json(output: Any) -> dict[str, Any]:
    """A `trivet.llm.GenerationOutput` by the contract's keys."""
    import dataclasses

    result = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "total_tokens": output.usage.total_tokens,
        },
        "seed": output.seed,
        "timing": dataclasses.asdict(output.timing),
        "stop_string": output.stop_string,
    }
    if output.logprobs is not None:
        result["logprobs"] = [
            {
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "rank": entry.rank,
                "top": dict(zip(map(str, entry.top_ids), entry.top_logprobs, strict=True)),
            }
            for entry in output.logprobs
        ]
    return result


def _read_prompt(path: Path) -> str:
    from trivet.errors import CheckpointError

    try:
        if str(path) == "-":
            return sys.stdin.read()
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(path, "is not UTF-8 text") from None
