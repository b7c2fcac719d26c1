"""Drafts that a bundle holds in folders beside its parts, named after their methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mtp_export.progress import CountCallback, ShowCount, uncounted
from mtp_export.verify.evidence.decode import Decoded, decode
from mtp_export.verify.evidence.prompts import Prompt
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import TargetDraft
from mtp_runtime.models.load import Loaded
from mtp_runtime.models.model import Model
from mtp_runtime.sampling import SamplingParams


@dataclass(frozen=True)
class ExtraDraft:
    """A draft that was read for the bundle's model; decodings with it are kept by k."""

    method: str
    draft: TargetDraft
    model: Model
    _decoded: dict[int, Decoded] = field(default_factory=dict)

    @classmethod
    def read(cls, bundle: Path, method: str, loaded: Loaded) -> ExtraDraft:
        """Read a method's draft. Raises what its reader raises."""
        read = DRAFTERS[method].read
        assert read is not None, f"{method} reads no draft"
        draft = read(bundle / method, loaded)
        return cls(method, draft, loaded.model.tapped(draft.taps))

    def on(self, model: Model) -> ExtraDraft:
        """The draft for another loading of the same model."""
        return replace(self, model=model.tapped(self.draft.taps), _decoded={})

    def decode(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        k: int,
        advance: CountCallback = int,
        at_once: int | None = None,
    ) -> Decoded:
        """Decode prompts with k drafts per step; at_once and advance as in decode."""
        return decode(
            self.model,
            prompts,
            params,
            method=self.method,
            k=k,
            build=self.draft.build,
            at_once=at_once,
            advance=advance,
        )

    def speculative(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        k: int,
        show_count: ShowCount = uncounted,
    ) -> Decoded:
        """Decode a corpus's prompts, once for each k; show_count opens a progress bar of tokens."""
        if k not in self._decoded:
            title = f"decoding with {self.method}, k={k}"
            with show_count(title, len(prompts) * params.max_tokens, "tokens") as advance:
                self._decoded[k] = self.decode(prompts, params, k, advance)
        return self._decoded[k]
