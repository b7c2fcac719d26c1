"""Choice of the graphs by which a model's steps are repeated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_runtime.models.model import Model
from mtp_runtime.parallel.group import Group
from mtp_runtime.static_graph.steps import Graphs


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
            from mtp_runtime.static_graph.cuda import CudaGraphs

            return CudaGraphs(model.device)
        if self.package is not None:
            from mtp_runtime.static_graph.compiled import CompiledStep

            return CompiledStep.open(self.package, model, page_size)
        return None
