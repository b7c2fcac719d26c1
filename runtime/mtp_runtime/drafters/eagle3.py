"""Drafts with an EAGLE-3 draft, whose cache lies beside the target's, in the same pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.eagle3 import Eagle3Family
from mtp_runtime.drafters.base import DrafterParts, ForcedTexts, Pass, ScoredVariant, TargetDraft
from mtp_runtime.drafters.mtp import ModuleDrafter
from mtp_runtime.loading.draft_folder import DraftFolder, read_draft
from mtp_runtime.models.eagle3 import Eagle3Module, ReducedHead, checked_tensors, eagle3_module
from mtp_runtime.models.load import Loaded
from mtp_runtime.models.model import Model
from mtp_runtime.teacher_forcing import DraftInputs, draft_states, model_states, token_scores

_TAPS_OFF_BY_ONE = (
    "its taps are off by one: eagle_aux_hidden_state_layer_ids name the layers whose inputs the"
    " draft was trained on"
)
_D2T_SHIFTED = "d2t is shifted: draft id k must be token k + d2t[k]"


class Eagle3Drafter(ModuleDrafter):
    """Drafts by one module, fed with the states that the target was tapped for."""

    def __init__(self, parts: DrafterParts, module: Eagle3Module | None = None) -> None:
        """Raises UnsupportedError without a draft."""
        if module is None:
            raise UnsupportedError(
                "Method eagle3 needs an EAGLE-3 draft", todo="Give its folder as draft_model"
            )
        cache = module.new_cache(parts.pages)
        if parts.config.poison_freed:
            parts.pages.poison_freed(cache)
        super().__init__(parts, (module,), (cache,))
        self._eagle3 = module

    def _fed(self, passes: Sequence[Pass]) -> Sequence[torch.Tensor]:
        taps = [p.taps for p in passes if p.taps is not None]
        assert len(taps) == len(passes), "the target is tapped for its draft"
        return torch.split(self._eagle3.combined(torch.cat(taps)), [len(tap) for tap in taps])


def read_eagle3(folder: Path, loaded: Loaded) -> TargetDraft:
    """Read a draft's folder, for a target.

    Raises InvalidInputError for tensors that contradict the draft's config.json or the target,
    UnsupportedError for a draft of another architecture.
    """
    draft, target = read_draft(folder), loaded.model
    family = Eagle3Family.from_config(draft.config)
    _check_target(draft, family, target)
    tensors, taps = checked_tensors(draft, family), family.taps(target.config.layers)
    module = eagle3_module(family, tensors, target, loaded.parallel)
    module.make()  # on every rank, and of files that are there
    return TargetDraft(
        partial(Eagle3Drafter, module=module),
        weights=module,
        tensors=len(tensors),
        taps=taps,
        variants=partial(_variants, module=module, taps=taps),
    )


def toy(parts: DrafterParts) -> Eagle3Drafter:
    """Build a drafter of the target's MTP module, which combines taps of its own."""
    return Eagle3Drafter(parts, cast(Eagle3Module, parts.target.mtp_modules[0]))


def _check_target(draft: DraftFolder, family: Eagle3Family, target: Model) -> None:
    sizes = (family.vocab, family.target_hidden)
    target_sizes = (target.config.vocab, target.config.hidden)
    if sizes != target_sizes:
        raise InvalidInputError(
            "The draft was made for another target",
            where=draft.path,
            expected=f"vocab_size {target_sizes[0]} and target_hidden_size {target_sizes[1]}",
            found=f"{sizes[0]} and {sizes[1]}",
        )


def _variants(
    texts: ForcedTexts, module: Eagle3Module, taps: tuple[int, ...]
) -> Iterator[ScoredVariant]:
    """Yield the draft with other taps, and with other tokens of its head."""
    states = _states_by_layer(texts, taps)
    outputs = {
        shift: _first_output(texts, module, [states[tap + shift] for tap in taps])
        for shift in (0, -1, 1)
        if all(tap + shift in states for tap in taps)
    }
    head, chosen = module.head, texts.choices[texts.everywhere.rows + 1]
    before = token_scores(head, head.normed(outputs[0]), chosen)
    for shift in outputs.keys() - {0}:
        scores = token_scores(head, head.normed(outputs[shift]), chosen)
        moved = tuple(tap + shift for tap in taps)
        change = f"the inputs of layers {moved} are tapped, not of {taps}"
        yield ScoredVariant("taps", change, _TAPS_OFF_BY_ONE, scores, before)
    if isinstance(head, ReducedHead):
        for shift, change in ((-1, "d2t is one lower"), (1, "d2t is one higher")):
            other = replace(head, tokens=(head.tokens + shift) % head.vocab)
            scores = token_scores(other, other.normed(outputs[0]), chosen)
            yield ScoredVariant("d2t", change, _D2T_SHIFTED, scores, before)


def _states_by_layer(texts: ForcedTexts, taps: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """Return the inputs [T, d] of the tapped layers and of those beside them, in one pass."""
    layers = range(1, texts.model.config.layers)
    near = sorted({tap + shift for tap in taps for shift in (-1, 0, 1)}.intersection(layers))
    states = model_states(texts.model.tapped(near), texts.texts)
    assert states.taps is not None, "the model is tapped"
    return dict(zip(near, states.taps.chunk(len(near), dim=1), strict=True))


def _first_output(
    texts: ForcedTexts, module: Eagle3Module, states: list[torch.Tensor]
) -> torch.Tensor:
    """Return the output [A, d] of first drafts before the norm, given the tapped states."""
    hidden = module.combined(torch.cat(states, dim=1))
    return draft_states([module], DraftInputs(texts.texts, hidden, texts.everywhere), 1)[0]
