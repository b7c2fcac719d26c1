"""Keys of GGUF files, read from a head that is taken in pieces, and written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from mtp_checkpoints.containers.base import HeaderError
from mtp_checkpoints.containers.gguf_values import Scalar, Value, ValueType
from mtp_checkpoints.sources.byte_source import OpenFile

MAX_HEAD_BYTES = 48_000_000  # some times that of the largest vocabulary
_PIECE_BYTES = 1 << 20
_LENGTH_BYTES = 8  # of a text
_LEAST_KEY_BYTES = 8 + 4 + 1  # its name's length, its type and a value
_CODES = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


class Head:
    """Head of an open file, read from its start in pieces, as far as it is asked for."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._data = bytearray()
        self._at = 0

    @property
    def at(self) -> int:
        """Number of bytes that were taken."""
        return self._at

    @property
    def file_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def taken(self) -> memoryview:
        """All bytes that were taken."""
        return memoryview(self._data)[: self._at]

    def take(self, count: int, what: str) -> bytearray:
        """Take the next bytes (HeaderError where the file ends before them)."""
        end = self._at + count
        if end > len(self._data):
            self.check_room(count, what)
            stop = max(end, len(self._data) + max(_PIECE_BYTES, len(self._data)))
            stop = min(stop, self._file.size_bytes, MAX_HEAD_BYTES)
            self._data += self._file.read(len(self._data), stop)
        start, self._at = self._at, end
        return self._data[start:end]

    def check_room(self, count: int, what: str) -> None:
        """Refuse more bytes than the file has left, or than a head may have (HeaderError)."""
        left = self._file.size_bytes - self._at
        if count > left:
            raise HeaderError(
                f"A GGUF file ends inside {what}", f"{count} bytes or more", f"{left} bytes"
            )
        if self._at + count > MAX_HEAD_BYTES:
            raise HeaderError(
                f"A GGUF file's head is too long, at {what}",
                f"at most {MAX_HEAD_BYTES} bytes",
                f"{self._at + count} bytes or more",
            )

    def numbers(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        """Take numbers of a code of struct."""
        size = struct.calcsize(code)
        # A sum of the sizes of many numbers may not be counted before there is room for them.
        self.check_room(size * count, what)
        return struct.unpack(f"<{count}{code}", self.take(size * count, what))

    def number(self, code: str, what: str) -> Any:
        return self.numbers(code, 1, what)[0]

    def texts(self, count: int, what: str) -> Iterator[str]:
        """Take texts, of which a vocabulary has hundreds of thousands; bytes that are no UTF-8
        become replacement characters."""
        length_of = struct.Struct("<Q").unpack
        for _ in range(count):
            (length,) = length_of(self.take(_LENGTH_BYTES, what))
            yield self.take(length, what).decode(errors="replace")

    def text(self, what: str) -> str:
        """Take a text (HeaderError for bytes that are no UTF-8)."""
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise HeaderError(
                f"A GGUF file has bytes that are no UTF-8 in {what}", "text", repr(raw)[:80]
            ) from None


def read_keys(head: Head) -> Iterator[tuple[str, Value]]:
    """Yield the keys with their values (HeaderError)."""
    count: int = head.number("Q", "the number of its keys")
    head.check_room(_LEAST_KEY_BYTES * count, f"the list of its {count} keys")
    seen: set[str] = set()
    for _ in range(count):
        key = head.text("the name of a key")
        if not key or not key.isprintable():
            raise HeaderError("A GGUF file has a key without a plain name", "text", repr(key)[:80])
        if key in seen:
            raise HeaderError("A GGUF file has a key twice", "each key once", key[:200])
        seen.add(key)
        yield key, _value(head, key[:200])


def _value(head: Head, key: str) -> Value:
    what = f"key {key}"
    kind = _type(head, key)
    if kind is not ValueType.ARRAY:
        return Value(kind, _items(head, kind, 1, what)[0])
    kind = _type(head, key)
    if kind is ValueType.ARRAY:
        raise HeaderError(
            f"Key {key} has an array of arrays, which llama.cpp does not read either",
            "an array of numbers or texts",
            "arrays in it",
        )
    count: int = head.number("Q", what)
    return Value(kind, _items(head, kind, count, what), is_array=True)


def _type(head: Head, key: str) -> ValueType:
    number = head.number("I", f"key {key}")
    try:
        return ValueType(number)
    except ValueError:
        raise HeaderError(
            f"Key {key} has a value of an unknown type", f"0 to {max(ValueType)}", str(number)
        ) from None


def _items(head: Head, kind: ValueType, count: int, what: str) -> tuple[Scalar, ...]:
    if kind is not ValueType.STRING:
        return head.numbers(_CODES[kind], count, what)
    head.check_room(_LENGTH_BYTES * count, what)
    return tuple(head.texts(count, what))


def written_text(words: str) -> bytes:
    """Return a text as files have it."""
    raw = words.encode()
    return struct.pack("<Q", len(raw)) + raw


def written(value: Value) -> bytes:
    """Return a value as files have it, with its type."""
    items = value.data if isinstance(value.data, tuple) else (value.data,)
    if value.type is ValueType.STRING:
        raw = b"".join(written_text(str(item)) for item in items)
    else:
        raw = struct.pack(f"<{len(items)}{_CODES[value.type]}", *items)
    if not value.is_array:
        return struct.pack("<I", value.type) + raw
    return struct.pack("<IIQ", ValueType.ARRAY, value.type, len(items)) + raw
