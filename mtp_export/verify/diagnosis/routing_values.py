"""Values of config.json by which routers weight the experts that they pick, with others in their
place: no shape depends on them, and releases of other sizes have others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_runtime.layers.moe import Router, SigmoidRouter, SoftmaxRouter

PICKED, NORMALISED, SCALE = "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor"
_FACTORS = (0.5, 2.0)


def routing_variants(router: Router, experts: int) -> Iterator[tuple[str, str, Router]]:
    """Yield change, cause and router with another value, of one that picks among so many
    experts."""
    if not isinstance(router, SigmoidRouter | SoftmaxRouter):
        return
    own = router.routing
    picked = own.experts_per_token
    groups = (experts // own.groups) * own.groups_per_token
    for number in sorted({picked // 2, picked - 1, picked + 1, 2 * picked} - {picked}):
        if 1 <= number <= min(experts, groups):
            routing = own._replace(experts_per_token=number)
            yield _told(PICKED, picked, number, replace(router, routing=routing))
    flipped = replace(router, routing=own._replace(normalises=not own.normalises))
    yield _told(NORMALISED, own.normalises, not own.normalises, flipped)
    for factor in _FACTORS:
        scaled = replace(router, routing=own._replace(scale=own.scale * factor))
        if isinstance(scaled, SigmoidRouter):
            scaled = replace(scaled, scale=scaled.scale * factor)
        yield _told(SCALE, own.scale, own.scale * factor, scaled)


def _told(field: str, found: object, other: object, router: Router) -> tuple[str, str, Router]:
    return f"{field} is {other}", causes.likelier_value(field, found, other), router
