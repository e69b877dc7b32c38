"""Every verb on a tiny model: JSON on the last line with the contract's keys, exit codes."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from support.small_gate import SMALL
from trivet.bench import roofline
from trivet.cli import main
from trivet.evaluate import gating
from trivet.recipe import Recipe

QUALITY_KEYS = {
    "corpus", "perplexity", "baseline_perplexity", "delta_ppl", "mean_kl", "top1_agreement", "tokens",
}  # fmt: skip


def _run(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> dict[str, Any]:
    """Run a command with --json; return its object."""
    status = main([*map(str, words), "--json"])
    captured = capsys.readouterr()
    assert status == code, captured.err
    result = json.loads(captured.out.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def test_info_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    machine = _run(capsys, "info")["machine"]
    assert machine["isa"] in machine["isa_levels"]
    assert machine["isa_levels"][machine["isa"]] == "available"
    assert machine["threads"] >= 1
    assert machine["memory"]["available_bytes"] > 0


def test_info_of_a_model(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = _run(capsys, "info", tiny_gguf)
    assert own["weights"] == "w4a8-g32"
    assert own["is_exact"] is True
    assert own["memory_plan"]["fits"][-1]["tokens"] == 512
    other = _run(capsys, "info", tiny_gguf, "--weights", "w8a8", "--kv", "int8")
    assert (other["weights"], other["kv"]) == ("w8a8+hadamard64", "int8")
    assert other["is_exact"] is False
    assert other["kv_bytes_per_token"] < own["kv_bytes_per_token"]
    assert any(tensor["rel_error"] > 0 for tensor in other["tensors"])


def test_info_roofline(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path))
    monkeypatch.setattr(roofline, "_ROUNDS", 1)
    monkeypatch.setattr(roofline, "_AGREEMENT", -1.0)
    words = ("info", tiny_model, "--weights", "w8a8", "--threads", "1", "--roofline")
    busy = _run(capsys, *words)["roofline"]
    assert busy["path"] is None
    assert "measured while the machine was busy" in busy["not_kept"]
    monkeypatch.setattr(roofline, "_QUIET_LOAD", math.inf)
    monkeypatch.setattr(roofline, "_AGREEMENT", math.inf)
    first = _run(capsys, *words)
    line = first["roofline"]
    assert line.keys() >= {"streams", "matrices", "handovers", "bandwidth_bytes_s", "limits"}
    assert line["num_bytes"] == line["limits"]["step_bytes"] == first["weight_bytes"]
    assert line["limits"]["decode_tok_s"] > 0
    assert line["limits"]["prefill_tok_s"] > 0
    assert line["is_cached"] is False
    assert Path(line["path"]).parent == tmp_path
    again = _run(capsys, *words)["roofline"]
    assert again == line | {"is_cached": True}
    machine = _run(capsys, "info", "--roofline", "--threads", "1")["roofline"]
    assert machine["limits"] is None
    assert machine["matrices"] == line["matrices"]
    assert main([*map(str, words), "--fresh"]) == 0
    assert "limit of decode" in capsys.readouterr().out


def test_info_without_json_is_a_table(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tiny_model)]) == 0
    text = capsys.readouterr().out
    for part in ("layers.*.qkv", "exact", "ISA level", "margin", "fits"):
        assert part in text


def test_generate(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generate", tiny_model, "--max-tokens", "8", "--temperature", "0.9", "--ignore-eos")
    first = _run(capsys, *words, "--prompt", "the quick", "--seed", "3")
    assert first.keys() >= {"text", "token_ids", "finish_reason", "usage", "seed", "timing"}
    assert len(first["token_ids"]) == 8
    assert (first["finish_reason"], first["seed"]) == ("length", 3)
    assert first["usage"]["completion_tokens"] == 8
    drafted = _run(capsys, *words, "--prompt", "the quick", "--seed", "3", "--draft", "ngram")
    assert drafted["token_ids"] == first["token_ids"]
    drawn = _run(capsys, *words, "--prompt", "the quick")
    again = _run(capsys, *words, "--prompt", "the quick", "--seed", str(drawn["seed"]))
    assert again["token_ids"] == drawn["token_ids"]


def test_generate_from_file_stdin_and_chat(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "prompt.txt"
    path.write_text("the quick")
    words = ("generate", tiny_model, "--max-tokens", "4", "--seed", "0")
    raw = _run(capsys, *words, "--prompt", "the quick")
    assert _run(capsys, *words, "--prompt-file", path)["token_ids"] == raw["token_ids"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick"))
    assert _run(capsys, *words, "--prompt-file", "-")["token_ids"] == raw["token_ids"]
    chat = _run(capsys, *words, "--chat", "the quick")
    assert chat["usage"]["prompt_tokens"] > raw["usage"]["prompt_tokens"]


def test_generate_logprobs_and_stop(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generate", tiny_model, "--prompt", "the dog", "--max-tokens", "32", "--ignore-eos",
             "--temperature", "1", "--seed", "5")  # fmt: skip
    whole = _run(capsys, *words, "--logprobs", "2")
    assert [entry["token_id"] for entry in whole["logprobs"]] == whole["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in whole["logprobs"])
    stop = whole["text"][3:5]
    assert len(stop) == 2
    cut = _run(capsys, *words, "--stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_string"]) == ("stop", stop)


def test_a_text_that_the_context_ended_is_noted(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(tiny_model), "--prompt", "the dog", "--ignore-eos"]
    assert main([*words, "--max-tokens", "100", "--max-model-len", "20"]) == 0
    assert "the context of 20 tokens ended the text" in capsys.readouterr().err


def test_text_goes_to_standard_output(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(tiny_model), "--prompt", "the dog", "--max-tokens", "6"]
    text = _run(capsys, *words)["text"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out.rstrip("\n") == text.rstrip("\n")
    assert captured.err == ""


def test_chat_answers_a_piped_message(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nthere\n"))
    result = _run(capsys, "chat", tiny_model, "--max-tokens", "4", "--system", "be kind")
    roles = [message["role"] for message in result["messages"]]
    assert roles == ["system", "user", "assistant"]
    assert result["messages"][1]["content"] == "hello\nthere"


def test_chat_keeps_the_conversation_until_reset(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["hello", "", "more", "/reset", "again", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    result = _run(capsys, "chat", tiny_model, "--max-tokens", "3")
    assert [message["role"] for message in result["messages"]] == ["user", "assistant"]
    assert result["messages"][0]["content"] == "again"


@pytest.fixture
def small_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast gate with few items."""
    monkeypatch.setitem(gating.SIZES, "fast", SMALL)


@pytest.mark.usefixtures("small_gate")
def test_evaluate_against_itself_and_a_baseline(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("evaluate", tiny_gguf, "--max-tokens", "100", "--context", "64")
    alone = _run(capsys, *words)
    assert alone.keys() >= {"corpora", "overall"}
    assert alone["overall"].keys() == QUALITY_KEYS
    assert alone["overall"]["baseline_perplexity"] is None
    assert alone["overall"]["tokens"] == 200
    assert "verdict" not in alone
    pair = _run(capsys, *words, "--weights", "w8a8", "--baseline-weights", "auto")
    assert pair["overall"]["baseline_perplexity"] == alone["overall"]["perplexity"]
    assert pair["overall"]["mean_kl"] > 0
    same = _run(
        capsys, *words, "--weights", "bf16", "--baseline", tiny_gguf, "--gate", "fast", code=1
    )
    assert (same["overall"]["mean_kl"], same["overall"]["top1_agreement"]) == (0.0, 1.0)
    assert same["verdict"] == "undecided"  # a random model is right on no task
    assert same.keys() >= {"verdict", "reasons", "next_step", "metrics"}


@pytest.mark.usefixtures("small_gate")
def test_windows_are_as_long_as_a_short_model_takes(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The context of this model is half of the window that other models are measured with."""
    words = ("evaluate", tiny_gguf, "--max-tokens", "600")
    assert _run(capsys, *words)["overall"] == _run(capsys, *words, "--context", "512")["overall"]
    assert main([*map(str, words), "--context", "513"]) == 2


@pytest.mark.usefixtures("small_gate")
def test_no_text_of_an_evaluation_is_longer_than_it_may_be(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ("evaluate", tiny_gguf, "--max-tokens", "600")
    short = _run(capsys, *plain, "--max-model-len", "100")
    assert short["context"] == 100
    assert short["overall"] == _run(capsys, *plain, "--context", "100")["overall"]
    words = ("evaluate", tiny_gguf, "--max-tokens", "300", "--baseline-weights", "w8a8",
             "--gate", "fast", "-o", tmp_path)  # fmt: skip
    for limit, tokens in ((None, 300), (280, 280)):
        more = () if limit is None else ("--max-model-len", str(limit))
        found = _run(capsys, *words, *more, code=1)
        assert found["context"] == (limit or 512)
        checks = json.loads((tmp_path / "gate.json").read_text())["checks"]
        [long] = [c for c in checks if c["name"] == "perplexity by position"]
        assert long["metrics"]["tokens"] == tokens


def test_a_gate_that_does_not_pass_exits_1(
    tiny_gguf: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("evaluate", tiny_gguf, "--max-tokens", "60", "--context", "64", "--stride", "64")
    undecided = _run(capsys, *words, "--gate", "full", code=1)
    assert undecided["verdict"] == "undecided"
    corpus = tmp_path / "text.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog " * 20)
    one = _run(
        capsys, *words, "--corpus", corpus, "--baseline-weights", "auto", "--gate", "fast", code=1
    )
    assert one["verdict"] == "undecided"
    assert [row["corpus"] for row in one["corpora"]] == ["text"]
    other = _run(capsys, *words, "--baseline", tiny_model, "--gate", "fast", code=1)
    assert other["verdict"] == "reject"


def test_bench_engine(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _run(
        capsys, "bench", "engine", tiny_model, "--weights", "w8a8", "--kv", "int8", "--batch", "2",
        "--prompt-tokens", "16", "--output-tokens", "4", "--threads", "1", "--repeat", "1",
        "--rows", "1,2", "--draft", "ngram", "--draft-tokens", "auto",
    )  # fmt: skip
    assert result["weights"] == "w8a8+hadamard64"
    assert result["identical"] is True
    assert set(result["step_time_ratio"]) == {"1", "2"}
    assert set(result["phases"]) == {"prefill", "decode"}


def test_bench_engine_shows_where_the_time_goes(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "engine", str(tiny_model), "--prompt-tokens", "16", "--repeat", "1"]
    assert main([*words, "--output-tokens", "4", "--threads", "1", "--rows", "2"]) == 0
    text = capsys.readouterr().out
    for part in ("linears", "quantizing", "waiting for threads", "Python", "mbu", "step of 2 rows"):
        assert part in text


def test_bench_engine_drafts_as_a_recipe_says(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(Recipe(model=str(tiny_model), draft="ngram", draft_tokens=2).to_toml())
    words = ("bench", "engine", path, "--prompt-tokens", "16", "--output-tokens", "4", "--repeat",
             "1", "--threads", "1")  # fmt: skip
    result = _run(capsys, *words)
    assert (result["drafter"], result["draft_tokens"]) == ("ngram", 2)
    assert _run(capsys, *words, "--draft-tokens", "3")["draft_tokens"] == 3


def test_ladder_and_its_recipe(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _run(
        capsys, "ladder", tiny_gguf, "-o", tmp_path / "out", "--rungs", "w8a8", "--budget", "3",
        "--max-tokens", "32", "--threads", "1",
    )  # fmt: skip
    assert [rung["name"] for rung in result["rungs"]] == ["bf16", "w8a8"]
    assert Path(result["report"]).is_file()
    generated = _run(
        capsys, "generate", result["recipe"], "--prompt", "the dog", "--max-tokens", "2"
    )
    assert generated["weights"] == (
        "w8a8+hadamard64" if result["rungs"][1]["in_recipe"] else "bf16"
    )


def test_flags_override_a_recipe(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(Recipe(model=str(tiny_model), weights="w8a8", kv="int8").to_toml())
    words = ("generate", path, "--prompt", "the dog", "--max-tokens", "2")
    from_recipe = _run(capsys, *words)
    assert (from_recipe["weights"], from_recipe["kv"]) == ("w8a8+hadamard64", "int8")
    overridden = _run(capsys, *words, "--weights", "bf16")
    assert (overridden["weights"], overridden["kv"]) == ("bf16", "int8")


def test_vllm_names_mean_the_same(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generate", tiny_model, "--prompt", "the dog", "--max-tokens", "2")
    result = _run(capsys, *words, "--kv-cache-dtype", "auto", "--num-speculative-tokens", "2")
    assert result["kv"] == "bf16"
