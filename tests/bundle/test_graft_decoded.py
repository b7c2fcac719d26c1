"""Grafts onto main models of MLX, bitsandbytes and Quark, whose numbers are decoded: judged and
proven as any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cases import Outcome, read_json, run_program
from decoded_mains import write_mlx, write_nf4, write_quark
from mtp_export.verify.evidence.prompts import BUILT_IN
from verify.foreign import GLM, GLM_MTP

MAINS: dict[str, tuple[Callable[[Path, Path, str], Path], str]] = {
    "mlx": (write_mlx, "mlx_affine"),
    "bitsandbytes": (write_nf4, "bitsandbytes_4bit"),
    "quark": (write_quark, "quark_int4"),
    "quark, fused experts": (partial(write_quark, packs_experts=False), "quark_int4"),
}
READ_BY: dict[str, set[str]] = {
    "mlx": set(),
    "bitsandbytes": {"SGLang"},
    "quark": {"vLLM"},  # of Quark's SGLang reads fp8 and mxfp4
    "quark, fused experts": {"vLLM"},
}


@pytest.fixture(scope="module")
def main_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("mains")

    def made(method: str) -> Path:
        place = folder / method
        return place if place.exists() else MAINS[method][0](GLM, place, GLM_MTP)

    return made


def graft(main: Path, output: Path, *options: object) -> dict[str, Any]:
    options = ("--output-dir", output, "--quiet", "--json", *options)
    made = run_program("graft", main, GLM, *options)
    assert made.code == 0, made.err
    facts: dict[str, Any] = json.loads(made.out)
    return facts


def items_of(outcome: Outcome) -> dict[str, Any]:
    checks = json.loads(outcome.out)["checks"]
    return {item["name"]: item for check in checks for item in check["items"]}


@pytest.mark.parametrize("method", MAINS)
def test_tensors_and_precision_are_judged(
    method: str, main_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The files stay, experts in one tensor too, and what is packed is looked for as such."""
    main, output = main_of(method), tmp_path / "out"
    facts = graft(main, output)
    assert set(facts["launch"]) == {title.lower() for title in READ_BY[method]}
    assert "prove" in facts["next"]
    (shard,) = (output / "main").glob("*.safetensors")
    assert shard.samefile(main / "model.safetensors")
    options = read_json(output / "mtp_export.json")["options"]
    assert options["main_quant_method"] == method.partition(",")[0]
    assert options["main_storages"] == sorted(["bf16", MAINS[method][1]])
    found = run_program("verify", output, "--level", "files", "--json", "--quiet")
    assert found.code == 0, found.out
    items = items_of(found)
    assert items["main: precision on disk"]["status"] == "pass"
    for title in ("vLLM", "SGLang"):
        status = "pass" if title in READ_BY[method] else "not tested"
        assert items[f"mtp: precision as {title} reads it"]["status"] == status


def test_int4_of_quark_is_no_main_model_for_sglang(
    main_of: Callable[[str], Path], tmp_path: Path
) -> None:
    options = ("--output-dir", tmp_path / "out", "--target", "sglang", "--quiet")
    made = run_program("graft", main_of("quark"), GLM, *options)
    assert made.code == 4 and "of Quark it loads fp8 and mxfp4 alone" in made.err, made.err
    assert "--target hf or vllm" in made.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", MAINS)
def test_inspect_takes_what_has_no_scales_as_unquantized(
    method: str, main_of: Callable[[str], Path]
) -> None:
    outcome = run_program("inspect", main_of(method), "--json")
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert (facts["problems"], facts["unknown"]) == ([], "")


@pytest.mark.nightly
@pytest.mark.parametrize("method", MAINS)
def test_a_main_model_is_proven(
    method: str, main_of: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in BUILT_IN[:2]))
    proof = graft(main_of(method), tmp_path / "out", "--prove", "--prompts", prompts)["pairing"]
    assert proof["status"] == "pass", proof
    assert proof["words"].startswith("Pairing proven by acceptance: draft 1 0.")
    found = run_program("verify", tmp_path / "out", "--level", "weights", "--json", "--quiet")
    assert found.code == 0, found.out
