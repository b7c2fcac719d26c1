"""quantization_config of both folders of a converted model, as vLLM and SGLang read it."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.formats import formats_described_by, mixes_groups_with_fp8
from mtp_checkpoints.quantization.method import Dialect, PartStorage, WrittenModel
from mtp_checkpoints.quantization.methods import dialect_of, method_writing
from mtp_checkpoints.quantization.native import Config
from mtp_checkpoints.quantization.stored import StoredModel


@dataclass(frozen=True)
class PartConfigs:
    """quantization_config of each folder; None for a part without quantized linears."""

    main: Config | None
    mtp: Config | None


def _check_beside_modelopt(main: PartStorage, mtp: PartStorage) -> None:
    """Refuse a quantized draft beside a main model in ModelOpt's layout (UnsupportedError)."""
    of_modelopt = {known.storage for known in formats_described_by("modelopt")}
    if mtp.quantized_roles and not of_modelopt.isdisjoint(main.storages.values()):
        raise UnsupportedError(
            "The MTP layer beside a main model in ModelOpt's nvfp4 stays in bf16: SGLang builds"
            " every draft there unquantized, whatever its config.json says",
            expected="--mtp-quant bf16",
            found=f"an MTP layer in {' and '.join(sorted({*mtp.storages.values()}))}",
            todo="Or use --format compressed-tensors, which describes both",
        )


def quantization_configs(
    stored: StoredModel, main: PartStorage, mtp: PartStorage, dialect: Dialect
) -> PartConfigs:
    """Return the quantization_config of each folder.

    stored is what the source's config.json promises. vLLM reads the main folder's config for both
    parts and wants the same in the MTP folder; SGLang reads each folder's own, and may know an MTP
    module of names of its own by those of a main layer. Raises
    UnsupportedError for a source that a config of the dialect cannot describe.
    """
    _check_beside_modelopt(main, mtp)
    both = {*main.storages.values(), *mtp.storages.values()}
    only_dialect = dialect_of(both)
    dialect = only_dialect or dialect

    def config(main: PartStorage, mtp: PartStorage) -> Config | None:
        model = WrittenModel(stored.family, stored.quantization, stored.native, main, mtp, dialect)
        write = method_writing(model.storages).write
        assert write is not None, "method_writing returns a method that is written"
        return write(model)

    if dialect.own_config and stored.family.mtp_prefix:
        return PartConfigs(config(main, main), config(mtp, mtp))
    if dialect.own_config and (only_dialect or mixes_groups_with_fp8(both)):
        together = mixes_groups_with_fp8(set(main.storages.values()))
        return PartConfigs(config(main, mtp if together else main), config(mtp, mtp))
    described = config(main, mtp)
    return PartConfigs(described, described)
