"""The released 671B shapes over 8 and 16 ranks, as they are and in the bundles that quantize makes
of them: what they read adds up to the checkpoint, and what each holds fits a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from math import prod
from pathlib import Path

import pytest

from benchmarks.load_plan import Plan, coverage, planned
from benchmarks.make_bundle import SCHEMES, make_bundle
from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint, make_released
from cases import nightly_but
from mtp_checkpoints.errors import ResourceError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.schemes.table import GGUF_SCHEMES, PAIRS
from mtp_runtime.layers.tensor_parallel import MODES

GPU_BYTES = 141 * 10**9
FP8 = "fp8"  # as released
READ_BY_ALL = (Role.NORM, Role.ROUTER, Role.MTP_PROJECTION)
PROJECTED_BY_ALL = ("q_a_proj", "kv_a_proj")
# Bytes per element of what is dense: the halves of kv_b_proj, which are absorbed, and float32.
DENSE = {"kv_b_proj": 2, "norm": 4, "mlp.gate.": 4}
ROTATIONS_BYTES = 1000  # at most, with the factors of routers

Folders = Callable[[str], Path]  # by the name of a scheme, or FP8


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Headers alone; every tensor but constants is a hole."""
    folder = tmp_path_factory.mktemp("released")
    return bundles_of(make_released(folder / FP8, "deepseek_v3"))


@pytest.fixture(scope="module")
def shortened(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The same with three dense layers and one sparse one before the MTP layer."""
    source = make_checkpoint(
        tmp_path_factory.mktemp("shortened") / FP8,
        REAL_CONFIG | {"num_hidden_layers": 4},
        max_shard_bytes=1 << 40,
        filled=lambda name: False,
        parted=False,
    )
    return bundles_of(source)


def bundles_of(source: Path) -> Folders:
    """Return a checkpoint and its bundles, each made when it is asked for."""

    @cache
    def folder(scheme: str) -> Path:
        return source if scheme == FP8 else make_bundle(source, source.with_name(scheme), scheme)

    return folder


# One of each storage, where sums are divided too and where outputs alone are.
EVERY_PUSH = [*product([FP8, "int8", "int4"], MODES)]


@pytest.mark.parametrize(
    ("scheme", "mode"), nightly_but(EVERY_PUSH, product([FP8, *SCHEMES], MODES))
)
def test_ranks_read_layers_once_together(shortened: Folders, scheme: str, mode: str) -> None:
    check(planned(shortened(scheme), 16, mode, GPU_BYTES), 16, mode)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scheme", "ranks", "mode"),
    [*product([FP8], [8, 16], MODES), *product(SCHEMES, [8], ["reduce"])],
)
def test_ranks_read_the_checkpoint_once_together(
    released: Folders, scheme: str, ranks: int, mode: str
) -> None:
    """Each then has room for the longest context, twice, on a GPU of 141 GB."""
    plan = planned(released(scheme), ranks, mode, GPU_BYTES)
    check(plan, ranks, mode)
    for held in plan.held:
        assert held.tokens >= 2 * REAL_CONFIG["max_position_embeddings"]
        assert held.weight_bytes + held.tokens * held.token_bytes <= GPU_BYTES


def test_every_quantized_pair_is_planned() -> None:
    """But for fp8, as which the release is planned itself, GGUF files, and nvfp4, mxfp4 and mxfp8,
    which a GPU holds in bf16."""
    pairs = {(pair.base, pair.mtp) for pair in PAIRS if pair.base not in GGUF_SCHEMES}
    made = {(options["base_quant"], options["mtp_quant"]) for options in SCHEMES.values()}
    others = {pair for pair in pairs - made if not pair[0].endswith(("fp4", "mxfp8"))}
    assert others == {("a8w8_fp8", "a8w8_fp8"), ("bf16", "bf16")}


def test_a_gpu_that_is_too_small(shortened: Folders) -> None:
    """The limit is compared with what a rank holds."""
    (held, *_) = planned(shortened(FP8), 8, "reduce", GPU_BYTES).held
    with pytest.raises(ResourceError, match="leaves no memory for the cache"):
        planned(shortened(FP8), 8, "reduce", held.weight_bytes)


def check(plan: Plan, ranks: int, mode: str) -> None:
    for weight in plan.weights:
        for tensor, (least, most) in zip(
            weight.tensors, reads_of(weight, ranks, mode), strict=False
        ):
            found = plan.times_read(tensor.name)
            assert found[0] == least and found[1] <= most, tensor.name
    check_bytes(plan, ranks)
    for rank, held in enumerate(plan.held):
        expected = sum(held_of(plan, weight, rank) for weight in plan.weights)
        assert held.weight_bytes == pytest.approx(expected, abs=ROTATIONS_BYTES)


def reads_of(weight: WeightOnDisk, ranks: int, mode: str) -> tuple[tuple[int, int], ...]:
    """Return how often the least read element of codes, scales and constants is read, and at most
    the most read one."""
    spec, once, by_all = weight.stored.weight, (1, 1), (ranks, ranks)
    if spec.role in READ_BY_ALL or any(part in spec.name for part in PROJECTED_BY_ALL):
        return by_all, by_all, by_all
    if spec.role is Role.ROUTED_EXPERT:  # one rank has it whole
        return once, once, once
    if weight.stored.storage == "fp8_block":
        return once, (1, 2), by_all  # of a block that two ranks share
    of_rows = weight.stored.storage == "int8_channel"
    cuts_rows = mode == "reduce" and spec.name.endswith(("down_proj.weight", "o_proj.weight"))
    return once, by_all if of_rows and cuts_rows else once, by_all


def check_bytes(plan: Plan, ranks: int) -> None:
    total = sum(tensor.size_bytes for tensor in plan.tensors.values())
    by_all = sum(plan.tensors[name].size_bytes for name in plan.replicated)
    for rank in range(ranks):
        assert plan.rank_bytes(rank) <= 1.02 * ((total - by_all) / ranks + by_all)


def held_of(plan: Plan, weight: WeightOnDisk, rank: int) -> int:
    """Return the bytes that a rank holds of a weight: codes, in whole blocks, and scales as they
    are stored, but for what is dense. The MTP layer's copies of embedding and head are those of the
    main model."""
    spec, (codes, *others) = weight.stored.weight, weight.tensors
    if spec.optional:
        return 0
    unit = BLOCK if weight.stored.storage == "fp8_block" else 1
    elements = sum(
        (rows.stop - rows.start // unit * unit) * (columns.stop - columns.start // unit * unit)
        for rows, columns in plan.reads[rank].get(codes.name, ())
    )
    for part, element_bytes in DENSE.items():
        if part in spec.name:
            return elements * element_bytes
    scales = plan.rank_bytes(rank, [tensor.name for tensor in others[:1]])
    return elements * (codes.size_bytes // prod(codes.shape)) + scales


def test_coverage_counts_reads() -> None:
    shape = (4, 6)
    halves = [(range(4), range(3)), (range(4), range(3, 6))]
    assert coverage(shape, halves) == (1, 1)
    assert coverage(shape, halves[:1]) == (0, 1)
    assert coverage(shape, [*halves, (range(1), range(1))]) == (1, 2)
