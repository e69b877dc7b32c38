"""`trivet generate`: complete one prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trivet.cli import options
from trivet.cli.inputs import read_text
from trivet.cli.output import Output


def generate(
    context: typer.Context,
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
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: Annotated[
        int | None, typer.Option(metavar="K", help="With --json: the K most likely of each token.")
    ] = None,
    weights: options.Weights = None,
    kv: options.KV = None,
    draft: options.Draft = None,
    draft_tokens: options.DraftTokens = None,
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.OneSeq = 1,
    memory_utilization: options.MemoryUtilization = None,
    kv_bytes: options.KVBytes = None,
    json: options.Json = False,
) -> int:
    """Complete one prompt and print the text."""
    from trivet.errors import ConfigError
    from trivet.llm import LLM

    given = {"--prompt": prompt, "--prompt-file": prompt_file, "--chat": chat}
    sources = [flag for flag, value in given.items() if value is not None]
    if len(sources) != 1:
        raise ConfigError("prompt", " ".join(sources), f"exactly one of {', '.join(given)}")
    params = options.sampling_of(context)
    text = read_text(prompt_file) if prompt_file is not None else prompt
    name, chosen = options.settings_of(context)
    out = Output(json)
    with out.loading() as loading:
        llm = LLM(name, progress=loading, **chosen)
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
