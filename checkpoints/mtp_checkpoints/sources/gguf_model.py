"""The files of one GGUF model, in a folder that may hold others, by their names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mtp_checkpoints.sources.local_folder import LocalFolder

GGUF_SUFFIX = ".gguf"
MTP_PREFIX = "mtp-"  # of the name of a file that holds a module alone
_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})", re.ASCII)


@dataclass(frozen=True)
class OneGgufModel(LocalFolder):
    """A folder as if it had no GGUF files but those of the model that one of them is of: its other
    parts, and mtp-NAME.gguf beside NAME.gguf."""

    chosen: str

    def names(self, folder: str = "") -> frozenset[str]:
        names = super().names(folder)
        if folder:
            return names
        model = model_and_parts(self.chosen)[0]
        own = {model, f"{MTP_PREFIX}{model}"}
        return frozenset(
            name
            for name in names
            if not name.endswith(GGUF_SUFFIX) or model_and_parts(name)[0] in own
        )


def model_and_parts(name: str) -> tuple[str, int]:
    """Return the name of the model that a file is of, and the number of its parts; 0 for one that
    is whole."""
    stem = name.removesuffix(GGUF_SUFFIX)
    part = _PART.fullmatch(stem)
    return (part[1], int(part[2])) if part else (stem, 0)
