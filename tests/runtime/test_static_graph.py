"""Steps of static shapes: padded batches, the graphs of their buckets, and what a graph may hold.

No GPU is needed: steps are recorded and repeated as a CUDA graph repeats them, over the same
tensors and into the same outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime import LLM, SamplingParams, memory
from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out
from mtp_runtime.layers.grouped import GroupedExperts
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model, States
from mtp_runtime.static_graph.options import CudaGraphs, GraphOptions
from mtp_runtime.static_graph.steps import Bucket, Buffers, Replay, StaticSteps, Step
from runtime.checkpoints import GLM4_MOE, SMALL_CONFIGS, write_checkpoint
from runtime.harness import prompts_of, run

PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)


@dataclass
class RecordedGraphs:
    """Repeats steps into the outputs of the first call, and spoils those of all other steps."""

    steps: list[Step] = field(default_factory=list)
    replays: int = 0
    kept_bytes: int = 0
    measured: list[Step] = field(default_factory=list)
    _outputs: list[States] = field(default_factory=list)

    def capture(self, step: Step) -> Replay:
        self.steps.append(step)
        own = step()
        self._outputs.append(own)

        def replay() -> States:
            self.replays += 1
            made = step()
            for states in self._outputs:
                states.before.fill_(torch.nan)
                states.after.fill_(torch.nan)
            own.before.copy_(made.before)
            own.after.copy_(made.after)
            return own

        return replay

    def pool_bytes(self, largest: Step) -> int:
        self.measured.append(largest)
        return self.kept_bytes


def load(path: Path, **options: Any) -> Model:
    return load_model(path, LoadOptions(static_graph=True, **options)).model


@pytest.fixture(scope="module")
def model(small: Path) -> Model:
    return load(small)


def bucket_of(step: Step) -> tuple[int, int | None]:
    layout = step.inputs.layout
    return len(layout.kv_lens) // 2, layout.max_q_len


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_tokens_are_those_of_eager_steps(model: Model, batch: int, k: int) -> None:
    """Every number of drafts, in batches that are padded and in those that are not."""
    prompts = prompts_of([5, 23, 17, 40, 9][:batch], 96)
    method = {"method": "mtp", "k": k} if k else {}
    expected = run(model, prompts, PARAMS, **method)  # type: ignore[arg-type]
    graphs = RecordedGraphs()
    found = run(model, prompts, PARAMS, graphs=graphs, **method)  # type: ignore[arg-type]
    assert found.outputs == expected.outputs
    assert [r.metrics.accepted for r in found.requests] == [
        r.metrics.accepted for r in expected.requests
    ]
    largest, *buckets = [bucket_of(step) for step in graphs.steps]
    assert largest == (128, k + 1), "captured first"
    assert len(set(buckets)) == len(buckets) <= graphs.replays
    assert {requests for requests, _ in buckets} <= {1, 2, 4, 8}
    assert {q_len for _, q_len in buckets} <= set(range(1, k + 2))


def test_graphs_are_bounded_by_buckets_and_share_their_inputs(model: Model) -> None:
    """Lengths vary all the time, and graphs are captured once for each bucket."""
    graphs = RecordedGraphs()
    prompts = prompts_of([4 + 7 * (number % 5) for number in range(11)], 96)
    params = [
        SamplingParams(max_tokens=3 + number, ignore_eos=True) for number in range(len(prompts))
    ]
    run(model, prompts, params, method="mtp", k=2, graphs=graphs, max_batch_size=6)
    buckets = {bucket_of(step) for step in graphs.steps}
    assert len(graphs.steps) == len(buckets) <= 4 * 3 < graphs.replays
    assert {requests for requests, _ in buckets} == {1, 2, 4, 6}
    for tensors in zip(*(inputs_of(step) for step in graphs.steps), strict=True):
        assert len({tensor.data_ptr() for tensor in tensors}) == 1
        assert all(tensor.is_contiguous() for tensor in tensors)


def inputs_of(step: Step) -> list[torch.Tensor]:
    layout = step.inputs.layout
    lengths = [layout.page_table, layout.kv_lens, layout.cu_q]
    return [step.inputs.tokens, layout.positions, layout.slots, *lengths]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_changes_no_row_and_no_entry(small: Path, dtype: str) -> None:
    """Three requests of 1, 3 and 2 rows in a bucket of four times three."""
    model = load(small, dtype=dtype)
    found, expected = (states_of_ragged_batch(model, static=static) for static in (True, False))
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def states_of_ragged_batch(model: Model, *, static: bool) -> list[torch.Tensor]:
    """States of a ragged batch, and every slot of the cache but those of the spare page."""
    pages = PageAllocator(9, 16, with_spare=True)
    cache = model.new_cache(pages)
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
    graphs = RecordedGraphs()
    steps = StaticSteps(model, cache, graphs, pages, Bucket(4, 3))
    sequences = [CachedSequence() for _ in range(3)]
    for spans in ([(0, 20), (0, 7), (0, 33)], [(20, 21), (7, 10), (33, 35)]):
        for sequence, (start, end) in zip(sequences, spans, strict=True):
            pages.append(sequence, end - start)
        layout = lay_out(pages, sequences, spans, model.device)
        tokens = torch.arange(len(layout.positions)) % 96
        states = steps(tokens, layout) if static else model(tokens, cache, layout)
    assert len(states.after) == 6
    assert len(graphs.steps) == int(static)
    entries = [tensor[: pages.pages].nan_to_num(7.0) for tensor in cache.main.tensors]
    return [states.before, states.after, *entries]


def test_rows_left_over_belong_to_requests_without_tokens() -> None:
    pages, sequences = PageAllocator(6, 4), [CachedSequence(), CachedSequence(), CachedSequence()]
    spans = [(5, 7), (0, 1), (2, 4)]
    for sequence, (_, end) in zip(sequences, spans, strict=True):
        pages.append(sequence, end)
    layout = lay_out(pages, sequences, spans, torch.device("cpu"))
    bucket = Bucket.of(layout, 128)
    assert bucket == Bucket(requests=4, q_len=2) and bucket.rows == 8
    assert Bucket.of(layout, 3) == Bucket(3, 2)
    buffers = Buffers(Bucket(8, 3), columns=5, spare_slot=99, device=torch.device("cpu"))
    buffers.fill(Bucket(8, 3), torch.arange(5) + 50, layout)  # leaves other values behind
    buffers.fill(bucket, torch.arange(5) + 10, layout)
    found = buffers.inputs(bucket)
    assert found.tokens.tolist() == [10, 11, 12, 13, 14, 0, 0, 0]
    assert found.layout.slots.tolist() == [*layout.slots.tolist(), 99, 99, 99]
    assert found.layout.kv_lens.tolist() == [7, 1, 4, 0, 0, 0, 0, 0]
    assert found.layout.cu_q.tolist() == [0, 2, 3, 5, 7, 8, 8, 8, 8]
    assert found.layout.positions.tolist() == [5, 6, 0, 2, 3, 0, 0, 0]
    assert found.layout.page_table.shape == (8, 5)
    assert found.layout.page_table[:3, :2].equal(layout.page_table)
    assert Bucket(1, 1).rows == 2


@pytest.mark.parametrize("lengths", [(6, 1, 1, 1), (1, 1, 1), (3, 2, 6, 6), (1,), (6,) * 4])
def test_no_request_has_more_rows_than_a_bucket_s(lengths: tuple[int, ...]) -> None:
    """Attention on a GPU computes no others: all rows are in some request, and no request is too
    long, before any batch too."""
    cpu, pages = torch.device("cpu"), PageAllocator(len(lengths), 16)
    sequences = [CachedSequence() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        pages.append(sequence, length)
    layout = lay_out(pages, sequences, [(0, length) for length in lengths], cpu)
    bucket, largest = Bucket.of(layout, 4), Bucket(4, 6)
    buffers = Buffers(largest, columns=1, spare_slot=99, device=cpu)
    before = buffers.inputs(largest).layout
    assert longest_of(before, largest.rows) <= 6 and set(before.slots.tolist()) == {99}
    buffers.fill(bucket, torch.arange(sum(lengths)), layout)
    assert longest_of(buffers.inputs(bucket).layout, bucket.rows) <= bucket.q_len


def longest_of(layout: BatchLayout, rows: int) -> int:
    """The most rows of a request, after a look at whether every row is in one."""
    lengths = layout.cu_q.diff()
    assert int(layout.cu_q[0]) == 0 and int(layout.cu_q[-1]) == rows and int(lengths.min()) >= 0
    return int(lengths.max())


def test_prompts_are_computed_eagerly(model: Model) -> None:
    graphs = RecordedGraphs()
    run(model, prompts_of([40], 96), PARAMS, graphs=graphs, prefill_chunk=8)
    assert [bucket_of(step) for step in graphs.steps] == [(128, 1), (1, 1)]


@pytest.mark.parametrize(
    ("config", "kind"),
    [(GLM4_MOE, "Gqa"), (SMALL_CONFIGS["deepseek_v32"] | {"index_topk": 64}, "SparseMla")],
)
def test_attention_that_reads_lengths_is_refused(
    tmp_path: Path, config: dict[str, Any], kind: str
) -> None:
    model = load(write_checkpoint(tmp_path, config), max_model_len=128)
    with pytest.raises(UnsupportedError, match=f"layer 0.*Found attention of kind {kind}"):
        run(model, prompts_of([3], 96), PARAMS, graphs=RecordedGraphs())


def test_a_loop_over_experts_is_refused(small: Path) -> None:
    looped = load_model(small, LoadOptions(dequantize_at_load=False)).model
    with pytest.raises(UnsupportedError, match="layer 1.*Found experts in several formats"):
        run(looped, prompts_of([3], 96), PARAMS, graphs=RecordedGraphs())


def test_dense_experts_are_one_product(model: Model) -> None:
    feed_forward = model.layers.part(1, 2).layers[0].feed_forward  # type: ignore[attr-defined]
    assert isinstance(feed_forward.experts, GroupedExperts)


def test_what_graphs_keep_leaves_less_for_the_cache(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(small, LoadOptions(static_graph=True))
    monkeypatch.setattr(memory, "resident_bytes", lambda: 1 << 20)

    def cache_bytes(kept_bytes: int) -> int:
        graphs = RecordedGraphs(kept_bytes=kept_bytes)
        monkeypatch.setattr(GraphOptions, "graphs", lambda self, model, page_size: graphs)
        llm = LLM(
            small, loaded=loaded, static_graph="step.pt2", max_memory_bytes=21 << 20,
            max_batch_size=5, speculate_method="mtp", speculate_max_draft_token_num=2,
        )  # fmt: skip
        assert [bucket_of(step) for step in graphs.measured] == [(5, 3)]
        return sum(t[1:].numel() * t.element_size() for t in llm.engine.cache.tensors)

    page_bytes = 64 * (32 + 8) * 4 * 4
    for kept_bytes in (0, 10 << 20):
        room = 0.9 * ((20 << 20) - kept_bytes)
        assert room - page_bytes < cache_bytes(kept_bytes) <= room


class FakeStream:
    """A stream of a fake torch.cuda, with what it has waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seen = device, list[FakeStream]()

    def wait_stream(self, other: FakeStream) -> None:
        self.seen.append(other)


@dataclass
class FakeCuda:
    """torch.cuda as CudaGraphs uses it: which stream is current, and what is captured."""

    current: FakeStream
    captured: list[tuple[object, FakeStream]] = field(default_factory=list)
    replays: int = 0
    allocated: int = 100

    def install(self, patch: pytest.MonkeyPatch) -> None:
        outer = self

        class Graph:
            def replay(self) -> None:
                outer.replays += 1

        @contextmanager
        def stream(own: FakeStream) -> Iterator[None]:
            before, outer.current = outer.current, own
            yield
            outer.current = before

        @contextmanager
        def graph(own: Graph, pool: object, stream: FakeStream) -> Iterator[None]:
            before, outer.current = outer.current, stream
            outer.captured.append((pool, stream))
            yield
            outer.current = before

        fakes = {
            "Stream": FakeStream, "CUDAGraph": Graph, "graph": graph, "stream": stream,
            "graph_pool_handle": object, "current_stream": lambda device: self.current,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.allocated + 23,
            "reset_peak_memory_stats": lambda device: None,
        }  # fmt: skip
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)


def test_steps_run_once_on_the_capturing_stream_before_they_are_captured(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled and libraries' workspaces made by then; the streams wait for each
    other, and all graphs share a pool and a stream on the model's device."""
    device = torch.device("cuda", 1)
    usual = FakeStream(device)
    cuda = FakeCuda(usual)
    cuda.install(monkeypatch)
    graphs = CudaGraphs(device)
    ran: list[tuple[FakeStream, int, bool]] = []

    def step() -> States:
        ran.append((cuda.current, len(cuda.captured), usual in cuda.current.seen))
        return States(torch.tensor(len(ran)), torch.zeros(1))

    replays = [graphs.capture(cast(Step, step)) for _ in range(2)]
    pools, streams = (set(column) for column in zip(*cuda.captured, strict=True))
    (own,) = streams
    assert len(pools) == 1 and own.device == device and own is not usual
    assert ran == [(own, 0, True), (own, 1, True), (own, 1, True), (own, 2, True)]
    assert usual.seen == [own, own] and cuda.current is usual
    assert [int(replay().before) for replay in replays] == [2, 4]
    assert (cuda.replays, len(ran)) == (2, 4)
    assert graphs.pool_bytes(cast(Step, step)) == 23
    assert ran[4:] == [(own, 2, True)] * 2, "the first run makes what is kept elsewhere"


def test_options_that_contradict(small: Path) -> None:
    with pytest.raises(UsageError, match=r"CUDA graphs cannot .* Expected device cuda. Found cpu"):
        LLM(small, static_graph=True)
    with pytest.raises(UsageError, match=r"A package cannot .* Expected device cpu. Found cuda:1"):
        LLM(small, static_graph="x.pt2", device="cuda:1")
    with pytest.raises(UnsupportedError, match="no static graph. Found cpu, .* static_graph True"):
        LLM(small, static_graph="x.pt2", deterministic=True)
