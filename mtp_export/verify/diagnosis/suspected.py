"""The changes that are suspected of a bundle whose source is not at hand: the one table of what is
undone to find them, and of what judges that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.released import with_value
from mtp_checkpoints.families.signs import text_fields
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.leanings import Leanings, Negated
from mtp_export.verify.diagnosis.scaled_variants import (
    half_variants,
    norm_exchanges,
    single_tensor_variants,
    size_variants,
)
from mtp_export.verify.diagnosis.variants import Variant, contract_variants, layout_variants
from mtp_export.verify.evidence.likelihood import LayerOf, as_it_is
from mtp_runtime.models.model import Model, MtpModule
from mtp_runtime.streaming import StreamedModel

# Of an MTP module, by what is changed; acceptance judges the variants of each. Those of its experts
# and router, which share what each expert computes, are in experts.py.
OF_MODULE: dict[str, Callable[[Model, MtpModule], Iterable[Variant]]] = {
    "tensors mixed up": layout_variants,
    "contract": lambda model, module: contract_variants(module),
    "two norms exchanged": norm_exchanges,
    "sign and scale of the halves of eh_proj": half_variants,
    "size of all linears": size_variants,
    "single tensors": single_tensor_variants,
}


def module_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """Every variant of a module but those of its experts."""
    for variants in OF_MODULE.values():
        yield from variants(model, module)


@dataclass(frozen=True)
class MainVariant:
    """A main model with one change undone.

    change: the difference, in words that follow "when". cause: what is wrong with a bundle that
    finds plain text likelier with the change. layer_of: what runs in place of each layer.
    is_proven: something else tells that it is wrong, so that it suffices that plain text is not
    less likely. is_guessed: a value that no release says, which must gain on some texts to be tried
    on all, and more than by chance.
    """

    change: str
    cause: str
    streamed: StreamedModel
    layer_of: LayerOf = as_it_is
    is_proven: bool = False
    is_guessed: bool = False


@dataclass(frozen=True)
class MainEvidence:
    """Evidence of a main model before anything is undone: how it is read, its config.json, the
    values in that which no release has, beside those of the releases, None where none was read, and
    its experts' leanings."""

    streamed: StreamedModel
    config: Mapping[str, Any]
    unreleased: Mapping[str, tuple[Any, ...]] | None
    leanings: Leanings


# Values that no size of a model goes with, as groups go with the number of experts.
_WHATEVER_THE_SIZE = (
    *("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "partial_rotary_factor"),
    *("norm_topk_prob", "route_norm", "routed_scaling_factor", "router_scaling_factor"),
    "moe_router_scaling_factor",
)


# Groups of experts, of which others go with other numbers of them.
_GROUPS, _PICKED_GROUPS = "n_group", "topk_group"


def released_variants(evidence: MainEvidence) -> Iterator[MainVariant]:
    """The model with a release's value in the place of one that no release has."""
    for field, values in (evidence.unreleased or {}).items():
        for value in values if field in _WHATEVER_THE_SIZE else ():
            if (streamed := _described(evidence, field, value)) is not None:
                change, cause = f"{field} is {value}, as in a release", causes.unlikely_value
                yield MainVariant(change, cause(field, value), streamed)


def group_variants(evidence: MainEvidence) -> Iterator[MainVariant]:
    """The model with other numbers of groups of experts, those of releases and twice as many picked
    ones, where a number is no release's, or none was read: fewer are no better."""
    released, text = evidence.unreleased, text_fields(evidence.config)
    if released is not None and not released.keys() & {_GROUPS, _PICKED_GROUPS}:
        return
    for field in (_GROUPS, _PICKED_GROUPS):
        if not isinstance(own := text.get(field), int):
            continue
        beside = (2 * own,) if field == _PICKED_GROUPS else ()
        for value in sorted({*beside, *(released or {}).get(field, ())} - {own}):
            if (streamed := _described(evidence, field, value)) is not None:
                cause = causes.likelier_value(field, own, value)
                yield MainVariant(f"{field} is {value}", cause, streamed, is_guessed=True)


def _described(evidence: MainEvidence, field: str, value: object) -> StreamedModel | None:
    """The model as a config.json with another value describes it; None where its tensors are of no
    such model, and where it is the same."""
    opened = evidence.streamed.opened
    try:
        other = opened.described_by(with_value(evidence.config, field, value))
    except MtpExportError:
        return None
    return None if other.spec == opened.spec else StreamedModel(other)


def negated_variants(evidence: MainEvidence) -> Iterator[MainVariant]:
    """The model with one expert negated that leans away from the others."""
    leanings = evidence.leanings
    for one in leanings.away:
        usual = leanings.usual(one)
        yield MainVariant(
            f"the output of {one.name} is negated",
            causes.expert_leans_away(one.name, one.cosine.value, usual),
            evidence.streamed,
            Negated(one.layer, one.experts),
            is_proven=True,
        )


# Of a main model; the likelihood of plain text judges the variants of each.
OF_MAIN: dict[str, Callable[[MainEvidence], Iterable[MainVariant]]] = {
    "config values of the releases": released_variants,
    "groups of experts": group_variants,
    "sign of single experts": negated_variants,
}


def main_variants(evidence: MainEvidence) -> Iterator[MainVariant]:
    """Every variant of a main model for which there is a reason."""
    for variants in OF_MAIN.values():
        yield from variants(evidence)
