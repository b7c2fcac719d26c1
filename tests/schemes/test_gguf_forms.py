"""Tensors of GGUF files whose rows change places: written in pieces, none held as a whole."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from mtp_checkpoints.containers.gguf_forms import ByKind, Form, InTurns
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats import UNQUANTIZED, WeightFormat
from mtp_checkpoints.formats import Fp8Block as Fp8
from mtp_checkpoints.formats.ggml_blocks import Q8
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.plan import Facts, Resources
from mtp_export.schemes import gguf_forms
from mtp_export.schemes.gguf_forms import Reform
from mtp_kernels.quantize import Fp8Block, dequantize_fp8_block
from schemes.test_transforms import Written, random, raw, stored

ROOM = Resources(budget_bytes=1 << 30, device="cpu")
COLUMNS = 64
# Heads of 48 keys, 48 queries and 96 values side by side: their rows begin inside of fp8 blocks.
KINDS = Form(rows=ByKind(4, (48, 48, 96)), parts=(("qk", 384), ("v", 384)))
TURNS = Form(rows=InTurns(2, 3, 40, first=100))


def reformed(
    transform: Reform, sizes: tuple[int, ...], folder: Path, **tensors: torch.Tensor
) -> tuple[Written, Facts]:
    outputs = [OutputTensor(f"o{n}", DType.BF16, (size, COLUMNS)) for n, size in enumerate(sizes)]
    written = Written(len(outputs))
    with DiskQueue(1) as queue, ExitStack() as opened:
        infos = stored(folder, **tensors)
        streams = [opened.enter_context(TensorStream(one, queue)) for one in infos]
        return written, transform.run(streams, outputs, written.take, ROOM)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 rows each."""
    monkeypatch.setattr(gguf_forms, "_PIECE_ELEMENTS", 1)


def by_kind(weight: torch.Tensor) -> torch.Tensor:
    heads = weight.view(4, 192, COLUMNS)
    return torch.cat([kind.flatten(0, 1) for kind in heads.split([48, 48, 96], dim=1)])


def test_rows_of_kinds_in_two_outputs(tmp_path: Path) -> None:
    weight = random(768, COLUMNS).bfloat16()
    written, facts = reformed(Reform(KINDS), (384, 384), tmp_path, before=weight)
    assert [len(pieces) for pieces in written.pieces] == [3, 3] and facts == {}
    assert b"".join(written.outputs) == raw(by_kind(weight))


@pytest.mark.parametrize("made", [Q8(), UNQUANTIZED])
def test_blocks_of_fp8_inside_which_heads_begin(made: WeightFormat, tmp_path: Path) -> None:
    codes = random(768, COLUMNS).to(torch.float8_e4m3fn)
    scale = random(6, 1, seed=1).abs() + 0.1
    transform = Reform(KINDS, made, Fp8())
    written, facts = reformed(transform, (384, 384), tmp_path, codes=codes, scale=scale)
    values = dequantize_fp8_block(Fp8Block(codes, scale), torch.float32)[0]
    (wanted, *_), error = made.quantize(by_kind(values), "minmax")
    assert b"".join(written.outputs) == raw(wanted)
    assert facts["sqnr_db"] == pytest.approx(error.sqnr_db)


def test_rows_in_turns_behind_others(tmp_path: Path) -> None:
    weight = random(340, COLUMNS).bfloat16()
    written, _ = reformed(Reform(TURNS), (340,), tmp_path, weight=weight)
    turned = weight[100:].view(2, 3, 40, COLUMNS).transpose(0, 1).reshape(-1, COLUMNS)
    assert written.outputs == [raw(torch.cat((weight[:100], turned)))]
    assert len(written.pieces[0]) == 3


def test_columns_in_turns_of_rows_in_their_order(tmp_path: Path) -> None:
    weight = random(300, COLUMNS).bfloat16()
    columns = InTurns(2, 2, 16)
    written, _ = reformed(Reform(Form(columns=columns)), (300,), tmp_path, weight=weight)
    turned = weight.view(300, 2, 2, 16).transpose(1, 2).reshape(300, COLUMNS)
    assert written.outputs == [raw(turned)] and len(written.pieces[0]) == 3
