"""Trivet makes large language models run faster, and proves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivet.llm import LLM
    from trivet.quantization import quantize
    from trivet.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__", "quantize"]


def __getattr__(name: str) -> Any:
    """Import the Python API on first use: `trivet --version` must not load numpy."""
    if name == "LLM":
        from trivet.llm import LLM

        return LLM
    if name == "SamplingParams":
        from trivet.request import SamplingParams

        return SamplingParams
    if name == "quantize":
        from trivet.quantization import quantize

        return quantize
    raise AttributeError(f"module 'trivet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
