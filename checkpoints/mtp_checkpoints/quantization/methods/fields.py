"""Fields of quantization_config that several methods have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.formats import CODES_PER_WORD, WHOLE_ROW
from mtp_checkpoints.quantization.native import unusable_field


def names_in(quantization: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of module names or patterns; none where it is absent (InvalidInputError)."""
    listed = quantization.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise unusable_field(key, "a list of module names", listed)
    return listed


def number_of(quantization: Mapping[str, Any], *keys: str) -> int:
    """Return the whole number under the first of the keys that is there (InvalidInputError)."""
    key = next((key for key in keys if key in quantization), keys[0])
    found = quantization.get(key)
    if type(found) is not int:
        raise unusable_field(key, "a whole number", found)
    return found


def group_size(quantization: Mapping[str, Any], *keys: str) -> int:
    """Return the input channels per scale, -1 for all (UnsupportedError for a broken word)."""
    size = number_of(quantization, *keys)
    if size != WHOLE_ROW and (size <= 0 or size % CODES_PER_WORD):
        raise UnsupportedError(
            "config.json has groups of a size that this tool does not read",
            expected=f"a multiple of {CODES_PER_WORD}, or {WHOLE_ROW}",
            found=size,
        )
    return size
