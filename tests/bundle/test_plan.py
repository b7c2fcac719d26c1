"""Plans worked out by hand: steps into shards, shards into parts, and the index of a part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mtp_checkpoints.containers.base import ShardHeader
from mtp_checkpoints.dtypes import DType, OutputTensor, held_shape, tensor_bytes
from mtp_export.plan import (
    COPY,
    Link,
    OutputShard,
    PartPlan,
    Step,
    copy_step,
    number_shards,
    pack,
)


def tensor(name: str, size: int) -> OutputTensor:
    return OutputTensor(name, DType.U8, (size,))


def step(name: str, *sizes: int) -> Step:
    outputs = tuple(tensor(f"{name}{i}", size) for i, size in enumerate(sizes))
    return Step(COPY, (name,), outputs)


class Source:
    """A shard's header, as far as plans look at it."""

    def __init__(self, name: str) -> None:
        self.path = Path(name)


def shard(*steps: Step, source: str | None = None) -> OutputShard:
    return OutputShard(steps, cast(ShardHeader, Source(source)) if source else None)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("BF16", (3, 5), 30),
        ("F32", (), 4),
        ("I64", (2,), 16),
        ("U8", (0, 7), 0),
        ("F4", (3, 2), 3),
        ("F6_E2M3", (4,), 3),
        ("BOOL", (9,), 9),
    ],
)
def test_bytes_of_a_tensor(dtype: str, shape: tuple[int, ...], size: int) -> None:
    assert tensor_bytes(DType[dtype], shape) == size
    assert OutputTensor("x", DType[dtype], shape).size_bytes == size


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E3M2", 6)])
def test_bits_that_fill_no_byte(dtype: str, bits: int) -> None:
    with pytest.raises(ValueError, match=f"^{bits} bits do not fill whole bytes$"):
        tensor_bytes(DType[dtype], (1,))


def test_bytes_of_packed_blocks() -> None:
    """As of Q4_K: 256 elements of a row, with their scales, in 144 bytes."""
    assert tensor_bytes(DType.GGML_Q4_K, (3, 512)) == 3 * 2 * 144
    assert held_shape(DType.GGML_Q4_K, (3, 512)) == (3, 2 * 144)
    assert held_shape(DType.BF16, (3, 512)) == (3, 512)
    for shape in ((), (256, 8), (3, 500)):
        with pytest.raises(ValueError, match="not a multiple of 256 elements"):
            tensor_bytes(DType.GGML_Q4_K, shape)


def test_a_copy_keeps_dtype_and_shape_under_either_name() -> None:
    source = OutputTensor("a", DType.BF16, (2, 3))
    assert copy_step(source) == Step(COPY, ("a",), (source,), None)
    assert copy_step(source, "b") == Step(COPY, ("a",), (OutputTensor("b", DType.BF16, (2, 3)),))
    assert COPY.name == "copy"


@pytest.mark.parametrize(
    ("sizes", "limit", "packed"),
    [
        ([], 10, []),
        ([4, 6], 10, [[4, 6]]),  # filled to the last byte
        ([4, 7], 10, [[4], [7]]),
        ([4, 6, 1], 10, [[4, 6], [1]]),
        ([20, 1, 9, 1], 10, [[20], [1, 9], [1]]),  # one that is larger is alone
        ([3, 20, 3], 10, [[3], [20], [3]]),
        ([0, 0, 5, 5, 0, 1], 10, [[0, 0, 5, 5, 0], [1]]),
    ],
)
def test_shards_are_filled_in_order(sizes: list[int], limit: int, packed: list[list[int]]) -> None:
    shards = pack([step(f"t{i}", size) for i, size in enumerate(sizes)], limit)
    assert [[one.size_bytes for one in steps] for steps in shards] == packed
    names = [one.inputs[0] for steps in shards for one in steps]
    assert names == [f"t{i}" for i in range(len(sizes))]


def test_a_step_weighs_all_it_writes() -> None:
    assert step("a", 3, 4).size_bytes == 7
    assert shard(step("a", 3, 4), step("b", 5)).size_bytes == 12
    assert pack([step("a", 3, 4), step("b", 4)], 10) == [(step("a", 3, 4),), (step("b", 4),)]


def test_names_of_shards_are_the_hub_s() -> None:
    names = [one.file_name for one in number_shards([shard(step("a", 1)), shard(step("b", 1))])]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert number_shards([shard()] * 12)[9].file_name == "model-00010-of-00012.safetensors"


def part_of(*shards: OutputShard) -> PartPlan:
    return PartPlan("main", number_shards(shards), {}, ())


def test_a_part_s_index() -> None:
    part = part_of(shard(step("b", 3, 4)), shard(step("a", 5), step("c", 1)))
    first, second = (one.file_name for one in part.shards)
    index = part.index()
    assert index == {
        "metadata": {"total_size": 13},
        "weight_map": {"a0": second, "b0": first, "b1": first, "c0": second},
    }
    assert list(index["weight_map"]) == ["a0", "b0", "b1", "c0"]
    assert part.tensor_count == 4


def test_shards_are_linked_as_their_source_can_be() -> None:
    links = {Path("x"): Link.HARDLINK, Path("y"): Link.COPY, Path("z"): Link.REFLINK}
    plan = part_of(
        shard(step("a", 1)), *(shard(step(name, 2), source=name) for name in ("x", "y", "z"))
    )
    assert [one.link for one in plan.shards] == [Link.COPY] * 4
    assert not plan.checked
    for checked in (False, True):
        own, hard, copied, cloned = plan.linked_by(links, checked).shards
        assert own == plan.shards[0]
        assert hard == replace(plan.shards[1], link=Link.HARDLINK, checked=checked)
        assert cloned == replace(plan.shards[3], link=Link.REFLINK, checked=checked)
        assert copied == replace(plan.shards[2], linked_from=None)
        assert [one.is_read for one in (own, hard, copied, cloned)] == [
            True, checked, True, checked,
        ]  # fmt: skip
        linked = plan.linked_by(links, checked)
        assert linked.written == (own, copied)
        assert linked.linked == (hard, cloned)
        assert linked.checked == ((hard, cloned) if checked else ())


def test_the_ways_to_link_have_the_names_of_the_option() -> None:
    values: Any = [link.value for link in Link]
    assert values == ["auto", "reflink", "hardlink", "copy"]
