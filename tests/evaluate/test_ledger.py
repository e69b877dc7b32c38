"""The ledger keeps every run, tells interactions, and the next step follows its rule."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from trivet.evaluate import ledger, run
from trivet.evaluate.ledger import Entry, interaction
from trivet.evaluate.next_step import Recipe, next_step, recipe_of
from trivet.evaluate.results import CheckResult, Finding, Kind, Verdict


def _entry(ppl: float, **variables: str) -> Entry:
    figures: dict[str, float | None] = {"delta_ppl": ppl, "mean_kl": ppl / 100}
    return Entry(
        "now", "m", "id", "base", variables, "pass", "serve", figures, "corpora", "fast", []
    )  # fmt: skip


def test_entries_come_back_and_broken_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "state" / "gates.jsonl"
    assert ledger.read(path) == []
    ledger.append(path, _entry(0.1, weights="w8a8"))
    with path.open("a") as file:
        file.write('{"half a li\n[1]\n' + "[" * 200_000 + "\n")
        for figure in (10**400, "1"):
            odd = dataclasses.asdict(_entry(0.1)) | {"figures": {"delta_ppl": figure}}
            file.write(json.dumps(odd) + "\n")
    ledger.append(path, _entry(0.2, kv="int8"))
    assert [entry.variables for entry in ledger.read(path)] == [{"weights": "w8a8"}, {"kv": "int8"}]


def test_a_line_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "gates.jsonl"
    ledger.append(path, _entry(0.1, weights="w8a8"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    ledger.append(path, _entry(0.2, kv="int8"))
    assert [entry.variables for entry in ledger.read(path)] == [{"weights": "w8a8"}, {"kv": "int8"}]


def test_of_a_long_ledger_the_newest_entries_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gates.jsonl"
    for number in range(20):
        ledger.append(path, _entry(0.1, weights=f"w{number}"))
    monkeypatch.setattr(ledger, "MAX_READ_BYTES", path.stat().st_size // 4)
    read = [entry.variables["weights"] for entry in ledger.read(path)]
    assert read == [f"w{number}" for number in range(20 - len(read), 20)]
    assert 3 <= len(read) <= 5


def test_the_interaction_is_what_no_part_explains() -> None:
    weights, kv = _entry(0.1, weights="w8a8"), _entry(0.02, kv="int8")
    both = _entry(0.2, weights="w8a8", kv="int8")
    found = interaction(both, [weights, kv])
    assert found is not None
    assert found["missing"] == []
    assert found["terms"]["delta_ppl"] == pytest.approx(0.08)
    assert interaction(weights, [kv]) is None
    other = dataclasses.replace(kv, corpora="others")
    lacking = interaction(both, [weights, other])
    assert lacking is not None
    assert lacking["missing"] == ["kv=int8"]
    assert lacking["terms"]["delta_ppl"] is None


def _rejected(check: str = "perplexity") -> list[CheckResult]:
    return [CheckResult(check, check, Kind.MODEL, Finding.REJECT, "why")]


def test_after_a_rejection_each_step_comes_in_order_and_once() -> None:
    done: list[str] = []
    recipe = Recipe("w4a8-g64", "gptq", 64)
    for _ in range(9):
        step, line = next_step(Verdict.REJECT, _rejected(), recipe, done)
        assert line
        assert next_step(Verdict.REJECT, _rejected(), recipe, done) == (step, line)
        done.append(step)
        if step == "full-precision":
            break
    assert done == ["calibration", "groups", "awq", "sensitive-layers", "8-bits", "full-precision"]


def test_what_a_candidate_was_made_with_is_read_from_its_folder() -> None:
    found = recipe_of(
        "w4a8-g32",
        "bf16",
        {
            "method": "awq+gptq",
            "recipe": {"gptq": {"act_order": "static"}},
            "targets": {"w4-g32": 100, "w8-g32": 10},
            "calibration": {"traffic": "prompts.jsonl"},
        },
    )
    assert found.steps == ("calibration", "groups", "awq", "sensitive-layers")
    assert next_step(Verdict.REJECT, _rejected(), found)[0] == "8-bits"
    assert recipe_of("w4a8-g32", "bf16", {"method": "gptq", "calibration": None}).steps == ()
    assert recipe_of("w8a8", "bf16", None).steps == ("8-bits",)


def test_a_broken_description_of_a_candidate_is_none(tmp_path: Path) -> None:
    (tmp_path / "quantization.json").write_text("[" * 200_000)
    assert run._quantization(str(tmp_path)) is None


def test_steps_that_do_not_apply_are_left_out() -> None:
    plain = recipe_of("w4a8-g32", "bf16", None)
    assert next_step(Verdict.REJECT, _rejected(), plain)[0] == "groups"
    assert next_step(Verdict.REJECT, _rejected("weights"), plain)[0] == "repair"
    assert next_step(Verdict.REJECT, _rejected("identity"), plain)[0] == "files"
    assert next_step(Verdict.REJECT, _rejected(), recipe_of("bf16", "int8", None))[0] == "kv"
    awq = recipe_of("w4a8-g32", "bf16", {"method": "awq+gptq"})
    assert next_step(Verdict.REJECT, _rejected(), awq, ["calibration"])[0] == "groups"
    assert next_step(Verdict.PASS, [], plain)[0] == "serve"
    unsure = [CheckResult("c", "c", Kind.SQL, Finding.UNDECIDED, "why")]
    assert next_step(Verdict.UNDECIDED, unsure, plain)[0] == "sample"
