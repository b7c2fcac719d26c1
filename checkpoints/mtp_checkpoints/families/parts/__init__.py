"""Parts that decoder layers are made of: each knows its sizes, its tensors and their roles.

A part is frozen, has no weights, and needs no torch; the runtime maps its type to a layer.
"""

from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe, Router, gated_mlps
from mtp_checkpoints.families.parts.gated_delta import GatedDeltaNet
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.head_gated_gqa import HeadGatedGqa
from mtp_checkpoints.families.parts.listed import NOTHING, Entry, Listed, Nothing
from mtp_checkpoints.families.parts.mamba2 import Mamba2
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.parts.normed_moe import NormedMoe
from mtp_checkpoints.families.parts.plain_gqa import PlainGqa
from mtp_checkpoints.families.parts.rope import PLAIN, Rope, Yarn
from mtp_checkpoints.families.parts.shared_gqa import SharedGqa
from mtp_checkpoints.families.parts.sliding_gqa import SlidingGqa
from mtp_checkpoints.families.parts.sparse_mla import Indexer, SparseMla
from mtp_checkpoints.families.parts.ungated import UngatedMlp, UngatedMoe

__all__ = [
    "NOTHING",
    "PLAIN",
    "Entry",
    "GatedDeltaNet",
    "GatedMlp",
    "Gqa",
    "HeadGatedGqa",
    "Indexer",
    "Listed",
    "Mamba2",
    "Mla",
    "Moe",
    "NormedMoe",
    "Nothing",
    "PlainGqa",
    "Rope",
    "Router",
    "SharedGqa",
    "SlidingGqa",
    "SparseMla",
    "UngatedMlp",
    "UngatedMoe",
    "Yarn",
    "gated_mlps",
]
