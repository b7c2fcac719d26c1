"""Codes of MTP modules without scales, and scales without codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.families.base import FLOATS
from mtp_checkpoints.formats.base import SCALES_OF_CODES
from mtp_export.verify.diagnosis.causes import presence as causes

_CODES = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8", "I32", "U32"})


def unpaired(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    """Yield codes without a scale, and scales without codes or beside what holds none, each with a
    sentence."""
    last_of: dict[str, set[str]] = {}
    for name in tensors:
        module, _, last = name.rpartition(".")
        last_of.setdefault(module, set()).add(last)
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        siblings = last_of[module]
        scales = SCALES_OF_CODES.get(last) if tensor.dtype in _CODES else None
        if scales is not None and not any(f"{module}.{scale}" in tensors for scale in scales):
            yield name, causes.codes_without_scale(name, str(tensor.dtype))
        weights = [codes for codes, scales in SCALES_OF_CODES.items() if last in scales]
        if weights and siblings.isdisjoint((*SCALES_OF_CODES, "blocks")):
            yield name, causes.scale_without_codes(name)
        plain = tensors.get(f"{module}.weight")
        if "weight" in weights and plain is not None and _is_float_matrix(plain):
            yield plain.name, causes.scale_beside_floats(plain.name, str(plain.dtype), last)


def _is_float_matrix(tensor: TensorInfo) -> bool:
    return len(tensor.shape) > 1 and tensor.dtype in FLOATS
