"""Where a verb's output goes.

Progress is always on standard error. Results are tables on standard output, or, with ``--json``, one
JSON object as its last line and the tables on standard error.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivet.json_values import plain

if TYPE_CHECKING:
    from rich.console import Console

_FILE_WIDTH = 110  # columns of a table that is not written to a terminal
_QUIET_S = 1.0  # a job that ends sooner shows no bar


class Output:
    """The two streams of one command. ``as_json`` is its ``--json`` flag."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @property
    def tables(self) -> Console:
        """The console for result tables."""
        from rich.console import Console

        console = Console(stderr=self.as_json, highlight=False, soft_wrap=False)
        if not console.is_terminal:
            console.width = _FILE_WIDTH
        return console

    def note(self, text: str) -> None:
        """A line about the run on standard error."""
        print(text, file=sys.stderr, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table; every column but the first is right-aligned."""
        from rich.box import SIMPLE
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title or None, box=SIMPLE, title_justify="left", padding=0)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
        self.tables.print(table)

    def facts(self, title: str, rows: Sequence[tuple[str, object]]) -> None:
        """Print names and values, one pair a line."""
        width = max(len(name) for name, _ in rows)
        lines = [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]
        print("\n".join(lines), file=sys.stderr if self.as_json else sys.stdout)

    def result(self, value: Mapping[str, Any]) -> None:
        """With ``--json``: print the object as the last line of standard output."""
        if self.as_json:
            print(json.dumps(plain(value), allow_nan=False), flush=True)

    @contextlib.contextmanager
    def progress(self, label: str, total: float, *, at_once: bool = False) -> Iterator[Bar]:
        """A progress bar on standard error.

        It appears once the job has run for a second, or at once for jobs that report rarely.
        """
        bar = Bar(label, total)
        try:
            if at_once:
                bar.show()
            yield bar
        finally:
            bar.close()

    @contextlib.contextmanager
    def loading(self) -> Iterator[Callable[[str, int, int], None]]:
        """Progress of loading a model, as `trivet.quant.load_packed` reports it (what, done, total)."""
        bars: dict[str, Bar] = {}
        try:

            def report(what: str, done: int, total: int) -> None:
                bar = bars.get(what)
                if bar is None:
                    for other in bars.values():
                        other.close()
                    bar = bars[what] = Bar(what, total or None)
                bar.set(done)
                if total and done >= total:
                    bar.close()

            yield report
        finally:
            for bar in bars.values():
                bar.close()


class Bar:
    """A rich progress bar that waits `_QUIET_S` before it shows itself. ``total`` None: a spinner."""

    def __init__(self, label: str, total: float | None) -> None:
        self._label, self._total = label, total
        self._done = 0.0
        self._started = time.monotonic()
        self._progress: Any = None
        self._task: Any = None

    def label(self, text: str) -> None:
        """Say what is being done now."""
        self._label = text
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def loading(self, what: str, done: int, total: int) -> None:
        """Name what is being loaded, as `trivet.quant.load_packed` reports it."""
        self.label(f"{what} {done}/{total}" if total else what)

    def advance(self, amount: float) -> None:
        """So much more is done."""
        self.set(self._done + amount)

    def set(self, done: float) -> None:
        """So much is done in all."""
        self._done = done
        if self._progress is None and time.monotonic() - self._started > _QUIET_S:
            self.show()
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done)

    def show(self) -> None:
        """Appear, when standard error is a terminal; a log has no use for a bar."""
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task(self._label, total=self._total, completed=self._done)

    def close(self) -> None:
        """Disappear."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def number(value: float | None, digits: int = 3) -> str | None:
    """A figure with ``digits`` significant digits for a table; None stays None."""
    if value is None or not math.isfinite(value):
        return None
    if value != 0 and abs(value) < 1e-4:
        return f"{value:.1e}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
