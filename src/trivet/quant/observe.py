"""What passes through a layer: hidden states streamed layer by layer, and sums over linear inputs.

The attention of a layer runs on the native core (a model of that one layer, its taps copying the input
of o); norms, linears and the gate are float32 products split over batches of whole sequences. Each
point is computed once, with the weights as they are then: a weight that was just quantized already
shapes what the next one sees (true-sequential). One layer's weights are in memory at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.source import float_to_bf16
from trivet.config import PAGE_TOKENS, KVFormat, WeightFormat
from trivet.models import Model, ModelSpec, rope_tables
from trivet.models.load import take_rows
from trivet.models.reference import to_float
from trivet.native import Arena, NativeModel, StepInput, load_model
from trivet.native.model import Sink
from trivet.native.packing import Layout, pack
from trivet.native.weights import WeightTensor
from trivet.quant.blas import Workers

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
# The inputs [R, K] of a point, by batch: all of them, or what computes one's.
Inputs = Sequence[Float32] | Callable[[int], Float32]
BATCH_ROWS = 2048  # rows of one batch; a longer sequence is a batch of its own
_GATE_ROWS = 128  # rows gated at once: they stay in the cache
_IDLE_FFN = 16  # columns of the MLP of a model that is run for its attention only
_IDLE_GROUP = 64
_IDLE_FORM = WeightFormat(4, _IDLE_GROUP)
POINTS = {
    "attn_in": ("q", "k", "v"),
    "o_in": ("o",),
    "ffn_in": ("gate", "up"),
    "down_in": ("down",),
}
ROLES = tuple(role for roles in POINTS.values() for role in roles)


@dataclasses.dataclass
class InputStats:
    """Sums over the tokens seen at one point.

    gram     float64 [K, K], sum of x xᵀ        absmax  float32 [K]
    abs_sum  float64 [K], sum of |x|            tokens  how many rows

    absmax and abs_sum are zeros where they were not asked for.
    """

    gram: Float64
    absmax: Float32
    abs_sum: Float64
    tokens: int = 0

    @classmethod
    def empty(cls, width: int) -> InputStats:
        return cls(np.zeros((width, width)), np.zeros(width, np.float32), np.zeros(width))

    @classmethod
    def of(cls, x: Float32, *, sizes: bool) -> InputStats:
        """Of one batch float32 [R, K]. Products are summed in float32 within a batch."""
        width = x.shape[1]
        gram = (x.T @ x).astype(np.float64)
        stats = cls(gram, np.zeros(width, np.float32), np.zeros(width), len(x))
        if sizes:
            size = np.abs(x)
            stats.absmax = size.max(axis=0)
            stats.abs_sum = size.sum(axis=0, dtype=np.float64)
        return stats

    def add(self, other: InputStats) -> None:
        self.gram += other.gram
        np.maximum(self.absmax, other.absmax, out=self.absmax)
        self.abs_sum += other.abs_sum
        self.tokens += other.tokens


@dataclasses.dataclass(frozen=True)
class Batch:
    """Whole sequences side by side: rows [R] in order, the length of each sequence."""

    lengths: tuple[int, ...]
    is_held_out: bool

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)


@dataclasses.dataclass
class LayerWeights:
    """One layer in float32: matrices by role, biases, the gains of both norms. Replaced as it goes."""

    matrices: dict[str, Float32]
    biases: dict[str, Float32]
    attn_norm: Float32
    mlp_norm: Float32

    @classmethod
    def read(cls, model: Model, layer: int) -> LayerWeights:
        matrices = {role: to_float(model.matrix(role, layer)) for role in ROLES}
        biases = {}
        for role in ROLES:
            bias = model.bias(role, layer)
            if bias is not None:
                biases[role] = bias
        return cls(matrices, biases, model.norm("attn_norm", layer), model.norm("mlp_norm", layer))

    def copy(self) -> LayerWeights:
        """A copy whose entries can be replaced."""
        return dataclasses.replace(self, matrices=dict(self.matrices), biases=dict(self.biases))


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor as the native core is told of it (`trivet.native.model.Tensor`)."""

    kind: str
    n: int
    k: int
    codes: int
    bias: int | None = None
    group: int = 0
    scheme: str = "sym"
    scale_type: str | None = None
    scales: int | None = None
    minima: int | None = None
    zeros: int | None = None
    order: int | None = None
    hadamard: int = 1
    amax: int | None = None
    outliers: int | None = None
    outlier_codes: int | None = None
    num_outliers: int = 0


class _OneLayer:
    """A packed model in memory: one layer's attention in bf16, an MLP and a head of zeros."""

    numerics_id = "calibration"

    def __init__(self, spec: ModelSpec, weights: LayerWeights, positions: int) -> None:
        self.spec = dataclasses.replace(
            spec,
            num_layers=1,
            ffn_size=_IDLE_FFN,
            vocab_size=_IDLE_FFN,
            max_positions=positions,
            tied_embeddings=True,
        )
        self.tensors: dict[str, _Tensor] = {}
        self._parts: list[NDArray[Any]] = []
        self._size = 0
        hidden = spec.hidden_size
        cos, sin = rope_tables(dataclasses.replace(spec, max_positions=positions))
        for name, values in (
            ("rope.cos", cos), ("rope.sin", sin), ("final_norm", np.ones((1, hidden))),
            ("layers.0.attn_norm", weights.attn_norm[None]),
            ("layers.0.mlp_norm", np.ones((1, hidden))),
        ):  # fmt: skip
            rows = np.ascontiguousarray(values, np.float32)
            height, width = rows.shape
            self.tensors[name] = _Tensor("f32", height, width, self._append(rows))
        fused = np.concatenate([weights.matrices[role] for role in ("q", "k", "v")])
        bias = None
        if any(role in weights.biases for role in ("q", "k", "v")):
            bias = np.concatenate([weights.biases[role] for role in ("q", "k", "v")])
        self._add("layers.0.qkv", fused, bias)
        self._add_idle("layers.0.o", hidden, spec.q_size)
        self._add_idle("layers.0.gate_up", 2 * _IDLE_FFN, hidden)
        self._add_idle("layers.0.down", hidden, _IDLE_FFN)
        self._add_idle("head", _IDLE_FFN, hidden)
        aligned = np.zeros(self._size + 64, np.uint8)
        start = -aligned.ctypes.data % 64
        self._bytes = aligned[start : start + self._size]
        for offset, part in zip(self._offsets(), self._parts, strict=True):
            raw = part.reshape(-1).view(np.uint8)
            self._bytes[offset : offset + raw.size] = raw

    @property
    def buffer(self) -> memoryview:
        return self._bytes.data.toreadonly()

    def _offsets(self) -> list[int]:
        offsets, at = [], 0
        for part in self._parts:
            offsets.append(at)
            at += -(-part.nbytes // 64) * 64
        return offsets

    def _append(self, values: NDArray[Any]) -> int:
        offset = self._size
        self._parts.append(np.ascontiguousarray(values))
        self._size += -(-values.nbytes // 64) * 64
        return offset

    def _add_idle(self, name: str, rows: int, columns: int) -> None:
        """A matrix of zeros, in the form that costs least: nothing reads what it gives."""
        scales = np.zeros((rows, -(-columns // _IDLE_GROUP)), np.float16)
        codes = np.zeros((rows, columns), np.uint8)
        packed = pack(WeightTensor(_IDLE_FORM, codes, scales))
        layout = packed.layout
        assert packed.scales is not None, "codes have scales"
        self.tensors[name] = _Tensor(
            layout.kind.name.lower(), layout.n, layout.k, self._append(packed.codes),
            group=layout.group, scale_type="f16", scales=self._append(packed.scales),
        )  # fmt: skip

    def _add(self, name: str, values: Float32, bias: Float32 | None) -> None:
        packed = pack(WeightTensor(WeightFormat(16), float_to_bf16(values)))
        layout: Layout = packed.layout
        offset = self._append(packed.codes)
        bias_offset = None
        if bias is not None:
            padded = np.zeros(layout.n_padded, np.float32)
            padded[: layout.n] = bias
            bias_offset = self._append(padded)
        self.tensors[name] = _Tensor("bf16", layout.n, layout.k, offset, bias_offset)


def make_batches(sequences: Sequence[Sequence[int]], is_held_out: bool) -> list[Batch]:
    """Sequences in order, as many to a batch as fit BATCH_ROWS."""
    batches: list[Batch] = []
    lengths: list[int] = []
    for sequence in sequences:
        if lengths and sum(lengths) + len(sequence) > BATCH_ROWS:
            batches.append(Batch(tuple(lengths), is_held_out))
            lengths = []
        lengths.append(len(sequence))
    if lengths:
        batches.append(Batch(tuple(lengths), is_held_out))
    return batches


class Stream:
    """The hidden states of all sequences on their way through the layers.

    hidden  float32 [R, hidden_size] of each batch, replaced layer by layer
    """

    def __init__(
        self,
        model: Model,
        train: Sequence[Sequence[int]],
        held_out: Sequence[Sequence[int]],
        workers: Workers,
    ) -> None:
        self.spec = model.spec
        self.workers = workers
        self.batches = make_batches(train, False) + make_batches(held_out, True)
        ids = np.concatenate([np.asarray(s, np.int64) for s in [*train, *held_out]])
        table = model.matrix("embed")
        distinct, places = np.unique(ids, return_inverse=True)
        rows = to_float(take_rows(table, distinct))
        self.hidden: list[Float32] = []
        at = 0
        for batch in self.batches:
            self.hidden.append(rows[places[at : at + batch.num_rows]])
            at += batch.num_rows
        self._positions = max(length for batch in self.batches for length in batch.lengths)

    @property
    def num_tokens(self) -> int:
        """Rows that are calibrated on."""
        return sum(batch.num_rows for batch in self.batches if not batch.is_held_out)

    def normed(self, gains: Float32) -> Callable[[int], Float32]:
        """The hidden states of a batch through an RMS norm."""
        eps = np.float32(self.spec.norm_eps)

        def inputs(index: int) -> Float32:
            x = self.hidden[index]
            squares = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(x.shape[1])
            result: Float32 = x / np.sqrt(squares + eps)
            result *= gains
            return result

        return inputs

    def attention(self, weights: LayerWeights) -> list[Float32]:
        """The input of o of every batch: norm, q, k, v, rope and attention on the native core."""
        packed = _OneLayer(self.spec, weights, self._positions)
        runner = load_model(packed, threads=self.workers.threads, kv=KVFormat.BF16)
        most = max(sum(-(-n // PAGE_TOKENS) for n in batch.lengths) for batch in self.batches)
        arena = Arena(runner.kv_geometry(), most)
        return [self._attend(runner, arena, index) for index in range(len(self.batches))]

    def _attend(self, runner: NativeModel, arena: Arena, index: int) -> Float32:
        lengths = self.batches[index].lengths
        pages = [-(-n // PAGE_TOKENS) for n in lengths]
        tables = np.full((len(lengths), max(pages)), -1, np.int32)
        segments = np.zeros((len(lengths), 4), np.int32)
        row = page = 0
        for s, (length, count) in enumerate(zip(lengths, pages, strict=True)):
            tables[s, :count] = np.arange(page, page + count)
            segments[s] = (row, length, 0, s)
            row, page = row + length, page + count
        taps = runner.new_taps()
        taps.add("layer.0.o_in", Sink.COPY)
        step = StepInput(
            tokens=np.zeros(row, np.int32),
            segments=segments,
            page_tables=tables,
            logit_rows=np.empty(0, np.int32),
            layers=(0, 1),
            hidden=self.hidden[index],
        )
        runner.forward(step, arena, taps)
        [mixed] = taps.copies("layer.0.o_in")
        return mixed

    def gated(self, weights: LayerWeights) -> Callable[[int], Float32]:
        """The input of down of a batch, from hidden states to which attention was added."""
        inputs = self.normed(weights.mlp_norm)

        def gated(index: int) -> Float32:
            x = inputs(index)
            gate = linear(x, weights, "gate")
            up = linear(x, weights, "up")
            for begin in range(0, len(x), _GATE_ROWS):
                g, u = gate[begin : begin + _GATE_ROWS], up[begin : begin + _GATE_ROWS]
                u *= g
                np.negative(g, out=g)
                np.exp(g, out=g)
                g += np.float32(1)
                u /= g
            return up

        return gated

    def add_linear(self, inputs: Inputs, weights: LayerWeights, role: str) -> None:
        """Add a linear of every batch's inputs to its hidden states."""

        def add(index: int) -> Float32:
            x = inputs(index) if callable(inputs) else inputs[index]
            result: Float32 = self.hidden[index] + linear(x, weights, role)
            return result

        for index, hidden in enumerate(self.workers.map(add, range(len(self.batches)))):
            self.hidden[index] = hidden

    def advance(self, weights: LayerWeights) -> None:
        """Send the tokens through a layer."""
        self.add_linear(self.attention(weights), weights, "o")
        self.add_linear(self.gated(weights), weights, "down")

    def observe(
        self,
        inputs: Inputs,
        width: int,
        *,
        keep: bool = False,
        sizes: bool = True,
    ) -> tuple[InputStats, InputStats, list[Float32]]:
        """Sums over the calibration part and over the part held out; the inputs too when kept.

        sizes  whether magnitudes are wanted beside products
        """
        sums = {False: InputStats.empty(width), True: InputStats.empty(width)}
        kept: list[Float32] = []

        def look(index: int) -> tuple[Float32 | None, InputStats]:
            x = inputs(index) if callable(inputs) else inputs[index]
            return (x if keep else None), InputStats.of(x, sizes=sizes)

        indices = range(len(self.batches))
        for index, (x, stats) in enumerate(self.workers.map(look, indices)):
            sums[self.batches[index].is_held_out].add(stats)
            if x is not None:
                kept.append(x)
        return sums[False], sums[True], kept


def linear(x: Float32, weights: LayerWeights, role: str) -> Float32:
    """x [R, K] through one linear of a layer."""
    y: Float32 = x @ weights.matrices[role].T
    bias = weights.biases.get(role)
    if bias is not None:
        y += bias
    return y
