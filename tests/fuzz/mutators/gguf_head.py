"""Damages the head of a GGUF file: bits, numbers of four and eight bytes, names, or its end."""

from __future__ import annotations

from pathlib import Path
from random import Random

_NUMBERS = (0, 1, 2, 7, 31, 33, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**62, 2**63, 2**64 - 1)
_LAST_NAME = b".weight"
_REST_BYTES = 64  # of the last tensor's description, behind its name
_NAMES = (b"blk.0.", b"blk.1.", b"blk.2.", b"attn_k_b", b"attn_v_b", b"ffn_up_exps", b"token_embd")
_KEYS = (b"general.architecture", b"general.alignment", b"split.count", b"nextn_predict_layers")


def mutate(path: Path, random: Random) -> None:
    """Damage a head in one to three places; sometimes cut the file, or add to it."""
    raw = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 3)):
        random.choice((_flip, _flip, _number, _number, _rename))(raw, random)
    if random.random() < 0.15:
        del raw[random.randrange(len(raw) + 1) :]
    elif random.random() < 0.05:
        raw += bytes(random.randrange(1, 100))
    path.write_bytes(raw)


def _head_bytes(raw: bytearray) -> int:
    return min(len(raw), max(24, raw.rfind(_LAST_NAME) + _REST_BYTES))


def _flip(raw: bytearray, random: Random) -> None:
    if raw:
        raw[random.randrange(_head_bytes(raw))] ^= 1 << random.randrange(8)


def _number(raw: bytearray, random: Random) -> None:
    """Put a number over bytes that may be one, often over the counts at the start."""
    width = random.choice((4, 8))
    at = random.choice((4, 8, 16))
    if raw and random.random() < 0.8:
        at = random.randrange(_head_bytes(raw))
    value = random.choice(_NUMBERS) % (1 << 8 * width)
    raw[at : at + width] = value.to_bytes(width, "little")


def _rename(raw: bytearray, random: Random) -> None:
    """Give a key or a tensor the name of another one of the same length, or none that is known."""
    name = random.choice((*_NAMES, *_KEYS))
    places = [at for at in range(_head_bytes(raw)) if raw.startswith(name, at)]
    if places:
        others = [one for one in (*_NAMES, *_KEYS) if len(one) == len(name)]
        at = random.choice(places)
        raw[at : at + len(name)] = random.choice((*others, name[:-1] + b"?"))
