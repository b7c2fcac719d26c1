"""A rank that ends: an error in those that wait for it, at once and from then on."""

from __future__ import annotations

import os
import signal

import pytest

from mtp_checkpoints.errors import IoError
from mtp_runtime.parallel.group import Group
from runtime.ranks import of_each, ranks


def test_a_rank_that_dies_is_an_error_in_the_others() -> None:
    with ranks(3, killed=True) as group:
        (pid,) = of_each(group, process_of)[1]
        os.kill(int(pid), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(IoError, match=r"has ended or cannot be reached \(rank 0 of 3\)"):
                of_each(group, process_of)


def process_of(group: Group) -> list[int]:
    return [os.getpid()]
