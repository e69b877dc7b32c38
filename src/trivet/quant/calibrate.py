"""Calibration data: token sequences like those the model will serve, and a part kept apart.

A traffic file is JSONL, one object a line with ``messages`` (or ``turns``, or ``prompt``, or ``text``),
or plain text. Chats go through the chat template and prompts get BOS, exactly as they are served. A
general mix of prose and code from the Python library is added: calibration on one kind of text alone
has cost models their other abilities. Documents longer than a window are cut into windows (each with
BOS where the model has one), none is dropped for its length, and nothing is padded.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet import files
from trivet.errors import CheckpointError, ConfigError, RequestError

if TYPE_CHECKING:
    from trivet.checkpoint import Tokenizer

TRAFFIC, PROSE, CODE = "traffic", "prose", "code"
MIN_TOKENS = 8  # shorter documents say nothing about a layer's inputs
MAX_SAMPLES = 1 << 20
MIN_WINDOW, MAX_WINDOW = 16, 1 << 16
_MAX_FILE_BYTES = 1 << 30
_CHECKED_CHARS = 4096  # of a text, when it is only asked whether there are tokens enough
_SURPLUS = 3  # general documents are read until so many times the tokens wanted are there
HELD_OUT_TOKENS = 4096  # at most, drawn from what is kept apart: enough to measure an error on
_STRATA = 4  # equal shares of tokens are drawn from this many ranges of length
# Not the modules that `trivet evaluate` reads, so that a gate never judges on what was calibrated on.
CODE_MODULES = (
    "_pydecimal", "_pyio", "_strptime", "abc", "aifc", "asyncio/base_events", "asyncio/events",
    "asyncio/locks", "asyncio/queues", "asyncio/tasks", "bdb", "bz2", "cgi", "codecs", "codeop",
    "collections/__init__", "colorsys", "compileall", "concurrent/futures/_base",
    "concurrent/futures/thread", "cProfile", "crypt", "curses/textpad", "datetime", "dis",
    "doctest", "email/_header_value_parser", "email/message", "email/utils", "enum", "filecmp",
    "ftplib", "getopt", "gettext", "hashlib", "hmac", "html/parser", "http/client",
    "http/cookies", "http/server", "imaplib", "imghdr", "importlib/_bootstrap", "keyword",
    "logging/__init__", "logging/handlers", "lzma", "modulefinder", "multiprocessing/pool",
    "nntplib", "ntpath", "numbers", "opcode", "operator", "pdb", "pickletools", "pkgutil",
    "platform", "plistlib", "poplib", "posixpath", "profile", "pstats", "pydoc", "re/_parser",
    "reprlib", "secrets", "signal", "smtplib", "socket", "sqlite3/dbapi2", "ssl", "stat", "subprocess",
    "symtable", "sysconfig", "telnetlib", "trace", "tracemalloc", "turtle", "types", "typing",
    "unittest/case", "unittest/mock", "urllib/parse", "urllib/request", "xml/dom/minidom",
    "xmlrpc/client", "zipapp",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Document:
    """One text as token ids, and where it came from."""

    ids: tuple[int, ...]
    domain: str


_MIN_SHARE = 0.5  # of the tokens asked for; less is worth a warning


@dataclasses.dataclass(frozen=True)
class CalibrationConfig:
    """What to calibrate on: the arguments of `build_calibration`. Raises ConfigError: out of range."""

    traffic: str | Path | None = None
    samples: int = 128
    window: int = 512
    general_share: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise ConfigError("samples", self.samples, f"1 to {MAX_SAMPLES}")
        if not MIN_WINDOW <= self.window <= MAX_WINDOW:
            raise ConfigError("window", self.window, f"{MIN_WINDOW} to {MAX_WINDOW} tokens")
        if not 0 <= self.general_share <= 1:
            raise ConfigError("general_share", self.general_share, "0 to 1")
        if self.seed < 0:
            raise ConfigError("seed", self.seed, "an integer >= 0")

    @property
    def tokens(self) -> dict[str, float]:
        """How many tokens each domain is asked for, less those it is not asked for."""
        budget = self.samples * self.window
        share = 1.0 if self.traffic is None else self.general_share
        asked = {
            TRAFFIC: budget * (1 - share),
            PROSE: budget * share / 2,
            CODE: budget * share / 2,
        }
        return {domain: tokens for domain, tokens in asked.items() if tokens > 0}

    def check(self, tokenizer: Tokenizer) -> None:
        """Find out what is wrong with the traffic before anything runs: every line is parsed, and
        texts become tokens until one has as many as are needed.

        Raises CheckpointError naming the line; ConfigError: all of them are too short.
        """
        if self.traffic is None:
            return
        is_enough = False
        for place, entry in _entries(Path(self.traffic)):
            has_no_template = isinstance(entry, list) and tokenizer.chat_template is None
            if is_enough and not has_no_template:
                continue
            part = entry.lstrip()[:_CHECKED_CHARS] if isinstance(entry, str) else entry
            is_enough = len(_ids(place, part, tokenizer)) >= MIN_TOKENS
        if not is_enough:
            raise _no_texts(self.traffic)

    def build(self, tokenizer: Tokenizer, max_positions: int) -> CalibrationSet:
        """The texts for a model whose context is no shorter than a window."""
        return build_calibration(
            tokenizer,
            self.traffic,
            samples=self.samples,
            window=min(self.window, max_positions),
            general_share=self.general_share,
            seed=self.seed,
        )


@dataclasses.dataclass(frozen=True)
class CalibrationSet:
    """Windows to calibrate on and windows never calibrated on, with a report of how they came about."""

    train: list[list[int]]
    held_out: list[list[int]]
    report: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.train))

    @property
    def warnings(self) -> list[str]:
        """What the texts fell short of what was asked for."""
        train, found = self.report["train"], []
        tokens, asked = train["tokens"], self.report["tokens_asked"]
        if tokens < _MIN_SHARE * asked:
            found.append(f"calibrated on {tokens} tokens of the {asked} asked for: the texts end")
        own, share = train["tokens_by_domain"].get(TRAFFIC, 0), 1 - self.report["general_share"]
        if own < _MIN_SHARE * share * tokens:
            found.append(
                f"{own} of {tokens} tokens are of the traffic ({own / tokens:.0%}), the others of the"
                f" general mix; {share:.0%} were asked for"
            )
        return found

    @property
    def sha256(self) -> str:
        """Hash of all token ids, part of what a resumed run must agree on."""
        data = json.dumps([self.train, self.held_out], separators=(",", ":"))
        return hashlib.sha256(data.encode()).hexdigest()


def read_traffic(path: str | Path, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of a traffic file. Raises CheckpointError naming the line that cannot be used."""
    for place, entry in _entries(Path(path)):
        yield Document(tuple(_ids(place, entry, tokenizer)), TRAFFIC)


_Chat = list[dict[str, Any]]


def _ids(place: str, entry: str | _Chat, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text or a chat as they are served."""
    try:
        if isinstance(entry, str):
            return tokenizer.encode(entry)
        answered = entry[-1]["role"] == "assistant"
        text = tokenizer.apply_chat_template(entry, add_generation_prompt=not answered)
        return tokenizer.encode(text, add_special_tokens=False)
    except RequestError as error:
        raise CheckpointError(place, str(error)) from None


def _entries(file: Path) -> Iterator[tuple[str, str | _Chat]]:
    """Every text or chat of a traffic file with the place it stands at; no tokenizer is needed."""
    text = files.read_text(file, _MAX_FILE_BYTES)
    first = text.lstrip()[:1]
    if not first:
        raise CheckpointError(file, "holds no text")
    if file.suffix != ".jsonl" and first != "{":
        yield str(file), text
        return
    for number, line in enumerate(text.split("\n"), 1):  # U+2028 is no line end in JSONL
        if line.strip():
            yield f"{file}:{number}", _entry(line, f"{file}:{number}")


def _entry(line: str, place: str) -> str | _Chat:
    allowed = "expected an object with messages, turns, prompt or text"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise CheckpointError(place, f"is not valid JSON; {allowed}") from None
    if not isinstance(entry, dict):
        raise CheckpointError(place, f"is no object; {allowed}")
    if entry.get("messages"):
        messages = entry["messages"]
        is_list = isinstance(messages, list) and all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in messages
        )
        if not is_list:
            raise CheckpointError(place, "messages is no list of objects with role and content")
        return list(messages)
    if entry.get("turns"):
        first = entry["turns"][0] if isinstance(entry["turns"], list) else None
        if not isinstance(first, str):
            raise CheckpointError(place, "turns is no list of texts")
        return [{"role": "user", "content": first}]
    text = entry.get("prompt", entry.get("text"))
    if not isinstance(text, str):
        raise CheckpointError(place, f"has keys {sorted(entry)[:6]}; {allowed}")
    return text


def general_documents(
    tokenizer: Tokenizer, domain: str, tokens: float, rng: np.random.Generator
) -> Iterator[Document]:
    """Documents of ``prose`` (the later half of the topics of `pydoc_data`) or ``code`` (modules of
    this Python's library), in an order drawn, until a few times ``tokens`` are there.
    """
    texts = _prose() if domain == PROSE else _code()
    read = 0
    for count, index in enumerate(rng.permutation(len(texts))):
        if count >= 4 and read >= _SURPLUS * tokens:
            return
        ids = tuple(tokenizer.encode(texts[index]()))
        read += len(ids)
        yield Document(ids, domain)


def _prose() -> list[Callable[[], str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    names = sorted(topics)
    return [functools.partial(topics[name].strip) for name in names[len(names) // 2 :]]


def _code() -> list[Callable[[], str]]:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / f"{module}.py" for module in CODE_MODULES]
    return [
        functools.partial(path.read_text, "utf-8", errors="replace")
        for path in paths
        if path.is_file()
    ]


def build_calibration(
    tokenizer: Tokenizer,
    traffic: str | Path | None = None,
    *,
    samples: int = 128,
    window: int = 512,
    general_share: float = 0.25,
    held_out_share: float = 0.125,
    seed: int = 0,
) -> CalibrationSet:
    """Draw about samples * window tokens, and others to measure errors on.

    traffic         None: the general mix alone
    held_out_share  of the documents, kept apart; of as many tokens, up to HELD_OUT_TOKENS
    general_share   least share of calibration tokens from the general mix, half prose and half code
    Raises ConfigError: a setting out of range; CheckpointError: the traffic cannot be used.
    """
    config = CalibrationConfig(traffic, samples, window, general_share, seed)
    if not 0 < held_out_share <= 0.5:
        raise ConfigError("held_out_share", held_out_share, "above 0, up to 0.5")
    rng = np.random.Generator(np.random.PCG64(seed))
    own = [] if traffic is None else list(read_traffic(traffic, tokenizer))
    budget = samples * window
    wanted = config.tokens
    general = [
        document
        for domain, tokens in wanted.items()
        if domain != TRAFFIC
        for document in general_documents(tokenizer, domain, tokens, rng)
    ]
    read = Counter(document.domain for document in own + general)
    own, own_repeats = _distinct(own)
    general, general_repeats = _distinct(general)
    bos = _bos(tokenizer)
    train: list[tuple[str, list[int]]] = []
    held: list[tuple[str, list[int]]] = []
    for domain, tokens in wanted.items():
        documents = [d for d in own + general if d.domain == domain]
        if not documents:
            raise _no_texts(traffic)
        kept, apart = _split(documents, held_out_share, rng)
        train += [(domain, w) for w in _drawn(_windows(kept, window, bos), tokens, rng)]
        wanted_apart = tokens * min(held_out_share, HELD_OUT_TOKENS / budget)
        held += [(domain, w) for w in _drawn(_windows(apart, window, bos), wanted_apart, rng)]
    report = {
        "traffic": None if traffic is None else str(traffic),
        "documents": dict(read),
        "repeats_dropped": own_repeats + general_repeats,
        "window": window,
        "seed": seed,
        "general_share": 1.0 if traffic is None else general_share,
        "train": _described(train),
        "held_out": _described(held),
        "unlike_general": _difference(train),
        "tokens_asked": budget,
    }
    return CalibrationSet([w for _, w in train], [w for _, w in held], report)


def _no_texts(traffic: str | Path | None) -> ConfigError:
    allowed = f"a file with texts of {MIN_TOKENS} tokens; the general mix needs Python's library"
    return ConfigError("traffic", str(traffic), allowed)


def _bos(tokenizer: Tokenizer) -> int | None:
    special = tokenizer.encode("", add_special_tokens=True)
    return special[0] if special else None


def _distinct(documents: Iterable[Document]) -> tuple[list[Document], int]:
    """Documents long enough and not seen before, and how many repeats were dropped."""
    seen: set[tuple[int, ...]] = set()
    kept, repeats = [], 0
    for document in documents:
        if document.ids in seen:
            repeats += 1
        elif len(document.ids) >= MIN_TOKENS:
            seen.add(document.ids)
            kept.append(document)
    return kept, repeats


def _split(
    documents: Sequence[Document], share: float, rng: np.random.Generator
) -> tuple[list[Document], list[Document]]:
    """Whole documents for calibration and others apart; a single document is cut in two."""
    if len(documents) == 1:
        ids = documents[0].ids
        cut = max(1, int(len(ids) * (1 - share)))
        first, rest = (
            Document(ids[:cut], documents[0].domain),
            Document(ids[cut:], documents[0].domain),
        )
        return [first], [rest]
    order = rng.permutation(len(documents))
    count = min(len(documents) - 1, max(1, round(len(documents) * share)))
    return [documents[i] for i in order[count:]], [documents[i] for i in order[:count]]


def _windows(documents: Sequence[Document], window: int, bos: int | None) -> list[list[int]]:
    """Every document in windows; those after the first begin with BOS as the first does."""
    windows = []
    for document in documents:
        ids = list(document.ids)
        windows.append(ids[:window])
        head = [bos] if bos is not None and ids[0] == bos else []
        step = window - len(head)
        windows += [head + ids[i : i + step] for i in range(window, len(ids), step)]
    return [w for w in windows if len(w) >= MIN_TOKENS]


def _drawn(windows: list[list[int]], tokens: float, rng: np.random.Generator) -> list[list[int]]:
    """About so many tokens: each range of length gives its share of them."""
    ordered = sorted((windows[i] for i in rng.permutation(len(windows))), key=len)
    total = sum(map(len, ordered))
    if total <= tokens:
        return ordered
    strata: list[list[list[int]]] = [[] for _ in range(_STRATA)]
    passed = 0
    for item in ordered:
        strata[min(_STRATA - 1, passed * _STRATA // total)].append(item)
        passed += len(item)
    drawn: list[list[int]] = []
    left = tokens
    for index, stratum in enumerate(strata):
        share = left / (_STRATA - index)
        taken = 0
        for place in rng.permutation(len(stratum)):
            if taken >= share:
                break
            item = stratum[place][: max(MIN_TOKENS, int(share - taken))]
            drawn.append(item)
            taken += len(item)
        left -= taken
    return drawn


def _described(items: Sequence[tuple[str, list[int]]]) -> dict[str, Any]:
    lengths = sorted(len(ids) for _, ids in items)
    tokens: Counter[str] = Counter()
    for domain, ids in items:
        tokens[domain] += len(ids)
    places = [int(q * (len(lengths) - 1)) for q in (0, 0.25, 0.5, 0.75, 1)] if lengths else []
    return {
        "windows": len(items),
        "tokens": sum(lengths),
        "tokens_by_domain": dict(tokens),
        "length_quartiles": [lengths[place] for place in places],
    }


def _difference(items: Sequence[tuple[str, list[int]]]) -> dict[str, float | None]:
    """How traffic differs from the general mix: divergence of token frequencies, distinct share.

    ``token_divergence`` is the Jensen-Shannon divergence in nats, 0 (same) to 0.693 (nothing shared).
    """
    counts: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for domain, ids in items:
        counts[domain == TRAFFIC].update(ids)
    own, general = counts[True], counts[False]
    if not own or not general:
        return {"token_divergence": None, "share_of_tokens_unknown_to_general": None}
    names = sorted(own.keys() | general.keys())
    p = np.array([own[i] for i in names], float) / own.total()
    q = np.array([general[i] for i in names], float) / general.total()
    middle = (p + q) / 2

    def divergence(a: Any) -> float:
        known = a > 0
        return float((a[known] * np.log(a[known] / middle[known])).sum())

    unknown = sum(count for token, count in own.items() if token not in general)
    return {
        "token_divergence": (divergence(p) + divergence(q)) / 2,
        "share_of_tokens_unknown_to_general": unknown / own.total(),
    }
