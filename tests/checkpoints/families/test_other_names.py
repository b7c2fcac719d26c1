"""Tensors under other names, and parts of another model's layer, by names and shapes."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.families.other_names import (
    Renamed,
    of_another_kind,
    renamed,
    renamed_singly,
)

NORM, SQUARE, WIDE = (4,), (4, 4), (8, 4)


class Tensor(NamedTuple):
    shape: tuple[int, ...]
    optional: bool = False
    dtype: DType = DType.BF16


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name.replace("__", "."): Tensor(shape) for name, shape in shapes.items()}


WANTED = tensors(mtp__fc__weight=WIDE, mtp__norm__weight=NORM, mtp__mlp__up_proj__weight=SQUARE)


def test_other_beginnings_are_told_of_tensors_of_the_same_shapes_alone() -> None:
    there = {f"model.{name}": one for name, one in WANTED.items()}
    assert renamed(WANTED, there) == [Renamed("", "model", 3)]
    assert renamed(WANTED, {name: Tensor((2, 2, 2)) for name in there}) == []


def test_every_beginning_is_told_where_together_they_are_a_good_half() -> None:
    wanted = WANTED | tensors(mtp__mlp__down_proj__weight=SQUARE)
    there = tensors(draft__mlp__up_proj__weight=SQUARE, draft__mlp__down_proj__weight=SQUARE)
    one = {"norms.mtp.norm.weight": Tensor(NORM)}
    assert renamed(wanted, there | one) == [Renamed("mtp", "draft", 2), Renamed("", "norms", 1)]
    assert renamed(wanted, there) == []


@pytest.mark.parametrize(
    ("last", "dtype", "shape"),
    [
        ("qweight", DType.I32, (8, 64)),
        ("qweight", DType.I32, (64, 8)),
        ("weight_packed", DType.U8, (64, 32)),
        ("weight", DType.F8_E4M3, (64, 64)),
        ("weight", DType.U32, (64, 6)),
        ("weight", DType.U8, (2048, 1)),
    ],
    ids=["GPTQ", "AWQ", "NVFP4", "fp8", "MLX, 3 bits", "bitsandbytes"],
)
def test_packed_weights_are_known_by_their_bits(
    last: str, dtype: DType, shape: tuple[int, ...]
) -> None:
    matrix = (64, 64)
    wanted = tensors(x__3__up_proj__weight=matrix, x__3__down_proj__weight=matrix)
    codes = Tensor(shape, dtype=dtype)
    there = {f"mtp.{one}_proj.{last}": codes for one in ("up", "down")}
    scales = {f"mtp.{one}_proj.scales": Tensor((64, 2)) for one in ("up", "down")}
    assert renamed(wanted, there | scales) == [Renamed("x.3", "mtp", 2)]
    others = {f"x.3.{one}.{last}": codes for one in ("w1", "w2")}
    found = renamed_singly(wanted, others | {"x.3.w1.scales": Tensor((64, 2))})
    assert found is not None and found.found == [*others]
    larger = {name: Tensor((*shape, 3), dtype=dtype) for name in there}
    assert renamed(wanted, larger) == []


def test_single_tensors_are_told_where_the_shapes_are_those_that_are_missing() -> None:
    there = tensors(
        mtp__proj__weight=WIDE, mtp__last__weight=NORM, mtp__mlp__up_proj__weight=SQUARE
    )
    found = renamed_singly(WANTED, there)
    assert found is not None and found.wanted == ["mtp.fc.weight", "mtp.norm.weight"]
    assert found.found == ["mtp.last.weight", "mtp.proj.weight"]
    assert renamed_singly(WANTED, there | tensors(mtp__last__weight=SQUARE)) is None
    assert renamed_singly(WANTED, WANTED) is None
    optional = {"mtp.embed_tokens.weight": Tensor(WIDE, optional=True)}
    assert renamed_singly(WANTED | optional, WANTED | tensors(mtp__other__weight=WIDE)) is None


def test_parts_of_another_kind_are_told_by_their_modules() -> None:
    wanted = tensors(x__self_attn__q_a_proj__weight=WIDE, x__self_attn__q_b_proj__weight=WIDE)
    there = tensors(x__self_attn__q_proj__weight=SQUARE, x__self_attn__k_proj__weight=SQUARE)
    (found,) = of_another_kind(wanted, there)
    assert (found.part, found.wanted, found.found) == (
        "x.self_attn",
        ["q_a_proj", "q_b_proj"],
        ["k_proj", "q_proj"],
    )
    packed = {name.replace("weight", "qweight"): one for name, one in wanted.items()}
    assert of_another_kind(wanted, packed) == []
    assert of_another_kind(wanted, {}) == []
