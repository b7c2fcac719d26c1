"""Drafts with an assistant of the target, which attends to the target's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import SEPARATE_DRAFTS, family_of
from mtp_checkpoints.families.gemma4_assistant import AssistantSpec
from mtp_checkpoints.quantization.stored import StoredWeight, stored_model
from mtp_runtime.cache import Cache, JoinedCaches, LayerCache, LayerCaches, lay_out
from mtp_runtime.drafters.base import DrafterParts, Pass, TargetDraft
from mtp_runtime.drafters.chain import Chain, ChainDrafter, grow
from mtp_runtime.layers.shared_gqa import SharedGqa
from mtp_runtime.loading.draft_folder import (
    DraftFolder,
    DraftTensor,
    layout_on_disk,
    read_draft,
    values_of,
)
from mtp_runtime.models.assistant import Assistant, load_assistant
from mtp_runtime.models.execution import TorchLayers
from mtp_runtime.models.load import Loaded
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request


class AssistantDrafter(ChainDrafter):
    """Drafts by an assistant, which is fed the target's last hidden state of a request.

    Every draft of a step is made from the row before the last token, whose entries and those before
    it are the target's; what a step drafts enters no cache.
    """

    def __init__(self, parts: DrafterParts, module: Assistant | None = None) -> None:
        """Raises UnsupportedError without an assistant."""
        if module is None:
            raise UnsupportedError(
                "Method assistant needs an assistant of the target",
                todo="Give its folder as draft_model",
            )
        self._module = module
        self._kept = dict(_kept(parts.target, parts.cache.main))
        self._pages, self._device = parts.pages, parts.target.device
        self._settings = parts.config.speculation
        self._hidden: dict[int, torch.Tensor] = {}  # [d] by request, of the row before its last

    def observe(self, passes: Sequence[Pass]) -> None:
        """Keep the hidden state of the last row of each."""
        self._hidden |= {p.request.request_id: p.hidden[-1] for p in passes if len(p.hidden)}

    def forget(self, request: Request) -> None:
        self._hidden.pop(request.request_id, None)

    def grow(self, chains: list[Chain]) -> None:
        """Draft one token per chain and round; a chain that has enough leaves."""
        hidden = torch.stack([self._hidden[chain.request.request_id] for chain in chains])
        while True:
            requests = [chain.request for chain in chains]
            spans = [(len(one.tokens) - 2, len(one.tokens) - 1) for one in requests]
            cached = [one.cached for one in requests]
            layout = lay_out(self._pages, cached, spans, self._device)
            last = [(*chain.request.tokens[-1:], *chain.tokens)[-1] for chain in chains]
            tokens = torch.tensor(last, device=self._device)
            x = self._module(tokens, hidden, self._kept, layout)
            normed = self._module.head.normed(x)
            grow(chains, self._module.head, normed, self._settings)
            staying = [at for at, chain in enumerate(chains) if not chain.is_whole]
            if not staying:
                return
            hidden = self._module.recycled(x, normed)[staying]
            chains = [chains[at] for at in staying]


def _kept(target: Model, cache: Cache) -> list[tuple[str, LayerCache]]:
    """Return the caches of the target's layers that others read, by what they are known as."""
    layers = target.layers
    if not isinstance(layers, TorchLayers):
        return []
    caches = _caches(cache)
    pairs = zip(layers.layers, caches, strict=True)
    return [
        (layer.attention.keeps, own)
        for layer, own in pairs
        if isinstance(layer.attention, SharedGqa) and layer.attention.keeps
    ]


def _caches(cache: Cache) -> list[LayerCache]:
    """Return the cache of every layer that torch runs."""
    if isinstance(cache, JoinedCaches):
        return [own for part in cache.parts for own in _caches(part)]
    assert isinstance(cache, LayerCaches), "layers that torch runs"
    return list(cache.layers)


def read_assistant(folder: Path, loaded: Loaded) -> TargetDraft:
    """Read an assistant's folder, for a target.

    Raises InvalidInputError for tensors that contradict its config.json, or a config.json that
    contradicts the target's, UnsupportedError for another draft or target.
    """
    draft, target = read_draft(folder), loaded.model
    if draft.config.get("model_type") not in SEPARATE_DRAFTS:
        raise UnsupportedError(
            "This is no assistant",
            where=folder,
            expected=f"model_type {' or '.join(SEPARATE_DRAFTS)} in config.json",
            found=repr(draft.config.get("model_type"))[:100],
        )
    if not loaded.parallel.group.is_one:
        raise UnsupportedError(
            "Ranks do not divide an assistant",
            where=folder,
            expected="one process",
            found=f"{loaded.parallel.group.split.size} ranks",
        )
    spec = cast(AssistantSpec, family_of(draft.config, draft.tensors))
    own = target.config
    spec.check_target(own.vocab, own.hidden, own.parts, draft.path)
    module = load_assistant(spec, _checked(draft), target)
    return TargetDraft(
        partial(AssistantDrafter, module=module), weights=module, tensors=len(draft.tensors)
    )


def toy(parts: DrafterParts) -> AssistantDrafter:
    """Build a drafter of the target's MTP module."""
    return AssistantDrafter(parts, cast(Assistant, parts.target.mtp_modules[0]))


def _checked(draft: DraftFolder) -> dict[str, DraftTensor]:
    """Return a folder's weights, quantized ones as the values that they stand for
    (InvalidInputError where they contradict config.json)."""
    tensors = draft.tensors
    stored = stored_model(draft.config, tensors)
    problems = stored.differences({name: layout_on_disk(one) for name, one in tensors.items()})
    if problems:
        problems[0].raise_as_error(draft.path, len(problems) - 1)
    return {name: _values(one, tensors) for name, one in stored.weights.items()}


def _values(one: StoredWeight, tensors: Mapping[str, DraftTensor]) -> DraftTensor:
    first, *others = (tensors[own.name] for own in one.tensors)
    if not others:
        return first
    return one.encoded([values_of(tensor) for tensor in (first, *others)]).dequantize()
