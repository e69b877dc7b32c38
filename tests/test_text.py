"""Stop strings: the cut does not depend on how the text was divided."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trivet.text import StopMatcher, TextStream

_TEXT = st.text("ab\n", max_size=30)


class _Letters:
    """One letter per id; 9 is half a character that needs another 9."""

    def __init__(self) -> None:
        self._half = False

    def push(self, token_id: int) -> str:
        if token_id == 9:
            self._half = not self._half
            return "" if self._half else "é"
        return "abcdefgh"[token_id]

    def finish(self) -> str:
        return "?" if self._half else ""


def ref_cut(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, letter by letter."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(_TEXT, st.lists(st.text("ab\n", max_size=4), max_size=4), st.lists(st.integers(0, 30)))
def test_the_cut_is_that_of_the_definition(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    shown = ""
    for start, end in itertools.pairwise(borders):
        shown += matcher.push(text[start:end])
        assert ref_cut(text, stops).startswith(shown), "text was shown that must not be"
    if not matcher.stopped:
        shown += matcher.finish()
    assert shown == ref_cut(text, stops)
    assert matcher.stopped == (
        ref_cut(text, stops) != text or any(text.endswith(s) for s in stops if s)
    )


def test_text_is_shown_as_early_as_possible() -> None:
    matcher = StopMatcher(["abc"])
    assert [matcher.push(c) for c in "xabd"] == ["x", "", "", "abd"]
    assert [matcher.push(c) for c in "abcx"] == ["", "", "", ""]
    assert (matcher.stopped, matcher.stop_string) == (True, "abc")


def test_the_stop_string_can_be_included() -> None:
    matcher = StopMatcher(["bc"], include_stop=True)
    assert matcher.push("abcd") == "abc"


def test_a_stream_keeps_the_token_that_completed_the_stop_string() -> None:
    stream = TextStream(_Letters(), ["bc"])
    assert stream.push([0, 1]).text == "a"
    delta = stream.push([2, 3, 4])
    assert (delta.text, delta.token_ids, delta.is_last) == ("", [2], True)
    assert (stream.push([5]).token_ids, stream.finish()) == ([], "")


def test_silent_tokens_count_but_are_not_shown() -> None:
    stream = TextStream(_Letters(), silent_ids=[3])
    delta = stream.push([0, 3])
    assert (delta.text, delta.token_ids) == ("a", [0, 3])


def test_held_back_text_comes_at_the_end() -> None:
    stream = TextStream(_Letters(), ["abc"])
    assert stream.push([0, 1, 9]).text == ""
    assert stream.finish() == "ab?"


def test_a_character_of_two_tokens_can_complete_a_stop_string() -> None:
    stream = TextStream(_Letters(), ["aé"])
    assert stream.push([0, 9]).is_last is False
    assert stream.push([9, 1]).token_ids == [9]
    assert stream.stopped
