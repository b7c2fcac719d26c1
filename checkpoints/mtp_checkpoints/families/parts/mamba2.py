"""Mamba-2, a state space layer: a causal convolution, and a state per head that every token decays,
adds to and reads.

Source: Dao and Gu, Transformers are SSMs (arXiv 2405.21060); transformers' nemotron_h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix, norm
from mtp_kernels.sizes import DeltaSizes


class Mamba2Modules(NamedTuple):
    """Modules of a Mamba-2 layer, and full names of tensors that are of no module.

    inputs projects the stream to [output gates | values | B | C | steps]. rate: logarithms of the
    rates of decay; bias is added to the steps, skip is what a head adds of its own values.
    """

    inputs: str
    convolution: str
    rate: str
    skip: str
    bias: str
    norm: str
    output: str


@dataclass(frozen=True)
class Mamba2(Listed):
    """Mamba-2 over the stream. Heads of a group share B and C, the keys and queries of sizes; the
    norm of what heads read is over the values of a group."""

    sizes: DeltaSizes

    @classmethod
    def of(cls, fields: Fields, name: str) -> Mamba2:
        """Read a config.json (InvalidInputError for a missing or unusable size); name: of the part
        in its layer."""
        groups, heads = fields.whole("n_groups"), fields.whole("mamba_num_heads")
        if heads % groups:
            raise InvalidInputError(
                "config.json's Mamba-2 heads do not fall into groups",
                expected=f"mamba_num_heads divisible by n_groups, {groups}",
                found=heads,
                todo="Correct config.json, or get it again from the checkpoint's source",
            )
        sizes = DeltaSizes(
            groups,
            heads,
            key=fields.whole("ssm_state_size"),
            value=fields.whole("mamba_head_dim"),
            width=fields.whole("conv_kernel"),
        )
        return cls("Mamba-2", name, _entries(fields.whole("hidden_size"), sizes), sizes)

    def modules(self, prefix: str) -> Mamba2Modules:
        """Names of one layer's modules."""
        names = ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")
        return Mamba2Modules(*(f"{prefix}.{name}" for name in names))


def _entries(hidden: int, sizes: DeltaSizes) -> tuple[Entry, ...]:
    heads, inner, channels = sizes.value_heads, sizes.output, sizes.channels
    gates = Role.DELTA_GATES
    return (
        matrix("in_proj", inner + channels + heads, hidden, Role.ATTENTION),
        Entry("conv1d.weight", (channels, 1, sizes.width), Role.CONVOLUTION),
        Entry("conv1d.bias", (channels,), Role.CONVOLUTION),
        Entry("A_log", (heads,), gates),
        Entry("D", (heads,), gates),
        Entry("dt_bias", (heads,), gates),
        norm("norm", inner),
        matrix("out_proj", hidden, inner, Role.ATTENTION),
    )
