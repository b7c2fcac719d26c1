"""Inputs of the linears of layers along texts; of MTP layers at all depths of drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from mtp_checkpoints.families import parts
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.spec import LayerSpec
from mtp_checkpoints.formats import EncodedWeight
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.linear import Linear, Stacked, Weight, Windowed
from mtp_runtime.layers.moe import Mlp, Moe
from mtp_runtime.loading.on_demand import StoredExperts
from mtp_runtime.models.model import MtpModule
from mtp_runtime.teacher_forcing import DraftInputs, Texts, draft_states

DEPTHS = 3  # of drafts: what a module takes of itself is in it
ROW_DTYPE = torch.bfloat16  # of inputs on disk

T = TypeVar("T")
See = Callable[[str, Tensor], None]  # takes the name of an input, and rows of it


@dataclass(frozen=True)
class Observed(Linear):
    """A linear whose inputs are seen."""

    name: str = ""
    see: See = lambda name, rows: None

    def __call__(self, x: Tensor) -> Tensor:
        self.see(self.name, x)
        return super().__call__(x)


@dataclass(frozen=True)
class ObservedPart(Generic[T]):
    """A part of a feed-forward whose inputs are seen: a router, which takes those of all experts,
    or an MLP."""

    part: Callable[[Tensor], T]
    name: str
    see: See

    def __call__(self, x: Tensor) -> T:
        """Return what the part makes of rows x [T, d]."""
        self.see(self.name, x)
        return self.part(x)


@dataclass(frozen=True)
class Observation:
    """MTP modules, and the inputs that are wanted of their linears.

    experts: the name that the input of a module's experts, or of its MLP, gets; "" where nobody
    asks for it.
    linears: names of tensors of others; what goes into them is named by input_names.
    """

    modules: Sequence[MtpModule]
    experts: Sequence[str]
    linears: Collection[str]

    @torch.inference_mode()
    def rows(self, texts: Texts, hidden: Tensor) -> dict[str, Tensor]:
        """Return the rows [n, K] of each input along texts, by its name: of every token, at every
        depth of a draft, fed as if all drafts before had been accepted. hidden [T, d] is what the
        first module is fed of the main model."""
        kept = defaultdict[str, list[Tensor]](list)

        def see(name: str, x: Tensor) -> None:
            kept[name].append(x.to(ROW_DTYPE).cpu())

        modules = [
            self._observed(module, experts, see)
            for module, experts in zip(self.modules, self.experts, strict=True)
        ]
        hidden = hidden.float().to(modules[0].embedding.device)
        inputs = DraftInputs(texts, hidden, texts.anchors(0), by_half=True)
        draft_states(modules, inputs, DEPTHS)
        return {name: torch.cat(parts) for name, parts in kept.items()}

    def _observed(self, module: MtpModule, name: str, see: See) -> MtpModule:
        layer = module.layer
        feed_forward: Any = layer.feed_forward
        if isinstance(feed_forward, Moe):
            experts = feed_forward.experts
            if name:
                router: Any = ObservedPart(feed_forward.router, name, see)
                feed_forward = replace(feed_forward, router=router)
            if isinstance(experts, StoredExperts):  # all of them may not fit into memory
                feed_forward = replace(feed_forward, experts=replace(experts, kept=None))
        else:
            feed_forward = seen(feed_forward, self.linears, see)
            feed_forward = ObservedPart(feed_forward, name, see) if name else feed_forward
        attention = seen(layer.attention, self.linears, see)
        layer = replace(layer, attention=attention, feed_forward=feed_forward)
        return replace(module, layer=layer)


def seen(part: T, wanted: Collection[str], see: See) -> T:
    """Return a part of a layer with those of its linears observed that hold wanted tensors."""
    if isinstance(part, Linear):
        names = _tensor_names(part.weight)
        if not any(name in wanted for name in names):
            return part
        return cast(T, Observed(part.weight, part.transposed, name=names[0], see=see))
    if not is_dataclass(part):
        return part
    owned = {field.name: getattr(part, field.name) for field in fields(part)}
    changed = {
        name: new for name, own in owned.items() if (new := seen(own, wanted, see)) is not own
    }
    return replace(part, **changed) if changed else part  # type: ignore[type-var]


def beside_experts(layer: DecoderLayer) -> list[object]:
    """Return the parts of a layer that are no experts, as experts_of has them: attention, and an
    MLP of another kind."""
    feed_forward = layer.feed_forward
    has_experts = isinstance(feed_forward, Moe) or type(feed_forward) is Mlp  # others inherit
    return [layer.attention, *([] if has_experts else [feed_forward])]


def input_names(parts: Iterable[object]) -> dict[str, str]:
    """Return the name of what goes into each linear of parts of layers, by each of its tensors:
    that of the first tensor that is multiplied with it."""
    return {
        name: names[0]
        for part in parts
        for linear in linears_of(part)
        for names in [_tensor_names(linear.weight)]
        for name in names
    }


class ExpertWeights(NamedTuple):
    """Names of an expert's weights; down takes what the other two make, bounded by a limit."""

    gate: str
    up: str
    down: str
    limit: float | None


def experts_of(layer: LayerSpec) -> tuple[str, list[ExpertWeights]]:
    """Return the prefix of a layer's feed-forward, by which the input of its experts is named, and
    their weights, shared ones last, of which a dense MLP is one; "" and none without gates."""
    prefix = layer.feed_forward_prefix
    experts = parts.gated_mlps(layer.feed_forward, prefix)
    return prefix if experts else "", [
        ExpertWeights(weight_name(own.gate), weight_name(own.up), weight_name(own.down), limit)
        for own, limit in experts
    ]


def linears_of(part: object) -> Iterator[Linear]:
    """Yield the linears of a part of a layer, but for those of experts."""
    if isinstance(part, Linear):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from linears_of(getattr(part, field.name))


def _tensor_names(weight: Weight) -> list[str]:
    """Return the tensors with the codes of a weight."""
    if isinstance(weight, Stacked):
        return [name for part in weight.parts for name in _tensor_names(part)]
    if isinstance(weight, Windowed):
        return _tensor_names(weight.whole)
    if isinstance(weight, EncodedWeight) and weight.origin is not None:
        return [weight.origin.name]
    return []
