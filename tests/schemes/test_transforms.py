"""Transforms of a plan's steps: bytes, pieces and figures, and how often a source is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats import (
    UNQUANTIZED,
    Fp8Block,
    Fp8Channel,
    Int4Group,
    Int8Channel,
    NvFp4Packed,
    W4AFp8,
    WeightFormat,
)
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.local_folder import LocalFolder, OpenLocalFile
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.plan import Facts, Resources, Transform
from mtp_export.schemes import transforms
from mtp_export.schemes.transforms import Convert, Transpose
from mtp_kernels.cpu.torch_threads import one_torch_thread

QUEUE = DiskQueue(2)
ROOM = Resources(budget_bytes=1 << 30, device="cpu")
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
DTYPES |= {torch.float16: "F16", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32"}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(folder: Path, **tensors: torch.Tensor) -> list[TensorInfo]:
    """Tensors one after the other in a file."""
    (folder / "tensors").write_bytes(b"".join(map(raw, tensors.values())))
    file, infos, offset = LocalFolder(folder).file("tensors"), [], 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        dtype = DTYPES[tensor.dtype]
        infos.append(TensorInfo(name, DType[dtype], tuple(tensor.shape), file, offset, size))
        offset += size
    return infos


@pytest.fixture(autouse=True, scope="module")
def ended_queue() -> Iterator[None]:
    with QUEUE:
        yield


class Written:
    """Pieces that a transform passed on, by output."""

    def __init__(self, count: int) -> None:
        self.pieces: list[list[bytes]] = [[] for _ in range(count)]

    def take(self, number: int, piece: memoryview) -> None:
        self.pieces[number].append(bytes(piece))

    @property
    def outputs(self) -> list[bytes]:
        return [b"".join(pieces) for pieces in self.pieces]


def run(
    transform: Transform, inputs: Sequence[TensorInfo], count: int, resources: Resources = ROOM
) -> tuple[Written, Facts]:
    written = Written(count)
    outputs = [OutputTensor(f"o{number}", DType.U8, ()) for number in range(count)]
    with ExitStack() as opened:
        streams = [opened.enter_context(TensorStream(one, QUEUE)) for one in inputs]
        return written, transform.run(streams, outputs, written.take, resources)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("made", "count"), [(Int8Channel(), 3), (Int4Group(64), 3), (W4AFp8(), 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pieces_are_the_tensor_at_once(
    made: WeightFormat,
    count: int,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = random(300, 256).to(dtype)
    inputs = stored(tmp_path, before=random(3), weight=weight)[1:]
    (codes, scale), error = made.quantize(weight.float(), "mse")
    monkeypatch.setattr(transforms, "_PIECE_ELEMENTS", 128 * 256)
    written, facts = run(Convert(made, "mse"), inputs, count)
    assert [len(pieces) for pieces in written.pieces] == [3, 3, 1]
    assert written.outputs == [raw(codes), raw(scale), made.constants((300, 256))[0].tobytes()]
    assert facts.keys() == {"sqnr_db", "max_error"}
    assert facts["sqnr_db"] == pytest.approx(error.sqnr_db, rel=1e-12)
    assert facts["max_error"] == error.max_error
    assert Convert(made, "mse").name == made.operation


@pytest.mark.parametrize("made", [Int8Channel(), Int4Group(128), W4AFp8(), UNQUANTIZED])
def test_compiled_code_and_torch_give_the_same(made: WeightFormat, tmp_path: Path) -> None:
    """Of a block whose scale is zero, which torch looks at, and the one before it."""
    codes, scale = random(256, 256).to(torch.float8_e4m3fn), random(2, 2).abs() + 0.1
    codes.view(torch.uint8)[128:, 128:] = 0
    for last in (0.5, 0.0):
        scale[1, 1] = last
        results, error = made.quantize(Fp8Block().source(codes, scale), "mse")
        inputs = stored(tmp_path, codes=codes, scale=scale)
        convert = Convert(made, "mse", Fp8Block())
        written, facts = run(convert, inputs, len(results) + len(made.constants((256, 256))))
        assert not convert.uses_torch
        assert written.outputs[: len(results)] == [raw(result) for result in results]
        assert facts["sqnr_db"] == error.sqnr_db and facts["max_error"] == error.max_error


@pytest.mark.parametrize("budget", [1 << 30, 300 * 256 * 2, 0])
@pytest.mark.parametrize("source", [UNQUANTIZED, Fp8Block(), Fp8Channel()])
def test_joined_weights_share_the_number_of_the_matrix(
    source: WeightFormat, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept in memory or read again, in pieces, by compiled code or torch: the same bytes."""
    monkeypatch.setattr(transforms, "_PIECE_ELEMENTS", 128 * 256)
    weights = [random(300, 256, seed=seed) * size for seed, size in ((0, 1.0), (1, 3.0), (2, 2.0))]
    parts: dict[str, torch.Tensor] = {}
    values = []
    for number, weight in enumerate(weights):
        if source is UNQUANTIZED:
            parts[f"w{number}"] = weight.bfloat16()
            values.append(weight.bfloat16().float())
        else:
            (codes, scale), _ = source.quantize(weight, "minmax")
            parts |= {f"w{number}": codes, f"s{number}": scale}
            values.append(source.decode(codes, scale, torch.float32))
    made = NvFp4Packed().of_amax(max(float(one.abs().max()) for one in values))
    wanted, error = made.quantize(values[0], "mse")
    convert = Convert(NvFp4Packed(), "mse", source, joined=2)
    assert convert.uses_torch == (source == Fp8Channel())
    resources = Resources(budget, "cpu")
    written, facts = run(convert, stored(tmp_path, **parts), 3, resources)
    assert written.outputs == [raw(one) for one in wanted]
    assert [len(pieces) for pieces in written.pieces] == [3, 3, 1]
    assert facts["sqnr_db"] == pytest.approx(error.sqnr_db, rel=1e-12)


@pytest.mark.parametrize("damaged", ["w0", "w1"])
def test_damage_is_found_in_every_weight_that_is_joined(damaged: str, tmp_path: Path) -> None:
    weights = {name: random(130, 64).bfloat16() for name in ("w0", "w1")}
    weights[damaged][129, 3] = torch.nan
    convert = Convert(NvFp4Packed(), "minmax", joined=1)
    with pytest.raises(InvalidInputError, match=f"Tensor {damaged} cannot be converted"):
        run(convert, stored(tmp_path, **weights), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_become_fp8_without_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = random(300, 200).to(dtype)
    (codes, scale), error = Fp8Block().quantize(weight.float(), "minmax")
    convert = Convert(Fp8Block(), "minmax")
    written, facts = run(convert, stored(tmp_path, pad=random(1).bfloat16(), weight=weight)[1:], 2)
    assert not convert.uses_torch
    assert written.outputs == [raw(codes), raw(scale)]
    assert facts["max_error"] == error.max_error


def test_blocks_of_fp8_are_read_with_their_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, scale = random(300, 200).to(torch.float8_e4m3fn), random(3, 2).abs() + 0.1
    inputs = stored(tmp_path, codes=codes, scale=scale)
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    expected = codes.float() * wide
    monkeypatch.setattr(transforms, "_PIECE_ELEMENTS", 2 * 128 * 200)
    convert = Convert(UNQUANTIZED, "minmax", Fp8Block())
    assert convert.name == "dequantize_fp8_block"
    written, facts = run(convert, inputs, 1)
    assert [len(piece) for piece in written.pieces[0]] == [256 * 400, 44 * 400]
    assert written.outputs == [raw(expected.bfloat16())]
    error = (expected - expected.bfloat16().float()).double()
    signal = expected.double().square().sum()
    assert facts["sqnr_db"] == pytest.approx(
        10 * math.log10(float(signal / error.square().sum())), rel=1e-9
    )
    assert facts["max_error"] == float(error.abs().max())


@pytest.mark.parametrize(
    ("rows", "columns", "pieces"),
    [(300, 8192, 3), (300, 4096, 2), (300, 1 << 14, 3), (1024, 1024, 1), (1025, 1024, 2)],
)
def test_a_piece_has_a_million_elements_in_whole_blocks(
    rows: int, columns: int, pieces: int, tmp_path: Path
) -> None:
    weight = torch.zeros(rows, columns, dtype=torch.bfloat16)
    written, _ = run(Convert(Int8Channel(), "minmax"), stored(tmp_path, weight=weight), 3)
    assert len(written.pieces[0]) == pieces
    if pieces == 3:
        assert [len(piece) for piece in written.pieces[0]] == [128 * columns] * 2 + [44 * columns]


def test_where_nothing_was_lost_there_is_no_ratio(tmp_path: Path) -> None:
    weight = torch.zeros(4, 128)
    assert run(Convert(Int8Channel(), "minmax"), stored(tmp_path, weight=weight), 3)[1] == {
        "sqnr_db": None, "max_error": 0.0,
    }  # fmt: skip
    weight[:] = torch.arange(128) - 64.0
    weight[:, 0] = 127.0
    _, facts = run(Convert(Int8Channel(), "minmax"), stored(tmp_path, weight=weight), 3)
    assert facts == {"sqnr_db": None, "max_error": 0.0}


def test_damaged_rows_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "_PIECE_ELEMENTS", 128 * 64)
    weight = random(300, 64)
    weight[200, 3] = torch.inf
    (info,) = stored(tmp_path, weight=weight)
    with pytest.raises(InvalidInputError, match=r"weight cannot be converted") as refusal:
        run(Convert(Int8Channel(), "minmax"), [info], 3)
    error = refusal.value
    assert error.what.endswith("(rows 128 to 255)")
    assert error.where == tmp_path / "tensors"
    assert "finite" in str(error.found)
    assert str(error.todo).startswith("The weight or its scale is damaged")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read, from now on."""
    sizes: list[int] = []

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(file: Any, *arguments: Any) -> Any:
            start, end = arguments[-2:]
            sizes.append(end - start)
            return read(file, *arguments)

        return reading

    for name in ("read", "read_into"):
        monkeypatch.setattr(OpenLocalFile, name, counted(getattr(OpenLocalFile, name)))
    monkeypatch.setattr(OpenLocalFile, "read_cached", lambda *_: None)
    return sizes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("budget", [6, 1000, 5000, 1 << 30])
@pytest.mark.parametrize("shape", [(37, 53), (1, 40), (40, 1), (1, 1), (40, 30)])
def test_a_transposed_matrix(
    shape: tuple[int, int], budget: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    matrix = (random(*shape) * 50).abs().to(dtype)
    inputs = stored(tmp_path, matrix=matrix)
    written, facts = run(Transpose(), inputs, 1, Resources(budget, "cpu"))
    assert written.outputs == [raw(matrix.T)]
    assert facts == {}
    assert Transpose().name == "transpose"


@pytest.mark.parametrize(
    ("columns", "budget", "panels"),
    [
        # 64 rows of 4 bytes: 256 bytes an output row, a sixth of the budget a strip, three strips
        (96, 1 << 30, 1),
        (96, 49152, 1),
        (96, 49100, 2),
        (96, 24576, 2),
        (97, 24576, 3),
        (96, 12288, 4),
        (96, 6, 96),
    ],
)
def test_a_matrix_is_read_once_per_panel_that_the_budget_holds(
    columns: int, budget: int, panels: int, tmp_path: Path, reads: list[int]
) -> None:
    inputs = stored(tmp_path, matrix=random(64, columns))
    written, _ = run(Transpose(), inputs, 1, Resources(budget, "cpu"))
    assert sum(reads) == panels * 64 * columns * 4
    strip = max(budget // 6, columns * 4)
    assert max(reads[1:], default=0) <= strip, "a strip of whole rows, after the queue's block"
    assert max(map(len, written.pieces[0])) <= max(budget // 6, 256)


def test_strips_do_not_grow_with_the_budget(tmp_path: Path) -> None:
    matrix = torch.zeros(3000, 1024, dtype=torch.float32)
    inputs = stored(tmp_path, matrix=matrix)
    written, _ = run(Transpose(), inputs, 1)
    assert len(written.pieces[0][0]) == (4 << 20) // 12000 * 12000


def test_workers_compute_with_one_thread_each() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError), one_torch_thread():
            assert torch.get_num_threads() == 1
            raise RuntimeError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
