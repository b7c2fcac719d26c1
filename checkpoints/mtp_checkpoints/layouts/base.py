"""Target layouts: what engines read as the draft (names, config fields, storages)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from mtp_checkpoints.containers import SAFETENSORS
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import GGUF, NvFp4, NvFp4A16, storages_of
from mtp_checkpoints.quantization.method import Dialect
from mtp_checkpoints.quantization.native import with_renamed_modules
from mtp_checkpoints.quantization.readers import Reads, as_it_is
from mtp_checkpoints.quantization.sglang_quark import QuarkDraft
from mtp_checkpoints.quantization.stored import StoredModel, stored_mtp

Config = dict[str, Any]
NVFP4_OF_MODELOPT = frozenset({NvFp4.storage, NvFp4A16.storage})


@dataclass(frozen=True)
class Placement:
    """One of several machines, from 0, that an engine runs on together.

    tp devices, as many on each machine, share every layer. head is the first machine's address.
    """

    tp: int
    nodes: int = 1
    node: int = 0
    head: str = "127.0.0.1"

    @property
    def devices(self) -> int:
        """Number of devices of each machine."""
        return self.tp // self.nodes

    @property
    def ranks(self) -> range:
        """Numbers of this machine's devices among all."""
        return range(self.node * self.devices, (self.node + 1) * self.devices)


@dataclass(frozen=True)
class Deployment:
    """A finished bundle to start an engine on; schemes are those of the parts, by name.

    experts_alike: either part stores its shared experts as its routed ones. placement None leaves
    the devices to the engine, or takes those of its guide. draft is the folder of the draft, mtp or
    that of an extra draft; draft_tokens are those of a step. files: the first file of weights of
    each part, by its name.
    """

    output_dir: Path
    base_scheme: str
    mtp_scheme: str
    experts_alike: bool = True
    placement: Placement | None = None
    draft: str = "mtp"
    draft_tokens: int = 1
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def main(self) -> str:
        """Main folder, quoted for a shell."""
        return quote(str(self.folder("main")))

    @property
    def mtp(self) -> str:
        """MTP folder, quoted for a shell."""
        return quote(str(self.folder("mtp")))

    def file(self, part: str) -> str:
        """First file of weights of a part, quoted for a shell."""
        return quote(str(self.folder(part) / self.files[part]))

    def folder(self, part: str) -> Path:
        """Return a part's folder, absolute where a shell would take it for an option."""
        folder = self.output_dir / part
        return folder.absolute() if str(folder).startswith("-") else folder


Launch = Callable[[Deployment], str]


@dataclass(frozen=True)
class DraftLaunch:
    """Way to start an engine with an extra draft: by the method that names the draft's folder, for
    a config.json with the model_type."""

    method: str
    model_type: str
    launch: Launch


@dataclass(frozen=True)
class DraftReading:
    """Way in which an engine finds the precision of a draft in the released names.

    by_main_config: it follows the quantization_config of main/config.json, else the draft's own.
    reason says the same in a sentence, for reports. method is the drafting method it holds for,
    where it is one of several. draft returns the class that it has for a family's drafts. reads
    returns what it takes another's config for, given the tensors' names. loads_tables: it loads the
    draft's own embedding and head. refuses_recomputed: model_types whose draft it does not load
    with tensors that all others skip, as is_recomputed tells. by_class: quant_methods whose config
    each of its draft classes takes in another way, with the class of a config.json that reads
    knows, None for others.
    """

    by_main_config: bool
    reason: str
    method: str = ""
    draft: Callable[[ModelSpec], EngineDraft] = lambda family: EngineDraft()
    reads: Reads = as_it_is
    loads_tables: bool = True
    refuses_recomputed: frozenset[str] = frozenset()
    by_class: Mapping[str, Callable[[Mapping[str, Any]], QuarkDraft | None]] = field(
        default_factory=dict
    )


def unquantized_drafts(draft: EngineDraft, of_main: Collection[str]) -> str | None:
    """Return in words which drafts a class builds unquantized, whatever a config says, beside main
    models in these formats, by name; None where it builds them by the config."""
    if not draft.by_config:
        return "every draft of this model unquantized"
    beside = NVFP4_OF_MODELOPT.intersection(of_main)
    if draft.beside_nvfp4 or not beside:
        return None
    return f"every draft unquantized beside a main model in {' and '.join(sorted(beside))}"


@dataclass(frozen=True)
class Engine:
    """An engine that reads a layout; its name is one that --target takes.

    methods are the quant_methods that its loader reads; of the formats that these describe those in
    `unread` are not read, with the reason of each. quantized_heads are the formats, by name, of
    heads that it multiplies with; none where that is not known. dialect is how it wants integers
    described, required for an engine that reads any in files of safetensors. launch makes the shell
    command that serves a bundle with one draft token; None for an engine that does not take the MTP
    part as a folder of its own. extra_drafts are those beside the MTP part that it runs. probe is a
    shell command that succeeds where the engine is installed, if one is known. title is its name in
    text, and in the precision table beside every pair that its storages allow; without one the
    table leaves it out.
    draft_reading is how it finds a draft's precision, which `verify` repeats; None where nothing is
    known of it.
    """

    name: str
    methods: frozenset[str] = frozenset({"fp8"})
    dialect: Dialect | None = None
    quantized_heads: frozenset[str] = frozenset()
    launch: Launch | None = None
    extra_drafts: tuple[DraftLaunch, ...] = ()
    probe: str = ""
    title: str = ""
    draft_reading: DraftReading | None = None
    unread: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.dialect is not None or self.methods <= {"fp8", GGUF}, (
            f"{self.name} has no dialect"
        )

    @property
    def storages(self) -> frozenset[str]:
        """Formats, by name, of linears that its loader reads."""
        return storages_of(self.methods) - self.unread.keys()


@dataclass(frozen=True)
class Target:
    """One layout of the draft (MTP) folder; the main folder keeps the source's layout, but for
    its container.

    engines are those that read the layout, first of all the one named like the target.
    mtp_name maps a source tensor or module name of an MTP layer to the target's.
    mtp_config maps the source's config.json to the draft's; released_config maps a draft's back,
    as far as tensors go, given the main model's num_hidden_layers.
    model_types are those of config.json that the layout exists for; None for all.
    mtp_methods are the quant_methods of drafts that the engines read.
    needs_shared_weights: the engine takes embedding and head from the draft folder.
    dequantizes: fp8 weights become bf16. transposes: linear weights and scales are [in, out].
    container: format of the files of both folders; in another one than safetensors' the main model
    is written anew too.
    """

    name: str
    engines: tuple[Engine, ...]
    mtp_name: Callable[[str, int], str]
    mtp_config: Callable[[Mapping[str, Any]], Config]
    released_config: Callable[[Mapping[str, Any], int], Config]
    model_types: frozenset[str] | None
    mtp_methods: frozenset[str] = frozenset({"fp8"})
    needs_shared_weights: bool = False
    dequantizes: bool = False
    transposes: bool = False
    single_mtp_layer: bool = True
    container: str = SAFETENSORS.name

    def __post_init__(self) -> None:
        assert self.engines[0].name == self.name, f"{self.name} is no name of --target"

    @property
    def rewrites_main(self) -> bool:
        """True where the main folder is in another format than sources are."""
        return self.container != SAFETENSORS.name

    @property
    def mtp_storages(self) -> frozenset[str]:
        """Formats, by name, of the draft's linears that the engines read."""
        return storages_of(self.mtp_methods)

    def check_model_type(self, config: Mapping[str, Any]) -> None:
        """Refuse a model that the layout does not exist for (UnsupportedError)."""
        model_type = config.get("model_type")
        if self.model_types is not None and model_type not in self.model_types:
            raise UnsupportedError(
                f"Target {self.name} has no layout for this model",
                expected=f"model_type {' or '.join(sorted(self.model_types))} in config.json",
                found=repr(model_type)[:100],
                todo="Use --target hf",
            )

    def stored_draft(
        self, config: Mapping[str, Any], main_layers: int = 1, names: Collection[str] = ()
    ) -> StoredModel:
        """Return what a draft folder made for the target holds, by its own config.json and the
        names of its tensors, as for family_of.

        main_layers is the main model's num_hidden_layers, which single-layer drafts do not record;
        only the released names in the answer depend on it. Raises as stored_model.
        """
        released = self.released_config(config, main_layers)
        return stored_mtp(released, self.mtp_name, names, transposes=self.transposes)


@dataclass(frozen=True)
class SingleLayer:
    """Layout of a draft whose one decoder layer is layer 0, a MoE layer.

    layer is that layer's name; names those of modules beside it, by their released ones in the MTP
    layer. changes are fields of config.json.
    """

    layer: str
    names: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, object] = field(default_factory=dict)

    def mtp_name(self, name: str, layer: int) -> str:
        """Return the draft's name of a tensor of MTP layer `layer`."""
        rest = name.removeprefix(f"model.layers.{layer}.")
        for module, renamed in self.names.items():
            if f"{rest}.".startswith(f"{module}."):
                return renamed + rest.removeprefix(module)
        return f"{self.layer}.{rest}"

    def mtp_config(self, config: Mapping[str, Any]) -> Config:
        """Return the draft's config.

        Raises InvalidInputError for a config without a number of layers.
        """
        layer = Fields(config).whole("num_hidden_layers")
        mtp_layer = f"model.layers.{layer}"

        def renamed(module: str) -> str | None:
            """Return a module's name in the draft; None for another layer's."""
            if module == mtp_layer:
                return self.layer
            if module.startswith(f"{mtp_layer}."):
                return self.mtp_name(module, layer)
            return None if module.startswith("model.layers.") else module

        result = {
            **config,
            "num_hidden_layers": 1,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": 0,
            **self.changes,
        }
        return with_renamed_modules(result, renamed)

    @staticmethod
    def released_config(config: Mapping[str, Any], main_layers: int) -> Config:
        """Return the released config of such a draft (InvalidInputError for several layers)."""
        for key in ("num_hidden_layers", "num_nextn_predict_layers"):
            if config.get(key) != 1:
                raise InvalidInputError(
                    f"config.json of the MTP folder has another {key} than its target reads",
                    expected=1,
                    found=repr(config.get(key))[:100],
                    todo="Export the MTP part again",
                )
        return {**config, "num_hidden_layers": main_layers}
