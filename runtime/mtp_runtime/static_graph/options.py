"""Choice of the graphs by which a model's steps are repeated, and those of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_runtime.models.model import Model, States
from mtp_runtime.parallel.group import Group
from mtp_runtime.static_graph.steps import Graphs, Replay, Step


@dataclass(frozen=True)
class GraphOptions:
    """cuda_graphs: capture steps on a GPU. package: file of a step that was compiled for a CPU."""

    cuda_graphs: bool = False
    package: Path | None = None

    @classmethod
    def of(cls, static_graph: Path | str | bool, device: str, group: Group) -> GraphOptions:
        """Take True for CUDA graphs, a path for that of a package.

        Refuses what has no graph, before a model is loaded: UsageError for another kind of device,
        UnsupportedError for processes that divide a model.
        """
        if static_graph is False:
            return cls()
        if not isinstance(static_graph, bool | str | Path):
            raise UsageError(
                "Option static_graph cannot be read",
                expected="True, False, or the path of a package",
                found=repr(static_graph)[:100],
            )
        needed, name = ("cuda", "CUDA graphs") if static_graph is True else ("cpu", "A package")
        if device.partition(":")[0] != needed:
            raise UsageError(
                f"{name} cannot run steps on this device", expected=f"device {needed}", found=device
            )
        if not group.is_one:
            raise UnsupportedError(
                "Processes that divide a model have no static graph",
                expected="one process",
                found=group.split.size,
            )
        return cls(True) if static_graph is True else cls(package=Path(static_graph))

    @property
    def wanted(self) -> bool:
        return self.cuda_graphs or self.package is not None

    def graphs(self, model: Model, page_size: int) -> Graphs | None:
        """Return the graphs for a loaded model, None where steps are to be computed anew.

        Raises as CompiledStep.open.
        """
        if self.cuda_graphs:
            return CudaGraphs(model.device)
        if self.package is not None:
            from mtp_runtime.static_graph.compiled import CompiledStep

            return CompiledStep.open(self.package, model, page_size)
        return None


class CudaGraphs:
    """CUDA graphs on one device, in one pool of memory: what one computes with in between, others
    reuse."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step) -> Replay:
        self._run(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            states = step()

        def replay() -> States:
            graph.replay()
            return states

        return replay

    def pool_bytes(self, largest: Step) -> int:
        """Return the memory that a step takes while it runs: that of the pool, since the largest
        graph is captured first."""
        device = self._stream.device
        self._run(largest)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self._run(largest)
        return torch.cuda.max_memory_allocated(device) - before

    def _run(self, step: Step) -> None:
        """Compute a step on the stream that captures. The first time compiles kernels and makes
        this stream's workspaces of libraries, none of which a graph may."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)
