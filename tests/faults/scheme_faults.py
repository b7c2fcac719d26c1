"""Faults of a weight and its scales in every scheme: rows in another order with their scales or
without, a few rows alone, and scales of another weight. verify must find them with the source,
although the bound of a scheme of few bits leaves room for some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from faults import planting
from faults.fault import Fault
from faults.relation_faults import (
    QWEN,
    blocks_exchanged,
    exchanged,
    of_columns,
    raw,
    rolled,
    rows_reversed,
    shifted,
)
from faults.weight_faults import MAIN_EXPERT, Change, main, mtp
from mtp_checkpoints.formats import Int4Group
from mtp_kernels.quantize.block_floats import pack_pairs, unpack_pairs
from mtp_kernels.quantize.gptq import Grid

LIKE = MAIN_EXPERT.replace("experts.1", "experts.2")
# Of the main model's experts, with the name of the codes.
SCHEMES = {
    "int8": "weight_packed",
    "int4": "weight_packed",
    "int4 everywhere": "weight_packed",
    "wint4": "weight_packed",
    "nvfp4": "weight_packed",
    "mxfp4": "weight_packed",
    "mxfp8": "weight",
}


def with_scales(how: Change, bundle: Path) -> None:
    """Change the order of rows of an expert's codes and of its scales."""
    folder = bundle / "main"
    names = planting.names(folder, f"{MAIN_EXPERT}.weight")
    matrices = [name for name in names if planting.read(folder, name).ndim == 2]
    planting.change_all(folder, matrices, raw(how))


def scales_of_another(bundle: Path) -> None:
    theirs = planting.read(bundle / "main", f"{LIKE}.weight_scale")
    planting.write(bundle / "main", {f"{MAIN_EXPERT}.weight_scale": theirs})


def _order_of(columns: int) -> torch.Tensor:
    """An order of columns by activation, as GPTQ rounds them."""
    return torch.randperm(columns, generator=torch.Generator().manual_seed(1))


def codes_in_order_of_activation(bundle: Path) -> None:
    """The static order of GPTQ, not undone: codes of other columns, under the right scales."""
    name = f"{MAIN_EXPERT}.weight_packed"
    packed = planting.read(bundle / "main", name)
    codes = unpack_pairs(packed.view(torch.uint8))
    changed = pack_pairs(codes[:, _order_of(codes.shape[1])])
    planting.write(bundle / "main", {name: changed.contiguous().view(packed.dtype)})


def groups_in_order_of_activation(bundle: Path) -> None:
    """desc_act's groups of columns without g_idx: codes at their places, under other scales."""
    names = [f"{MAIN_EXPERT}.weight_{part}" for part in ("packed", "scale")]
    packed, scale = (planting.read(bundle / "main", name) for name in names)
    size = packed.shape[1] * 8 // scale.shape[1]
    values = Grid.int4(scale.float(), size).values(
        unpack_pairs(packed.view(torch.uint8)).float() - 8
    )
    order = _order_of(values.shape[1])
    (_, written), _ = Int4Group(size).quantize(values[:, order], "minmax")
    codes = torch.empty_like(values)
    codes[:, order] = Grid.int4(written.float(), size).rounded(values[:, order])
    stored = Grid.int4(written.float(), size).stored(codes)
    planting.write(bundle / "main", dict(zip(names, (stored, written), strict=True)))


def output_for_projection(bundle: Path) -> None:
    theirs = planting.read(bundle / "mtp", "mtp.layers.0.self_attn.o_proj.weight")
    planting.write(bundle / "mtp", {"mtp.fc.weight": theirs})


_Cases = tuple[tuple[str, Callable[[Path], None], str], ...]


def _of_scheme(codes: str) -> _Cases:
    return (
        ("rows reversed", partial(with_scales, rows_reversed), "its rows are in reverse order"),
        ("rows rolled by 8", partial(with_scales, partial(rolled, 8)), "its rows are rolled by 8"),
        ("two rows exchanged", partial(with_scales, partial(exchanged, 3, 97)),
         "its rows 3 and 97 are exchanged"),
        ("two blocks of rows exchanged", partial(with_scales, partial(blocks_exchanged, 16)),
         "in blocks of 16 rows, its blocks 1 and 2 are exchanged"),
        ("codes alone rolled by 8", main(f"{MAIN_EXPERT}.{codes}", raw(partial(rolled, 8))),
         "its rows are rolled by 8; its scales are not"),
        ("scales of another expert", scales_of_another, "another tensor's, or damaged"),
    )  # fmt: skip


def _fault(name: str, plant: Callable[[Path], None], cause: str, needs: str) -> Fault:
    return Fault(name, plant, "weights", cause, needs=needs, source=True)


SCHEME_FAULTS: tuple[Fault, ...] = (
    *(
        _fault(f"{scheme} expert: {name}", plant, cause, scheme)
        for scheme, codes in SCHEMES.items()
        for name, plant, cause in _of_scheme(codes)
    ),
    _fault("int4 codes in GPTQ's order of columns", codes_in_order_of_activation,
           "its columns are in another order", "int4"),
    _fault("int4 groups in desc_act's order, without g_idx", groups_in_order_of_activation,
           "as of GPTQ's desc_act without its g_idx", "int4"),
    _fault("int8 scales shifted by 5 rows",
           main(f"{MAIN_EXPERT}.weight_scale", partial(shifted, 5)),
           "scale: expected finite, above 0, found 0.0 at row 0", "int8"),
    _fault("groups of int4 scales exchanged",
           main(f"{MAIN_EXPERT}.weight_scale", partial(of_columns, partial(exchanged, 0, 1))),
           "its scales are permuted", "wint4 for SGLang"),
    _fault("nvfp4 scales of groups rolled",
           main(f"{MAIN_EXPERT}.weight_scale", raw(partial(of_columns, partial(rolled, 5)))),
           "its scales are permuted", "nvfp4"),
    _fault("projection is the attention's output", output_for_projection,
           "it holds mtp.layers.0.self_attn.o_proj.weight", QWEN),
    _fault("columns of the projection of Qwen3.5 exchanged",
           mtp("mtp.fc.weight", partial(of_columns, partial(exchanged, 3, 97))),
           "its columns 3 and 97 are exchanged", QWEN),
    _fault("blocks of the projection of Qwen3.5 exchanged",
           mtp("mtp.fc.weight", partial(blocks_exchanged, 8)),
           "in blocks of 8 rows, its blocks 1 and 2 are exchanged", QWEN),
)  # fmt: skip
