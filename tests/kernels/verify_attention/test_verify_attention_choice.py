"""Launch parameters for a GPU: listed, tuned on it, or the nearest that compile and fit."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from cases import nightly_but  # noqa: E402
from mtp_kernels.gpu import devices, tuned  # noqa: E402
from mtp_kernels.gpu.devices import INTERPRETED, Gpu, gpu_of  # noqa: E402
from mtp_kernels.verify_attention import triton_choice  # noqa: E402
from mtp_kernels.verify_attention.triton_tuning import KINDS, TABLES, Launch  # noqa: E402

BF16, FP8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
# Shared memory of a program: CUDA programming guide; AMD's local data share.
GPUS: dict[str, tuple[int | str, int]] = {
    "8.6": (86, 101_376),
    "8.9": (89, 101_376),
    "10.3": (103, 232_448),
    "12.0": (120, 101_376),
    "gfx90a": ("gfx90a", 65_536),
    "gfx942": ("gfx942", 65_536),
    "gfx950": ("gfx950", 163_840),
}


def gpu(name: str, version: str = "3.9.0") -> Gpu:
    arch, shared_bytes = GPUS[name]
    target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
    return Gpu(f"test {name}", target, 100, shared_bytes, version)


def hopper(version: str) -> Gpu:
    return Gpu("test 9.0", GPUTarget("cuda", 90, 32), 132, 232_448, version)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    triton_choice.tiles_for.cache_clear()
    return tmp_path


def test_listed_devices_take_their_table_without_compiling() -> None:
    for version, listed in (("3.6.0", "3.6"), ("3.7.1", "3.6"), ("3.10.2", "3.9")):
        assert triton_choice.tiles_for(hopper(version), "16 bit") == TABLES[9, 0][listed]["16 bit"]
    assert triton_choice.launch_for(hopper("3.6.0"), BF16, BF16, 17).rows == 32
    assert triton_choice.launch_for(hopper("3.6.0"), BF16, BF16, 500).rows == 64
    with pytest.raises(ValueError, match=r"expected 16 bit or fp32 on .*8.0.*, found fp8"):
        ampere = replace(hopper("3.6.0"), target=GPUTarget("cuda", 80, 32))
        triton_choice.launch_for(ampere, BF16, FP8, 16)


CASES = [(name, kind) for name in GPUS for kind in ("16 bit", "fp8", "fp32")]
CASES.remove(("8.6", "fp8"))  # which it cannot convert


@pytest.mark.parametrize(
    ("name", "kind"), nightly_but([("12.0", "16 bit"), ("gfx942", "fp8")], CASES)
)
def test_unlisted_devices_take_the_nearest_that_fits(
    name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    dtype, kv_dtype = KINDS[kind]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            launch = triton_choice.launch_for(gpu(name), dtype, kv_dtype, 64)
    sizes = triton_choice.usual_sizes(kind)
    compiled = triton_choice.compile_attend(gpu(name).target, sizes, launch)
    assert compiled.metadata.shared * launch.programs_per_sm <= GPUS[name][1]
    (said,) = (record.getMessage() for record in caplog.records)  # once
    assert f"test {name} " in said and "gpu_report tunes them" in said


@pytest.mark.parametrize(
    ("capability", "rows"), nightly_but([((9, 0), 16)], [(c, r) for c in TABLES for r in (16, 32)])
)
def test_blocks_over_several_pages_compile(capability: tuple[int, int], rows: int) -> None:
    """Pages of one token, by which verify shares a text among its drafts."""
    tables = TABLES[capability]["3.6"]["16 bit"]
    (launch,) = (launch for launch in tables if launch.rows == rows)
    sizes = replace(triton_choice.usual_sizes("16 bit"), page=1)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    compiled = triton_choice.compile_attend(target, sizes, launch)
    assert 0 < compiled.metadata.shared <= {8: 166_912}.get(capability[0], 232_448)


def test_an_older_triton_takes_the_oldest_table() -> None:
    """Of its own capability, where it compiles and fits."""
    found = triton_choice.tiles_for(hopper("3.5.1"), "fp32")
    assert [(launch.rows, launch.tokens) for launch in found] == [(16, 16)]


def test_a_gpu_on_which_nothing_fits_is_refused() -> None:
    tiny = replace(gpu("8.6"), shared_bytes=1024)
    with pytest.raises(ValueError, match="fits into 1024 bytes of shared memory, found test 8.6"):
        triton_choice.tiles_for(tiny, "fp32")


def test_what_no_table_holds_is_refused_everywhere() -> None:
    for one in (hopper("3.6.0"), gpu("8.9")):
        with pytest.raises(ValueError, match="fp32 over fp8"):
            triton_choice.launch_for(one, FP32, FP8, 16)


def test_a_tuned_table_comes_first() -> None:
    launch = Launch(16, 16, 4, 2, 3, min_share=7)
    path = tuned.write(hopper("3.6.0"), triton_choice.KERNEL, {"16 bit": [asdict(launch)]})
    tuned.write(hopper("3.6.0"), "another", {"kind": [{"size": 1}]})
    assert path.name == "test-9-0-triton-3.6.json"
    assert triton_choice.launch_for(hopper("3.6.0"), BF16, BF16, 64) == launch
    assert triton_choice.launch_for(hopper("3.6.0"), FP32, FP32, 64).tokens == 16
    other = hopper("3.9.0")
    assert triton_choice.launch_for(other, BF16, BF16, 64) != launch, "another Triton's"
    assert json.loads(path.read_text())["gpu"] == "test 9.0"


@pytest.mark.parametrize(
    "text", ["", "\0" * 9, "\xff", "{", "[]",
             '{"tables": {"verify_attention": {"16 bit": [{"rows": 16}]}}}',
             '{"tables": {"verify_attention": {"16 bit": [{"rows": "many"}]}}}']
)  # fmt: skip
def test_a_damaged_table_is_refused_by_name(text: str) -> None:
    path = tuned.path_of(hopper("3.6.0"))
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"triton-3.6.json: expected a table of launch parameters"):
        triton_choice.tiles_for(hopper("3.6.0"), "16 bit")
    launch = Launch(16, 16, 4, 2, 3, min_share=7)
    tuned.write(hopper("3.6.0"), triton_choice.KERNEL, {"16 bit": [asdict(launch)]})
    assert triton_choice.tiles_for(hopper("3.6.0"), "16 bit") == (launch,)


def test_a_gpu_is_what_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"multiprocessor_count": 7, "max_shared_mem": 99}
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 89, 32),
        utils=SimpleNamespace(get_device_properties=lambda index: limits | {"index": index}),
    )
    monkeypatch.setattr(devices, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 91)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"number {index}")
    for device in (torch.device("cuda"), torch.device("cuda", 91)):
        found = gpu_of(device)
        assert (found.name, found.capability) == ("number 91", (8, 9))
        assert (found.processors, found.shared_bytes) == (7, 99)


def test_kernels_are_launched_on_the_device_of_their_tensors() -> None:
    made = devices.launches_on(torch.device("cuda", 3))
    assert isinstance(made, torch.cuda.device) and made.idx == 3
    with devices.launches_on(torch.device("cpu")):
        pass


def test_the_cpu_is_the_interpreter_s_device() -> None:
    assert gpu_of(torch.device("cpu")) is INTERPRETED
    assert str(gpu("8.6")) == "test 8.6 (architecture 8.6, Triton 3.9.0)"
    amd = Gpu("MI300X", GPUTarget("hip", "gfx942", 64), 304, 65_536, "3.6.0")
    assert amd.capability is None and "gfx942" in str(amd)
