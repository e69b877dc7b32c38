"""The commit function: the earliest end wins and nothing after it exists."""

from __future__ import annotations

import pytest

from trivet.engine.commit import CommittedRun, StopRule, commit_run
from trivet.request import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("token_ids", "output_len", "min_tokens", "max_output_len", "expected"),
    [
        pytest.param([5], 0, 0, 10, (1, None, None), id="goes on"),
        pytest.param([5, 6, 7], 0, 0, 10, (3, None, None), id="a whole run goes on"),
        pytest.param([9], 3, 0, 10, (1, STOP, 9), id="stop token"),
        pytest.param([5, 9, 6, 7], 0, 0, 10, (2, STOP, 9), id="stop inside a run"),
        pytest.param([5, 9, 6, 9], 0, 0, 10, (2, STOP, 9), id="the first stop wins"),
        pytest.param([5, 6, 7], 8, 0, 10, (2, LENGTH, None), id="length inside a run"),
        pytest.param([5, 6], 8, 0, 10, (2, LENGTH, None), id="length at the end of a run"),
        pytest.param([5, 9, 6], 8, 0, 10, (2, STOP, 9), id="at one position stop beats length"),
        pytest.param(
            [5, 6, 9], 8, 0, 10, (2, LENGTH, None), id="a stop beyond the length is not seen"
        ),
        pytest.param([9, 5, 6], 0, 2, 10, (3, None, None), id="min_tokens hides an early stop"),
        pytest.param([9, 5, 9, 6], 0, 2, 10, (3, STOP, 9), id="min_tokens counts output tokens"),
        pytest.param([9, 9], 1, 2, 10, (2, STOP, 9), id="the first position that may stop"),
        pytest.param([9], 0, 5, 1, (1, LENGTH, None), id="length ends before min_tokens"),
        pytest.param([], 0, 0, 0, (0, LENGTH, None), id="no output wanted"),
        pytest.param([], 0, 0, 5, (0, None, None), id="an empty run changes nothing"),
        pytest.param([5, 6, 7], 0, 0, 2, (2, LENGTH, None), id="replay beyond the length"),
    ],
)
def test_run_ends_at_the_earliest_end(
    token_ids: list[int],
    output_len: int,
    min_tokens: int,
    max_output_len: int,
    expected: tuple[int, FinishReason | None, int | None],
) -> None:
    rule = StopRule(frozenset({9}), min_tokens, max_output_len)
    assert commit_run(token_ids, output_len, rule) == CommittedRun(*expected)


def test_splitting_a_run_changes_nothing() -> None:
    run = [5, 6, 9, 7, 9, 5, 6]
    for min_tokens in range(6):
        for max_output_len in range(1, 9):
            rule = StopRule(frozenset({9}), min_tokens, max_output_len)
            whole = commit_run(run, 0, rule)
            output_len = 0
            for token_id in run:
                part = commit_run([token_id], output_len, rule)
                output_len += part.num_tokens
                if part.reason is not None:
                    break
            assert (output_len, part.reason, part.stop_token_id) == (
                whole.num_tokens,
                whole.reason,
                whole.stop_token_id,
            )
