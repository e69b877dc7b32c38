"""How a model is quantized: everything that fixes the bytes but the model, the plan and the texts."""

from __future__ import annotations

import dataclasses
from typing import Any

from trivet.config import WeightFormat
from trivet.quant.methods.gptq import GptqConfig
from trivet.quant.methods.smoothquant import ALPHA

CALIBRATED = ("gptq", "awq", "awq+gptq", "smoothquant")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to quantize: everything that fixes the bytes but the model, the plan and the texts."""

    method: str = "gptq"
    format: str = "compressed-tensors"
    gptq: GptqConfig = dataclasses.field(default_factory=GptqConfig)
    smooth_alpha: float = ALPHA
    clip: bool = True
    requantized: bool = False
    activations: str | None = None  # rule of 8-bit rows' activations: `parse_activations`

    @property
    def activation_form(self) -> WeightFormat | None:
        """The engine's form of 8-bit rows with the rule; None: no rule was asked for."""
        return None if self.activations is None else WeightFormat.parse(f"w8a8+{self.activations}")

    @property
    def needs_calibration(self) -> bool:
        return self.method in CALIBRATED or self.activations is not None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
