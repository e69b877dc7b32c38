"""SQL of a task file and of a model runs in memory, for a bounded time, and reaches no file."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from trivet.evaluate import sql
from trivet.evaluate.sql import SchemaError, run_query

SCHEMA = (
    "CREATE TABLE t (a INTEGER PRIMARY KEY AUTOINCREMENT, b TEXT UNIQUE);"
    "CREATE INDEX i ON t (b); CREATE VIEW v AS SELECT b FROM t;"
    "CREATE TRIGGER g AFTER INSERT ON t BEGIN UPDATE t SET b = upper(b) WHERE a = new.a; END;"
    "INSERT INTO t (b) VALUES ('x'), ('y'); DELETE FROM t WHERE b = 'Y';"
    "ALTER TABLE t ADD COLUMN c; ANALYZE; CREATE TABLE u (a); DROP TABLE u;"
)
COUNT = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) "


def test_a_schema_fills_its_database_and_a_query_reads_it() -> None:
    assert run_query(SCHEMA, "SELECT * FROM v;") == ["('X',)"]
    assert run_query(SCHEMA, "SELECT a FROM t WHERE b = 'none'") == []


@pytest.mark.parametrize(
    "words",
    ["ATTACH '{path}' AS f; CREATE TABLE f.t (a)", "VACUUM INTO '{path}'", "PRAGMA journal_mode"],
)
def test_neither_reaches_a_file_or_a_setting(words: str, tmp_path: Path) -> None:
    path = tmp_path / "written.db"
    with pytest.raises(SchemaError, match=r"not authorized|authorization denied"):
        run_query(words.format(path=path), "SELECT 1")
    with pytest.raises(sqlite3.Error):
        run_query("", words.format(path=path))
    assert not path.exists()


def test_time_and_size_of_both_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "SECONDS", 0.2)
    begin = time.monotonic()
    with pytest.raises(SchemaError, match="interrupted"):
        run_query(f"CREATE TABLE t AS {COUNT} SELECT count(*) AS n FROM r", "SELECT 1")
    with pytest.raises(sqlite3.Error, match="interrupted"):
        run_query("", f"{COUNT} SELECT count(*) FROM r")
    assert time.monotonic() - begin < 5
    monkeypatch.setattr(sql, "SECONDS", 60.0)
    with pytest.raises(SchemaError, match="full"):
        run_query(f"CREATE TABLE t AS {COUNT} SELECT zeroblob(100000) FROM r", "SELECT 1")
    with pytest.raises(sqlite3.Error, match="rows of more than"):
        run_query("", f"{COUNT} SELECT zeroblob(100000) FROM r")
    with pytest.raises(sqlite3.Error, match="too big"):
        run_query("", "SELECT zeroblob(2000000)")
    assert len(run_query("", f"{COUNT} SELECT n FROM r")) == 10_000
