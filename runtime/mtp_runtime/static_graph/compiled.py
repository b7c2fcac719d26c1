"""Steps compiled ahead of time for a CPU: exported by torch.export, packaged by AOTInductor.

A package holds code and no weight: these are inputs of the step, as the cache is. It fits any
model of the same shapes, under the torch and on the kind of CPU that it was compiled with.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mtp_export.errors import InvalidInputError, UnsupportedError
from mtp_export.quiet import quieted
from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.cache import Cache, PageAllocator
from mtp_runtime.models.model import Model, ModelCache, States
from mtp_runtime.static_graph.buckets import Bucket, Buffers, Inputs
from mtp_runtime.static_graph.steps import Replay, Step, refuse_dynamic_layers
from mtp_runtime.static_graph.tensors import outline, tensors_of, with_tensors

SUFFIX = ".pt2"
MAX_ROWS = 128 * 6  # of a step: the largest batch with the most drafts
_FACTS = "mtp_export"  # key of what a package was made for, in its metadata
_EXAMPLE = Bucket(requests=3, q_len=2)


@dataclass(frozen=True)
class PackageFacts:
    """Machine and model that a package was made for; step is the digest of the model's form."""

    torch: str
    cpu: str
    dtype: str
    page_size: int
    step: str

    @classmethod
    def of(cls, model: Model, page_size: int) -> PackageFacts:
        """Return the facts of a package for a model on this machine."""
        digest = hashlib.sha256(outline((_step_parts(model), model.taps)).encode())
        cpu = torch.backends.cpu.get_cpu_capability()
        return cls(
            torch=torch.__version__,
            cpu=cpu,
            dtype=str(model.dtype).removeprefix("torch."),
            page_size=page_size,
            step=digest.hexdigest()[:16],
        )


def compile_step(model: Model, page_size: int, path: Path) -> None:
    """Compile the steps of a model that was loaded for static graphs, into a package.

    Raises UnsupportedError for a model whose steps cannot be a static graph, and where there is no
    C++ compiler.
    """
    _require_compiler()
    exported = export_step(model, page_size)
    import torch._inductor
    from torch._inductor.utils import fresh_cache

    facts = json.dumps(asdict(PackageFacts.of(model, page_size)))
    options = {"aot_inductor.metadata": {_FACTS: facts}, "compile_threads": 1}
    # Inductor remarks on operators that it leaves to torch.
    with fresh_cache(), quieted("torch._inductor", logging.ERROR):
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs=options
        )


def export_step(model: Model, page_size: int) -> torch.export.ExportedProgram:
    """Export the steps of a model, for any number of requests and rows from 2 on.

    Nothing of it may depend on what a tensor holds: torch refuses that by name.
    """
    refuse_dynamic_layers(model)
    pages = PageAllocator(4, page_size, with_spare=True)
    cache = model.new_cache(pages)
    buffers = Buffers(_EXAMPLE, 4, spare_slot=pages.spare_slot, device=model.device)
    step = Step(model, cache, buffers.inputs(_EXAMPLE))
    with torch.no_grad():
        return torch.export.export(
            _Exported(model, cache),
            (arguments_of(step),),
            dynamic_shapes=(_sizes(step),),
            strict=False,
        )


@dataclass(frozen=True)
class CompiledStep:
    """Steps of a model by a package, as a way to repeat them."""

    package: Any

    @classmethod
    def open(cls, path: Path, model: Model, page_size: int) -> CompiledStep:
        """Open a package, which runs its code: it must come from a trusted place.

        Raises InvalidInputError for a file that is none, UnsupportedError for one that was made for
        another model, torch or CPU.
        """
        expected, found = PackageFacts.of(model, page_size), _read_facts(path)
        if found != expected:
            raise UnsupportedError(
                "This step was compiled for something else",
                where=path,
                expected=_in_words(expected, found),
                found=_in_words(found, expected),
                todo="Compile it again with mtp-export compile, for this bundle, here",
            )
        from torch._inductor import aoti_load_package

        return cls(aoti_load_package(str(path), run_single_threaded=True))

    def capture(self, step: Step) -> Replay:
        arguments = arguments_of(step)

        def replay() -> States:
            return States(*self.package.loader.boxed_run(list(arguments)))

        return replay


def arguments_of(step: Step) -> list[torch.Tensor]:
    """Return the tensors that a step is a function of: weights, caches, tokens and layout."""
    layout = step.inputs.layout
    rows = [step.inputs.tokens, layout.positions, layout.slots]
    lengths = [layout.page_table, layout.kv_lens, layout.cu_q]
    return [*tensors_of(_step_parts(step.model)), *tensors_of(step.cache.main), *rows, *lengths]


class _Exported(torch.nn.Module):
    """A step as a function of its tensors."""

    def __init__(self, model: Model, cache: ModelCache) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the states of every row."""
        parts = _step_parts(self.model)
        weights = len(tensors_of(parts))
        embedding, layers, norm = with_tensors(parts, tensors[:weights])
        head = replace(self.model.head, norm=norm)
        model = replace(self.model, embedding=embedding, layers=layers, head=head)
        main: Cache = with_tensors(self.cache.main, tensors[weights:-6])
        tokens, positions, slots, page_table, kv_lens, cu_q = tensors[-6:]
        layout = BatchLayout(positions, slots, page_table, kv_lens=kv_lens, cu_q=cu_q)
        states = Step(model, ModelCache(main), Inputs(tokens, layout))()
        both = states.before, states.after
        return both if states.taps is None else (*both, states.taps)


def _step_parts(model: Model) -> tuple[Any, Any, Any]:
    """Return what a step computes with: embedding, layers and last norm."""
    return model.embedding, model.layers, model.head.norm


def _sizes(step: Step) -> list[dict[int, Any] | None]:
    """Return which sizes of a step's arguments vary, None where none does."""

    def size(name: str, most: int) -> Any:
        return torch.export.Dim(name, min=2, max=most)

    rows, requests, ends = size("rows", MAX_ROWS), size("requests", 129), size("ends", 130)
    pages, columns = size("pages", 1 << 30), size("columns", 1 << 24)
    weights, caches = tensors_of(_step_parts(step.model)), tensors_of(step.cache.main)
    return [
        *(None for _ in weights),
        *({0: pages} for _ in caches),
        *({0: rows} for _ in range(3)),
        *({0: requests, 1: columns}, {0: requests}, {0: ends}),
    ]


def _require_compiler() -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UnsupportedError(
            "There is no C++ compiler here",
            expected=compiler,
            todo="Install g++, or name another compiler in CXX",
        )


def _read_facts(path: Path) -> PackageFacts:
    """Read what a package was made for, without running any of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("wrapper_metadata.json"))
            return PackageFacts(**json.loads(json.loads(archive.read(name))[_FACTS]))
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            "This is no compiled step",
            where=path,
            expected="a file that mtp-export compile wrote",
            found=f"{type(error).__name__}: {error}",
        ) from error


def _in_words(facts: PackageFacts, other: PackageFacts) -> str:
    """Return what differs from other facts."""
    own, others = asdict(facts), asdict(other)
    return ", ".join(f"{name} {value}" for name, value in own.items() if value != others[name])
