"""Variants of an MTP module whose norms or matrices are off by a number: 1 + w, a sign, a factor.

Most of them make the module more or less certain of what it drafts anyway, which its scores show as
a gain: they explain a fault only where more drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.variants import Variant, unchanged
from mtp_runtime.layers.gqa import Gqa
from mtp_runtime.layers.linear import Linear, Weight
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.models.model import Model, MtpModule

# Factors by which a half of eh_proj is tried: the sign, and powers of two, of which a factor
# between two is still mended by the nearer one.
HALF_FACTORS = (-1.0, 0.25, 0.5, 2.0, 4.0)


@dataclass(frozen=True)
class _ColumnsScaled:
    """A weight whose columns are multiplied by factors [in]; nothing of it is copied."""

    weight: Weight
    factors: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [out, in] (ValueError for codes or scales that are damaged)."""
        return self.weight.dequantize(dtype) * self.factors.to(dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T (ValueError as dequantize)."""
        return self.weight.product(x * self.factors.to(x.dtype))


def columns_scaled(linear: Linear, columns: slice, factor: float) -> Linear:
    """The linear with some columns of its weight multiplied by a factor."""
    factors = torch.ones(linear.weight.shape[1])
    factors[columns] = factor
    return Linear(_ColumnsScaled(linear.weight, factors))


def layer_norm_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """The module with the two norms of its layer exchanged; none for a layer without both."""
    layer = module.layer
    if layer.input_norm is None:
        return
    exchanged = replace(layer, input_norm=layer.post_norm, post_norm=layer.input_norm)
    yield replace(
        unchanged(module),
        name="layer norms",
        change="input_layernorm and post_attention_layernorm are exchanged",
        cause=causes.LAYER_NORMS_SWAPPED,
        module=replace(module, layer=exchanged),
    )


def single_norm_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """The module with 1 added to, or taken from, the weights of one norm."""
    for name, norm, with_norm in _norms(module):
        for shift in (1.0, -1.0):
            yield replace(
                unchanged(module),
                name=f"{name} {shift:+.0f}",
                change=f"1 is {'added to' if shift > 0 else 'taken from'} the weights of {name}",
                cause=causes.one_norm_shifted(name, lacks_one=shift > 0),
                module=with_norm(replace(norm, weight=norm.weight + shift)),
                by_acceptance=True,
            )


def _norms(module: MtpModule) -> Iterator[tuple[str, RmsNorm, Callable[[RmsNorm], MtpModule]]]:
    """Yield the norms of a module, each with what makes the module with another in its place."""
    layer, head = module.layer, module.head
    yield "enorm", module.embedding_norm, lambda norm: replace(module, embedding_norm=norm)
    yield "hnorm", module.hidden_norm, lambda norm: replace(module, hidden_norm=norm)
    if layer.input_norm is not None:
        yield (
            "input_layernorm",
            layer.input_norm,
            lambda norm: replace(module, layer=replace(layer, input_norm=norm)),
        )
    yield (
        "post_attention_layernorm",
        layer.post_norm,
        lambda norm: replace(module, layer=replace(layer, post_norm=norm)),
    )
    yield (
        "the norm before the draft's head",
        head.norm,
        lambda norm: replace(module, head=replace(head, norm=norm)),
    )


def half_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """The module with a half of its projection's columns multiplied by a factor."""
    middle = module.projection.weight.shape[1] // 2
    halves = {"embedding": slice(0, middle), "hidden": slice(middle, None)}
    for (half, columns), factor in ((h, f) for h in halves.items() for f in HALF_FACTORS):
        yield replace(
            unchanged(module),
            name=f"{half} half {factor:g}",
            change=f"the {half} half of eh_proj is multiplied by {factor:g}",
            cause=causes.half_scaled(half, 1 / factor),
            module=replace(module, projection=columns_scaled(module.projection, columns, factor)),
            by_acceptance=True,
        )


def output_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """The module with what its attention adds negated; none where its output is no linear."""
    attention = module.layer.attention
    if not isinstance(attention, Mla | Gqa):
        return
    output = columns_scaled(attention.output, slice(None), -1.0)
    layer = replace(module.layer, attention=replace(attention, output=output))
    yield replace(
        unchanged(module),
        name="attention output",
        change="o_proj is negated",
        cause=causes.OUTPUT_NEGATED,
        module=replace(module, layer=layer),
    )
