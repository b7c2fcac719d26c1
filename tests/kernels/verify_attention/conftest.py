"""The interpreter of Triton kernels, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
