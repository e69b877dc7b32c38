"""One virtual environment per peer under build/peers, and the demo model in each peer's format.

Everything here is idempotent: a finished environment or file is reused. llama.cpp is compiled (minutes)
with the instruction sets this CPU has but without GGML_NATIVE: on AMX machines version 0.3.36 built
natively ends in a segmentation fault inside its AMX matrix product.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "build" / "peers"

LLAMA_CPP = "llama-cpp-python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1"

_GGML_FLAGS = {
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "BMI2": "bmi2",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512_vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
}

_CONVERT = """
import sys, llama_cpp
source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = int(kind)
params.allow_requantize = True
params.nthread = 2
raise SystemExit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""
_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7}


def cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def _environment(name: str, packages: list[str], env: dict[str, str]) -> Path:
    folder = PEERS / name
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == " ".join(packages):
        return python
    print(f"peers: installing {' '.join(packages)} into {folder}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    subprocess.run([*pip, *packages], check=True, env={**os.environ, **env})
    stamp.write_text(" ".join(packages))
    return python


def llama_cpp() -> Path:
    """The python of llama.cpp's environment."""
    flags = cpu_flags()
    options = ["-DGGML_NATIVE=OFF"]
    options += [
        f"-DGGML_{name}={'ON' if flag in flags else 'OFF'}" for name, flag in _GGML_FLAGS.items()
    ]
    return _environment("llama_cpp", [LLAMA_CPP, "psutil"], {"CMAKE_ARGS": " ".join(options)})


def openvino() -> Path:
    """The python of OpenVINO GenAI's environment."""
    return _environment("openvino", [OPENVINO, "psutil"], {})


def gguf(source: Path, kind: str) -> Path:
    """The demo model as a GGUF file of another type, made by llama.cpp's own quantizer."""
    target = PEERS / "models" / f"demo.{kind}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        command = [str(llama_cpp()), "-c", _CONVERT, str(source), str(temporary)]
        subprocess.run([*command, str(_FILE_TYPES[kind])], check=True, stderr=subprocess.DEVNULL)
        temporary.rename(target)
    return target
