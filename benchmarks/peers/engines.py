"""What is compared: every engine in every form, the settings that are tried, and the case groups."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environments
import files
from environments import PeerUnavailableError
from protocol import Child

HERE = Path(__file__).resolve().parent
KINDS = ("prefill", "decode", "batch")
MAX_CONTEXT = 4096 + 128


@dataclass(frozen=True)
class Form:
    """One engine with weights and KV of one width.

    bits   of a weight: forms of as many bits are compared as a pair
    fixed  settings that make this form what it is and are not searched
    main   part of the short table
    """

    name: str
    peer: str
    bits: int
    source: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    main: bool = True


def _trivet(weights: str, kv: str, bits: int, main: bool = True) -> Form:
    name = f"trivet {weights}" + ("" if kv == "bf16" else f" kv-{kv}")
    return Form(name, "trivet", bits, weights, {"kv": kv}, main)


def _llama(kind: str, bits: int, main: bool = True, kv: str = "F16") -> Form:
    name = f"llama.cpp {kind}" + ("" if kv == "F16" else f" kv-{kv.lower()}")
    fixed = {"type_kv": kv} | ({} if kv == "F16" else {"flash_attn": "on"})
    return Form(name, "llama_cpp", bits, kind, fixed, main)


FORMS = (
    _trivet("w4a8-g32", "bf16", 4),
    _trivet("w4a8-g32", "int8", 4),
    _trivet("w4a8-g32-min", "bf16", 4, main=False),
    _trivet("w4a8-g32-min", "int8", 4, main=False),
    _trivet("w8a8", "bf16", 8),
    _trivet("w8a8", "int8", 8),
    _trivet("bf16", "bf16", 16),
    _llama("Q4_0", 4),
    _llama("Q4_0", 4, main=False, kv="Q8_0"),
    _llama("Q4_1", 4, main=False),
    _llama("Q4_K_M", 4, main=False),
    _llama("Q8_0", 8),
    _llama("F16", 16),
    Form("openvino Q4_0", "openvino", 4, "Q4_0"),
    Form("openvino Q8_0", "openvino", 8, "Q8_0"),
    Form("openvino F16", "openvino", 16, "F16"),
    Form("vllm bf16", "vllm", 16, "hf", {"dtype": "bfloat16"}),
    Form("vllm f32", "vllm", 32, "hf", {"dtype": "float32"}, main=False),
    Form("transformers f32", "transformers", 32, "hf", {"dtype": "float32"}, main=False),
    Form("fake", "fake", 16, "none", main=False),
)

# Settings that change a form's numerics beyond its name (KV of OpenVINO, its activation groups) are
# tried too: the quality beside a speed is measured with the settings of that speed.
SEARCHED: dict[str, dict[str, list[Any]]] = {
    "llama_cpp": {
        "flash_attn": ["auto", "on", "off"],
        "n_ubatch": [512, 128, 2048],
        "extra_buffers": [True, False],
        "load_mode": ["auto", "mlock"],
        "kv_unified": [False, True],
    },
    "openvino": {
        "pipeline": ["paged", "plain"],
        "PERFORMANCE_HINT": [None, "LATENCY", "THROUGHPUT"],
        "NUM_STREAMS": [None, 2],
        "INFERENCE_PRECISION_HINT": [None, "f32", "bf16", "f16"],
        "KV_CACHE_PRECISION": [None, "u8", "f32"],
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": [None, 0, 32, 128],
        "max_num_batched_tokens": [4096, 512],
        "dynamic_split_fuse": [True, False],
        "ENABLE_CPU_PINNING": [None, False],
    },
    "vllm": {
        "enforce_eager": [True, False],
        "max_num_batched_tokens": [4608, 1024],
    },
    "trivet": {},
    "transformers": {},
    "fake": {},
}


@dataclass(frozen=True)
class Run:
    """What an engine is asked once: prompts of one length, and so many tokens of each."""

    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def cases(self) -> dict[str, str]:
        """Kind -> name of the case that this run measures."""
        if self.batch > 1 or self.output_tokens == self.prompt_tokens:
            return {"batch": f"batch_{self.batch}"}
        return {k: f"{k}_{self.prompt_tokens}" for k in ("prefill", "decode")}


_CONTEXTS = tuple(Run(1, n, 32 if n > 128 else 64) for n in (128, 512, 1024, 2048, 4096))
_BATCHES = tuple(Run(n, 128, 128) for n in (1, 4, 8, 16, 32))
GROUPS: dict[str, tuple[Run, ...]] = {
    "decode": tuple(r for r in _CONTEXTS if r.prompt_tokens != 512),
    "prefill": tuple(r for r in _CONTEXTS if r.prompt_tokens in (128, 512, 2048)),
    "batch": _BATCHES,
    "short": (*(r for r in _CONTEXTS if r.prompt_tokens in (128, 512, 2048)), *_BATCHES[2::2]),
    "all": (*_CONTEXTS, *_BATCHES),
    "quick": (Run(1, 24, 6), Run(3, 8, 8)),
}


def source_path(form: Form, model: str) -> str:
    """The model as this form's engine is given it. Raises PeerUnavailableError."""
    if form.peer == "fake":
        return ""
    if form.peer == "trivet":
        return files.trivet(model)
    if form.peer == "transformers" and model == "demo":
        return str(files.demo_gguf())
    if form.source == "hf":
        return str(files.folder(model))
    if model == "shape-1b" and form.source == "Q4_1":
        raise PeerUnavailableError("Q4_1 is the demo model's own type only")
    return str(files.gguf(model, form.source))


def weight_bytes(form: Form, model: str, answer: Mapping[str, Any]) -> int:
    """Bytes of the weights in this form: what the engine says, or values times their width."""
    if answer.get("weight_bytes"):
        return int(answer["weight_bytes"])
    if form.source != "hf":
        return Path(source_path(form, model)).stat().st_size
    width = 2 if answer["settings"]["dtype"] == "bfloat16" else 4
    return files.num_weights(files.folder(model)) * width


def start(
    form: Form, model: str, threads: int, settings: Mapping[str, Any], **options: Any
) -> tuple[Child, dict[str, Any]]:
    """Start an engine and load the model; the child and its answer.

    Raises PeerUnavailableError: no environment or file for it; EngineError: it does not load.
    """
    python = environments.PYTHONS[form.peer]()
    path = source_path(form, model)
    logs = environments.PEERS / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    variant = zlib.crc32(json.dumps(dict(settings), sort_keys=True).encode())
    log = logs / f"{model}_{form.name.replace(' ', '_')}_{variant:08x}.log"
    env = {"OMP_NUM_THREADS": str(threads)}
    child = Child(python, HERE / f"engine_{form.peer}.py", log, env)
    chosen = {k: v for k, v in {**settings, **form.fixed}.items() if v is not None}
    message = {"weights": form.source} if form.peer == "trivet" else {}
    try:
        answer = child.call(
            op="load", path=path, threads=threads, context=MAX_CONTEXT, settings=chosen, **message,
            **options,
        )  # fmt: skip
    except Exception:
        child.close()
        raise
    return child, answer


def load_settings(path: Path, model: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Form name -> kind -> best settings, from the file that settings.py writes; empty without it."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text()).get(model, {}).get("forms", {})
    return {name: entry["best"] for name, entry in found.items()}
