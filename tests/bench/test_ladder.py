"""The ladder on a tiny model, end to end, and its report."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from trivet.bench import Ladder, LadderOptions, Rung, climb, write_report
from trivet.bench.gain import judge_gain
from trivet.bench.ladder import decide
from trivet.bench.provenance import _checkout, describe_build
from trivet.bench.report import summary_line
from trivet.bench.rung import CHAT_GAP, WALL_TIME
from trivet.config import ModelConfig
from trivet.errors import ConfigError
from trivet.evaluate import (
    CheckResult,
    Finding,
    GateOptions,
    GateResult,
    Kind,
    Quality,
    QualityReport,
    Verdict,
)
from trivet.evaluate.subject import Subject
from trivet.loader import load_model
from trivet.recipe import Recipe, load_recipe

RUNG_KEYS = {
    "name", "change", "weights", "kv", "draft", "ttft_s", "tpot_s", "out_tok_s", "peak_rss_bytes",
    "quality", "verdict", "gain_over_previous", "gain_over_baseline", "gain_of", "before", "spread",
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
def test_a_ladder_end_to_end(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every rung passes, whatever random weights and this machine say: the recipe holds all of them.
    gate = GateResult(Verdict.PASS, ["as the test wants"], "", {})
    monkeypatch.setattr("trivet.bench.ladder.judge_corpora", lambda _: gate)
    monkeypatch.setattr("trivet.bench.ladder.judge_gain", lambda *_: (Verdict.PASS, "it pays"))
    monkeypatch.setattr("trivet.bench.ladder._LEAST_MIXED_S", 0.5)
    monkeypatch.setattr("trivet.bench.ladder._Climb._has_time", lambda *_: True)
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
    for rung in ladder.rungs[1:]:
        assert rung.verdict == "pass"
        assert rung.in_recipe
        assert rung.before is not None
        assert len(rung.ratios) == rung.rounds >= 1
        assert rung.spread["gain_over_previous"] == [min(rung.ratios), max(rung.ratios)]
    assert "less memory" in by_name["int8-kv"].reason
    assert by_name["int8-kv"].before is not None
    assert by_name["int8-kv"].before["kv"] == "bf16"
    assert by_name["ngram"].gain_of == WALL_TIME
    assert by_name["chunked-prefill"].gain_of == CHAT_GAP
    assert by_name["chunked-prefill"].draft == "ngram"  # measured as the combination it is used in
    paths = write_report(ladder, tmp_path / "out")
    _assert_self_contained(paths["report.html"].read_text())
    report = json.loads(paths["report.json"].read_text())
    assert [rung["name"] for rung in report["rungs"]] == names
    recipe = load_recipe(paths["recipe.toml"])
    assert recipe == ladder.recipe
    assert recipe.model == str(tiny_gguf)
    # The recipe names what ran, and gives just that again.
    assert (recipe.weights, recipe.kv, recipe.draft) == ("w4a8-g32", "int8", "ngram")
    assert (recipe.draft_tokens, recipe.max_prefill_chunk) == (4, 128)
    again = load_model(ModelConfig(model=recipe.model, weights=recipe.weights, threads=1))
    assert recipe.evidence["run"]["numerics_id"] == again.runner.numerics_id
    for name in ("date", "trivet", "seed", "gate", "rounds", "threads", "budget_s"):
        assert report["run"][name] == recipe.evidence["run"][name]
    assert report["run"]["rounds"] == {rung.name: rung.rounds for rung in ladder.rungs}
    assert report["run"]["threads"] == 1


def test_without_time_a_rung_is_undecided(tiny_model: Path, tmp_path: Path) -> None:
    ladder = climb(
        LadderOptions(
            model=str(tiny_model), rungs=("w8a8", "chunked-prefill"), budget_s=0.01, threads=1,
            max_tokens=16,
        )
    )  # fmt: skip
    baseline, *others = ladder.rungs
    assert baseline.in_recipe  # the baseline is measured, however little time there is
    assert baseline.rounds == 1
    for rung in others:
        assert (rung.outcome, rung.verdict, rung.in_recipe) == ("undecided", "undecided", False)
        assert rung.gain_over_previous is None
        assert "budget" in rung.reason
    assert ladder.recipe.weights == "bf16"
    assert ladder.recipe.max_prefill_chunk is None  # nothing is known against the default
    _assert_self_contained(write_report(ladder, tmp_path)["report.html"].read_text())


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


def test_a_full_gate_runs_all_checks_on_what_changes_the_model(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, GateOptions]] = []

    def run_gate(
        candidate: Subject, baseline: Subject, _texts: object, options: GateOptions, **_: object
    ) -> SimpleNamespace:
        assert baseline.weights == "bf16"
        asked.append((candidate.weights, options))
        check = CheckResult("choice", "facts", Kind.KNOWLEDGE, Finding.UNDECIDED, "too few items")
        result = GateResult(Verdict.UNDECIDED, [check.reason], "", {"votes": 1})
        return SimpleNamespace(result=result, checks=[check])

    passed = GateResult(Verdict.PASS, ["perplexity is the same"], "", {})
    monkeypatch.setattr("trivet.bench.ladder.judge_corpora", lambda _: passed)
    monkeypatch.setattr("trivet.evaluate.gating.run_gate", run_gate)
    monkeypatch.setattr("trivet.bench.ladder._Climb._has_time", lambda *_: True)
    ladder = climb(
        LadderOptions(
            model=str(tiny_gguf), rungs=("w8a8", "ngram"), gate="full", budget_s=4.0, threads=1,
            max_tokens=32,
        )
    )  # fmt: skip
    assert [weights for weights, _ in asked] == ["w8a8+hadamard64"]  # speculation changes nothing
    assert asked[0][1].size == "full"
    assert asked[0][1].budget_s == pytest.approx(0.35 * 4.0)
    baseline, w8a8, ngram = ladder.rungs
    assert w8a8.quality_verdict == "undecided"
    assert w8a8.details["gate"]["checks"][0]["name"] == "facts"
    assert baseline.verdict == "pass"
    assert ngram.quality_verdict == "pass"  # held against what was accepted: the baseline
    assert not w8a8.in_recipe
    assert ladder.recipe.weights == "bf16"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.3, 1.2, 1.25], "pass"),
        ([1.1, 1.1], "undecided"),  # two rounds prove nothing
        ([], "undecided"),
        ([1.3, 1.2, 0.99], "undecided"),  # a median above the limit, and a round against it
        ([1.3, 1.2, 1.25, 1.1, 0.9], "pass"),  # four of five
        ([1.3, 1.2, 1.25, 0.9, 0.9], "undecided"),
        ([1.01, 1.015, 1.01], "reject"),
        ([0.9, 0.95, 1.0], "reject"),
        ([0.9, 1.01, 1.4], "undecided"),
    ],
)
def test_rounds_have_to_agree_on_a_gain(ratios: list[float], verdict: str) -> None:
    found, reason = judge_gain(ratios, 1.02, 1.0)
    assert found.value == verdict
    assert reason


def _decided(
    name: str, ratios: list[float], quality_verdict: str | None = "pass", **details: object
) -> Rung:
    rung = Rung(name, "change", "w8a8", False, "bf16", "off", quality_verdict=quality_verdict)
    if ratios:
        rung.set_gain(ratios)
    rung.rounds = len(ratios)
    rung.details |= details
    decide(rung, ["perplexity +0.7"])
    return rung


def test_the_recipe_takes_what_passes_in_quality_and_gain() -> None:
    for ratios, quality, verdict, outcome in (
        ([1.2, 1.3, 1.25], "pass", "pass", "yes"),
        ([1.2, 1.3, 0.9], "pass", "undecided", "undecided"),
        ([0.9, 0.9, 0.9], "pass", "reject", "no"),
        ([1.2, 1.3, 1.25], "reject", "reject", "no"),
        ([1.2, 1.3, 1.25], "undecided", "undecided", "undecided"),
        ([1.2, 1.3, 1.25], None, None, "yes"),
        ([1.2, 1.3, 0.9], None, None, "undecided"),
    ):
        rung = _decided("w8a8", ratios, quality)
        assert (rung.verdict, rung.outcome) == (verdict, outcome)
        assert rung.in_recipe == (outcome == "yes")
        assert rung.reason.startswith("undecided: ") == (outcome == "undecided")
        assert rung.as_json()["verdict"] == verdict
    assert "+0.7" in _decided("w8a8", [1.2, 1.3, 1.25], "reject").reason


def test_int8_kv_is_there_for_memory_and_may_cost_a_little_speed() -> None:
    kept = _decided("int8-kv", [0.97, 0.99, 0.96], kv_memory_gain=1.94)
    assert kept.in_recipe
    assert "x1.94 less memory" in kept.reason
    assert not _decided("int8-kv", [0.9, 0.9, 0.9], kv_memory_gain=1.94).in_recipe
    assert _decided("int8-kv", [0.97, 0.99, 0.9], kv_memory_gain=1.94).outcome == "undecided"


def test_speculation_that_changes_the_text_is_rejected() -> None:
    rung = _decided("ngram", [1.2, 1.3, 1.25], identical=False)
    assert (rung.verdict, rung.in_recipe) == ("reject", False)
    assert "differs" in rung.reason


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
            "bf16", "baseline", "bf16", True, "bf16", "off", 0.1, 0.02, 50.0, 2.0, 1 << 28,
            in_recipe=True, rounds=3,
        ),
        _rung("w8a8", [1.2, 1.3, 0.9], change="<script>alert(1)</script>", quality=_quality(0.1)),
        _rung("w4", [1.5, 1.6, 1.7], change="weights", quality=_quality(0.2)),
        _rung("chunked-prefill", [2.0, 2.1, 2.2, 2.05], gain_of=CHAT_GAP, change="chunks"),
    ]  # fmt: skip
    rungs[2].set_total([2.0, 2.25, 2.5])
    mixed = {
        "ttft_s": 0.1,
        "tpot_s": 0.01,
        "chat_gap_p99_s": 0.2,
        "long_ttft_s": 0.4,
        "out_tok_s": 9.0,
    }
    load = {
        "streams": 3, "long_every_s": 1.0, "duration_s": 4.0, "chat_output_tokens": 8,
        "chat_prompt_tokens": 8, "long_prompt_tokens": 64,
    }  # fmt: skip
    rungs[3].details = {"off": mixed, "on": mixed, "load": load}
    machine = {
        "cpu": "A & B", "threads": 4, "isa": "avx2", "memory_bytes": 1 << 30, "trivet": "0",
        "python": "3", "numpy": "2", "kernel": "Linux 6",
    }  # fmt: skip
    run = {
        "date": "2026-01-02T03:04:05+00:00", "trivet": "0.9", "commit": "abcdef0123456789",
        "uncommitted_changes": True, "seed": 7, "gate": "fast", "budget_s": 270.0, "threads": 2,
        "rungs": ["bf16", "w8a8"], "rounds": {rung.name: rung.rounds for rung in rungs},
    }  # fmt: skip
    workload = {
        "single_prompt_tokens": 1, "single_output_tokens": 1, "batch": 1, "batch_prompt_tokens": 1,
        "batch_output_tokens": 1,
    }  # fmt: skip
    corpora = [{"corpus": "<a>", "source": "here", "sha256": "0" * 64, "tokens": 100}]
    recipe = Recipe(model="demo", weights="w4a8-g32", max_prefill_chunk=128)
    return Ladder("<model>", rungs, recipe, run, machine, corpora, workload, 1.0)


def _rung(
    name: str, ratios: list[float], *, change: str, gain_of: str = WALL_TIME,
    quality: QualityReport | None = None,
) -> Rung:  # fmt: skip
    rung = Rung(
        name, change, "w4a8-g32", False, "bf16", "off", 0.05, 0.01, 75.0, gain_of=gain_of,
        quality=quality, quality_verdict="pass", rounds=len(ratios),
    )  # fmt: skip
    rung.before = {"ttft_s": 0.0613, "tpot_s": 0.02, "out_tok_s": 50.0, "wall_s": 2.0}
    rung.set_gain(ratios)
    decide(rung, [])
    return rung


def test_the_page_escapes_names_and_holds_its_plots(tmp_path: Path) -> None:
    page = write_report(_synthetic(), tmp_path)["report.html"].read_text()
    _assert_self_contained(page)
    assert "<script" not in page
    assert page.count("<svg") == 5
    assert "&lt;model&gt;" in page
    assert "A &amp; B" in page


def test_the_page_says_when_with_what_and_how_sure(tmp_path: Path) -> None:
    page = write_report(_synthetic(), tmp_path)["report.html"].read_text()
    for words in (
        "2026-01-02T03:04:05+00:00. trivet 0.9, commit abcdef0123 with uncommitted changes",
        "2 threads of 4", "Gate fast; seed 7; 3 to 4 rounds a rung; budget 270 s", "Linux 6",
        "0.90 to 1.30", ">undecided</span><br>", "the rounds do not agree", CHAT_GAP, WALL_TIME, "61.3",
        f"median is at least {1.02}",
    ):  # fmt: skip
        assert words in page, words


def test_a_build_says_where_it_comes_from(tmp_path: Path) -> None:
    build = describe_build()
    assert build["trivet"]
    assert build["commit"] is None or re.fullmatch("[0-9a-f]{40}", build["commit"])
    # A package that no checkout is known for, and one in a checkout.
    (tmp_path / "src" / "trivet").mkdir(parents=True)
    assert _checkout(tmp_path / "src" / "trivet") is None
    (tmp_path / ".git").mkdir()
    assert _checkout(tmp_path / "src" / "trivet") == tmp_path


def test_the_page_is_the_same_for_the_same_ladder(tmp_path: Path) -> None:
    first = write_report(_synthetic(), tmp_path / "a")["report.html"].read_bytes()
    assert first == write_report(_synthetic(), tmp_path / "b")["report.html"].read_bytes()


def test_the_summary_names_the_recipe() -> None:
    assert summary_line(_synthetic()) == (
        "Recipe: weights w4a8-g32, KV bf16, prefill chunks of 128; x2.25 over the bf16 baseline in "
        "wall time of the workload (2.00 to 2.50 in 3 rounds)."
    )


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="out"):
        write_report(_synthetic(), tmp_path / "out")
