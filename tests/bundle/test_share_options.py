"""Shares of the work on a bundle: what --share takes, and who does what."""

from __future__ import annotations

import pytest

from mtp_checkpoints.errors import UsageError
from mtp_export.bundle.options import (
    MAX_SHARES,
    Share,
    divided,
    parse_share,
    refuse_cluster_of_share,
)

ARRAY = {"JOB_ID": "77", "TASK_ID": "14", "TASK_MIN": "10", "TASK_MAX": "18", "TASK_STEP": "4"}
NO_ARRAY = ("JOB_ID", "TASK_ID", "TASK_MIN", "TASK_MAX", "TASK_STEP", "TASK_COUNT")


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("1/1", Share(1, 1)),
        ("1/2", Share(1, 2)),
        (" 2/2 ", Share(2, 2)),
        ("0040/0512", Share(40, MAX_SHARES)),
    ],
)
def test_a_share_that_is_named(text: str, share: Share) -> None:
    found = parse_share(text)
    assert found == share and str(found) == f"{share.number}/{share.count}" and found.said == ""


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "-1/2", "1", "a/b", "1/2/3", "", "1/00002"])
def test_no_share(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_share(text)
    words = f"{text!r} is no share: write 1/8 to 8/8, or slurm in a job array"
    assert str(refused.value) == words


def test_shares_that_are_too_many() -> None:
    with pytest.raises(ValueError, match=r"^513 shares are too many: at most 512$"):
        parse_share("1/513")


def slurm(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Share:
    """Parse the share of a task with these variables, and no others of an array."""
    for name in NO_ARRAY:
        monkeypatch.delenv(f"SLURM_ARRAY_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_ARRAY_{name}", value)
    return parse_share(" Slurm ")


def test_tasks_of_an_array_are_shares_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, task in enumerate((10, 14, 18), start=1):
        found = slurm(monkeypatch, **ARRAY | {"TASK_ID": str(task), "TASK_COUNT": "3"})
        assert found == Share(place, 3)
        assert found.said == f" (task {task} of Slurm array 77)"
    alone = {"TASK_ID": "0", "TASK_MIN": "0", "TASK_MAX": "0", "TASK_COUNT": "1"}
    found = slurm(monkeypatch, **alone)
    assert found == Share(1, 1) and found.said == " (task 0 of Slurm array unknown)"


UNKNOWN = (
    "the array has {} of the tasks {}, so a task's share is not known: number them without gaps,"
    " or write --share I/N"
)
OUTSIDE = (
    "task {} is none of the array's tasks 10-18:4: submit it as one of them, or write --share I/N"
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TASK_ID": "9"}, OUTSIDE.format(9)),
        ({"TASK_ID": "6"}, OUTSIDE.format(6)),
        ({"TASK_ID": "13"}, OUTSIDE.format(13)),
        ({"TASK_ID": "22"}, OUTSIDE.format(22)),
        ({"TASK_COUNT": "2"}, UNKNOWN.format(2, "10-18:4")),
        ({"TASK_STEP": "3"}, UNKNOWN.format(3, "10-18:3")),
        ({"TASK_STEP": "0"}, UNKNOWN.format(3, "10-18:0")),
        ({"TASK_STEP": ""}, UNKNOWN.format(3, "10-18:1")),
        (
            {"TASK_COUNT": "", "TASK_MAX": "-1"},
            "slurm needs a task of a job array, which sets SLURM_ARRAY_TASK_MAX,"
            " SLURM_ARRAY_TASK_COUNT",
        ),
    ],
)
def test_no_task_of_an_array(
    changes: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError) as refused:
        slurm(monkeypatch, **ARRAY | {"TASK_COUNT": "3"} | changes)
    assert str(refused.value) == words


def test_the_largest_pieces_are_divided_first() -> None:
    assert divided([5, 9, 1, 4, 0, 0], 2) == [[1, 2, 5], [0, 3, 4]]
    assert divided([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]
    assert divided([7], 3) == [[0], [], []]


def test_a_cluster_takes_no_share() -> None:
    refuse_cluster_of_share(None)
    with pytest.raises(UsageError) as refused:
        refuse_cluster_of_share("auto")
    assert str(refused.value) == (
        "A cluster divides the work itself. Expected --share or --cluster. Found both. Leave"
        " --share out."
    )
