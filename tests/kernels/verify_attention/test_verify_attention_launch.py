"""Launches of the Triton backend: their workspaces, compilations, and the code of the fp8 loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from benchmarks.common.compiled_resources import inner_loop  # noqa: E402
from mtp_kernels.gpu.devices import Gpu  # noqa: E402
from mtp_kernels.verify_attention import triton_cuda  # noqa: E402
from mtp_kernels.verify_attention.triton_choice import usual_sizes  # noqa: E402
from mtp_kernels.verify_attention.triton_compile import compile_attend  # noqa: E402
from mtp_kernels.verify_attention.triton_kernels import attend_kernel, plan_kernel  # noqa: E402
from mtp_kernels.verify_attention.triton_tuning import TABLES, Launch  # noqa: E402

HOPPER = Gpu("test 9.0", GPUTarget("cuda", 90, 32), 132, 232_448, "3.6.0")
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_cuda, "gpu_of", lambda device: HOPPER)


@pytest.mark.parametrize("kind", ["16 bit", "fp8", "fp32"])
@pytest.mark.parametrize("heads", [16, 80, 128])
def test_a_workspace_serves_every_smaller_call(kind: str, heads: int) -> None:
    """Fewer rows are cut into more parts: five queries of 128 heads need less than one."""
    sizes = usual_sizes(kind, heads)
    for most in range(1, 12):
        enough = triton_cuda.workspace_bytes(replace(sizes, max_q_len=most), None, CUDA)
        for max_q_len in range(1, most + 1):
            call = replace(sizes, max_q_len=max_q_len)
            schedule = triton_cuda.schedule_for(call, None, CUDA)
            assert triton_cuda.scheduled_bytes(call, schedule) <= enough


def test_a_prompt_s_rows_need_no_partial_results() -> None:
    sizes = replace(usual_sizes("16 bit", heads=128), queries=4096, max_q_len=4096)
    schedule = triton_cuda.schedule_for(sizes, None, CUDA)
    assert schedule.parts == 1
    assert triton_cuda.scheduled_bytes(sizes, schedule) < 1024
    assert triton_cuda.workspace_bytes(sizes, None, CUDA) < 64 * 2**20


def test_lengths_and_batches_choose_no_other_compilation() -> None:
    """A table of 17 pages runs what one of 16 did; batches up to 16 share a plan kernel."""
    for kernel, names in ((attend_kernel, ["max_pages"]), (plan_kernel, ["batch", "parts"])):
        assert [one.name for one in kernel.params if one.do_not_specialize] == names
    assert [triton_cuda.plan_batch(batch) for batch in (1, 16, 17, 128, 129, 4096)] == [
        16, 16, 128, 128, 1024, 4096
    ]  # fmt: skip


@pytest.mark.parametrize("launch", TABLES[9, 0]["3.6"]["fp8"], ids=lambda launch: launch.rows)
def test_codes_are_loaded_before_the_block_before_them_is_multiplied(launch: Launch) -> None:
    """In whole vectors, converted at full rate, and never byte by byte out of shared memory."""
    loop = inner_loop(compile_attend(HOPPER.target, usual_sizes("fp8"), launch))
    loads = [place for place, line in enumerate(loop) if "LDG.E.128" in line]
    products = [place for place, line in enumerate(loop) if "MMA." in line]
    assert loads and max(loads) < products[len(products) // 4]
    assert not [line for line in loop if "LDS.U8" in line or "F2F." in line]
