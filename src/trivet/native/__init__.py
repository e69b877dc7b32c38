"""The native core: a model's forward, the KV arena and the sampler, with numpy references of each.

Everything here speaks token ids, positions, pages and arrays. The extension module `_core` holds
kernels and their thin checks; policy lives in these modules. Numerics: HACKING.md.
"""

from trivet.native.api import (
    KVGeometry,
    ModelRunner,
    SampleInput,
    SampleResult,
    SamplerState,
    StepInput,
)
from trivet.native.arena import Arena, kv_geometry
from trivet.native.isa import IsaReport, isa_report
from trivet.native.model import NativeModel, Sink, Taps, load_model, pool_loops, stream_rates

__all__ = [
    "Arena",
    "IsaReport",
    "KVGeometry",
    "ModelRunner",
    "NativeModel",
    "SampleInput",
    "SampleResult",
    "SamplerState",
    "Sink",
    "StepInput",
    "Taps",
    "isa_report",
    "kv_geometry",
    "load_model",
    "pool_loops",
    "stream_rates",
]
