"""vLLM's and SGLang's own resolvers over quantized drafts of grafts: each linear is found as it is
stored, by the main folder's config or by the draft's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_runs import sglang_wheel
from resolver_sources import SOURCES
from test_resolvers import Answers, check_part, run, sglang_modules

from cases import make_checkpoint, run_program
from quantized_by_others import write

# Of torch.jit, which compressed-tensors' packing still brings in.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

INT4, FP8 = "compressed-tensors, int4", "compressed-tensors, fp8"
# Source, main model, scheme of the draft, and --target; hf stands for both engines.
ROWS = (
    ("fp8", INT4, "weight_only_int8", "hf"),
    ("bf16", FP8, "weight_only_int8", "hf"),
    ("glm4_moe", INT4, "weight_only_int8", "hf"),
    ("glm4_moe_lite", FP8, "weight_only_int8", "hf"),
    ("fp8", INT4, "a8w8_fp8", "vllm"),
    ("glm4_moe", FP8, "a8w8_fp8", "vllm"),
    ("fp8", INT4, "a8w8_fp8", "sglang"),
    ("fp8", "awq", "weight_only_int8", "sglang"),
    ("bf16", "gptq", "a8w8_fp8", "sglang"),
    ("glm4_moe", "fp8", "weight_only_int8", "sglang"),
    ("fp8", "modelopt fp8, in a file", "a8w8_fp8", "sglang"),
)
NAMES = {f"{main}, {scheme}, {target} of {kind}": target for kind, main, scheme, target in ROWS}


@pytest.fixture(scope="module")
def grafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("grafts")
    result = {}
    for number, (name, (kind, main, scheme, target)) in enumerate(zip(NAMES, ROWS, strict=True)):
        original, quantized = folder / kind, folder / f"main-{number}"
        if not original.exists():
            make_checkpoint(original, SOURCES[kind])
        write(original, quantized, main)
        result[name] = output = folder / f"graft-{number}"
        folders = ("--main", quantized, "--mtp", original, "--output-dir", output)
        options = ("--mtp-quant", scheme, "--target", target, "--quiet")
        outcome = run_program("graft", *folders, *options)
        assert outcome.code == 0, outcome.err
    return result


@pytest.fixture(scope="module")
def vllm_answers(grafts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    job = {
        name: {part: str(folder / part) for part in ("main", "mtp")}
        for name, folder in grafts.items()
        if NAMES[name] != "sglang"
    }
    return run("vllm_modules.py", job, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def sglang_answers(grafts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    job = {
        name: {"mtp": {"folder": str(folder / "mtp"), "modules": sglang_modules(name)["mtp"]}}
        for name, folder in grafts.items()
        if NAMES[name] != "vllm"
    }
    wheel = str(sglang_wheel())
    return run("sglang_modules.py", {"wheel": wheel, "bundles": job}, tmp_path_factory.mktemp("sg"))


@pytest.mark.parametrize("name", [name for name in NAMES if NAMES[name] != "sglang"])
def test_vllm(name: str, grafts: dict[str, Path], vllm_answers: Answers) -> None:
    check_part(name, grafts[name] / "mtp", vllm_answers[name]["mtp"])


@pytest.mark.parametrize("name", [name for name in NAMES if NAMES[name] != "vllm"])
def test_sglang(name: str, grafts: dict[str, Path], sglang_answers: Answers) -> None:
    check_part(name, grafts[name] / "mtp", sglang_answers[name]["mtp"]["modules"])
