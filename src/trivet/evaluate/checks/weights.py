"""Every group of weights against the baseline's: damage too small for any text to show.

One scale or zero point of one group moves no perplexity, and is a broken file all the same. Both models
are read tensor by tensor; for each group of a row the error is taken in units of the group's own scale,
which makes groups alike, and then:

- a value that is no number rejects;
- a group rejects whose error (root mean square, or mean) stands far out of its own tensor's groups;
- a tensor rejects whose error on the baseline's activations is MAX_RTN_RATIO times that of rounding the
  baseline to the same format, which is the least a method should reach (codes that use a part of their
  range, as 6 bits in 8 do, have that many more steps of error);
- a tensor in another format than was asked for rejects.

Methods that move scale between neighbours (AWQ, SmoothQuant) are seen through: a norm counts together
with the columns it feeds, and gains of whole rows or columns are divided out where a fifth of them or
more are not 1. Tensors that still do not resemble the baseline's (other models, rotations) cannot be
compared, and where that is most of them the check is named as not applicable.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.formats.compressed_tensors import INT8_ROWS
from trivet.checkpoint.packed import PackedFile
from trivet.checkpoint.source import bf16_to_float
from trivet.config import PAGE_TOKENS, RowRule, Scheme, WeightFormat, own_or_format
from trivet.errors import QuantError
from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.loader import LoadedModel
from trivet.native.api import Arena, StepInput
from trivet.native.packing import LINEARS, linear_names, unpack
from trivet.native.weights import (
    WeightTensor,
    dequantize,
    hadamard_width,
    in_input_order,
    rotate,
)
from trivet.quant.rtn import convert

Float32 = NDArray[np.float32]

MAX_RTN_RATIO = 1.3  # of output error; other tools' plain rounding has up to 1.21 of ours
_OUTLIER = 2.2  # times the median error of a tensor's groups
_MEAN_LIMIT, _MEAN_SPREADS = 0.4, 7.5  # of the mean error in scales, and robust deviations
# Errors below are rounding, in scales, by code bits; a code that is off by one is off by 1. The
# baseline's own rounding to bf16 is up to a quarter of an 8-bit scale.
_FLOORS = {4: 0.6, 8: 0.8}
_FLOAT_FLOOR = 0.06  # the same in root mean squares of the group, where there are no scales
# The smallest unit an error is held against: a share of the tensor's root mean square, and a value.
# Scales of k-quants, which come as float32, have few bits themselves, and small ones are far off;
# float16 has its 11 bits down to the value here.
_LEAST_UNITS = {False: (0.01, 1e-30), True: (0.001, 6.2e-5)}
_GAINS_FROM = 0.2  # relative error of a tensor from which gains are looked for
_UNLIKE = 0.6  # relative error from which a tensor is another one
_SAMPLE_ROWS = 48  # of each tensor, for the error on activations
_TEXT_TOKENS = 192  # of the text whose activations are used
_CHUNK_VALUES = 1 << 18  # of the rows that are compared at once: they stay in the cache
_COPY = "copy"  # the sink that keeps x
_FEEDS = {
    **dict.fromkeys(("qkv", *LINEARS["qkv"]), "attn_norm"),
    **dict.fromkeys(("gate_up", *LINEARS["gate_up"]), "mlp_norm"),
}
_TAPS = {
    **dict.fromkeys(("qkv", *LINEARS["qkv"]), "attn_in"),
    "o": "o_in",
    **dict.fromkeys(("gate_up", *LINEARS["gate_up"]), "ffn_in"),
    "down": "down_in",
}


@dataclasses.dataclass
class _Audit:
    """What was found so far."""

    faults: list[str] = dataclasses.field(default_factory=list)
    unlike: list[str] = dataclasses.field(default_factory=list)
    worst: dict[str, float] = dataclasses.field(default_factory=dict)
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    groups: int = 0
    weights: int = 0

    def add(self, other: _Audit) -> None:
        """Take what was found elsewhere."""
        self.faults += other.faults
        self.unlike += other.unlike
        self.worst |= other.worst
        self.ratios |= other.ratios
        self.groups += other.groups
        self.weights += other.weights


def check(
    candidate: LoadedModel,
    baseline: LoadedModel,
    text_ids: list[int],
    advance: Callable[[int], None] | None = None,
) -> CheckResult:
    """Compare all weights. text_ids: a short text for the activations of the baseline.

    advance  called with 1 after each tensor
    """
    own, base = candidate.packed.file, baseline.packed.file
    found = _Audit()
    pairs = _pairs(own, base)
    if pairs is None:
        return CheckResult(
            "weights", "weights", Kind.MODEL, Finding.NOT_APPLICABLE,
            "weights: another architecture than the baseline's",
        )  # fmt: skip
    asked = own_or_format(candidate.config.weights)
    inputs = _inputs(baseline, text_ids)

    def compare(pair: _Pair) -> _Audit:
        name = pair.name
        part = _Audit()
        if base.tensors[pair.base].kind == "f32":
            _compare_floats(part, name, own, base)
            return part
        form = own.tensors[pair.own].format
        if asked is not None and name.startswith("layers.") and form != asked.name:
            part.faults.append(f"{name} is {form}, not {asked.name}")
        _compare_weight(part, pair, own, base, inputs.get(name))
        return part

    # Nearly all time is spent in numpy's loops, which run beside each other.
    with ThreadPoolExecutor(candidate.threads) as pool:
        try:
            for part in pool.map(compare, pairs):
                found.add(part)
                if advance is not None:
                    advance(1)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return _result(found, candidate)


def _all_rows() -> slice:
    return slice(None)


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A tensor of the candidate and the baseline's that it is held against.

    name        what reports call it
    own_rows, base_rows  the rows of each; all unless the other model has these rows alone
    """

    name: str
    own: str
    base: str
    own_rows: slice = dataclasses.field(default_factory=_all_rows)
    base_rows: slice = dataclasses.field(default_factory=_all_rows)


def _pairs(own: PackedFile, base: PackedFile) -> list[_Pair] | None:
    """What is held against what; None: other architectures.

    Where one model has the embedding and the head as one tensor and the other as two, both of the two
    are held against the one.
    """
    pairs = [
        pair
        for layer in range(sum(name.endswith(".attn_norm") for name in base.tensors))
        for linear in LINEARS
        for pair in _linear_pairs(own, base, layer, linear)
    ]
    left = own.tensors.keys() - {pair.own for pair in pairs}
    base_left = base.tensors.keys() - {pair.base for pair in pairs}
    pairs += [_Pair(name, name, name) for name in base.tensors if name in left & base_left]
    odd = left ^ base_left
    if odd == {"embed"}:
        ours, theirs = ("embed", "head") if "embed" in left else ("head", "embed")
        pairs.append(_Pair(ours, ours, theirs))
    elif odd:
        return None
    for pair in pairs:
        one, other = own.tensors[pair.own], base.tensors[pair.base]
        rows, base_rows = (
            len(range(tensor.n)[part])
            for tensor, part in ((one, pair.own_rows), (other, pair.base_rows))
        )
        if (rows, one.k) != (base_rows, other.k):
            return None
    return pairs


def _linear_pairs(own: PackedFile, base: PackedFile, layer: int, linear: str) -> list[_Pair]:
    """The tensors of one linear, role by role where one model has them apart."""
    ours, theirs = (linear_names(file.tensors, layer, linear) for file in (own, base))
    if not (set(ours) <= own.tensors.keys() and set(theirs) <= base.tensors.keys()):
        return []
    if len(ours) == len(theirs):
        return [_Pair(name, name, name) for name in ours]
    apart, file = (ours, own) if len(ours) > 1 else (theirs, base)
    pairs, start = [], 0
    for name in apart:
        rows = slice(start, start + file.tensors[name].n)
        start = rows.stop
        if file is own:
            pairs.append(_Pair(name, name, theirs[0], base_rows=rows))
        else:
            pairs.append(_Pair(name, ours[0], name, own_rows=rows))
    return pairs


def _result(found: _Audit, candidate: LoadedModel) -> CheckResult:
    worst = dict(sorted(found.worst.items(), key=lambda pair: -pair[1])[:5])
    ratios = dict(sorted(found.ratios.items(), key=lambda pair: -pair[1])[:5])
    metrics: dict[str, Any] = {
        "groups": found.groups,
        "faults": found.faults[:20],
        "num_faults": len(found.faults),
        "worst_group_in_medians": worst,
        "worst_output_error_over_rounding": ratios,
        "max_output_error_over_rounding": MAX_RTN_RATIO,
        "weights": candidate.weights_form,
        "unlike": found.unlike[:5],
    }

    def result(finding: Finding, reason: str) -> CheckResult:
        return CheckResult("weights", "weights", Kind.MODEL, finding, reason, metrics)

    if found.faults:
        more = f" and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
        return result(Finding.REJECT, f"weights: {found.faults[0]}{more}")
    if found.unlike:
        reason = f"weights: {len(found.unlike)} tensors are not the baseline's ({found.unlike[0]})"
        is_other = len(found.unlike) > found.weights / 2
        return result(Finding.NOT_APPLICABLE if is_other else Finding.REJECT, reason)
    return result(Finding.PASS, f"weights: {found.groups} groups are as their tensors' others")


def _compare_floats(found: _Audit, name: str, own: PackedFile, base: PackedFile) -> None:
    values, wanted = own.floats(name), base.floats(name)
    if not np.isfinite(values).all():
        found.faults.append(f"{name} holds values that are no numbers")
    elif (name.startswith("rope.") or name == "final_norm") and not np.allclose(
        values, wanted, rtol=1e-2, atol=1e-5
    ):
        found.faults.append(f"{name} is not the baseline's")


def _compare_weight(
    found: _Audit,
    pair: _Pair,
    own: PackedFile,
    base: PackedFile,
    inputs: Float32 | None,
) -> None:
    name = pair.name
    weight = _rows(unpack(own.weight(pair.own)), pair.own_rows)
    wanted = _rows(unpack(base.weight(pair.base)), pair.base_rows)
    for part in ("scales", "minima"):
        values = getattr(weight, part)
        if values is not None and not np.isfinite(values).all():
            found.faults.append(f"{name}: {part} hold values that are no numbers")
            return
    bias, wanted_bias = own.bias(pair.own), base.bias(pair.base)
    if (bias is None) != (wanted_bias is None) or (
        bias is not None
        and wanted_bias is not None
        and not np.allclose(bias[pair.own_rows], wanted_bias[pair.base_rows], rtol=1e-2, atol=1e-4)
    ):
        found.faults.append(f"{name}: the bias is not the baseline's")
    factor = _norm_factor(name, weight.shape[1], own, base)
    gains = np.ones(weight.shape[0], np.float32), np.ones(weight.shape[1], np.float32)
    relative, rms, mean = _errors(weight, wanted, factor, gains)
    if relative > _GAINS_FROM:
        gains = _gains(weight, wanted, factor)
        relative, rms, mean = _errors(weight, wanted, factor, gains)
    if not math.isfinite(relative):
        found.faults.append(f"{name} holds values that are no numbers")
        return
    if relative > _UNLIKE:
        found.unlike.append(name)
    found.groups += rms.size
    found.weights += 1
    floor = _FLOAT_FLOOR if _is_float(weight) else _FLOORS[weight.format.bits]
    _find_outliers(found, name, rms, mean, floor)
    if inputs is not None and relative > 1e-3 and relative <= _UNLIKE:
        source = own.tensors[pair.own].source
        _compare_rounding(found, name, weight, source, wanted, factor, gains, inputs)


def _errors(
    weight: WeightTensor, wanted: WeightTensor, factor: Float32, gains: tuple[Float32, Float32]
) -> tuple[float, Float32, Float32]:
    """Relative error of a tensor; root mean square and mean of each group's in scales, [N, G]."""
    rows, columns = gains
    parts: list[tuple[Float32, Float32, float, float]] = []
    is_plain = bool((rows == 1).all() and (columns == 1).all())
    has_factor = bool((factor != 1).any())
    for start, end in _runs(weight):
        error, kept = _values(weight, slice(start, end)), _values(wanted, slice(start, end))
        with np.errstate(invalid="ignore", over="ignore"):
            if has_factor:
                error *= factor[None, :]
            if not is_plain:
                error /= rows[start:end, None] * columns[None, :]
            error -= kept
            parts.append(_group_errors(weight, start, end, error, kept, rows, columns))
    rms = np.concatenate([part[0] for part in parts])
    mean = np.concatenate([part[1] for part in parts])
    squares = [sum(part[at] for part in parts) for at in (2, 3)]
    ratio = squares[0] / squares[1] if squares[1] else squares[0]
    return math.sqrt(ratio) if ratio >= 0 else math.nan, rms, mean


def _find_outliers(found: _Audit, name: str, rms: Float32, mean: Float32, floor: float) -> None:
    """Groups that stand out of their tensor. rms, mean: errors in scales, [N, G]."""
    median = float(np.median(rms))
    limit = max(_OUTLIER * median, floor)
    spread = 1.4826 * float(np.median(np.abs(mean - np.median(mean))))
    mean_limit = max(_MEAN_LIMIT, _MEAN_SPREADS * spread)
    bad = (rms > limit) | (np.abs(mean) > mean_limit)
    found.worst[name] = float(rms.max() / max(median, floor / _OUTLIER))
    if bad.any():
        row, group = (int(at) for at in np.argwhere(bad)[0])
        found.faults.append(
            f"{name}: row {row}, group {group} is off by {rms[row, group]:.2f} of its scale"
            f" ({int(bad.sum())} of {bad.size} groups, median {median:.2f})"
        )


def _compare_rounding(
    found: _Audit,
    name: str,
    weight: WeightTensor,
    source: str,
    wanted: WeightTensor,
    factor: Float32,
    gains: tuple[Float32, Float32],
    inputs: Float32,
) -> None:
    """Error on activations over that of rounding the baseline's rows to the same format.

    source: type of the tensor in its file, whose rounding comes before that of rotated rows.
    """
    n = weight.shape[0]
    picked = np.unique(np.linspace(0, n - 1, min(n, _SAMPLE_ROWS)).astype(int))
    kept, own = _values(wanted, picked), _values(weight, picked) * factor[None, :]
    error = own / (gains[0][picked][:, None] * gains[1][None, :]) - kept
    plain = weight.format  # a rule for activations changes nothing in how weights are rounded
    rows = WeightFormat(8, rule=RowRule.ROW)
    if plain.is_row:
        plain = dataclasses.replace(plain, outliers=0) if plain.is_rotated else rows
    try:
        wide = kept
        if plain.is_rotated and source == INT8_ROWS:
            wide = dequantize(convert(kept, rows).weight)
        rounded = dequantize(convert(wide, plain).weight) - kept
    except QuantError:
        return
    own_error, least, total = (_output_square(rows, inputs) for rows in (error, rounded, kept))
    if total <= 0 or own_error / total < 1e-5:
        return
    ratio = math.sqrt(own_error / least) / _coarseness(weight) if least > 0 else math.inf
    found.ratios[name] = ratio
    if ratio > MAX_RTN_RATIO:
        found.faults.append(
            f"{name}: output error is {ratio:.2f} times that of plain rounding to"
            f" {weight.format.name} (up to {MAX_RTN_RATIO})"
        )


def _is_float(weight: WeightTensor) -> bool:
    """Whether errors grow with the values, instead of being steps of a scale."""
    return weight.format.bits == 16 or weight.format.scheme is Scheme.FP8


def _coarseness(weight: WeightTensor) -> float:
    """Levels that codes could have over those that they span: 2 for 3 bits in 4, 4 for 6 in 8."""
    if _is_float(weight):
        return 1.0
    span = int(weight.codes.max()) - int(weight.codes.min())
    return max(1.0, (15 if weight.format.bits == 4 else 254) / max(span, 1))


def _output_square(rows: Float32, inputs: Float32) -> float:
    """Sum of squares of what rows of a weight [n, K] make of inputs [T, K]."""
    output = rows @ inputs.T
    return float(np.einsum("ij,ij->", output, output, dtype=np.float64))


def _norm_factor(name: str, columns: int, own: PackedFile, base: PackedFile) -> Float32:
    """What the norm before a weight multiplies its columns by, relative to the baseline's norm."""
    layer, _, role = name.rpartition(".")
    if role not in _FEEDS:
        return np.ones(columns, np.float32)
    values = own.floats(f"{layer}.{_FEEDS[role]}")[0]
    wanted = base.floats(f"{layer}.{_FEEDS[role]}")[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(wanted == 0, np.where(values == 0, 1.0, np.inf), values / wanted)
    return factor.astype(np.float32)


def _gains(weight: WeightTensor, wanted: WeightTensor, factor: Float32) -> tuple[Float32, Float32]:
    """Gains of rows [N] and columns [K], 1 unless a fifth of them are not."""
    n, k = weight.shape
    cross, square = np.zeros(k), np.zeros(k)
    rows = np.ones(n, np.float32)
    for start, end in _runs(weight):
        part = slice(start, end)
        values, kept = _values(weight, part) * factor[None, :], _values(wanted, part)
        with np.errstate(invalid="ignore", over="ignore"):
            product, own = values * kept, kept * kept
            cross += product.sum(axis=0, dtype=np.float64)
            square += own.sum(axis=0, dtype=np.float64)
            rows[start:end] = product.sum(axis=1) / np.maximum(own.sum(axis=1), 1e-30)
    columns = (cross / np.maximum(square, 1e-30)).astype(np.float32)
    return _kept_gains(rows), _kept_gains(columns)


def _kept_gains(gains: Float32) -> Float32:
    ones = np.ones_like(gains)
    if not np.isfinite(gains).all() or (np.abs(gains) < 1e-3).any():
        return ones
    return gains if float((np.abs(gains - 1) > 0.05).mean()) > 0.2 else ones


def _group_errors(
    weight: WeightTensor,
    start: int,
    end: int,
    error: Float32,
    kept: Float32,
    rows: Float32,
    columns: Float32,
) -> tuple[Float32, Float32, float, float]:
    """Root mean square and mean of the error of each group, in scales, [rows, G]; and the sums of
    squares of the error and of the values.
    """
    n, k = error.shape
    if weight.order is not None:  # groups are of columns as the weight has them
        error, kept, columns = (x[..., weight.order] for x in (error, kept, columns))
    group = weight.format.group_size or 32
    num_groups = -(-k // group)

    def grouped(values: Float32) -> Float32:
        if k % group == 0:
            return values.reshape(n, num_groups, group)
        padded = np.zeros((n, num_groups * group), np.float32)
        padded[:, :k] = values
        return padded.reshape(n, num_groups, group)

    lengths = np.full(num_groups, group, np.float32)
    lengths[-1] = k - (num_groups - 1) * group
    parts = grouped(error)
    squares = np.einsum("ijk,ijk->ij", parts, parts)
    rms = np.sqrt(squares / lengths)
    mean = (parts @ np.ones(group, np.float32)) / lengths
    blocks = grouped(kept)
    kept_squares = np.einsum("ijk,ijk->ij", blocks, blocks)
    size = np.sqrt(kept_squares / lengths)
    total = float(kept_squares.sum(dtype=np.float64))
    if weight.scales is None or _is_float(weight):
        unit = size
    else:
        scales = np.abs(weight.scales[start:end].astype(np.float32))
        if scales.shape[1] == 1:
            scales = np.repeat(scales, num_groups, axis=1)
        if not (columns == 1).all():
            spread = grouped(np.broadcast_to(columns, (n, k)).astype(np.float32))
            scales = scales / np.maximum(np.abs(spread).mean(axis=2), 1e-30)
        unit = scales / np.maximum(rows[start:end, None], 1e-30)
    share, least = _LEAST_UNITS[weight.scales is not None and weight.scales.dtype == np.float16]
    unit = np.maximum(unit, share * math.sqrt(total / kept.size) + least)
    error_total = float(squares.sum(dtype=np.float64))
    return (
        (rms / unit).astype(np.float32, copy=False),
        (mean / unit).astype(np.float32, copy=False),
        error_total,
        total,
    )


def _runs(weight: WeightTensor) -> Iterator[tuple[int, int]]:
    n, k = weight.shape
    step = max(1, _CHUNK_VALUES // k)
    for start in range(0, n, step):
        yield start, min(n, start + step)


def _rows(weight: WeightTensor, rows: slice | NDArray[np.intp]) -> WeightTensor:
    def cut(part: NDArray[Any] | None) -> Any:
        return None if part is None else part[rows]

    return dataclasses.replace(
        weight,
        codes=cut(weight.codes),
        scales=cut(weight.scales),
        minima=cut(weight.minima),
        zeros=cut(weight.zeros),
        outlier_codes=cut(weight.outlier_codes),
    )


def _values(weight: WeightTensor, rows: slice | NDArray[np.intp]) -> Float32:
    """Some rows as float32, without float64 where groups are whole: exact enough here."""
    part = _rows(weight, rows)
    k = part.shape[1]
    group = part.format.group_size or k
    if part.scales is None or k % group or part.format.scheme is Scheme.FP8:
        return dequantize(part)
    values = part.codes.astype(np.float32).reshape(-1, k // group, group)
    if part.zeros is not None:
        values -= part.zeros.astype(np.float32)[:, :, None]
    elif part.format.bits == 4 and part.minima is None:
        values -= np.float32(8)
    values *= part.scales.astype(np.float32)[:, :, None]
    if part.minima is not None:
        values += part.minima.astype(np.float32)[:, :, None]
    if part.format.is_rotated:
        matrix = _hadamard(hadamard_width(k))
        # In pieces that BLAS does not spread over threads: there is one beside this already.
        pieces = values.reshape(-1, math.gcd(values.size // len(matrix), 32), len(matrix))
        values = pieces @ matrix
    found: Float32 = values.reshape(-1, k)
    if part.outlier_codes is not None:
        found[:, part.outliers] = bf16_to_float(part.outlier_codes)
    return found if part.order is None else in_input_order(found, part.order)


@functools.cache
def _hadamard(width: int) -> Float32:
    """The rotation of one block of columns, which is its own inverse, [width, width]."""
    return rotate(np.eye(width)).astype(np.float32)


def _inputs(baseline: LoadedModel, text_ids: list[int]) -> dict[str, Float32]:
    """The inputs [T, K] of every layer's weights on a text, by the weight's name."""
    ids = text_ids[: min(_TEXT_TOKENS, baseline.runner.max_positions)]
    new_taps = getattr(baseline.runner, "new_taps", None)
    if new_taps is None or not ids:
        return {}
    taps = new_taps()
    points: dict[str, str] = {}
    for layer in range(baseline.runner.num_layers):
        for role, place in _TAPS.items():
            point = f"layer.{layer}.{place}"
            points[f"layers.{layer}.{role}"] = point
            taps.add(point, _COPY)
    arena: Arena = baseline.new_arena(-(-len(ids) // PAGE_TOKENS))
    baseline.runner.forward(
        StepInput(
            tokens=np.asarray(ids, np.int32),
            segments=np.array([[0, len(ids), 0, 0]], np.int32),
            page_tables=np.arange(arena.num_pages, dtype=np.int32)[None, :],
            logit_rows=np.zeros(0, np.int32),
        ),
        arena,
        taps,
    )
    return {name: taps.copies(point)[0] for name, point in points.items()}
