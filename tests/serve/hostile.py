"""Bodies that would cost a server much, made from the protocol's own models: every field, also of
what is nested in them, gets values of too great a length, depth or count, or of another type."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from mtp_export.serve.protocol import ChatBody, CompletionBody

KINDS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}
_MARK = "\x00here"
_QUOTED_MARK = json.dumps(_MARK).encode()
_SIMPLE = {str: "a", int: 1, float: 0.0, bool: False}


def _list(item: bytes) -> Callable[[int], bytes]:
    return lambda size: b"[%s]" % b",".join([item] * (size // (len(item) + 1)))


def _text(piece: bytes) -> Callable[[int], bytes]:
    return lambda size: b'"%s"' % (piece * (size // len(piece)))


# What takes the place of a field's value, of about a number of bytes.
VALUES: dict[str, Callable[[int], bytes]] = {
    "words": _text(b"a "),
    "one long word": _text(b"a"),
    "spaces": _text(b" "),
    "structure in a text": _text(b',[{:"'.replace(b'"', rb"\"")),
    "escapes": _text(rb"\\\""),
    "escaped characters": _text(rb"\u4e2d"),
    "characters of four bytes": _text("\U0001f600".encode()),
    "pairs of surrogates": _text(rb"\ud83d\ude00"),
    "half of a pair": _text(rb"\ud83d"),
    "digits": lambda size: b"1" * size,
    "a fraction": lambda size: b"0." + b"1" * size,
    "long numbers": _list(b"1" * 250),
    "ids": _list(b"7"),
    "most ids": lambda size: _list(b"1234")(min(size, 5 << 17)),
    "ids and a text": lambda size: _list(b"1234")(min(size, 5 << 17))[:-1] + b',"a"]',
    "lists of ids": _list(b"[7]"),
    "texts": _list(b'"a"'),
    "nulls": _list(b"null"),
    "empty lists": _list(b"[]"),
    "objects": _list(b'{"role":"user","content":"a","text":"a","type":"text"}'),
    "unknown fields": lambda size: b"{%s}" % b",".join(b'"%d":1' % k for k in range(size // 12)),
    "a field twice": lambda size: b'{%s,"9":1}' % b",".join(b'"%d":1' % k for k in range(9999)),
    "deep lists": lambda size: b"[" * size,
    "deep objects": lambda size: b'{"a":' * (size // 5),
    "an end too early": lambda size: _text(b"a")(size)[:-1],
}


def places(kind: type[BaseModel]) -> Iterator[tuple[str, bytes]]:
    """Yield the name of every place in a body of a kind, and the body with a mark there."""
    for name, value in _inside(kind, ""):
        yield name, json.dumps(value).encode()


def put(body: bytes, value: bytes) -> bytes:
    """Return a body with a value in place of its mark."""
    return body.replace(_QUOTED_MARK, value)


def _marked(annotation: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield values of a type, each with a mark at another place, itself first."""
    yield name, _MARK
    yield from _inside(annotation, name)


def _inside(annotation: Any, name: str) -> Iterator[tuple[str, Any]]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _inside(arguments[0], name)
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _inside(argument, name)
    elif origin is list:
        for place, value in _marked(arguments[0], f"{name}.0"):
            yield place, [value]
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for field, info in annotation.model_fields.items():
            for place, value in _marked(info.annotation, f"{name}.{field}"):
                yield place, {**_example(annotation), field: value}


def _example(annotation: Any) -> Any:
    """Return a good value of a type, of a model the fields that it must have."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Annotated, Union, UnionType):
        return _example(arguments[0])
    if origin is Literal:
        return arguments[0]
    if origin is list:
        return [_example(arguments[0])]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields.items()
        return {name: _example(info.annotation) for name, info in fields if info.is_required()}
    return _SIMPLE[annotation]
