"""Drafts with an EAGLE-3 draft, whose cache lies beside the target's, in the same pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.eagle3 import Eagle3Family
from mtp_runtime.drafters.base import DrafterParts, Pass, TargetDraft
from mtp_runtime.drafters.mtp import ModuleDrafter
from mtp_runtime.loading.draft_folder import DraftFolder, read_draft
from mtp_runtime.models.eagle3 import Eagle3Module, checked_tensors, eagle3_module
from mtp_runtime.models.load import Loaded
from mtp_runtime.models.model import Model


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
        return torch.split(self._eagle3.combined(torch.cat(taps)), [len(one) for one in taps])


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
    return TargetDraft(partial(Eagle3Drafter, module=module), module, len(tensors), taps)


def _check_target(draft: DraftFolder, family: Eagle3Family, target: Model) -> None:
    own = (family.vocab, family.target_hidden)
    wanted = (target.config.vocab, target.config.hidden)
    if own != wanted:
        raise InvalidInputError(
            "The draft was made for another target",
            where=draft.path,
            expected=f"vocab_size {wanted[0]} and target_hidden_size {wanted[1]}",
            found=f"{own[0]} and {own[1]}",
        )
