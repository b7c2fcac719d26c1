"""Faults of files and weights that exports were shipped with: each is planted into a copy of a good
bundle, and verify must name it. docs/faults.md is the table of faults and checks.

A fault is planted the way a wrong exporter would have made it: with a manifest that agrees with the
wrong bytes. Only damage after the export leaves the manifest as it was.
"""

from __future__ import annotations

from faults.family_faults import FAMILY_FAULTS
from faults.fault import Fault
from faults.file_faults import FILE_FAULTS
from faults.gguf_faults import GGUF_FAULTS
from faults.relation_faults import RELATION_FAULTS
from faults.scheme_faults import SCHEME_FAULTS
from faults.target_faults import TARGET_FAULTS
from faults.weight_faults import WEIGHT_FAULTS

FAULTS: tuple[Fault, ...] = (
    *FILE_FAULTS,
    *GGUF_FAULTS,
    *WEIGHT_FAULTS,
    *RELATION_FAULTS,
    *SCHEME_FAULTS,
    *FAMILY_FAULTS,
    *TARGET_FAULTS,
)
