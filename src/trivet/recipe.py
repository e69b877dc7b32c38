"""A recipe: one small TOML file that says how to run a model, and on what evidence.

`trivet ladder` writes it; every verb but quantize takes it as MODEL. Unknown keys are refused, so that
a typo never does nothing. The evidence tables are carried along and not interpreted here.

    version = 1
    model = "demo"
    weights = "w8a8"
    kv = "int8"
    [speculation]   draft, draft_tokens
    [limits]        max_model_len, max_num_seqs, max_step_tokens, max_prefill_chunk (0: no chunking)
    [topology]      workers
    [evidence]      free form
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivet import files
from trivet.config import DEMO, KVFormat, ModelConfig, own_or_format
from trivet.errors import CheckpointError, ConfigError

VERSION = 1
_MAX_FILE_BYTES = 4 << 20
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_TABLES = {
    "speculation": ("draft", "draft_tokens"),
    "limits": ("max_model_len", "max_num_seqs", "max_step_tokens", "max_prefill_chunk"),
    "topology": ("workers",),
}
_TOP = ("version", "model", "weights", "kv")
_INTEGERS = {"draft_tokens", *_TABLES["limits"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to run a model. Fields that are None leave the choice to the verb's own default.

    ``max_prefill_chunk`` 0 means whole prompts (no chunking), as on the command line.
    """

    model: str
    weights: str = "auto"
    kv: str = "bf16"
    draft: str | None = None
    draft_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_step_tokens: int | None = None
    max_prefill_chunk: int | None = None
    workers: str | None = None
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        ModelConfig(model=self.model, weights=self.weights, kv=KVFormat.parse(self.kv))
        if self.draft not in (None, "off", "ngram"):
            raise ConfigError("draft", self.draft, "off, ngram")

    def settings(self) -> dict[str, Any]:
        """The fields that are set, by the names of the command line; without model and evidence."""
        fields = dataclasses.asdict(self)
        del fields["evidence"], fields["model"]
        return {name: value for name, value in fields.items() if value is not None}

    def to_toml(self) -> str:
        """The file's text. `load_recipe` of it gives an equal recipe."""
        lines = [
            f"version = {VERSION}",
            f"model = {_value(self.model)}",
            f"weights = {_value(self.weights)}",
            f"kv = {_value(self.kv)}",
        ]
        for table, names in _TABLES.items():
            values = {name: getattr(self, name) for name in names}
            values = {name: value for name, value in values.items() if value is not None}
            if values:
                lines += ["", f"[{table}]", *(f"{k} = {_value(v)}" for k, v in values.items())]
        if self.evidence:
            lines += _table_lines("evidence", self.evidence)
        return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """A TOML value. TOML has no null: callers drop None before."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)  # TOML spells infinities and NaN as Python does
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _table_lines(name: str, table: Mapping[str, Any]) -> list[str]:
    """[name] with scalars first, then sub-tables and arrays of tables; None is left out."""
    lines = ["", f"[{name}]"]
    nested: list[str] = []
    for key, value in table.items():
        quoted = key if _BARE_KEY.match(key) else _value(key)
        if value is None:
            continue
        if isinstance(value, Mapping):
            nested += _table_lines(f"{name}.{quoted}", value)
        elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            for item in value:
                inner = _table_lines(f"{name}.{quoted}", item)
                inner[1] = f"[[{name}.{quoted}]]"
                nested += inner
        else:
            lines.append(f"{quoted} = {_value(value)}")
    return lines + nested


def is_recipe(model: str) -> bool:
    """Whether a MODEL argument names a recipe: an existing file whose name ends in ``.toml``."""
    return model.endswith(".toml") and Path(model).is_file()


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe file.

    A relative ``model`` that lies beside the recipe, a model folder or a .gguf file, is taken from
    there; ``demo`` always is the demo model.
    Raises CheckpointError: not readable, not TOML, no version 1, an unknown key, a wrong type;
    ConfigError: a format or drafter that does not exist.
    """
    path = Path(path)
    try:
        data = tomllib.loads(files.read_text(path, _MAX_FILE_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise CheckpointError(path, f"is not valid TOML: {error}") from None
    if "version" not in data:
        raise CheckpointError(path, f"version is missing; add version = {VERSION}")
    version = data["version"]
    if type(version) is not int or version != VERSION:  # true and 1.0 equal 1 in Python
        raise CheckpointError(path, f"version must be {VERSION}, found {version!r:.80}")
    fields: dict[str, Any] = {}
    for key, value in data.items():
        if key == "version":
            continue
        if key in _TOP:
            fields[key] = _checked(path, key, value)
        elif key in _TABLES:
            _expect(path, key, value, dict)
            for name, inner in value.items():
                if name not in _TABLES[key]:
                    raise CheckpointError(path, f"unknown key {key}.{name}")
                fields[name] = _checked(path, f"{key}.{name}", inner)
        elif key == "evidence":
            _expect(path, key, value, dict)
            fields[key] = value
        else:
            raise CheckpointError(path, f"unknown key {key}")
    if "model" not in fields:
        raise CheckpointError(path, "key model is missing")
    if not fields["model"]:
        raise CheckpointError(
            path, "model is empty; expected a folder, a .gguf file, a hub id or demo"
        )
    beside = path.parent / fields["model"]
    if fields["model"] != DEMO and not Path(fields["model"]).is_absolute() and _is_model(beside):
        fields["model"] = str(beside)
    return Recipe(**fields)


def _is_model(path: Path) -> bool:
    """Whether a path looks like a model; a folder of another kind may have a model's name."""
    return (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file())


def _expect(path: Path, key: str, value: object, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = {dict: "a table", int: "an integer", str: "a string"}[kind]
        raise CheckpointError(path, f"{key} must be {expected}, found {value!r:.80}")


def _checked(path: Path, key: str, value: object) -> object:
    name = key.rpartition(".")[2]
    _expect(path, key, value, int if name in _INTEGERS else str)
    if isinstance(value, int) and value < 0:
        raise CheckpointError(path, f"{key} must not be negative, found {value}")
    if name == "weights" and isinstance(value, str):
        own_or_format(value)
    return value
