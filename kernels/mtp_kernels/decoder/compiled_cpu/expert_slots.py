"""Slots of memory for routed experts, and which expert gives its slot up: the least recently used.

Layers are used in turn, token after token. A cache that holds less than one token's experts of all
layers would, least recently used first, drop each expert just before it is asked for again; so
below twice that many each layer has slots of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

Key = tuple[int, int]  # layer and expert


@dataclass
class SlotPool:
    """Slots that some layers share, and the experts in them, least recently used first."""

    free: list[int]
    held: OrderedDict[Key, int] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.size = len(self.free)

    def touch(self, key: Key) -> bool:
        """Note that an expert is used; return whether it is held."""
        if key not in self.held:
            return False
        self.held.move_to_end(key)
        return True

    def take(self, key: Key, keep: Collection[Key]) -> int:
        """Return the slot that an expert is read into: a free one, or that of the expert which was
        not used for longest, but for some; they are fewer than the slots."""
        if not self.free:
            self.drop(next(other for other in self.held if other not in keep))
        self.held[key] = self.free.pop()
        return self.held[key]

    def drop(self, key: Key) -> None:
        """Give an expert's slot up, if it has one."""
        if key in self.held:
            self.free.append(self.held.pop(key))


def pools_of(slots: int, layers: int, picked: int) -> list[SlotPool]:
    """Divide slots among layers, of which a token picks so many experts each: one pool for all
    layers, or one for each where two tokens' experts do not fit, nor every layer is left out."""
    shared = slots >= 2 * picked * layers or slots < layers
    parts = 1 if shared else layers
    ends = [part * slots // parts for part in range(parts + 1)]
    return [SlotPool(list(range(ends[part], ends[part + 1]))[::-1]) for part in range(parts)]
