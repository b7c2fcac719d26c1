"""Verifications whose bytes are read in shares: the report is that of one run, faults included, and
no byte is read twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cases import Outcome, quantize, read_json, run_program, tree
from mtp_export.checkpoint.disk_queue import DiskQueue
from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.tensor_stream import TensorStream


@pytest.fixture
def bundle(pristine: Path, output: Path) -> Path:
    """A quantized bundle."""
    schemes = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8", "--quiet")
    assert quantize(pristine, output, *schemes).code == 0
    return output


def verify(bundle: Path, source: Path, *options: object) -> Outcome:
    level = ("--level", "weights", "--workers", "2", "--quiet")
    return run_program("verify", bundle, "--source", source, *level, *options)


def said(outcome: Outcome, report: Path) -> tuple[int, Any]:
    """Return exit code and items of a verification."""
    checks = read_json(report)["checks"]
    return outcome.code, [(check["name"], check["items"]) for check in checks]


def read_in_shares(bundle: Path, source: Path, found: Path, shares: Sequence[str]) -> None:
    for share in shares:
        outcome = verify(bundle, source, "--workdir", found, "--share", share)
        assert outcome.code == 0, outcome.err


def reports(bundle: Path, source: Path, found: Path) -> tuple[Any, Any]:
    """Return what one run says, and one that joins shares."""
    one, joined = found.with_suffix(".one.json"), found.with_suffix(".joined.json")
    alone = verify(bundle, source, "--report", one)
    return said(alone, one), said(
        verify(bundle, source, "--workdir", found, "--report", joined), joined
    )


def damage(bundle: Path) -> None:
    shard = next(iter(sorted((bundle / "main").glob("*.safetensors"))))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 0x40
    shard.write_bytes(raw)


@pytest.mark.parametrize("faulty", [False, True])
def test_the_report_of_one_run(faulty: bool, bundle: Path, pristine: Path, tmp_path: Path) -> None:
    if faulty:
        damage(bundle)
    read_in_shares(bundle, pristine, tmp_path / "found", ["3/3", "1/3", "2/3"])
    alone, joined = reports(bundle, pristine, tmp_path / "found")
    assert joined == alone
    assert alone[0] == (7 if faulty else 0)


def test_what_shares_have_read_is_not_read_again(
    bundle: Path, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = TensorStream.__init__

    def watched(stream: TensorStream, info: TensorInfo, queue: DiskQueue) -> None:
        if str(info.path).startswith(str(bundle)):
            read.append(info.name)
        real(stream, info, queue)

    monkeypatch.setattr(TensorStream, "__init__", watched)
    verify(bundle, pristine)
    every = set(read)
    read.clear()
    read_in_shares(bundle, pristine, tmp_path / "found", ["1/2"])
    first = set(read)
    read.clear()
    assert verify(bundle, pristine, "--workdir", tmp_path / "found").code == 0
    assert set() < first < every
    assert not first & set(read)
    assert first | set(read) == every


def test_findings_of_another_state_are_not_taken(
    bundle: Path, pristine: Path, tmp_path: Path
) -> None:
    found = tmp_path / "found"
    read_in_shares(bundle, pristine, found, ["1/2", "2/2"])
    damage(bundle)
    alone, joined = reports(bundle, pristine, found)
    assert joined == alone
    assert alone[0] == 7


@pytest.mark.parametrize("content", [b"", b"[]", b'{"weights": 1, "x": 2}'])
def test_damaged_findings_are_as_none(
    content: bytes, bundle: Path, pristine: Path, tmp_path: Path
) -> None:
    found = tmp_path / "found"
    read_in_shares(bundle, pristine, found, ["1/1"])
    for path in found.iterdir():
        path.write_bytes(content)
    alone, joined = reports(bundle, pristine, found)
    assert joined == alone


def test_shares_of_level_files(bundle: Path, pristine: Path, tmp_path: Path) -> None:
    """Their checksums serve a level above too."""
    for share in ("1/2", "2/2"):
        options = ("--level", "files", "--workdir", tmp_path / "found", "--share", share, "--json")
        outcome = verify(bundle, pristine, *options)
        assert (outcome.code, f'"share": "{share}"' in outcome.out) == (0, True), outcome.err
    alone, joined = reports(bundle, pristine, tmp_path / "found")
    assert joined == alone


def test_shares_that_make_no_sense(bundle: Path, pristine: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    for options, says in (
        (("--share", "1/2"), "--workdir"),
        (("--share", "1/2", "--workdir", tmp_path / "w", "--level", "run"), "--level weights"),
        (("--share", "3/2", "--workdir", tmp_path / "w"), "no share"),
    ):
        outcome = verify(bundle, pristine, *options)
        assert (outcome.code, says in outcome.err) == (2, True), outcome.err
    assert tree(tmp_path) == before
    assert not os.path.exists(tmp_path / "w")
