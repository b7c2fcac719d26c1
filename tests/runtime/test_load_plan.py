"""The released 671B shapes over 8 and 16 ranks: what they read adds up to the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.load_plan import Plan, coverage, planned
from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint, make_released

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


@pytest.mark.parametrize("mode", ["gather", "reduce"])
def test_ranks_read_layers_once_together(shortened: Path, mode: str) -> None:
    check(planned(shortened, 16, mode), 16)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["gather", "reduce"])
@pytest.mark.parametrize("ranks", [8, 16])
def test_ranks_read_the_checkpoint_once_together(released: Path, ranks: int, mode: str) -> None:
    check(planned(released, ranks, mode), ranks)


def check(plan: Plan, ranks: int) -> None:
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


def check_bytes(plan: Plan, replicated: set[str], ranks: int) -> None:
    total = sum(tensor.size_bytes for tensor in plan.tensors.values())
    by_all = sum(plan.tensors[name].size_bytes for name in replicated)
    for rank in range(ranks):
        assert plan.rank_bytes(rank) <= 1.02 * ((total - by_all) / ranks + by_all)


def test_coverage_counts_reads() -> None:
    shape = (4, 6)
    halves = [(range(4), range(3)), (range(4), range(3, 6))]
    assert coverage(shape, halves) == (1, 1)
    assert coverage(shape, halves[:1]) == (0, 1)
    assert coverage(shape, [*halves, (range(1), range(1))]) == (1, 2)
