"""The texts that quality is measured on: files, or texts that every Python carries.

The project ships no third-party text. The two built-in corpora are the topics of `pydoc_data` (prose
about the language) and the source of a fixed list of standard-library modules (code). Both depend on
the Python version, so a corpus carries the hash of the text it holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from trivet import files
from trivet.errors import CheckpointError, ConfigError

PROSE = "pydoc-topics"
CODE = "stdlib-source"
_CODE_MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "cmd", "code", "configparser", "contextlib",
    "copy", "csv", "dataclasses", "difflib", "fileinput", "fnmatch", "fractions", "functools", "glob",
    "gzip", "heapq", "inspect", "ipaddress", "json/decoder", "json/encoder", "linecache", "mailbox",
    "mimetypes", "netrc", "optparse", "pathlib", "pickle", "pprint", "queue", "random", "sched",
    "selectors", "shelve", "shlex", "shutil", "socketserver", "statistics", "string", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback", "uuid", "warnings",
    "wave", "weakref", "zipfile",
)  # fmt: skip
_MAX_CORPUS_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Corpus:
    """One text. ``sha256`` is of its UTF-8 bytes; ``source`` says where it came from."""

    name: str
    text: str = dataclasses.field(repr=False)
    source: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def builtin_corpora() -> list[Corpus]:
    """The prose and the code corpus of this Python, in this order."""
    return [_prose(), _code()]


def load_corpora(paths: Sequence[str | Path] | None) -> list[Corpus]:
    """Corpora from text files, or the built-in ones when none are named.

    A path may also be the name of a built-in corpus. Files of the same name are told apart by a number.
    Raises CheckpointError: a file that cannot be read, is empty, not UTF-8 or absurdly long.
    """
    if not paths:
        return builtin_corpora()
    corpora: list[Corpus] = []
    for path in paths:
        if str(path) in (PROSE, CODE) and not Path(path).exists():
            corpora.append(_prose() if str(path) == PROSE else _code())
        else:
            corpora.append(_read_corpus(Path(path), {corpus.name for corpus in corpora}))
    return corpora


def _read_corpus(path: Path, taken: set[str]) -> Corpus:
    text = files.read_text(path, _MAX_CORPUS_BYTES)
    if not text.strip():
        raise CheckpointError(path, "holds no text")
    name, number = path.stem, 2
    while name in taken:
        name, number = f"{path.stem}-{number}", number + 1
    return Corpus(name, text, str(path))


def _python() -> str:
    return f"Python {platform.python_version()}"


def _prose() -> Corpus:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("corpus", PROSE, "a file: this Python has no pydoc_data") from None
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return Corpus(PROSE, text, f"pydoc_data.topics of {_python()}")


def _code() -> Corpus:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / f"{module}.py" for module in _CODE_MODULES]
    texts = [path.read_text(encoding="utf-8").strip() for path in paths if path.is_file()]
    if not texts:
        raise ConfigError("corpus", CODE, "a file: this Python has no library source")
    return Corpus(CODE, "\n\n\n".join(texts), f"{len(texts)} library modules of {_python()}")
