"""mtp-export serve: an OpenAI-compatible server on the reference runtime."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from socket import socket
from typing import TYPE_CHECKING, Any

import typer

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.tensors.bundle_folder import require_model
from mtp_export.commands.memory_plan import print_memory_plan
from mtp_export.commands.output import DEBUG, Reporting, plain_console, remark
from mtp_export.commands.runtime import BUNDLE, Runtime
from mtp_export.commands.standard_streams import unblocked_stderr
from mtp_export.options import Access, Panel, option, parse_path
from mtp_export.progress import counted
from mtp_runtime.config import LLMOptions

if TYPE_CHECKING:
    from mtp_export.serve.address import Address

_NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")


def _switch(text: str) -> bool:
    """Return what true or false says, as engines take it."""
    known = {"true": True, "false": False}
    if text.lower() not in known:
        raise ValueError(f"{text!r} is neither true nor false")
    return known[text.lower()]


@dataclass(frozen=True)
class Listening:
    """Options of the server itself."""

    host: str = field(
        default="127.0.0.1",
        metadata=option("Address to listen on.", Panel.SERVER, metavar="ADDRESS"),
    )
    port: int = field(
        default=8000,
        metadata=option("Port; 0 for any free one.", Panel.SERVER, metavar="N", low=0, high=65535),
    )
    api_key: str | None = field(
        default=None,
        metadata=option(
            "Key that clients must send; without one only this machine is served.",
            Panel.SERVER,
            metavar="KEY",
            show_envvar=True,
        ),
    )
    served_model_name: str | None = field(
        default=None,
        metadata=option(
            "Name of the model for clients.",
            Panel.SERVER,
            metavar="NAME",
            show_default="the folder's",
        ),
    )
    shutdown_timeout: int = field(
        default=60,
        metadata=option(
            "Time that requests under way have to end at SIGTERM.",
            Panel.SERVER,
            metavar="SECONDS",
            low=0,
            high=1 << 31,
        ),
    )


@dataclass(frozen=True)
class Limits:
    """Options of the batch, its cache and its prompts."""

    max_batch_size: int = field(
        default=LLMOptions.max_batch_size,
        metadata=option("Requests per step.", Panel.LIMITS, metavar="N", low=1, high=128),
    )
    max_tokens_per_batch: int = field(
        default=LLMOptions.max_step_tokens,
        metadata=option("Tokens per step.", Panel.LIMITS, metavar="N", low=1),
    )
    max_queued_requests: int = field(
        default=512,
        metadata=option(
            "Requests that wait beside a full batch; further ones get 503.",
            Panel.LIMITS,
            metavar="N",
            low=0,
        ),
    )
    enable_prefix_cache: bool = field(
        default=False,
        metadata=option("Keep the cache of prompts for requests that begin alike.", Panel.PROMPTS),
    )
    enable_chunked_prefill: bool = field(
        default=True,
        metadata=option(
            f"Compute prompts {LLMOptions.prefill_chunk} tokens per step, beside decoding;"
            " else as many as a step takes.",
            Panel.PROMPTS,
            metavar="BOOL",
            parser=_switch,
        ),
    )
    block_size: int = field(
        default=LLMOptions.page_size,
        metadata=option(
            "Tokens per page of cache.", Panel.LIMITS, metavar="N", low=1, high=1 << 16
        ),
    )

    @property
    def sizes(self) -> dict[str, Any]:
        """Options of the engine, as LLM takes them."""
        chunked = self.enable_chunked_prefill
        return {
            "max_batch_size": self.max_batch_size,
            "max_step_tokens": self.max_tokens_per_batch,
            "prefill_chunk": LLMOptions.prefill_chunk if chunked else self.max_tokens_per_batch,
            "prefix_cache": self.enable_prefix_cache,
            "page_size": self.block_size,
        }


@dataclass(frozen=True)
class ServeCommand:
    """Options of mtp-export serve."""

    bundle: Path = field(metadata=BUNDLE)
    server: Listening = Listening()
    limits: Limits = Limits()
    runtime: Runtime = Runtime()
    config: Path | None = field(
        default=None,
        metadata=option(
            "YAML file with options; the command line and the environment go before it.",
            Panel.SERVER,
            metavar="FILE",
            parser=parse_path,
            access=Access.READ,
            configures=True,
        ),
    )
    debug: bool = field(default=False, metadata=DEBUG)


def serve(options: ServeCommand, context: typer.Context) -> None:
    """Serve a bundle over OpenAI's protocol, with speculation, metrics and a page to watch it."""
    _require_packages()
    require_model(options.bundle)  # before torch is imported, which takes seconds
    from mtp_export.serve.address import Address

    place, limits = options.server, options.limits
    address = Address(place.host, place.port, place.shutdown_timeout)
    address.check(place.api_key)
    name = place.served_model_name or options.bundle.resolve().name
    if not name.isprintable():
        raise UsageError(
            "No client can send the model's name",
            expected="printable characters",
            found=name,
            todo="Give another --served-model-name",
        )
    if options.runtime.dry_run:
        print_memory_plan(options.bundle, options.runtime, context.obj, Reporting(), **limits.sizes)
        return
    with unblocked_stderr(), address.bound() as bound:  # refused before a model is loaded
        _serve_at(address, bound, name, options, context)


def _serve_at(
    address: Address, bound: socket, name: str, options: ServeCommand, context: typer.Context
) -> None:
    """Load the model, and serve it under a name at an address whose socket is bound."""
    from mtp_export.serve.app import Server, ServerOptions
    from mtp_export.serve.run import run_server

    key, limits = options.server.api_key, options.limits
    llm = options.runtime.load(options.bundle, context.obj, **limits.sizes)
    server = Server(llm, ServerOptions(name, key, limits.max_queued_requests, tell=remark))
    run_server(
        server,
        address,
        bound,
        announce=lambda url: _announce(_banner(url, name, has_key=key is not None)),
        take_leave=lambda: _take_leave(server.metrics.served),
    )


def _banner(url: str, name: str, *, has_key: bool) -> str:
    """Return where the server is, and a request to try it with."""
    body = json.dumps({"model": name, "prompt": "def read(", "max_tokens": 48})
    headers = ["'Content-Type: application/json'"]
    if has_key:
        headers.append('"Authorization: Bearer $MTP_EXPORT_API_KEY"')
    curl = " \\\n  ".join(
        [f"curl {url}/v1/completions", *(f"-H {header}" for header in headers), f"-d {quote(body)}"]
    )
    return (
        f"Page      {url}/\n"
        f"API       {url}/v1   (model: {name})\n"
        f"Metrics   {url}/metrics\n"
        f"Try       {curl}\n"
        "Ctrl-C stops it."
    )


def _announce(banner: str) -> None:
    """Print a banner unwrapped, so that its command can be copied."""
    plain_console(stderr=True).print(banner, highlight=False, soft_wrap=True)


def _take_leave(requests: int) -> None:
    """Say how much was served, on a line below the ^C that a terminal shows."""
    console = plain_console(stderr=True)
    if console.is_terminal:
        console.print()
    remark(f"Stopped: {counted(requests, 'request')} served.")


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
