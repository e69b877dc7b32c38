"""Round to nearest: from a tensor as stored to any weight format, without calibration data.

A format the source already has is kept bit for bit; symmetric grids widen to 8 bits exactly; all else
goes through float32. Memory stays bounded: a tensor is worked on in runs of rows. The 4-bit formats
try a few scales per group and keep the one with the smallest squared error, which costs little and
is better than the range alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint import SourceTensor
from trivet.checkpoint.source import FloatMatrix, bf16_to_float, float_to_bf16
from trivet.config import RowRule, Scheme, WeightFormat
from trivet.errors import QuantError
from trivet.native.e4m3 import MAX, decode_values, encode_values
from trivet.native.weights import (
    WeightTensor,
    dequantize,
    hadamard_width,
    in_input_order,
    rotate,
)

Float32 = NDArray[np.float32]

BF16 = WeightFormat(16)
_CHUNK_VALUES = 1 << 20  # values worked on at once
_F16_MAX = 65504.0
_F32_LIMIT = 1e18  # squares of errors stay finite
_SYM_STEPS = (-8.0, -8.6, -9.4, -7.4, 7.0)  # scale = (value of largest magnitude) / step
_RANGE_SHARES = (1.0, 0.94, 0.88, 0.81)  # zp and min: share of the range that the codes span


@dataclasses.dataclass(frozen=True)
class Converted:
    """A weight in its new format. ``error`` is the Frobenius norm of what changed, ``norm`` that of
    the source (None when nothing changed and it was not needed).
    """

    weight: WeightTensor
    error: float = 0.0
    norm: float | None = None
    note: str = ""

    @property
    def rel_error(self) -> float:
        return self.error / self.norm if self.norm else 0.0


@dataclasses.dataclass
class _Grid:
    """One run of rows, quantized: codes [n, G, g], scale and so on [n, G], values for the error."""

    codes: NDArray[np.int64] | Float32
    scales: Float32
    minima: Float32 | None = None
    zeros: Float32 | None = None

    def values(self, offset: float) -> Float32:
        shift = self.zeros[:, :, None] if self.zeros is not None else np.float32(offset)
        values = self.scales[:, :, None] * (self.codes - shift)
        if self.minima is not None:
            values = values + self.minima[:, :, None]
        result: Float32 = values.astype(np.float32)
        return result


class _Tally:
    """Adds up, run by run, what changed and how large the source is."""

    def __init__(self) -> None:
        self.is_exact = True
        self._error = self._norm = 0.0

    def add(self, kept: NDArray[Any], want: NDArray[Any]) -> None:
        """One run of rows: the values kept and the values wanted, of one shape [n, K]."""
        change = kept - want
        if change.any():
            self.is_exact = False
            self._error += _square_sum(change)
        self._norm += _square_sum(want)

    def converted(self, weight: WeightTensor, note: str = "") -> Converted:
        return Converted(weight, math.sqrt(self._error), math.sqrt(self._norm), note)


def _square_sum(values: NDArray[Any]) -> float:
    """Sum of squares of rows; float32 within a row where that is enough."""
    total = float(np.einsum("ij,ij->i", values, values).sum(dtype=np.float64))
    if math.isfinite(total):
        return total
    wide = values.astype(np.float64)
    return float(np.einsum("ij,ij->", wide, wide))


def source_type(source: SourceTensor) -> str:
    """How reports name a source: its file type."""
    if isinstance(source, WeightTensor | FloatMatrix):
        return source.source
    return "F16" if source.dtype == np.float16 else "F32"


def own_format(source: SourceTensor) -> WeightFormat:
    """The form that a source's file asks for, its own grid, or bf16 for floats."""
    if isinstance(source, WeightTensor) and source.wanted is not None:
        return source.wanted
    return source.format if isinstance(source, WeightTensor | FloatMatrix) else BF16


def float_rows(source: SourceTensor, begin: int, end: int) -> Float32:
    """Rows [begin, end) of a source, float32."""
    if isinstance(source, FloatMatrix):
        return source.values[begin:end]
    if not isinstance(source, WeightTensor):
        return source[begin:end].astype(np.float32)
    part = _rows(source, begin, end)
    if part.order is not None:
        natural = dataclasses.replace(part, order=None)
        return in_input_order(float_rows(natural, 0, end - begin), part.order)
    if part.format.scheme is Scheme.FP8:
        return dequantize(part)
    if part.scales is None or part.scales.dtype != np.float16 or part.zeros is not None:
        return dequantize(part)
    # fp16 scale times code is exact in float32, so adding a minimum rounds once, like dequantize.
    rows, k = part.shape
    if k % part.num_groups:
        return dequantize(part)
    values = part.codes.astype(np.float32).reshape(rows, part.num_groups, -1)
    if part.format.bits == 4 and part.format.scheme is Scheme.SYM:
        values -= np.float32(8)
    values *= part.scales.astype(np.float32)[:, :, None]
    if part.minima is not None:
        values += part.minima.astype(np.float32)[:, :, None]
    return values.reshape(rows, k)


def _rows(weight: WeightTensor, begin: int, end: int) -> WeightTensor:
    def cut(part: Any) -> Any:
        return None if part is None else part[begin:end]

    return dataclasses.replace(
        weight,
        codes=cut(weight.codes),
        scales=cut(weight.scales),
        minima=cut(weight.minima),
        zeros=cut(weight.zeros),
        outlier_codes=cut(weight.outlier_codes),
    )


def convert(source: SourceTensor, target: WeightFormat) -> Converted:
    """Bring a tensor [N, K] into a format.

    Exact where the format can hold the source, and said so in ``weight.exact``. Raises QuantError: a
    value is too large for the format, or the source says nothing of the input that the format needs
    (the range of static activations, outlier columns).
    """
    if isinstance(source, WeightTensor):
        if source.format == target:
            return _without_extreme_codes(source)
        if dataclasses.replace(source.format, activation_bits=target.activation_bits) == target:
            return Converted(dataclasses.replace(source, format=target))
        widened = _widened(source, target) or _moved_rows(source, target)
        if widened is not None:
            return widened
    rounded = _rounded(source, target)
    if isinstance(source, FloatMatrix) and not rounded.weight.exact:
        return dataclasses.replace(rounded, note=source.note)
    return rounded


def _widened(source: WeightTensor, target: WeightFormat) -> Converted | None:
    """A 4-bit grid as 8 bits in the same groups, or a row's in any; None when that is not asked for."""
    own, group = source.format.group_size, target.group_size
    if source.format.bits != 4 or target.bits != 8 or group is None or own not in (None, group):
        return None
    if (source.format.scheme is Scheme.MIN) != (target.scheme is Scheme.MIN):
        return None
    k = source.shape[1]
    codes = source.codes.astype(np.int8)
    if source.zeros is not None:
        codes = codes - np.repeat(source.zeros.astype(np.int8), own or k, axis=1)[:, :k]
    elif source.minima is None:
        codes = codes - np.int8(8)

    def spread(values: Any) -> Any:
        return values if values is None or own else np.repeat(values, -(-k // group), axis=1)

    scales, minima = spread(source.scales), spread(source.minima)
    weight = WeightTensor(
        target, codes, scales, minima, None, source.order, exact=source.exact, source=source.source
    )
    return Converted(weight, note="widened to 8 bits")


def _moved_rows(source: WeightTensor, target: WeightFormat) -> Converted | None:
    """int8 whose rows have one scale each, in another such form: the codes stay. None: no such pair."""
    own = source.format
    if own.bits != 8 or own.is_rotated or own.outliers or own.scheme is not Scheme.SYM:
        return None
    if source.order is not None:
        return None
    if target.bits != 8 or target.is_rotated or target.scheme is not Scheme.SYM:
        return None
    assert source.scales is not None
    first = source.scales[:, :1]
    if not (source.scales == first).all() or not (own.is_row or target.is_row):
        return None
    plain = WeightTensor(
        WeightFormat(8, rule=RowRule.ROW), source.codes, first.astype(np.float32),
        exact=source.exact, source=source.source,
    )  # fmt: skip
    kept = _without_extreme_codes(plain)
    weight = kept.weight
    assert weight.scales is not None
    scales = weight.scales.astype(np.float32)
    if not target.is_row:
        assert target.group_size is not None
        spread = np.repeat(scales, -(-weight.shape[1] // target.group_size), axis=1)
        moved = WeightTensor(target, weight.codes, spread, exact=weight.exact, source=weight.source)
        return dataclasses.replace(kept, weight=moved)
    amax, columns = _range_of(source, target), _outliers_of(source, target)
    if columns is None:
        return dataclasses.replace(
            kept, weight=dataclasses.replace(weight, format=target, amax=amax)
        )
    codes = weight.codes.copy()
    values = codes[:, columns] * scales
    codes[:, columns] = 0
    high = float_to_bf16(values)
    error = math.hypot(kept.error, math.sqrt(_square_sum(bf16_to_float(high) - values)))
    moved = dataclasses.replace(
        weight, format=target, codes=codes, outliers=columns, outlier_codes=high,
        exact=weight.exact and error == 0.0,
    )  # fmt: skip
    note = f"{len(columns)} outlier columns are in bf16"
    return Converted(moved, error, None, "; ".join(filter(None, (kept.note, note))))


def _range_of(source: SourceTensor, target: WeightFormat) -> Float32 | None:
    """The range of static activations. Raises QuantError: the source holds none."""
    if target.rule is not RowRule.STATIC:
        return None
    amax = source.amax if isinstance(source, WeightTensor) else None
    if amax is None:
        raise QuantError(
            f"{target.name} needs a static input scale; a folder made with"
            " trivet quantize --activations static has one for each linear"
        )
    return amax


def _outliers_of(source: SourceTensor, target: WeightFormat) -> NDArray[np.int32] | None:
    """The outlier columns, ascending. Raises QuantError: the source names too few."""
    if not target.outliers:
        return None
    known = source.outliers if isinstance(source, WeightTensor) else None
    count = 0 if known is None else len(known)
    if known is None or count < target.outliers:
        raise QuantError(
            f"{target.name} needs {target.outliers} outlier columns and the model names {count}; a"
            f" folder made with trivet quantize --activations outliers{target.outliers} has them"
        )
    if isinstance(source, WeightTensor) and source.format.outliers > target.outliers:
        raise QuantError(f"{source.format.name} cannot become {target.name}: load the folder again")
    return np.sort(known[: target.outliers])


def _without_extreme_codes(source: WeightTensor) -> Converted:
    """The contract has codes -127..127: groups holding -128 are scaled to 127 and rounded."""
    if source.codes.dtype != np.int8 or not (source.codes == -128).any():
        return Converted(source)
    assert source.scales is not None
    rows, k = source.shape
    group = source.format.group_size or k
    padded = np.zeros((rows, source.num_groups * group), np.int8)
    padded[:, :k] = source.codes
    blocks = padded.reshape(rows, -1, group)
    bad = (blocks == -128).any(axis=2)
    scales = np.where(bad, source.scales.astype(np.float32) * np.float32(128 / 127), source.scales)
    if not (np.abs(scales) <= _F16_MAX).all():
        raise QuantError("a scale beside the code -128 is too large")
    scales = scales.astype(source.scales.dtype)
    wide = np.rint(blocks[bad].astype(np.float32) * np.float32(127 / 128))
    blocks[bad] = wide.clip(-127, 127).astype(np.int8)
    codes = np.ascontiguousarray(padded[:, :k])
    weight = dataclasses.replace(source, codes=codes, scales=scales, exact=False)
    note = f"{int(bad.sum())} groups held the code -128 and were rounded to 127"
    tally = _Tally()
    for begin, end in _row_runs(*weight.shape):
        tally.add(float_rows(weight, begin, end), float_rows(source, begin, end))
    return tally.converted(weight, note)


def _row_runs(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_VALUES // max(columns, 1))
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


def frobenius(source: SourceTensor) -> float:
    """The Frobenius norm of a tensor."""
    total = 0.0
    for begin, end in _row_runs(source.shape[0], source.shape[1]):
        total += _square_sum(float_rows(source, begin, end))
    return math.sqrt(total)


def _rounded(source: SourceTensor, target: WeightFormat) -> Converted:
    kind = source_type(source)
    if target.bits == 16:
        return _to_bf16(source, kind)
    if target.is_row:
        return _to_int8_rows(source, target, kind)
    return _to_groups(source, target, kind)


def _to_bf16(source: SourceTensor, kind: str) -> Converted:
    rows, k = source.shape
    codes = np.empty((rows, k), np.uint16)
    tally = _Tally()
    for begin, end in _row_runs(rows, k):
        values = float_rows(source, begin, end)
        rounded = float_to_bf16(values)
        tiny = (values.view(np.uint32) & 0x7F800000) == 0
        rounded = np.where(tiny, rounded & np.uint16(0x8000), rounded)  # subnormal counts as zero
        codes[begin:end] = rounded
        kept = bf16_to_float(rounded)
        if not np.isfinite(kept).all():
            raise QuantError("a value is too large for bf16")
        tally.add(kept, values)
    return tally.converted(WeightTensor(BF16, codes, exact=tally.is_exact, source=kind))


def _to_int8_rows(source: SourceTensor, target: WeightFormat, kind: str) -> Converted:
    rows, k = source.shape
    codes = np.empty((rows, k), np.int8)
    scales = np.empty((rows, 1), np.float32)
    amax, columns = _range_of(source, target), _outliers_of(source, target)
    high = None if columns is None else np.empty((rows, len(columns)), np.uint16)
    width = hadamard_width(k) if target.is_rotated else 1
    rotation = rotate(np.eye(width))  # one product per run is faster than butterflies
    tally = _Tally()
    for begin, end in _row_runs(rows, k):
        values = float_rows(source, begin, end).astype(np.float64)
        if high is not None:
            apart = values[:, columns]
            high[begin:end] = float_to_bf16(apart.astype(np.float32))
            tally.add(bf16_to_float(high[begin:end]), apart)
            values[:, columns] = 0
        if width > 1:
            values = (values.reshape(-1, width) @ rotation).reshape(end - begin, k)
        scale = (np.abs(values).max(axis=1, keepdims=True) / 127).astype(np.float32)
        code = np.rint(values / np.where(scale == 0, 1, scale)).clip(-127, 127)
        codes[begin:end], scales[begin:end] = code, scale
        tally.add(code * scale, values)  # a rotation keeps the norm
    if not np.isfinite(scales).all():
        raise QuantError("a value is too large for int8 rows")
    weight = WeightTensor(
        target, codes, scales, exact=tally.is_exact, source=kind, amax=amax, outliers=columns,
        outlier_codes=high,
    )  # fmt: skip
    return tally.converted(weight)


def _to_groups(source: SourceTensor, target: WeightFormat, kind: str) -> Converted:
    """Codes and scales per group; scales in fp16 unless one is too large for it, or small as fp8's."""
    converted = None
    if target.scheme is not Scheme.FP8:
        converted = _grouped(source, target, kind, np.float16)
    if converted is None:
        converted = _grouped(source, target, kind, np.float32)
    if converted is None:
        raise QuantError(f"a value is too large for {target.name}")
    return converted


def _grouped(
    source: SourceTensor, target: WeightFormat, kind: str, dtype: type[np.float16 | np.float32]
) -> Converted | None:
    """None when values are too large for the scale type."""
    rows, k = source.shape
    group = target.group_size or k
    num_groups = -(-k // group)
    is_fp8 = target.scheme is Scheme.FP8
    bits8 = target.bits == 8
    limit = _F16_MAX if dtype is np.float16 else _F32_LIMIT
    codes: NDArray[Any] = np.empty((rows, k), np.int8 if bits8 and not is_fp8 else np.uint8)
    scales = np.empty((rows, num_groups), dtype)
    minima = np.empty_like(scales) if target.scheme is Scheme.MIN else None
    zeros = np.empty(scales.shape, np.uint8) if target.scheme is Scheme.ZP else None
    solve = _solver(target, lambda x: x.astype(dtype).astype(np.float32))
    tally = _Tally()
    for begin, end in _row_runs(rows, k):
        values = float_rows(source, begin, end)
        padded = np.pad(values, ((0, 0), (0, num_groups * group - k)), mode="edge")
        blocks = padded.reshape(end - begin, num_groups, group)
        if np.abs(values).max() > limit:
            return None
        grid = solve(blocks)
        flat = grid.codes.reshape(end - begin, -1)[:, :k]
        codes[begin:end] = encode_values(flat.astype(np.float32)) if is_fp8 else flat
        scales[begin:end] = grid.scales
        if minima is not None:
            minima[begin:end] = grid.minima
        if zeros is not None and grid.zeros is not None:
            zeros[begin:end] = grid.zeros
        kept = grid.values(0.0 if bits8 or minima is not None else 8.0)
        tally.add(kept.reshape(end - begin, -1)[:, :k], values)
    return tally.converted(
        WeightTensor(target, codes, scales, minima, zeros, exact=tally.is_exact, source=kind)
    )


def _solver(
    target: WeightFormat, store: Callable[[Float32], Float32]
) -> Callable[[Float32], _Grid]:
    """The function that finds codes and scales of blocks [n, G, g]. store: rounding of scales."""

    def inverse(scales: Float32) -> Float32:
        return np.where(scales == 0, 0, 1 / np.where(scales == 0, 1, scales)).astype(np.float32)

    def int8(blocks: Float32) -> _Grid:
        scales = store(np.abs(blocks).max(axis=2) / np.float32(127))
        codes = np.rint(blocks * inverse(scales)[:, :, None]).clip(-127, 127)
        return _Grid(codes, scales)

    def sym(blocks: Float32) -> _Grid:
        place = np.abs(blocks).argmax(axis=2)
        largest = np.take_along_axis(blocks, place[:, :, None], axis=2)[:, :, 0]

        def grid(scales: Float32) -> _Grid:
            codes = np.rint(blocks * inverse(scales)[:, :, None])
            codes += np.float32(8)
            return _Grid(codes.clip(0, 15, out=codes), scales)

        return _best(blocks, 8.0, (grid(store(largest / np.float32(s))) for s in _SYM_STEPS))

    def zero_point(blocks: Float32) -> _Grid:
        low = np.minimum(blocks.min(axis=2), 0)
        high = np.maximum(blocks.max(axis=2), 0)

        def grid(share: float) -> _Grid:
            scales = store((high - low) * np.float32(share / 15))
            inv = inverse(scales)
            zeros = np.rint(-low * np.float32(share) * inv).clip(0, 15)
            codes = np.rint(blocks * inv[:, :, None]) + zeros[:, :, None]
            return _Grid(codes.clip(0, 15, out=codes), scales, zeros=zeros)

        return _best(blocks, 0.0, (grid(share) for share in _RANGE_SHARES))

    def minimum(blocks: Float32) -> _Grid:
        low, high = blocks.min(axis=2), blocks.max(axis=2)
        first, last = (-127, 127) if target.bits == 8 else (0, 15)

        def grid(share: float) -> _Grid:
            cut = (high - low) * np.float32((1 - share) / 2)
            scales = store((high - low) * np.float32(share / (last - first)))
            minima = store(low + cut - np.float32(first) * scales)
            codes = np.rint((blocks - minima[:, :, None]) * inverse(scales)[:, :, None])
            return _Grid(codes.clip(first, last, out=codes), scales, minima)

        return _best(blocks, 0.0, (grid(share) for share in _RANGE_SHARES))

    def fp8(blocks: Float32) -> _Grid:
        scales = store(np.abs(blocks).max(axis=2) / np.float32(MAX))
        return _Grid(decode_values(encode_values(blocks * inverse(scales)[:, :, None])), scales)

    if target.scheme is Scheme.FP8:
        return fp8
    if target.bits == 8 and target.scheme is Scheme.SYM:
        return int8
    return {Scheme.SYM: sym, Scheme.ZP: zero_point, Scheme.MIN: minimum}[target.scheme]


def _best(blocks: Float32, offset: float, grids: Iterator[_Grid]) -> _Grid:
    """Per group, the candidate with the smallest squared error; the first wins a tie."""

    def block_error(grid: _Grid) -> Float32:
        # Not einsum: its order of summation depends on the CPU, and here it decides codes.
        change = grid.values(offset) - blocks
        result: Float32 = np.square(change, out=change).sum(axis=2)
        return result

    best = next(grids)
    best_error = block_error(best)
    for grid in grids:
        error = block_error(grid)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best.codes[better] = grid.codes[better]
        best.scales = np.where(better, grid.scales, best.scales)
        if best.minima is not None and grid.minima is not None:
            best.minima = np.where(better, grid.minima, best.minima)
        if best.zeros is not None and grid.zeros is not None:
            best.zeros = np.where(better, grid.zeros, best.zeros)
    return best
