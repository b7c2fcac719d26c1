"""Steps compiled ahead of time for a CPU: layers exported by torch.export, packaged by AOTInductor.

A package holds code and no weight: these are inputs of its programs, as the cache is. Layers of one
form share a program, so that compiling takes as long for sixty layers as for one of each form. It
fits any model of such layers, under the torch and on the kind of CPU that it was compiled with.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.quiet import quieted
from mtp_runtime.models.model import Model
from mtp_runtime.static_graph.programs import Program, ProgramLayers, export_layers, form_of
from mtp_runtime.static_graph.steps import Replay, Step, layers_of

SUFFIX = ".pt2"
_FACTS = "mtp_export"  # key of what a package was made for, in its metadata


@dataclass(frozen=True)
class PackageFacts:
    """Machine and model that a package was made for; step is the digest of its layers' forms."""

    torch: str
    cpu: str
    dtype: str
    page_size: int
    step: str

    @classmethod
    def of(cls, model: Model, page_size: int) -> PackageFacts:
        """Return the facts of a package for a model on this machine."""
        forms = sorted(set(map(form_of, layers_of(model))))
        cpu = torch.backends.cpu.get_cpu_capability()
        return cls(
            torch=torch.__version__,
            cpu=cpu,
            dtype=str(model.dtype).removeprefix("torch."),
            page_size=page_size,
            step=hashlib.sha256(" ".join(forms).encode()).hexdigest()[:16],
        )


def compile_step(model: Model, page_size: int, path: Path) -> None:
    """Compile the steps of a model that was loaded for static graphs, into a package.

    Raises UnsupportedError for a model whose steps cannot be a static graph, and where there is no
    C++ compiler.
    """
    _require_compiler()
    exported = export_layers(model, page_size)
    import torch._inductor
    from torch._inductor.package.package import package_aoti
    from torch._inductor.utils import fresh_cache

    facts = json.dumps(asdict(PackageFacts.of(model, page_size)))
    options = {
        "aot_inductor.metadata": {_FACTS: facts},
        "aot_inductor.package": True,
        "compile_threads": 1,
    }
    # Inductor remarks on operators that it leaves to torch.
    with fresh_cache(), quieted("torch._inductor", logging.ERROR):
        files: dict[str, Any] = {
            form: torch._inductor.aot_compile(
                program.module(check_guards=False), *program.example_inputs, options=dict(options)
            )
            for form, program in exported.items()
        }
        package_aoti(str(path), files)


@dataclass(frozen=True)
class CompiledStep:
    """Steps of a model by the programs of a package, as a way to repeat them."""

    programs: Mapping[str, Program]  # by the form of a layer

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
        from torch._inductor.package.package import load_package

        forms = set(map(form_of, layers_of(model)))
        loaded = {form: load_package(str(path), form, run_single_threaded=True) for form in forms}
        return cls({form: package.loader.boxed_run for form, package in loaded.items()})

    def capture(self, step: Step) -> Replay:
        model = replace(step.model, layers=ProgramLayers.of(step.model, self.programs))
        return Step(model, step.cache, step.inputs)

    def pool_bytes(self, largest: Step) -> int:
        """Return 0: the programs keep nothing."""
        return 0


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
            name, *_ = (n for n in archive.namelist() if n.endswith("wrapper_metadata.json"))
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
    fields, others = asdict(facts), asdict(other)
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value != others[name])
