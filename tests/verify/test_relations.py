"""Relations of a weight to its source's: named where there is one, and not where there is none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mtp_checkpoints.containers.safetensors_header import read_header
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.families.base import Role, TensorSpec
from mtp_checkpoints.formats.unquantized import Unquantized
from mtp_checkpoints.quantization.stored import StoredWeight
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.diagnosis import relations, sketches
from mtp_export.verify.diagnosis.compared import compare
from mtp_export.verify.diagnosis.orders import Subject, clause, find_order, nearest
from mtp_export.verify.diagnosis.parts import part
from mtp_export.verify.diagnosis.relations import partly, relation

ROWS, COLUMNS = 96, 64
NAME = "model.norm.weight"


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(folder: Path, tensor: torch.Tensor) -> WeightOnDisk:
    """An unquantized weight in a file of its own."""
    folder.mkdir(exist_ok=True)
    save_file({NAME: tensor.bfloat16().contiguous()}, folder / "model.safetensors")
    (info,) = read_header(LocalFolder(folder).file("model.safetensors")).tensors
    spec = TensorSpec(NAME, tuple(tensor.shape), (DType.BF16,), Role.NORM)
    return WeightOnDisk(StoredWeight(spec, Unquantized(), ()), (info,))


def said(folder: Path, found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    compared = compare(stored(folder / "found", found), stored(folder / "wanted", wanted))
    return relation(compared)


@pytest.mark.parametrize("noise_db", [6, 12, 20, 30, 40])
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (128, 128), (4, 256), (256,), (16,)])
def test_weights_of_another_training_have_no_relation(
    noise_db: int, shape: tuple[int, ...], tmp_path: Path
) -> None:
    for seed, centre in enumerate((0.0, 1.0)):
        wanted = seeded(*shape, seed=seed) * 0.1 + centre
        noise = seeded(*shape, seed=seed + 10) * 0.1 * 10 ** (-noise_db / 20)
        assert said(tmp_path, wanted + noise, wanted) is None
        assert said(tmp_path, seeded(*shape, seed=seed + 20) * 0.1 + centre, wanted) is None


def test_a_function_of_the_elements_that_differ_alone_is_none(tmp_path: Path) -> None:
    wanted = seeded(64, 64)
    assert said(tmp_path, wanted + torch.eye(64), wanted) is None


@pytest.mark.parametrize("drift", [0.985, 1.01])
def test_a_norm_that_drifted_with_its_training_has_none(drift: float, tmp_path: Path) -> None:
    wanted = 1 + 0.1 * seeded(256)
    found = wanted * drift + 1e-3 * seeded(256, seed=1)
    assert said(tmp_path, found, wanted) is None


def test_one_element_of_a_few_that_differs_has_no_factor(tmp_path: Path) -> None:
    wanted = seeded(8)
    found = wanted.clone()
    found[3] = 0.7 * wanted[3]
    assert said(tmp_path, found, wanted) is None


def test_equal_weights_have_none(tmp_path: Path) -> None:
    wanted = seeded(ROWS, COLUMNS)
    assert said(tmp_path, wanted, wanted) is None


def test_two_relations_that_explain_equally_are_both_named(tmp_path: Path) -> None:
    half = seeded(32)
    wanted = torch.cat([half, -half.flip(0)])  # reversed, its sign is flipped
    words = said(tmp_path, -wanted, wanted)
    assert words is not None and "both explain it equally" in words
    assert "sign is flipped" in words and "reverse order" in words


def test_a_multiple_that_an_offset_explains_too(tmp_path: Path) -> None:
    wanted = torch.full((64,), 0.5)
    wanted[:32] += 1e-3 * seeded(32)
    words = said(tmp_path, wanted * 2, wanted)
    assert words is not None and "2 times" in words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.flip(0), "its rows are in reverse order"),
        (lambda w: w.roll(5, 0), "its rows are rolled by 5"),
        (lambda w: w.roll(-3, 1), "its columns are rolled by -3"),
        (lambda w: w * torch.where(torch.arange(ROWS) < 7, 3, 1)[:, None], "its rows 0 to 6 are 3"),
        (lambda w: w.t().reshape(w.shape), "in the order of the source's columns"),
        (lambda w: w + 0.25, "it is the source's + 0.25"),
    ],
)
def test_pieces_that_are_read_one_by_one_give_the_same(
    change: Callable[[torch.Tensor], torch.Tensor],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = seeded(3 * ROWS, COLUMNS)[: 2 * ROWS]
    monkeypatch.setattr(sketches, "_PIECE_ELEMENTS", 1)  # 128 rows, the least
    long = torch.cat([wanted, wanted.flip(1)])[: 2 * ROWS]
    if "7" in words or "0 to 6" in words:
        long = wanted[:ROWS]
    found = said(tmp_path, change(long), long)
    assert found is not None and words in found


def bytes_swapped(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.bfloat16().view(torch.uint8).view(-1, 2).flip(1).contiguous()
    return raw.view(torch.bfloat16).view(tensor.shape).float().nan_to_num(0, 0, 0)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(3, tensor.shape[1]), tensor[:-3]])


def every_other_overwritten(tensor: torch.Tensor) -> torch.Tensor:
    changed = seeded(*tensor.shape, seed=9)
    changed[::2] = tensor[: len(tensor) // 2]
    return changed


def four_bits(tensor: torch.Tensor) -> torch.Tensor:
    groups = tensor.view(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 7
    return ((groups / scale).round() * scale).view(tensor.shape)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shifted, "its rows are shifted by 3, and not rolled: its first 3 are not"),
        (lambda w: shifted(w.flip(0)).flip(0), "shifted by -3, and not rolled: its last 3 are not"),
        (every_other_overwritten, "64 of its 128 rows are the source's, some at other places; the"),
        (lambda w: w[: len(w) // 2].repeat_interleave(2, 0), "more than once: 64 of the source's"),
        (lambda w: w + seeded(128, 3) @ seeded(3, 128, seed=1), "has rank 3, as of an adapter"),
        (lambda w: w + seeded(128, 1), "each of its rows is the source's plus an offset"),
        (lambda w: w.to(torch.float8_e4m3fn).float(), "mantissas have 3 bits: it was rounded"),
        (lambda w: w.to(torch.float8_e5m2).float(), "as to fp8 (e5m2), before it was stored"),
        (four_bits, "each 32 of its columns hold 16 values at most: it was rounded to 4 bits"),
    ],
)
def test_what_has_much_in_common_is_said(
    change: Callable[[torch.Tensor], torch.Tensor], words: str, tmp_path: Path
) -> None:
    wanted = seeded(128, 128)
    both = stored(tmp_path / "found", change(wanted)), stored(tmp_path / "wanted", wanted)
    compared = compare(*both)
    assert relation(compared) is None
    assert words in str(partly(compared, [], {}))


@pytest.mark.parametrize("centre", [0, 1])
def test_vectors_that_are_shifted_or_doubled_here_and_there(centre: int, tmp_path: Path) -> None:
    wanted = centre + 0.1 * seeded(64)
    late = torch.cat([torch.zeros(2), wanted[:-2]])
    assert "its elements are shifted by 2, and not rolled" in str(said(tmp_path, late, wanted))
    assert said(tmp_path, wanted.roll(2), wanted) == "its elements are rolled by 2"
    doubled = torch.where(torch.arange(64) % 3 == 0, 2 * wanted, wanted)
    assert "22 of its 64 elements are 2 times" in str(said(tmp_path, doubled, wanted))


@pytest.mark.parametrize("noise_db", [0, 6, 12, 20, 30, 40])
def test_weights_of_another_training_have_nothing_in_part(noise_db: int, tmp_path: Path) -> None:
    wanted = seeded(128, 128)
    found = wanted + seeded(128, 128, seed=1) * 10 ** (-noise_db / 20)
    compared = compare(stored(tmp_path / "found", found), stored(tmp_path / "wanted", wanted))
    assert partly(compared, [], {"norm": 1 + 0.1 * seeded(128, seed=3)}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: -w.flip(0), "its rows are in reverse order, and its sign is flipped"),
        (lambda w: -3 * w.t(), "it is transposed, and it is -3 times the source's"),
        (lambda w: w.roll(2, 1) / 4, "its columns are rolled by 2, and it is 0.25 times"),
        (lambda w: w.roll(3, 0) + 0.5, "its rows are rolled by 3, and it is the source's + 0.5"),
        (lambda w: w.flip(0, 1), "its rows are in reverse order, and its columns are in reverse"),
        (lambda w: w.clamp(-1, 1), "of its 16,384 elements that were looked at are clipped to -1"),
        (torch.abs, "it is the absolute value of the source's"),
        (lambda w: 1 - w, "it is -1 times the source's + 1"),
        (lambda w: torch.where(w.abs() < 0.3, 0, w), "elements that were looked at are zero"),
        (lambda w: w.reshape(-1).roll(5).view(w.shape), "lie 5 places after the source's"),
        (lambda w: w.reshape(-1).roll(-7).view(w.shape), "lie 7 places before the source's"),
        (lambda w: w.bfloat16().view(torch.float16).float(), "its bits are bf16's, read as fp16"),
        (
            lambda w: w.bfloat16().half().view(torch.bfloat16).float(),
            "its bits are fp16's, read as bf16",
        ),
        (lambda w: 1 / w, "it is the reciprocal of the source's"),
        (bytes_swapped, "the two bytes of each of its elements are swapped"),
    ],
)
def test_two_relations_at_once_and_functions(
    change: Callable[[torch.Tensor], torch.Tensor], words: str, tmp_path: Path
) -> None:
    wanted = seeded(128, 128)
    assert words in str(said(tmp_path, change(wanted), wanted))


def test_a_function_that_the_last_rows_are_not_of_is_none(tmp_path: Path) -> None:
    wanted = seeded(512, 16)
    found = wanted.abs()
    found[-128:] = seeded(128, 16, seed=5)
    assert said(tmp_path, found, wanted) is None


def test_a_factor_for_each_column_is_named_by_the_vector_that_it_is(tmp_path: Path) -> None:
    wanted, norm = seeded(128, 32), 1 + 0.3 * seeded(32, seed=2)
    compared = compare(
        stored(tmp_path / "found", wanted * norm), stored(tmp_path / "wanted", wanted)
    )
    assert relation(compared) is None
    words = str(partly(compared, [], {"other": seeded(32), "norm": norm.bfloat16()}))
    assert words.startswith("each of its columns is another multiple of the source's")
    assert words.endswith(": norm was multiplied into it")
    inverse = str(partly(compared, [], {"norm": 1 / norm}))
    assert inverse.endswith(": the reciprocal of norm was multiplied into it")
    assert not str(partly(compared, [], {})).endswith("multiplied into it")


def test_weights_of_another_training_have_no_factors_for_each(tmp_path: Path) -> None:
    wanted = seeded(128, 8)
    found = wanted + 0.1 * seeded(128, 8, seed=4)
    compared = compare(stored(tmp_path / "found", found), stored(tmp_path / "wanted", wanted))
    assert partly(compared, [], {"norm": torch.ones(8)}) is None


@pytest.mark.parametrize("columns", [True, False])
def test_a_part_that_differs_is_named(columns: bool, tmp_path: Path) -> None:
    wanted = seeded(128, 128)
    found = wanted.clone()
    found[8:24] = seeded(16, 128, seed=5)
    axes = [one.t() if columns else one for one in (found, wanted)]
    compared = compare(*(stored(tmp_path / str(n), one) for n, one in enumerate(axes)))
    assert relation(compared) is None
    noun = "column" if columns else "row"
    assert f"its {noun}s 8 to 23 are not the source's, and all others of 128" in str(part(compared))
    whole = seeded(128, 128, seed=8)
    whole[8:24] = seeded(16, 128, seed=5)
    other = stored(tmp_path / "other", whole.t() if columns else whole)
    unlike = stored(tmp_path / "unlike", wanted)
    assert str(part(compared, [unlike, other])) == f"its {noun}s 8 to 23 are those of {NAME}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: seeded(128, seed=4), "its row 7 is not the source's, and all others of 128"),
        (lambda row: seeded(128, 128)[9], "its row 7 holds the source's row 9"),
        (lambda row: 3 * row, "its row 7 is 3 times the source's"),
        (lambda row: -row, "the sign of its row 7 is flipped"),
        (torch.zeros_like, "its row 7 is zero, and the source's is not"),
    ],
)
def test_a_row_alone_is_named(
    change: Callable[[torch.Tensor], torch.Tensor], words: str, tmp_path: Path
) -> None:
    wanted = seeded(128, 128)
    found = wanted.clone()
    found[7] = change(wanted[7])
    compared = compare(stored(tmp_path / "found", found), stored(tmp_path / "wanted", wanted))
    assert words in str(relation(compared) or part(compared))


def test_scattered_parts_are_not_named_as_one(tmp_path: Path) -> None:
    wanted = seeded(128, 128)
    found = wanted.clone()
    found[8], found[100] = seeded(128, seed=5), seeded(128, seed=6)
    compared = compare(stored(tmp_path / "found", found), stored(tmp_path / "wanted", wanted))
    assert part(compared) is None


def test_orders_of_sketches_are_confirmed_on_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sketches that say more than the values do are not believed."""
    wanted = seeded(128, COLUMNS)
    found, source = stored(tmp_path / "found", wanted.flip(0)), stored(tmp_path / "wanted", wanted)
    compared = compare(found, source)
    assert relation(compared) == "its rows are in reverse order"
    calls = itertools.count()
    monkeypatch.setattr(relations, "values", lambda *_: seeded(128, COLUMNS, seed=next(calls)))
    assert relation(compare(found, source)) is None


ORDER = torch.arange(24)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (ORDER.flip(0), "its rows are in reverse order"),
        (ORDER.roll(4), "its rows are rolled by 4, 1 head"),
        (ORDER.roll(-3), "its rows are rolled by -3"),
        (ORDER.roll(12), "the two halves of its rows are swapped"),
        (ORDER.view(2, -1).t().reshape(-1), "by turns from the source's two halves"),
        (ORDER.view(3, -1).t().reshape(-1), "by turns from 3 equal parts"),
        (ORDER.view(-1, 2).t().reshape(-1), "even ones come first, then the odd ones"),
        (ORDER.view(-1, 3).t().reshape(-1), "every 3th of the source's"),
        (ORDER.view(-1, 4).flip(1).reshape(-1), "within each 4 rows, a head, these are in reverse"),
        (ORDER.view(-1, 4).roll(1, 1).reshape(-1), "within each 4 rows, a head, these are rolled"),
        (ORDER.view(-1, 4)[[0, 4, 2, 3, 1, 5]].reshape(-1),
         "in blocks of 4 rows, a head each, its blocks 1 and 4 are exchanged"),
        (ORDER.view(-1, 4)[[4, 0, 2, 5, 1, 3]].reshape(-1), "its heads of 4 rows are in another"),
        (ORDER[[*range(5), 6, 5, *range(7, 24)]], "its rows 5 and 6 are exchanged"),
        (torch.cat([ORDER[:6], ORDER[6:13].flip(0), ORDER[13:]]), "rows 6 to 12 are in reverse"),
        (ORDER[torch.randperm(24, generator=torch.Generator().manual_seed(1))], "are not at their"),
    ],
)  # fmt: skip
def test_orders_are_named_and_found(places: torch.Tensor, words: str) -> None:
    subject = Subject.all_of("row", 4)
    assert words in clause(places, subject)
    wanted = seeded(24, 16)
    noisy = wanted[places] + 0.05 * seeded(24, 16, seed=3)
    order = find_order(noisy, wanted, subject, 0.01)
    assert order is not None and torch.equal(order.places, places) and words in order.words


def test_an_order_is_not_found_where_more_noise_is_left() -> None:
    wanted = seeded(24, 16)
    noisy = wanted.flip(0) + 0.3 * seeded(24, 16, seed=3)
    assert find_order(noisy, wanted, Subject.all_of("row", None), 0.01) is None


def test_rows_that_are_alike_have_no_nearest() -> None:
    wanted = seeded(8, 16)
    wanted[3] = wanted[5]
    assert nearest(wanted.roll(1, 0), wanted).tolist() == [7, 0, 1, 2, -1, 4, -1, 6]


def test_levels_of_weights_that_are_near() -> None:
    one = torch.ones(1, dtype=torch.float64)
    sums = sketches.Sums(w=one, f=one, ww=one * 100, ff=one, wf=one, noise=one)
    axis = sketches.Axis("element", 1, torch.ones(1, 1), torch.ones(1, 1), sums)
    pair = sketches.Sketches(axis, None, (torch.ones(1, 1), torch.ones(1, 1)))
    assert math.isclose(pair.level_db, 20)
