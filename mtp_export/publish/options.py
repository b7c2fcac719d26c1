"""Options of a push."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mtp_checkpoints.sources.byte_source import Address
from mtp_export.bundle.options import Part
from mtp_export.options import Access, Panel, argument, option, parse_path, path_option


def _model_address(text: str) -> Address:
    """Return the address of a model on the Hub that is named with or without hf://."""
    return Address(text if "://" in text else f"hf://{text}")


@dataclass(frozen=True)
class PushOptions:
    """A bundle and the repository that gets it; part None: all parts that the bundle has."""

    bundle: Path = field(metadata=argument("Bundle to upload.", "BUNDLE", parse_path, Access.READ))
    repository: Address = field(
        metadata=argument("Repository on the Hub: org/name.", "NAME", Address)
    )
    part: Part | None = field(
        default=None,
        metadata=option(
            "Part to upload: both, main, mtp or one, as the export has it; by default all that the"
            " bundle has.",
            Panel.CONTENT,
            metavar="PART",
        ),
    )
    private: bool = field(
        default=False,
        metadata=option("Make a repository that is private.", Panel.INPUT_OUTPUT),
    )
    overwrite: bool = field(
        default=False,
        metadata=option("Replace the model that the repository has.", Panel.INPUT_OUTPUT),
    )
    report: Path | None = field(
        default=None,
        metadata=path_option(
            "Report of mtp-export verify on this bundle.",
            Panel.MODEL_CARD,
            "FILE.json",
            access=Access.READ,
        ),
    )
    unverified: bool = field(
        default=False,
        metadata=option("Upload a bundle without a report that it passed.", Panel.MODEL_CARD),
    )
    base_model: Address | None = field(
        default=None,
        metadata=option(
            "Model on the Hub that the bundle was made from: org/name or org/name@REVISION.",
            Panel.MODEL_CARD,
            metavar="NAME",
            parser=_model_address,
        ),
    )
