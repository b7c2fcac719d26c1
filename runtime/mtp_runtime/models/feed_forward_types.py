"""Feed-forward layers: what loads them of their parts, and what the kernels pack of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from mtp_checkpoints.families import parts
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.parts.feed_forward import (
    BIASED,
    GREEDY,
    SOFTMAX,
    MlpModules,
    MoeModules,
)
from mtp_checkpoints.families.parts.ungated import UngatedModules, UngatedMoeModules
from mtp_runtime.config import refuse_other_values
from mtp_runtime.layers.moe import (
    GeluMlp,
    LatentMoe,
    Mlp,
    Moe,
    Router,
    SigmoidRouter,
    SoftmaxRouter,
    UngatedMlp,
)
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.normed_moe import NormedMoe, NormedRouter
from mtp_runtime.layers.tensor_parallel import ParallelMoe
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.layer_loader import LayerLoader, Stacks

_GELU = "gelu_pytorch_tanh"


def check_dense(part: parts.GatedMlp) -> None:
    """Raise UnsupportedError for an activation of a dense layer that is not computed."""
    if part.activation != _GELU:
        check_mlp(part)


def check_mlp(part: parts.GatedMlp) -> None:
    """Raise UnsupportedError for an activation of an expert that is not computed."""
    refuse_other_values({"hidden_act": part.activation}, {"hidden_act": "silu"})


def check_moe(part: parts.Moe) -> None:
    """Raise UnsupportedError for a router or an activation that is not computed."""
    check_mlp(part.expert)
    router = part.router
    if (router.scoring, router.method) != (SOFTMAX, GREEDY):
        described = {"scoring_func": router.scoring, "topk_method": router.method}
        refuse_other_values(described, {"scoring_func": "sigmoid", "topk_method": BIASED})


def load_mlp(loader: LayerLoader, part: parts.GatedMlp, prefix: str) -> Mlp:
    """Load a dense layer's MLP."""
    mlp = loader.split_mlp(MlpModules.under(prefix), range(part.inner))
    if part.activation == _GELU:
        return GeluMlp(mlp.gate_up, mlp.down)
    return replace(mlp, limit=part.limit)


def load_moe(loader: LayerLoader, part: parts.Moe, prefix: str) -> Moe | ParallelMoe:
    """Load a mixture of experts, routed ones first; of those every rank has some, whole."""
    source, names = loader.source, part.modules(prefix)
    parallel, shares = source.parallel, source.split.parts(part.experts)
    local = shares[source.split.rank]
    shared = tuple(_shared(loader, part, names.shared))
    load = partial(loader.mlp, limit=part.expert.limit)
    experts = source.experts(names.experts[local.start : local.stop], load, shared)
    router = _router(loader, part.router, names)
    if parallel.group.is_one:
        return Moe(router, experts, len(shared), _shared_gate(source, names))
    if names.shared_gate is not None:
        loader.refuse_ranks(prefix, "shared experts behind a gate")
    for number, expert in enumerate(names.experts):
        if number not in local:
            source.elsewhere(expert)
    return ParallelMoe(router, experts, shared=len(shared), parts=tuple(shares), parallel=parallel)


def _shared(loader: LayerLoader, part: parts.Moe, names: MlpModules | None) -> Iterator[Mlp]:
    """Yield the shared experts one by one, which lie side by side."""
    if names is None:
        return
    together = part.shared_mlp
    assert together is not None, "names of shared experts"
    each = together.inner // part.shared
    for number in range(part.shared):
        inner = range(number * each, (number + 1) * each)
        mlp = loader.split_mlp(names, inner, joins=not loader.source.parallel.reduces)
        yield replace(mlp, limit=together.limit)


def _shared_gate(source: WeightSource, names: MoeModules) -> torch.Tensor | None:
    """Load the gate [d] of the shared experts, where they have one."""
    if names.shared_gate is None:
        return None
    return source.raw(weight_name(names.shared_gate)).float().flatten()


def load_ungated_mlp(loader: LayerLoader, part: parts.UngatedMlp, prefix: str) -> UngatedMlp:
    """Load a dense layer's MLP without a gate."""
    loader.refuse_ranks(prefix, "MLPs without gates")
    return loader.ungated_mlp(UngatedModules.under(prefix))


def load_ungated_moe(loader: LayerLoader, part: parts.UngatedMoe, prefix: str) -> Moe | LatentMoe:
    """Load a mixture of experts without gates, routed ones first."""
    loader.refuse_ranks(prefix, "experts without gates")
    source, names = loader.source, part.modules(prefix)
    shared = (loader.ungated_mlp(names.shared),)
    experts = source.experts(names.experts, loader.ungated_mlp, shared)
    router = _router(loader, part.router, names)
    if names.latent is None:
        return Moe(router, experts, len(shared))
    into, out = map(source.linear, names.latent)
    return LatentMoe(router, experts, len(shared), into=into, out=out)


def check_normed_moe(part: parts.NormedMoe) -> None:
    """Raise UnsupportedError for an activation that is not computed."""
    refuse_other_values({"hidden_act": part.expert.activation}, {"hidden_act": _GELU})


def load_normed_moe(loader: LayerLoader, part: parts.NormedMoe, prefix: str) -> NormedMoe:
    """Load a mixture of experts between norms of its own."""
    loader.refuse_ranks(prefix, "experts beside an MLP")
    source, names, around = loader.source, part.modules(prefix), part.around(prefix)
    scale = source.raw(around.scale).float() * part.expert.hidden**-0.5
    router = NormedRouter(
        RmsNorm.build(scale, loader.facts.norm_eps),
        source.raw(weight_name(names.router)).float().t().contiguous(),
        source.raw(around.expert_scales).float(),
        part.router.routing,
    )
    experts = source.experts(names.experts, partial(_gelu_mlp, loader), ())
    return NormedMoe(router, loader.norm(around.norm), experts, loader.norm(around.output_norm))


def _gelu_mlp(loader: LayerLoader, names: MlpModules) -> GeluMlp:
    mlp = loader.mlp(names)
    return GeluMlp(mlp.gate_up, mlp.down)


def _router(
    loader: LayerLoader, part: parts.Router, names: MoeModules | UngatedMoeModules
) -> Router:
    source = loader.source
    weight = source.raw(weight_name(names.router)).float().t().contiguous()
    if names.router_bias is None:
        return SoftmaxRouter(weight, part.routing)
    return SigmoidRouter(
        weight=weight,
        bias=source.raw(names.router_bias).float(),
        routing=part.routing,
        scale=torch.tensor([part.routing.scale], device=source.device),
    )


def mlp_stacks(part: parts.GatedMlp, prefix: str, max_positions: int) -> Stacks | None:
    if part.limit is not None or part.activation == _GELU:
        return None
    names = MlpModules.under(prefix)
    return ((names.gate, names.up),)


def moe_stacks(part: parts.Moe, prefix: str, max_positions: int) -> Stacks | None:
    names, together = part.modules(prefix), part.shared_mlp
    if part.expert.limit is not None:
        return None
    if together is not None and together != replace(
        part.expert, inner=part.shared * part.expert.inner
    ):
        return None
    shared = () if names.shared is None else (names.shared,)
    return ((mlp.gate, mlp.up) for mlp in (*names.experts, *shared))
