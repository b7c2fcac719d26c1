"""The reference runtime's ledger of tensors: it loads each or explains why not, and refuses any
other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_checkpoints.errors import MtpExportError, ResourceError, UnsupportedError
from mtp_export.verify.check import Item, failed, not_tested, passed

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_NAME = "runtime loads it: every tensor explained"


def run(context: Context) -> Iterator[Item]:
    """Load the model, and count what was loaded, tied and skipped."""
    if context.why_not_run is not None:
        yield not_tested(_NAME, context.why_not_run)
        return
    from mtp_runtime.models.load import LoadOptions

    try:
        ledger = context.loaded(LoadOptions(context.options.device)).ledger
    except (UnsupportedError, ResourceError) as error:
        yield not_tested(_NAME, str(error))
        return
    except MtpExportError as error:
        yield failed(_NAME, str(error), subject=str(error.where))
        return
    counts = {
        "expected": len(ledger.expected),
        "loaded": len(ledger.loaded),
        "tied": len(ledger.tied),
        "skipped": len(ledger.skipped),
    }
    figure = ", ".join(f"{count:,} {what}" for what, count in counts.items() if what != "expected")
    yield passed(_NAME, figure=figure, bound="0 unexplained", data=counts)
