"""Content of a journal: lines of JSON, each with a checksum of itself and all lines before it, so
that nothing that was edited or damaged reaches a manifest.

Only the last line may be damaged, as a run that was cut short leaves it: its shard is made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

import xxhash

from mtp_checkpoints.sources import strict_json
from mtp_export.plan import Facts

_DIGEST_BYTES = 16
_T = TypeVar("_T")


class Checksum(Protocol):
    """Running checksum of the lines of a journal."""

    def update(self, data: bytes) -> None: ...

    def hexdigest(self) -> str: ...

    def copy(self) -> Checksum: ...


class DamagedJournal(Exception):
    """A journal that is not as this tool writes it; its argument says where."""


@dataclass(frozen=True)
class ShardFacts:
    """Facts of a finished shard, for the manifest: its link, if it is one, and by tensor the
    checksums, if it was read, and what its transform returned."""

    size_bytes: int
    link: str | None = None
    xxh3_128: Mapping[str, str] | None = None
    facts: Mapping[str, Facts] = field(default_factory=dict)


@dataclass
class JournalContent:
    """An unfinished run: its identity, the paths below the output folder that it writes or
    replaces, and what it finished, by path."""

    identity: dict[str, Any]
    files: frozenset[str]
    finished: dict[str, ShardFacts] = field(default_factory=dict)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that say it."""
        yield {"identity": self.identity, "files": sorted(self.files)}
        for key, facts in self.finished.items():
            yield shard_line(key, facts)


def new_checksum() -> Checksum:
    """Return the checksum of no lines."""
    return xxhash.xxh3_128()


def shard_line(key: str, facts: ShardFacts) -> dict[str, Any]:
    """Return the line of a finished shard."""
    return {"finished": key, "facts": asdict(facts)}


def encoded(line: Mapping[str, Any], checksum: Checksum) -> bytes:
    """Return the bytes of a line, and add it to the checksum of those before it."""
    raw = json.dumps(line, separators=(",", ":")).encode()
    checksum.update(raw)
    return b"%s %s\n" % (raw, checksum.hexdigest().encode())


def parsed(raw: bytes) -> JournalContent:
    """Return what a journal says, without a last line that was cut short (DamagedJournal)."""
    *whole, _ = raw.split(b"\n")
    checksum = new_checksum()
    content: JournalContent | None = None
    for number, line in enumerate(whole, 1):
        text, _, digest = line.rpartition(b" ")
        checksum.update(text)
        if digest != checksum.hexdigest().encode():
            if content is not None and number == len(whole):
                break
            raise DamagedJournal(f"line {number} with another checksum than its own")
        if content is None:
            content = _taken(_run, text, number)
        else:
            key, facts = _taken(_shard, text, number)
            content.finished[key] = facts
    if content is None:
        raise DamagedJournal("no whole line")
    return content


def _taken(take: Callable[[Any], _T], text: bytes, number: int) -> _T:
    try:
        return take(strict_json.parse(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"line {number} that this version did not write ({type(error).__name__}: {error})"
        raise DamagedJournal(found) from None


def _run(line: Any) -> JournalContent:
    files = frozenset(_typed(name, str) for name in _typed(line["files"], list))
    return JournalContent(_typed(line["identity"], dict), files)


def _shard(line: Any) -> tuple[str, ShardFacts]:
    facts = ShardFacts(**line["facts"])
    _typed(facts.size_bytes, int)
    _typed(facts.link, str, type(None))
    for digest in _typed(facts.xxh3_128 or {}, dict).values():
        if len(bytes.fromhex(_typed(digest, str))) != _DIGEST_BYTES:
            raise ValueError("a checksum of another length")
    for figures in _typed(facts.facts, dict).values():
        for figure in _typed(figures, dict).values():
            _typed(figure, int, float, type(None))
    return _typed(line["finished"], str), facts


def _typed(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise TypeError(f"{type(value).__name__} in place of {types[0].__name__}")
    return value
