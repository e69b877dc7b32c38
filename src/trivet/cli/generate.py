"""`trivet generate`: complete one prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from trivet.cli import options
from trivet.cli.commands import Command
from trivet.cli.inputs import read_text
from trivet.cli.output import Output


@click.command(cls=Command)
@options.model
@click.option("--prompt", metavar="TEXT", help="Raw text to continue.")
@click.option(
    "--prompt-file",
    metavar="F",
    type=options.PATH,
    help="File with raw text to continue; - for stdin.",
)
@click.option("--chat", metavar="TEXT", help="A user's message, put in the chat template.")
@options.max_tokens(128)
@options.temperature
@options.top_k
@options.top_p
@options.min_p
@options.repetition_penalty
@options.presence_penalty
@options.frequency_penalty
@options.seed
@options.stop
@options.ignore_eos
@click.option(
    "--logprobs", metavar="K", type=int, help="Only with --json: the K most likely of each token."
)
@options.one_model
@options.json
@click.pass_context
def generate(
    context: click.Context,
    /,
    prompt: str | None,
    prompt_file: Path | None,
    chat: str | None,
    max_tokens: int,
    stop: list[str] | None,
    json: bool,
    **others: object,
) -> int:
    """Complete one prompt and print the text."""
    from trivet.errors import ConfigError
    from trivet.llm import LLM

    given = {"--prompt": prompt, "--prompt-file": prompt_file, "--chat": chat}
    sources = [flag for flag, value in given.items() if value is not None]
    if len(sources) != 1:
        raise ConfigError("prompt", " ".join(sources), f"exactly one of {', '.join(given)}")
    if others["logprobs"] is not None and not json:
        raise ConfigError("logprobs", others["logprobs"], "--logprobs together with --json")
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
        if output.finish_reason == "length" and len(output.token_ids) < max_tokens:
            out.note(f"the context of {llm.plan.max_model_len} tokens ended the text")
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
