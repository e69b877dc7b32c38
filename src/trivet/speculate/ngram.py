"""Prompt lookup: propose what followed the last time the request's latest tokens occurred.

Costs no model and almost no time; pays where output repeats its input (summaries, edits, retrieval).

Of all earlier occurrences of the last ``min_match`` tokens, the one whose match reaches back furthest
(up to ``max_match``) is continued; of equally long ones the most recent. A continuation that reaches
the end of the text goes on into the draft itself, so that a loop is drafted whole.

Source: Saxena, "Prompt Lookup Decoding" (2023). Differs: an index of n-grams with chains of earlier
occurrences, kept up token by token, instead of a scan of the text; at most ``_MAX_CANDIDATES`` of the
most recent occurrences are compared, so a step costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

from trivet.engine import DraftAsk, StepLoad
from trivet.errors import ConfigError

_MAX_CANDIDATES = 32


class _Text:
    """Tokens of one request, and where each n-gram of ``min_match`` tokens was followed by a token.

    latest    n-gram -> position after its most recent occurrence
    earlier   position after an occurrence -> position after the one before it
    """

    def __init__(self, token_ids: Sequence[int], min_match: int) -> None:
        self.token_ids: list[int] = []
        self._min_match = min_match
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. An n-gram is indexed once a token follows it."""
        tokens, length = self.token_ids, self._min_match
        first = max(len(tokens), length)
        tokens.extend(token_ids)
        for position in range(first, len(tokens)):
            gram = tuple(tokens[position - length : position])
            before = self._latest.get(gram)
            if before is not None:
                self._earlier[position] = before
            self._latest[gram] = position

    def continuation(self, max_match: int) -> int | None:
        """Position from which the best earlier occurrence of the text's end goes on."""
        tokens, end = self.token_ids, len(self.token_ids)
        candidate = self._latest.get(tuple(tokens[max(0, end - self._min_match) :]))
        best, best_length = None, 0
        for _ in range(_MAX_CANDIDATES):
            if candidate is None:
                break
            length = self._min_match
            limit = min(max_match, candidate)
            while length < limit and tokens[candidate - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = candidate, length
                if length >= max_match:
                    break
            candidate = self._earlier.get(candidate)
        return best


class NgramDrafter:
    """Drafter by prompt lookup. Satisfies `trivet.engine.Drafter`.

    min_match  fewest tokens that must recur
    max_match  beyond this length, matches count as equally good
    """

    def __init__(self, min_match: int = 2, max_match: int = 8) -> None:
        if not 1 <= min_match <= max_match:
            raise ConfigError("min_match", min_match, f"1 to max_match ({max_match})")
        self._min_match = min_match
        self._max_match = max_match
        self._texts: dict[str, _Text] = {}

    @property
    def name(self) -> str:
        """The name given to ``--draft``."""
        return "ngram"

    def open(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Index the prompt and the tokens emitted so far."""
        self._texts[request_id] = _Text(token_ids, self._min_match)

    def propose(self, asks: Sequence[DraftAsk], load: StepLoad) -> list[list[int]]:
        """Continue each request's text from its best earlier match; nothing where there is none."""
        return [self._propose_one(ask) for ask in asks]

    def _propose_one(self, ask: DraftAsk) -> list[int]:
        text = self._texts[ask.request_id]
        start = text.continuation(self._max_match)
        if start is None:
            return []
        draft = text.token_ids[start : start + ask.max_tokens]
        period = len(text.token_ids) - start
        while len(draft) < ask.max_tokens:
            draft.append(draft[-period])
        return draft

    def observe(
        self, request_id: str, token_ids: Sequence[int], drafted: int, accepted: int
    ) -> None:
        """Append committed tokens."""
        self._texts[request_id].extend(token_ids)

    def close(self, request_id: str) -> None:
        """Drop the request's index."""
        del self._texts[request_id]
