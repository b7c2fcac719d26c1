"""Ranks that see other files than rank 0 at the same path, as on a machine with a stale copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from cases import edit_json
from mtp_checkpoints.errors import InvalidInputError
from mtp_runtime.loading.draft_folder import MEDUSA_NAME, MEDUSA_PICKLE
from mtp_runtime.loading.same_files import require_same_draft
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.parallel.group import Group
from runtime.checkpoints import write_checkpoint
from runtime.drafts import write_eagle3
from runtime.ranks import of_each, ranks


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with ranks(2) as group:
        yield group


def other_bytes(path: Path) -> None:
    """Change the second half of a file, which keeps its header."""
    data = bytearray(path.read_bytes())
    half = len(data) // 2
    data[half:] = bytes(byte ^ 0x80 for byte in data[half:])
    path.write_bytes(data)


# Ways in which a rank's files are not those of rank 0, and words of the refusal.
DIFFERENCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (lambda at: other_bytes(at / "model.safetensors"), "model.safetensors"),
    "config": (
        lambda at: edit_json(at / "config.json", lambda config: config.update(rms_norm_eps=0.5)),
        "config.json",
    ),
    "nothing": (lambda at: None, ""),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("kind", ["model", "draft"])
def test_ranks_that_see_other_files_are_refused(
    group: Group, tmp_path: Path, difference: str, kind: str
) -> None:
    """All of them name the file, though its path is the same."""
    change, words = DIFFERENCES[difference]
    for machine in ("first", "others"):
        write = write_checkpoint if kind == "model" else write_eagle3
        write(tmp_path / machine / "files")
    change(tmp_path / "others/files")
    wanted = [1.0 if words else 0.0]
    assert of_each(group, refused_files, tmp_path, kind, words) == [wanted] * group.size


def refused_files(group: Group, machines: Path, kind: str, words: str) -> list[int]:
    """1 where loading is refused in these words, 0 where it is not refused."""
    with chdir(machines / ("first" if group.is_first else "others")):
        try:
            if kind == "model":
                load_model(Path("files"), LoadOptions(), group)
            else:
                require_same_draft(Path("files"), group)
        except InvalidInputError as error:
            return [int(f"files/{words}" in str(error) and "see different files" in str(error))]
    return [0]


@pytest.mark.parametrize("name", [MEDUSA_NAME, MEDUSA_PICKLE])
def test_ranks_that_see_other_files_of_medusa_are_refused(
    group: Group, tmp_path: Path, name: str
) -> None:
    for machine in ("first", "others"):
        (tmp_path / machine / "files").mkdir(parents=True)
        (tmp_path / machine / "files" / name).write_bytes(machine.encode())
    assert of_each(group, refused_files, tmp_path, "draft", name) == [[1.0]] * group.size
