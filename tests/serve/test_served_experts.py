"""A served model with routed experts on disk: the same answers, counts in the metrics, and after
an expert that cannot be read the next request is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_checkpoints.errors import IoError
from mtp_runtime import LLM
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.load import LoadOptions, load_model
from serve.running import running

GLM = Path(__file__).resolve().parents[2] / "fixtures/glm4-moe-tiny"
SLOT_BYTES = 49152  # of an expert of the fixture
BODY: dict[str, Any] = {"prompt": "def read(", "max_tokens": 8, "temperature": 0}


def test_experts_on_disk_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"speculate_method": "mtp", "cache_tokens": 1024}
    with running(LLM(GLM, **options)) as server:
        client = server.client()
        expected = client.post("/v1/completions", **BODY).json["choices"][0]["text"]
        assert "expert_cache" not in client.ask("GET", "/metrics").body.decode()
        client.close()
    loaded = load_model(GLM, LoadOptions(expert_bytes=5 * SLOT_BYTES))
    cache = loaded.expert_cache
    assert cache is not None
    with running(LLM(GLM, loaded=loaded, **options)) as server:
        client = server.client()
        assert client.post("/v1/completions", **BODY).json["choices"][0]["text"] == expected
        counts = cache.counts
        for name, count in (
            ("queries", counts.requested),
            ("hits", counts.held),
            ("read_bytes", counts.read_bytes),
            ("wait_seconds", counts.waited_seconds),
        ):
            assert client.metric(f"vllm:expert_cache_{name}_total") == count > 0

        def fail(*_: object) -> torch.Tensor:
            raise IoError("Planted", where=GLM)

        with monkeypatch.context() as planted:
            planted.setattr(WeightSource, "_read_window", fail)
            assert client.post("/v1/completions", **BODY).status == 500
        assert client.post("/v1/completions", **BODY).json["choices"][0]["text"] == expected
        client.close()
