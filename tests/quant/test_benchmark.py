"""benchmarks/quantization.py: a table that is made in pieces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.tiny_models import Variant, build_folder

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quantization.py"
SHAPE = Variant(hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, layers=2, tied=True)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_table_is_made_in_pieces(tmp_path: Path) -> None:
    model = build_folder(tmp_path / "model", SHAPE, dtype="F32")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("The river is wide and the bridge is long. " * 40)
    table = tmp_path / "table.json"
    words: list[str | Path] = [
        f"b={model}", "-o", tmp_path / "work", "--result", table, "--corpus", corpus,
        "--samples", "4", "--max-tokens", "96", "--context", "48",
    ]  # fmt: skip

    def rows(*runs: str) -> list[dict[str, Any]]:
        done = run(*words, *(word for name in runs for word in ("--run", name)))
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert result == json.loads(table.read_text())
        found: list[dict[str, Any]] = result["runs"]
        return found

    [first] = rows("rtn:4:32")
    assert (first["model"], first["run"]) == ("b", "rtn:4:32")
    both = rows("rtn:4:32", "gptq:4:32", "fp8:channel")
    assert both[0] == first
    assert [row["run"] for row in both] == ["rtn:4:32", "gptq:4:32", "fp8:channel"]
    for row in both:
        assert row["bytes"] > 0
        assert row["cpu_seconds"] > 0
        assert row["weights"]["form"] == "bf16"
        assert row["served"]["overall"]["mean_kl"] > 0
    assert both[1]["output_error_ratio_mean"] < 1
    assert both[1]["tokens"] > 0
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- quantization -->\nold\n<!-- /quantization -->\nAfter.\n")
    assert run(*words, "--into", page).returncode == 0
    text = page.read_text()
    assert text.startswith("Before.\n<!-- quantization -->\n| model |")
    assert text.endswith("<!-- /quantization -->\nAfter.\n")
    assert text.count("| B | `") == 3
    assert "old" not in text
    page.write_text("no markers")
    wrong = run(*words, "--into", page)
    assert wrong.returncode == 2
    assert "are not both there" in wrong.stderr
    other = run(*words, "--run", "rtn:8:32", "--seed", "1")
    assert other.returncode == 2
    assert "other settings" in other.stderr
