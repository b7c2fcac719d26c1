"""Checks of several ranks: the divided model beside the whole one, and texts of a streamed pass
divided over them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import export, read_shard
from faults.matrix import no_progress
from mtp_checkpoints.errors import InvalidInputError
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import paths, stream
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.parallel.group import Group
from mtp_runtime.teacher_forcing import Text, Texts
from runtime.checkpoints import write_checkpoint
from runtime.ranks import of_each, ranks

OPTIONS = VerifyOptions(Path(), level=Level.RUN, max_new_tokens=8, ks=(1, 2))


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with ranks(2) as group:
        yield group


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_checkpoint(folder / "source")
    assert export(folder / "source", folder / "bundle", "--link", "copy", "--quiet").code == 0
    return folder / "bundle"


def items_of(context: Context) -> dict[str, Item]:
    return {item.name: item for item in paths.run(context) if "tensor parallel" in item.name}


def test_one_process_says_how_to_compare(bundle: Path) -> None:
    (item,) = items_of(Context.open(replace(OPTIONS, bundle=bundle), no_progress)).values()
    assert (item.name, item.status) == ("tensor parallel 1 or n", Status.NOT_TESTED)
    assert "torchrun" in str(item.cause)


def test_two_are_compared_with_one(bundle: Path, group: Group) -> None:
    context = Context.open(replace(OPTIONS, bundle=bundle), no_progress, group)
    items = items_of(context)
    assert items.keys() == {f"tensor parallel 1 or 2, {mode}" for mode in ("gather", "reduce")}
    assert [item.status for item in items.values()] == [Status.PASS] * 2
    assert "0.0e+00" in items["tensor parallel 1 or 2, gather"].figure


def test_a_rank_with_wrong_rows_fails(bundle: Path, group: Group) -> None:
    """Every rank takes the last rank's part of a row for the first one's."""
    context = Context.open(replace(OPTIONS, bundle=bundle), no_progress, group)
    _ = context.corpus.plain
    group.everywhere(turn_parts, planted=True)
    try:
        item = items_of(context)["tensor parallel 1 or 2, gather"]
    finally:
        group.everywhere(turn_parts, planted=False)
    assert item.status is Status.FAIL and "wrong rows" in str(item.cause)


INTACT = Group.columns


def turn_parts(group: Group, planted: bool) -> None:
    def turned(self: Group, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return torch.cat(INTACT(self, x, sizes).split(list(sizes), dim=1)[::-1], dim=1)

    setattr(Group, "columns", turned if planted else INTACT)  # noqa: B010


def test_texts_of_a_streamed_pass_are_divided(bundle: Path, group: Group, tmp_path: Path) -> None:
    prompts = tmp_path / "texts.jsonl"
    lines = [f'{{"prompt_token_ids": {list(range(5, 5 + n))}}}' for n in (20, 3, 9, 14, 2)]
    prompts.write_text("\n".join(lines))
    found = []
    for ranks_given in (None, group):
        options = replace(
            OPTIONS, bundle=bundle, prompts=prompts, stream=True, workdir=tmp_path / "state"
        )
        context = Context.open(options, no_progress, ranks_given)
        items = stream.run(context)  # some fail: the weights are random
        found.append([(item.name, item.figure) for item in items if item.name.startswith("draft")])
    assert found[0] and found[0] == found[1]
    assert not list((tmp_path / "state").iterdir()), "a finished pass leaves its state behind"


@pytest.mark.parametrize("part", ["main", "mtp", None])
def test_ranks_that_see_other_files_pass_nothing_through(
    part: str | None, bundle: Path, group: Group, tmp_path: Path
) -> None:
    """As on a machine with a stale copy: its states would be another model's."""
    for machine in ("first", "others"):
        shutil.copytree(bundle, tmp_path / machine / "bundle")
    shard = Path()
    if part is not None:
        (shard,) = (tmp_path / "others/bundle" / part).glob("*.safetensors")
        raw, data = shard.read_bytes(), read_shard(shard)[1]
        shard.write_bytes(raw.removesuffix(data) + data[::-1])
    found = of_each(group, refused_pass, tmp_path, shard.name)
    assert found == [[float(part is not None)]] * group.size


def refused_pass(group: Group, machines: Path, shard: str) -> list[int]:
    """1 where a pass is refused for a shard, 0 where it is not refused."""
    texts = tuple(Texts((Text((5, 6, 7, 8 + rank), 1),)) for rank in range(group.size))
    division = stream._Division(Path("bundle"), None, "cpu", None, texts, ("one", "other"))
    with chdir(machines / ("first" if group.is_first else "others")):
        try:
            stream._passed(group, division)
        except InvalidInputError as error:
            return [int(f"/{shard}" in str(error) and "see different files" in str(error))]
    return [0]


def test_texts_are_divided_by_their_tokens() -> None:
    assert stream.divided([20, 3, 9, 14, 2], 2) == [[0, 1, 4], [2, 3]]
    assert stream.divided([5], 3) == [[0], [], []]
