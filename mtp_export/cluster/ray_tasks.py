"""Tasks of a Ray cluster, coordinated by this process: a worker or machine that dies loses the task
that it was at, which Ray gives to another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.errors import IoError, UnsupportedError

LOCAL = "local"
# Attempts that may die with their worker or machine: more at one task are no accident.
_MOST_DEATHS = 8


@dataclass(frozen=True)
class Tasks:
    """Calls function(given, key) for every key; str(key) names the task.

    workers: cores of a task, if a machine has as many. failure and todo: what the user is told
    where a task kills its workers.
    """

    function: Callable[[Any, Any], Any]
    given: Any
    keys: Sequence[Any]
    workers: int
    failure: str
    todo: str


def run_tasks(address: str, tasks: Tasks, take: Callable[[Any, Any], None]) -> None:
    """Run tasks on a cluster: local, auto, or ray://host:port.

    take is called in this process with key and result of each that has ended. Raises
    UnsupportedError without Ray, IoError where the cluster cannot be reached or a task killed its
    workers, and what the tasks and take raise.
    """
    with _connected(address) as ray:
        given = ray.put(tasks.given)
        task = ray.remote(
            num_cpus=_cores(ray, tasks.workers),
            max_retries=_MOST_DEATHS,
            scheduling_strategy="SPREAD",
        )(tasks.function)
        running = {task.options(name=str(key)).remote(given, key): key for key in tasks.keys}
        while running:
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            key = running.pop(done)
            take(key, _result(ray, done, tasks, key))


def _result(ray: Any, reference: Any, tasks: Tasks, key: Any) -> Any:
    """Return a task's result; raises what it raised."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise IoError(
            tasks.failure,
            where=str(key),
            found=str(error).partition("\n")[0],
            todo=tasks.todo,
        ) from error


def _cores(ray: Any, workers: int) -> int:
    """Return the cores of one task: as many as it has workers, or as the largest machine has."""
    machines = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return max(1, min(workers, int(max(machines, default=1))))


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Provide Ray, connected to a cluster until the end of the block; a local one ends with it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # no token in the home folder
        options |= {"include_dashboard": False}
    try:
        import ray
    except ImportError:
        raise UnsupportedError(
            "--cluster needs Ray, which is not installed",
            found=f"--cluster {address}",
            todo="Install it on all machines with pip install 'mtp-export[ray]', or divide the work"
            " with --share, which needs nothing",
        ) from None
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise IoError(
            "The Ray cluster cannot be reached",
            where=address,
            found=str(error).partition("\n")[0],
            todo="Start it with ray start, or use --cluster local",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()
