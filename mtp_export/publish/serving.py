"""Section of the model card that says how engines serve what was pushed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from mtp_checkpoints.layouts import TARGETS
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP, RELEASED
from mtp_export.bundle.launch import native_scheme, serving_lines
from mtp_export.publish.content import Content
from mtp_export.schemes.scheme import KEEP

_PLACE = Path("/models")  # absolute: one of the engines runs in a container
_OTHER = {MAIN: MTP, MTP: MAIN}


def serving(repository: str, content: Content, base: str | None) -> Iterator[str]:
    """Yield paragraphs: what to download, then each engine's command; nothing if none reads it."""
    options, folder = content.manifest["options"], _PLACE / repository.rpartition("/")[2]
    lines = serving_lines(
        options,
        wanted=TARGETS[options.get("target", RELEASED)].name,
        native=native_scheme(content.config),
        folder=folder,
    )
    if not lines:
        return
    yield "## Serving it"
    yield from _downloads(repository, content, base=base, folder=folder)
    for engine, line in lines.items():
        yield f"With {engine}:"
        yield _shell(line)


def _downloads(
    repository: str, content: Content, *, base: str | None, folder: Path
) -> Iterator[str]:
    """Yield how both parts get into one folder, beside each other."""
    if len(content.parts) > 1:
        yield _shell(_download(repository, folder))
        return
    (part,) = content.parts
    other = _OTHER[part]
    base_scheme = content.manifest["options"].get("base_quant", KEEP)
    is_the_source = part == MTP and base_scheme == KEEP and base is not None
    place = base if is_the_source and base else other.upper()
    yield _shell(_download(repository, folder / part), _download(place, folder / other))
    if not is_the_source:
        yield f"`{place}` stands for the repository of the {other} part of the same bundle."
    yield "An engine that downloads models itself takes the repositories' names for these folders."


def _download(repository: str, folder: Path) -> str:
    return f"hf download {repository} --local-dir {quote(str(folder))}"


def _shell(*lines: str) -> str:
    return "\n".join(("```sh", *lines, "```"))
