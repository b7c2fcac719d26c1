"""Variants of an MTP module, each of which undoes one known export bug. One that is its own inverse
serves as a negative control too: on a good module it makes the bug."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtp_checkpoints.families.contract import Hidden
from mtp_checkpoints.families.parts import Rope
from mtp_export.verify import gates
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.changed_weight import (
    gate_and_up_exchanged,
    halves_exchanged,
    reordered,
)
from mtp_runtime.layers.attention import Attention
from mtp_runtime.layers.gated_delta_net import GatedDeltaNet
from mtp_runtime.layers.gqa import GatedGqa, Gqa, HeadGatedGqa, SlidingGqa
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.moe import Mlp
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import yarn_temperature
from mtp_runtime.models.model import Model, MtpModule
from mtp_runtime.teacher_forcing import Recycle

# yarn factors of released models (V3, and the fixture of this repository), tried if none is set.
_KNOWN_FACTORS = (40.0, 4.0)

LOADING, CONTRACT = "loading", "contract"


@dataclass(frozen=True)
class Variant:
    """A changed module, or a changed way to feed it.

    change: the difference, in words that follow "when". cause: what is wrong with a bundle that
    drafts better with the change. before_norm: the module is fed the target's hidden state from
    before the last norm. depth: the draft position that shows the difference. recycle: feeds the
    next draft in place of the module's own recursion. kind: LOADING where tensors are mixed up,
    CONTRACT where the module is fed something else than it was trained on. by_acceptance: it makes
    drafts more or less certain too, so that only more accepted ones speak for it, by least_rise at
    least. is_left_out: a half of the layer adds nothing. is_of_main: the main model is as wrong.
    wrong: the cause without its tensor.
    """

    name: str
    change: str
    cause: str
    module: MtpModule
    before_norm: bool
    depth: int = 1
    recycle: Recycle | None = None
    kind: str = LOADING
    by_acceptance: bool = False
    least_rise: float = 0.0
    is_left_out: bool = False
    is_of_main: bool = False
    wrong: str = ""


def unchanged(module: MtpModule, depth: int = 1) -> Variant:
    """The module as it is, fed as its contract says."""
    before_norm = module.contract.target_hidden is Hidden.BEFORE_NORM
    return Variant(
        name="own", change="", cause="", module=module, before_norm=before_norm, depth=depth
    )


def layout_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """One variant per known bug that mixes up the tensors of a module."""
    own = unchanged(module)
    yield replace(
        own,
        name="concatenation",
        change="the halves of eh_proj are exchanged",
        cause=causes.CONCATENATION_REVERSED,
        module=replace(module, projection=halves_exchanged(module.projection)),
    )
    yield replace(
        own,
        name="norms",
        change="enorm and hnorm are exchanged",
        cause=causes.NORMS_SWAPPED,
        module=replace(
            module, embedding_norm=module.hidden_norm, hidden_norm=module.embedding_norm
        ),
    )
    for shift, cause in ((1.0, causes.NORMS_OF_ONE_PLUS_W), (-1.0, causes.NORMS_SHIFTED)):
        yield replace(
            own,
            name=f"norms {shift:+.0f}",
            change=f"{'1 is added to' if shift > 0 else '1 is taken from'} every norm's weights",
            cause=cause,
            module=norms_shifted(module, shift),
        )
    yield from _attention_variants(model, own)
    yield from _feed_forward_variants(own)
    if module.embedding is not model.embedding:
        yield replace(
            own,
            name="embedding",
            change="the main model's embedding is used",
            cause=causes.EMBEDDING_OF_ANOTHER_CHECKPOINT,
            module=replace(module, embedding=model.embedding),
            by_acceptance=True,  # one that was trained on may be less certain
            least_rise=gates.LEAST_RISE,  # engines draft with the main model's in any case
        )
    if module.head.linear is not model.head.linear:
        yield replace(
            own,
            name="head",
            change="the main model's head is used",
            cause=causes.HEAD_OF_ANOTHER_CHECKPOINT,
            module=replace(module, head=replace(module.head, outputs=model.head.outputs)),
            by_acceptance=True,
            least_rise=gates.LEAST_RISE,
        )


def _attention_variants(model: Model, own: Variant) -> Iterator[Variant]:
    attention = own.module.layer.attention
    for change, cause, other in mixed_up(attention):
        cause = cause.format(layer=causes.MTP_LAYER)
        yield _with_attention(own, other, name=change, change=change, cause=cause)
    if isinstance(attention, Mla):
        for temperature in missing_temperatures(model.config.rope):
            yield _with_attention(
                own,
                replace(attention, scale=attention.scale * temperature**2),
                name="yarn",
                change=f"attention scores are multiplied by {temperature**2:.3f}",
                cause=causes.YARN_SCALE_DROPPED,
            )
    elif isinstance(attention, Gqa) and not isinstance(attention, GatedGqa):
        yield _with_attention(
            own,
            query_halves_exchanged(attention),
            name="query heads",
            change="the halves of q_proj's rows are exchanged",
            cause=causes.QUERY_HALVES_SWAPPED,
        )


def _feed_forward_variants(own: Variant) -> Iterator[Variant]:
    """Yield the variant of a dense module; those of experts are in experts.py."""
    layer = own.module.layer
    if isinstance(layer.feed_forward, Mlp) and layer.feed_forward.is_gated:
        other = replace(layer, feed_forward=gate_and_up_exchanged(layer.feed_forward))
        yield replace(
            own,
            name="gate and up",
            change="gate_proj and up_proj are exchanged",
            cause=causes.gate_and_up_swapped(f"the feed-forward of {causes.MTP_LAYER}"),
            module=replace(own.module, layer=other),
        )


def _with_attention(
    own: Variant, attention: Attention, *, name: str, change: str, cause: str
) -> Variant:
    layer = replace(own.module.layer, attention=attention)
    return replace(
        own, name=name, change=change, cause=cause, module=replace(own.module, layer=layer)
    )


def mixed_up(attention: Attention) -> Iterator[MixedUp]:
    """Yield an attention with one known mix-up of its tensors undone: the change, in words that
    follow "when", what is wrong with {layer} otherwise, and the attention; nothing of a kind that
    is not listed."""
    undone = _MIXED_UP.get(type(attention))
    return iter(()) if undone is None else undone(attention)


def _latent(attention: Mla) -> Iterator[MixedUp]:
    yield "the rotary rows are interleaved", causes.ROPE_IN_HALVES, interleaved(attention)


def _grouped(attention: Gqa) -> Iterator[MixedUp]:
    yield "the rotary rows are put in halves", causes.ROPE_INTERLEAVED, in_halves(attention)
    yield from _gated(attention)


def _gated(attention: Gqa) -> Iterator[MixedUp]:
    """Yield what does not depend on the order of the queries' rows, which gates are among."""
    keys_first = keys_and_values_exchanged(attention)
    yield "k_proj and v_proj are exchanged", causes.KEYS_AND_VALUES_SWAPPED, keys_first
    if attention.query_norm is not None:
        swapped = replace(attention, query_norm=attention.key_norm, key_norm=attention.query_norm)
        yield "q_norm and k_norm are exchanged", causes.QUERY_AND_KEY_NORMS_SWAPPED, swapped


def _with_gates(attention: GatedGqa) -> Iterator[MixedUp]:
    yield from _gated(attention)
    rows = torch.arange(attention.qkv.weight.shape[0]).view(-1, attention.sizes.head)
    queries, rest = rows[: attention.sizes.queries], rows[attention.sizes.queries :]
    for change, cause, order in (
        (
            "gates are put behind the queries of their heads",
            causes.GATES_BEHIND_ALL_QUERIES,
            torch.stack(queries.chunk(2), dim=1).flatten(0, 1),
        ),
        (
            "queries and gates of q_proj are exchanged",
            causes.QUERIES_AND_GATES_SWAPPED,
            queries.view(-1, 2, queries.shape[1]).flip(1).flatten(0, 1),
        ),
    ):
        yield change, cause, _with_rows(attention, torch.cat([order, rest]).flatten())


def _delta(attention: GatedDeltaNet) -> Iterator[MixedUp]:
    keys = attention.sizes.key_heads * attention.sizes.key
    rows = torch.arange(attention.inputs.weight.shape[0])
    queries, values = (
        torch.cat([rows[:start], rows[start:end].roll((end - start) // 2), rows[end:]])
        for start, end in ((0, 2 * keys), (2 * keys, len(rows)))
    )
    for change, cause, order in (
        ("queries and keys are exchanged", causes.QUERIES_AND_KEYS_SWAPPED, queries),
        ("values and output gates are exchanged", causes.VALUES_AND_GATES_SWAPPED, values),
    ):
        yield change, cause, replace(attention, inputs=reordered(attention.inputs, order))
    gates = torch.arange(2 * attention.sizes.value_heads).roll(attention.sizes.value_heads)
    gates_first = replace(attention, gate_inputs=reordered(attention.gate_inputs, gates))
    yield "in_proj_a and in_proj_b are exchanged", causes.DECAYS_AND_BETAS_SWAPPED, gates_first
    taps = attention.convolution
    for change, cause, other in (
        ("the taps of conv1d are put a token later", causes.TAPS_EARLY, taps.roll(1, -1)),
        ("the taps of conv1d are put a token earlier", causes.TAPS_LATE, taps.roll(-1, -1)),
    ):
        yield change, cause, replace(attention, convolution=other.contiguous())


MixedUp = tuple[str, str, Attention]
_MIXED_UP: dict[type, Callable[[Any], Iterator[MixedUp]]] = {
    Mla: _latent,
    Gqa: _grouped,
    GatedGqa: _with_gates,
    SlidingGqa: _grouped,
    HeadGatedGqa: _grouped,
    GatedDeltaNet: _delta,
}


def contract_variants(module: MtpModule) -> Iterator[Variant]:
    """One variant per field of the module's contract, with the other value."""
    contract = module.contract
    before = contract.target_hidden is Hidden.BEFORE_NORM
    other = Hidden.AFTER_NORM if before else Hidden.BEFORE_NORM
    yield Variant(
        name="target_hidden",
        change=f"the module is fed the target's hidden state {_words(other)}",
        cause=causes.target_hidden_taken(_words(contract.target_hidden)),
        module=replace(module, contract=replace(contract, target_hidden=other)),
        before_norm=not before,
        kind=CONTRACT,
    )
    recycled_before = contract.recycled_hidden is Hidden.BEFORE_NORM
    other = Hidden.AFTER_NORM if recycled_before else Hidden.BEFORE_NORM
    yield Variant(
        name="recycled_hidden",
        change=f"the recycled hidden state is taken {_words(other)}",
        cause=causes.RECYCLED_BEFORE_NORM if recycled_before else causes.RECYCLED_AFTER_NORM,
        module=replace(module, contract=replace(contract, recycled_hidden=other)),
        before_norm=before,
        depth=2,
        kind=CONTRACT,
    )
    yield first_token_variant(module)


def first_token_variant(module: MtpModule) -> Variant:
    """The module with the embedding of position 0 treated the other way."""
    zeroed = module.contract.zero_first_embedding
    return replace(
        unchanged(module),
        kind=CONTRACT,
        name="zero_first_embedding",
        change=f"the first token's embedding is {'kept' if zeroed else 'zeroed'}",
        cause=causes.first_embedding("zeroed" if zeroed else "kept"),
        module=replace(module, contract=replace(module.contract, zero_first_embedding=not zeroed)),
    )


def drafter_variants(module: MtpModule) -> Iterator[Variant]:
    """One variant per known bug of a drafter that runs a correct module."""
    drafter_causes = {
        "target_hidden": causes.DRAFTER_TARGET_HIDDEN,
        "recycled_hidden": causes.DRAFTER_RECYCLES_AFTER_NORM
        if module.contract.recycled_hidden is Hidden.BEFORE_NORM
        else causes.RECYCLED_BEFORE_NORM,
        "zero_first_embedding": causes.DRAFTER_FIRST_TOKEN,
    }
    for variant in contract_variants(module):
        yield replace(variant, cause=drafter_causes[variant.name])
    second = unchanged(module, depth=2)
    yield replace(
        second,
        name="stale",
        change="every draft is fed the target's last hidden state",
        cause=causes.STALE_HIDDEN_STATE,
        recycle=lambda x, normed, hidden: hidden,
    )
    yield replace(
        second,
        name="no recycling",
        change="drafts after the first are fed no hidden state",
        cause=causes.NO_HIDDEN_STATE,
        recycle=lambda x, normed, hidden: torch.zeros_like(hidden),
    )


def norms_shifted(module: MtpModule, shift: float) -> MtpModule:
    """The module with a number added to the weights of all norms around its linears."""

    def shifted(norm: RmsNorm) -> RmsNorm:
        return replace(norm, weight=norm.weight + shift)

    layer = module.layer
    return replace(
        module,
        embedding_norm=shifted(module.embedding_norm),
        hidden_norm=shifted(module.hidden_norm),
        head=replace(module.head, norm=shifted(module.head.norm)),
        layer=replace(
            layer,
            input_norm=None if layer.input_norm is None else shifted(layer.input_norm),
            post_norm=shifted(layer.post_norm),
        ),
    )


def interleaved(attention: Mla) -> Mla:
    """The attention with its rotary rows reordered from two halves into neighbouring pairs."""
    size = attention.sizes.rope
    pairs = torch.arange(size).view(2, -1).t().flatten()
    heads, nope = attention.sizes.heads, attention.sizes.nope
    query = torch.arange(heads * (nope + size)).view(heads, -1)
    query[:, nope:] = query[:, nope:][:, pairs]
    down = torch.arange(attention.down.weight.shape[0])
    down[-size:] = down[-size:][pairs]
    if attention.query_up is None:
        down[: query.numel()] = query.flatten()
        return replace(attention, down=reordered(attention.down, down))
    return replace(
        attention,
        down=reordered(attention.down, down),
        query_up=reordered(attention.query_up, query.flatten()),
    )


def in_halves(attention: Gqa) -> Gqa:
    """The attention with its rotary rows reordered from neighbouring pairs into two halves."""
    size, turned = attention.rope.size, attention.sizes.heads + attention.sizes.kv_heads
    rows = torch.arange(attention.qkv.weight.shape[0]).view(-1, attention.sizes.head)
    rows[:turned, :size] = rows[:turned, :size].view(turned, -1, 2).transpose(1, 2).flatten(1)
    return _with_rows(attention, rows.flatten())


def missing_temperatures(rope: Rope | None) -> list[float]:
    """Temperatures of yarn that the config may have lost; none if it has its own."""
    yarn = None if rope is None else rope.yarn
    if rope is None or (yarn is not None and yarn.mscale_all_dim):
        return []
    factors = (yarn.factor,) if yarn is not None and yarn.factor > 1 else _KNOWN_FACTORS
    return [yarn_temperature(factor, 1.0) for factor in factors]


def _words(side: Hidden) -> str:
    return "before the norm" if side is Hidden.BEFORE_NORM else "after the norm"


def query_halves_exchanged(attention: Gqa) -> Gqa:
    """The attention with the first half of its query heads in the place of the second."""
    rows = torch.arange(attention.qkv.weight.shape[0])
    queries = attention.sizes.heads * attention.sizes.head
    rows[:queries] = rows[:queries].roll(queries // 2)
    return _with_rows(attention, rows)


def keys_and_values_exchanged(attention: Gqa) -> Gqa:
    """The attention with the rows of its keys and of its values in each other's place."""
    rows = torch.arange(attention.qkv.weight.shape[0])
    size = attention.sizes.kv_heads * attention.sizes.head
    rows[-2 * size :] = rows[-2 * size :].roll(size)
    return _with_rows(attention, rows)


def _with_rows(attention: Gqa, rows: torch.Tensor) -> Gqa:
    """The attention with the rows of what it projects to in another order."""
    bias = None if attention.bias is None else attention.bias[rows]
    return replace(attention, qkv=reordered(attention.qkv, rows), bias=bias)
