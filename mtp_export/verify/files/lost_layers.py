"""Main layers that config.json announces and of which no tensor is there: a download that was cut
off, or the config.json of a larger model. No graft gives them back."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_export.verify.check import Item, verdict
from mtp_export.verify.diagnosis.causes import presence as causes
from mtp_export.verify.files.astray import each

_NUMBER = re.compile(r"\blayers\.(\d{1,6})\.", re.ASCII)
_NAME = "main layers announced and there"


def lost_layers(stored: StoredModel, there: Collection[str]) -> Item | None:
    """Return the failure of whole main layers that are not there; None where each has a tensor.

    stored: the whole model as its config.json gives it. there: the names of its tensors.
    """
    numbers = {_number_of(name) for name in there if name not in stored.mtp.tensors}
    missing: dict[int, list[str]] = {}  # of no layer: -1
    wanted = set[int]()
    for one in stored.main.weights.values():
        number = _number_of(one.weight.name)
        names = [tensor.name for tensor in one.tensors if tensor.name not in there]
        wanted.add(number)
        if not one.weight.optional and names and (number < 0 or number not in numbers):
            missing.setdefault(number, []).extend(names)
    others, wanted = missing.pop(-1, []), wanted - {-1}
    lost = sorted(missing)
    if not lost or not wanted & numbers:
        return None
    mtp = [*stored.mtp.tensors]
    if any(name in there for name in mtp):
        mtp = []
    are_last = lost[0] > 0 and lost == [*range(lost[0], max(wanted) + 1)]
    words = causes.main_layers_lost(
        len(wanted),
        lost,
        sorted(others),
        fewer=lost[0] if are_last and not others else None,
        module=bool(mtp),
    )
    item = verdict(_NAME, each([*chain(*missing.values()), *others, *mtp], words))
    return replace(item, figure=f"{len(lost)} of {len(wanted)} lost", subject=CONFIG_NAME)


def may_have_lost(count: int | None, there: Iterable[str]) -> bool:
    """Return whether the number of one of `count` layers is in no name."""
    numbers = {_number_of(name) for name in there}
    return count is not None and any(number not in numbers for number in range(count))


def _number_of(name: str) -> int:
    number = _NUMBER.search(name)
    return -1 if number is None else int(number[1])
