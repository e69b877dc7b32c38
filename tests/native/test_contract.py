"""The numerics contract as a whole: rows depend on nothing but their own prefix, and their bits are
those of the golden hashes, on every level.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from native.bits import assert_bits_equal
from native.linear_cases import LEVELS
from native.tiny_model import ALL, Runs, TinyPacked, logits_of, make_model, random_tokens
from trivet.config import KVFormat
from trivet.native import _core

ROOT = Path(__file__).resolve().parents[2]
KV = list(KVFormat)

# First 16 hex digits of the SHA-256 of the logits of 45 tokens, a random tiny model per format.
GOLDEN = {
    ("bf16", "bf16"): "f6927044f4d0c65b",
    ("bf16", "int8"): "387bac940644f321",
    ("w8a8", "bf16"): "efac7dac0b3740c6",
    ("w8a8", "int8"): "6a3d6d672e22d8ad",
    ("w8a8+row", "bf16"): "6ad23010cce03c41",
    ("w8a8+static", "bf16"): "638589c7ad0888ed",
    ("w8a8+outliers7", "bf16"): "14ae8efe7e7553c2",
    ("w8a8+hadamard64+outliers70", "bf16"): "b67f9a1b4704cea8",
    ("w8a8-g32", "bf16"): "03720c095a2495bf",
    ("w8a8-g32", "int8"): "dabe2cf553c41d70",
    ("w4a8-g32", "bf16"): "5cdd92262d2d58b1",
    ("w4a8-g32", "int8"): "7e8e8e7ae0071f27",
    ("w4a8-g32", "fp8"): "3557ec8c75778c6d",
    ("w4a8-g32", "int4"): "7971d9a11d3aef6e",
    ("w4a8-g32", "int8+first"): "642af0b0558a9c40",
    ("w4a8-g32", "fp8+first"): "ef8e8d3c9dbd0971",
    ("w4a8-g32", "int4+first"): "b56c9568e7d44b8d",
    ("w4a8-g32-zp", "bf16"): "7b8dd4b5cf3b5bcf",
    ("w4a8-g32-zp", "int8"): "817b66a77537f90d",
    ("w4a8-g64-min", "bf16"): "30879dd955041897",
    ("w4a8-g64-min", "int8"): "2b1e1432ce2fa538",
    ("w8a8-g16-min", "bf16"): "5f04b5954bff8b65",
    ("w8a8-g16-min", "int8"): "18ef84eaf4735344",
    ("w4a8-g16", "bf16"): "79b9614d05f83a0c",
    ("w4a8-g16", "int8"): "1da4fa4e72aeaf13",
    ("w4a8-g16-min", "bf16"): "672a6acfde503e09",
    ("w4a8-g16-min", "int8"): "cec26980235ec791",
    ("w4a8-row", "bf16"): "aeb6d6cfa49fbfd6",
    ("w4a8-row", "int8"): "772fe67498f870da",
    ("w4a8-row-zp", "bf16"): "9ce07fd4c798b7e0",
    ("w4a8-row-zp", "int8"): "18bb83c5e7306e80",
    ("w4a16-g32", "bf16"): "4b49d16c13d928e0",
    ("w4a16-g32", "int8"): "21274bf1f85debb0",
    ("w4a16-g64-min", "bf16"): "d2b0693fcbfc29c1",
    ("w4a16-g64-min", "int8"): "18106e7ae6d3ebb5",
    ("w4a16-row-zp", "bf16"): "cc3903e592d48753",
    ("w4a16-row-zp", "int8"): "62449830353123f8",
    ("fp8-g32", "bf16"): "3e1e9635bafe76ed",
    ("fp8-g32", "int8"): "92baf90b34a8a81b",
    ("fp8-row", "bf16"): "83f8d93287df6a69",
    ("fp8-row", "int8"): "3af4c609eabd883a",
    ("k-quants", "bf16"): "8d3abf6129d81b74",
    ("k-quants", "int8"): "49de6ba06ebe3206",
    ("act-order", "bf16"): "6c20ba9cd95a69b1",
    ("act-order", "int8"): "65ffde9161c26c63",
    ("act-order-a16", "bf16"): "6962c167191c30db",
    ("act-order-a16", "int8"): "26d7b47b402366bb",
    ("act-order-fp8", "bf16"): "ed71500e8659f45e",
    ("act-order-fp8", "int8"): "8ed33ecc78bd612b",
}


@functools.cache
def _packed(format: str) -> TinyPacked:
    return make_model(format)[0]


@functools.cache
def _alone(format: str, kv: KVFormat, seed: int) -> NDArray[np.float32]:
    """Logits of one prompt run whole, alone, by one thread."""
    return logits_of(_packed(format), random_tokens(LENGTH, seed), kv=kv)


LENGTH = 90
NUM_REQUESTS = 4


def test_untested_levels_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {name: why for name, why in _core.isa_levels() if why}
    with capsys.disabled():
        for name, why in refused.items():
            print(f"\n*** LEVEL {name} IS NOT TESTED ON THIS CPU: {why} ***")
    assert set(LEVELS) | set(refused) == {"generic", "avx2", "avx512", "amx"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("format", "kv"), GOLDEN)
def test_golden_hashes(format: str, kv: str, level: str) -> None:
    logits = logits_of(_packed(format), random_tokens(45), kv=KVFormat(kv), isa=level, threads=2)
    digest = hashlib.sha256(logits.tobytes()).hexdigest()[:16]
    assert digest == GOLDEN[format, kv]


def test_every_format_has_a_golden_hash() -> None:
    assert {format for format, _ in GOLDEN} == set(ALL)
    assert {kv for _, kv in GOLDEN} == set(KV)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_do_not_change_a_bit(format: str, chunk: int, level: str) -> None:
    tokens = random_tokens(LENGTH, 1)
    runs = Runs(_packed(format), max_tokens=LENGTH, isa=level, threads=2)
    parts = [runs.step([(0, tokens[i : i + chunk])]) for i in range(0, LENGTH, chunk)]
    assert_bits_equal(np.concatenate(parts), _alone(format, KVFormat.BF16, 1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(("num_requests", "threads"), [(3, 1), (17, 2)])
def test_batches_do_not_change_a_bit(
    num_requests: int, threads: int, kv: KVFormat, level: str
) -> None:
    format, prompt, decoded = "w4a8-g32", 11, 6
    prompts = [random_tokens(prompt + decoded, seed) for seed in range(num_requests)]
    runs = Runs(
        _packed(format),
        num_requests=num_requests,
        max_tokens=prompt + decoded,
        kv=kv,
        isa=level,
        threads=threads,
    )
    logits = [runs.step([(i, p[:prompt]) for i, p in enumerate(prompts)])]
    rows = [logits[0].reshape(num_requests, prompt, -1)]
    for position in range(prompt, prompt + decoded):
        step = [(i, p[position : position + 1]) for i, p in enumerate(prompts)]
        rows.append(runs.step(step)[:, None])
    together = np.concatenate(rows, axis=1)
    for i, p in enumerate(prompts):
        assert_bits_equal(together[i], logits_of(_packed(format), p, kv=kv))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv", KV)
def test_a_prefix_hit_does_not_change_a_bit(kv: KVFormat, level: str) -> None:
    tokens = random_tokens(LENGTH, 1)
    runs = Runs(_packed("w8a8"), num_requests=2, max_tokens=LENGTH, kv=kv, isa=level, threads=2)
    runs.step([(0, tokens)])
    runs.share(0, 1, 64)
    assert_bits_equal(runs.step([(1, tokens[64:])]), _alone("w8a8", kv, 1)[64:])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv", KV)
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_random_schedules_do_not_change_a_bit(
    kv: KVFormat, level: str, data: st.DataObject
) -> None:
    """Invariant I1: whatever shares a step, a row's logits are those of its prefix alone."""
    format = data.draw(st.sampled_from(ALL), "format")
    threads = data.draw(st.integers(1, 3), "threads")
    runs = Runs(
        _packed(format),
        num_requests=NUM_REQUESTS,
        max_tokens=LENGTH,
        kv=kv,
        isa=level,
        threads=threads,
        seed=data.draw(st.integers(0, 99), "page order"),
    )
    seeds = data.draw(st.lists(st.integers(1, 3), min_size=4, max_size=4), "prompts")
    prompts = [random_tokens(LENGTH, seed) for seed in seeds]
    for _ in range(data.draw(st.integers(3, 9), "steps")):
        parts: list[tuple[int, NDArray[np.int32]]] = []
        for request, prompt in enumerate(prompts):
            begin = runs.lengths[request]
            if begin == 0:
                donors = [
                    other
                    for other in range(NUM_REQUESTS)
                    if seeds[other] == seeds[request] and runs.lengths[other] >= 32
                ]
                if donors and data.draw(st.sampled_from([True, False]), "hit"):
                    hit = min(runs.lengths[donors[0]] // 32 * 32, 64)
                    runs.share(donors[0], request, hit)
                    begin = hit
            count = min(data.draw(st.sampled_from([0, 1, 1, 2, 5, 17, 40]), "rows"), LENGTH - begin)
            if count:
                parts.append((request, prompt[begin : begin + count]))
        if not parts:
            continue
        begins = [runs.lengths[request] for request, _ in parts]
        logits = runs.step(parts)
        row = 0
        for (request, tokens), begin in zip(parts, begins, strict=True):
            want = _alone(format, kv, seeds[request])[begin : begin + len(tokens)]
            assert_bits_equal(logits[row : row + len(tokens)], want)
            row += len(tokens)


def test_the_callers_floating_point_state_is_kept() -> None:
    """FTZ and DAZ end with the call: numpy still has subnormal numbers."""
    logits_of(_packed("bf16"), random_tokens(3))
    tiny = np.array([1e-40], np.float32)
    assert (tiny * np.float32(1.0))[0] > 0.0


def test_level_files_export_no_weak_symbols() -> None:
    """A weak symbol in a level's object could replace the same function for the lowest CPU."""
    objects = [
        path
        for path in (ROOT / "build").glob("*/CMakeFiles/_core.dir/native/kernels/*/*.o")
        if path.name.split(".")[0] in ("avx2", "avx512", "amx")
        and path.parts[-7] not in ("emulated", "sanitize")
    ]
    if not objects or shutil.which("nm") is None:
        pytest.skip("NO WEAK-SYMBOL CHECK: there is no build folder, or no nm")
    for path in objects:
        listing = subprocess.run(
            ["nm", "--defined-only", path], capture_output=True, text=True, check=True
        ).stdout
        weak = [line for line in listing.splitlines() if line.split()[-2] in "wWvVu"]
        assert not weak, f"{path}: {weak}"


def test_the_stub_is_that_of_the_module(tmp_path: Path) -> None:
    """`_core.pyi` is regenerated with nanobind's stubgen after every change of the bindings."""
    stubgen = pytest.importorskip("nanobind.stubgen")
    made = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", stubgen.__name__, "-q", "-m", "trivet.native._core"]
    subprocess.run([*command, "-o", made], check=True, capture_output=True)
    kept = ROOT / "src" / "trivet" / "native" / "_core.pyi"
    assert ast.dump(ast.parse(made.read_text())) == ast.dump(ast.parse(kept.read_text()))
