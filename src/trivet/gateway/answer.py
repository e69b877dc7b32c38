"""OpenAI's response objects, made from choices and their deltas.

One class per API; each writes whole responses and stream chunks from the same parts, so that the two
cannot disagree. Everything returned is plain data for the JSON encoder.

`top_logprobs` of the legacy object is a dict by token name: the chosen token is always in it, with the
value of `token_logprobs` to the last bit, and an alternative of the same name does not replace it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from trivet.gateway.generation import Choice, Delta, Generation, Token
from trivet.gateway.tokens import CountingDetokenizer, Tokenizer, TokenNames
from trivet.request import Logprob
from trivet.text import Detokenizer

LOGPROB_FLOOR = -9999.0  # JSON has no -inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerInfo:
    """What is the same in every object of one answer."""

    answer_id: str
    created: int
    model: str
    fingerprint: str
    seed: int
    include_usage: bool
    continuous_usage: bool
    wants_logprobs: bool
    wants_token_ids: bool
    echo: bool
    skip_special_tokens: bool


class Answer:
    """Base of both APIs: envelope, usage and timing."""

    object_name: str
    chunk_name: str

    def __init__(self, info: AnswerInfo, tokenizer: Tokenizer, names: TokenNames) -> None:
        self.info = info
        self._tokenizer = tokenizer
        self._names = names
        self._is_begun: set[int] = set()

    def whole(self, generation: Generation, parts: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """The response; ``parts[i]`` are the deltas of choice i."""
        answer = self._envelope(self.object_name)
        answer["choices"] = [
            self._whole_choice(choice, _merge(deltas))
            for choice, deltas in zip(generation.choices, parts, strict=True)
        ]
        answer["usage"] = usage(generation.choices)
        answer["metrics"] = timing(generation.choices)
        return answer

    def chunks(self, generation: Generation, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """Stream chunks for one delta: none when there is nothing to say yet."""
        is_first = choice.index not in self._is_begun
        has_news = delta.text or delta.finish_reason
        has_tokens = delta.tokens and (self.info.wants_logprobs or self.info.wants_token_ids)
        if not (is_first or has_news or has_tokens):
            return []
        self._is_begun.add(choice.index)
        chunk = self._envelope(self.chunk_name)
        chunk["choices"] = [self._chunk_choice(choice, delta, is_first)]
        if self.info.continuous_usage:
            chunk["usage"] = usage(generation.choices)
        elif self.info.include_usage:
            chunk["usage"] = None
        return [chunk]

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """The extra last chunk of ``include_usage``."""
        chunk = self._envelope(self.chunk_name)
        chunk["choices"] = []
        chunk["usage"] = usage(generation.choices)
        chunk["metrics"] = timing(generation.choices)
        return chunk

    def _envelope(self, name: str) -> dict[str, Any]:
        info = self.info
        return {
            "id": info.answer_id,
            "object": name,
            "created": info.created,
            "model": info.model,
            "system_fingerprint": info.fingerprint,
            "seed": info.seed,
        }

    def _ending(self, choice: Choice, delta: Delta, is_first: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "finish_reason": delta.finish_reason,
            "stop_reason": choice.stop_reason if delta.finish_reason else None,
        }
        if self.info.wants_token_ids:
            fields["token_ids"] = [token.token_id for token in delta.tokens]
            if is_first:
                fields["prompt_token_ids"] = choice.prompt.token_ids
        return fields

    def _whole_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, choice: Choice, delta: Delta, is_first: bool) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    """/v1/completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def _whole_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return self._chunk_choice(choice, delta, is_first=True)

    def _chunk_choice(self, choice: Choice, delta: Delta, is_first: bool) -> dict[str, Any]:
        echoed = (choice.prompt.text or "") if self.info.echo else ""
        text = echoed + delta.text if is_first else delta.text
        logprobs = None
        if self.info.wants_logprobs:
            lines = _LegacyLogprobs(self._names)
            if is_first and self.info.echo:
                lines.add_prompt(
                    choice,
                    self._tokenizer.detokenizer(self.info.skip_special_tokens, False),
                    len(echoed),
                )
            for token in delta.tokens:
                lines.add(token.token_id, token.logprob, len(echoed) + token.offset)
            logprobs = lines.fields
        fields = {"index": choice.index, "text": text, "logprobs": logprobs}
        return fields | self._ending(choice, delta, is_first)


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _whole_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        fields = {"index": choice.index, "message": message, "logprobs": self._content(delta)}
        return fields | self._ending(choice, delta, is_first=True)

    def _chunk_choice(self, choice: Choice, delta: Delta, is_first: bool) -> dict[str, Any]:
        parts: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if is_first or delta.text:
            parts["content"] = delta.text
        fields = {"index": choice.index, "delta": parts, "logprobs": self._content(delta)}
        return fields | self._ending(choice, delta, is_first)

    def _content(self, delta: Delta) -> dict[str, Any] | None:
        if not self.info.wants_logprobs:
            return None
        return {"content": [self._entry(token) for token in delta.tokens], "refusal": None}

    def _entry(self, token: Token) -> dict[str, Any]:
        logprob = token.logprob
        assert logprob is not None, "log-probabilities were asked for"
        tops = zip(logprob.top_ids, logprob.top_logprobs, strict=True)
        entry = self._named(token.token_id, logprob.logprob)
        entry["top_logprobs"] = [self._named(token_id, value) for token_id, value in tops]
        return entry

    def _named(self, token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": self._names.name(token_id),
            "logprob": max(value, LOGPROB_FLOOR),
            "bytes": self._names.bytes_of(token_id),
        }


class _LegacyLogprobs:
    """The parallel lists of the completions API."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self.fields: dict[str, list[Any]] = {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def add(self, token_id: int, logprob: Logprob | None, offset: int) -> None:
        self._tokens.append(self._names.name(token_id))
        self._offsets.append(offset)
        if logprob is None:
            self._values.append(None)
            self._tops.append(None)
        else:
            self._values.append(max(logprob.logprob, LOGPROB_FLOOR))
            self._tops.append(self._top(token_id, logprob))

    def _top(self, token_id: int, logprob: Logprob) -> dict[str, float]:
        chosen = self._names.name(token_id)
        top: dict[str, float] = {}
        for other_id, value in zip(logprob.top_ids, logprob.top_logprobs, strict=True):
            name = self._names.name(other_id)
            if other_id != token_id and (name == chosen or name in top):
                name = f"token_id:{other_id}"
            top[name] = max(value, LOGPROB_FLOOR)
        top[chosen] = max(logprob.logprob, LOGPROB_FLOOR)
        return top

    def add_prompt(self, choice: Choice, detokenizer: Detokenizer, text_len: int) -> None:
        counter = CountingDetokenizer(detokenizer)
        entries = choice.prompt_logprobs or [None] * len(choice.prompt.token_ids)
        for token_id, entry in zip(choice.prompt.token_ids, entries, strict=True):
            self.add(token_id, entry, min(counter.num_chars, text_len))
            counter.push(token_id)


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens so far. A prompt counts once however many choices it has.

    cached_tokens of a prompt is the least of its choices, so that choices that found the first one's
    pages do not pass for a cache hit.
    """
    prompts: dict[int, tuple[int, int]] = {}
    completion = 0
    for choice in choices:
        cached = choice.cached_len or 0
        key = id(choice.prompt)
        known = prompts.get(key)
        cached = cached if known is None else min(cached, known[1])
        prompts[key] = (len(choice.prompt.token_ids), cached)
        completion += choice.output_len
    prompt_tokens = sum(length for length, _ in prompts.values())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in prompts.values())},
    }


def timing(choices: Sequence[Choice]) -> dict[str, Any]:
    """Where the time of the first choice went, in milliseconds; null where a stage was not reached.

    queue + prefill + decode is its time in the worker; the rest of the client's time was spent in
    the gateway and on the network.
    """
    first = choices[0]
    times = first.times
    fields: dict[str, Any] = {
        "time_to_first_token_ms": _ms(first.arrived, first.first_token_at),
        "queue_time_ms": None,
        "prefill_time_ms": None,
        "decode_time_ms": None,
    }
    if times is not None:
        fields["queue_time_ms"] = _ms(times.arrived, times.scheduled)
        fields["prefill_time_ms"] = _ms(times.scheduled, times.first_token)
        fields["decode_time_ms"] = _ms(times.first_token, times.finished)
        fields["preemptions"] = times.preemptions
        fields["draft_tokens"] = times.draft_tokens
        fields["accepted_tokens"] = times.accepted_tokens
    return fields


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round((end - start) * 1000.0, 3)


def _merge(deltas: Sequence[Delta]) -> Delta:
    text = "".join(delta.text for delta in deltas)
    tokens = [token for delta in deltas for token in delta.tokens]
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
    return Delta(text, tokens, reasons[0] if reasons else None)
