"""mtp-export serve: an OpenAI-compatible server on the reference runtime."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from mtp_checkpoints.errors import UnsupportedError
from mtp_export.commands import drafting, runtime
from mtp_export.commands import options as shared
from mtp_export.commands.output import remark

SERVER, LIMITS, PROMPTS = "Server", "Batch and cache", "Prompts"
_NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")
_CHUNK_TOKENS = 256


def _switch(text: object) -> bool:
    """Return what true or false says, as engines take it."""
    known = {"true": True, "false": False}
    if str(text).lower() not in known:
        raise typer.BadParameter(f"{text!r} is neither true nor false")
    return known[str(text).lower()]


Host = Annotated[
    str, typer.Option(metavar="ADDRESS", rich_help_panel=SERVER, help="Address to listen on.")
]
Port = Annotated[
    int,
    typer.Option(
        min=0, max=65535, metavar="N", rich_help_panel=SERVER, help="Port; 0 for any free one."
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="MTP_EXPORT_API_KEY",
        metavar="KEY",
        rich_help_panel=SERVER,
        help="Key that clients must send; without one only this machine is served.",
    ),
]
ServedName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=SERVER,
        help="The model's name for clients.",
        show_default="the folder's",
    ),
]
ShutdownTimeout = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="SECONDS",
        rich_help_panel=SERVER,
        help="Time that requests under way have to end at SIGTERM.",
    ),
]
MaxBatchSize = Annotated[
    int,
    typer.Option(min=1, max=128, metavar="N", rich_help_panel=LIMITS, help="Requests per step."),
]
MaxTokensPerBatch = Annotated[
    int, typer.Option(min=1, metavar="N", rich_help_panel=LIMITS, help="Tokens per step.")
]
MaxQueued = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        rich_help_panel=LIMITS,
        help="Requests that wait beside a full batch; further ones get 503.",
    ),
]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-cache",
        rich_help_panel=PROMPTS,
        help="Keep the cache of prompts for requests that begin alike.",
    ),
]
ChunkedPrefill = Annotated[
    Any,
    typer.Option(
        "--enable-chunked-prefill",
        parser=_switch,
        metavar="BOOL",
        rich_help_panel=PROMPTS,
        help=f"Compute prompts {_CHUNK_TOKENS} tokens per step, beside decoding; else as many as a"
        " step takes.",
    ),
]
BlockSize = Annotated[
    int,
    typer.Option(
        min=1, max=1 << 16, metavar="N", rich_help_panel=LIMITS, help="Tokens per page of cache."
    ),
]
MaxMemory = Annotated[
    int | None,
    typer.Option(
        parser=shared.parse_size,
        metavar="SIZE",
        rich_help_panel=LIMITS,
        help="Resident memory: what the model leaves of it is cache.",
        show_default="a cache of 32768 tokens",
    ),
]


def serve(
    context: typer.Context,
    bundle: runtime.Bundle,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    served_model_name: ServedName = None,
    shutdown_timeout: ShutdownTimeout = 60,
    speculate_method: drafting.Method = "auto",
    speculate_max_draft_token_num: drafting.DraftTokens = None,
    speculate_max_ngram_size: drafting.NgramSize = 3,
    adaptive: drafting.Adaptive = False,
    k_schedule: drafting.Schedule = None,
    draft_temperature: drafting.DraftTemperature = None,
    draft_stop_entropy: drafting.StopEntropy = math.inf,
    draft_model: drafting.DraftModel = None,
    max_batch_size: MaxBatchSize = 128,
    max_tokens_per_batch: MaxTokensPerBatch = 2048,
    max_queued_requests: MaxQueued = 512,
    enable_prefix_cache: PrefixCache = False,
    enable_chunked_prefill: ChunkedPrefill = True,
    block_size: BlockSize = 64,
    max_memory: MaxMemory = None,
    device: runtime.Device = "cpu",
    dtype: runtime.Dtype = "float32",
    deterministic: runtime.Deterministic = False,
    max_model_len: runtime.MaxModelLen = None,
    parallel_mode: runtime.ParallelMode = None,
    cuda_graphs: runtime.CudaGraphs = False,
    compiled_step: runtime.CompiledStep = None,
) -> None:
    """Serve a bundle over OpenAI's protocol, with speculation, metrics and a page to watch it."""
    _require_packages()
    from mtp_export.serve.app import Server, ServerOptions
    from mtp_export.serve.run import Address, run_server

    address = Address(host, port, shutdown_timeout)
    address.check(api_key)
    llm = runtime.load_llm(
        context,
        bundle,
        max_batch_size=max_batch_size,
        max_step_tokens=max_tokens_per_batch,
        prefill_chunk=_CHUNK_TOKENS if enable_chunked_prefill else max_tokens_per_batch,
        prefix_cache=enable_prefix_cache,
        page_size=block_size,
        max_memory_bytes=max_memory,
    )
    name = served_model_name or bundle.resolve().name
    server = Server(llm, ServerOptions(name, api_key, max_queued_requests))
    run_server(server, address, lambda url: remark(f"Serving {name} on {url}"))


def _require_packages() -> None:
    """Raise UnsupportedError where the extra is not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            "The server's packages are not installed",
            expected="starlette, uvicorn, pydantic and prometheus-client",
            found=f"no {', '.join(missing)}",
            todo="Install them with pip install 'mtp-export[serve]'",
        )
