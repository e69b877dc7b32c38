"""A model behind a URL as the checks see it: an OpenAI-compatible server with prompt log-probabilities.

Texts become token ids through the server's own ``POST /tokenize``, and ids go over the wire, so that
both models of a gate read the same tokens and borders are where `LocalSubject` puts them. ``POST
/v1/completions`` with ``echo`` and ``logprobs`` scores given ids, without ``echo`` it gives greedy
text. vLLM and `trivet serve` answer all of this; a server that ignores ``echo`` is refused when it is
opened.

A server gives the log-probability of each token of a prompt and the most likely token beside it, not
the whole vocabulary: what needs more (KL, files) is None, and the checks say so.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import numpy as np

from trivet.config import EndpointConfig
from trivet.errors import ConfigError, EndpointError
from trivet.evaluate.results import UNKNOWN
from trivet.evaluate.scoring import CHUNK_ROWS, Rows, Window
from trivet.evaluate.subject import Generated, Prompt, Score, Subject

_CONNECTIONS = 4  # calls at once
_BATCH_PROMPTS = 16  # of one call
_BATCH_TOKENS = 8192
_MAX_STOPS = 4  # that OpenAI's API takes; the rest is cut here
_CONNECT_S, _ANSWER_S = 10.0, 600.0
_OPENING_S = 30.0  # for an answer that needs no model, when an endpoint is opened
_RETRIES = 4  # of a busy server: 429, or 503
_PROBE = "The quick brown fox jumps over the lazy dog."
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One token of a prompt: nats (NaN: no number), and the most likely token in its place."""

    logprob: float
    best: str | None
    is_best: bool


class EndpointSubject(Subject):
    """A server. Raises EndpointError: it does not answer, or lacks what a gate needs. Close it.

    model_id     name of the model in its API
    fingerprint  ``system_fingerprint`` of its answers, or None
    """

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        key = config.api_key
        if key is not None and not (key.isascii() and key.isprintable()):
            # The key itself is a secret, so it is not shown.
            raise ConfigError("api_key", "...", "printable ASCII, which a header can hold")
        try:
            self._client = httpx.Client(
                base_url=config.base_url,
                headers={} if key is None else {"Authorization": f"Bearer {key}"},
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise self._error(f"is no address of a server: {error}") from None
        self._threads = ThreadPoolExecutor(_CONNECTIONS)
        self._known: dict[tuple[str, bool], list[int]] = {}
        self.fingerprint: str | None = None
        self._answer_s = _OPENING_S
        try:
            card = self._card()
            self.model_id = str(card["id"])
            self._card_says = card
            self._max_tokens = self._probe(card.get("max_model_len"))
            self._end_token = self._told_end()
            self._has_template = True
            self._has_template = self.encode_chat([{"role": "user", "content": "Hi"}]) is not None
            self._answer_s = _ANSWER_S
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End its connections and threads."""
        self._client.close()  # first: it ends the calls that threads still wait for
        self._threads.shutdown(cancel_futures=True)

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    @property
    def weights(self) -> str:
        return _told(self._card_says.get("weights"))

    @property
    def kv(self) -> str:
        return _told(self._card_says.get("kv"))

    @property
    def hashes(self) -> dict[str, str | None]:
        place = f"{self.config.base_url}#{self.model_id}"
        return {"identity": place, "numerics_id": self.fingerprint}

    @property
    def end_tokens(self) -> list[str] | None:
        return None if self._end_token is None else [self._end_token]

    @property
    def context(self) -> None:
        """What is served need not be what the model was made for."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if not text:  # a server may refuse an empty prompt: what is put before another text
            whole, bare = self.encode("a", add_special_tokens), self.encode("a", False)
            return whole[: len(whole) - len(bare)]
        key = (text, add_special_tokens)
        if key not in self._known:
            answer = self._tokenize(prompt=text, add_special_tokens=add_special_tokens)
            self._known[key] = self._ids(answer)
        return self._known[key]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        if not self._has_template:
            return None
        try:
            return self._ids(self._tokenize(messages=list(messages)))
        except _RefusedError:
            return None

    def read(self, window: Window) -> Iterator[Rows]:
        if len(window.input_ids) > self._max_tokens:
            raise ConfigError("context", len(window.input_ids), f"up to {self._max_tokens}")
        count = len(window.target_ids)
        [entries] = self._entries([[*window.input_ids, window.target_ids[-1]]])
        entries = entries[-count:]
        nll = -np.array([entry.logprob for entry in entries])
        best = np.array([entry.best for entry in entries], object)
        for start in range(0, count, CHUNK_ROWS):
            yield Rows(nll[start : start + CHUNK_ROWS], best[start : start + CHUNK_ROWS])

    def score(
        self, items: Sequence[Sequence[tuple[Prompt, str]]], advance: Callable[[int], None]
    ) -> list[list[Score]]:
        asked = [pair for item in items for pair in item]
        pairs = self._at_once(lambda pair: self.encode_pair(*pair), asked)
        batches = list(_batches([head + tail for head, tail in pairs]))
        found = [entries for part in self._at_once(self._entries, batches) for entries in part]
        scores = iter(
            _score(entries[len(head) :]) for entries, (head, _) in zip(found, pairs, strict=True)
        )
        advance(len(items))
        return [[next(scores) for _ in item] for item in items]

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        stops: Sequence[str],
        advance: Callable[[int], None],
        guesses: Sequence[Generated] = (),
    ) -> list[Generated]:
        ids = self._at_once(self.encode_prompt, prompts)
        body: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 1, "seed": 0}
        if stops:
            body["stop"] = list(stops[:_MAX_STOPS])

        def ask(batch: list[list[int]]) -> list[Generated]:
            choices = self._complete(batch, body)
            return [self._checked(_generated, choice, stops) for choice in choices]

        texts = [text for part in self._at_once(ask, list(_batches(ids))) for text in part]
        advance(len(texts))
        return texts

    # -- calls --------------------------------------------------------------------------------

    def _card(self) -> Mapping[str, Any]:
        """What /v1/models says of the model."""
        listed = self._call("GET", "/v1/models")
        cards: dict[str, Mapping[str, Any]]
        cards = self._checked(lambda: {str(card["id"]): card for card in listed["data"]})
        wanted = self.config.model_name
        if not wanted and len(cards) == 1:
            [card] = cards.values()
            return card
        if wanted not in cards:
            names = ", ".join(cards) or "none"
            raise self._error(f"serves the models {names}; name one: {self.config.base_url}#NAME")
        return cards[wanted]

    def _probe(self, told: object) -> int:
        """Refuse what cannot be measured; the longest prompt and answer together."""
        answer = self._tokenize(prompt=_PROBE, add_special_tokens=True)
        ids = self._ids(answer)
        length = told if isinstance(told, int) else answer.get("max_model_len")
        if not isinstance(length, int) or length <= len(ids) + 2:
            raise self._error("does not say how long a request may be (max_model_len)")
        [entries] = self._entries([ids])
        if all(math.isnan(entry.logprob) for entry in entries):
            raise self._error("gives no numbers as log-probabilities of the prompt")
        return (
            length - 2
        )  # a window has one token more than rows, and one token is always generated

    def _told_end(self) -> str | None:
        """The end token, where the server says (vLLM does when it is asked to at its start)."""
        try:
            name = self._call("GET", "/tokenizer_info").get("eos_token")
        except _RefusedError:
            return None
        return name if isinstance(name, str) else None

    def _tokenize(self, **body: object) -> Mapping[str, Any]:
        return self._call("POST", "/tokenize", {"model": self.model_id, **body})

    def _entries(self, prompts: Sequence[list[int]]) -> list[list[_Entry]]:
        """The tokens of each prompt, [len(prompt)]; the first of each is not scored."""
        choices = self._complete(prompts, {"max_tokens": 1, "logprobs": 1, "echo": True, "seed": 0})
        return [
            self._checked(self._echoed, len(ids), choice)
            for ids, choice in zip(prompts, choices, strict=True)
        ]

    def _echoed(self, num_tokens: int, choice: Mapping[str, Any]) -> list[_Entry]:
        found = choice.get("logprobs") or {}
        values, tops = found.get("token_logprobs") or [], found.get("top_logprobs") or []
        if len(values) <= 1 or len(values) != len(tops):
            raise self._error(
                "gives no log-probabilities of the prompt (POST /v1/completions with echo and"
                " logprobs); the gate cannot measure it"
            )
        if len(values) not in (num_tokens, num_tokens + 1):
            raise self._error(f"gives {len(values)} log-probabilities for {num_tokens} tokens")
        pairs = zip(values[:num_tokens], tops[:num_tokens], strict=True)
        return [_entry(value, top) for value, top in pairs]

    def _complete(
        self, prompts: Sequence[list[int]], body: Mapping[str, Any]
    ) -> list[Mapping[str, Any]]:
        """One choice for each prompt, in order."""
        answer = self._call(
            "POST",
            "/v1/completions",
            {"model": self.model_id, "prompt": list(prompts), "temperature": 0, **body},
            _ANSWER_S,
        )
        told = answer.get("system_fingerprint")
        self.fingerprint = told if isinstance(told, str) else self.fingerprint
        choices = self._checked(lambda: sorted(answer["choices"], key=lambda c: int(c["index"])))
        if len(choices) != len(prompts):
            raise self._error(f"gives {len(choices)} choices for {len(prompts)} prompts")
        return choices

    def _ids(self, answer: Mapping[str, Any]) -> list[int]:
        return self._checked(lambda: [int(token) for token in answer["tokens"]])

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        answer_s: float | None = None,
    ) -> Mapping[str, Any]:
        """An answer as JSON. answer_s: how long it may take; None: as long as other calls."""
        answer_s = answer_s or self._answer_s
        timeout = httpx.Timeout(answer_s, connect=min(_CONNECT_S, answer_s))
        try:
            for turn in range(_RETRIES + 1):
                response = self._client.request(method, path, json=body, timeout=timeout)
                if response.status_code not in (429, 503) or turn == _RETRIES:
                    break
                time.sleep(_wait_s(response.headers.get("retry-after"), turn))
        except httpx.ConnectTimeout:
            raise self._error(f"takes no connection within {timeout.connect:g} s") from None
        except httpx.TimeoutException:
            raise self._error(f"does not answer {method} {path} within {answer_s:g} s") from None
        except httpx.HTTPError as error:
            raise self._error(f"does not answer: {error or type(error).__name__}") from None
        except UnicodeEncodeError:
            raise self._error(f"{method} {path} cannot be asked: a lone surrogate in it") from None
        except (httpx.InvalidURL, ValueError, OverflowError) as error:
            raise self._error(f"is no address of a server: {error}") from None
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            answer = None
        if response.status_code != 200:
            reason = f"{method} {path} answers {response.status_code}: {_message(answer)}"
            raise _RefusedError(self.config.model, reason)
        if not isinstance(answer, dict):
            raise self._error(f"{method} {path} answers with something else than a JSON object")
        return answer

    def _checked(self, read: Callable[..., _T], *arguments: object) -> _T:
        """A part of an answer. Raises EndpointError: the answer has another form."""
        try:
            return read(*arguments)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise self._error(f"answers in another form than OpenAI's: {error!r}") from None

    def _error(self, reason: str) -> EndpointError:
        return EndpointError(self.config.model, reason)

    def _at_once(self, ask: Callable[[Any], _T], asked: Sequence[Any]) -> list[_T]:
        """Answers in order, several calls at once."""
        return list(self._threads.map(ask, asked))


class _RefusedError(EndpointError):
    """The server answered a call with an error."""


def _told(value: object) -> str:
    return value if isinstance(value, str) else UNKNOWN


def _wait_s(told: str | None, turn: int) -> float:
    """How long a busy server wants to be left alone."""
    return min(float(told), 30.0) if told is not None and told.isdecimal() else 0.5 * 2.0**turn


def _message(answer: object) -> str:
    """The message of an error in OpenAI's form, or in the flat ones."""
    if isinstance(answer, dict):
        inner = answer.get("error")
        inner = inner if isinstance(inner, dict) else answer
        for name in ("message", "detail"):
            if isinstance(inner.get(name), str):
                return str(inner[name])
    return "no message"


def _batches(prompts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Prompts of one call, in order."""
    batch: list[list[int]] = []
    tokens = 0
    for ids in prompts:
        if batch and (len(batch) == _BATCH_PROMPTS or tokens + len(ids) > _BATCH_TOKENS):
            yield batch
            batch, tokens = [], 0
        batch.append(ids)
        tokens += len(ids)
    if batch:
        yield batch


def _entry(value: float | None, top: Mapping[str, float] | None) -> _Entry:
    """The chosen token is one of ``top``, with the same value; of equal values the last name counts."""
    if value is None or not top:
        return _Entry(math.nan, None, False)
    highest, best = max((number, name) for name, number in top.items())
    return _Entry(float(value), best, value >= highest)


def _score(entries: Sequence[_Entry]) -> Score:
    """A continuation's tokens; what is no number counts as impossible."""
    values = (e.logprob if math.isfinite(e.logprob) else -math.inf for e in entries)
    return Score(tuple(values), all(entry.is_best for entry in entries))


def _generated(choice: Mapping[str, Any], stops: Sequence[str]) -> Generated:
    text = str(choice["text"])
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    logprobs = choice.get("logprobs") or {}
    is_complete = choice.get("finish_reason") == "stop" or bool(ends)
    return Generated(
        text[: min(ends)] if ends else text, tuple(logprobs.get("tokens") or ()), is_complete
    )
