"""Random tiny models for the forward's tests, as packed bytes for the core and as the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trivet.config import KVFormat, RowRule, Scheme, WeightFormat
from trivet.models import ModelSpec, rope_tables
from trivet.native import Arena, NativeModel, StepInput, load_model
from trivet.native.e4m3 import encode_values
from trivet.native.packing import LINEARS, Layout, pack
from trivet.native.reference import ReferenceLayer, ReferenceLinear, ReferenceModel
from trivet.native.reference_linear import to_bf16
from trivet.native.weights import WeightTensor, hadamard_width

FORMATS = [
    "bf16", "w8a8", "w8a8-g32", "w4a8-g32", "w4a8-g32-zp", "w4a8-g64-min",
    "w8a8+row", "w8a8+static", "w8a8+outliers7", "w8a8+hadamard64+outliers70",
    "w8a8-g16-min", "w4a8-g16", "w4a8-g16-min", "w4a8-row", "w4a8-row-zp",
    "w4a16-g32", "w4a16-g64-min", "w4a16-row-zp", "fp8-g32", "fp8-row",
]  # fmt: skip
# Roles that lie side by side in their own forms and their own orders of columns: (form, has an order).
MIXES = {
    "k-quants": {"": ("w4a8-g32-min", False), "v": ("w8a8-g16", False), "up": ("w8a8-g32", False)},
    "act-order": {"": ("w4a8-g32", True)},
    "act-order-a16": {"": ("w4a16-g64-zp", True), "k": ("bf16", False), "up": ("w8a8", True)},
    "act-order-fp8": {"": ("fp8-g64", True), "v": ("fp8-row", False)},
}
ALL = [*FORMATS, *MIXES]


def small_spec(**changes: object) -> ModelSpec:
    """Grouped queries, odd sizes, a head_dim that is not a multiple of 32."""
    base = ModelSpec(
        family="llama",
        hidden_size=96,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=20,
        ffn_size=136,
        vocab_size=53,
        max_positions=600,
        tied_embeddings=True,
        eos_ids=(2,),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class TinyTensor:
    """What the core is told of a tensor (`trivet.native.model.Tensor`)."""

    kind: str
    n: int
    k: int
    group: int
    scheme: str
    scale_type: str | None
    codes: int
    scales: int | None = None
    minima: int | None = None
    zeros: int | None = None
    order: int | None = None
    bias: int | None = None
    hadamard: int = 1
    amax: int | None = None
    outliers: int | None = None
    outlier_codes: int | None = None
    num_outliers: int = 0


class TinyPacked:
    """A packed model in memory (`trivet.native.model.Packed`)."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.tensors: dict[str, TinyTensor] = {}
        self.numerics_id = "tiny"
        self._bytes = bytearray()

    @property
    def buffer(self) -> memoryview:
        aligned = np.empty(len(self._bytes) + 64, np.uint8)
        start = -aligned.ctypes.data % 64
        aligned[start : start + len(self._bytes)] = np.frombuffer(self._bytes, np.uint8)
        return aligned[start : start + len(self._bytes)].data.toreadonly()

    def append(self, array: NDArray[np.generic]) -> int:
        self._bytes.extend(bytes(-len(self._bytes) % 64))
        offset = len(self._bytes)
        self._bytes.extend(np.ascontiguousarray(array).tobytes())
        return offset

    def add_floats(self, name: str, values: NDArray[np.float32]) -> None:
        rows = values.reshape(-1, values.shape[-1])
        offset = self.append(rows)
        self.tensors[name] = TinyTensor("f32", *rows.shape, 0, "sym", None, offset)

    def add_weight(self, name: str, linear: ReferenceLinear) -> None:
        packed = pack(linear.weight)
        layout: Layout = packed.layout
        parts = {part: self.append(array) for part, array in packed.arrays.items()}
        bias: int | None = None
        if linear.bias is not None:
            padded = np.zeros(layout.n_padded, np.float32)
            padded[: layout.n] = linear.bias
            bias = self.append(padded)
        plain = layout.format.bits == 16
        self.tensors[name] = TinyTensor(
            layout.kind.name.lower(),
            layout.n,
            layout.k,
            0 if plain else layout.group,
            layout.format.scheme.value,
            None if plain else layout.scale_type.name.lower(),
            bias=bias,
            hadamard=hadamard_width(layout.k) if layout.format.is_rotated else 1,
            num_outliers=layout.format.outliers,
            **parts,
        )


def random_weight(rng: np.random.RandomState, format: WeightFormat, n: int, k: int) -> WeightTensor:
    """A weight whose rows have a norm near one, so that activations keep their size."""
    if format.bits == 16:
        values = rng.uniform(-1.7, 1.7, (n, k)) / np.sqrt(k)
        return WeightTensor(format, to_bf16(values.astype(np.float32)))
    groups = 1 if format.group_size is None else -(-k // format.group_size)
    spread = rng.uniform(0.5, 1.5, (n, groups)) / np.sqrt(k)
    dtype = np.float32 if format.is_row else np.float16
    if format.scheme is Scheme.FP8:
        values = rng.uniform(-448.0, 448.0, (n, k)).astype(np.float32)
        return WeightTensor(format, encode_values(values), (spread / 256).astype(np.float32))
    if format.bits == 8:
        codes8 = rng.randint(-127, 128, (n, k), dtype=np.int8)
        scales8 = (spread / 73).astype(dtype)
        minima8 = None
        if format.scheme is Scheme.MIN:
            minima8 = (scales8 * rng.uniform(-60, 60, scales8.shape)).astype(dtype)
        if not format.is_row:
            return WeightTensor(format, codes8, scales8, minima8)
        amax = np.array([rng.uniform(1, 3)], np.float32) if format.rule is RowRule.STATIC else None
        outliers = high = None
        if format.outliers:
            outliers = np.sort(rng.permutation(k)[: format.outliers]).astype(np.int32)
            codes8[:, outliers] = 0
            high = to_bf16((rng.uniform(-1.7, 1.7, (n, len(outliers))) / 10).astype(np.float32))
        return WeightTensor(
            format, codes8, scales8, amax=amax, outliers=outliers, outlier_codes=high
        )
    scales = (spread / 4.6).astype(dtype)
    codes4 = rng.randint(0, 16, (n, k), dtype=np.uint8)
    minima = zeros = None
    if format.scheme is Scheme.MIN:
        minima = (scales * rng.uniform(-9, -6, scales.shape)).astype(dtype)
    if format.scheme is Scheme.ZP:
        zeros = rng.randint(5, 11, scales.shape, dtype=np.uint8)
    return WeightTensor(format, codes4, scales, minima, zeros)


def make_model(
    format_name: str, spec: ModelSpec | None = None, seed: int = 0
) -> tuple[TinyPacked, ReferenceModel]:
    """A random model in one weight format, or one of `MIXES`: packed, and as the reference."""
    spec = small_spec() if spec is None else spec
    rng = np.random.RandomState(seed)  # its stream is frozen for ever, as golden hashes need
    mix = MIXES.get(format_name)
    format = WeightFormat.parse(format_name if mix is None else mix[""][0])
    table = WeightFormat(8, 32)
    if format.bits == 16 or (format.bits == 8 and format.scheme is Scheme.MIN):
        table = format

    def norm(n: int) -> NDArray[np.float32]:
        return rng.uniform(0.5, 1.5, n).astype(np.float32)

    def linear(sizes: dict[str, int], k: int, has_bias: bool) -> list[ReferenceLinear]:
        def one(n: int, form: WeightFormat, has_order: bool) -> ReferenceLinear:
            bias = rng.uniform(-0.2, 0.2, n).astype(np.float32) if has_bias else None
            weight = random_weight(rng, form, n, k)
            if has_order:
                weight = dataclasses.replace(weight, order=rng.permutation(k).astype(np.int32))
            return ReferenceLinear(weight, bias)

        if mix is None:
            return [one(sum(sizes.values()), format, False)]
        forms = {role: mix.get(role, mix[""]) for role in sizes}
        return [
            one(n, WeightFormat.parse(forms[role][0]), forms[role][1]) for role, n in sizes.items()
        ]

    hidden, ffn = spec.hidden_size, spec.ffn_size
    heads = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
    layers = [
        ReferenceLayer(
            attn_norm=norm(hidden),
            ffn_norm=norm(hidden),
            qkv=linear(heads, hidden, spec.qkv_bias),
            o=linear({"o": hidden}, spec.q_size, spec.o_bias),
            gate_up=linear({"gate": ffn, "up": ffn}, hidden, spec.mlp_bias),
            down=linear({"down": hidden}, ffn, spec.mlp_bias),
        )
        for _ in range(spec.num_layers)
    ]
    cos, sin = rope_tables(spec)
    head = random_weight(rng, table, spec.vocab_size, hidden)
    embedding = head if spec.tied_embeddings else random_weight(rng, table, *head.shape)
    model = ReferenceModel(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        norm_eps=spec.norm_eps,
        cos=cos,
        sin=sin,
        embedding=embedding,
        layers=layers,
        final_norm=norm(hidden),
        head=head,
    )
    packed = TinyPacked(spec)
    packed.add_floats("rope.cos", cos)
    packed.add_floats("rope.sin", sin)
    packed.add_floats("final_norm", model.final_norm)
    packed.add_weight("head", ReferenceLinear(head))
    if not spec.tied_embeddings:
        packed.add_weight("embed", ReferenceLinear(embedding))
    for index, layer in enumerate(layers):
        packed.add_floats(f"layers.{index}.attn_norm", layer.attn_norm)
        packed.add_floats(f"layers.{index}.mlp_norm", layer.ffn_norm)
        for name, roles in LINEARS.items():
            parts: Sequence[ReferenceLinear] = getattr(layer, name)
            for role, part in zip(roles if len(parts) > 1 else [name], parts, strict=True):
                packed.add_weight(f"layers.{index}.{role}", part)
    return packed, model


class Runs:
    """Several requests on one native model and arena, stepped by hand."""

    def __init__(
        self,
        packed: TinyPacked,
        *,
        kv: KVFormat = KVFormat.BF16,
        threads: int = 1,
        isa: str | None = None,
        num_requests: int = 1,
        max_tokens: int = 64,
        seed: int = 0,
    ) -> None:
        self.model: NativeModel = load_model(packed, threads=threads, isa=isa, kv=kv)
        per_request = -(-max_tokens // 32)
        self.arena = Arena(self.model.kv_geometry(), num_requests * per_request + 1)
        # Pages in no order, and page 0 left to nobody.
        order = np.random.default_rng(seed).permutation(num_requests * per_request) + 1
        self.tables = order.reshape(num_requests, per_request).astype(np.int32)
        self.lengths = [0] * num_requests

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Let a fresh request read the first, full pages of another: a prefix-cache hit."""
        assert num_tokens % 32 == 0, "only full pages are shared"
        assert self.lengths[target] == 0, "the request has begun"
        pages = num_tokens // 32
        self.tables[target, :pages] = self.tables[source, :pages]
        self.lengths[target] = num_tokens

    def step(self, parts: list[tuple[int, NDArray[np.int32]]]) -> NDArray[np.float32]:
        """Run (request, next tokens) of several requests in one step: logits of every row."""
        segments, row = [], 0
        for request, tokens in parts:
            segments.append((row, len(tokens), self.lengths[request], request))
            row += len(tokens)
            self.lengths[request] += len(tokens)
        step = StepInput(
            np.concatenate([tokens for _, tokens in parts]).astype(np.int32),
            np.array(segments, np.int32).reshape(-1, 4),
            self.tables,
            np.arange(row, dtype=np.int32),
        )
        self.model.forward(step, self.arena)
        return self.model.logits()


def random_tokens(count: int, seed: int = 1, vocab: int = 53) -> NDArray[np.int32]:
    """Token ids of a prompt."""
    return np.random.RandomState(seed).randint(0, vocab, count).astype(np.int32)


def logits_of(
    packed: TinyPacked,
    tokens: NDArray[np.int32],
    *,
    kv: KVFormat = KVFormat.BF16,
    threads: int = 1,
    isa: str | None = None,
) -> NDArray[np.float32]:
    """Logits of every row of one prompt run whole."""
    runs = Runs(packed, max_tokens=len(tokens), kv=kv, threads=threads, isa=isa)
    return runs.step([(0, tokens)])
