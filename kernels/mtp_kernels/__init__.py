"""Kernels: verification attention, decoder layers, quantization."""
