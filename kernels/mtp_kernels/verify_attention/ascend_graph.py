"""Steps captured in ACL graphs: an NPU repeats them with other lengths, and the host launches once.

The lengths of attention are arguments from the host, which a graph holds fast. torch_npu notes each
call of the operator while it captures, and writes new lengths into the graph before a replay.

Source: NPUGraph and graph(auto_dispatch_capture=True) of torch_npu, as SGLang's runners use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from mtp_kernels.verify_attention.ascend_npu import MAX_ROWS

Output = TypeVar("Output")


class CapturedStep(Generic[Output]):
    """A step over tensors that stay where they are, captured when this is made, then replayed.

    The step attends with q_len 1 to 16 in every request, the same in all layers and in every
    replay; contents of its tensors may change in between. It must not read a tensor back to the
    host. Call it once before, so that nothing is allocated for the first time in the graph.
    """

    def __init__(self, q_lens: Sequence[int], step: Callable[[], Output]) -> None:
        if not q_lens or not all(1 <= q_len <= MAX_ROWS for q_len in q_lens):
            raise ValueError(f"q_lens: expected 1 to {MAX_ROWS} each, found {list(q_lens)}")
        npu = _npu()
        self._q_lens = tuple(q_lens)
        self._graph = npu.NPUGraph()
        with npu.graph(self._graph, auto_dispatch_capture=True):
            self._output = step()

    def replay(self, kv_lens: Sequence[int]) -> Output:
        """Repeat the step with these cached lengths, its new rows included; returns its output,
        whose tensors the next replay overwrites.

        Raises ValueError for lengths of other requests than were captured.
        """
        if len(kv_lens) != len(self._q_lens) or any(map(int.__lt__, kv_lens, self._q_lens)):
            raise ValueError(
                f"kv_lens: expected {len(self._q_lens)}, at least {list(self._q_lens)}, "
                f"found {list(kv_lens)}"
            )
        self._graph.update(cpu_update_input=[{"actual_seq_kvlen": list(kv_lens)}])
        self._graph.replay()
        return self._output


def _npu() -> Any:
    """Return torch.npu (ValueError where torch_npu has not added it)."""
    if not hasattr(torch, "npu"):
        raise ValueError(
            "ACL graphs: expected torch.npu, found none: install the extra npu and CANN"
        )
    return torch.npu
