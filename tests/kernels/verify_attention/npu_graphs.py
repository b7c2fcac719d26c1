"""torch.npu's graphs on a CPU: operators are noted while they run, and run again at each replay,
the fused attention with the lists of the last update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_operator import NAME


class NPUGraph:
    """Operators in order, with what they returned: a replay writes into the same tensors."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self.updated = False

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """Give every captured attention the one entry, as torch_npu does."""
        (entry,) = cpu_update_input
        for operator, _, given, _ in self.notes:
            if NAME in str(operator):
                assert set(entry) <= set(given)
                given.update(entry)
        self.updated = True

    def replay(self) -> None:
        """Run all again; an update must have come first, for which the attention waits."""
        assert self.updated
        self.updated = False
        for operator, args, given, kept in self.notes:
            made = operator(*args, **given)
            for old, new in zip(tree_leaves(kept), tree_leaves(made), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


class _Noting(TorchDispatchMode):
    def __init__(self, graph: NPUGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "a graph must not read back to the host"
        made = func(*args, **(kwargs or {}))
        self.graph.notes.append((func, args, dict(kwargs or {}), made))
        return made


class Npu:
    """The part of torch.npu that captures."""

    NPUGraph = NPUGraph

    @staticmethod
    @contextmanager
    def graph(graph: NPUGraph, auto_dispatch_capture: bool = False) -> Iterator[None]:
        assert auto_dispatch_capture, "else lengths are held fast"
        with _Noting(graph):
            yield
