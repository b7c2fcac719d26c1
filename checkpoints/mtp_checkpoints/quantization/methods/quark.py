"""Quark: `exclude` leaves out modules by whole names, or patterns after re:. Its numbers are not
decoded.

Sources: vLLM and SGLang `quantization/quark`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtp_checkpoints.quantization.method import Method, QuantConfig, names_in
from mtp_checkpoints.quantization.native import Config
from mtp_checkpoints.quantization.undecoded import UNDECODED

_LIST = "exclude"


def _read(quantization: Mapping[str, Any]) -> QuantConfig:
    """Refuse a quantization_config (UnsupportedError)."""
    raise UNDECODED["quark"].refusal("a quantization_config of Quark")


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    """Return a config that leaves modules unquantized, with all below them.

    Engines match patterns from the start.
    """
    patterns = (rf"re:{re.escape(module)}(\.|$)" for module in modules)
    return {**quantization, _LIST: [*dict.fromkeys([*names_in(quantization, _LIST), *patterns])]}


QUARK = Method(_read, leave_out=_leave_out)
