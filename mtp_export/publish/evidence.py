"""Verification that stands behind an upload: a report of exactly this bundle that passed."""

from __future__ import annotations

from pathlib import Path

from mtp_checkpoints.errors import InvalidInputError, UsageError, VerificationError
from mtp_checkpoints.tensors.manifest import manifest_sha256
from mtp_export.verify.check import Status
from mtp_export.verify.report.reading import read_report
from mtp_export.verify.report.report import Report, verdict_words


def evidence(bundle: Path, report: Path | None, *, unverified: bool) -> Report | None:
    """Return the report of a bundle's verification; None without one, if that is wanted.

    Raises UsageError without a report, InvalidInputError for one of another bundle and
    VerificationError for one that did not pass. unverified allows no report, or one that failed.
    """
    if report is None:
        if unverified:
            return None
        raise UsageError(
            "Nothing says that this bundle is verified",
            where=bundle,
            expected="--report FILE.json, as mtp-export verify BUNDLE --report FILE.json writes it",
            todo="Verify it first, or push it with --unverified, which the model card then says",
        )
    found = read_report(report)
    named, own = found.facts.get("manifest_sha256"), manifest_sha256(bundle)
    if named != own:
        raise InvalidInputError(
            "The report is about another bundle, or about this one before it was made again",
            where=report,
            expected=f"the SHA-256 of its manifest, {own}",
            found=str(named)[:64],
            todo="Verify this bundle, and give that report",
        )
    if found.status is not Status.PASS and not unverified:
        raise VerificationError(
            "The bundle did not pass its verification",
            where=report,
            found=verdict_words(found).rstrip("."),
            todo="Mend the bundle and verify it again; --unverified pushes it all the same, and the"
            " model card then says that it failed",
        )
    return found
