"""Refusals before the first byte say what was expected, what was found, and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import TINY_CONFIG, UNQUANTIZED, drop_tensor, make_checkpoint
from mtp_checkpoints.errors import (
    InvalidInputError,
    MtpExportError,
    OutputExistsError,
    ResourceError,
    UnsupportedError,
    UsageError,
)
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_export.bundle import bundle_plan, preflight
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions, ContentOptions, RunOptions, SharedWeights
from mtp_export.bundle.precision import Device, Format, Precision
from mtp_export.bundle.preflight import check_memory
from mtp_export.bundle.quantize import QuantizeOptions, default_input, default_output, plan_quantize
from mtp_export.bundle.run_folder import check_output
from mtp_export.paths import refuse_overlaps
from mtp_kernels.quantize import probe

Words = tuple[object, object, object, object]


def words_of(error: MtpExportError) -> Words:
    return error.what, error.expected, error.found, error.todo


@pytest.fixture
def options(pristine: Path, output: Path) -> BundleOptions:
    return BundleOptions(pristine, output)


def quantized(options: BundleOptions, **changes: Any) -> Words:
    base = {"base_quant": "a8w8_fp8", "mtp_quant": "a8w8_fp8"}
    with pytest.raises(MtpExportError) as refusal:
        plan_quantize(QuantizeOptions(options, **(base | changes)))
    return words_of(refusal.value)


def test_group_sizes(options: BundleOptions) -> None:
    what, expected, found, _ = quantized(options, group_size=48)
    assert str(what).startswith("This group size is not one")
    assert (expected, found) == ("--group-size 32, 64, 128", 48)
    what, expected, found, _ = quantized(
        options, base_quant="a8w8_fp8_wint4", format=Format.W4AFP8, group_size=64
    )
    assert what == "Format w4afp8 has one group size"
    assert (expected, found) == ("--group-size 128", 64)


@pytest.mark.parametrize(
    ("target", "schemes", "words"),
    [
        (
            "xllm",
            ("a8w8_fp8", "a8w8_fp8"),
            (
                "Target xllm does not take the MTP module in a8w8_fp8",
                "--mtp-quant bf16",
                "a8w8_fp8",
                "Or use --target hf",
            ),
        ),
        (
            "paddlenlp",
            ("bf16", "bf16"),
            (
                "Target paddlenlp does not take the MTP module in bf16",
                "--mtp-quant a8w8_fp8",
                "bf16",
                "Or use --target hf; its bundle may then be the input of an export for this target",
            ),
        ),
        (
            "sglang",
            ("weight_only_mxfp4", "bf16"),
            (
                "Target sglang does not read a bundle with mxfp4_packed: its compressed-tensors"
                " loader has no linear layers in mxfp4, and skips experts of this name",
                "--target hf or vllm",
                "weight_only_mxfp4 + bf16",
                "Or use --base-quant a4w4_nvfp4 or a8w8_fp8 or a8w8_fp8_wint4 or bf16 or"
                " weight_only_int4 or weight_only_int8 or weight_only_nvfp4 for sglang",
            ),
        ),
        (
            "lightllm",
            ("weight_only_int8", "a8w8_fp8"),
            (
                "Target lightllm does not read a bundle with int8_channel",
                "--target hf or vllm or sglang",
                "weight_only_int8 + a8w8_fp8",
                "Or use --base-quant a8w8_fp8 or bf16 for lightllm",
            ),
        ),
    ],
)
def test_targets(
    target: str, schemes: tuple[str, str], words: Words, options: BundleOptions
) -> None:
    base, mtp = schemes
    found = quantized(
        replace(options, target=target), base_quant=base, mtp_quant=mtp, allow_untested_pair=True
    )
    assert found == words


def test_w4afp8_has_one_reader(options: BundleOptions) -> None:
    *_, expected, found, todo = quantized(
        replace(options, target="vllm"), base_quant="a8w8_fp8_wint4", format=Format.W4AFP8
    )
    assert (expected, found) == ("--target hf or sglang", "a8w8_fp8_wint4 + a8w8_fp8")
    assert todo == "Or use --format compressed-tensors for vllm"


def test_a_device_that_is_not_there(
    options: BundleOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = quantized(options, device=Device.CUDA)
    assert words[:3] == (
        "There is no CUDA device here",
        "--device cpu or auto",
        "--device cuda",
    )
    for there, wanted, device in (
        (False, Device.AUTO, "cpu"),
        (True, Device.AUTO, "cuda"),
        (True, Device.CUDA, "cuda"),
        (True, Device.CPU, "cpu"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        plan = plan_quantize(QuantizeOptions(options, "a8w8_fp8", "a8w8_fp8", device=wanted))
        assert plan.device == device


def test_an_npu_makes_the_bytes_of_a_cpu_or_is_refused(
    options: BundleOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = QuantizeOptions(options, "a8w8_fp8", "a8w8_fp8", device=Device.NPU)
    words = quantized(options, device=Device.NPU)
    assert words[0] == "There is no NPU (torch_npu beside CANN) here"
    npu = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    for found in (None, "bf16 to int8 channels: other bits"):
        monkeypatch.setattr(probe, "difference", lambda device, found=found: found)
        if found is None:
            assert plan_quantize(wanted).device == "npu"
        else:
            words = quantized(options, device=Device.NPU)
            assert words[0] == "This NPU does not convert weights as a CPU does"
            assert words[2] == found


def test_folders_by_default(pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = default_output(pristine, Precision("keep", "bf16"), "hf")[0]
    assert found == pristine.with_name(f"{pristine.name}-a8w8_fp8-bf16")
    output.mkdir()
    monkeypatch.chdir(output)
    with pytest.raises(UsageError) as refusal:
        default_input()
    assert words_of(refusal.value)[:2] == (
        "The current folder is not a bundle",
        "main/, mtp/ and mtp_export.json, or --input-dir",
    )
    assert (refusal.value.where, refusal.value.todo) == (output, "See mtp-export quantize --help")


def test_no_folder_beside_a_remote_input() -> None:
    place = Address("hf://acme/tiny")
    with pytest.raises(UsageError) as refusal:
        default_output(place, Precision("keep", "bf16"), "hf")
    assert words_of(refusal.value) == (
        "A bundle cannot be written beside a remote input",
        "--output-dir",
        refusal.value.found,
        "Name the folder of the bundle",
    )
    assert refusal.value.where == place


def refused(options: BundleOptions) -> Words:
    with pytest.raises(MtpExportError) as refusal:
        plan_export(options)
    return words_of(refusal.value)


def test_a_target_that_reads_one_mtp_layer(tmp_path: Path, output: Path) -> None:
    source = make_checkpoint(tmp_path / "two", TINY_CONFIG | {"num_nextn_predict_layers": 2})
    assert refused(BundleOptions(source, output, target="lightllm")) == (
        "Target lightllm reads one MTP layer",
        "num_nextn_predict_layers 1",
        2,
        "Use --target hf",
    )


def test_a_target_that_takes_embedding_and_head_from_the_draft(options: BundleOptions) -> None:
    content = ContentOptions(shared_weights=SharedWeights.DROP)
    words = refused(replace(options, target="paddlenlp", content=content))
    assert words[:3] == (
        "Target paddlenlp loads embedding and head from the MTP folder",
        "--shared-weights keep",
        "--shared-weights drop",
    )


def test_a_target_that_reads_bf16(tmp_path: Path, output: Path) -> None:
    source = make_checkpoint(tmp_path / "wide", UNQUANTIZED | {"torch_dtype": "float32"})
    words = refused(BundleOptions(source, output, target="xllm"))
    assert words[:3] == (
        "Target xllm reads bf16",
        "a source whose unquantized tensors are BF16",
        "torch_dtype F32",
    )


def test_a_checkpoint_without_mtp_layer(tmp_path: Path, output: Path) -> None:
    source = make_checkpoint(tmp_path / "none", TINY_CONFIG | {"num_nextn_predict_layers": 0})
    what, expected, found, todo = refused(BundleOptions(source, output))
    layers = TINY_CONFIG["num_hidden_layers"]
    assert what == "The checkpoint has no MTP layer"
    assert str(expected).endswith(f"the layer after the last (model.layers.{layers}.*)")
    assert found == "0 num_nextn_predict_layers, and no such tensor"
    assert str(todo).startswith("Many converted copies lack the layer")


def test_too_little_memory(options: BundleOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    check_memory(1 << 20, 1 << 20)
    with pytest.raises(ResourceError) as refusal:
        check_memory((1 << 20) - 1, 1 << 20)
    what, expected, found, todo = words_of(refusal.value)
    assert what == "There is not enough memory for this run"
    assert expected == f"--max-memory of at least {1 << 20} bytes (1 MB)"
    assert found == f"{(1 << 20) - 1} bytes (1 MB)"
    assert todo == "Nothing was written. Raise --max-memory or lower --workers"


def test_no_more_memory_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"available memory": 9 << 20, "a container's limit": 8 << 20}
    monkeypatch.setattr("mtp_export.bundle.preflight.free_memory", lambda: limits)
    check_memory(1 << 50, 8 << 20)
    with pytest.raises(ResourceError, match="Expected a container's limit of at least"):
        check_memory(1 << 50, (8 << 20) + 1)


def test_too_little_disk(
    options: BundleOptions, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage: Any = type("Usage", (), {"free": 5_000_000})
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ResourceError) as refusal:
        preflight.check_disk(output, 900_000_000)
    what, expected, found, todo = words_of(refusal.value)
    assert what == "There is not enough disk space for the output"
    assert expected == "1028000000 bytes free (1.0 GB)"
    assert found == "5000000 bytes (0.0 GB)"
    assert refusal.value.where == output
    assert str(todo).startswith("Nothing was written.")


def test_folders_inside_each_other(tmp_path: Path) -> None:
    refuse_overlaps({"--input-dir": tmp_path / "a"}, {"--output-dir": tmp_path / "ab"})
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for source, relation, output in (
        ("a", "is", "a"),
        ("a", "lies in", "a/b"),
        ("a/b", "contains", "a"),
        ("link", "lies in", "a/b/c"),
    ):
        place = tmp_path / source
        with pytest.raises(UsageError) as refusal:
            refuse_overlaps({"--input-dir": place}, {"--output-dir": tmp_path / output})
        what, expected, found, todo = words_of(refusal.value)
        assert "must lie apart from what it reads" in what
        assert refusal.value.where == tmp_path / output
        assert found == f"--output-dir {relation} {place} (--input-dir)"
        assert expected == "--output-dir neither in --input-dir nor around it"
        assert todo == "Nothing was written. Choose another path for --output-dir"


def test_an_output_that_is_no_new_folder(output: Path) -> None:
    check_output(output, RunOptions())
    output.mkdir()
    check_output(output, RunOptions())
    (output / "notes").touch()
    (output / "a").touch()
    with pytest.raises(OutputExistsError) as refusal:
        check_output(output, RunOptions(overwrite=True))
    what, expected, found, _ = words_of(refusal.value)
    assert what == "The output folder holds files that are not part of a bundle"
    assert (expected, found) == ("a new or empty folder", "a, notes")
    assert refusal.value.where == output
    file = output / "a"
    with pytest.raises(OutputExistsError) as refusal:
        check_output(file, RunOptions())
    words = words_of(refusal.value)
    assert (words[0], words[3]) == ("The output is not a folder", "Choose another --output-dir")
    assert refusal.value.where == file


@pytest.mark.parametrize("names", [("main",), ("mtp",), ("main", "mtp")])
def test_parts_without_manifest_or_journal_are_strangers_files(
    names: tuple[str, ...], output: Path
) -> None:
    for name in names:
        (output / name).mkdir(parents=True)
    with pytest.raises(OutputExistsError) as refusal:
        check_output(output, RunOptions(overwrite=True))
    assert refusal.value.found == ", ".join(names)


def test_a_plan_counts_its_bytes(options: BundleOptions) -> None:
    options = replace(options, run=RunOptions(workers=3, max_memory_bytes=1_000_000_000))
    copied = plan_export(options)
    tensors = len(copied.checkpoint.tensors)
    base = 80_000_000 + 2_200 * tensors
    steps = [step for part in copied.parts for shard in part.written for step in shard.steps]
    assert copied.written_steps == tuple(steps)
    assert copied.written_bytes == sum(step.size_bytes for step in steps)
    linked = [shard for part in copied.parts for shard in part.shards if shard.linked_from]
    assert linked
    checked = sum(shard.size_bytes for shard in linked if shard.checked)
    assert copied.checked_bytes == checked
    assert copied.memory_bytes == base + DiskQueue.memory_bytes(1, 3)
    deep = DiskQueue.memory_bytes(copied.io_depth, 3)
    assert copied.budget_bytes == (1_000_000_000 - base - deep) // 3
    computed = plan_quantize(QuantizeOptions(options, "bf16", "bf16"))
    base += 150_000_000
    assert computed.memory_bytes == base + DiskQueue.memory_bytes(1, 3) + 3 * 16_000_000
    assert computed.budget_bytes == (1_000_000_000 - base - deep) // 3
    small = replace(computed, options=replace(options, run=RunOptions(max_memory_bytes=1)))
    assert small.budget_bytes == 16_000_000
    names = {f"{part.name}/{name}" for part in computed.parts for name in part.file_names}
    assert computed.files == names


def test_a_tensor_that_is_not_as_promised(source: Path, output: Path) -> None:
    drop_tensor(source, "model.norm.weight")
    drop_tensor(source, "lm_head.weight")
    with pytest.raises(InvalidInputError, match=r"missing \(1 more like this\)") as refusal:
        plan_export(BundleOptions(source, output))
    assert refusal.value.where == source


def test_only_known_kinds_are_planned(options: BundleOptions) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        plan_quantize(QuantizeOptions(options, "weight_only_int4", "bf16"))
    assert refusal.value.found == "--mtp-quant bf16"


@pytest.mark.parametrize(
    ("asked", "steps", "expected"), [(5, 99, 5), (64, 4, 5), (8, 0, 1), (1, 0, 1)]
)
def test_the_disk_s_depth_fits_into_the_memory(
    asked: int, steps: int, expected: int, options: BundleOptions
) -> None:
    plan = plan_export(options)
    step = DiskQueue.memory_bytes(2, 3) - DiskQueue.memory_bytes(1, 3)
    run = RunOptions(workers=3, io_depth=asked)
    room = replace(plan, options=replace(options, run=run)).memory_bytes + steps * step
    run = replace(run, max_memory_bytes=room)
    assert replace(plan, options=replace(options, run=run)).io_depth == expected


def test_the_deeper_disk_of_two_decides(
    options: BundleOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths = {options.input_dir: 5, options.output_dir.parent: 3}
    monkeypatch.setattr(bundle_plan, "disk_depth", depths.__getitem__)
    assert plan_export(options).io_depth == 5
    depths[options.output_dir.parent] = 7
    assert plan_export(options).io_depth == 7
