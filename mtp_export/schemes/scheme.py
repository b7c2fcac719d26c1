"""Precision schemes: the format, by name, of every role's linears. Data, no code that runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mtp_checkpoints.containers import SAFETENSORS
from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import GGUF
from mtp_checkpoints.formats.ggml_blocks import Q8

# In place of a scheme's name: the part's weights stay as the source stores them.
KEEP = "keep"
# In place of a scheme's name: the main model was quantized by others.
GRAFTED = "grafted"
_TABLES = (Role.EMBEDDING, Role.HEAD, Role.MTP_PROJECTION)
BF16 = "bf16"  # the scheme without quantized linears


@dataclass(frozen=True)
class Scheme:
    """A precision scheme: the format, by name, of every role's linears.

    on_disk describes it to people. variants are the same scheme under another value of an option
    (an int4 scope, an on-disk format), by the option's name and value. int4_activations_fp8: int4
    experts run with activations in fp8. container: format of the files that hold it. tables: the
    format, by name, of embeddings, heads and projections of MTP modules; None: they stay as stored.
    """

    name: str
    on_disk: str
    storages: Mapping[Role, str]
    variants: Mapping[str, Mapping[str, Mapping[Role, str]]] = field(default_factory=dict)
    int4_activations_fp8: bool = False
    container: str = SAFETENSORS.name
    tables: str | None = None

    def __post_init__(self) -> None:
        for storages in self.all_storages:
            assert set(storages) == set(LINEAR_ROLES), f"{self.name} leaves out a role"

    @property
    def with_tables(self) -> Mapping[Role, str]:
        """Storages of every role, tables included where they do not stay as stored."""
        tables = {} if self.tables is None else dict.fromkeys(_TABLES, self.tables)
        return {**self.storages, **tables}

    @property
    def all_storages(self) -> Iterator[Mapping[Role, str]]:
        """Storages of every role, under every value of an option."""
        yield self.storages
        for values in self.variants.values():
            yield from values.values()

    def variant(self, option: str, value: str) -> Scheme:
        """Return the scheme under another value of an option (UsageError where it has none)."""
        storages = self.variants.get(option, {}).get(value)
        if storages is None:
            flag = f"--{option.replace('_', '-')}"
            raise UsageError(
                f"{flag} {value} does not apply to {self.name}", todo=f"Leave {flag} out"
            )
        return replace(self, storages=storages)

    def recorded_storages(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the storages under the options of a bundle, as its manifest records them."""
        return frozenset(self._recorded(options).values())

    def stores_experts_alike(self, options: Mapping[str, Any]) -> bool:
        """Return True where shared experts are stored as routed ones are."""
        storages = self._recorded(options)
        return storages[Role.SHARED_EXPERT] == storages[Role.ROUTED_EXPERT]

    def _recorded(self, options: Mapping[str, Any]) -> Mapping[Role, str]:
        chosen = (values.get(str(options.get(option))) for option, values in self.variants.items())
        return next(filter(None, chosen), self.storages)


def every_linear(storage: str) -> dict[Role, str]:
    """Return one storage for the linears of all roles."""
    return dict.fromkeys(LINEAR_ROLES, storage)


def gguf_type(name: str, storage: str, tables: str = Q8.storage) -> Scheme:
    """Return the scheme of linears in one type of GGUF files, with tables in another one."""
    return Scheme(name, f"{storage}, GGUF", every_linear(storage), container=GGUF, tables=tables)
