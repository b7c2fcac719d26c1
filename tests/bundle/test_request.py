"""Requests that pass through JSON to other processes, and the division of work among them."""

from __future__ import annotations

import errno
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_checkpoints.errors import IoError, UsageError
from mtp_checkpoints.sources.byte_source import Address
from mtp_export.bundle.graft import GraftOptions
from mtp_export.bundle.options import (
    BundleOptions,
    Checksums,
    ContentOptions,
    Part,
    RunOptions,
    Share,
    SharedWeights,
    divided,
)
from mtp_export.bundle.precision import Device, HeadQuant, Int4Scope, Int8Scope, ScaleRule
from mtp_export.bundle.quantize import QuantizeOptions
from mtp_export.bundle.request import PLANNERS, Request, restored
from mtp_export.calibrate.options import CalibrationOptions, Method
from mtp_export.calibrate.request import CalibratedOptions
from mtp_export.plan import Link

ADDRESS = Address("hf://acme/tiny@main")
CONTENT = ContentOptions(
    part=Part.MTP,
    shared_weights=SharedWeights.DROP,
    max_shard_bytes=7,
    allow_untied=True,
    checksums=Checksums.ALL,
)
RUN = RunOptions(link=Link.COPY, workers=3, max_memory_bytes=9, overwrite=True, resume=False)
BUNDLE = BundleOptions(Path("in"), Path("out"), target="xllm", content=CONTENT, run=RUN)
REMOTE = replace(BUNDLE, input_dir=ADDRESS)
OPTIONS: dict[str, Any] = {
    "export": BUNDLE,
    "quantize": QuantizeOptions(
        REMOTE,
        base_quant="weight_only_int4",
        mtp_quant="weight_only_int8",
        group_size=64,
        int4_scope=Int4Scope.ALL,
        int8_scope=Int8Scope.LINEARS,
        head_quant=HeadQuant.WEIGHT_ONLY_INT8,
        scale=ScaleRule.MSE,
        device=Device.AUTO,
        allow_untested_pair=True,
    ),
    "quantize --calibrate": CalibratedOptions(
        BUNDLE,
        mtp_quant="weight_only_nvfp4",
        calibration=CalibrationOptions(
            calibrate=Path("/texts.jsonl"), method=Method.AWQ, new_tokens=7, stream=True
        ),
    ),
    "graft": GraftOptions(BUNDLE, Address("s3://bucket/x"), mtp_quant="a8w8_fp8"),
}


def test_every_planner_is_tried() -> None:
    assert OPTIONS.keys() == PLANNERS.keys()


@pytest.mark.parametrize("planner", OPTIONS)
def test_a_request_survives_json(
    planner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but the output folder and the means, which each process has of its own."""
    monkeypatch.chdir(tmp_path)
    request = Request(planner, OPTIONS[planner])
    recorded = json.loads(json.dumps(request.recorded()))
    assert recorded.keys() == {"planner", "options", "link"}
    assert recorded["link"] == "copy"
    bundle = recorded["options"].get("bundle", recorded["options"])
    assert bundle.keys() == {"input_dir", "target", "content"}
    monkeypatch.chdir("/")
    share, elsewhere = Share(2, 3), tmp_path / "elsewhere"
    found = restored(recorded, elsewhere, share)
    own = {"output_dir": elsewhere, "run": RunOptions(link=Link.COPY, share=share)}
    if isinstance(request.bundle.input_dir, Path):
        own["input_dir"] = tmp_path / "in"
    wanted = replace(request.bundle, **own)
    assert found.bundle == wanted
    options = OPTIONS[planner]
    if not isinstance(options, BundleOptions):
        wanted = replace(options, bundle=wanted)
    assert found == Request(planner, wanted)
    assert [type(value) for value in vars(found.bundle.content).values()] == [
        type(value) for value in vars(CONTENT).values()
    ]


@pytest.mark.parametrize("planner", OPTIONS)
def test_paths_that_mean_the_same_everywhere(
    planner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = Request(planner, OPTIONS[planner])
    found = request.absolute().bundle
    assert found.output_dir == tmp_path / "out"
    local = isinstance(request.bundle.input_dir, Path)
    assert found.input_dir == (tmp_path / "in" if local else ADDRESS)
    assert (found.target, found.content, found.run) == ("xllm", CONTENT, RUN)


@pytest.mark.parametrize(
    "damage",
    [
        lambda recorded: recorded.pop("planner"),
        lambda recorded: recorded.update(planner="x"),
        lambda recorded: recorded.pop("options"),
        lambda recorded: recorded.update(options=3),
        lambda recorded: recorded.update(link="x"),
        lambda recorded: recorded["options"].update(more=1),
        lambda recorded: recorded["options"].pop("input_dir"),
        lambda recorded: recorded["options"].update(input_dir=5),
        lambda recorded: recorded["options"].update(target=["hf"]),
        lambda recorded: recorded["options"]["content"].update(part="x"),
        lambda recorded: recorded["options"]["content"].update(max_shard_bytes="7"),
        lambda recorded: recorded["options"]["content"].update(max_shard_bytes=True),
        lambda recorded: recorded["options"]["content"].update(allow_untied=1),
        lambda recorded: recorded["options"]["content"].update(pre_tokenizer=7),
        lambda recorded: recorded["options"].update(content=[]),
    ],
)
def test_what_no_request_records_is_refused(damage: Any) -> None:
    recorded = json.loads(json.dumps(Request("export", BUNDLE).recorded()))
    damage(recorded)
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        restored(recorded, Path("out"), Share(1, 1))


@pytest.mark.parametrize(
    ("sizes", "count", "shares"),
    [
        ([5, 1, 4, 2, 3], 2, [[0, 1, 3], [2, 4]]),
        ([1, 9, 4, 5], 2, [[0, 1], [2, 3]]),
        ([9, 4, 5, 1], 2, [[0, 3], [1, 2]]),
        ([2, 2, 0, 0, 0, 3], 2, [[2, 3, 5], [0, 1, 4]]),
        ([0, 0, 0, 0], 2, [[0, 2], [1, 3]]),  # work without bytes is work
        ([3], 3, [[0], [], []]),
        ([], 2, [[], []]),
    ],
)
def test_work_goes_to_the_share_with_the_least(
    sizes: list[int], count: int, shares: list[list[int]]
) -> None:
    assert divided(sizes, count) == shares


def test_a_value_of_another_type_is_shown_short() -> None:
    recorded = json.loads(json.dumps(Request("export", BUNDLE).recorded()))
    recorded["options"]["content"]["max_shard_bytes"] = "7" * 150
    with pytest.raises(TypeError) as refusal:
        restored(recorded, Path("out"), Share(1, 1))
    assert str(refusal.value) == f"'{'7' * 100}' is no int"


def test_a_dry_run_is_one_where_it_is_asked_for(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries no links: it writes nothing."""

    def failing(*arguments: object, **options: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", failing)
    bundle = BundleOptions(pristine, output, run=RunOptions(link=Link.HARDLINK))
    request = Request("export", bundle)
    assert request.plan(dry_run=True).options == bundle
    with pytest.raises(IoError):
        request.plan()


def test_a_plan_of_every_planner(pristine: Path, output: Path) -> None:
    bundle = BundleOptions(pristine, output, run=RunOptions(link=Link.COPY))
    quantized = QuantizeOptions(bundle, "weight_only_int8", "weight_only_int8")
    for planner, options in (("export", bundle), ("quantize", quantized)):
        plan = Request(planner, options).plan()
        assert plan.options == bundle
        assert ("base_quant" in plan.recorded) is (planner == "quantize")
    with pytest.raises(UsageError, match="are the same"):
        Request("graft", GraftOptions(bundle, pristine)).plan()


def test_values_that_are_no_options_stay_as_they_are(tmp_path: Path) -> None:
    """A request of an object store's checkpoint, and one whose folder is absolute already."""
    request = Request("export", replace(BUNDLE, input_dir=tmp_path / "x", output_dir=tmp_path))
    assert request.absolute() == request
    assert request.recorded()["options"]["input_dir"] == str(tmp_path / "x")
    remote = Request("export", REMOTE)
    assert remote.recorded()["options"]["input_dir"] == "hf://acme/tiny@main"
    found = restored(remote.recorded(), tmp_path, Share(1, 1))
    assert found.bundle.input_dir == ADDRESS
