"""`bench engine` on a tiny model: the contract's keys, and values that make sense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trivet.bench.engine import EngineBench, bench_engine
from trivet.bench.process import EngineProcess
from trivet.config import KVFormat, ModelConfig
from trivet.errors import CheckpointError, ConfigError, EngineError, TrivetError

KEYS = {
    "decode_tok_s", "prefill_tok_s", "ttft_s", "tpot_s", "out_tok_s", "peak_rss_bytes",
    "weight_bytes", "kv_bytes_per_token", "start_s", "mbu", "mfu", "isa", "weights", "kv", "threads",
    "repeat",
}  # fmt: skip
DRAFT_KEYS = {
    "speedup", "identical", "alpha", "mean_accepted_length", "predicted_speedup", "drafter",
    "looped_share",
}  # fmt: skip


def _config(model: Path, weights: str = "w8a8", kv: KVFormat = KVFormat.BF16) -> ModelConfig:
    return ModelConfig(model=str(model), weights=weights, kv=kv, threads=1)


def test_keys_and_values(tiny_model: Path) -> None:
    bench = EngineBench(batch=3, prompt_tokens=40, output_tokens=8, repeat=2)
    result = bench_engine(_config(tiny_model, kv=KVFormat.INT8), bench)
    assert result.keys() >= KEYS
    assert (result["weights"], result["kv"]) == ("w8a8+hadamard64", "int8")
    assert (result["threads"], result["repeat"], result["batch"]) == (1, 2, 3)
    assert result["kv_bytes_per_token"] == 2 * (2 * 32 + 2 * 4)
    for key in ("decode_tok_s", "prefill_tok_s", "ttft_s", "tpot_s", "out_tok_s", "start_s", "mbu"):
        assert result[key] > 0, key
    assert 0 < result["peak_rss_bytes"] < 2 << 30
    assert len(result["runs"]) == 2
    assert result["matrix_rate_macs_s"].keys() == {"int8", "bf16"}
    for phase in result["phases"].values():
        assert sum(phase["parts_s"].values()) == pytest.approx(phase["wall_s"], rel=1e-3)
        assert sum(phase["shares"].values()) == pytest.approx(1.0, rel=1e-3)
        assert min(phase["shares"].values()) >= 0
        assert phase["spread"]["mbu"][0] <= phase["mbu"] <= phase["spread"]["mbu"][1]
    assert (result["phases"]["prefill"]["rows"], result["phases"]["decode"]["rows"]) == (120, 21)
    assert result["mbu"] == result["phases"]["decode"]["mbu"]
    assert result["mfu"] == result["phases"]["prefill"]["mfu"]
    low, high = result["spread"]["ttft_s"]
    assert low <= result["ttft_s"] <= high
    json.dumps(result, allow_nan=False)


def test_speculation_and_rows(tiny_model: Path) -> None:
    bench = EngineBench(
        prompt_tokens=64, output_tokens=48, repeat=2, draft="ngram", temperature=0.9, rows=(1, 2)
    )
    result = bench_engine(_config(tiny_model, "bf16"), bench)
    assert result.keys() >= KEYS | DRAFT_KEYS
    assert result["identical"] is True
    assert result["drafter"] == "ngram"
    assert result["speedup"] > 0
    assert 0 <= result["looped_share"] <= 1
    assert set(result["step_time_ratio"]) == {"1", "2"}
    assert result["step_time_ratio"]["1"] >= 1 - 1e-9
    assert result["row_times"]["rounds"] >= 5
    decode = result["phases"]["decode"]
    assert decode["rows"] >= decode["steps"]  # draft rows are work too


def test_one_output_token_is_no_decode(tiny_model: Path) -> None:
    bench = EngineBench(prompt_tokens=20, output_tokens=1, repeat=1)
    result = bench_engine(_config(tiny_model), bench)
    assert result["phases"]["decode"] is None
    assert result["mbu"] is None
    assert result["mfu"] > 0


def test_prompts_of_a_file_stop_at_the_end_token(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"the dog {i}"}) for i in range(5)))
    bench = EngineBench(batch=2, output_tokens=6, repeat=1, prompts_file=str(path))
    result = bench_engine(_config(tiny_model), bench)
    assert result["num_prompts"] == 5
    assert result["batch"] == 2


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("batch", {"batch": 0}),
        ("repeat", {"repeat": 0}),
        ("output_tokens", {"output_tokens": 0}),
        ("prompt_tokens", {"prompt_tokens": -1}),
        ("rows", {"rows": (0,)}),
        ("draft_tokens", {"draft_tokens": 0}),
    ],
)
def test_settings_out_of_range_are_refused(field: str, settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineBench(**settings)  # type: ignore[arg-type]


def test_errors_of_the_measured_process_come_back(tiny_model: Path, tmp_path: Path) -> None:
    job = {"prompts": [[1, 2, 3]], "batch": 1, "output_tokens": 2}
    with EngineProcess(_config(tiny_model)) as process:
        with pytest.raises(ConfigError, match="1003 is not allowed; allowed: up to 512"):
            process.call("batch", job={**job, "output_tokens": 1000})
        with pytest.raises(TrivetError, match="vocabulary"):
            process.call("batch", job={**job, "prompts": [[1, 99_999]]})
        assert len(process.call("batch", job=job)["token_ids"][0]) == 2
    with pytest.raises(CheckpointError, match="absent"):
        EngineProcess(_config(tmp_path / "absent"))


def test_a_measured_process_that_dies_is_reported(tiny_model: Path) -> None:
    with EngineProcess(_config(tiny_model)) as process, pytest.raises(EngineError, match="ended"):
        process.call("no such call")


def test_what_does_not_fit_the_context_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="up to 512, the context"):
        bench_engine(_config(tiny_model), EngineBench(prompt_tokens=600, repeat=1))


def test_little_memory_makes_requests_wait(tiny_model: Path) -> None:
    page_bytes = 32 * 2 * (2 * 32 * 2) * 2
    bench = EngineBench(
        batch=4,
        prompt_tokens=40,
        output_tokens=8,
        repeat=1,
        kv_bytes=3 * page_bytes,
        max_num_seqs=2,
    )
    result = bench_engine(_config(tiny_model), bench)
    assert result["batch"] == 4
    assert result["kv_bytes_per_token"] * 32 <= page_bytes
    with pytest.raises(ConfigError, match="kv_bytes"):
        bench_engine(_config(tiny_model), EngineBench(prompt_tokens=40, repeat=1, kv_bytes=64))


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent"):
        bench_engine(_config(tmp_path / "absent"), EngineBench())


_INTERRUPTED = """
import os, signal, subprocess, sys
from trivet.bench.process import EngineProcess
from trivet.config import ModelConfig

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started us with &
start = subprocess.Popen
def interrupt(*arguments, **options):
    process = start(*arguments, **options)
    os.killpg(os.getpgrp(), signal.SIGINT)
    return process
subprocess.Popen = interrupt
try:
    EngineProcess(ModelConfig(model=sys.argv[1]))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_of_the_group_leaves_the_child_to_its_parent(tiny_model: Path) -> None:
    """A terminal interrupts the whole group; the child must not print a traceback of its imports."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)
