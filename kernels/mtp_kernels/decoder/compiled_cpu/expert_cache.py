"""Cache of routed experts: some are in memory, packed as they are multiplied, the others in files.

What a row computes does not depend on what is held: an expert that was read has the bits of one
that never left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from mtp_kernels.cpu.memory import LINE, LINE_BYTES, Arena, floats
from mtp_kernels.decoder import RoutedExperts
from mtp_kernels.decoder.compiled_cpu.expert_slots import SlotPool, pools_of
from mtp_kernels.decoder.compiled_cpu.packing import PackedStack, Packer


@dataclass
class ExpertCounts:
    """Experts that passes asked for, each once a layer, and those of them that were held; bytes
    that were read, and seconds that computation waited for them."""

    requested: int = 0
    held: int = 0
    read_bytes: int = 0
    waited_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the experts that were held, 0 to 1; 1 where none was asked for."""
        return self.held / self.requested if self.requested else 1.0


@dataclass(frozen=True)
class CachedExperts:
    """Routed experts of one layer, by their number among the cache's layers, and the tables of
    addresses and forms [e, 2] of their matrices, which compiled code is given."""

    layer: int
    experts: RoutedExperts
    gate_up: np.ndarray
    down: np.ndarray


@dataclass(frozen=True)
class Reading:
    """An expert that is being read: rows of both tables once its matrices are packed."""

    number: int
    gate_up: Future[np.ndarray]
    down: Future[np.ndarray]

    @property
    def futures(self) -> tuple[Future[np.ndarray], ...]:
        return self.gate_up, self.down


class ExpertCache:
    """Memory for some of the routed experts of some layers.

    size_bytes: of all slots. picked: experts that a row picks in a layer. pool: threads that read.
    """

    def __init__(self, size_bytes: int, packer: Packer, picked: int, pool: Executor) -> None:
        self.size_bytes, self.counts, self.passing = size_bytes, ExpertCounts(), Lock()
        self._packer, self._picked, self._pool = packer, picked, pool
        self._layers: list[CachedExperts] = []
        self._counting = Lock()

    def add(self, experts: RoutedExperts, gate_up: np.ndarray, down: np.ndarray) -> CachedExperts:
        """Take in a layer's experts, and the tables that tell compiled code where they are."""
        layer = CachedExperts(len(self._layers), experts, gate_up, down)
        self._layers.append(layer)
        return layer

    def open(self) -> None:
        """Take the memory, once all layers are there; an expert of each form is read to measure it.

        Raises ValueError where not even one fits.
        """
        forms = {
            layer.experts.form(number): (layer.experts, number)
            for layer in self._layers
            for number in range(layer.experts.number)
        }
        self.slot_bytes = max((self._packed_bytes(*one) for one in forms.values()), default=LINE)
        self.experts = sum(layer.experts.number for layer in self._layers)
        self.slots = min(self.size_bytes // self.slot_bytes, self.experts)
        if self.experts and not self.slots:
            raise ValueError(
                f"expert cache: expected {self.slot_bytes} bytes at least, found {self.size_bytes}"
            )
        self._slot_floats = self.slot_bytes // (LINE_BYTES // LINE)
        self._memory = floats(self.slots * self._slot_floats)
        self._pools = pools_of(self.slots, len(self._layers), self._picked)
        self.restart_counts()

    def restart_counts(self) -> None:
        """Count from here on."""
        self.counts = ExpertCounts()

    def note_read(self, size_bytes: int) -> None:
        """Count bytes that were read; several threads may call this."""
        with self._counting:
            self.counts.read_bytes += size_bytes

    def waves(self, layer: CachedExperts, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the experts that a pass asks a layer for, ascending, as many at a time as there are
        slots; those that are held already are given up last."""
        pool = self._pool_of(layer)
        self.counts.requested += len(numbers)
        for number in numbers:
            pool.touch((layer.layer, number))
        for first in range(0, len(numbers), pool.size):
            yield numbers[first : first + pool.size]

    def fetch(self, layer: CachedExperts, wave: Sequence[int], reading: list[Reading]) -> list[int]:
        """Return which experts of a wave are held, and begin to read the others, which are added to
        a list.

        A caller that does not come to the list's end has to give the wave up.
        """
        pool = self._pool_of(layer)
        keys = {number: (layer.layer, number) for number in wave}
        held = [number for number, key in keys.items() if pool.touch(key)]
        self.counts.held += len(held)
        for number in sorted(keys.keys() - set(held)):
            slot = pool.take(keys[number], keys.values())
            reading.append(self._read(layer, number, slot))
        return held

    def arrived(self, layer: CachedExperts, reading: list[Reading]) -> list[int]:
        """Wait until at least one expert was read; return those that were, and remove them from the
        list. Raises what reading one raised."""
        start = time.perf_counter()
        while not (done := [one for one in reading if all(f.done() for f in one.futures)]):
            pending = [f for one in reading for f in one.futures if not f.done()]
            wait(pending, return_when=FIRST_COMPLETED)
        self.counts.waited_seconds += time.perf_counter() - start
        for one in done:
            layer.gate_up[one.number] = one.gate_up.result()
            layer.down[one.number] = one.down.result()
            reading.remove(one)
        return [one.number for one in done]

    def give_up(
        self, layer: CachedExperts, wave: Sequence[int], reading: Sequence[Reading]
    ) -> None:
        """Drop a wave's experts, some of which are being read, once nothing writes to their slots
        any more."""
        for one in reading:
            wait([future for future in one.futures if not future.cancel()])
        for number in wave:
            self._pool_of(layer).drop((layer.layer, number))

    def _pool_of(self, layer: CachedExperts) -> SlotPool:
        return self._pools[layer.layer % len(self._pools)]

    def _read(self, layer: CachedExperts, number: int, slot: int) -> Reading:
        first = slot * self._slot_floats
        memory = self._memory[first : first + self._slot_floats]
        packer = replace(self._packer, arena=Arena(memory))
        gate_up, down = layer.experts.matrices(number)
        return Reading(
            number,
            self._pool.submit(lambda: packer.stack(gate_up, parts=2).table[0]),
            self._pool.submit(lambda: packer.stack(down).table[0]),
        )

    def _packed_bytes(self, experts: RoutedExperts, number: int) -> int:
        """Return the memory that an expert takes, which is read for it."""
        packer = replace(self._packer, arena=Arena())
        gate_up, down = experts.matrices(number)
        stacks = packer.stack(gate_up, parts=2), packer.stack(down)
        return sum(map(_taken_bytes, stacks))


def _taken_bytes(stack: PackedStack) -> int:
    """Return the bytes that a stack takes of an arena: whole cache lines."""
    return sum(-(-panels.nbytes // LINE_BYTES) * LINE_BYTES for panels in stack.panels)
