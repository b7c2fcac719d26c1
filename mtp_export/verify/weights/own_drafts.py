"""Drafts that a bundle holds in folders of their own: the runtime loads every tensor of each, and
refuses any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_checkpoints.errors import MtpExportError, ResourceError, UnsupportedError
from mtp_export.verify.check import Item, failed, not_tested, passed

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """One item per draft; none for a bundle without such drafts."""
    from mtp_export.verify.evidence.own_drafts import draft_folders

    for method, folder in draft_folders(context.options.bundle).items():
        name = f"{method}: runtime loads it, every tensor explained"
        if context.why_not_run is not None:
            yield not_tested(name, context.why_not_run)
            continue
        try:
            found = context.own_draft(method)
        except (UnsupportedError, ResourceError) as error:
            yield not_tested(name, str(error))
        except MtpExportError as error:
            yield failed(name, str(error), subject=str(folder))
        else:
            yield passed(name, figure=f"{found.draft.tensors:,} tensors", bound="0 unexplained")
