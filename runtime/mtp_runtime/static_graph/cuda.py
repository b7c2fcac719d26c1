"""Steps captured as CUDA graphs: a GPU repeats them, and the host launches once."""

from __future__ import annotations

import torch

from mtp_runtime.models.model import States
from mtp_runtime.static_graph.steps import Replay, Step


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
