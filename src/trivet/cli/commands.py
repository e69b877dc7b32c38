"""Verbs as commands of click: arguments have a help text, commands keep their order.

Newer versions of click have some of this; with these classes, all of them read the same.
"""

from __future__ import annotations

from typing import Any

import click


class Argument(click.Argument):
    """A positional argument with a ``help`` text and a ``metavar``."""

    def __init__(
        self,
        param_decls: list[str],
        *,
        metavar: str,
        help: str,
        required: bool = True,
        **attrs: Any,
    ) -> None:
        super().__init__(param_decls, metavar=metavar, required=required, **attrs)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Its row of the help."""
        help = f"{self.help}  [required]" if self.required else str(self.help)
        return self.human_readable_name, help


class Command(click.Command):
    """A verb: its help lists arguments, then options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write both lists."""
        for title, kind in (("Arguments", click.Argument), ("Options", click.Option)):
            params = [param for param in self.get_params(ctx) if isinstance(param, kind)]
            rows = [row for param in params if (row := param.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Nothing: `format_options` wrote them."""


class Group(click.Group):
    """A verb, or the program, that needs the name of a command."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(no_args_is_help=False, **attrs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises UsageError with the commands there are when none is given."""
        if not args:
            ctx.fail(f"Missing command: {', '.join(self.list_commands(ctx))}.")
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that ``args`` name. Raises UsageError with the names it may have meant."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            from difflib import get_close_matches

            meant = ", ".join(map(repr, get_close_matches(name, known)))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {meant}?" if meant else ""))
        return super().resolve_command(ctx, args)
