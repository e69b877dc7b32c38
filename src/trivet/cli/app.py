"""The table of verbs, and how an exception becomes one line and an exit code."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

import typer

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

# typer carries its own copy of click in some versions; its exceptions are found through BadParameter.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


def _version(value: bool) -> None:
    if value:
        from trivet import __version__

        typer.echo(f"trivet {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", "-V", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Makes large language models run faster, and proves it."""


def _app(words: Sequence[str]) -> typer.Typer:
    """The command line with the verb that ``words`` ask for, or, if they name none, with all."""
    app = typer.Typer(
        name="trivet",
        help="Makes large language models run faster, and proves it.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for verb in words[:1] if words and words[0] in VERBS else VERBS:
        module = importlib.import_module(f"trivet.cli.{verb}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=verb)
        else:
            app.command(verb)(getattr(module, verb))
    return app


def run(words: Sequence[str], obj: object = None) -> int:
    """Run ``words`` as a command line; returns the exit code. No words ask for help.

    obj  what the verb finds in its context
    """
    if getattr(sys, "stdout", None) is None:  # standard output was closed
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # text of a model on a terminal that lacks letters
    try:
        app = _app(words)
        result = app(
            args=list(words) or ["--help"], prog_name="trivet", standalone_mode=False, obj=obj
        )
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except typer.Abort:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except _UsageError as error:
        return _fail(_usage_line(error), 2)
    except _ClickException as error:
        return _fail(str(error), 2)
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


def _usage_line(error: Exception) -> str:
    message = str(getattr(error, "format_message", error.__str__)())
    option = getattr(error, "option_name", None)
    hint = hint_for(option) if option else None
    return f"{message} {hint}" if hint else message


def _fail(message: str, code: int) -> int:
    """Print one line, whatever the message holds, and return ``code``."""
    print("trivet: " + " ".join(str(message).split()), file=sys.stderr)
    return code
