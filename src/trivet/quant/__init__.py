"""Quantization: weights into the formats of the kernels, and whole models into packed caches."""
