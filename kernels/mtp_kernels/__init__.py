"""Kernels of decoding and quantization: decoder layers, verification attention, stored weights."""
