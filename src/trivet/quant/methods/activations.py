"""Rules for the activations of 8-bit rows, each a variable of its own beside the method of the weights.

    row          one scale per row as it comes
    hadamard64   a block Hadamard on weights and activations before that
    static       one scale for every row: the largest magnitude seen in calibration, over 127
    outliersM    the M columns whose magnitudes were largest stay out of the row, in bf16;
                 alone (rule ``row``) or as hadamard64+outliersM

What calibration decides is stored with the weights; the rounding is the engine's (HACKING.md). Here it
is done again in plain float32, to say what a rule costs at each linear.

Source: arXiv:2211.10438 (static), arXiv:2404.00456 (Hadamard), arXiv:2208.07339 (outlier columns).
Differs: outlier columns are fixed by calibration, not found in each batch; the Hadamard has blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.source import bf16_to_float, float_to_bf16
from trivet.config import MAX_OUTLIERS, RowRule, WeightFormat
from trivet.errors import ConfigError
from trivet.native.weights import hadamard_width, rotate
from trivet.quant.grid import Float32
from trivet.quant.observe import InputStats

ROW = WeightFormat(8, rule=RowRule.ROW)


@dataclasses.dataclass(frozen=True)
class InputRule:
    """A rule at one point: what calibration has decided.

    form      the engine's form of the linears that read there
    amax      largest magnitude of static activations, else None
    outliers  int32 [M], columns kept in bf16, the largest first; else None
    """

    form: WeightFormat
    amax: np.float32 | None = None
    outliers: NDArray[np.int32] | None = None

    @classmethod
    def of(cls, form: WeightFormat, stats: InputStats) -> InputRule:
        """Decide from what was seen at the point."""
        amax = outliers = None
        if form.rule is RowRule.STATIC:
            largest = np.float32(stats.absmax.max())
            scale = largest / np.float32(127) if largest > 0 else np.float32(1)
            amax = np.float32(127) * scale  # what a reader of the stored scale comes to
        if form.outliers:
            order = np.argsort(-stats.absmax, kind="stable")
            outliers = order[: form.outliers].astype(np.int32)
        return cls(form, amax, outliers)

    @property
    def input_scale(self) -> float | None:
        """The step of static activations, as the formats of the field store it."""
        return None if self.amax is None else float(self.amax / np.float32(127))

    def as_json(self) -> dict[str, Any]:
        outliers = None if self.outliers is None else self.outliers.tolist()
        return {"input_scale": self.input_scale, "outlier_columns": outliers}

    def rounded(self, x: Float32) -> Float32:
        """Rows x [R, K] as the linears see them."""
        values = x.copy()
        if self.outliers is not None:
            values[:, self.outliers] = 0
        rotation = None
        if self.form.is_rotated:
            width = hadamard_width(x.shape[1])
            rotation = rotate(np.eye(width)).astype(np.float32)
            values = (values.reshape(-1, width) @ rotation).reshape(x.shape)
        largest = np.abs(values).max(axis=1, keepdims=True)
        if self.amax is not None:
            largest = np.full_like(largest, self.amax)
        inverse = np.where(largest > 0, np.float32(127) / np.maximum(largest, 1e-30), np.float32(0))
        codes = np.rint(values * inverse.astype(np.float32)).clip(-127, 127)
        result: Float32 = (codes * (largest / np.float32(127))).astype(np.float32)
        if rotation is not None:
            result = (result.reshape(-1, len(rotation)) @ rotation).reshape(x.shape)
        if self.outliers is not None:
            result[:, self.outliers] = bf16_to_float(float_to_bf16(x[:, self.outliers]))
        return result


def parse_activations(name: str, narrowest: int) -> WeightFormat:
    """The engine's form of 8-bit rows with the rule of a name: ``row``, ``static``, ...

    narrowest  columns of the narrowest linear
    Raises ConfigError: no such rule; as many outliers as columns.
    """
    allowed = (
        "row, hadamard64, static, outliersM or hadamard64+outliersM,"
        f" M from 1 to {min(MAX_OUTLIERS, narrowest - 1)}"
    )
    try:
        form = WeightFormat.parse(f"w8a8+{name}")
    except ConfigError:
        raise ConfigError("activations", name, allowed) from None
    if form.outliers >= narrowest:
        raise ConfigError("activations", name, allowed)
    return form
