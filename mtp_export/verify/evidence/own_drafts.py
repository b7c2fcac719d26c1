"""Drafts that a bundle holds in folders of their own, named after their methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mtp_export.verify.evidence.decode import Decoded, decode
from mtp_export.verify.evidence.prompts import Prompt
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import TargetDraft
from mtp_runtime.models.load import Loaded
from mtp_runtime.models.model import Model
from mtp_runtime.sampling import SamplingParams


def draft_folders(bundle: Path) -> dict[str, Path]:
    """Folders of a bundle's own drafts, by method."""
    found = {method: bundle / method for method, kind in DRAFTERS.items() if kind.read}
    return {method: folder for method, folder in found.items() if folder.is_dir()}


@dataclass(frozen=True)
class OwnDraft:
    """A draft that was read for the bundle's model; decodings with it are kept by k."""

    method: str
    draft: TargetDraft
    model: Model
    _decoded: dict[int, Decoded] = field(default_factory=dict)

    @classmethod
    def read(cls, bundle: Path, method: str, loaded: Loaded) -> OwnDraft:
        """Read a method's draft. Raises what its reader raises."""
        read = DRAFTERS[method].read
        assert read is not None, f"{method} has no draft of its own"
        draft = read(bundle / method, loaded)
        return cls(method, draft, loaded.model.tapped(draft.taps))

    def on(self, model: Model) -> OwnDraft:
        """The draft for another loading of the same model."""
        return replace(self, model=model.tapped(self.draft.taps), _decoded={})

    def decode(self, prompts: Sequence[Prompt], params: SamplingParams, k: int) -> Decoded:
        """Decode prompts with k drafts per step."""
        return decode(self.model, prompts, params, method=self.method, k=k, build=self.draft.build)

    def speculative(self, prompts: Sequence[Prompt], params: SamplingParams, k: int) -> Decoded:
        """Decode a corpus's prompts, once for each k."""
        if k not in self._decoded:
            self._decoded[k] = self.decode(prompts, params, k)
        return self._decoded[k]
