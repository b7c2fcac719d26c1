"""An MTP module in memory, whose tensors autograd follows: a model of one layer, of texts without
their first tokens, that is fed the main model's rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtp_checkpoints.families.contract import Hidden
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.causes import pointed
from mtp_export.verify.diagnosis.changed_weight import with_parts
from mtp_export.verify.diagnosis.halves import ATTENTION, FEED_FORWARD
from mtp_export.verify.diagnosis.layer_variants import WORDS, half_of
from mtp_export.verify.diagnosis.scaled_variants import OWN_NORMS, PROJECTION
from mtp_export.verify.diagnosis.tensor_variants import Place
from mtp_export.verify.diagnosis.trainable import (
    Trainable,
    every_place,
    followed,
    in_float32,
    in_memory,
    over_texts,
)
from mtp_runtime.models.execution import Head
from mtp_runtime.models.model import MtpModule
from mtp_runtime.streaming import StreamedModel

INPUTS, HEAD = "inputs", "head"
OF_HALVES = WORDS | {INPUTS: "eh_proj, enorm and hnorm", HEAD: OWN_NORMS[-1].name}


def changed_half(module: MtpModule, other: MtpModule) -> str:
    """Return the only half of a module in which another one differs, "" where there are more."""
    pairs = zip(_by_half(module), _by_half(other), strict=True)
    found = {half for (half, one), (_, two) in pairs if one is not two}
    return found.pop() if len(found) == 1 else ""


def harm_of(half: str) -> str:
    """Return the cause of a half of the MTP layer that does harm."""
    return causes.of_tensor(OF_HALVES[half], causes.MTP_LAYER, _harm(half))


def _harm(half: str) -> str:
    return pointed.INPUTS_DO_HARM if half == INPUTS else causes.DOES_HARM


def _by_half(module: MtpModule) -> Iterator[tuple[str, object]]:
    """Yield the parts of a module that have tensors of its own, each behind its half."""
    yield from ((INPUTS, one) for one in (module.embedding_norm, module.hidden_norm))
    yield INPUTS, module.projection
    yield from ((ATTENTION, one) for one in (module.layer.input_norm, module.layer.attention))
    yield from ((FEED_FORWARD, one) for one in (module.layer.post_norm, module.layer.feed_forward))
    yield HEAD, module.head.norm


class TrainableModule(Trainable):
    """A module in the place of layers, which joins embeddings itself."""

    noun: ClassVar[str] = causes.MTP_LAYER

    @classmethod
    def of(cls, streamed: StreamedModel) -> TrainableModule:
        """Read the first module of a model (UnsupportedError for one that autograd does not
        follow)."""
        module = streamed.rest().mtp
        assert module is not None, "a model with a module"
        parts = ("embedding_norm", "hidden_norm", "projection")
        found = {name: with_parts(getattr(module, name), in_float32) for name in parts}
        head = in_memory(module.head)
        module = replace(module, **found, layer=followed(module.layer), head=head)
        return cls((module,), head, None)

    def where(self, number: int) -> str:
        return causes.MTP_LAYER

    def words(self, half: str) -> str:
        return OF_HALVES[half]

    def harm(self, half: str) -> str:
        return _harm(half)

    def places(self, layer: Any) -> Iterator[tuple[str, Place]]:
        yield HEAD, OWN_NORMS[-1]
        for place in (*OWN_NORMS[:-1], PROJECTION):
            yield INPUTS, place
        for place in every_place(layer.layer):
            yield half_of(place), replace(place, path=("layer", *place.path))

    def fed(self, main: Head, states: Tensor, texts: int) -> Tensor:
        """Return the rows that the module is fed at texts without their first tokens, of the last
        rows [b * s, d] of the texts before the main model's head."""
        module: MtpModule = self.layers[0]
        if module.contract.target_hidden is Hidden.AFTER_NORM:
            states = main.normed(states)
        return states.view(texts, -1, states.shape[1])[:, :-1].flatten(0, 1)

    def through(self, layer: Any, x: Tensor, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=x.device).repeat(len(tokens))
        joined, _ = layer.joined(tokens.flatten().to(x.device), x, positions)
        return over_texts(layer.layer, joined, len(tokens))

    def behind(self, number: int, part: Any, x: Tensor, tokens: Tensor) -> tuple[Tensor, Head]:
        return self.through(part, x, tokens), part.head
