"""Tasks: items with a right answer, read from JSONL files or made by `builtin_tasks`.

A file holds one JSON object a line. The form is found from the keys of the first line, so the files of
the common benchmarks work as they are; `docs/gate.md` lists the forms. ``kind`` on a line, or else the
file's name, says which use of a model the task stands for.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import random
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trivet import files
from trivet.errors import CheckpointError, ConfigError
from trivet.evaluate.results import TASK_KINDS, Kind
from trivet.evaluate.sql import SchemaError, run_query
from trivet.evaluate.subject import Prompt

_MAX_FILE_BYTES = 64 << 20
_WORKED_TOKENS = 192  # of an answer that is reasoned out before it is given


class Form(enum.StrEnum):
    """How an item is answered and judged; each is one file in `checks`."""

    CHOICE = "choice"  # the likeliest of the choices
    EXACT = "exact"  # the answer itself, greedily
    WORKED = "worked"  # the last number of a worked answer
    CODE = "code"  # a function that passes its tests
    SQL = "sql"  # a query with the rows of the reference
    FORMAT = "format"  # an answer in the format asked for


@dataclasses.dataclass(frozen=True)
class Item:
    """One question.

    prompts  one, or one for each choice (the choice then stands in the prompt)
    choices  continuations, ``gold`` the right one; for other forms empty
    answer   the reference answer as it would continue the prompt
    data     what the form needs besides: tests, tables, a format
    group    items of one group have examples or a text in common and err together; None: by itself
    """

    prompts: tuple[Prompt, ...]
    choices: tuple[str, ...] = ()
    gold: int = 0
    answer: str = ""
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    group: int | None = None

    @property
    def chance(self) -> float:
        """Share of right answers by guessing."""
        num = max(len(self.choices), len(self.prompts))
        return 1 / num if num > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Task:
    """Items of one form and kind. ``stops`` end a generated answer."""

    name: str
    kind: Kind
    form: Form
    items: tuple[Item, ...]
    source: str
    stops: tuple[str, ...] = ("\n",)
    max_tokens: int = 32

    @property
    def chance(self) -> float:
        return sum(item.chance for item in self.items) / len(self.items)

    @property
    def sha256(self) -> str:
        """Hash of all items as they are asked."""
        value = [dataclasses.asdict(item) for item in self.items]
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    def sample(self, num_items: int, seed: int) -> Task:
        """At most ``num_items`` of the items, drawn by a seed: any first part is a sample too."""
        count = min(num_items, len(self.items))
        chosen = random.Random(seed).sample(range(len(self.items)), count)
        return dataclasses.replace(self, items=tuple(self.items[at] for at in chosen))


def parse_kinds(names: Sequence[str] | None) -> tuple[Kind, ...]:
    """Task kinds from their names, in any case, with spaces or hyphens. Raises ConfigError."""
    kinds = []
    for name in names or ():
        for part in name.split(","):
            spelled = re.sub(r"[\s_]+", "-", part.strip().lower())
            spelled = {"math": "maths", "structured": "structured-output"}.get(spelled, spelled)
            found = [kind for kind in TASK_KINDS if kind.value == spelled]
            if not found:
                raise ConfigError("task", part, ", ".join(kind.value for kind in TASK_KINDS))
            kinds += found
    return tuple(dict.fromkeys(kinds))


def load_tasks(folder: str | Path) -> list[Task]:
    """All ``*.jsonl`` files of a folder, by name. Raises CheckpointError, ConfigError."""
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError("tasks", str(folder), "a folder of .jsonl files")
    found = sorted(path.glob("*.jsonl"))
    if not found:
        raise CheckpointError(path, "holds no .jsonl files")
    return [read_task(file) for file in found]


def read_task(path: Path) -> Task:
    """One file. Raises CheckpointError naming the line, also where a reference cannot be right."""
    lines = files.read_text(path, _MAX_FILE_BYTES).split("\n")  # U+2028 is no line end in JSONL
    rows: dict[int, dict[str, Any]] = {}  # by number of the line
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise CheckpointError(path, f"line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise CheckpointError(path, f"line {number} is no JSON object")
        rows[number] = row
    if not rows:
        raise CheckpointError(path, "holds no items")
    start, first = next(iter(rows.items()))
    reader = next((r for r in _READERS if r.keys <= first.keys()), None)
    if reader is None:
        found = ", ".join(sorted(first))
        raise CheckpointError(path, f"line {start} is of no known form; its keys: {found}")
    items = []
    for number, row in rows.items():
        try:
            item = reader.read(row)
            if item is not None:
                _check_texts(item)
        except _ReferenceError as error:
            raise CheckpointError(path, f"line {number}: {error}") from None
        except (
            LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
            re.error,
        ):  # fmt: skip
            keys = ", ".join(sorted(reader.keys))
            reason = f"line {number} is not of the form of the first: {keys}"
            raise CheckpointError(path, reason) from None
        if item is not None:
            items.append(item)
    if not items:
        raise CheckpointError(path, "holds no usable items")
    return Task(
        path.stem,
        _kind_of(path.stem, first, reader),
        reader.form,
        tuple(items),
        str(path),
        stops=reader.stops,
        max_tokens=reader.max_tokens,
    )


# -- forms of files -----------------------------------------------------------------------------


class _ReferenceError(Exception):
    """The reference of an item cannot be right, so that no answer could be."""


def _check_texts(item: Item) -> None:
    """Raises TypeError: a prompt, a choice or the answer is no text."""
    texts = [*(prompt.text for prompt in item.prompts), *item.choices, item.answer]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(item)


def _text(row: Mapping[str, Any], key: str) -> str:
    """A field that is put into a prompt. Raises TypeError, KeyError."""
    if not isinstance(row[key], str):
        raise TypeError(row[key])
    return str(row[key])


def _place(value: object, count: int) -> int:
    """The place of the right one of ``count`` choices: an integer, or its digits as text."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(value)
    if not 0 <= value < count or count < 2:
        raise ValueError(value)
    return value


def _choice(prompt: str, choices: Sequence[str], gold: object) -> Item:
    place = _place(gold, len(choices))
    return Item((Prompt(prompt),), tuple(str(choice) for choice in choices), place)


def _letter(label: str) -> int:
    return "ABCDEFGH".index(label.strip())


def _query(row: dict[str, Any]) -> Item:
    choices = [f" {choice}" for choice in row["choices"]]
    return _choice(f"{_text(row, 'query')}\nAnswer:", choices, row["gold"])


def _hellaswag(row: dict[str, Any]) -> Item:
    return _choice(row["ctx"], [f" {ending}" for ending in row["endings"]], row["label"])


def _piqa(row: dict[str, Any]) -> Item:
    prompt = f"Question: {_text(row, 'goal')}\nAnswer:"
    return _choice(prompt, [f" {row['sol1'].strip()}", f" {row['sol2'].strip()}"], row["label"])


def _options(row: dict[str, Any]) -> Item | None:
    if not isinstance(row["label"], str) or len(row["label"].strip()) != 1:
        return None  # several right answers
    text = f"{row['passage']}\n" if row.get("passage") else ""
    choices = [" " + re.sub(r"^\([A-H]\)\s*", "", option) for option in row["options"]]
    return _choice(f"{text}{_text(row, 'question')}\n", choices, _letter(row["label"]))


def _question(row: dict[str, Any]) -> Item | None:
    if row.get("error_type", "ok") != "ok":
        return None
    choices = [f" {choice}" for choice in row["choices"]]
    return _choice(f"Question: {_text(row, 'question')}\nAnswer:", choices, row["answer"])


def _contexts(row: dict[str, Any]) -> Item:
    contexts = row["context_options"]
    gold = _place(row["gold"], len(contexts))
    continuation = " " + row["continuation"].strip()
    return Item(tuple(Prompt(text) for text in contexts), (continuation,), gold)


def _worked(row: dict[str, Any]) -> Item:
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    if not _is_number(answer):
        raise _ReferenceError(
            f"the answer ends in {answer[-40:]!r}, where a worked one has a number after ####, or is"
            " one; items with texts as answers have the keys context, answer"
        )
    return Item((Prompt(f"Question: {_text(row, 'question')}\nAnswer:"),), answer=answer)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _continuation(row: dict[str, Any]) -> Item:
    answer = str(row["continuation"]).strip()
    return Item((Prompt(row["context"].rstrip()),), answer=f" {answer}")


def _answer(row: dict[str, Any]) -> Item:
    return Item(
        (Prompt(f"Question: {_text(row, 'context')}\nAnswer:"),), answer=f" {row['answer']}"
    )


def _humaneval(row: dict[str, Any]) -> Item:
    return Item(
        (Prompt(row["prompt"]),),
        answer=row["canonical_solution"],
        data={"tests": f"{row['test']}\ncheck({row['entry_point']})\n", "head": row["prompt"]},
    )


def _mbpp(row: dict[str, Any]) -> Item:
    tests = [str(test) for test in row["test_list"]]
    imports = "\n".join(row.get("test_imports", []))
    text = f'"""\n{_text(row, "prompt")}\n{tests[0]}\n"""\n'
    return Item(
        (Prompt(text),),
        answer=row["code"],
        data={"tests": "\n".join([imports, *tests]) + "\n", "head": ""},
    )


def _sql(row: dict[str, Any]) -> Item:
    prompt = f"{row['schema'].strip()}\n-- {_text(row, 'question')}\n"
    try:
        run_query(row["schema"], _text(row, "sql"))
    except SchemaError as error:
        raise _ReferenceError(f"the schema does not run in SQLite: {error}") from None
    except sqlite3.Error as error:
        raise _ReferenceError(f"sql does not run on its schema: {error}") from None
    return Item((Prompt(prompt),), answer=row["sql"], data={"schema": row["schema"]})


def _format(row: dict[str, Any]) -> Item:
    wanted = row["format"]
    if not isinstance(wanted, dict) or not {"json", "regex", "keys"} & wanted.keys():
        raise ValueError(wanted)
    re.compile(wanted.get("regex", ""))
    keys = wanted.get("keys", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise TypeError(keys)
    item = Item((Prompt(row["prompt"]),), answer=row.get("answer", ""), data={"format": wanted})
    if item.answer and not has_format(item.answer, wanted):
        raise _ReferenceError("the answer is not in the format that is asked for")
    return item


def has_format(text: str, wanted: Mapping[str, Any]) -> bool:
    """Whether a text has a format: ``json`` (equal to), ``keys`` (a JSON object with these) or
    ``regex`` (the whole text).
    """
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


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Files whose first line has these keys."""

    keys: frozenset[str]
    form: Form
    kind: Kind
    read: Callable[[dict[str, Any]], Item | None]
    stops: tuple[str, ...] = ("\n",)
    max_tokens: int = 32


def _reader(keys: str, form: Form, kind: Kind, read: Any, **more: Any) -> _Reader:
    return _Reader(frozenset(keys.split()), form, kind, read, **more)


_FUNCTION_ENDS = ("\ndef ", "\nclass ", "\nif __name__", "\nprint(", "\n#", "\n```", "\nassert ")
_READERS = (
    _reader("context_options continuation gold", Form.CHOICE, Kind.CHAT, _contexts),
    _reader("query choices gold", Form.CHOICE, Kind.KNOWLEDGE, _query),
    _reader("ctx endings label", Form.CHOICE, Kind.CHAT, _hellaswag),
    _reader("goal sol1 sol2 label", Form.CHOICE, Kind.KNOWLEDGE, _piqa),
    _reader("question options label", Form.CHOICE, Kind.KNOWLEDGE, _options),
    _reader("question choices answer", Form.CHOICE, Kind.KNOWLEDGE, _question),
    _reader("schema question sql", Form.SQL, Kind.SQL, _sql, stops=("\n\n", ";"), max_tokens=96),
    _reader(
        "prompt entry_point canonical_solution test", Form.CODE, Kind.CODE, _humaneval,
        stops=_FUNCTION_ENDS, max_tokens=192,
    ),
    _reader(
        "prompt code test_list", Form.CODE, Kind.CODE, _mbpp,
        stops=("\nassert ", '\n"""', "\n```", "\nprint("), max_tokens=192,
    ),
    _reader(
        "prompt format", Form.FORMAT, Kind.STRUCTURED_OUTPUT, _format, stops=(), max_tokens=128
    ),
    _reader("context continuation", Form.EXACT, Kind.CHAT, _continuation),
    _reader(
        "question answer", Form.WORKED, Kind.MATHS, _worked,
        stops=("\nQuestion:",), max_tokens=_WORKED_TOKENS,
    ),
    _reader("context answer", Form.EXACT, Kind.MATHS, _answer),
)  # fmt: skip
_KINDS_BY_NAME = (
    ("boolq", Kind.CLASSIFICATION),
    ("mathqa", Kind.MATHS),
    ("dyck", Kind.STRUCTURED_OUTPUT),
    ("repeat_copy", Kind.STRUCTURED_OUTPUT),
    ("cs_algorithms", Kind.CODE),
)


def _kind_of(name: str, row: Mapping[str, Any], reader: _Reader) -> Kind:
    if isinstance(row.get("kind"), str):
        return parse_kinds([row["kind"]])[0]
    for part, kind in _KINDS_BY_NAME:
        if part in name:
            return kind
    return reader.kind
