"""SQL of task files and of models, run on SQLite in memory: bounded, and away from every file.

A schema may fill its own database, a query may only read it. Neither may attach a database, which is
how SQL opens and writes files (VACUUM INTO does it too), or change a setting.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Any

SECONDS = 2.0  # for the schema, and again for the query
_MAX_PAGES = 16_384  # of 4 KiB, of the database
_MAX_VALUE_BYTES = 1 << 20
_MAX_ROWS, _MAX_CHARS = 10_000, 8 << 20  # of what a query gives
_READING = frozenset(
    (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
)
_FILLING = _READING | {
    sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_CREATE_VIEW,
    sqlite3.SQLITE_CREATE_TRIGGER, sqlite3.SQLITE_ALTER_TABLE, sqlite3.SQLITE_DROP_TABLE,
    sqlite3.SQLITE_DROP_INDEX, sqlite3.SQLITE_DROP_VIEW, sqlite3.SQLITE_DROP_TRIGGER,
    sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_REINDEX,
    sqlite3.SQLITE_ANALYZE, sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT,
}  # fmt: skip


def run_query(schema: str, query: str) -> list[str]:
    """Rows of one query on a fresh database with a schema, as sorted texts.

    Raises SchemaError: the schema does not run; sqlite3.Error: the query. Either may be what is not
    allowed, or take or give too much.
    """
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(f"PRAGMA max_page_count = {_MAX_PAGES}")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        _limit(connection, _FILLING)
        try:
            connection.executescript(schema)
        except (sqlite3.Error, ValueError) as error:  # ValueError: NUL or a lone surrogate
            raise SchemaError(str(error)) from None
        _limit(connection, _READING)
        return _rows(connection, query)
    except sqlite3.Warning as error:  # more than one statement
        raise sqlite3.Error(str(error)) from None
    except ValueError as error:
        raise sqlite3.Error(str(error)) from None
    finally:
        connection.close()


class SchemaError(sqlite3.Error):
    """It is the schema that does not run."""


def _rows(connection: sqlite3.Connection, query: str) -> list[str]:
    cursor = connection.execute(query.strip().rstrip(";"))
    if cursor.description is None:
        raise sqlite3.Error("no query")
    rows: list[str] = []
    num_chars = 0
    for row in cursor:
        rows.append(repr(row))
        num_chars += len(rows[-1])
        if num_chars > _MAX_CHARS:
            raise sqlite3.Error(f"rows of more than {_MAX_CHARS} characters")
        if len(rows) == _MAX_ROWS:
            break
    return sorted(rows)


def _limit(connection: sqlite3.Connection, actions: frozenset[int]) -> None:
    """Allow these actions only, for SECONDS from now."""

    def authorize(action: int, name: str | None, *_details: Any) -> int:
        # What `.dump` writes first.
        is_allowed = action in actions or (
            action == sqlite3.SQLITE_PRAGMA and name == "foreign_keys" and actions is _FILLING
        )
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    until = time.monotonic() + SECONDS
    connection.set_progress_handler(lambda: int(time.monotonic() > until), 1000)
    connection.set_authorizer(authorize)
