"""Every kind of difference between stored tensors and promised ones, and its words."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.quantization.mismatches import Mismatch, StoredTensor, compare


@dataclass(frozen=True)
class Stored:
    """A tensor on disk."""

    dtype: str
    shape: tuple[int, ...]


CODES = StoredTensor("a.weight", (4, 8), ("F8_E4M3",))
SCALE = StoredTensor("a.weight_scale_inv", (1, 1), ("F32", "F8_E8M0"), scale_of="a.weight")
SPARE = StoredTensor("b.bias", (3,), ("BF16",), optional=True)
PROMISED = (CODES, SCALE, SPARE)
GOOD = {
    "a.weight": Stored("F8_E4M3", (4, 8)),
    "a.weight_scale_inv": Stored("F32", (1, 1)),
    "b.bias": Stored("BF16", (3,)),
}


def test_what_is_promised_is_no_difference() -> None:
    assert compare(GOOD, PROMISED) == []
    without = {name: tensor for name, tensor in GOOD.items() if name != "b.bias"}
    assert compare(without, PROMISED) == []
    powers = GOOD | {"a.weight_scale_inv": Stored("F8_E8M0", (1, 1))}
    assert compare(powers, PROMISED) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"a.weight_scale_inv": None},
            Mismatch(
                tensor="a.weight_scale_inv",
                problem="missing, though its weight a.weight is there",
                expected="F32 or F8_E8M0 [1, 1]",
                found="no such tensor",
            ),
        ),
        (
            {"a.weight": Stored("F8_E4M3", (8, 4))},
            Mismatch("a.weight", "wrong shape", "F8_E4M3 [4, 8]", "F8_E4M3 [8, 4]"),
        ),
        (
            {"a.weight": Stored("BF16", (4, 8))},
            Mismatch("a.weight", "wrong dtype", "F8_E4M3 [4, 8]", "BF16 [4, 8]"),
        ),
        (
            {"b.bias": Stored("F32", (3,))},
            Mismatch("b.bias", "wrong dtype", "BF16 [3]", "F32 [3]"),
        ),
        (
            {"c.weight": Stored("F32", (2,))},
            Mismatch(
                tensor="c.weight",
                problem="not a tensor of this model by its config.json",
                expected="no such tensor",
                found="F32 [2]",
            ),
        ),
        (
            {"c.weight_scale_inv": Stored("F32", (2,))},
            Mismatch(
                tensor="c.weight_scale_inv",
                problem="a scale without its weight (c.weight is not there)",
                expected="no such tensor",
                found="F32 [2]",
            ),
        ),
        (
            {"b.bias_scale_inv": Stored("F32", (2,))},
            Mismatch(
                tensor="b.bias_scale_inv",
                problem="not a tensor of this model by its config.json",
                expected="no such tensor",
                found="F32 [2]",
            ),
        ),
    ],
)
def test_one_difference(change: dict[str, Stored | None], expected: Mismatch) -> None:
    changed = GOOD | change
    stored = {name: tensor for name, tensor in changed.items() if tensor is not None}
    assert compare(stored, PROMISED) == [expected]


def test_a_weight_that_is_missing_leaves_its_scale_behind() -> None:
    stored = {name: tensor for name, tensor in GOOD.items() if name != "a.weight"}
    assert compare(stored, PROMISED) == [
        Mismatch("a.weight", "missing", "F8_E4M3 [4, 8]", "no such tensor"),
        Mismatch(
            tensor="a.weight_scale_inv",
            problem="a scale without its weight",
            expected="a.weight",
            found="no such tensor",
        ),
    ]
    assert [one.problem for one in compare({}, PROMISED)] == ["missing", "missing"]


def test_frequencies_that_engines_recompute_are_no_difference() -> None:
    one = Stored("F32", (8,))
    assert compare(GOOD | {"model.layers.0.self_attn.rotary_emb.inv_freq": one}, PROMISED) == []
    for name in ("model.inv_freq", "rotary_emb.inv_freq.weight"):
        assert [found.tensor for found in compare(GOOD | {name: one}, PROMISED)] == [name]


def test_as_an_error() -> None:
    one = Mismatch("a", "wrong dtype", "F32 [1]", "BF16 [1]")
    for more, tail in ((0, ""), (3, " (3 more like this)")):
        with pytest.raises(InvalidInputError) as refusal:
            one.raise_as_error("/folder", more)
        error = refusal.value
        assert error.what == f"Tensor a: wrong dtype{tail}"
        assert (error.where, error.expected, error.found) == ("/folder", "F32 [1]", "BF16 [1]")
        assert str(error.todo).startswith("Nothing was written.")
