"""The changes that are suspected of a bundle whose source is not at hand: the one table of what is
undone to find them, and of what judges that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.released import with_value
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
    less likely.
    """

    change: str
    cause: str
    streamed: StreamedModel
    layer_of: LayerOf = as_it_is
    is_proven: bool = False


@dataclass(frozen=True)
class MainEvidence:
    """Evidence of a main model before anything is undone: how it is read, its config.json, the
    values in that which no release has, beside those of the releases, and its experts' leanings."""

    streamed: StreamedModel
    config: Mapping[str, Any]
    unreleased: Mapping[str, tuple[Any, ...]]
    leanings: Leanings


# Values that no size of a model goes with, as groups go with the number of experts.
_WHATEVER_THE_SIZE = (
    *("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "partial_rotary_factor"),
    *("norm_topk_prob", "route_norm", "routed_scaling_factor", "router_scaling_factor"),
    "moe_router_scaling_factor",
)


def released_variants(evidence: MainEvidence) -> Iterator[MainVariant]:
    """The model with a release's value in the place of one that no release has."""
    for field, values in evidence.unreleased.items():
        for value in values if field in _WHATEVER_THE_SIZE else ():
            config = with_value(evidence.config, field, value)
            try:
                opened = evidence.streamed.opened.described_by(config)
            except MtpExportError:  # the tensors are of no such model
                continue
            yield MainVariant(
                f"{field} is {value}, as in a release",
                causes.unlikely_value(field, value),
                StreamedModel(opened),
            )


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
    "sign of single experts": negated_variants,
}


def main_variants(evidence: MainEvidence) -> Iterator[MainVariant]:
    """Every variant of a main model for which there is a reason."""
    for variants in OF_MAIN.values():
        yield from variants(evidence)
