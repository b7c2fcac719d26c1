"""Feed-forward layers of every kind, loaded by their parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mtp_checkpoints.families import parts
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.parts.feed_forward import BIASED, MlpModules, MoeModules
from mtp_runtime.config import refuse_other_values
from mtp_runtime.layers.moe import Mlp, Moe, SigmoidRouter
from mtp_runtime.layers.tensor_parallel import ParallelMoe
from mtp_runtime.models.layer_loader import LayerLoader


def check_mlp(part: parts.GatedMlp) -> None:
    """Raise UnsupportedError for an activation that is not computed."""
    refuse_other_values({"hidden_act": part.activation}, {"hidden_act": "silu"})


def check_moe(part: parts.Moe) -> None:
    """Raise UnsupportedError for a router or an activation that is not computed."""
    check_mlp(part.expert)
    found = {"scoring_func": part.router.scoring, "topk_method": part.router.method}
    refuse_other_values(found, {"scoring_func": "sigmoid", "topk_method": BIASED})


def load_mlp(loader: LayerLoader, part: parts.GatedMlp, prefix: str) -> Mlp:
    """Load a dense layer's MLP."""
    return loader.split_mlp(MlpModules.under(prefix), range(part.inner))


def load_moe(loader: LayerLoader, part: parts.Moe, prefix: str) -> Moe | ParallelMoe:
    """Load a mixture of experts, routed ones first; of those every rank has some, whole."""
    source, names = loader.source, part.modules(prefix)
    parallel, shares = source.parallel, source.split.parts(part.experts)
    local = shares[source.split.rank]
    shared = tuple(_shared(loader, part, names.shared))
    experts = source.experts(names.experts[local.start : local.stop], loader.mlp, shared)
    router = _router(loader, part.router, names)
    if parallel.group.is_one:
        return Moe(router, experts, len(shared))
    for number, expert in enumerate(names.experts):
        if number not in local:
            source.elsewhere(expert)
    return ParallelMoe(router, experts, shared=len(shared), parts=tuple(shares), parallel=parallel)


def _shared(loader: LayerLoader, part: parts.Moe, names: MlpModules | None) -> Iterator[Mlp]:
    """Yield the shared experts one by one, which lie side by side."""
    if names is None:
        return
    for number in range(part.shared):
        inner = range(number * part.expert.inner, (number + 1) * part.expert.inner)
        yield loader.split_mlp(names, inner, joins=not loader.source.parallel.reduces)


def _router(loader: LayerLoader, part: parts.Router, names: MoeModules) -> SigmoidRouter:
    source = loader.source
    return SigmoidRouter(
        weight=source.raw(weight_name(names.router)).float().t().contiguous(),
        bias=source.raw(names.router_bias).float(),
        routing=part.routing,
        scale=torch.tensor([part.routing.scale], device=source.device),
    )
