"""Number of this process among those that torchrun started, or any launcher that sets its
variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mtp_checkpoints.errors import UsageError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LaunchedProcess(NamedTuple):
    """Number of a process, its rank, among all of the launch and among those of its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def is_alone(self) -> bool:
        """True where no other process was started."""
        return self.world_size == 1


def launched_process(variables: Mapping[str, str]) -> LaunchedProcess:
    """Read a process's ranks (UsageError); without a launcher it is alone."""
    if not all(variables.get(name) for name in VARIABLES):
        return LaunchedProcess()
    numbers = [variables[name] for name in ("RANK", "WORLD_SIZE")]
    local = variables.get("LOCAL_RANK") or "0"
    decimal = all(number.isdecimal() for number in (*numbers, local))
    if not decimal or int(numbers[0]) >= int(numbers[1]):
        raise UsageError(
            "The launcher's variables make no sense",
            expected="RANK below WORLD_SIZE, and LOCAL_RANK, in decimal digits",
            found=f"RANK={numbers[0]}, WORLD_SIZE={numbers[1]}, LOCAL_RANK={local}",
        )
    return LaunchedProcess(int(numbers[0]), int(numbers[1]), int(local))
