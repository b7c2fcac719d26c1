"""An MTP module as it would be had a known mistake not been made, or been made: each variant undoes
one layout fault of the field, and is its own negative control where it is its own inverse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mtp_export.schemes.formats import unquantized
from mtp_runtime.config import Hidden, RopeConfig
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.rope import yarn_temperature
from mtp_runtime.models.deepseek_v3 import DecoderLayer, DeepseekV3, MtpModule
from mtp_runtime.teacher_forcing import Recycle

# Stretching of released models (V3, and the fixture of this repository), tried where none is set.
_KNOWN_FACTORS = (40.0, 4.0)


@dataclass(frozen=True)
class Variant:
    """The module another way. change: how it differs, in words that follow "when". cause: what is
    wrong with a bundle that drafts better so. depth: the draft position that tells."""

    name: str
    change: str
    cause: str
    module: MtpModule
    before_norm: bool
    depth: int = 1
    recycle: Recycle | None = None


def layout_variants(model: DeepseekV3, module: MtpModule) -> Iterator[Variant]:
    """One variant for each way in which the tensors of a module were mixed up in the field."""
    before = module.contract.target_hidden is Hidden.BEFORE_NORM

    def changed(name: str, change: str, cause: str, new: MtpModule) -> Variant:
        return Variant(name, change, cause, new, before)

    yield changed(
        "concatenation",
        "the halves of eh_proj are exchanged",
        "the concatenation is reversed: eh_proj must read [enorm(embedding); hnorm(hidden)]",
        replace(module, projection=halves_exchanged(module.projection)),
    )
    yield changed(
        "norms",
        "enorm and hnorm are exchanged",
        "enorm and hnorm are swapped",
        replace(module, embedding_norm=module.hidden_norm, hidden_norm=module.embedding_norm),
    )
    yield changed(
        "rope",
        "the rotary rows are interleaved",
        "the rotary rows of q_b_proj and kv_a_proj_with_mqa are stored in halves instead of"
        " interleaved pairs",
        replace(module, layer=with_attention(module.layer, interleaved(module.layer.attention))),
    )
    for temperature in missing_temperatures(model.config.rope):
        attention = module.layer.attention
        hotter = replace(attention, scale=attention.scale * temperature**2)
        yield changed(
            "yarn",
            f"attention scores are multiplied by {temperature**2:.3f}",
            "yarn's attention scale was dropped: rope_scaling lacks mscale_all_dim",
            replace(module, layer=with_attention(module.layer, hotter)),
        )
    if module.embedding is not model.embedding:
        yield changed(
            "embedding",
            "the main model's embedding is used",
            "the draft's embedding is of another checkpoint",
            replace(module, embedding=model.embedding),
        )
    if module.head.linear is not model.head.linear:
        head = replace(module.head, linear=model.head.linear)
        yield changed(
            "head",
            "the main model's head is used",
            "the draft's head is of another checkpoint",
            replace(module, head=head),
        )


def contract_variants(module: MtpModule) -> Iterator[Variant]:
    """The other value of each field of the contract."""
    contract = module.contract
    before = contract.target_hidden is Hidden.BEFORE_NORM
    other = Hidden.AFTER_NORM if before else Hidden.BEFORE_NORM
    yield Variant(
        "target_hidden",
        f"the module is fed the target's hidden state {_words(other)}",
        f"the target's hidden state is taken {_words(contract.target_hidden)}",
        replace(module, contract=replace(contract, target_hidden=other)),
        not before,
    )
    recycled = contract.recycled_hidden
    other = Hidden.AFTER_NORM if recycled is Hidden.BEFORE_NORM else Hidden.BEFORE_NORM
    yield Variant(
        "recycled_hidden",
        f"the recycled hidden state is taken {_words(other)}",
        "the recycled hidden state is not normalised: pre-norm hidden recycled"
        if recycled is Hidden.BEFORE_NORM
        else "the recycled hidden state is normalised and should not be",
        replace(module, contract=replace(contract, recycled_hidden=other)),
        before,
        depth=2,
    )
    zero = contract.zero_first_embedding
    yield Variant(
        "zero_first_embedding",
        f"the first token's embedding is {'kept' if zero else 'zeroed'}",
        f"first-token handling: the embedding of position 0 is {'zeroed' if zero else 'kept'}",
        replace(module, contract=replace(contract, zero_first_embedding=not zero)),
        before,
    )


def behaviour_variants(module: MtpModule) -> Iterator[Variant]:
    """What a drafter can do wrong at run time with a module that is right."""
    yield from contract_variants(module)
    before = module.contract.target_hidden is Hidden.BEFORE_NORM

    def stale(x: torch.Tensor, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def nothing(x: torch.Tensor, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)

    yield Variant(
        "stale",
        "every draft is fed the target's last hidden state",
        "stale hidden state: drafts after the first are fed the target's hidden state again, not"
        " the module's own output",
        module,
        before,
        depth=2,
        recycle=stale,
    )
    yield Variant(
        "no recycling",
        "drafts after the first are fed no hidden state",
        "drafts after the first are fed a zero hidden state",
        module,
        before,
        depth=2,
        recycle=nothing,
    )


def halves_exchanged(linear: Linear) -> Linear:
    """The linear with the two halves of its input exchanged."""
    matrix = linear.matrix(dtype_of(linear))  # [in, out]
    half = matrix.shape[0] // 2
    return dense_linear(torch.cat([matrix[half:], matrix[:half]]))


def interleaved(attention: Mla) -> Mla:
    """Attention whose rotary rows, stored as two halves, are put into neighbouring pairs."""
    size = attention.rope_size
    half = torch.arange(size // 2)
    order = torch.stack([half, half + size // 2], dim=1).flatten()
    heads, nope, _ = attention.key_up.shape
    down = attention.down.matrix(dtype_of(attention.down)).clone()
    down[:, -size:] = down[:, -size:][:, order]
    if attention.query_up is None:
        query = down[:, : heads * (nope + size)]
        query.copy_(_each_head(query, heads, nope, order))
        return replace(attention, down=dense_linear(down))
    up = attention.query_up.matrix(dtype_of(attention.query_up))
    return replace(
        attention,
        down=dense_linear(down),
        query_up=dense_linear(_each_head(up, heads, nope, order)),
    )


def _each_head(matrix: torch.Tensor, heads: int, nope: int, order: torch.Tensor) -> torch.Tensor:
    """[in, h*(n+r)] with the rotary columns of every head in another order."""
    by_head = matrix.view(len(matrix), heads, -1).clone()
    by_head[:, :, nope:] = by_head[:, :, nope:][:, :, order]
    return by_head.flatten(1)


def with_attention(layer: DecoderLayer, attention: Mla) -> DecoderLayer:
    return replace(layer, attention=attention)


def missing_temperatures(rope: RopeConfig) -> list[float]:
    """yarn's temperatures that the config may have lost; none where it has its own."""
    if rope.mscale_all_dim:
        return []
    factors = (rope.factor,) if rope.factor > 1 else _KNOWN_FACTORS
    return [yarn_temperature(factor, 1.0) for factor in factors]


def dense_linear(matrix: torch.Tensor) -> Linear:
    """A linear of a transposed weight [in, out]."""
    return Linear.build(unquantized(matrix.t()), matrix.dtype, True)


def dtype_of(linear: Linear) -> torch.dtype:
    return torch.float32 if linear.transposed is None else linear.transposed.dtype


def _words(side: Hidden) -> str:
    return "before the norm" if side is Hidden.BEFORE_NORM else "after the norm"
