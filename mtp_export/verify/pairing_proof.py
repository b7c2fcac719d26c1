"""Proof that a draft belongs to the main model beside it: the main model accepts what it drafts.

Shapes and equal copies of embedding and head are those of every checkpoint of a model, and of each
that was trained further; only running both tells whose layer it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import VerificationError
from mtp_export.progress import ShowCount, ShowProgress
from mtp_export.verify import CHECKS, check_result
from mtp_export.verify.check import Item, Status, overall
from mtp_export.verify.context import Context
from mtp_export.verify.options import VerifyOptions

CHECK = "acceptance"
_NOT_PROVEN = "Pairing by shapes and copies alone, not proven by acceptance"


@dataclass(frozen=True)
class PairingProof:
    """The items of check `acceptance` of a bundle; none where it was not asked for, for a
    reason."""

    bundle: Path
    items: tuple[Item, ...] = ()
    reason: str = ""

    @property
    def status(self) -> Status:
        """Fail if an item failed; pass if drafts were made, and judged by a bound."""
        found = overall(item.status for item in self.items)
        return Status.NOT_TESTED if found is Status.PASS and not self._drafts else found

    @property
    def words(self) -> str:
        """The verdict in one sentence, with acceptance by position of the run with most drafts."""
        drafts = ", ".join(_shown(item) for item in self._deepest)
        if self.status is Status.PASS:
            return f"Pairing proven by acceptance: {drafts}."
        if self.status is Status.FAIL:
            return f"Pairing disproved by acceptance: {drafts}."
        reasons = [item.cause for item in self.items if item.status is Status.NOT_TESTED]
        return f"{_NOT_PROVEN}: {(self.reason or '; '.join(dict.fromkeys(reasons))).rstrip('.')}."

    def as_json(self) -> dict[str, Any]:
        """Status, words, and the items as verify reports them."""
        items = [dict(vars(item)) for item in self.items]
        return {"status": self.status, "words": self.words, "items": items}

    def raise_if_failed(self) -> None:
        """Raise VerificationError for a draft that the main model does not accept."""
        if self.status is not Status.FAIL:
            return
        raise VerificationError(
            "The draft is not shown to be this main model's: what it drafts is not accepted as a"
            " working one's is",
            where=self.bundle,
            found=self._causes,
            todo="Do not ship this bundle: graft the MTP layer of the checkpoint that the main"
            " model was made from, or the draft that was released with it, and verify a bundle"
            " of both at --level run",
        )

    @property
    def _deepest(self) -> list[Item]:
        most = max((item.data["k"] for item in self._drafts), default=0)
        return [item for item in self._drafts if item.data["k"] == most]

    @property
    def _drafts(self) -> list[Item]:
        """The items that say what share of drafts was accepted, one per number and position."""
        return [item for item in self.items if "conditional" in item.data]

    @property
    def _causes(self) -> str:
        failed = [item for item in self.items if item.status is Status.FAIL]
        return "; ".join(f"{i.name}: {i.measured}: {i.cause.rstrip('.')}" for i in failed)


def _shown(item: Item) -> str:
    """Return the share of a position's drafts that are accepted, given those before it are."""
    return f"draft {item.data['position']} {item.figure.partition(';')[0]}"


def not_asked_for(bundle: Path, untested: str = "") -> PairingProof:
    """Return the proof of a graft that was made without --prove; untested: the reason why it
    cannot be run."""
    return PairingProof(bundle, reason=untested or "verify at level run measures it")


def prove_pairing(
    options: VerifyOptions, show_progress: ShowProgress, show_count: ShowCount
) -> PairingProof:
    """Run check `acceptance` on a finished bundle, with the prompts and sizes of the options.

    Raises what Context.open raises, and IoError where this machine cannot read.
    """
    context = Context.open(options, show_progress, show_count=show_count)
    result = check_result(CHECK, CHECKS[CHECK], context)
    return PairingProof(context.folder, result.items)
