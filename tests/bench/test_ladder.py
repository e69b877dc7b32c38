"""The ladder on a tiny model, end to end, and its report."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trivet.bench import Ladder, LadderOptions, Rung, climb, write_report
from trivet.bench.report import summary_line
from trivet.errors import ConfigError
from trivet.evaluate import Quality, QualityReport
from trivet.recipe import Recipe, load_recipe

RUNG_KEYS = {
    "name", "change", "weights", "kv", "draft", "ttft_s", "tpot_s", "out_tok_s", "peak_rss_bytes",
    "quality", "verdict", "gain_over_previous", "gain_over_baseline",
}  # fmt: skip
_VOID = {"meta", "br", "path", "use", "rect", "line"}


class _Checker(HTMLParser):
    """Collects addresses that would be loaded, and checks that elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name.rpartition(":")[2] in ("src", "href", "action", "data", "srcset") and value:
                self.addresses.append(value)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag


def _assert_self_contained(page: str) -> None:
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert all(address.startswith("#") for address in checker.addresses), checker.addresses
    assert "http" not in page
    assert "@import" not in page
    assert re.search(r"url\((?!#)", page) is None


@pytest.mark.slow
def test_a_ladder_end_to_end(tiny_gguf: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    shares: list[float] = []
    ladder = climb(
        LadderOptions(model=str(tiny_gguf), budget_s=8.0, threads=1, max_tokens=64),
        on_rung=lambda rung: seen.append(rung.name),
        progress=lambda label, share: shares.append(share),
    )
    names = ["bf16", "w8a8", "w4", "int8-kv", "ngram", "chunked-prefill"]
    assert seen == names == [rung.name for rung in ladder.rungs]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    by_name = {rung.name: rung for rung in ladder.rungs}
    for rung in ladder.rungs:
        assert rung.as_json().keys() >= RUNG_KEYS
        assert rung.quality is not None
        assert [q.corpus for q in rung.quality.corpora] == ["pydoc-topics", "stdlib-source"]
        assert rung.reason
    assert by_name["bf16"].in_recipe
    assert by_name["bf16"].gain_over_previous is None
    assert by_name["w4"].weights == "w4a8-g32"
    assert by_name["w4"].is_exact
    assert "exact" in by_name["w4"].change
    assert by_name["ngram"].details["identical"] is True
    assert by_name["chunked-prefill"].details["on"].keys() == {
        "ttft_s", "tpot_s", "chat_gap_p99_s", "long_ttft_s", "out_tok_s",
    }  # fmt: skip
    paths = write_report(ladder, tmp_path / "out")
    _assert_self_contained(paths["report.html"].read_text())
    report = json.loads(paths["report.json"].read_text())
    assert [rung["name"] for rung in report["rungs"]] == names
    recipe = load_recipe(paths["recipe.toml"])
    assert recipe == ladder.recipe
    assert recipe.model == str(tiny_gguf)


def test_asked_rungs_only_and_no_gate(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_model.parent)
    ladder = climb(
        LadderOptions(model=tiny_model.name, rungs=("w4",), gate="off", budget_s=4.0, threads=1)
    )
    assert ladder.recipe.model == str(tiny_model)  # the recipe is used from any folder
    baseline, w4 = ladder.rungs
    assert (baseline.name, w4.name) == ("bf16", "w4")
    assert (w4.weights, w4.is_exact) == ("w4a8-g32", False)
    assert w4.quality is None
    assert w4.verdict is None
    assert ladder.corpora == []


def test_bad_options_are_refused() -> None:
    for field, settings in (
        ("rungs", {"rungs": ("w9",)}),
        ("gate", {"gate": "soft"}),
        ("budget", {"budget_s": 0.0}),
        ("max_tokens", {"max_tokens": 1}),
    ):
        with pytest.raises(ConfigError, match=field):
            LadderOptions(model="demo", **settings)


def _quality(delta: float) -> QualityReport:
    rows = [Quality(name, 10 + delta, 10.0, 0.01, 0.9, 100) for name in ("<a>", "overall")]
    return QualityReport(rows[:1], rows[1])


def _synthetic() -> Ladder:
    rungs = [
        Rung(
            "bf16",
            "baseline",
            "bf16",
            True,
            "bf16",
            "off",
            0.1,
            0.02,
            50.0,
            1 << 28,
            in_recipe=True,
        ),
        Rung(
            "w8a8", "<script>alert(1)</script>", "w8a8", False, "bf16", "off", quality=_quality(0.7)
        ),
    ]
    machine = {
        "cpu": "A & B", "threads": 2, "isa": "avx2", "memory_bytes": 1 << 30, "trivet": "0",
        "python": "3", "numpy": "2",
    }  # fmt: skip
    workload = {
        "single_prompt_tokens": 1, "single_output_tokens": 1, "batch": 1, "batch_prompt_tokens": 1,
        "batch_output_tokens": 1,
    }  # fmt: skip
    corpora = [{"corpus": "<a>", "source": "here", "sha256": "0" * 64, "tokens": 100}]
    return Ladder("<model>", rungs, Recipe(model="demo"), machine, corpora, workload, 1.0)


def test_the_page_escapes_names_and_holds_its_plots(tmp_path: Path) -> None:
    page = write_report(_synthetic(), tmp_path)["report.html"].read_text()
    _assert_self_contained(page)
    assert "<script" not in page
    assert page.count("<svg") == 5
    assert "&lt;model&gt;" in page
    assert "A &amp; B" in page


def test_the_page_is_the_same_for_the_same_ladder(tmp_path: Path) -> None:
    first = write_report(_synthetic(), tmp_path / "a")["report.html"].read_bytes()
    assert first == write_report(_synthetic(), tmp_path / "b")["report.html"].read_bytes()


def test_the_summary_names_the_recipe() -> None:
    assert summary_line(_synthetic()) == "Recipe: weights bf16, KV bf16."


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="out"):
        write_report(_synthetic(), tmp_path / "out")
