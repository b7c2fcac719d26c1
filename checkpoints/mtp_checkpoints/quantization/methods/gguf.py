"""GGUF: the element type of each tensor is its format. The container reads them from the heads of
the files, and says them in a config as others do: linears by the names of their modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FORMATS, GGUF, WeightFormat
from mtp_checkpoints.quantization.method import Method, Unfused
from mtp_checkpoints.quantization.native import unusable_field

FORMATS_KEY = "formats"


@dataclass(frozen=True)
class _Gguf(Unfused):
    """Formats by module; one that is not there is not quantized."""

    formats: Mapping[str, WeightFormat]
    loads_together: ClassVar[bool] = False

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        return self.formats.get(module)


def _read(quantization: Mapping[str, Any]) -> _Gguf:
    named = quantization.get(FORMATS_KEY, {})
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise unusable_field(FORMATS_KEY, "names of formats by those of modules", named)
    known = {name: made() for name, made in FORMATS.items() if GGUF in made.methods}
    for module, name in named.items():
        if name not in known:
            raise UnsupportedError(
                f"config.json names a format of {module} that no GGUF file has",
                expected=", ".join(known),
                found=name[:100],
            )
    return _Gguf({module: known[name] for module, name in named.items()})


GGUF_TYPES = Method(_read)
