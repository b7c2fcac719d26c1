"""Files of a bundle that a repository gets: those that its manifest lists, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.sources.strict_json import read_json_object
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME, read_manifest
from mtp_export.bundle.journal import JOURNAL_NAME
from mtp_export.bundle.options import Part
from mtp_export.bundle.run_folder import PARTS
from mtp_export.verify.files.checksums import READ_BY_ENGINES

_AGAIN = "Export again, verify the bundle, then run the same command"


@dataclass(frozen=True)
class Shard:
    """A shard as it was when the push began; name is its path in the repository."""

    name: str
    folder: LocalFolder
    file_name: str
    size_bytes: int
    version: int | str

    @property
    def path(self) -> Path:
        """Path of the file itself, without links."""
        return self.folder.resolved(self.file_name)

    def check_unchanged(self) -> None:
        """Refuse a shard that was written to since (InvalidInputError, IoError)."""
        if _state(self.folder, self.file_name) != (self.size_bytes, self.version):
            raise InvalidInputError(
                "The bundle changed while it was uploaded",
                where=self.folder.path / self.file_name,
                todo="Nothing was committed: wait until nothing writes the bundle any more, verify"
                " it, then run the same command again",
            )


@dataclass(frozen=True)
class Content:
    """Files of a repository by their paths in it: shards, and all others with their bytes.

    A single part lies at the repository's top, where engines find it by the repository's name.
    Several lie in folders of their own beside the manifest, as in the bundle.
    """

    bundle: Path
    manifest: Mapping[str, Any]
    parts: tuple[str, ...]
    shards: tuple[Shard, ...]
    files: Mapping[str, bytes]

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of the first part (InvalidInputError, IoError)."""
        return read_json_object(self.bundle / self.parts[0] / CONFIG_NAME)

    def check_unchanged(self) -> None:
        """Refuse a bundle whose shards were written to since it was read."""
        for shard in self.shards:
            shard.check_unchanged()


def read_content(bundle: Path, part: Part | None) -> Content:
    """Read what a repository gets of a bundle; part None: all parts that it has.

    Raises InvalidInputError for a folder that is no finished bundle, for a part that it lacks, and
    for files that are not as the manifest has them; IoError.
    """
    if not any((bundle / name).is_dir() for name in (MAIN, MTP)):
        raise InvalidInputError(
            "There is no bundle here",
            where=bundle,
            expected=f"a folder with {MAIN}/, {MTP}/ and {MANIFEST_NAME}",
            todo="Point at the output folder of an export",
        )
    if (bundle / JOURNAL_NAME).exists():
        raise InvalidInputError(
            "The bundle is not finished",
            where=bundle,
            found=JOURNAL_NAME,
            todo="Run the export again: it goes on where it stopped",
        )
    manifest = read_manifest(bundle)
    parts = _wanted(bundle, tuple(manifest["parts"]), part)
    shards: list[Shard] = []
    files: dict[str, bytes] = {}
    for name in parts:
        LocalFolder(bundle).resolved(name)  # a part elsewhere is no part of what was given
        folder, entry, prefix = (
            LocalFolder(bundle / name),
            manifest["parts"][name],
            _prefix(parts, name),
        )
        _check_all_listed(folder, {*entry["shards"], *entry["files"]})
        shards += _shards(folder, entry["shards"], prefix)
        files |= {f"{prefix}{file}": _checked(folder, file, facts)
                  for file, facts in entry["files"].items()}  # fmt: skip
    if len(parts) > 1:
        files[MANIFEST_NAME] = LocalFolder(bundle).read(MANIFEST_NAME)
    return Content(bundle, manifest, parts=parts, shards=tuple(shards), files=files)


def _prefix(parts: tuple[str, ...], part: str) -> str:
    return f"{part}/" if len(parts) > 1 else ""


def _wanted(bundle: Path, there: tuple[str, ...], part: Part | None) -> tuple[str, ...]:
    """Return the parts to push, main first; both go with the drafts in folders of their own."""
    known = tuple(name for name in PARTS if name in there)
    both = tuple(dict.fromkeys((MAIN, MTP, *known)))
    wanted = {
        None: known,
        Part.BOTH: both,
        Part.MAIN: (MAIN,),
        Part.MTP: (MTP,),
        Part.ONE: (MAIN,),
    }[part]
    missing = [name for name in wanted if name not in known]
    if missing or not wanted:
        raise InvalidInputError(
            f"The bundle has no {' and no '.join(missing) or 'part'}",
            where=bundle,
            found=", ".join(there) or "a manifest without parts",
            todo="Choose --part, or export with --part both",
        )
    return wanted


def _state(folder: LocalFolder, name: str) -> tuple[int, int | str]:
    """Return size and version of a file as it is now."""
    with closing(folder.file(name).open()) as file:
        return file.size_bytes, file.version


def _shards(
    folder: LocalFolder, entries: Mapping[str, Mapping[str, Any]], prefix: str
) -> Iterable[Shard]:
    for name, facts in entries.items():
        _check_is_there(folder, name)
        size_bytes, version = _state(folder, name)
        if size_bytes != facts["size_bytes"]:
            raise _differs(folder.path / name, facts["size_bytes"], size_bytes)
        yield Shard(f"{prefix}{name}", folder, name, size_bytes=size_bytes, version=version)


def _check_all_listed(folder: LocalFolder, listed: Set[str]) -> None:
    """Refuse a manifest that leaves out a file that engines load: it would not be uploaded."""
    for name in sorted(folder.names() - listed):
        if name.endswith(READ_BY_ENGINES):
            raise InvalidInputError(
                "The bundle has a file that its manifest does not list",
                where=folder.path / name,
                expected="files of the export alone",
                todo=f"Move it elsewhere if it is yours. {_AGAIN}",
            )


def _checked(folder: LocalFolder, name: str, facts: Mapping[str, Any]) -> bytes:
    """Return the bytes of a small file, as the manifest has them."""
    _check_is_there(folder, name)
    data = folder.read(name)
    if len(data) != facts["size_bytes"]:
        raise _differs(folder.path / name, facts["size_bytes"], len(data))
    found = xxhash.xxh3_128(data).hexdigest()
    if found != facts["xxh3_128"]:
        raise InvalidInputError(
            "A file of the bundle was changed since the export",
            where=folder.path / name,
            expected=f"the manifest's checksum {facts['xxh3_128']}",
            found=found,
            todo=_AGAIN,
        )
    return data


def _check_is_there(folder: LocalFolder, name: str) -> None:
    if any(not part or part.startswith(".") for part in name.split("/")):
        raise InvalidInputError(
            "The manifest lists a file that no export writes",
            where=folder.path,
            found=name[:100],
            todo="Do not trust this bundle; get it again from its source, or export again",
        )
    if not (folder.path / name).exists():
        raise InvalidInputError(
            "A file that the manifest lists is missing", where=folder.path / name, todo=_AGAIN
        )


def _differs(path: Path, expected: int, found: int) -> InvalidInputError:
    return InvalidInputError(
        "A file of the bundle has another size than the manifest says",
        where=path,
        expected=f"{expected} bytes",
        found=f"{found} bytes",
        todo=_AGAIN,
    )
