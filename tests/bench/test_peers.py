"""The short form of benchmarks/peers/run.py, its table, and the files that make_shape.py writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trivet import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"


def _run(*command: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, (done.stdout + done.stderr)[-3000:]
    return done


def _run_code(
    folder: Path, code: str, *options: str | Path, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run code that may import the scripts under benchmarks."""
    script = folder / "script.py"
    script.write_text(f"import sys; sys.path[:0] = {[str(PEERS), str(PEERS.parent)]!r}\n{code}")
    return _run(script, *options, status=status)


@pytest.mark.demo
def test_engines_are_compared_round_by_round(tmp_path: Path) -> None:
    done = _run(PEERS / "run.py", "--quick", "-o", tmp_path)
    report = json.loads((tmp_path / "peers.json").read_text())
    names = {"trivet w8a8", "trivet bf16", "fake"}
    assert set(report["engines"]) == names
    assert set(report["cases"]) == {"prefill_24", "decode_24", "batch_3"}
    assert report["not_run"] == []
    for case, by_engine in report["cases"].items():
        assert set(by_engine) == names
        for found in by_engine.values():
            assert len(found["samples"]) == report["rounds"] == 2
            assert found["min"] <= found["median"] <= found["max"]
        ratio = report["ratios"][case]["trivet bf16"]
        assert ratio["best_peer"] == ratio["best_same_width"] == "fake"
        samples = [by_engine[name]["samples"] for name in ("trivet bf16", "fake")]
        quotients = [a / b for a, b in zip(*samples, strict=True)]
        assert ratio["to"]["fake"]["samples"] == quotients
    # w8a8 has another width than the only peer.
    assert "best_same_width" not in report["ratios"]["batch_3"]["trivet w8a8"]
    w8a8 = report["engines"]["trivet w8a8"]
    assert w8a8["weight_bytes"] < report["engines"]["trivet bf16"]["weight_bytes"]
    assert "Paris" in w8a8["greedy_text"]
    assert 0 < w8a8["greedy_nll"] < 2
    assert report["agreement"]["trivet bf16"] == 24
    assert (tmp_path / "peers.md").read_text() == done.stdout
    # Several reports make one table; of one case twice, the last report counts.
    report["cases"] = {"batch_3": report["cases"]["batch_3"]}
    report["cases"]["batch_3"]["fake"]["median"] = 4711
    (tmp_path / "more.json").write_text(json.dumps(report))
    together = _run(PEERS / "table.py", tmp_path / "peers.json", tmp_path / "more.json").stdout
    assert "| fake | 0 | - | - | 1000 ±" in together
    assert "4711" in together
    origins = [line.partition(": model")[0] for line in together.splitlines() if ": model" in line]
    assert origins == ["decode 24, prefill 24", "batch 3"]
    # Some columns of a table.
    narrow = (PEERS / "table.py", tmp_path / "peers.json", "--cases", "decode_24")
    shown = _run(*narrow).stdout
    assert "| decode 24 |" in shown
    assert "batch" not in shown
    assert "prefill" not in shown
    assert "decode_25" in _run(*narrow, "decode_25", status=2).stderr
    (tmp_path / "other.json").write_text(json.dumps(report | {"model": "shape-1b"}))
    mixed = (PEERS / "table.py", tmp_path / "peers.json", tmp_path / "other.json")
    assert "several models" in _run(*mixed, status=2).stderr
    # Into a page, between its markers and nowhere else.
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- peers demo -->\nold\n<!-- /peers demo -->\nbelow\n")
    _run(PEERS / "table.py", tmp_path / "peers.json", "--into", page)
    shown = page.read_text()
    assert shown.startswith("above\n")
    assert shown.endswith("\nbelow\n")
    assert "old" not in shown
    assert "| trivet w8a8 |" in shown
    page.write_text("no markers\n")
    refused = _run(PEERS / "table.py", tmp_path / "peers.json", "--into", page, status=2)
    assert "peers demo" in refused.stderr
    assert page.read_text() == "no markers\n"


@pytest.mark.demo
def test_a_peer_that_breaks_is_named_with_its_reason(tmp_path: Path) -> None:
    """A peer without its file is listed, and the others are still measured."""
    _run_code(
        tmp_path,
        "import engines, run\n"
        "def refuse(): raise run.PeerUnavailableError('no such machine')\n"
        "engines.environments.PYTHONS['fake'] = refuse\n"
        "run.QUICK = ('trivet w8a8', 'fake')\n"
        f"sys.argv = ['run.py', '--quick', '-o', {str(tmp_path)!r}]\n"
        "raise SystemExit(run.main())\n",
    )
    report = json.loads((tmp_path / "peers.json").read_text())
    assert report["not_run"] == [{"engine": "fake", "cases": "all", "reason": "no such machine"}]
    assert set(report["cases"]["batch_3"]) == {"trivet w8a8"}
    assert "fake: no such machine" in (tmp_path / "peers.md").read_text()


@pytest.mark.demo
def test_ids_of_no_language_are_told_from_a_text(tmp_path: Path) -> None:
    """The limit of the sanity check lies well under what arbitrary ids cost."""
    cost = _run_code(
        tmp_path,
        "import run\n"
        "cost = run.greedy_nll([504, 3575, 282, 4649, 314], [40000 + 37 * i for i in range(24)])\n"
        "print(cost / run.MAX_GREEDY_NLL)\n",
    )
    assert float(cost.stdout) > 2


@pytest.mark.demo
def test_the_random_model_loads_and_stays_finite(tmp_path: Path) -> None:
    """A narrow form of the 1.1B shape: its files load here, its logits are finite and not constant."""
    code = (
        "import make_shape\n"
        "make_shape.HIDDEN, make_shape.FFN, make_shape.HEADS, make_shape.KV_HEADS = 256, 704, 4, 2\n"
        "raise SystemExit(make_shape.main())\n"
    )
    options = ("--seed", "3", "--layers", "2", "-o", tmp_path / "shape")
    result = json.loads(_run_code(tmp_path, code, *options).stdout)
    assert result["bytes"] == (tmp_path / "shape" / "model.safetensors").stat().st_size
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)
    with LLM(tmp_path / "shape", "w8a8", max_model_len=64, kv_bytes=1 << 22) as llm:
        [output] = llm.generate("The capital of France is", params)
        assert llm.model.packed.spec.vocab_size == 32000
        assert max(output.prompt_token_ids) < 32000
        assert llm.model.tokenizer.decode(output.prompt_token_ids) == "The capital of France is"
    assert output.logprobs is not None
    assert all(-20.0 < entry.logprob <= 0.0 for entry in output.logprobs)
    # The peers' file of it holds the same bf16 weights and the same tokenizer.
    _run_code(
        tmp_path,
        "from pathlib import Path\n"
        "import files\n"
        f"files.MODELS = Path({str(tmp_path)!r})\n"
        f"files.folder = lambda model: Path({str(tmp_path / 'shape')!r})\n"
        "files.gguf('shape-1b', 'F16')\n",
    )
    file = tmp_path / "shape-1b" / "F16" / "model.gguf"
    with LLM(file, "w8a8", max_model_len=64, kv_bytes=1 << 22) as llm:
        [same] = llm.generate("The capital of France is", params)
    assert same.prompt_token_ids == output.prompt_token_ids
    assert same.token_ids == output.token_ids
    assert same.logprobs is not None
    # F16 has no room for the smallest weights, and one code of an activation may be another.
    expected = [entry.logprob for entry in output.logprobs]
    assert [entry.logprob for entry in same.logprobs] == pytest.approx(expected, abs=0.05)
    refused = _run_code(tmp_path, code, *options, status=2)
    assert refused.stderr.strip().startswith(f"{tmp_path / 'shape'}: exists")
