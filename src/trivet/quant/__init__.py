"""Quantization: weights into the formats of the kernels, and whole models into packed caches."""

from trivet.quant.load import PackedModel, TensorReport, load_packed

__all__ = ["PackedModel", "TensorReport", "load_packed"]
