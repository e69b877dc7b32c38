"""Generated answers, judged by what they do: worked sums, formats, SQL on SQLite, code in the sandbox.

The text is greedy and ends at the task's stop strings. Where an item has a short reference, its
probability stands for expected accuracy beside right or wrong (`judge.py`).
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from trivet.errors import ConfigError
from trivet.evaluate.checks.choice import exact_answer
from trivet.evaluate.checks.judge import Answer
from trivet.evaluate.sandbox import run_program
from trivet.evaluate.subject import Subject
from trivet.evaluate.task import Form, Item, Task

FORMS = (Form.WORKED, Form.FORMAT, Form.SQL, Form.CODE)
_SHORT_CHARS = 160  # references up to this length are scored for their probability
_SQL_S = 2.0
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def answer(subject: Subject, task: Task, advance: Callable[[int], None]) -> list[Answer]:
    """Answers to all items of a task of one of FORMS. Raises SandboxError: code cannot be run here."""
    prompts = [item.prompts[0] for item in task.items]
    texts = subject.generate(prompts, task.max_tokens, task.stops, advance)
    expected: list[float | None] = [None] * len(texts)
    if task.form is not Form.WORKED and all(
        0 < len(item.answer) <= _SHORT_CHARS for item in task.items
    ):
        scores = subject.score([[(item.prompts[0], item.answer)] for item in task.items], advance)
        expected = [exact_answer(found[0]).expected for found in scores]
    judge = _JUDGES[task.form]
    return [
        Answer(judge(item, text.text), value)
        for item, text, value in zip(task.items, texts, expected, strict=True)
    ]


def _worked(item: Item, text: str) -> bool:
    """The last number of the answer is the reference's."""
    numbers = _NUMBER.findall(text.partition("####")[2] or text)
    if not numbers:
        return False
    try:
        return float(numbers[-1].replace(",", "")) == float(item.answer)
    except ValueError:
        return False


def follows_format(item: Item, text: str) -> bool:
    """Whether a text has the format of ``item.data["format"]``: json (equal to), keys (a JSON object
    with these), regex (the whole text).
    """
    wanted = item.data["format"]
    text = text.strip()
    if "regex" in wanted:
        return re.fullmatch(wanted["regex"], text, re.DOTALL) is not None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if "json" in wanted:
        return bool(found == wanted["json"])
    return isinstance(found, dict) and set(wanted["keys"]) <= found.keys()


def same_rows(item: Item, text: str) -> bool:
    """Whether a query gives the rows of the reference, in any order.

    Raises ConfigError: the reference itself does not run.
    """
    try:
        wanted = run_query(item.data["schema"], item.answer)
    except sqlite3.Error as error:
        allowed = f"SQL that runs on its schema ({error})"
        raise ConfigError("tasks", item.answer, allowed) from None
    try:
        return run_query(item.data["schema"], text) == wanted
    except sqlite3.Error:
        return False


def run_query(schema: str, query: str) -> list[str]:
    """Rows of one query on a fresh database in memory, as sorted texts.

    The query may read and nothing else, and for ``_SQL_S`` seconds. Raises sqlite3.Error.
    """
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(schema)
        until = time.monotonic() + _SQL_S
        connection.set_progress_handler(lambda: int(time.monotonic() > until), 1000)
        connection.set_authorizer(_only_reading)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 20)
        rows = connection.execute(query.strip().rstrip(";")).fetchmany(10_000)
    except sqlite3.Warning as error:  # more than one statement
        raise sqlite3.Error(str(error)) from None
    finally:
        connection.close()
    return sorted(repr(row) for row in rows)


def _only_reading(action: int, *_details: Any) -> int:
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
    return sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY


def passes_tests(item: Item, text: str) -> bool:
    """Whether a function passes its tests in the sandbox. Raises SandboxError."""
    return run_program(f"{item.data['head']}{text}\n\n{item.data['tests']}").is_complete


_JUDGES: dict[Form, Callable[[Item, str], bool]] = {
    Form.WORKED: _worked,
    Form.FORMAT: follows_format,
    Form.SQL: same_rows,
    Form.CODE: passes_tests,
}
