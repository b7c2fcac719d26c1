"""Kernels of the decoding path: fused verification attention, and quantization."""
