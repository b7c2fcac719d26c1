"""The released 671B shapes over 8 and 16 ranks: what they read adds up to the checkpoint, and what
each holds fits a GPU.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.load_plan import Plan, coverage, planned
from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint, make_released
from mtp_export.errors import ResourceError
from mtp_runtime.layers.split import MODES

GPU_BYTES = 141 * 10**9
REPLICATED = ("norm", "q_a_proj", "kv_a_proj", "mlp.gate.", "eh_proj")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers alone; every tensor is a hole."""
    return make_released(tmp_path_factory.mktemp("released") / "v3", "deepseek_v3")


@pytest.fixture(scope="module")
def shortened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with three dense layers and one sparse one before the MTP layer."""
    return make_checkpoint(
        tmp_path_factory.mktemp("shortened") / "v3",
        REAL_CONFIG | {"num_hidden_layers": 4},
        max_shard_bytes=1 << 40,
        filled=lambda name: False,
        parted=False,
    )


@pytest.mark.parametrize("mode", MODES)
def test_ranks_read_layers_once_together(shortened: Path, mode: str) -> None:
    check(planned(shortened, 16, mode, GPU_BYTES), 16, mode)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [8, 16])
def test_ranks_read_the_checkpoint_once_together(released: Path, ranks: int, mode: str) -> None:
    """Each then has room for the longest context, twice, on a GPU of 141 GB."""
    plan = planned(released, ranks, mode, GPU_BYTES)
    check(plan, ranks, mode)
    for held in plan.held:
        assert held.tokens >= 2 * REAL_CONFIG["max_position_embeddings"]
        assert held.weight_bytes + held.tokens * held.token_bytes <= GPU_BYTES


def test_a_gpu_that_is_too_small(shortened: Path) -> None:
    """The limit is compared with what a rank holds."""
    (held, *_) = planned(shortened, 8, "reduce", GPU_BYTES).held
    with pytest.raises(ResourceError, match="leaves no memory for the cache"):
        planned(shortened, 8, "reduce", held.weight_bytes)


def check(plan: Plan, ranks: int, mode: str) -> None:
    replicated = set(plan.replicated)
    assert all(any(part in name for part in REPLICATED) for name in replicated)
    for name in plan.tensors:
        least, most = plan.times_read(name)
        if name in replicated:
            assert (least, most) == (ranks, ranks), name
        elif name.endswith("_scale_inv"):
            assert least == 1 and most <= 2, name  # of a block that two ranks share
        else:
            assert (least, most) == (1, 1), name
    check_bytes(plan, replicated, ranks)
    check_held(plan, mode)


def check_bytes(plan: Plan, replicated: set[str], ranks: int) -> None:
    total = sum(tensor.size_bytes for tensor in plan.tensors.values())
    by_all = sum(plan.tensors[name].size_bytes for name in replicated)
    for rank in range(ranks):
        assert plan.rank_bytes(rank) <= 1.02 * ((total - by_all) / ranks + by_all)


def check_held(plan: Plan, mode: str) -> None:
    """Weights stay as they are stored, but for kv_b_proj, whose halves are absorbed as dense ones,
    and routers, which are float32; the MTP layer's copies of embedding and head are those of the
    main model. Blocks that the parts of a matrix cut in mode gather are held whole."""
    share = {"gather": 5e-3, "reduce": 5e-4}[mode]
    copies = names_like(plan, r"layers\.\d+\.(embed_tokens|shared_head\.head)\.")
    for rank, held in enumerate(plan.held):
        kept = plan.rank_bytes(rank) - plan.rank_bytes(rank, copies)
        expanded = plan.rank_bytes(rank, names_like(plan, r"(kv_b_proj|mlp\.gate)\.weight$"))
        assert held.weight_bytes == pytest.approx(kept + expanded, rel=share)


def names_like(plan: Plan, pattern: str) -> list[str]:
    return [name for name in plan.tensors if re.search(pattern, name)]


def test_coverage_counts_reads() -> None:
    shape = (4, 6)
    halves = [(range(4), range(3)), (range(4), range(3, 6))]
    assert coverage(shape, halves) == (1, 1)
    assert coverage(shape, halves[:1]) == (0, 1)
    assert coverage(shape, [*halves, (range(1), range(1))]) == (1, 2)
