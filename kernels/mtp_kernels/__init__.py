"""Fused verification attention, and the quantization kernels."""
