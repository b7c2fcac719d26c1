"""Tensors under other names, and parts of another model's layer, by names and shapes."""

from __future__ import annotations

from typing import NamedTuple

from mtp_checkpoints.families.other_names import of_another_kind, renamed, renamed_singly

NORM, SQUARE, WIDE = (4,), (4, 4), (8, 4)


class Tensor(NamedTuple):
    shape: tuple[int, ...]
    optional: bool = False


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name.replace("__", "."): Tensor(shape) for name, shape in shapes.items()}


WANTED = tensors(mtp__fc__weight=WIDE, mtp__norm__weight=NORM, mtp__mlp__up_proj__weight=SQUARE)


def test_other_beginnings_are_told_of_tensors_of_the_same_shapes_alone() -> None:
    there = {f"model.{name}": one for name, one in WANTED.items()}
    found = renamed(WANTED, there)
    assert found is not None and (found.wanted, found.found, found.count) == ("", "model", 3)
    assert renamed(WANTED, {name: Tensor((2, 2, 2)) for name in there}) is None


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
