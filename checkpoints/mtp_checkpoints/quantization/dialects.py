"""Dialects of quantization_config: how loaders that read integers differ in what they want."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dialect:
    """One way to describe integers to a loader.

    name is what the manifest records as the reader, title the engine's name in text. own_config:
    each folder's config.json may describe that folder alone, as it does where fp8 lies beside
    integers; else both say the same of both parts.
    native_fp8: fp8 beside integers stays in native blocks; else it becomes compressed-tensors too,
    with another scale name, and linears that attention absorbs stay in bf16.
    """

    name: str
    title: str
    own_config: bool
    native_fp8: bool


# Sources: vLLM and SGLang `quantization/compressed_tensors`.
VLLM = Dialect("vllm", "vLLM", own_config=False, native_fp8=False)
SGLANG = Dialect("sglang", "SGLang", own_config=True, native_fp8=True)
