"""One server for the whole session, over the trained miniature of few layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("starlette", reason="the extra serve is not installed")

from mtp_runtime import LLM
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from serve.running import Client, Running, running

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/glm4-moe-tiny"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Products this small lose time to a second thread, and more on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def loaded() -> Loaded:
    return load_model(FIXTURE, LoadOptions())


@pytest.fixture(scope="session")
def served(loaded: Loaded) -> Iterator[Running]:
    """A server with MTP drafts and a prefix cache."""
    llm = LLM(
        FIXTURE,
        loaded=loaded,
        speculate_method="mtp",
        speculate_max_draft_token_num=2,
        max_batch_size=16,
        cache_tokens=16384,
        page_size=16,
        prefix_cache=True,
    )
    with running(llm) as server:
        yield server


@pytest.fixture
def client(served: Running) -> Iterator[Client]:
    own = served.client()
    yield own
    own.close()


@pytest.fixture(scope="session")
def plain(loaded: Loaded) -> LLM:
    """Plain decoding of the same model, to compare with."""
    return LLM(FIXTURE, loaded=loaded)
