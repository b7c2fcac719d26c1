"""Weight formats: the tensors on disk that hold a weight, and the numbers that they encode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.compressed import WeightsEntry
from mtp_checkpoints.formats.rows import RowSource
from mtp_checkpoints.formats.verification import Bug, FormatGate

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.containers.base import TensorInfo
    from mtp_kernels.quantize import ErrorStats, Fp8Block
    from mtp_kernels.quantize.array_conversions import Converted, Rows
    from mtp_kernels.quantize.gptq import Grid
    from mtp_kernels.quantize.layouts import QuantizedWeight
    from mtp_kernels.quantize.row_codes import RowCodes
    from mtp_kernels.stored_linear import StoredWeight
    from mtp_kernels.weight_statistics import WeightStatistics

BLOCK = 128  # rows and columns per fp8 scale
GROUP_SIZES = (32, 64, 128)  # columns per int4 scale
OF_ROWS = 2  # tensors of a format that have rows: codes and scales
# Last names of an fp8 scale. The released one says inverse, but the scale multiplies.
NATIVE_SCALE = "weight_scale_inv"
COMPRESSED_SCALE = "weight_scale"
# Ends of the names of a linear's codes in any format, each with those of scales that go with it.
SCALES_OF_CODES: Mapping[str, tuple[str, ...]] = {
    "weight": (
        *(COMPRESSED_SCALE, NATIVE_SCALE, "scale", "scales", "weight_scale_2"),
        *("SCB", "weight.absmax"),  # of bitsandbytes
    ),
    "weight_packed": (COMPRESSED_SCALE, "weight_global_scale"),
    "qweight": ("scales",),
}

# Rows and columns of a tensor on disk; a vector has rows alone.
Place = tuple[range, range | None]


@dataclass(frozen=True)
class FormatOptions:
    """Parameters of the formats that a run writes.

    group_size is that of int4; fp8_scale_name is the last component of an fp8 scale's name.
    """

    group_size: int = 128
    fp8_scale_name: str = NATIVE_SCALE


class WeightFormat(ABC):
    """Format of a weight: its layout on disk and its arithmetic.

    Subclasses are frozen dataclasses of the format's parameters, so that equal formats store
    weights in the same way. The first tensor of a format holds the codes (or the values
    themselves), the second the scales; after them come numbers that all elements decide together,
    then constants that none does.

    A format that is written has `encode`; fast code for it is optional, and found by the kernels.
    """

    storage: ClassVar[str]  # its name, in manifests too
    operation: ClassVar[str]  # name in the manifest of the conversion into this format
    is_decoded: ClassVar[bool] = True  # its numbers are known here
    gate: ClassVar[FormatGate]  # bounds that verify holds its weights to
    bugs: ClassVar[tuple[Bug, ...]] = ()  # of its codes, which verify undoes to find a cause
    methods: ClassVar[tuple[str, ...]] = ()  # quant_methods that describe it, its own first
    code_offset: ClassVar[int | None] = None  # of integer codes on disk
    elements_per_code: ClassVar[int] = 1  # elements of the weight per element of the codes
    scale_rows: ClassVar[int] = 1  # rows of the weight per row of scales
    in_words: ClassVar[str] = ""  # of a group of a compressed-tensors config
    reads_whole: ClassVar[bool] = False  # all codes are read for some rows: as read they are others
    word_rows: ClassVar[int] = 0  # rows that words of some tensor run across; 0: none does
    is_one_row: ClassVar[bool] = False  # of the matrix: windows are cut from all of it
    compiled_sources: ClassVar[frozenset[str]] = frozenset()  # of quantize_rows
    # A number of the whole matrix goes with its scales, one for all linears that engines join.
    of_whole_matrix: ClassVar[bool] = False
    of_no_scheme: ClassVar[bool] = False  # conversions start from it, and no scheme keeps it
    held_by: ClassVar[frozenset[str]] = frozenset()  # storages of GGUF files, with its numbers
    of_experts: ClassVar[bool] = False  # alone: its tensors have names by their projections
    has_grid: ClassVar[bool] = False  # calibration may choose among its numbers

    @classmethod
    def of_options(cls, options: FormatOptions) -> WeightFormat:
        """Return the format with the parameters that a run chose."""
        return cls()

    def of_amax(self, amax: float) -> Self:
        """Return the format as it quantizes a matrix that, joined with others, has this largest
        magnitude; only formats of_whole_matrix need it."""
        raise AssertionError(f"{self.storage} has no number of the whole matrix")

    @property
    def k_divisor(self) -> int:
        """Number that K must be divisible by."""
        return 1

    @property
    def k_unit(self) -> str:
        """Subject that k_divisor is the size of, for messages."""
        return ""

    def for_columns(self, columns: int) -> WeightFormat:
        """Return the format that takes this one's place for rows of so many columns; itself where
        none does, whether it holds them or not."""
        return self

    @property
    def chunk_rows(self) -> int:
        """Rows of a weight after which blocks begin anew; 0: they do not."""
        return 0

    def in_chunks(self, rows: int, chunks: int) -> WeightFormat:
        """Return the format of a weight of so many rows that is stored in chunks of rows, each with
        scales of its own; itself where that makes no difference."""
        return self

    def scale_span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the rows of scales, to before the last, of rows [start, stop) of a weight."""
        return start // self.scale_rows, -(-stop // self.scale_rows)

    def columns_of(self, codes: int) -> int:
        """Return the number of columns of a weight whose rows have so many codes."""
        return codes * self.elements_per_code

    def operation_on(self, source: WeightFormat) -> str:
        """Return the name in the manifest of the conversion of a source into this format."""
        return self.operation

    @abstractmethod
    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        """Return the tensors of a weight `<module>.weight` [N, K] as they are written."""

    def accepted_dtypes(self, tensor: OutputTensor) -> tuple[DType, ...]:
        """Return the dtypes in which a tensor of the format may be stored."""
        return (tensor.dtype,)

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> WeightFormat | None:
        """Return the format that a compressed-tensors config describes; None for another's."""
        return None

    def group(self, *, activations_fp8: bool) -> dict[str, Any]:
        """Return the group of a format that compressed-tensors knows, but for its targets.

        activations_fp8: int4 weights run with activations in fp8.
        """
        raise AssertionError(f"compressed-tensors has no {self.storage}")

    def grid(self, tensors: Sequence[torch.Tensor]) -> Grid:
        """Return the numbers that codes of a format that has_grid stand for beside its scales."""
        raise AssertionError(f"no calibration chooses codes of {self.storage}")

    def encode(self, values: torch.Tensor, scale_rule: str) -> tuple[torch.Tensor, ...]:
        """Return codes and scales of fp32 rows [n, K], all of them finite."""
        raise AssertionError(f"nothing writes {self.storage}")

    def quantize(
        self, source: torch.Tensor | Fp8Block, scale_rule: str
    ) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
        """Convert rows [n, K] into codes and scales, and the number of the whole matrix where the
        format has one, with the error that this makes.

        Raises ValueError for values or scales that are not finite.
        """
        import torch

        from mtp_kernels import quantize

        values = quantize.checked_values(source)
        tensors = self.encode(values, scale_rule)
        restored = self.encoded(tensors).dequantize(torch.float32)
        return tensors, quantize.error_of(values, restored)

    def kernel_options(self, scale_rule: str) -> dict[str, Any]:
        """Return the options that the kernels' conversion into the format takes."""
        return {}

    def quantize_rows(self, rows: Rows, scale_rule: str) -> Converted | None:
        """Return what quantize does, of rows of compiled_sources in main memory and without torch;
        None for those that quantize has to look at."""
        from mtp_kernels.quantize.array_conversions import CONVERSIONS

        assert self.storage in CONVERSIONS, f"{self.storage} is made by torch"
        return CONVERSIONS[self.storage](rows, **self.kernel_options(scale_rule))

    @abstractmethod
    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [n, K] of codes and scales (ValueError for unusable scales)."""

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        """Return the weight that the format's tensors hold, in their order; constants may be
        absent."""
        return EncodedWeight(self, tensors[0], tensors[1])

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        """Return rows [start, stop) of a weight, start at a row of scales."""
        first, last = self.scale_span(start, stop)
        return self.encoded((source.codes(start, stop), source.scale[first:last]))

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        """Return where whole words and groups of a weight [N, K] with word_rows lie in a tensor."""
        raise AssertionError(f"{self.storage} has the rows of its codes")

    def statistics(self, codes: torch.Tensor, scale: torch.Tensor) -> WeightStatistics:
        """Return the statistics of the weights, unsound where dequantize refuses them; a format
        whose codes the kernels can measure as they are overrides it."""
        import torch

        from mtp_kernels import weight_statistics

        try:
            values = self.decode(codes, scale, torch.float32)
        except ValueError:
            return weight_statistics.UNSOUND
        return weight_statistics.float_statistics(values)

    def source(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | Fp8Block:
        """Return rows that every format can be made of: values in float32, or codes whose scales
        the kernels multiply in (ValueError for unusable scales)."""
        import torch

        return self.decode(codes, scale, torch.float32)

    def stored(self, codes: torch.Tensor, scale: torch.Tensor) -> StoredWeight:
        """Return what the kernels multiply with, values of a format that they do not know
        (ValueError for unusable scales)."""
        import torch

        return self.decode(codes, scale, torch.float32)

    @property
    def has_row_codes(self) -> bool:
        """True where the compiled decoder multiplies the codes."""
        return False

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        """Return what the decoder packs of codes that it multiplies (ValueError for damage)."""
        raise AssertionError(f"{self.storage} is decoded before it is packed")

    def row_bytes(self, tensors: Sequence[TensorInfo], rows: int) -> int:
        """Return the bytes of row_codes for the stored tensors of a weight of so many rows."""
        codes, *scales = tensors
        return codes.size_bytes + 4 * rows * (prod(scales[0].shape[1:]) if scales else 0)

    def constants(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the last tensors, which no element of a weight [N, K] decides, as arrays."""
        return ()

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        """Refuse constants, by tensor name, that contradict the weight (InvalidInputError)."""
        assert not tensors, f"{self.storage} has no constants"


class KernelFormat(WeightFormat):
    """Format that the kernels compute with as it is stored, in the layout of its name."""

    has_row_codes: ClassVar[bool] = True

    def stored(self, codes: torch.Tensor, scale: torch.Tensor) -> QuantizedWeight:
        from mtp_kernels.quantize.layouts import LAYOUTS

        return LAYOUTS[self.storage](codes, scale)

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        from mtp_kernels.quantize.row_codes import row_codes

        return row_codes(self.stored(codes, scale))

    def quantize(
        self, source: torch.Tensor | Fp8Block, scale_rule: str
    ) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
        from mtp_kernels.quantize import QUANTIZERS

        if self.storage not in QUANTIZERS:
            return super().quantize(source, scale_rule)
        weight, error = QUANTIZERS[self.storage](source, **self.kernel_options(scale_rule))
        return tuple(vars(weight).values()), error

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from mtp_kernels.stored_linear import dequantize

        return dequantize(self.stored(codes, scale), dtype)

    def statistics(self, codes: torch.Tensor, scale: torch.Tensor) -> WeightStatistics:
        from mtp_kernels.weight_statistics import quantized_statistics

        return quantized_statistics(self.stored(codes, scale))


class ReadOnlyFormat(WeightFormat):
    """Format of checkpoints that others quantized: it is read, and no scheme writes it."""

    operation: ClassVar[str] = ""


class DamagedWeight(ValueError):
    """Codes or scales that no quantization makes, of a weight that was read from a tensor."""

    def __init__(self, origin: TensorInfo, problem: ValueError) -> None:
        self.origin = origin
        super().__init__(str(problem))


@dataclass(frozen=True)
class EncodedWeight:
    """A weight, or some rows of it, as it is stored: codes [N, K / elements_per_code] and scales.

    Without scales the codes are the values themselves, of any shape and floating-point dtype.
    Codes that hold their scales have an empty one beside them.
    origin: the stored tensor that refusals name, where it is known.
    """

    format: WeightFormat
    codes: torch.Tensor
    scale: torch.Tensor | None = None
    origin: TensorInfo | None = None

    @property
    def storage(self) -> str:
        """Storage of the format."""
        return self.format.storage

    @property
    def scale_apart(self) -> torch.Tensor | None:
        """The scale; None where there is none, or the codes hold it."""
        return self.scale if self.scale is not None and self.scale.numel() else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight: [N, K], or that of an unquantized tensor."""
        *rows, columns = self.codes.shape
        return (*rows, self.format.columns_of(columns))

    def equals(self, other: EncodedWeight) -> bool:
        """Return True for a weight of the same format, codes and scales."""
        import torch

        pairs = ((self.codes, other.codes), (self.scale, other.scale))
        return self.format == other.format and all(
            one is another
            if one is None or another is None
            else one.dtype == another.dtype and torch.equal(one, another)
            for one, another in pairs
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values in a dtype, float32 by default.

        Raises ValueError for codes or scales that no quantization makes, such as NaN.
        """
        import torch

        if self.scale is None:
            return self.codes.to(dtype or torch.float32)
        try:
            return self.format.decode(self.codes, self.scale, dtype or torch.float32)
        except ValueError as error:
            raise self.refused(error) from error

    def refused(self, error: ValueError) -> ValueError:
        """Return the refusal of its codes or scales, with its origin where that is known."""
        return error if self.origin is None else DamagedWeight(self.origin, error)

    def statistics(self) -> WeightStatistics:
        """Return the statistics of the values, unsound where dequantize refuses them."""
        from mtp_kernels import weight_statistics

        if self.scale is None:
            return weight_statistics.float_statistics(self.codes)
        return self.format.statistics(self.codes, self.scale)

    @property
    def stored(self) -> StoredWeight:
        """The weight as the kernels multiply with it (ValueError for unusable scales)."""
        codes, scale = self.codes, self.scale
        try:
            return codes if scale is None else self.format.stored(codes, scale)
        except ValueError as error:
            raise self.refused(error) from error

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T [T, N] for x [T, K], in its dtype (ValueError as dequantize)."""
        from mtp_kernels.stored_linear import linear

        stored = self.stored
        try:
            return linear(x, stored)
        except ValueError as error:
            raise self.refused(error) from error
