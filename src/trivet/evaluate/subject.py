"""A model under test as the checks see it: texts in, log-probabilities and greedy texts out.

`LocalSubject` runs a loaded model in this process; `trivet.evaluate.endpoint` speaks to a server. Both
are a `Subject`, so a check is written once. Scores of one text do not depend on what is scored
with it (invariant I1), which is why contexts shared by several continuations are computed once.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from trivet import files
from trivet.config import PAGE_TOKENS, EngineConfig
from trivet.errors import ConfigError, EngineError, RequestError
from trivet.evaluate.scoring import LogSoftmax, Rows, Scorer, Window
from trivet.loader import LoadedModel
from trivet.native.api import Arena, StepInput
from trivet.request import (
    CancelledEvent,
    ErrorEvent,
    FinishedEvent,
    FinishReason,
    Request,
    SamplingParams,
    TokensEvent,
)
from trivet.text import TextStream

if TYPE_CHECKING:
    from trivet.engine import Engine

_MAX_ROWS = 256  # rows of one forward call of scoring
_BATCH_ROWS = 2048  # rows laid out in pages before they are run
_MAX_SEQS = 32  # prompts generated for at once
MAX_KNOWN_BYTES = 32 << 20  # of a file of answers
_CHAT_TURN = "User: {}\nAssistant:"  # a chat for models without a template


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Text before the answer. A chat is one user message, rendered by the model's own template."""

    text: str
    is_chat: bool = False

    @property
    def plain(self) -> str:
        """The prompt where there is no template."""
        return _CHAT_TURN.format(self.text) if self.is_chat else self.text


@dataclasses.dataclass(frozen=True)
class Score:
    """A continuation: its tokens' log-probabilities in nats, and whether each was the most likely."""

    logprobs: tuple[float, ...]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        return sum(self.logprobs)

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs)


@dataclasses.dataclass(frozen=True)
class Generated:
    """A greedy text with its tokens: ids, or names where only those are known."""

    text: str
    tokens: Sequence[int | str]
    is_complete: bool  # ended by a stop token or string, not by its length


class Subject(abc.ABC):
    """What the checks need of a model, wherever it runs.

    `LocalSubject` is a model in this process, `trivet.evaluate.endpoint.EndpointSubject` one behind a
    URL. What the second cannot give is None here, and the check that needs it is named as not run.
    """

    @property
    @abc.abstractmethod
    def max_tokens(self) -> int:
        """Longest prompt and answer together."""

    @property
    def loaded(self) -> LoadedModel | None:
        """The model with its files; None behind a URL."""
        return None

    @property
    @abc.abstractmethod
    def weights(self) -> str:
        """Full form of the weights that run; UNKNOWN where a server does not tell."""

    @property
    @abc.abstractmethod
    def kv(self) -> str:
        """Format of the KV pages; UNKNOWN where a server does not tell."""

    @property
    @abc.abstractmethod
    def hashes(self) -> dict[str, str | None]:
        """``identity`` of the source and ``numerics_id`` of what runs, as far as they are known."""

    @property
    @abc.abstractmethod
    def end_tokens(self) -> list[int] | list[str] | None:
        """The tokens that end a text, in order; None: not known."""

    @property
    @abc.abstractmethod
    def context(self) -> int | None:
        """Positions the model was made for, whatever is served of them; None: not known."""

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain text."""

    @abc.abstractmethod
    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Token ids of a chat as the template renders it; None: there is none, or it refuses."""

    @abc.abstractmethod
    def read(self, window: Window) -> Iterator[Rows]:
        """As `trivet.evaluate.scoring.Reader` says. Raises ConfigError: a window above max_tokens."""

    @abc.abstractmethod
    def score(
        self, items: Sequence[Sequence[tuple[Prompt, str]]], advance: Callable[[int], None]
    ) -> list[list[Score]]:
        """Scores of the continuations of each item. advance: told how many items are done."""

    @abc.abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        stops: Sequence[str],
        advance: Callable[[int], None],
        guesses: Sequence[Generated] = (),
    ) -> list[Generated]:
        """The greedy text after each prompt, cut before the first stop string.

        guesses  another model's texts for these prompts, with the same limits; empty: none. They
                 save time where this model agrees with them, and change nothing.
        """

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt as it would be served: template and special tokens included."""
        rendered = self._encode_rendered(prompt)
        return self.encode(prompt.plain) if rendered is None else rendered

    def _encode_rendered(self, prompt: Prompt) -> list[int] | None:
        """Token ids of a chat through the template; None for plain text, or without a template."""
        if not prompt.is_chat:
            return None
        return self.encode_chat([{"role": "user", "content": prompt.text}])

    def encode_pair(self, prompt: Prompt, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a prompt and of what follows; a plain one is encoded as one text, so that tokens at
        the border are as in a text. Raises ConfigError: one is empty, or they are too long.
        """
        rendered = self._encode_rendered(prompt)
        head = self.encode(prompt.plain) if rendered is None else rendered
        tail: list[int] = []
        if rendered is None:
            whole = self.encode(prompt.plain + continuation)
            if whole[: len(head)] == head:
                tail = whole[len(head) :]
        tail = tail or self.encode(continuation, add_special_tokens=False)
        if not head or not tail or len(head) + len(tail) > self.max_tokens:
            allowed = f"a prompt and an answer, up to {self.max_tokens} tokens together"
            raise ConfigError("tasks", f"{prompt.text[:40]}...", allowed)
        return head, tail


_Entry = tuple[float, bool]  # log-probability of a token, and whether it is the most likely


@dataclasses.dataclass
class KnownAnswers:
    """What one model answered to prompts, by `answer_key`: another gate need not ask again.

    entries  of each continuation's tokens     tokens  of greedy texts
    """

    entries: dict[str, list[list[_Entry]]] = dataclasses.field(default_factory=dict)
    tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> KnownAnswers:
        """What `save` wrote; nothing where there is no such file or it is not ours."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError):
            return cls()

    def save(self, path: Path) -> None:
        """Write all of it; beyond MAX_KNOWN_BYTES nothing is kept. Raises OSError."""
        data = msgspec.json.encode(self)
        if len(data) <= MAX_KNOWN_BYTES:
            files.write(path, data)


def answer_key(
    what: str, head: Sequence[int], tails: Sequence[Sequence[int]], stops: Sequence[str] = ()
) -> str:
    """The name of a question: the ids of a prompt and of what may follow, and where a text ends."""
    text = json.dumps([what, head, tails, stops])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True)
class _Group:
    """A prompt's ids and the ids of its continuations."""

    head: list[int]
    tails: list[list[int]]

    @property
    def num_pages(self) -> int:
        """Pages of the rows that are run: all but each last token's."""
        longest = max(len(tail) for tail in self.tails)
        return -(-(len(self.head) + longest - 1) // PAGE_TOKENS)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows [start, end) of a sequence with its page table, and what is wanted of them.

    firsts  None: nothing; []: every row's next token; else these tokens after the last row
    """

    ids: Sequence[int]
    start: int
    end: int
    table: Sequence[int]
    firsts: list[int] | None = None


class LocalSubject(Subject):
    """A loaded model. Arenas and an engine of its own are made when first needed.

    max_tokens  bounds prompt and answer together and with them the memory for KV
    known       what the model answered before; its answers are added
    """

    def __init__(
        self, model: LoadedModel, max_tokens: int = 4096, known: KnownAnswers | None = None
    ) -> None:
        self.model = model
        self._known = known
        self._max_tokens = min(max_tokens, model.runner.max_positions)
        pages = 2 * -(-self._max_tokens // PAGE_TOKENS)
        self._num_pages = max(pages, _BATCH_ROWS // PAGE_TOKENS + _MAX_SEQS)
        self._request_ids = itertools.count()

    @functools.cached_property
    def _arena(self) -> Arena:
        """Of scoring."""
        return self.model.new_arena(self._num_pages)

    @functools.cached_property
    def _engine(self) -> Engine:
        """Of generation, with an arena of its own."""
        config = EngineConfig(
            max_model_len=self._max_tokens,
            num_pages=self._num_pages,
            max_num_seqs=_MAX_SEQS,
            max_step_tokens=512,
        )
        return self.model.new_engine(config, self.model.new_arena(self._num_pages), None)

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    @property
    def loaded(self) -> LoadedModel:
        return self.model

    @property
    def weights(self) -> str:
        return self.model.weights_form

    @property
    def kv(self) -> str:
        return self.model.config.kv.value

    @property
    def hashes(self) -> dict[str, str | None]:
        return {
            "identity": self.model.packed.identity,
            "numerics_id": self.model.runner.numerics_id,
        }

    @property
    def end_tokens(self) -> list[int]:
        return sorted(self.model.runner.eos_ids)

    @property
    def context(self) -> int:
        return self.model.runner.max_positions

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.model.tokenizer.encode(text, add_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        tokenizer = self.model.tokenizer
        if tokenizer.chat_template is None:
            return None
        try:
            rendered = tokenizer.apply_chat_template(messages)
        except RequestError:
            return None
        return tokenizer.encode(rendered, add_special_tokens=False)

    def read(self, window: Window) -> Iterator[Rows]:
        if len(window.input_ids) > self._max_tokens:
            raise ConfigError("context", len(window.input_ids), f"up to {self._max_tokens}")
        return Scorer(self.model.runner, self._arena).read(window)

    # -- scoring ------------------------------------------------------------------------------

    def score(
        self, items: Sequence[Sequence[tuple[Prompt, str]]], advance: Callable[[int], None]
    ) -> list[list[Score]]:
        """Scores as the protocol says.

        Full pages that prompts in a row share are computed once, and each prompt once for all of its
        continuations: these run one after the other over the same page slots.
        """
        groups: list[_Group] = []
        places: list[list[tuple[int, int]]] = []
        for item in items:
            places.append([])
            start = len(groups)
            for prompt, continuation in item:
                head, tail = self.encode_pair(prompt, continuation)
                same = [n for n in range(start, len(groups)) if groups[n].head == head]
                if not same:
                    groups.append(_Group(head, []))
                number = same[0] if same else len(groups) - 1
                groups[number].tails.append(tail)
                places[-1].append((number, len(groups[number].tails) - 1))
        if not groups:
            return []
        found = self._entries(groups, advance, len(items) / len(groups))
        return [[_score(found[number][tail]) for number, tail in item] for item in places]

    def _entries(
        self, groups: list[_Group], advance: Callable[[int], None], share: float = 0.0
    ) -> list[list[list[_Entry]]]:
        """Of each group, the entries of every continuation's tokens. share: of an item, of each."""
        keys = [answer_key("score", group.head, group.tails) for group in groups]
        known = {} if self._known is None else self._known.entries
        new = {key: group for key, group in zip(keys, groups, strict=True) if key not in known}
        advance(round((len(groups) - len(new)) * share))
        found: dict[str, list[list[_Entry]]] = {}
        waiting = iter(new)
        for batch in self._read(list(new.values())):
            for entries in batch:
                found[next(waiting)] = entries
            advance(round(len(batch) * share))
        if self._known is not None:
            known |= found
        return [found.get(key) or known[key] for key in keys]

    def _read(self, groups: list[_Group]) -> Iterator[list[list[list[_Entry]]]]:
        """Batches of groups: of each, the entries of every continuation's tokens."""
        for alike in _alike(groups):
            common = _common_pages(alike)
            table = list(range(common))
            self._run([_Rows(alike[0].head, 0, common * PAGE_TOKENS, table)])
            for batch in self._batches(alike, common):
                yield self._read_batch(batch, table)

    def _batches(self, groups: list[_Group], common: int) -> Iterator[list[_Group]]:
        """Groups whose pages fit together."""
        batch: list[_Group] = []
        used = rows = 0
        for group in groups:
            pages = group.num_pages - common
            if batch and (common + used + pages > self._num_pages or rows > _BATCH_ROWS):
                yield batch
                batch, used, rows = [], 0, 0
            batch.append(group)
            used, rows = used + pages, rows + len(group.head)
        yield batch

    def _read_batch(self, batch: list[_Group], shared: list[int]) -> list[list[list[_Entry]]]:
        pages = iter(range(len(shared), self._num_pages))
        tables = [
            shared + list(itertools.islice(pages, group.num_pages - len(shared))) for group in batch
        ]
        start = len(shared) * PAGE_TOKENS
        heads = [
            _Rows(group.head, start, len(group.head), table, [tail[0] for tail in group.tails])
            for group, table in zip(batch, tables, strict=True)
        ]
        firsts = self._run(heads)
        entries: list[list[list[_Entry]]] = [[] for _ in batch]
        for turn in range(max(len(group.tails) for group in batch)):
            turns = [n for n, group in enumerate(batch) if turn < len(group.tails)]
            tails = [
                _Rows(
                    batch[n].head + batch[n].tails[turn],
                    len(batch[n].head),
                    len(batch[n].head) + len(batch[n].tails[turn]) - 1,
                    tables[n],
                    [],
                )
                for n in turns
            ]
            for n, rest in zip(turns, self._run(tails), strict=True):
                entries[n].append([firsts[n][turn], *rest])
        return entries

    def _run(self, work: Sequence[_Rows]) -> list[list[_Entry]]:
        """Run rows in order, several sequences to a call; what was found for each."""
        width = max((len(rows.table) for rows in work), default=0)
        found: list[list[_Entry]] = [[] for _ in work]
        waiting = [(n, rows, rows.start) for n, rows in enumerate(work) if rows.start < rows.end]
        while waiting:
            room, parts, rest = _MAX_ROWS, [], []
            for index, rows, start in waiting:
                end = min(rows.end, start + room)
                if end > start:
                    parts.append((index, rows, start, end))
                    room -= end - start
                if end < rows.end:
                    rest.append((index, rows, end))
            waiting = rest
            self._forward(parts, width, found)
        return found

    def _forward(
        self, parts: list[tuple[int, _Rows, int, int]], width: int, found: list[list[_Entry]]
    ) -> None:
        tables = np.full((len(parts), width), -1, np.int32)
        segments: list[list[int]] = []
        tokens: list[int] = []
        wanted: list[int] = []
        followed: list[tuple[int, int, int]] = []  # (row of logits, part, token that follows)
        asked: list[tuple[int, int, list[int]]] = []  # (row of logits, part, tokens asked for)
        for number, (index, rows, start, end) in enumerate(parts):
            tables[number, : len(rows.table)] = rows.table
            segments.append([len(tokens), end - start, start, number])
            if rows.firsts == []:
                for at in range(start, end):
                    followed.append((len(wanted), index, rows.ids[at + 1]))
                    wanted.append(len(tokens) + at - start)
            elif rows.firsts and end == rows.end:
                asked.append((len(wanted), index, rows.firsts))
                wanted.append(len(tokens) + end - 1 - start)
            tokens += rows.ids[start:end]
        runner = self.model.runner
        runner.forward(
            StepInput(
                tokens=np.asarray(tokens, np.int32),
                segments=np.asarray(segments, np.int32),
                page_tables=tables,
                logit_rows=np.asarray(wanted, np.int32),
            ),
            self._arena,
        )
        if followed and not asked:
            entries = runner.token_logprobs(0, [token for *_, token in followed], 0)
            for (_, index, _), entry in zip(followed, entries, strict=True):
                found[index].append((_finite(entry.logprob), entry.rank == 1))
        elif asked:
            with np.errstate(invalid="ignore", over="ignore"):
                logits = runner.logits()
                rows_ = LogSoftmax.of(logits)
                best = logits.argmax(axis=1)
                for row, index, ids in asked:
                    values = rows_.shifted[row, ids].astype(np.float64) - rows_.log_sum[row]
                    found[index] += [
                        (_finite(float(value)), bool(best[row] == token))
                        for value, token in zip(values, ids, strict=True)
                    ]

    # -- generation ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        stops: Sequence[str],
        advance: Callable[[int], None],
        guesses: Sequence[Generated] = (),
    ) -> list[Generated]:
        """Greedy texts. Raises EngineError: a broken model that cannot sample.

        A guess is read in one pass: as far as each of its tokens is the most likely one, it is what
        would have been generated (invariant I1), and only the rest is.
        """
        heads = [self.encode_prompt(prompt) for prompt in prompts]
        keys = [answer_key("generate", head, [[max_tokens]], stops) for head in heads]
        kept = {} if self._known is None else self._known.tokens
        known = [kept.get(key, []) for key in keys]
        if guesses:
            asked = [at for at, tokens in enumerate(known) if not tokens]
            agreed = self._agreeing(
                [heads[at] for at in asked], [guesses[at] for at in asked], advance
            )
            for at, tokens in zip(asked, agreed, strict=True):
                known[at] = tokens
        ends = set(self.model.runner.eos_ids)
        texts: list[_Growing] = []
        streams: dict[str, _Growing] = {}
        for prompt, head, tokens in zip(prompts, heads, known, strict=True):
            text = _Growing(TextStream(self.model.tokenizer.detokenizer(), stops, ends))
            texts.append(text)
            text.num_given = len(tokens)
            is_stopped = bool(tokens) and text.push(tokens)
            if is_stopped or (tokens and tokens[-1] in ends) or len(tokens) >= max_tokens:
                text.finish(is_stopped or tokens[-1] in ends)
                advance(1)
                continue
            request_id = f"gate-{next(self._request_ids)}"
            streams[request_id] = text
            params = SamplingParams(max_tokens=max_tokens - len(tokens), temperature=0.0, seed=0)
            request = Request(request_id=request_id, prompt_ids=head + tokens, params=params)
            try:
                self._engine.add(request, now=0.0)
            except RequestError as error:
                raise ConfigError("tasks", f"{prompt.text[:40]}...", str(error)) from None
        while any(not growing.is_done for growing in streams.values()):
            for event in self._engine.step(0.0):
                growing = streams.get(event.request_id)
                if growing is None:
                    continue
                match event:
                    case TokensEvent():
                        if growing.push(event.token_ids):
                            count = len(growing.token_ids) - growing.num_given
                            self._engine.finish(event.request_id, count, 0.0)
                    case FinishedEvent():
                        growing.finish(event.reason is FinishReason.STOP)
                        advance(1)
                    case ErrorEvent() | CancelledEvent():
                        raise EngineError(f"a request of the gate failed: {event}")
        if self._known is not None:
            kept |= {key: text.token_ids for key, text in zip(keys, texts, strict=True)}
        return [text.generated() for text in texts]

    def _agreeing(
        self, heads: list[list[int]], guesses: Sequence[Generated], advance: Callable[[int], None]
    ) -> list[list[int]]:
        """The first tokens of each guess, as far as this model would have drawn them greedily."""
        tails = [[int(token) for token in guess.tokens] for guess in guesses]
        room = self._max_tokens
        asked = [n for n, tail in enumerate(tails) if tail and len(heads[n]) + len(tail) <= room]
        groups = [_Group(heads[n], [tails[n]]) for n in asked]
        known: list[list[int]] = [[] for _ in heads]
        if not groups:
            return known
        found = self._entries(groups, advance)
        for n, [entries] in zip(asked, found, strict=True):
            agreeing = itertools.takewhile(lambda entry: entry[1], entries)
            known[n] = tails[n][: sum(1 for _ in agreeing)]
        return known


class _Growing:
    """One text that is being generated. num_given: its first tokens, which were known before."""

    num_given = 0

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.is_done = self._is_complete = False

    def push(self, token_ids: Sequence[int]) -> bool:
        """Take tokens; true when a stop string ended the text just now."""
        if self._stream.stopped:
            return False
        delta = self._stream.push(token_ids)
        self.token_ids += delta.token_ids
        self._text.append(delta.text)
        return delta.is_last

    def finish(self, is_complete: bool) -> None:
        self._text.append(self._stream.finish())
        self._is_complete = is_complete or self._stream.stopped
        self.is_done = True

    def generated(self) -> Generated:
        return Generated("".join(self._text), self.token_ids, self._is_complete)


def _score(entries: Sequence[_Entry]) -> Score:
    return Score(tuple(value for value, _ in entries), all(is_best for _, is_best in entries))


def _finite(logprob: float) -> float:
    """A log-probability; what is no number counts as impossible."""
    return logprob if math.isfinite(logprob) else -math.inf


def _alike(groups: Sequence[_Group]) -> Iterator[list[_Group]]:
    """Runs of prompts that share their beginnings: one ends where the next prompt shares less."""
    run: list[_Group] = []
    shared = 0
    for group in groups:
        with_next = _common_pages([run[0], group]) if run else 0
        if len(run) > 1 and with_next + 1 < shared:
            yield run
            run = []
        elif run:
            shared = with_next if len(run) == 1 else min(shared, with_next)
        run.append(group)
    if run:
        yield run


def _common_pages(groups: Sequence[_Group]) -> int:
    """Full pages at the beginning that all prompts share; the row of a last token is left out."""
    first = groups[0].head
    length = min((len(group.head) - 1) // PAGE_TOKENS for group in groups) * PAGE_TOKENS
    for group in groups[1:]:
        while length and group.head[:length] != first[:length]:
            length -= PAGE_TOKENS
    return length // PAGE_TOKENS
