"""Task files of the common forms are read; what is wrong is named by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.data import data_file
from trivet.errors import CheckpointError, ConfigError
from trivet.evaluate import Kind, load_tasks, parse_kinds
from trivet.evaluate.builtin_tasks import builtin_tasks, held_out_prompts
from trivet.evaluate.checks.answers import follows_format, passes_tests, same_rows
from trivet.evaluate.results import TASK_KINDS
from trivet.evaluate.sandbox import is_isolated
from trivet.evaluate.subject import Prompt
from trivet.evaluate.task import Form, Item, Task, read_task


def _write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_built_in_tasks_cover_every_kind_and_repeat_with_the_seed() -> None:
    tasks = builtin_tasks(0, 32)
    kinds = {task.kind for task in tasks}
    assert kinds == set(TASK_KINDS) - {Kind.LONG_CONTEXT}
    assert [task.sha256 for task in tasks] == [task.sha256 for task in builtin_tasks(0, 32)]
    assert [task.sha256 for task in tasks] != [task.sha256 for task in builtin_tasks(1, 32)]
    for task in tasks:
        assert 20 <= len(task.items) <= 32, task.name
        for item in task.items:
            assert len(set(item.choices)) == len(item.choices)
            assert not item.choices or 0 <= item.gold < len(item.choices)
    assert held_out_prompts(0, 20) == held_out_prompts(0, 20)


def test_sets_of_examples_are_groups_and_have_patterns_of_their_own() -> None:
    tasks = {task.name: task for task in builtin_tasks(0, 72)}
    for name in ("functions", "queries", "records"):
        examples: dict[int | None, set[str]] = {}
        for item in tasks[name].items:
            shots = item.prompts[0].text.rsplit("\n", 2)[0]
            examples.setdefault(item.group, set()).add(shots if name == "records" else "")
        assert None not in examples
        assert len(examples) >= 18
        assert all(len(shots) == 1 for shots in examples.values())
    keys = {tuple(item.data["format"]["json"]) for item in tasks["records"].items}
    assert len(keys) >= 18


def test_references_of_generated_tasks_are_right() -> None:
    tasks = {task.name: task for task in builtin_tasks(0, 40)}
    assert all(same_rows(item, item.answer) for item in tasks["queries"].items)
    assert all(follows_format(item, item.answer) for item in tasks["records"].items)
    [item, *_] = tasks["queries"].items
    assert not same_rows(item, "SELECT 1234567")
    assert not same_rows(item, "DROP TABLE people")
    assert not same_rows(item, "no sql")
    assert not follows_format(tasks["records"].items[0], "{}")
    assert not follows_format(tasks["records"].items[0], "not json")
    assert not follows_format(tasks["records"].items[0], "[" * 100_000)


def test_a_reference_that_does_not_run_is_named(tmp_path: Path) -> None:
    item = Item((Prompt("q"),), answer="SELECT b FROM t", data={"schema": "CREATE TABLE t (a);"})
    with pytest.raises(ConfigError, match=r"SELECT b FROM t.*no such column"):
        same_rows(item, "SELECT a FROM t")
    with pytest.raises(CheckpointError, match="line 1 is not of the form"):
        read_task(_write(tmp_path / "b.jsonl", {"prompt": "p", "format": {"regex": "("}}))


@pytest.mark.parametrize(
    ("at", "edit", "reason"),
    [
        (9, {"schema": "CREATE TABLE t ("}, "the schema does not run in SQLite: incomplete input"),
        (
            9,
            {"schema": "CREATE TABLE t (a); \ud800"},
            "the schema does not run in SQLite: .*surrog",
        ),
        (9, {"schema": "PRAGMA max_page_count = 9"}, "the schema does not run .*: not authorized"),
        (9, {"sql": "SELECT b FROM t"}, "sql does not run on its schema: no such column: b"),
        (9, {"sql": "SELECT a FROM t; SELECT a FROM t"}, "sql does not run .*one statement"),
        (9, {"sql": "DELETE FROM t"}, "sql does not run on its schema: not authorized"),
        (9, {"sql": "\0"}, "sql does not run on its schema: .*null character"),
        (9, {"sql": " "}, "sql does not run on its schema: no query"),
        (6, {"answer": "Paris"}, "the answer ends in 'Paris', where .* a number after ####"),
        (6, {"answer": "12 #### twelve"}, "the answer ends in 'twelve'"),
        (6, {"answer": "#### nan"}, "the answer ends in 'nan'"),
        (6, {"choices": ["a", "b"], "answer": "B"}, "the answer ends in 'B'"),
        (10, {"answer": "[1]"}, "the answer is not in the format that is asked for"),
    ],
)
def test_a_line_whose_reference_cannot_be_right_is_named(
    at: int, edit: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    row = FORMS[at][0]
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(row)}\n\n{json.dumps({**row, **edit})}\n")
    with pytest.raises(CheckpointError, match=f"a.jsonl: line 3: {reason}") as caught:
        read_task(path)
    assert str(caught.value).isprintable()


def test_references_of_every_spelling_are_read(tmp_path: Path) -> None:
    answers = ["7 #### 7", "#### 1,234", "so 3\n#### -0.5", "42", " 4,200 "]
    rows = [{"question": "q", "answer": answer} for answer in answers]
    found = [item.answer for item in read_task(_write(tmp_path / "a.jsonl", *rows)).items]
    assert found == ["7", "1234", "-0.5", "42", "4200"]
    row = {"question": "q", "choices": ["a", "b"], "answer": 1}
    assert read_task(_write(tmp_path / "b.jsonl", row)).form is Form.CHOICE
    dump = "PRAGMA foreign_keys=OFF; BEGIN TRANSACTION; CREATE TABLE t (a); COMMIT;"
    count = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 3) "
    sql = {"schema": dump, "question": "q", "sql": f"{count} SELECT n FROM r;"}
    assert read_task(_write(tmp_path / "c.jsonl", sql)).form is Form.SQL


@pytest.mark.skipif(not is_isolated(), reason="NO SANDBOX HERE")
def test_references_of_functions_pass_their_tests() -> None:
    [task] = [task for task in builtin_tasks(0, 6) if task.form is Form.CODE]
    assert all(passes_tests(item, item.answer) for item in task.items)
    assert not passes_tests(task.items[0], "\n    return object()")


FORMS: list[tuple[dict[str, Any], Form, Kind]] = [
    ({"query": "q", "choices": ["a", "b"], "gold": 1}, Form.CHOICE, Kind.KNOWLEDGE),
    ({"ctx": "c", "endings": ["a", "b"], "label": 0}, Form.CHOICE, Kind.CHAT),
    ({"goal": "g", "sol1": "a", "sol2": "b", "label": 0}, Form.CHOICE, Kind.KNOWLEDGE),
    ({"context_options": ["a", "b"], "continuation": "c", "gold": 0}, Form.CHOICE, Kind.CHAT),
    ({"question": "q", "options": ["(A)a", "(B)b"], "label": "B", "passage": None}, Form.CHOICE,
     Kind.KNOWLEDGE),
    ({"question": "q", "choices": ["a", "b"], "answer": 1}, Form.CHOICE, Kind.KNOWLEDGE),
    ({"question": "q", "answer": "so\n#### 1,234"}, Form.WORKED, Kind.MATHS),
    ({"context": "c", "answer": 7}, Form.EXACT, Kind.MATHS),
    ({"context": "c", "continuation": "d"}, Form.EXACT, Kind.CHAT),
    ({"schema": "CREATE TABLE t (a);", "question": "q", "sql": "SELECT a FROM t"}, Form.SQL,
     Kind.SQL),
    ({"prompt": "p", "format": {"keys": ["a"]}}, Form.FORMAT, Kind.STRUCTURED_OUTPUT),
    ({"query": "q", "choices": ["a", "b"], "gold": 1, "kind": "Long Context"}, Form.CHOICE,
     Kind.LONG_CONTEXT),
]  # fmt: skip


@pytest.mark.parametrize(("row", "form", "kind"), FORMS)
def test_a_form_is_found_by_its_keys(
    row: dict[str, Any], form: Form, kind: Kind, tmp_path: Path
) -> None:
    task = read_task(_write(tmp_path / "a.jsonl", row, row))
    assert (task.form, task.kind, len(task.items)) == (form, kind, 2)


def test_rows_known_to_be_wrong_are_left_out(tmp_path: Path) -> None:
    row = {"question": "q", "choices": ["a", "b"], "answer": 0, "error_type": "ok"}
    wrong = {**row, "error_type": "wrong_groundtruth"}
    assert len(read_task(_write(tmp_path / "a.jsonl", row, wrong)).items) == 1


def test_mistakes_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"query": 1}\nnot json\n')
    with pytest.raises(CheckpointError, match="line 2 is not JSON"):
        read_task(tmp_path / "b.jsonl")
    with pytest.raises(CheckpointError, match="no known form; its keys: odd"):
        read_task(_write(tmp_path / "c.jsonl", {"odd": 1}))
    with pytest.raises(CheckpointError, match="line 2 is not"):
        read_task(_write(tmp_path / "d.jsonl", FORMS[0][0], {"query": "q"}))
    with pytest.raises(CheckpointError, match="line 1 is not"):
        read_task(_write(tmp_path / "e.jsonl", {"query": "q", "choices": ["a", "b"], "gold": 2}))
    with pytest.raises(ConfigError, match="a folder"):
        load_tasks(tmp_path / "absent")
    with pytest.raises(ConfigError, match="chat, summary"):
        parse_kinds(["poetry"])
    assert parse_kinds(["SQL,Structured Output", "math"]) == (
        Kind.SQL,
        Kind.STRUCTURED_OUTPUT,
        Kind.MATHS,
    )


@pytest.mark.parametrize(
    ("at", "edit"),
    [
        (0, {"gold": 1.5}),
        (0, {"gold": True}),
        (0, {"query": 7}),
        (1, {"label": float("inf")}),
        (1, {"label": "9" * 5000}),
        (1, {"ctx": 7}),
        (2, {"goal": 7}),
        (3, {"context_options": [1, 2]}),
        (3, {"gold": float("inf")}),
        (4, {"question": 7}),
        (5, {"answer": 1.5}),
        (6, {"question": 7}),
        (7, {"context": 7}),
        (9, {"sql": 7}),
        (10, {"prompt": 7}),
        (10, {"format": {"regex": "(" * 5000}}),
        (10, {"format": {"keys": 5}}),
        (10, {"format": {"keys": [5]}}),
    ],
)
def test_values_of_another_type_are_named(at: int, edit: dict[str, Any], tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", FORMS[at][0], {**FORMS[at][0], **edit})
    with pytest.raises(CheckpointError, match="line 2 is not of the form of the first"):
        read_task(path)


def test_a_line_that_nests_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="line 1 is not JSON"):
        read_task(tmp_path / "a.jsonl")


def test_the_common_benchmarks_are_read() -> None:
    tasks: list[Task] = load_tasks(data_file("tasks"))
    forms = {task.name: task.form for task in tasks}
    assert forms["hellaswag_val"] is Form.CHOICE
    assert forms["gsm8k_test"] is Form.WORKED
    assert forms["humaneval"] is Form.CODE
    assert {task.kind for task in tasks} >= {Kind.CHAT, Kind.KNOWLEDGE, Kind.MATHS, Kind.CODE}
    assert len(tasks[0].sample(10, 1).items) == 10
    assert tasks[0].sample(10, 1).sha256 == tasks[0].sample(10, 1).sha256
