"""Engines that read a layout, by what a manifest records, and every refusal of `launch`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import edit_json, export
from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UnsupportedError, UsageError
from mtp_checkpoints.layouts import engine_of
from mtp_checkpoints.layouts.base import Placement
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.launch import (
    Served,
    launch_lines,
    native_scheme,
    node_lines,
    probe_of,
    serving_lines,
)
from mtp_export.bundle.options import BundleOptions, ContentOptions, Part
from mtp_export.schemes.table import GGUF_SCHEMES

FOLDER = Path("/bundles/b")
INT4 = {"base_quant": "weight_only_int4", "mtp_quant": "weight_only_int8"}
BF16 = {"base_quant": "bf16", "mtp_quant": "bf16"}
FP8 = {"base_quant": "a8w8_fp8", "mtp_quant": "a8w8_fp8"}
HEAD = {"head_quant": "weight_only_int8"}
WINT4 = {"base_quant": "a8w8_fp8_wint4", "mtp_quant": "a8w8_fp8", "group_size": 128}
W4AFP8 = WINT4 | {"format": "w4afp8"}
AWQ = {"base_quant": "grafted", "mtp_quant": "bf16", "main_storages": ["awq_int4", "bf16"]}
Recorded = dict[str, Any]


def engines(recorded: Recorded, wanted: str = "hf", native: str = "a8w8_fp8") -> list[str]:
    return [*serving_lines(recorded, wanted=wanted, bundle=Served(FOLDER, native))]


@pytest.mark.parametrize(
    ("recorded", "found"),
    [
        ({}, ["vllm", "sglang"]),
        (INT4, ["vllm", "sglang"]),  # no fp8, which dialects describe in their own ways
        (INT4 | {"group_size": 32}, ["vllm", "sglang"]),
        (WINT4, []),  # nobody knows whose dialect it is in
        (WINT4 | {"reader": "vllm"}, ["vllm"]),
        (WINT4 | {"reader": "sglang"}, ["sglang"]),
        (WINT4 | {"reader": "vllm", "group_size": 64}, []),
        (W4AFP8, ["sglang"]),
        (W4AFP8 | {"reader": "vllm"}, ["sglang"]),
        (W4AFP8 | {"group_size": 64}, ["sglang"]),
        (INT4 | {"mtp_quant": "a8w8_fp8", "reader": "sglang"}, ["sglang"]),
        (INT4 | {"mtp_quant": "a8w8_fp8", "reader": "sglang", "group_size": 64}, ["sglang"]),
        (INT4 | {"base_quant": "a8w8_fp8", "reader": "vllm"}, ["vllm"]),
        (INT4 | HEAD, ["vllm"]),
        (BF16 | HEAD, ["vllm"]),
        (FP8 | HEAD | {"reader": "vllm"}, ["vllm"]),
        (FP8 | HEAD | {"reader": "sglang"}, []),
        (AWQ, ["vllm", "sglang"]),
        (AWQ | {"reader": "sglang"}, ["sglang"]),
        (AWQ | {"main_storages": ["w4afp8"]}, ["sglang"]),
        (AWQ | {"main_storages": ["int4_group"], "mtp_quant": "weight_only_int8"},
         ["vllm", "sglang"]),
    ],
)  # fmt: skip
def test_engines_that_read_what_is_recorded(recorded: Recorded, found: list[str]) -> None:
    assert engines(recorded) == found
    assert engines(recorded, "vllm") == [name for name in found if name == "vllm"]
    assert engines(recorded, "sglang") == [name for name in found if name == "sglang"]
    assert engines(recorded, "tensorrt-llm") == []


@pytest.mark.parametrize("target", ["lightllm", "xllm", "paddlenlp"])
def test_engines_of_a_layout_of_their_own(target: str) -> None:
    assert engines({}, target) == [target]
    assert engines({}, target, native="keep") == [target]
    assert engines(INT4, target) == []
    assert engines(AWQ, target) == []


@pytest.mark.parametrize(
    ("recorded", "native", "separate"),
    [
        ({}, "a8w8_fp8", False),
        ({}, "keep", False),
        (INT4, "a8w8_fp8", True),
        (INT4 | {"int4_scope": "all"}, "a8w8_fp8", False),
        (INT4 | {"base_quant": "weight_only_int8"}, "a8w8_fp8", False),
        (INT4 | {"base_quant": "bf16", "mtp_quant": "weight_only_int4"}, "a8w8_fp8", True),
        (AWQ, "a8w8_fp8", True),
    ],
)
def test_experts_that_are_stored_alike_are_fused(
    recorded: Recorded, native: str, separate: bool
) -> None:
    line = serving_lines(recorded, wanted="sglang", bundle=Served(FOLDER, native))["sglang"]
    assert line.endswith(" --disable-shared-experts-fusion") is separate
    assert f"--model-path {FOLDER}/main " in line


def test_paddlenlp_is_told_the_scheme_of_the_source() -> None:
    def line(native: str, **recorded: str) -> str:
        return serving_lines(recorded, wanted="paddlenlp", bundle=Served(FOLDER, native))[
            "paddlenlp"
        ]

    assert "SPECULATE_MODEL_QUANT_TYPE=a8w8_fp8" in line("a8w8_fp8")
    assert "SPECULATE_MODEL_QUANT_TYPE=weight_only_int8" in line("bf16")


@pytest.fixture
def plan_of(pristine: Path, output: Path) -> Callable[..., BundlePlan]:
    def plan(target: str = "hf", part: Part = Part.BOTH) -> BundlePlan:
        content = ContentOptions(part=part)
        return plan_export(BundleOptions(pristine, output, target=target, content=content))

    return plan


def test_the_lines_of_a_plan(plan_of: Callable[..., BundlePlan], output: Path) -> None:
    lines = launch_lines(plan_of())
    assert lines == serving_lines(
        plan_of().recorded, wanted="hf", bundle=Served(output, "a8w8_fp8")
    )
    assert [*lines] == ["vllm", "sglang"]
    assert [*launch_lines(plan_of("sglang"))] == ["sglang"]
    for part in (Part.MAIN, Part.MTP):
        assert launch_lines(plan_of(part=part)) == {}


@pytest.fixture(scope="module")
def bundle(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch") / "bundle"
    assert export(pristine, folder, "--quiet").code == 0
    return folder


def test_a_line_for_each_machine(bundle: Path) -> None:
    (alone,) = node_lines(bundle, "vllm", None)
    placed = [*node_lines(bundle, "vllm", Placement(tp=6, nodes=3, head="10.0.0.1"))]
    assert [line.startswith(f"{alone} ") for line in placed] == [True] * 3
    assert [line.split("--node-rank ")[1].split()[0] for line in placed] == ["0", "1", "2"]
    assert all("--master-addr 10.0.0.1" in line for line in placed)
    assert probe_of(bundle, "sglang") == engine_of("sglang").probe


def refusal(call: Callable[[], object], kind: type[MtpExportError]) -> tuple[object, ...]:
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    return error.what, error.expected, error.found, error.todo


def test_machines_that_cannot_share_evenly(bundle: Path) -> None:
    call = lambda: [*node_lines(bundle, "vllm", Placement(tp=8, nodes=3))]  # noqa: E731
    assert refusal(call, UsageError)[:3] == (
        "The machines cannot have the same number of devices",
        "--tp as a multiple of 3 (--nodes)",
        8,
    )


@pytest.mark.parametrize(
    ("engine", "expected"), [("xllm", "vllm or sglang"), ("tensorrt-llm", "vllm or sglang")]
)
def test_an_engine_that_does_not_serve_it(engine: str, expected: str, bundle: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        probe_of(bundle, engine)
    error = caught.value
    assert error.what == f"{engine} does not serve this bundle"
    assert (error.where, error.expected) == (bundle, expected)
    assert error.todo == f"Export it again with --target {engine}"


def changed(bundle: Path, folder: Path, **options: object) -> Path:
    """A bundle with another manifest; its parts are links."""
    folder.mkdir()
    for path in bundle.iterdir():
        if path.is_dir():
            (folder / path.name).symlink_to(path)
    manifest = folder / "mtp_export.json"
    manifest.write_bytes((bundle / "mtp_export.json").read_bytes())
    edit_json(manifest, lambda value: value["options"].update(options))
    return folder


SCHEMES = (
    "bf16", "a8w8_fp8", "a8w8_fp8_wint4", "weight_only_int8", "weight_only_int4",
    "weight_only_nvfp4", "a4w4_nvfp4", "weight_only_mxfp4", "a8w8_mxfp8", *GGUF_SCHEMES,
)  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("base_quant", "w5", "w5"),
        ("mtp_quant", "grafted", "grafted"),
        ("mtp_quant", "x" * 150, "x" * 100),
    ],
)
def test_a_precision_that_no_scheme_has(
    option: str, value: object, shown: str, bundle: Path, tmp_path: Path
) -> None:
    folder = changed(bundle, tmp_path / "changed", **(INT4 | {option: value}))
    with pytest.raises(InvalidInputError) as caught:
        probe_of(folder, "vllm")
    error = caught.value
    assert error.what == f"The manifest has no {option} that this version knows"
    assert (error.where, error.found) == (folder / "mtp_export.json", shown)
    names = [*SCHEMES, "grafted"] if option == "base_quant" else [*SCHEMES]
    assert sorted(str(error.expected).split(" or ")) == sorted(names)
    assert error.todo == "Use the version of mtp-export that wrote it, or export again"


def test_a_precision_of_one_part_alone(bundle: Path, tmp_path: Path) -> None:
    folder = changed(bundle, tmp_path / "changed", base_quant="bf16")
    with pytest.raises(InvalidInputError, match="no mtp_quant that this version knows"):
        probe_of(folder, "vllm")


def test_a_bundle_that_nobody_is_known_to_serve(bundle: Path, tmp_path: Path) -> None:
    folder = changed(bundle, tmp_path / "changed", **WINT4)
    with pytest.raises(UnsupportedError, match="Expected no engine that is known"):
        probe_of(folder, "vllm")


def test_a_bundle_of_one_part(pristine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "main"
    assert export(pristine, folder, "--part", "main", "--quiet").code == 0
    with pytest.raises(InvalidInputError) as caught:
        probe_of(folder, "vllm")
    error = caught.value
    assert error.what == "An engine needs both parts of a bundle"
    assert (error.where, error.expected) == (folder, "main and mtp")
    assert error.todo == "Export the checkpoint with --part both"


def test_a_manifest_without_a_target_is_of_the_released_layout(
    bundle: Path, tmp_path: Path
) -> None:
    folder = changed(bundle, tmp_path / "changed")
    edit_json(folder / "mtp_export.json", lambda value: value["options"].pop("target"))
    assert [*node_lines(folder, "vllm", None)] == [
        line.replace(str(bundle), str(folder)) for line in node_lines(bundle, "vllm", None)
    ]


def test_the_scheme_of_a_source_by_its_config(pristine: Path) -> None:
    plan = plan_export(BundleOptions(pristine, pristine.with_name("output")))
    assert native_scheme(plan.checkpoint.config) == "a8w8_fp8"
    assert native_scheme({**plan.checkpoint.config, "quantization_config": None}) == "bf16"
    assert native_scheme({}) == "keep"
