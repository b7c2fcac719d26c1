"""A module run by torch, for the sake of its variants: its weights are expanded once, where
compiled kernels would pack all of them for each variant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mtp_checkpoints.formats import unquantized
from mtp_export.verify.diagnosis.changed_weight import with_parts
from mtp_export.verify.evidence.corpus import Corpus
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import StoredHalves
from mtp_runtime.layers.moe import LatentMoe, Mlp, Moe
from mtp_runtime.loading.on_demand import StoredExperts
from mtp_runtime.models.execution import TorchExecution
from mtp_runtime.models.model import MtpModule

# Of the feed-forward in float32; larger ones stay packed as they are stored.
MOST_EXPANDED_BYTES = 1 << 31
_FLOAT_BYTES = 4


def by_torch(corpus: Corpus) -> Corpus:
    """Return the corpus with its first module run by torch, unless that is too large expanded; one
    whose experts are read as they are picked is run by torch as it is."""
    module = corpus.module
    forward = module.layer.feed_forward
    if isinstance(forward, Moe | LatentMoe) and isinstance(forward.experts, StoredExperts):
        return corpus
    if _expanded_bytes(module) > MOST_EXPANDED_BYTES:
        return corpus
    outputs = replace(module.head.outputs, execution=TorchExecution())
    module = replace(
        module,
        head=replace(module.head, outputs=outputs),
        projection=with_parts(module.projection, _in_float32),
        layer=with_parts(module.layer, _in_float32),
    )
    model = replace(corpus.model, mtp_modules=(module, *corpus.model.mtp_modules[1:]))
    return replace(corpus, model=model, given=corpus.texts, given_states=corpus.states)


def _in_float32(part: Any) -> Any:
    """A linear, or the halves of kv_b_proj, in float32; None of anything else."""
    if isinstance(part, Linear):
        return Linear(unquantized(part.matrix(torch.float32).t().contiguous()))
    return part.dense if isinstance(part, StoredHalves) else None


def _expanded_bytes(module: MtpModule) -> int:
    forward = module.layer.feed_forward
    if isinstance(forward, Moe | LatentMoe):
        one, count = next(iter(forward.experts.each([0]))), len(forward.experts)
    else:
        assert isinstance(forward, Mlp), "the feed-forwards that there are"
        one, count = forward, 1
    shapes = (one.gate_up.weight.shape, one.down.weight.shape)
    return count * sum(rows * columns for rows, columns in shapes) * _FLOAT_BYTES
