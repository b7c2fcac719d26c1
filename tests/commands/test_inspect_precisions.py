"""inspect on quantized bundles: parameters are the model's, and every tensor is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import WHOLE_TILES, edit_json, make_checkpoint, quantize
from mtp_export.inspection import Inspection, inspect

PAIRS = {
    "int4": ("weight_only_int4", "weight_only_int8", "--group-size", "32"),
    "int8": ("weight_only_int8", "weight_only_int8"),
    "w4afp8": ("a8w8_fp8_wint4", "a8w8_fp8", "--format", "w4afp8", "--target", "sglang"),
}


def parameters(inspection: Inspection) -> dict[str, int]:
    """Parameters by role."""
    result: dict[str, int] = {}
    for amount in inspection.amounts:
        result[amount.role] = result.get(amount.role, 0) + amount.parameters
    return result


@pytest.mark.parametrize("name", PAIRS)
def test_parameters_do_not_depend_on_the_precision(name: str, tmp_path: Path, output: Path) -> None:
    source = make_checkpoint(tmp_path / "source", WHOLE_TILES)
    base, mtp, *more = PAIRS[name]
    assert quantize(source, output, "--base-quant", base, "--mtp-quant", mtp, *more).code == 0
    whole = parameters(inspect(source))
    found: dict[str, int] = {}
    for part in ("main", "mtp"):
        inspection = inspect(output / part)
        assert inspection.problems == () and inspection.parts == (part,)
        for role, count in parameters(inspection).items():
            found[role] = found.get(role, 0) + count
    assert found == whole


def test_what_the_config_does_not_promise_is_a_problem(tmp_path: Path, output: Path) -> None:
    source = make_checkpoint(tmp_path / "source", WHOLE_TILES)
    options = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8")
    assert quantize(source, output, *options).code == 0
    edit_json(
        output / "main/config.json",
        lambda c: c["quantization_config"]["ignore"].append("re:.*mlp.experts.*"),
    )
    problems = inspect(output / "main").problems
    assert {p.problem for p in problems} == {
        "missing",
        "not a tensor of this model by its config.json",
    }
    assert all(".experts." in problem.tensor for problem in problems)
