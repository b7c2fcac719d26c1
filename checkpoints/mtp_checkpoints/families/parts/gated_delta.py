"""Gated delta net, the linear attention of Qwen3-Next and Qwen3.5: a causal convolution over
queries, keys and values, and a state per value head that every token decays and corrects.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464); transformers' qwen3_next and qwen3_5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import (
    HeadRows,
    ModulePatterns,
    Role,
    TensorMaker,
    TensorSpec,
    weight_name,
)
from mtp_checkpoints.families.fields import Fields
from mtp_kernels.sizes import DeltaSizes

_GATES = ("_ba", "_b", "_a")  # ends of the projections that are small, and that nobody quantizes


@dataclass(frozen=True, slots=True)
class GatedDeltaNetModules:
    """Modules of a gated delta net.

    inputs project the stream, to [queries, keys, values | z | b | a]: b gives the write strengths
    of value heads, a their decays, z gates the output. decay and bias are tensors' full names: the
    logarithms of the decays' rates, and what is added to a.
    """

    inputs: tuple[str, ...]
    convolution: str
    decay: str
    bias: str
    norm: str
    output: str


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Gated delta net over the stream's `hidden` elements.

    is_interleaved: it is stored as Qwen3-Next, with two projections whose rows are sorted by key
    head, each with what belongs to its value heads: [query | key | values | zs] and [bs | as]. Else
    as Qwen3.5, with four projections whose rows are sorted by what they give.
    """

    hidden: int
    sizes: DeltaSizes
    is_interleaved: bool

    patterns: ClassVar[ModulePatterns] = ModulePatterns(
        linears={Role.ATTENTION: "linear_attn.(in_proj_qkvz?|in_proj_z|out_proj)$"},
        other_matrices=("re:.*linear_attn.in_proj_(ba|b|a)$", "re:.*linear_attn.conv1d$"),
        fused={("in_proj_qkv", "in_proj_z"): ("in_proj_qkvz",)},
    )

    @property
    def rope(self) -> None:
        """There are no rotary positions."""
        return None

    @classmethod
    def of(cls, fields: Fields, *, is_interleaved: bool) -> GatedDeltaNet:
        """Read a config.json (InvalidInputError for a missing or unusable size)."""
        key_heads = fields.whole("linear_num_key_heads")
        value_heads = fields.whole("linear_num_value_heads")
        if value_heads % key_heads:
            raise InvalidInputError(
                "config.json's value heads do not fall into groups that share a key head",
                expected=f"linear_num_value_heads divisible by linear_num_key_heads, {key_heads}",
                found=value_heads,
                todo="Correct config.json, or get it again from the checkpoint's source",
            )
        sizes = DeltaSizes(
            key_heads,
            value_heads,
            key=fields.whole("linear_key_head_dim"),
            value=fields.whole("linear_value_head_dim"),
            width=fields.whole("linear_conv_kernel_dim"),
        )
        return cls(fields.whole("hidden_size"), sizes, is_interleaved)

    def modules(self, prefix: str) -> GatedDeltaNetModules:
        """Names of one layer's modules."""
        last = ("qkvz", "ba") if self.is_interleaved else ("qkv", "z", "b", "a")
        return GatedDeltaNetModules(
            inputs=tuple(f"{prefix}.in_proj_{name}" for name in last),
            convolution=f"{prefix}.conv1d",
            decay=f"{prefix}.A_log",
            bias=f"{prefix}.dt_bias",
            norm=f"{prefix}.norm",
            output=f"{prefix}.out_proj",
        )

    @property
    def _head_rows(self) -> dict[str, HeadRows]:
        """Rows of each key head in the projections that give several kinds."""
        heads, key = self.sizes.key_heads, self.sizes.key
        gates = self.sizes.value_heads // heads
        values = gates * self.sizes.value
        return {
            "qkv": HeadRows(heads, (key, key, values), by_head=False),
            "qkvz": HeadRows(heads, (key, key, values, values), by_head=True),
            "ba": HeadRows(heads, (gates, gates), by_head=True),
        }

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield projections, convolution, constants of the decay, and norm of one layer."""
        sizes, names = self.sizes, self.modules(prefix)
        heads, gated = sizes.value_heads, sizes.output
        rows: tuple[int, ...] = (sizes.channels, gated, heads, heads)
        if self.is_interleaved:
            rows = (sizes.channels + gated, 2 * heads)
        for module, count in zip(names.inputs, rows, strict=True):
            shape = (count, self.hidden)
            of_heads = self._head_rows.get(module.rpartition("_")[2])
            role = Role.DELTA_GATES if module.endswith(_GATES) else Role.ATTENTION
            yield make.matrix(module, shape, role)._replace(head_rows=of_heads)
        kernel = (sizes.channels, 1, sizes.width)
        convolution = make.kept(weight_name(names.convolution), kernel, Role.CONVOLUTION)
        yield convolution._replace(head_rows=self._head_rows["qkv"])
        yield make.kept(names.decay, (heads,), Role.DELTA_GATES)
        yield make.kept(names.bias, (heads,), Role.DELTA_GATES)
        yield make.norm(names.norm, sizes.value)
        yield make.matrix(names.output, (self.hidden, gated), Role.ATTENTION)
