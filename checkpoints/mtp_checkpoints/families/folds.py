"""Places of a layer where scales fold: what a tensor is divided by, others are multiplied with, and
the layer computes the same.

Source: Lin et al., AWQ, 2023, section 3.2. A router takes what experts take, and is scaled too.
"""

from __future__ import annotations

from typing import NamedTuple

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.parts.feed_forward import Moe, gated_mlps
from mtp_checkpoints.families.spec import LayerSpec


class Fold(NamedTuple):
    """Weights [N, K] that alone take what another tensor makes: a norm's weight [K], or the rows of
    a weight [K, n]; named as they are released."""

    divided: str
    multiplied: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """All that scales are folded into."""
        return (self.divided, *self.multiplied)


def folds_of(layer: LayerSpec) -> tuple[Fold, ...]:
    """Return the folds around a layer's experts, or the one MLP of a dense layer: that of the norm
    before them, then those of up before down, of experts whose inner values nothing bounds.

    Raises UnsupportedError for a layer without gated experts, or without a norm before them.
    """
    prefix, why = layer.feed_forward_prefix, ""
    experts = gated_mlps(layer.feed_forward, prefix)
    if not experts:
        why = "no experts or MLP with gates of silu"
    elif layer.norms_after:
        why = "norms after its parts, and none before"
    if why:
        raise UnsupportedError(
            f"The scales of AWQ have nothing to fold into: {layer.prefix} has {why}",
            expected="a layer with a norm before its experts or its MLP",
            found=f"{layer.prefix}, {why}",
            todo="Use --method gptq",
        )
    takers = list[str]()
    if isinstance(layer.feed_forward, Moe):
        names = layer.feed_forward.modules(prefix)
        takers += [names.router, *filter(None, [names.shared_gate])]
    takers += [module for one, _ in experts for module in (one.gate, one.up)]
    norm = Fold(weight_name(layer.post_norm), tuple(map(weight_name, takers)))
    inner = (
        Fold(weight_name(one.up), (weight_name(one.down),)) for one, limit in experts if not limit
    )
    return (norm, *inner)
