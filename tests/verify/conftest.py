"""Fixtures for the checks of verify."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Run small matrix products in one thread: a second costs time, and more on a busy machine."""
    torch.set_num_threads(1)
