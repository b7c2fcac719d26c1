"""A stand-in for the package ray: tasks run in this process, one after the other, with another
current folder and pickled copies of what they are given, as ray's own workers would have."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """Base of ray's exceptions."""


class RayTaskError(RayError):
    """A task's own exception, as its cause."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class WorkerCrashedError(RayError):
    """A worker that died more often than a task may be retried."""


@dataclass(eq=False)
class Reference:
    """A result to come."""

    run: Callable[[], Any]


@dataclass(frozen=True)
class Task:
    """A remote function with its options."""

    cluster: FakeRay
    function: Callable[..., Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def options(self, **settings: Any) -> SimpleNamespace:
        """Return what can only be run, as ray does."""
        return SimpleNamespace(remote=replace(self, settings=self.settings | settings).remote)

    def remote(self, *arguments: Any) -> Reference:
        return Reference(lambda: self.cluster.attempt(self, arguments))


@dataclass
class FakeRay:
    """The module; deaths are the attempts whose worker dies, by number, after the work is done."""

    deaths: set[int] = field(default_factory=set)
    attempts: int = 0
    addresses: list[str] = field(default_factory=list)
    connected: bool = False
    cores: Sequence[int] = (2,)
    tasks: list[Task] = field(default_factory=list)
    refuses: Exception | None = None
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def init(self, address: str, **settings: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.addresses.append(address)
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": float(cores)}} for cores in self.cores]

    def put(self, value: Any) -> bytes:
        return pickle.dumps(value)

    def remote(self, **settings: Any) -> Callable[[Callable[..., Any]], Task]:
        return lambda function: Task(self, pickle.loads(pickle.dumps(function)), settings)

    def wait(self, references: list[Reference], num_returns: int) -> tuple[list[Any], list[Any]]:
        return references[-num_returns:], references[:-num_returns]

    def get(self, reference: Reference) -> Any:
        return reference.run()

    def attempt(self, task: Task, arguments: tuple[Any, ...]) -> Any:
        """Run a task, again where its worker dies."""
        self.tasks.append(task)
        given = [pickle.loads(each) if isinstance(each, bytes) else each for each in arguments]
        for _ in range(task.settings["max_retries"] + 1):
            self.attempts += 1
            try:
                with contextlib.chdir("/"):
                    result = task.function(*given)
            except Exception as error:
                raise RayTaskError(pickle.loads(pickle.dumps(error))) from None
            if self.attempts not in self.deaths:
                return pickle.loads(pickle.dumps(result))
        raise WorkerCrashedError("The worker died unexpectedly\nwith details")
