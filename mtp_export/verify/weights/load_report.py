"""Report of the reference runtime on its loading: it loads each tensor of the bundle or explains
why not, and refuses any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mtp_checkpoints.errors import MtpExportError, ResourceError, UnsupportedError
from mtp_checkpoints.formats import DamagedWeight
from mtp_export.progress import counted
from mtp_export.verify.check import Item, failed, not_tested, passed, raise_trouble
from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """Load the model, and count what was loaded, tied and skipped."""
    name = "runtime loads it: every tensor explained"
    yield _loaded(context, name, partial(_model, context, name), where=None)


def extra_drafts(context: Context) -> Iterator[Item]:
    """One item per extra draft; none for a bundle without such drafts."""
    from mtp_runtime.drafters import draft_folders

    for method, folder in draft_folders(context.folder).items():
        name = f"{method}: runtime loads it, every tensor explained"
        yield _loaded(context, name, partial(_draft, context, method, name), where=folder)


def _loaded(context: Context, name: str, load: Callable[[], Item], where: Path | None) -> Item:
    """The item of loading something, or of the error that ended it. where: the subject of a
    failure, by default what the error names."""
    if context.why_not_run is not None:
        return not_tested(name, context.why_not_run)
    try:
        return load()
    except (UnsupportedError, ResourceError) as error:
        return not_tested(name, str(error))
    except MtpExportError as error:
        if isinstance(error.__cause__, DamagedWeight):
            return not_tested(name, "a weight cannot be decoded: its values are judged below")
        raise_trouble(error, context.folder)
        return failed(name, str(error), subject=str(where or error.where))


def _model(context: Context, name: str) -> Item:
    from mtp_runtime.models.load import LoadOptions

    ledger = context.loaded(LoadOptions(context.options.device)).ledger
    counts = {
        "expected": len(ledger.expected),
        "loaded": len(ledger.loaded),
        "tied": len(ledger.tied),
        "skipped": len(ledger.skipped),
    }
    figure = ", ".join(f"{count:,} {what}" for what, count in counts.items() if what != "expected")
    return passed(name, figure=figure, bound="0 unexplained", data=counts)


def _draft(context: Context, method: str, name: str) -> Item:
    draft = context.extra_draft(method).draft
    return passed(name, figure=counted(draft.tensors, "tensor"), bound="0 unexplained")
