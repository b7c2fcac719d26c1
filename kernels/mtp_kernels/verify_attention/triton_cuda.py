"""Verification attention on GPUs in Triton: split-KV over a plan made on the device.

Three kernels: one program deals the batch's cache blocks evenly to the parts, a wave of programs
attends, and requests that lie in several parts are merged by their log-sum-exp. The grid depends
on sizes only, so the launches can be captured in a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton

from mtp_kernels.gpu.devices import gpu_of, launches_on
from mtp_kernels.verify_attention import triton_kernels as kernels
from mtp_kernels.verify_attention.inputs import BumpAllocator, Inputs, Sizes, array_bytes
from mtp_kernels.verify_attention.triton_choice import launch_for, tiles_for
from mtp_kernels.verify_attention.triton_compile import attend_constants, block_tokens
from mtp_kernels.verify_attention.triton_tuning import Launch, product_kind

COMBINE_ROWS = 2
# Most requests that a compiled plan_kernel takes: batches between two sizes share one.
PLAN_BATCHES = (16, 128, 1024, 4096)


@dataclass(frozen=True)
class Schedule:
    """Launch decisions that follow from sizes and device."""

    launch: Launch
    tokens: int  # of a block: launch.tokens, or less where pages are smaller
    tiles: int  # tiles of rows of the longest request
    parts: int
    min_share: int


def schedule_for(sizes: Sizes, parts: int | None, device: torch.device) -> Schedule:
    """Return the table's tile, and `parts` or as many parts as fill the device once."""
    gpu = gpu_of(device)
    rows = max(1, sizes.max_q_len) * sizes.heads
    launch = launch_for(gpu, dtype=sizes.dtype, kv_dtype=sizes.kv_dtype, rows=rows)
    return schedule_of(sizes, launch, gpu.processors, parts)


def schedule_of(sizes: Sizes, launch: Launch, processors: int, parts: int | None) -> Schedule:
    """Return what a launch means for a call of these sizes."""
    tiles = -(-max(1, sizes.max_q_len) * sizes.heads // launch.rows)
    tokens = block_tokens(sizes, launch)
    if parts is not None:
        return Schedule(launch, tokens=tokens, tiles=tiles, parts=parts, min_share=1)
    filling = max(1, processors * launch.programs_per_sm // tiles)
    return Schedule(launch, tokens=tokens, tiles=tiles, parts=filling, min_share=launch.min_share)


def layout(sizes: Sizes, schedule: Schedule) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of the workspace's arrays, in the order of `attend`."""
    rows = schedule.tiles * schedule.launch.rows
    # One part holds every request as a whole; the rows of a prompt would need a GB.
    slots = 2 * schedule.parts if schedule.parts > 1 else 0
    return [
        ((sizes.batch + 1,), torch.int32),
        ((2 * schedule.parts,), torch.int32),
        ((1,), torch.int32),
        ((slots, rows, sizes.latent), torch.float32),
        ((slots, rows), torch.float32),
    ]


def workspace_bytes(sizes: Sizes, parts: int | None, device: torch.device) -> int:
    """Return the most bytes that a call up to these sizes takes: fewer rows get more parts."""
    check_support(sizes, device)
    if parts is not None:
        return scheduled_bytes(sizes, schedule_for(sizes, parts, device))
    gpu, rows = gpu_of(device), max(1, sizes.max_q_len) * sizes.heads
    kind = product_kind(sizes.dtype, sizes.kv_dtype)
    largest = launch_for(gpu, dtype=sizes.dtype, kv_dtype=sizes.kv_dtype, rows=rows)
    launches = [launch for launch in tiles_for(gpu, kind) if launch.rows <= largest.rows]
    one_tile = replace(sizes, max_q_len=1, heads=1)
    return max(
        scheduled_bytes(sizes, schedule_of(one_tile, launch, gpu.processors, None))
        for launch in launches
    )


def scheduled_bytes(sizes: Sizes, schedule: Schedule) -> int:
    """Return the bytes of the workspace's arrays."""
    return sum(array_bytes(shape, dtype) for shape, dtype in layout(sizes, schedule))


def attend(
    inputs: Inputs, buffer: torch.Tensor, parts: int | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write out [T, h, c] and lse [T, h]; `buffer` has at least `workspace_bytes` bytes."""
    if inputs.sizes.queries:
        schedule = schedule_for(inputs.sizes, parts, out.device)
        with launches_on(out.device):
            run(inputs, schedule, buffer, out, lse)


def run(
    inputs: Inputs,
    schedule: Schedule,
    buffer: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Launch a schedule; `buffer` has its `scheduled_bytes`, and there is a query at least."""
    sizes = inputs.sizes
    allocator = BumpAllocator(buffer)
    starts, part_requests, share, part_out, part_lse = (
        allocator.take(shape, dtype) for shape, dtype in layout(sizes, schedule)
    )
    plan = (starts, part_requests, share)
    planners = triton.cdiv(schedule.parts, kernels.PLANNED.value)
    kernels.plan_kernel[(planners,)](
        inputs.kv_lens, inputs.cu_q, *plan, sizes.batch, schedule.parts,
        BATCH_POW2=plan_batch(sizes.batch), TOKENS=schedule.tokens,
        MIN_SHARE=schedule.min_share,
    )  # fmt: skip
    kernels.attend_kernel[(schedule.tiles, schedule.parts)](
        inputs.q_latent, inputs.q_rope, inputs.kv_cache, inputs.kv_scale, inputs.page_table,
        inputs.kv_lens, inputs.cu_q, inputs.scale * math.log2(math.e), *plan, out, lse, part_out,
        part_lse, inputs.page_table.shape[1], part_lse.shape[1],
        **attend_constants(sizes, schedule.launch), num_warps=schedule.launch.warps,
    )  # fmt: skip
    if schedule.parts == 1:
        return
    row_programs = -(-sizes.max_q_len * sizes.heads // COMBINE_ROWS)
    kernels.combine_kernel[(row_programs, sizes.batch)](
        inputs.kv_lens, inputs.cu_q, starts, share, out, lse, part_out, part_lse,
        part_lse.shape[1], HEADS=sizes.heads, LATENT=sizes.latent, ROWS=COMBINE_ROWS,
        TOKENS=schedule.tokens,
    )  # fmt: skip


def plan_batch(batch: int) -> int:
    """Return the size of the plan kernel for a batch."""
    return next(size for size in PLAN_BATCHES if size >= batch)


def check_support(sizes: Sizes, device: torch.device) -> None:
    """Refuse devices, dtypes and sizes that the kernels do not have."""
    interpreted = bool(triton.knobs.runtime.interpret)
    if device.type != "cuda" and not interpreted:
        raise ValueError(f"backend triton_cuda: expected tensors on a CUDA device, found {device}")
    if interpreted and sizes.dtype == torch.bfloat16:
        # Triton 3.6 to 3.9: numpy has no bf16, so the interpreter keeps bf16 as uint16, and
        # tl.dot multiplies these bit patterns as integers.
        raise ValueError("Triton's interpreter: expected float16 or float32, found bfloat16")
    for name, size in (("latent", sizes.latent), ("rope", sizes.rope)):
        if size < 16 or size & (size - 1):
            raise ValueError(
                f"backend triton_cuda: expected a {name} size that is a power of two from 16 on, "
                f"found {size}"
            )
    most = PLAN_BATCHES[-1]
    if sizes.batch > most:
        raise ValueError(
            f"backend triton_cuda: expected at most {most} requests, found {sizes.batch}"
        )
