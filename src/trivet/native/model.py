"""A model on the native core: packed weights in, logits and KV out (`api.ModelRunner`).

Knows tensors, positions and pages; never text, requests or files. The weights are read where they lie
in the packed cache's mapping, so that all workers of a machine share one copy.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trivet.config import KVFormat
from trivet.errors import ConfigError
from trivet.native import _core
from trivet.native.api import Float32, KVGeometry, SampleInput, SampleResult, StepInput
from trivet.native.arena import KV_VALUES, Arena, kv_geometry
from trivet.native.isa import isa_report
from trivet.native.packing import (
    LINEARS,
    SCHEME_VALUES,
    ScaleType,
    WeightKind,
    linear_names,
)
from trivet.native.sampling import new_sampler, to_logprobs, to_results
from trivet.request import Logprob, SamplingParams


class Spec(Protocol):
    """The numbers of `trivet.models.ModelSpec` that a forward needs."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def tied_embeddings(self) -> bool: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...


class Tensor(Protocol):
    """One tensor of a packed file: `trivet.checkpoint.packed.PackedTensor`."""

    @property
    def kind(self) -> str: ...
    @property
    def scheme(self) -> str: ...
    @property
    def scale_type(self) -> str | None: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def codes(self) -> int: ...
    @property
    def scales(self) -> int | None: ...
    @property
    def minima(self) -> int | None: ...
    @property
    def zeros(self) -> int | None: ...
    @property
    def order(self) -> int | None: ...
    @property
    def bias(self) -> int | None: ...
    @property
    def hadamard(self) -> int: ...
    @property
    def amax(self) -> int | None: ...
    @property
    def outliers(self) -> int | None: ...
    @property
    def outlier_codes(self) -> int | None: ...
    @property
    def num_outliers(self) -> int: ...


class Packed(Protocol):
    """A packed model: `trivet.quant.PackedModel`. Tensor names are listed in `quant.load`."""

    @property
    def spec(self) -> Spec: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def buffer(self) -> memoryview: ...
    @property
    def numerics_id(self) -> str: ...


class Sink(enum.StrEnum):
    """What a tap keeps of the float32 inputs x [rows, width] that pass its point.

    copy          x itself, one array per forward call
    absmax        largest magnitude per column, float32 [width]
    sum_squares   sum of squares per column, float64 [width]
    gram          sum of x xᵀ, float64 [width, width]
    """

    COPY = "copy"
    ABSMAX = "absmax"
    SUM_SQUARES = "sum_squares"
    GRAM = "gram"


_POINTS = ("attn_in", "o_in", "ffn_in", "down_in", "final")  # the values of `Point` in model.h
_SINKS = tuple(Sink)  # the values of `Sink` in model.h


class Taps:
    """Sinks of one or more forward calls. Points: ``layer.N.attn_in`` (input of q, k, v),
    ``layer.N.o_in``, ``layer.N.ffn_in`` (input of gate and up), ``layer.N.down_in``, and ``final``
    (input of the head, rows with logits only). The accumulating sinks add up over calls.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._arrays: dict[tuple[str, Sink], NDArray[Any]] = {}
        self._copies: dict[str, list[Float32]] = {}
        self._parsed: dict[str, tuple[int, int, int]] = {}

    def add(self, point: str, sink: Sink | str) -> None:
        """Observe a point. Raises ValueError when the point or sink does not exist."""
        sink = Sink(sink)
        self._parsed[point] = self._parse(point)
        width = self._parsed[point][2]
        if sink is Sink.COPY:
            self._copies[point] = []
            return
        shape = (width, width) if sink is Sink.GRAM else (width,)
        dtype = np.float32 if sink is Sink.ABSMAX else np.float64
        self._arrays[point, sink] = np.zeros(shape, dtype)

    def array(self, point: str, sink: Sink | str) -> NDArray[Any]:
        """What an accumulating sink holds now."""
        return self._arrays[point, Sink(sink)]

    def copies(self, point: str) -> list[Float32]:
        """The rows that passed a point, one array per forward call."""
        return self._copies[point]

    def _parse(self, point: str) -> tuple[int, int, int]:
        """(index into _POINTS, layer, width) of a point."""
        spec = self._spec
        if point == "final":
            return len(_POINTS) - 1, 0, spec.hidden_size
        parts = point.split(".")
        if len(parts) == 3 and parts[0] == "layer" and parts[2] in _POINTS[:-1]:
            q_size, hidden = spec.num_heads * spec.head_dim, spec.hidden_size
            widths = (hidden, q_size, hidden, spec.ffn_size)
            if parts[1].isdecimal() and int(parts[1]) < spec.num_layers:
                index = _POINTS.index(parts[2])
                return index, int(parts[1]), widths[index]
        raise ValueError(f"there is no tap point {point!r}")

    def bind(self, num_rows: int, num_logits: int) -> list[object]:
        """(point, layer, sink, array) for one forward call; fresh arrays for copies."""
        bound: list[object] = []
        for point, copies in self._copies.items():
            index, layer, width = self._parsed[point]
            rows = num_logits if point == "final" else num_rows
            copies.append(np.empty((rows, width), np.float32))
            bound.append((index, layer, _SINKS.index(Sink.COPY), copies[-1]))
        for (point, sink), array in self._arrays.items():
            index, layer, _ = self._parsed[point]
            bound.append((index, layer, _SINKS.index(sink), array))
        return bound


def _linear(tensor: Tensor) -> dict[str, int | None]:
    """A packed weight as the native core reads it: numbers of linear.h and byte offsets."""
    kind = WeightKind[tensor.kind.upper()]
    scale_type = ScaleType[tensor.scale_type.upper()] if tensor.scale_type else ScaleType.F32
    scheme = next(value for name, value in SCHEME_VALUES.items() if name.value == tensor.scheme)
    return {
        "kind": int(kind),
        "scheme": scheme,
        "scale_type": int(scale_type),
        "n": tensor.n,
        "k": tensor.k,
        "group": tensor.group,
        "codes": tensor.codes,
        "scales": tensor.scales,
        "minima": tensor.minima,
        "zeros": tensor.zeros,
        "order": tensor.order,
        "bias": tensor.bias,
        "hadamard": tensor.hadamard,
        "amax": tensor.amax,
        "outliers": tensor.outliers,
        "outlier_codes": tensor.outlier_codes,
        "num_outliers": tensor.num_outliers,
    }


def _native_spec(packed: Packed, kv: KVFormat) -> dict[str, Any]:
    """The description `_core.Model` compiles into its list of operations."""
    spec, tensors = packed.spec, packed.tensors
    names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size")
    layers = [
        {
            "attn_norm": tensors[f"layers.{layer}.attn_norm"].codes,
            "ffn_norm": tensors[f"layers.{layer}.mlp_norm"].codes,
            **{
                name: [_linear(tensors[part]) for part in linear_names(tensors, layer, name)]
                for name in LINEARS
            },
        }
        for layer in range(spec.num_layers)
    ]
    return {
        **{name: getattr(spec, name) for name in names},
        "max_positions": spec.max_positions,
        "norm_eps": spec.norm_eps,
        "kv": KV_VALUES[kv],
        "rope_cos": tensors["rope.cos"].codes,
        "rope_sin": tensors["rope.sin"].codes,
        "final_norm": tensors["final_norm"].codes,
        "embedding": _linear(tensors["head" if spec.tied_embeddings else "embed"]),
        "head": _linear(tensors["head"]),
        "layers": layers,
    }


class NativeModel:
    """A model that runs whole steps on the native core. See `api.ModelRunner` for the calls.

    One step at a time; calls from several threads take turns. Raises ValueError when a step does not
    fit the model or the arena; nothing has been written then.
    """

    def __init__(self, packed: Packed, *, threads: int, isa: str, kv: KVFormat) -> None:
        self.packed = packed
        self.isa = isa
        self.threads = threads
        self.kv = kv
        weights = np.frombuffer(packed.buffer, np.uint8)
        spec = _native_spec(packed, kv)
        try:
            self._native = _core.Model(spec, weights, isa, threads)
        except RuntimeError:  # the system starts no more
            raise ConfigError(
                "threads", threads, "as many as the system lets a process start"
            ) from None
        self._eos_ids = frozenset(packed.spec.eos_ids)
        identity = f"{packed.numerics_id} kv={kv.value}"
        self._numerics_id = hashlib.sha256(identity.encode()).hexdigest()[:32]

    @property
    def vocab_size(self) -> int:
        return self.packed.spec.vocab_size

    @property
    def num_layers(self) -> int:
        return self.packed.spec.num_layers

    @property
    def hidden_size(self) -> int:
        return self.packed.spec.hidden_size

    @property
    def max_positions(self) -> int:
        return self.packed.spec.max_positions

    @property
    def numerics_id(self) -> str:
        """The packed weights' identity and the KV format's (invariant I8)."""
        return self._numerics_id

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def kv_geometry(self) -> KVGeometry:
        """Shape and bytes of this model's KV in its format."""
        spec = self.packed.spec
        return kv_geometry(spec.num_layers, spec.num_kv_heads, spec.head_dim, self.kv)

    def new_taps(self) -> Taps:
        """An empty set of sinks for this model."""
        return Taps(self.packed.spec)

    def forward(self, step: StepInput, arena: Arena, taps: Taps | None = None) -> Float32 | None:
        begin, end = (0, self.num_layers) if step.layers is None else step.layers
        hidden_out: Float32 | None = None
        if end < self.num_layers:
            hidden_out = np.empty((len(step.tokens), self.hidden_size), np.float32)
        sinks = [] if taps is None else taps.bind(len(step.tokens), len(step.logit_rows))
        self._native.forward(
            arena.native,
            step.tokens,
            step.segments,
            step.page_tables,
            step.logit_rows,
            begin,
            end,
            step.hidden,
            hidden_out,
            sinks,
        )
        return hidden_out

    def logits(self) -> Float32:
        return self._native.logits().copy()

    def nonfinite_logits(self) -> list[int]:
        return self._native.nonfinite_logits()

    def new_sampler(
        self, params: SamplingParams, choice_index: int, prompt_ids: Sequence[int]
    ) -> _core.SamplerState:
        return new_sampler(
            params, choice_index, prompt_ids, vocab_size=self.vocab_size, eos_ids=self._eos_ids
        )

    def sample(self, inputs: Sequence[SampleInput]) -> list[SampleResult]:
        return to_results(self._native.sample(inputs))

    def token_logprobs(self, first_logit: int, token_ids: Sequence[int], top: int) -> list[Logprob]:
        return to_logprobs(self._native.token_logprobs(first_logit, list(token_ids), top))

    def times_s(self) -> dict[str, float]:
        """Seconds of the calling thread by class of operation since the last reset.

        embedding; prepare (norm, gate and quantization of linear inputs); linear_qkv; attention (rope
        and KV writes included); linear_o; linear_gate_up; linear_down; head; and wait, in which it
        waited for other threads in any of these. No two overlap.
        """
        return {name: nanoseconds / 1e9 for name, nanoseconds in self._native.times_ns().items()}

    def reset_times(self) -> None:
        """Start counting `times_s` from zero."""
        self._native.reset_times()

    def set_timers(self, on: bool) -> None:
        """Whether steps count `times_s` (as they do from the start) or read no clock."""
        self._native.set_timers(on)


def load_model(
    packed: Packed,
    threads: int | None = None,
    isa: str | None = None,
    kv: KVFormat = KVFormat.BF16,
) -> NativeModel:
    """A runner over packed weights, which must stay mapped as long as it lives.

    threads  None: as many as this process may use
    isa      None: TRIVET_ISA or the highest usable level
    Raises ConfigError: the level cannot run here; ValueError: tensors that do not fit the spec.
    """
    count = len(os.sched_getaffinity(0)) if threads is None else threads
    return NativeModel(packed, threads=count, isa=isa_report(isa).active, kv=kv)


def pool_loops(threads: int, num_loops: int, pause_s: float = 0.0) -> list[float]:
    """Seconds of each of ``num_loops`` loops of a thread pool in which every thread takes one item
    that does nothing. The caller sleeps ``pause_s`` before each; after 20 microseconds without work
    the other threads sleep too, so that the loop begins with waking them.
    """
    return _core.pool_loops(threads, num_loops, pause_s)


def stream_rates(num_bytes: int, threads: int | None = None, passes: int = 9) -> list[float]:
    """Bytes per second of each of ``passes`` passes that read ``num_bytes`` of memory once."""
    count = len(os.sched_getaffinity(0)) if threads is None else threads
    return _core.stream_rates(num_bytes, count, passes)
