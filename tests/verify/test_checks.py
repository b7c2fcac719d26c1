"""The registry of checks, and the gates of every storage and scheme."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FORMATS
from mtp_checkpoints.formats.verification import RunGate
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import Scheme, every_linear
from mtp_export.verify import CHECKS, function_at
from mtp_export.verify.check import Check, Level
from mtp_export.verify.gates import UNCHANGED, gate_of

DOCS = Path(__file__).resolve().parents[2] / "docs/verify.md"
PROGRAM = """
import sys
from mtp_export.verify import CHECKS, function_at
for place in CHECKS["files"].places:
    function_at(place)
sys.exit(bool({"torch", "numpy"} & set(sys.modules)))
"""


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_every_check_has_its_module(check: Check) -> None:
    for place in check.places:
        assert callable(function_at(place))


def test_the_page_lists_every_check_in_order() -> None:
    checks = DOCS.read_text().partition("\n## JSON")[0]
    rows = re.findall(r"^\| (?:`\w+`)? ?\| `(\w+)` \|", checks, re.M)
    assert rows == list(CHECKS)


def test_levels_do_not_go_back() -> None:
    levels = [check.level for check in CHECKS.values()]
    assert levels == sorted(levels) and set(levels) == set(Level)


def test_level_files_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=False)
    assert done.returncode == 0


def test_every_storage_has_a_gate() -> None:
    assert all(known.gate.sqnr_db > 0 for known in FORMATS.values())


def test_a_new_scheme_on_known_storages_has_the_gate_of_the_loosest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storages = every_linear("fp8_block") | {Role.ROUTED_EXPERT: "int4_group"}
    monkeypatch.setitem(SCHEMES, "toy", Scheme("toy", "toy", storages))
    names, gate = gate_of({"base_quant": "toy", "mtp_quant": "keep"})
    assert names == "toy + keep" and gate == FORMATS["int4_group"].gate.run


def test_a_scheme_without_a_gate_is_named() -> None:
    with pytest.raises(InvalidInputError, match="int3_magic"):
        gate_of({"base_quant": "int3_magic"})


def test_acceptance_has_the_looser_gate_of_both_parts() -> None:
    gate = gate_of({"base_quant": "keep", "mtp_quant": "weight_only_int4"})[1]
    int4 = FORMATS["int4_group"].gate.run
    assert gate == RunGate(UNCHANGED.kl_nats, UNCHANGED.top1, int4.acceptance_points)


@pytest.mark.parametrize(
    ("scheme", "gate"),
    [
        ("keep", RunGate(1e-6, 0.999, 0.5)),
        ("bf16", RunGate(0.005, 0.97, 1.0)),
        ("a8w8_fp8", RunGate(0.02, 0.95, 1.0)),
        ("weight_only_int8", RunGate(0.005, 0.97, 1.0)),
        ("weight_only_int4", RunGate(0.05, 0.90, 3.0)),
        ("a8w8_fp8_wint4", RunGate(0.05, 0.90, 3.0)),
    ],
)
def test_gates_of_the_schemes(scheme: str, gate: RunGate) -> None:
    """The release bounds, written out."""
    assert gate_of({"base_quant": scheme, "mtp_quant": scheme})[1] == gate


def test_a_target_that_dequantizes_has_the_gate_of_bf16() -> None:
    assert gate_of({"target": "xllm"}) == ("bf16 + bf16", FORMATS["bf16"].gate.run)
