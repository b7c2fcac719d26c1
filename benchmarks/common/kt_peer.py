"""kt-kernel's experts of int4 as a peer, where its package is installed: all three products of a
layer's experts and the activation between them, in bf16.

Its own requirements name another torch: install it by `pip install --no-deps kt-kernel`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

HIDDEN, INNER, EXPERTS, PICKED, GROUP = 2048, 1536, 64, 4, 128  # GLM-4.7-Flash's

Case = tuple[int, int, int, Callable[[], object]]


def expert_products(rows: tuple[int, ...]) -> Iterator[Case]:
    """Yield rows, bytes, floating-point operations and call of products with the same experts for
    all rows, others in each call. There are none where it is not installed."""
    if importlib.util.find_spec("kt_kernel") is None:
        return
    from kt_kernel import kt_kernel_ext as kt
    from kt_kernel.utils.amx import _select_rawint4_backend as layer_of  # by this CPU

    pool = kt.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map = 1, [0]
    pool.subpool_thread_count = [torch.get_num_threads()]
    workers = kt.CPUInfer(pool)
    weights = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    held = {name: [_expert(shape) for _ in range(EXPERTS)] for name, shape in weights.items()}
    none_on_gpu = torch.zeros(EXPERTS, dtype=torch.bool)
    config = kt.moe.MOEConfig(EXPERTS, PICKED, HIDDEN, INNER, none_on_gpu.data_ptr())
    config.layer_idx, config.pool, config.max_len = 0, workers.backend_, max(rows)
    for name, experts in held.items():
        setattr(config, f"{name}_projs", [[codes.data_ptr() for codes, _ in experts]])
        setattr(config, f"{name}_scales", [[scales.data_ptr() for _, scales in experts]])
    config.quant_config.bits, config.quant_config.group_size = 4, GROUP
    config.quant_config.zero_point = False
    layer = layer_of(GROUP)(config)
    order = torch.arange(EXPERTS)
    workers.submit(layer.load_weights_task(order.data_ptr()))
    workers.sync()
    parameters = PICKED * 3 * HIDDEN * INNER
    size = parameters // 2 + 2 * parameters // GROUP
    kept = (held, none_on_gpu, order, layer)
    for count in rows:
        yield count, size, 2 * parameters * count, _Call(workers, layer, count, kept)


def _expert(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes, two in a byte, and scales."""
    rows, columns = shape
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    return codes, (0.01 * torch.rand(rows, columns // GROUP)).bfloat16()


class _Call:
    """The products of some rows; `kept` lies where their weights are read."""

    def __init__(self, workers: Any, layer: Any, count: int, kept: object) -> None:
        self._workers, self._layer, self._kept = workers, layer, kept
        self._count = torch.tensor([count], dtype=torch.int32)
        self._x = torch.randn(count, HIDDEN).bfloat16()
        self._out = torch.empty_like(self._x)
        self._shares = torch.full((count, PICKED), 1 / PICKED)

    def __call__(self) -> None:
        picked = torch.randperm(EXPERTS)[:PICKED].repeat(len(self._x), 1)
        given = [self._count.data_ptr(), PICKED]
        given += [part.data_ptr() for part in (picked, self._shares, self._x, self._out)]
        self._workers.submit(self._layer.forward_task(*given, False))
        self._workers.sync()
