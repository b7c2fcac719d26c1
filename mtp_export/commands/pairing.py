"""Options of the commands that end with a whole graft: run it, and say whose layer it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.errors import UsageError
from mtp_export.options import Access, Panel, option, path_option

if TYPE_CHECKING:
    from mtp_export.verify.pairing_proof import PairingProof


def with_pairing(facts: dict[str, Any], proof: PairingProof) -> dict[str, Any]:
    """Return the result of a graft with the proof of its pairing, and with the command that proves
    it only where nothing was run."""
    steps = {
        name: step for name, step in facts["next"].items() if name != "prove" or not proof.items
    }
    return facts | {"next": steps, "pairing": proof.as_json()}


@dataclass(frozen=True)
class Proving:
    """Options of the proof of a graft's pairing."""

    prove: bool = field(
        default=False,
        metadata=option(
            "Run the graft: is it the layer of this main model, by the drafts that are accepted?",
            Panel.CHECKS,
        ),
    )
    prompts: Path | None = field(
        default=None,
        metadata=path_option(
            "Prompts to prove it on, as for verify; by default built-in ones.",
            Panel.CHECKS,
            "FILE.jsonl",
            access=Access.READ,
        ),
    )

    def check(self) -> None:
        """Refuse prompts of no proof (UsageError)."""
        if self.prompts is not None and not self.prove:
            raise UsageError(
                "Prompts are what a graft is proven on",
                expected="--prompts with --prove",
                found="--prompts alone",
            )

    def proof(self, bundle: Path, *, quiet: bool, untested: str = "") -> PairingProof:
        """Return what the drafts that the main model accepts say of a bundle that was made;
        untested: the reason why no such bundle can be run."""
        # They take longer to import than a small graft takes.
        from mtp_export.commands.progress_bar import count_bar, loading_bars, progress_bar
        from mtp_export.verify.options import VerifyOptions
        from mtp_export.verify.pairing_proof import not_asked_for, prove_pairing

        if not self.prove:
            return not_asked_for(bundle, untested)
        wanted = VerifyOptions(bundle, prompts=self.prompts)
        with loading_bars(quiet=quiet):
            return prove_pairing(
                wanted, partial(progress_bar, quiet=quiet), partial(count_bar, quiet=quiet)
            )
