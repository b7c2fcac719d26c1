"""AutoRound's layout: GPTQ's words of 4 or 8 bits without a permutation. Source: AutoRound,
`export/export_to_autoround` and `inference/backend.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mtp_checkpoints.formats.int_words import EightBits, InputWords


@dataclass(frozen=True)
class AutoRoundInt4(InputWords):
    """qweight I32 [K/8, N], scales [K/group, N], qzeros I32 [K/group, N/8].

    zeros_less_one: as packing auto_round:auto_gptq has them.
    """

    storage: ClassVar[str] = "auto_round_int4"
    methods: ClassVar[tuple[str, ...]] = ("auto-round",)


@dataclass(frozen=True)
class AutoRoundInt8(EightBits):
    """qweight I32 [K/4, N], scales [K/group, N], qzeros I32 [K/group, N/4]."""

    storage: ClassVar[str] = "auto_round_int8"
    methods: ClassVar[tuple[str, ...]] = ("auto-round",)
