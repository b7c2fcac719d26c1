"""Repositories of the local server: commits, files, and the storage of large files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StoredFile:
    """A file of a commit."""

    path: Path
    name: str

    @cached_property
    def size(self) -> int:
        return self.path.stat().st_size

    @cached_property
    def sha256(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def oid(self) -> str:
        digest = hashlib.sha1(b"blob %d\0" % self.size)
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: digest).hexdigest()

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end)."""
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), end - start, start)

    @property
    def is_large(self) -> bool:
        """True for what the Hub keeps in its storage instead of git."""
        return self.name.endswith((".safetensors", ".gguf", "tokenizer.json"))

    def entry(self, *, is_xet: bool = False) -> dict[str, Any]:
        """Return the file as a tree lists it."""
        size = self.size
        entry = {"type": "file", "path": self.name, "size": size, "oid": self.oid}
        if self.is_large:
            entry["lfs"] = {"oid": self.sha256, "size": size, "pointerSize": 134}
            if is_xet:
                entry["xetHash"] = self.sha256
        return entry


@dataclass(frozen=True)
class XetFile(StoredFile):
    """A file whose bytes are in a Xet storage alone."""

    listed_size: int = 0
    listed_sha256: str = ""

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.listed_size

    @property
    def sha256(self) -> str:  # type: ignore[override]
        return self.listed_sha256

    @property
    def oid(self) -> str:  # type: ignore[override]
        return hashlib.sha1(self.listed_sha256.encode()).hexdigest()


@dataclass
class Repository:
    """Commits by hash, each with its files by name; revisions by name.

    objects are large files in its storage by SHA-256, committed or not. is_xet: its large files are
    in a Xet storage, which links of this server bridge, and can be copied to other repositories.
    """

    commits: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Path] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    is_xet: bool = False

    def commit(self, folder: Path, revision: str = "main") -> str:
        """Add a folder as a commit, and move a branch to it."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        files = {name: StoredFile(path, name) for name, path in zip(names, paths, strict=True)}
        return self.commit_files(files, revision)

    def commit_files(self, files: dict[str, StoredFile], revision: str = "main") -> str:
        """Add files as a commit, and move a branch to it."""
        listing = "".join(f"{files[name].oid} {name}\n" for name in sorted(files))
        sha = hashlib.sha1(listing.encode()).hexdigest()
        self.commits[sha] = files
        self.revisions[revision] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """Return the commit of a branch, a tag or a commit's hash."""
        return revision if revision in self.commits else self.revisions.get(revision)
