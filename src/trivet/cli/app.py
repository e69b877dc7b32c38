"""The table of verbs, and how an exception becomes one line and an exit code."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

from trivet.cli.commands import Group
from trivet.cli.hints import hint_for
from trivet.errors import EngineError, RequestError, TrivetError

VERBS = (
    "info",
    "generate",
    "chat",
    "serve",
    "quantize",
    "evaluate",
    "ladder",
    "bench",
)  # as help lists them


class _Program(Group):
    """The verbs, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        verb: click.Command = getattr(importlib.import_module(f"trivet.cli.{cmd_name}"), cmd_name)
        return verb


def _version(context: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from trivet import __version__

        click.echo(f"trivet {__version__}")
        context.exit()


@click.group(cls=_Program, context_settings={"show_default": True})
@click.option(
    "--version",
    "-V",
    is_flag=True,
    callback=_version,
    is_eager=True,
    expose_value=False,
    help="Print the version.",
)
def _program() -> None:
    """Makes large language models run faster, and proves it."""


def run(words: Sequence[str], obj: object = None) -> int:
    """Run ``words`` as a command line; returns the exit code. No words ask for help.

    obj  what the verb finds in its context
    """
    if getattr(sys, "stdout", None) is None:  # standard output was closed
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # text of a model on a terminal that lacks letters
    try:
        result = _invoke(list(words) or ["--help"], obj)
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except click.UsageError as error:
        return _fail(_usage_line(error), 2)
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except EngineError as error:
        return _fail(str(error), 1)
    except RequestError as error:
        field = error.param or ""
        return _fail(error.message if field in error.message else f"{field}: {error}", 2)
    except TrivetError as error:
        return _fail(str(error), 2)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}", 2)
    except MemoryError:
        return _fail("out of memory: try a smaller --max-model-len, --max-num-seqs or --kv int8", 1)
    return result if isinstance(result, int) else 0


def _invoke(words: list[str], obj: object) -> object:
    """What the verb returns; not through click's ``main``, which has exit codes of its own."""
    try:
        with _program.make_context("trivet", words, obj=obj) as context:
            return _program.invoke(context)
    except click.exceptions.Exit as error:  # after help and version
        return error.exit_code


def _usage_line(error: click.UsageError) -> str:
    message = error.format_message()
    hint = hint_for(error.option_name) if isinstance(error, click.NoSuchOption) else None
    return f"{message} {hint}" if hint else message


def _fail(message: str, code: int) -> int:
    """Print one line, whatever the message holds, and return ``code``."""
    print("trivet: " + " ".join(str(message).split()), file=sys.stderr)
    return code
