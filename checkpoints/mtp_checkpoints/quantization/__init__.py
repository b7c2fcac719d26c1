"""Quantization of stored models: configs as engines read them, and the tensors they promise."""
