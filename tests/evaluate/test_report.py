"""The report escapes what a model wrote and marks where two texts part; repetition is judged."""

from __future__ import annotations

from trivet.evaluate.checks import repetition
from trivet.evaluate.checks.side_by_side import pair
from trivet.evaluate.report import render_html
from trivet.evaluate.results import Finding
from trivet.evaluate.subject import Generated, Prompt


def test_texts_are_escaped_and_the_first_difference_is_marked() -> None:
    base = Generated("the cat <b>sat</b>", [1, 2, 3, 4], True)
    own = Generated("the cat <i>ran</i>", [1, 2, 9, 4], True)
    entry = pair(Prompt("<script>"), base, own)
    assert (entry["identical"], entry["first_difference"]) == (False, 2)
    assert entry["common"] == "the cat <"
    page = render_html({"verdict": "reject", "side_by_side": [entry], "reasons": ["a < b"]})
    assert "<script>" not in page
    assert "<b>" not in page
    assert "<mark>b&gt;sat&lt;/b&gt;</mark>" in page
    assert "0 of 1 texts identical" in page
    assert "token 2" in page


def test_equal_texts_are_identical() -> None:
    text = Generated("same", [1], False)
    entry = pair(Prompt("p"), text, text)
    assert entry["identical"]
    assert entry["first_difference"] is None


def test_looping_beyond_the_baseline_is_rejected() -> None:
    loop = Generated("", [1, 2, 3, 4] * 12, False)
    plain = Generated("", list(range(48)), False)
    assert repetition.repeated_share(loop) > 0.8
    assert repetition.repeated_share(plain) == 0.0
    assert repetition.judge([0.1] * 8, [0.9] * 8, 0).finding is Finding.REJECT
    assert repetition.judge([0.9] * 8, [0.9] * 8, 0).finding is Finding.PASS
    assert repetition.judge([0.0] * 8, [0.9, *[0.0] * 7], 0).finding is not Finding.REJECT
