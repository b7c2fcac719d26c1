"""Head of a model whose embedding is its head, as a tensor of its own: a head that is quantized
leaves the embedding, a lookup table, as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.signs import text_fields
from mtp_checkpoints.families.spec import PLAIN_HEADS, ModelSpec
from mtp_checkpoints.tensors.reader import Checkpoint

TIED = "tie_word_embeddings"
_TEXT = "text_config"
UNTIED_HEAD = weight_name(PLAIN_HEADS[0])


def spare_head(family: ModelSpec) -> str | None:
    """Return the head that a checkpoint stores beside a tied embedding, which is used in its place;
    None where it stores none."""
    stored = any(entry.name == UNTIED_HEAD for entry in family.more)
    return UNTIED_HEAD if stored and family.head == family.embedding else None


def with_untied_head(checkpoint: Checkpoint, family: ModelSpec) -> Checkpoint:
    """Return a checkpoint as if the head of a tied embedding were a tensor of its own, over the
    same bytes, with a config.json that says so; the checkpoint itself where it has one."""
    if family.head != family.embedding:
        return checkpoint
    embedding = weight_name(family.embedding)
    shards = (
        replace(
            shard,
            tensors=(
                *(one for one in shard.tensors if one.name != UNTIED_HEAD),
                *(one._replace(name=UNTIED_HEAD) for one in shard.tensors if one.name == embedding),
            ),
        )
        for shard in checkpoint.shards
    )
    return replace(checkpoint, shards=tuple(shards), config=_untied(checkpoint.config))


def with_head_like(checkpoint: Checkpoint, main: Checkpoint) -> Checkpoint:
    """Return a checkpoint with its head as the main model's is that was made of it: a tensor of its
    own where that has one, in whatever format, and does not tie it all the same."""
    tied = main.config.get(TIED) or text_fields(main.config).get(TIED)
    if tied or not any(name.startswith(f"{PLAIN_HEADS[0]}.") for name in main.tensors):
        return checkpoint
    return with_untied_head(checkpoint, family_of(checkpoint.config, checkpoint.tensors))


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    untied = {**config, TIED: False}
    if _TEXT in config:
        untied[_TEXT] = {**config[_TEXT], TIED: False}
    return untied
