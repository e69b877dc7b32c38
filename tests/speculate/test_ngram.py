"""Prompt lookup proposes what followed the longest earlier match."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.engine import DraftAsk, StepLoad
from trivet.errors import ConfigError
from trivet.speculate import NgramDrafter


def _propose(
    token_ids: list[int], max_tokens: int, min_match: int = 2, max_match: int = 8
) -> list[int]:
    drafter = NgramDrafter(min_match, max_match)
    drafter.open("a", token_ids)
    (draft,) = drafter.propose([DraftAsk("a", len(token_ids), max_tokens)], StepLoad())
    return draft


def ref_propose(token_ids: list[int], max_tokens: int, min_match: int, max_match: int) -> list[int]:
    """The definition, by scanning the whole text."""
    end = len(token_ids)
    best, best_length = None, 0
    for start in range(end - 1, 0, -1):
        length = 0
        while length < min(max_match, start) and (
            token_ids[start - 1 - length] == token_ids[end - 1 - length]
        ):
            length += 1
        if length >= min_match and length > best_length:
            best, best_length = start, length
    if best is None:
        return []
    text = list(token_ids)
    for index in range(max_tokens):
        text.append(text[best + index])
    return text[end:]


def test_continues_the_earlier_occurrence() -> None:
    assert _propose([1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]


def test_longest_match_wins_over_the_most_recent() -> None:
    assert _propose([7, 1, 2, 3, 5, 1, 2, 4, 7, 1, 2], 1) == [3]


def test_most_recent_wins_among_equally_long_matches() -> None:
    assert _propose([8, 1, 2, 3, 5, 1, 2, 4, 7, 1, 2], 1) == [4]


def test_matches_beyond_max_match_are_equally_good() -> None:
    text = [6, 7, 1, 2, 3, 5, 1, 2, 4, 6, 7, 1, 2]
    assert _propose(text, 1, max_match=8) == [3]
    assert _propose(text, 1, max_match=2) == [4]


def test_a_loop_is_drafted_whole() -> None:
    assert _propose([5, 1, 2, 1, 2], 6) == [1, 2, 1, 2, 1, 2]
    assert _propose([3, 3, 3], 4) == [3, 3, 3, 3]


@pytest.mark.parametrize("token_ids", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 2, 1]])
def test_nothing_is_proposed_without_a_match(token_ids: list[int]) -> None:
    assert _propose(token_ids, 4) == []


def test_never_proposes_more_than_asked() -> None:
    assert _propose([1, 2, 3, 4, 5, 6, 1, 2], 1) == [3]


def test_requests_do_not_see_each_other() -> None:
    drafter = NgramDrafter()
    drafter.open("a", [1, 2, 3, 1, 2])
    drafter.open("b", [1, 2])
    asks = [DraftAsk("b", 2, 2), DraftAsk("a", 5, 2)]
    assert drafter.propose(asks, StepLoad()) == [[], [3, 1]]
    drafter.close("a")
    drafter.open("a", [1, 2])
    assert drafter.propose([DraftAsk("a", 2, 2)], StepLoad()) == [[]]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 4),
    st.data(),
)
def test_index_equals_the_scan_however_the_text_grew(
    token_ids: list[int], max_tokens: int, min_match: int, extra: int, data: st.DataObject
) -> None:
    max_match = min_match + extra
    first = data.draw(st.integers(1, len(token_ids)))
    second = data.draw(st.integers(first, len(token_ids)))
    drafter = NgramDrafter(min_match, max_match)
    drafter.open("a", token_ids[:first])
    drafter.observe("a", token_ids[first:second], 0, 0)
    drafter.observe("a", token_ids[second:], 0, 0)
    (draft,) = drafter.propose([DraftAsk("a", len(token_ids), max_tokens)], StepLoad())
    assert draft == ref_propose(token_ids, max_tokens, min_match, max_match)


@pytest.mark.parametrize(("min_match", "max_match"), [(0, 3), (4, 3)])
def test_match_lengths_that_make_no_sense_are_refused(min_match: int, max_match: int) -> None:
    with pytest.raises(ConfigError, match="min_match"):
        NgramDrafter(min_match, max_match)
