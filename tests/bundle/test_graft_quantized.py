"""Grafts with quantized drafts: the main folder's config.json describes both parts where it can,
else the draft's own the draft, for the engine that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import (
    MTP_LAYER,
    Outcome,
    edit_json,
    make_checkpoint,
    nightly_but,
    read_json,
    read_tensors,
    run_program,
)
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.sampling import SamplingParams
from quantized_by_others import METHODS, write
from runtime.harness import run

LAYER = f"model.layers.{MTP_LAYER}"
CONFIG = "config.json"
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
# Main model, scheme of the draft, --target, and the dialect that alone describes the draft so.
ROWS = (
    ("compressed-tensors, int4", "weight_only_int8", "hf", None),
    ("compressed-tensors, fp8", "weight_only_int8", "sglang", None),
    ("compressed-tensors, int4", "a8w8_fp8", "vllm", "vllm"),
    ("compressed-tensors, fp8", "a8w8_fp8", "hf", "vllm"),
    ("compressed-tensors, int4", "a8w8_fp8", "sglang", "sglang"),
    ("compressed-tensors, int4", "weight_only_nvfp4", "hf", None),
    ("compressed-tensors, fp8", "a4w4_nvfp4", "sglang", None),
    ("compressed-tensors, int4", "a8w8_mxfp8", "vllm", None),
    ("gptq", "weight_only_nvfp4", "sglang", "sglang"),
    ("awq", "weight_only_int8", "sglang", "sglang"),
    ("gptq", "a8w8_fp8", "sglang", "sglang"),
    ("fp8", "weight_only_int8", "sglang", "sglang"),
    ("modelopt fp8, in a file", "a8w8_fp8", "sglang", "sglang"),
)
EVERY_PUSH = (ROWS[0], ROWS[2], ROWS[5], ROWS[9])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("original") / "original")


def graft(main: Path, original: Path, output: Path, scheme: str, *options: str) -> Outcome:
    folders = ("--main", main, "--mtp", original, "--output-dir", output)
    return run_program("graft", *folders, "--mtp-quant", scheme, "--json", "--quiet", *options)


def quantization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / CONFIG)["quantization_config"]
    return found


@pytest.mark.parametrize(("name", "scheme", "target", "reader"), nightly_but(EVERY_PUSH, ROWS))
def test_both_parts_are_described(
    name: str,
    scheme: str,
    target: str,
    reader: str | None,
    mains: Callable[[str], Path],
    original: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "output"
    outcome = graft(mains(name), original, output, scheme, "--target", target)
    assert outcome.code == 0, outcome.err
    launched = TITLES.keys() if target == "hf" else {target}
    assert json.loads(outcome.out)["launch"].keys() == (launched if reader is None else {reader})
    recorded = read_json(output / "mtp_export.json")["options"]
    assert (recorded.get("reader"), recorded["mtp_quant"]) == (reader, scheme)
    main, mtp = quantization(output / "main"), quantization(output / "mtp")
    assert main["quant_method"] == METHODS[name].config.get("quant_method", "modelopt")
    assert (mtp == main) == (reader != "sglang")
    stored = read_tensors(output / "mtp")
    expert, plain = f"{LAYER}.mlp.experts.1.up_proj", f"{LAYER}.eh_proj.weight"
    assert (f"{expert}.weight_packed" in stored) == (scheme not in ("a8w8_fp8", "a8w8_mxfp8"))
    assert stored[plain].dtype == torch.bfloat16
    verified = run_program("verify", output, "--level", "weights", "--quiet", "--json")
    assert verified.code == 0, verified.out
    items = [
        item["name"] for check in json.loads(verified.out)["checks"] for item in check["items"]
    ]
    titles = TITLES.values() if reader is None else [TITLES[reader]]
    expected = {f"mtp: precision as {title} reads it" for title in titles}
    assert {item for item in items if "reads it" in item} == expected


@pytest.mark.parametrize(("name", "scheme", "target", "reader"), nightly_but(EVERY_PUSH[:1], ROWS))
def test_the_runtime_drafts_with_it(
    name: str,
    scheme: str,
    target: str,
    reader: str | None,
    mains: Callable[[str], Path],
    original: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "output"
    assert graft(mains(name), original, output, scheme, "--target", target).code == 0
    model = load_model(output, LoadOptions()).model
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    assert run(model, [[5, 9, 12, 7]], params, method="mtp", k=2).requests[0].metrics.drafted[0]


def test_groups_of_the_main_model_stay(
    mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    """The draft's come before them, and each group keeps its layout under a mixed one."""
    name = "compressed-tensors, int4"
    theirs = METHODS[name].config
    for scheme, layout in (("weight_only_int8", theirs["format"]), ("a8w8_fp8", "mixed-precision")):
        output = tmp_path / scheme
        assert graft(mains(name), original, output, scheme).code == 0
        found = quantization(output / "main")
        first, *others = found["config_groups"].values()
        assert all(target.startswith("re:model.") for target in first["targets"])
        (group,) = theirs["config_groups"].values()
        assert others == [{**group, "format": theirs["format"]}]
        assert (found["format"], found["ignore"][:2]) == (layout, theirs["ignore"])


def test_a_main_config_that_leaves_the_draft_s_linears_out(
    mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    """An ignore list goes before groups, so the draft could not be found quantized."""
    folder = tmp_path / "main"
    write(original, folder, "compressed-tensors, int4")
    edit_json(
        folder / CONFIG,
        lambda c: c["quantization_config"]["ignore"].append(f"re:.*layers.{MTP_LAYER}.*"),
    )
    outcome = graft(folder, original, tmp_path / "output", "weight_only_int8")
    assert (outcome.code, "in another precision" in outcome.err) == (4, True), outcome.err


@pytest.mark.parametrize("name", ["compressed-tensors, int4", "gptq"])
def test_sglang_reads_no_draft_in_mxfp(
    name: str, mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    for scheme in ("weight_only_mxfp4", "a8w8_mxfp8"):
        refused = graft(mains(name), original, tmp_path / "o", scheme, "--target", "sglang")
        assert refused.code == 4
        assert "SGLang does not read a draft in mxfp" in refused.err
        assert "its compressed-tensors loader has no" in refused.err


def test_sglang_builds_every_draft_unquantized_beside_nvfp4(
    mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    main, output = mains("modelopt nvfp4"), tmp_path / "output"
    refused = graft(main, original, output, "a8w8_fp8", "--target", "sglang")
    assert (refused.code, output.exists()) == (4, False)
    assert "SGLang builds every draft unquantized beside a main model in nvfp4" in refused.err
    assert graft(main, original, output, "bf16", "--target", "sglang").code == 0
    assert run_program("verify", output, "--level", "weights", "--quiet").code == 0
