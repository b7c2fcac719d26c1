"""Steps captured as CUDA graphs: a GPU repeats them, and the host launches once."""

from __future__ import annotations

import torch

from mtp_runtime.models.model import States
from mtp_runtime.static_graph.steps import Replay, Step


class CudaGraphs:
    """CUDA graphs in one pool of memory: what one computes with in between, others reuse."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step) -> Replay:
        step()  # compiles kernels and makes the workspaces of libraries, which no graph may
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            states = step()

        def replay() -> States:
            graph.replay()
            return states

        return replay
