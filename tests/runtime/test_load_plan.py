"""The released 671B shapes over 8 and 16 ranks: what they read adds up to the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.load_plan import Plan, coverage, planned
from benchmarks.make_checkpoint import make_released

REPLICATED = ("norm", "q_a_proj", "kv_a_proj", "mlp.gate.", "eh_proj")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers alone; every tensor is a hole."""
    return make_released(tmp_path_factory.mktemp("released") / "v3", "deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        (8, "gather"),
        pytest.param(16, "gather", marks=pytest.mark.nightly),
        pytest.param(8, "reduce", marks=pytest.mark.nightly),
        pytest.param(16, "reduce", marks=pytest.mark.nightly),
    ],
)
def test_ranks_read_the_checkpoint_once_together(released: Path, ranks: int, mode: str) -> None:
    plan = planned(released, ranks, mode)
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
    assert by_all < 0.01 * total
    for rank in range(ranks):
        assert plan.rank_bytes(rank) <= 1.02 * ((total - by_all) / ranks + by_all)


def test_coverage_counts_reads() -> None:
    shape = (4, 6)
    halves = [(range(4), range(3)), (range(4), range(3, 6))]
    assert coverage(shape, halves) == (1, 1)
    assert coverage(shape, halves[:1]) == (0, 1)
    assert coverage(shape, [*halves, (range(1), range(1))]) == (1, 2)
