"""Faults of a weight that is still its source's: in another order, with a factor or an offset,
transposed, or in part. Only the source tells, and verify must say what became of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from faults import planting
from faults.fault import Fault
from faults.small_model import MTP
from faults.weight_faults import EXPERT, MAIN_EXPERT, OTHER, Change, main, mtp
from runtime.checkpoints import GLM4_MOE

GLM, QWEN = "glm4_moe", "qwen3_5_moe"
NORM, PROJECTION, ROUTER = (f"{MTP}.{name}.weight" for name in ("hnorm", "eh_proj", "mlp.gate"))
QUERIES = f"{MTP}.self_attn.q_b_proj"
HEAD = 96  # rows of a head of QUERIES
GLM_ATTENTION = f"model.layers.{GLM4_MOE['num_hidden_layers']}.self_attn"
DELTA = "model.language_model.layers.0.linear_attn"
BLOCK = 128  # rows and columns of an fp8 scale
_GENERATOR = 17


def values_changed(part: str, module: str, how: Change, bundle: Path) -> None:
    """Change the values of a linear in fp8 blocks: codes and scales are made again, here and not by
    the code under test."""
    folder, names = bundle / part, (f"{module}.weight", f"{module}.weight_scale_inv")
    codes, scale = (planting.read(folder, name) for name in names)
    rows, columns = codes.shape
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    values = how(codes.float() * spread)
    assert rows % BLOCK == columns % BLOCK == 0
    blocks = values.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    planting.write(folder, dict(zip(names, (codes, scale), strict=True)))


def in_fp8(module: str, how: Change, part: str = "mtp") -> Callable[[Path], None]:
    return partial(values_changed, part, module, how)


def rows_changed(part: str, module: str, how: Change, bundle: Path) -> None:
    """Change the order of rows of codes that have scales of their own, and of these."""
    names = planting.names(bundle / part, f"{module}.weight_")
    chosen = [name for name in names if not name.endswith("shape")]
    planting.change_all(bundle / part, chosen, how)


def raw(how: Change) -> Change:
    """A change of order, of tensors of any dtype."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float8_e4m3fn:
            return how(tensor)
        return how(tensor.view(torch.uint8)).view(tensor.dtype)

    return changed


def rows_reversed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0)


def rolled(by: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(by, 0)


def halves_swapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(len(tensor) // 2, 0)


def interleaved(tensor: torch.Tensor) -> torch.Tensor:
    """The first rows of both halves, then the second ones."""
    return torch.stack(tensor.chunk(2), 1).reshape(tensor.shape)


def taken_apart(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[::2], tensor[1::2]])


def permuted(tensor: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(len(tensor), generator=torch.Generator().manual_seed(_GENERATOR))
    return tensor[order]


def exchanged(one: int, other: int, tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[[one, other]] = tensor[[other, one]]
    return changed


def blocks_exchanged(size: int, tensor: torch.Tensor) -> torch.Tensor:
    blocks = tensor.reshape(-1, size, *tensor.shape[1:])
    return exchanged(1, 2, blocks).reshape(tensor.shape)


def blocks_rolled(size: int, tensor: torch.Tensor) -> torch.Tensor:
    blocks = tensor.reshape(-1, size, *tensor.shape[1:])
    return blocks[[2, 0, 1, *range(3, len(blocks))]].reshape(tensor.shape)


def each_reversed(size: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, size, *tensor.shape[1:]).flip(1).reshape(tensor.shape)


def of_columns(how: Change, matrix: torch.Tensor) -> torch.Tensor:
    return how(matrix.t()).t()


def in_order_of_columns(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.t().reshape(matrix.shape)


def blocks_transposed(size: int, matrix: torch.Tensor) -> torch.Tensor:
    rows, columns = matrix.shape
    blocks = matrix.reshape(rows // size, size, columns // size, size)
    return blocks.transpose(1, 3).reshape(rows, columns)


def scaled(factor: float, first: int, last: int, tensor: torch.Tensor) -> torch.Tensor:
    """Rows, or elements of a vector, from first to before last times a factor."""
    changed = tensor.clone()
    changed[first:last] = changed[first:last] * factor
    return changed


def every_third_negated(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[::3] = -changed[::3]
    return changed


def first_rows_twice(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[32:64] = tensor[:32]
    return changed


def limited(tensor: torch.Tensor) -> torch.Tensor:
    """Values beyond one standard deviation cut off."""
    most = float(tensor.float().std())
    return tensor.clamp(-most, most)


def columns_multiplied(tensor: torch.Tensor) -> torch.Tensor:
    spread = torch.linspace(0.5, 2, tensor.shape[1])
    return (tensor.float() * spread).to(tensor.dtype)


def norm_multiplied_in(norm: str, matrix: str, bundle: Path) -> None:
    """Folding of a norm's weight into the columns of the matrix behind it."""
    weight = planting.read(bundle / "mtp", norm).float()
    planting.change(bundle / "mtp", matrix, lambda w: (w.float() * weight).to(w.dtype))


def rows_of_another(bundle: Path) -> None:
    """The second half of an expert's rows, and their scales, are the next expert's."""
    for end in ("weight_packed", "weight_scale"):
        theirs = planting.read(bundle / "mtp", f"{OTHER}.{end}")
        half = len(theirs) // 2
        mtp(f"{EXPERT}.{end}", lambda w, t=theirs, h=half: torch.cat([w[:h], t[h:]]))(bundle)


def shifted(by: int, tensor: torch.Tensor) -> torch.Tensor:
    """Rows, or elements, later, with zeros before them."""
    return torch.cat([torch.zeros_like(tensor[:by]), tensor[:-by]])


def at_an_offset(by: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).roll(by).view(tensor.shape)


def read_as_fp16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.float16).to(tensor.dtype)


def small_values_zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.abs() < tensor.float().std() / 2, 0, tensor)


def through_fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


def through_four_bits(tensor: torch.Tensor) -> torch.Tensor:
    groups = tensor.float().view(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 7
    return ((groups / scale).round() * scale).view(tensor.shape).to(tensor.dtype)


def with_adapter(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_GENERATOR)
    down, up = (torch.randn(size, rank, generator=generator) for size in tensor.shape)
    return (tensor + 0.3 * tensor.float().std() * down @ up.t()).to(tensor.dtype)


def every_other_row_overwritten(tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(_GENERATOR))
    changed = (noise * tensor.float().std()).to(tensor.dtype)
    changed[::2] = tensor[: len(tensor) // 2]
    return changed


def codes_of_another(bundle: Path) -> None:
    theirs = planting.read(bundle / "mtp", f"{OTHER}.weight")
    planting.write(bundle / "mtp", {f"{EXPERT}.weight": theirs})


def rows_overwritten(tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(tensor[32:64].shape, generator=torch.Generator().manual_seed(_GENERATOR))
    changed = tensor.clone()
    changed[32:64] = (noise * tensor.float().std()).to(tensor.dtype)
    return changed


_OF_NORM: tuple[tuple[str, Change, str], ...] = (
    ("reversed", rows_reversed, "its elements are in reverse order"),
    ("rolled by 16", partial(rolled, 16), "its elements are rolled by 16"),
    ("rolled back by 1", partial(rolled, -1), "its elements are rolled by -1"),
    ("in halves swapped", halves_swapped, "the two halves of its elements are swapped"),
    ("interleaved", interleaved, "its elements are interleaved: they come by turns from"),
    ("de-interleaved", taken_apart, "the source's even ones come first, then the odd ones"),
    ("permuted", permuted, "its elements are in another order: 25"),
    ("shifted by 2", partial(shifted, 2), "its elements are shifted by 2, and not rolled"),
    ("with two elements exchanged", partial(exchanged, 3, 97), "elements 3 and 97 are exchanged"),
    ("with two blocks exchanged", partial(blocks_exchanged, 64), "blocks 1 and 2 are exchanged"),
    ("in blocks in another order", partial(blocks_rolled, 32), "its elements 0 to 95 are rolled"),
    ("with each block reversed", partial(each_reversed, 32), "each 32 elements, these are in rev"),
    ("negated", torch.neg, "its sign is flipped"),
    ("negated in part", every_third_negated, "the sign of 86 elements of 256 is flipped"),
    ("plus 1", lambda w: w + 1, "it is the source's + 1: 1 was added to it"),
    ("less 1", lambda w: w - 1, "it is the source's - 1: 1 was taken from it"),
    ("plus 0.3", lambda w: w + 0.3, "it is the source's + 0.3"),
    ("taken from 1", lambda w: 1 - w, "it is -1 times the source's + 1"),
    ("halved", lambda w: w / 2, "it is 0.5 times the source's"),
    ("half doubled", partial(scaled, 2, 0, 128), "its elements 0 to 127 are 2 times the source's"),
    ("inverted", torch.reciprocal, "it is the reciprocal of the source's"),
    ("squared", torch.square, "it is the square of the source's"),
)
_OF_PROJECTION: tuple[tuple[str, Change, str], ...] = (
    ("with rows reversed", rows_reversed, "its rows are in reverse order"),
    ("with columns reversed", partial(of_columns, rows_reversed), "its columns are in reverse"),
    ("with columns rolled", partial(of_columns, partial(rolled, 1)), "its columns are rolled by 1"),
    ("with columns interleaved", partial(of_columns, interleaved), "its columns are interleaved"),
    ("with half its columns times 4", partial(of_columns, partial(scaled, 4, 0, 256)),
     "its columns 0 to 255 are 4 times the source's"),
    ("with rows halved", partial(scaled, 0.5, 64, 128), "its rows 64 to 127 are 0.5 times"),
    ("in the order of columns", in_order_of_columns, "in the order of the source's columns"),
    ("transposed by blocks", partial(blocks_transposed, 64), "blocks of 64 × 64 are transposed"),
    ("negated", torch.neg, "its sign is flipped"),
    ("with rows shifted", partial(shifted, 3), "its rows are shifted by 3, and not rolled"),
    ("at a wrong offset", partial(at_an_offset, 5), "its elements lie 5 places after the source's"),
    ("read as fp16", read_as_fp16, "its bits are bf16's, read as fp16"),
    ("with small values zero", small_values_zero, "elements that were looked at are zero"),
    ("rounded to fp8", through_fp8, "it was rounded, as to fp8 (e4m3), before it was stored"),
    ("rounded to 4 bits", through_four_bits, "it was rounded to 4 bits before it was stored"),
    ("with an adapter", partial(with_adapter, 4), "its difference from the source's has rank 4"),
    ("with every other row lost", every_other_row_overwritten,
     "128 of its 256 rows are the source's, some at other places; the others are not"),
    ("with offsets of rows", lambda w: (w.float() + torch.linspace(-1, 1, len(w))[:, None]).to(w),
     "each of its rows is the source's plus an offset of its own, -1 to 1"),
    ("reversed and negated", lambda w: -w.flip(0),
     "its rows are in reverse order, and its sign is flipped"),
    ("with rows and columns reversed", lambda w: w.flip(0, 1),
     "its rows are in reverse order, and its columns are in reverse order"),
    ("with rows rolled, doubled", lambda w: w.roll(5, 0) * 2,
     "its rows are rolled by 5, and it is 2 times the source's"),
    ("with values cut off", limited, "of its 131,072 elements that were looked at are clipped"),
    ("with columns multiplied", columns_multiplied,
     "each of its columns is another multiple of the source's, by 0.5 to 2"),
    ("without signs", torch.abs, "it is the absolute value of the source's"),
    ("with rows written twice", first_rows_twice, "rows 32 to 63 hold the source's rows 0 to 31"),
    ("with rows overwritten", rows_overwritten, "its rows 32 to 63 are not the source's, and all"),
)  # fmt: skip
_OF_ROUTER: tuple[tuple[str, Change, str], ...] = (
    ("rows reversed", rows_reversed, "its rows are in reverse order"),
    ("rows exchanged", partial(exchanged, 1, 2), "its rows 1 and 2 are exchanged"),
    ("columns permuted", partial(of_columns, permuted), "its columns are in another order: 25"),
    ("sign flipped", torch.neg, "its sign is flipped"),
)
_OF_QUERIES: tuple[tuple[str, Change, str], ...] = (
    ("rolled by a head", partial(rolled, HEAD), "its rows are rolled by 96, 1 head"),
    ("with two heads exchanged", partial(blocks_exchanged, HEAD),
     "in blocks of 96 rows, a head each, its blocks 1 and 2 are exchanged"),
    ("with each head reversed", partial(each_reversed, HEAD),
     "within each 96 rows, a head, these are in reverse order"),
    ("of one head doubled", partial(scaled, 2, 96, 192), "its rows 96 to 191 are 2 times"),
    ("of one head negated", partial(scaled, -1, 96, 192), "the sign of its rows 96 to 191"),
    ("permuted", permuted, "its rows are in another order: 38"),
)  # fmt: skip
_OF_EXPERT: tuple[tuple[str, Change, str], ...] = (
    ("transposed", torch.t, "it is transposed"),
    ("with columns reversed", partial(of_columns, rows_reversed), "its columns are in reverse"),
    ("with rows reversed", rows_reversed, "its rows are in reverse order"),
    ("negated", torch.neg, "its sign is flipped"),
)


def _faults(
    subject: str,
    cases: tuple[tuple[str, Change, str], ...],
    planting_of: Callable[[Change], Callable[[Path], None]],
) -> tuple[Fault, ...]:
    return tuple(_fault(f"{subject} {name}", planting_of(how), cause) for name, how, cause in cases)


def _fault(name: str, plant: Callable[[Path], None], cause: str, needs: str = "fp8") -> Fault:
    return Fault(name, plant, "weights", cause, needs=needs, source=True)


RELATION_FAULTS: tuple[Fault, ...] = (
    *_faults("norm", _OF_NORM, partial(mtp, NORM)),
    *_faults("eh_proj", _OF_PROJECTION, partial(mtp, PROJECTION)),
    *_faults("router:", _OF_ROUTER, partial(mtp, ROUTER)),
    *_faults("queries", _OF_QUERIES, partial(in_fp8, QUERIES)),
    *_faults("expert", _OF_EXPERT, partial(in_fp8, EXPERT)),
    _fault("fp8 codes of rows reversed, scales kept",
           mtp(f"{QUERIES}.weight", raw(rows_reversed)),
           "its rows are in reverse order; its scales are not"),
    _fault("identity added to an expert in bf16",
           main(f"{MAIN_EXPERT}.weight", lambda w: w + torch.eye(len(w)).to(w)),
           ": 256 of its 65536 elements differ: damaged", needs="bf16"),
    _fault("embedding rolled by a token", main("model.embed_tokens.weight", partial(rolled, 1)),
           "its rows are rolled by 1"),
    _fault("an expert's codes are another's", codes_of_another,
           f"it holds the codes of {OTHER}.weight"),
    _fault("int8 scales of rows rolled", mtp(f"{EXPERT}.weight_scale", partial(rolled, 9)),
           "its scales are permuted", needs="int8"),
    _fault("norm multiplied into the router",
           partial(norm_multiplied_in, f"{MTP}.post_attention_layernorm.weight", ROUTER),
           "post_attention_layernorm.weight was multiplied into it"),
    _fault("half an expert is another's", rows_of_another,
           f"its rows 128 to 255 are those of {OTHER}.weight", needs="int8"),
    _fault("int8 rows rolled", partial(rows_changed, "mtp", EXPERT, partial(rolled, 64)),
           "its rows are rolled by 64", needs="int8"),
    _fault("int8 codes of rows reversed, scales kept",
           mtp(f"{EXPERT}.weight_packed", rows_reversed),
           "its rows are in reverse order; its scales are not", needs="int8"),
    _fault("int8 rows of one half times 4",
           mtp(f"{EXPERT}.weight_scale", partial(scaled, 4, 0, 128)),
           "its rows 0 to 127 are 4 times the source's", needs="int8"),
    _fault("int4 rows interleaved", partial(rows_changed, "main", MAIN_EXPERT, interleaved),
           "its rows are interleaved", needs="int4"),
    _fault("int4 rows permuted", partial(rows_changed, "main", MAIN_EXPERT, permuted),
           "its rows are in another order: 25", needs="int4"),
    _fault("int4 columns of one half times 4",
           main(f"{MAIN_EXPERT}.weight_scale", partial(of_columns, partial(scaled, 4, 0, 2))),
           "its columns 0 to 127 are 4 times the source's", needs="int4"),
    _fault("queries of GLM rolled by a head",
           mtp(f"{GLM_ATTENTION}.q_proj.weight", partial(rolled, 16)),
           "its rows are rolled by 16, 1 head", needs=GLM),
    _fault("heads of keys of GLM exchanged",
           mtp(f"{GLM_ATTENTION}.k_proj.weight", halves_swapped),
           "its two halves of rows are swapped", needs=GLM),
    _fault("bias of keys of GLM reversed", mtp(f"{GLM_ATTENTION}.k_proj.bias", rows_reversed),
           "its elements are in reverse order", needs=GLM),
    _fault("bias of values of GLM negated", mtp(f"{GLM_ATTENTION}.v_proj.bias", torch.neg),
           "its sign is flipped", needs=GLM),
    _fault("norm of queries of GLM halved", mtp(f"{GLM_ATTENTION}.q_norm.weight", lambda w: w / 2),
           "it is 0.5 times the source's", needs=GLM),
    _fault("decay stored as its exponential", main(f"{DELTA}.A_log", lambda w: -torch.exp(w)),
           "it is minus the exponential of the source's", needs=QWEN),
    _fault("write strengths' bias negated", main(f"{DELTA}.dt_bias", torch.neg),
           "its sign is flipped", needs=QWEN),
    _fault("channels of a convolution reversed", main(f"{DELTA}.conv1d.weight", rows_reversed),
           "its rows are in reverse order", needs=QWEN),
    _fault("output of a delta net negated", main(f"{DELTA}.out_proj.weight", torch.neg),
           "its sign is flipped", needs=QWEN),
)  # fmt: skip
