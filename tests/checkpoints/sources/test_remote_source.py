"""Files of a remote source: names, how much of one the first read brings, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import pytest

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Address, OpenFile
from mtp_checkpoints.sources.remote_source import READERS, OpenRemoteFile, RemoteSource, fetched

ROOT = Address("s3://bucket/model")


@dataclass(frozen=True)
class Remote:
    """A file whose requests are recorded."""

    data: bytes = field(compare=False)
    path: Address = ROOT / "file"
    sha256: None = None
    version: str = "7"
    spans: list[range] = field(default_factory=list, compare=False)

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def open(self, once: range | None = None) -> OpenFile:
        return OpenRemoteFile(self)

    def fetch(
        self, span: range, sink: Callable[[bytes], None], pause: Callable[[float], None]
    ) -> None:
        assert pause is sleep
        self.spans.append(span)
        for place in range(span.start, span.stop, 100_000):
            sink(self.data[place : min(place + 100_000, span.stop)])

    def whole(self) -> bytes:
        return self.data


def content(size: int) -> bytes:
    return bytes(number * 7 % 251 for number in range(size))


def source(**files: Any) -> RemoteSource:
    names = {name.replace("__", "/").replace("_json", ".json"): f for name, f in files.items()}
    return RemoteSource(ROOT, {"url": "x"}, names)


def test_names_are_those_of_one_folder() -> None:
    found = source(config_json=Remote(b""), more__a=Remote(b""), more__deep__b=Remote(b""))
    assert found.names() == {"config.json"}
    assert found.names("more") == {"a"}
    assert found.names("more/deep") == {"b"}
    assert found.names("mor") == found.names("nowhere") == frozenset()
    assert found.readers == READERS == 8


def test_a_missing_file_is_named() -> None:
    one = Remote(b"{}")
    found = source(config_json=one, other=Remote(b""))
    assert found.file("config.json") is one
    assert found.read("config.json") == b"{}"
    with pytest.raises(InvalidInputError) as caught:
        found.read("x.json")
    error = caught.value
    assert error.what == "A file that every checkpoint has is missing"
    assert (error.where, error.expected) == (ROOT / "x.json", "x.json")
    assert error.found == "2 other files"
    assert "revision" in str(error.todo)


def test_a_file_too_large_is_not_read() -> None:
    class Huge(Remote):
        size_bytes = 16_000_001  # type: ignore[assignment]

        def whole(self) -> bytes:
            raise AssertionError

    huge = Huge(b"", path=ROOT / "config.json")
    with pytest.raises(InvalidInputError, match="too large for what it is"):
        source(config_json=huge).read("config.json")


@pytest.mark.parametrize(
    ("size", "first"), [(500, 8), (20_000, 20), (8_000, 8), (200_000_000, 80 << 10)]
)
def test_the_first_read_brings_a_thousandth_for_those_after_it(size: int, first: int) -> None:
    data = content(min(size, 1 << 20))
    file = Remote(data + bytes(size - len(data)))
    opened = OpenRemoteFile(file)
    assert (opened.size_bytes, opened.version) == (size, "7")
    assert opened.read(0, 8) == data[:8]
    assert file.spans[0] == range(first)
    del file.spans[:]
    end = min(first + 50, size)
    assert opened.read(8, end) == file.data[8:end]
    assert file.spans == [range(first, end)]
    del file.spans[:]
    assert opened.read(0, 8) == data[:8]
    assert [len(span) for span in file.spans] == [0]


def test_a_read_elsewhere_brings_what_it_asks_for() -> None:
    file = Remote(content(20_000))
    opened = OpenRemoteFile(file)
    assert opened.read(100, 200) == file.data[100:200]
    assert file.spans == [range(100, 200)]
    assert opened.read(0, 5) == file.data[:5]
    assert file.spans[1:] == [range(20), range(5, 5)]
    opened.close()


def test_bytes_in_a_buffer_follow_each_other() -> None:
    file = Remote(content(250_000))
    buffer = memoryview(bytearray(300_000))
    place = OpenRemoteFile(file).read_into(buffer, 10, 240_010)
    assert place == slice(0, 240_000)
    assert bytes(buffer[place]) == file.data[10:240_010] == fetched(file, range(10, 240_010))
