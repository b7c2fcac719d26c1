"""Gemma-4's assistant: a draft of Gemma-4's layers, which read keys and values of its target,
between projections from the target's hidden states and back to them.

Source: transformers' gemma4_assistant and gemma4_unified_assistant; vLLM's gemma4_mtp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import Role, weight_name
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gemma4 import ASSISTANT, sandwich_layers, usual_fields
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.parts.listed import Entry, matrix
from mtp_checkpoints.families.parts.shared_gqa import SharedGqa
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="transformers, assisted generation")
_OF_VLLM = "draft_model"  # in its gemma4_mtp
_UNRELEASED = ("enable_moe_block", "use_double_wide_mlp", "hidden_size_per_layer_input")


@dataclass(frozen=True)
class AssistantSpec(ModelSpec):
    """Description of an assistant.

    target_hidden: elements of the target's hidden states. clusters: those of the vocabulary, of
    which `picked` have logits; 0 where all tokens have.
    """

    target_hidden: int = 0
    clusters: int = 0
    picked: int = 0

    entering: ClassVar = "pre_projection"
    leaving: ClassVar = "post_projection"
    centroids: ClassVar = "masked_embedding.centroids"
    ordering: ClassVar = "masked_embedding.token_ordering"

    def names_of(self, module: str, mtp_layer: int | None) -> list[str]:
        """Return a module's name, and that which vLLM has for it."""
        return [module, f"{_OF_VLLM}.{module.removeprefix('model.')}"]

    def check_target(self, vocab: int, hidden: int, parts: Iterable[object], where: object) -> None:
        """Refuse an assistant of another target: by sizes, and by the keys and values that it reads
        (InvalidInputError). parts: those of the target's layers; where: the assistant's place."""
        shared = [part for part in parts if isinstance(part, SharedGqa)]
        found = {
            "vocab_size": vocab,
            "backbone_hidden_size": hidden,
            **{part.keeps: (part.sizes.kv_heads, part.sizes.head) for part in shared if part.keeps},
        }
        read = [part for part in self.parts if isinstance(part, SharedGqa)]
        wanted = {
            "vocab_size": self.facts.vocab,
            "backbone_hidden_size": self.target_hidden,
            **{part.reads: (part.sizes.kv_heads, part.sizes.head) for part in read},
        }
        for what, value in wanted.items():
            if found.get(what) != value:
                raise InvalidInputError(
                    f"The assistant was made for another target: they differ in {what}",
                    where=where,
                    expected=value,
                    found=found.get(what, "nothing of the kind"),
                    todo="Give the assistant that was released with this target",
                )


def spec(fields: Fields) -> AssistantSpec:
    """Describe a config.json.

    Raises InvalidInputError for clusters of different sizes, UnsupportedError for layers that no
    release has, and what a model's config.json raises.
    """
    outer = fields.without_nulls().with_defaults(tie_word_embeddings=True)
    part = TextPart.of(outer, "model", carried=())
    known = usual_fields(part.fields)
    for key in _UNRELEASED:
        refuse_set(known, key)
    known = known.with_values(
        num_kv_shared_layers=known.whole("num_hidden_layers"),
        sliding_window=known.whole("sliding_window") + 1,  # transformers' mask includes its end
    )
    layers = sandwich_layers(known, "model")
    described = listed_decoder(replace(part, fields=known), layers, (), _CONTRACT)
    vocab, clusters, picked = described.facts.vocab, 0, 0
    if outer.flag("use_ordered_embeddings", False):
        clusters = outer.whole("num_centroids", 2048, maximum=vocab)
        picked = outer.whole("centroid_intermediate_top_k", 32, maximum=clusters)
        if vocab % clusters:
            raise InvalidInputError(
                "config.json's vocabulary does not fall into clusters",
                expected=f"vocab_size divisible by num_centroids, {clusters}",
                found=vocab,
            )
    target_hidden = outer.whole("backbone_hidden_size", 1536)
    sizes = (described.facts.hidden, vocab, target_hidden, clusters)
    return AssistantSpec(
        **vars(replace(described, more=tuple(_around(*sizes)), drafts_apart=_IS_DRAFT))
        | {"uncomputed": _IS_DRAFT, "draft_method": ASSISTANT},
        target_hidden=target_hidden,
        clusters=clusters,
        picked=picked,
    )


_IS_DRAFT = "it is a draft in a checkpoint of its own, which reads keys and values of its target"


def _around(hidden: int, vocab: int, target_hidden: int, clusters: int) -> Iterator[Entry]:
    """Yield the tensors around the layers: projections, and the clusters of the vocabulary."""
    role = Role.MTP_PROJECTION
    yield matrix(AssistantSpec.entering, hidden, 2 * target_hidden, role)
    yield matrix(AssistantSpec.leaving, target_hidden, hidden, role)
    if clusters:
        yield Entry(weight_name(AssistantSpec.centroids), (clusters, hidden), Role.VOCABULARY)
        yield Entry(AssistantSpec.ordering, (vocab,), Role.VOCABULARY, (DType.I64,))


# The assistants of Gemma-4-E2B, E4B, 26B-A4B and 31B: config.json in notes on porting them. Of the
# unified one no release was read.
RELEASES: Releases = {
    "gemma4_assistant": {"rms_norm_eps": (1e-6,), "rope_theta": (1e6, 10000.0)},
    "gemma4_unified_assistant": None,
}
