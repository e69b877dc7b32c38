"""From the token ids of a request to the text its client sees, stop strings included.

The engine knows token ids only; whoever turns ids into text (the gateway, `trivet.LLM`) owns the stop
strings and goes through this module, so that both cut a text at the same character and the same token.
It imports no tokenizer: the incremental detokenizer comes in as a protocol.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol


class StopMatcher:
    """Find the earliest stop string in a text that arrives in pieces.

    ``push`` returns what may be shown now and holds back a tail that could still become a stop string.
    The stop string that is complete first wins; of two that end at the same character, the longer. So
    the cut does not depend on how the text was divided into pieces. After a match ``stopped`` is true,
    ``stop_string`` names it, and nothing more is ever returned.

    stops         the stop strings; empty ones are ignored
    include_stop  show the stop string itself as the end of the text
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held_max = max((len(stop) for stop in self._stops), default=1) - 1
        self._include_stop = include_stop
        self._held = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, text: str) -> str:
        """Take the next piece of text; return what may be shown now."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = self._first_complete(buffer)
        if found is not None:
            start, stop = found
            self._held = ""
            self.stop_string = stop
            return buffer[: start + len(stop)] if self._include_stop else buffer[:start]
        keep = self._held_length(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """The text ended without a stop string: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, buffer: str) -> tuple[int, str] | None:
        """(start, stop string) of the match with the smallest end, then the smallest start."""
        found = [(buffer.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _held_length(self, buffer: str) -> int:
        """Length of the longest tail of ``buffer`` that is a proper prefix of a stop string."""
        for length in range(min(self._held_max, len(buffer)), 0, -1):
            tail = buffer[len(buffer) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class Detokenizer(Protocol):
    """Turns ids into text one by one; holds back bytes that are no complete character yet."""

    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class TextDelta:
    """What one run of tokens adds to a request's visible output.

    text       text that may be shown now
    token_ids  the tokens that count: all of the run, or those up to the one that completed a stop
               string (included)
    is_last    a stop string is complete: nothing more will be shown
    """

    text: str
    token_ids: list[int]
    is_last: bool = False


class TextStream:
    """Text of one request: detokenize, drop the final stop token's text, cut at a stop string.

    ``stopped`` turns true when a stop string was found: the caller then aborts the request in the
    engine and reports finish reason ``stop``; tokens pushed afterwards are ignored.

    silent_ids  tokens that end the request when drawn (EOS and stop token ids): counted, never shown
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        silent_ids: Collection[int] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop=include_stop)
        self._silent_ids = frozenset(silent_ids)

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    @property
    def stop_string(self) -> str | None:
        return self._matcher.stop_string

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the tokens of one event."""
        shown: list[str] = []
        taken: list[int] = []
        for token_id in token_ids:
            if self.stopped:
                break
            taken.append(token_id)
            if token_id not in self._silent_ids:
                shown.append(self._matcher.push(self._detokenizer.push(token_id)))
        return TextDelta("".join(shown), taken, self.stopped)

    def finish(self) -> str:
        """The request ended: the text that was held back, if no stop string was found."""
        if self.stopped:
            return ""
        tail = self._matcher.push(self._detokenizer.finish())
        return tail + ("" if self.stopped else self._matcher.finish())
