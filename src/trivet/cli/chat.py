"""`trivet chat`: talk to a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from trivet.cli import options
from trivet.cli.commands import Command
from trivet.cli.generate import output_json
from trivet.cli.inputs import read_stdin
from trivet.cli.output import Output

if TYPE_CHECKING:
    from trivet.llm import LLM, GenerationOutput
    from trivet.request import SamplingParams


@click.command(cls=Command)
@options.model
@click.option("--system", metavar="TEXT", help="System message.")
@options.max_tokens(512)
@options.temperature
@options.top_k
@options.top_p
@options.min_p
@options.repetition_penalty
@options.seed
@options.one_model
@options.json
@click.pass_context
def chat(context: click.Context, /, system: str | None, json: bool, **others: object) -> int:
    """Talk to a model; with input from a pipe, answer it as one message.

    Type /reset to begin again and /exit (or Ctrl-D) to leave.
    """
    from trivet.llm import LLM

    params = options.sampling_of(context)
    name, chosen = options.settings_of(context)
    out = Output(json)
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    piped = None if is_terminal else read_stdin().strip()
    if piped == "":
        from trivet.errors import ConfigError

        raise ConfigError("standard input", "", "a message")
    with out.loading() as loading:
        llm = LLM(name, progress=loading, **chosen)
    messages = [{"role": "system", "content": system}] if system else []
    with llm:
        if piped is not None:
            messages.append({"role": "user", "content": piped})
            answer, output = _answer(llm, messages, params)
            if output is None:
                raise click.Abort
            messages.append({"role": "assistant", "content": answer})
            out.result({**output_json(output), "messages": messages})
            return 0
        out.note(f"{name}, weights {llm.model.weights_form}, kv {llm.kv}. /exit leaves.")
        first = list(messages)
        while (text := _ask()) is not None:
            if text == "/reset":
                messages = list(first)
            elif text:
                messages.append({"role": "user", "content": text})
                answer, _ = _answer(llm, messages, params)
                messages.append({"role": "assistant", "content": answer})
        out.result({"messages": messages})
    return 0


def _ask() -> str | None:
    """The next line; None at the end."""
    try:
        text = input("> ").strip()
    except EOFError:
        print(file=sys.stderr)
        return None
    return None if text in ("/exit", "/quit") else text


def _answer(
    llm: LLM, messages: list[dict[str, str]], params: SamplingParams
) -> tuple[str, GenerationOutput | None]:
    """Stream the answer to standard output; Ctrl-C ends it early, and then there is no output."""
    output, shown = None, []
    try:
        for delta in llm.stream(llm.chat_prompt(messages), params):
            shown.append(delta.text)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            output = delta.output or output
    except KeyboardInterrupt:
        output = None
    sys.stdout.write("\n")
    return "".join(shown), output
