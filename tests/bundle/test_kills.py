"""kill -9 at random moments of an export, a quantization and a streamed verification: nothing that is
left looks whole, and the same command ends with the same bytes."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bundle.commands import COMMANDS, Files, check_nothing_looks_whole, finish
from cases import Outcome, nightly_but, run_program
from runtime.checkpoints import SMALL, write_checkpoint

KILLS = nightly_but([4], [4, 67])  # of each of three commands: 201
SEED = 9


@pytest.fixture(scope="module")
def forks(monkeypatch_module: pytest.MonkeyPatch) -> multiprocessing.context.ForkServerContext:
    """Processes forked from one that has imported everything and computed nothing yet."""
    monkeypatch_module.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cases", "mtp_export.verify", "mtp_export.bundle.build"])
    return context
