"""Quantizations of others of which some are not decoded here: such a main model is copied as it is
in a graft, and nothing is told of its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_checkpoints.errors import UnsupportedError

MLX_METHOD = "mlx"  # no quant_method: its configs name none


@dataclass(frozen=True)
class Undecoded:
    """A quantization whose numbers may not be decoded.

    name is what manifests record, title its name in words. models are the model_types whose weights
    are read as they were released; None for all.
    """

    name: str
    title: str
    models: frozenset[str] | None = None

    @property
    def renames(self) -> bool:
        """True where weights may have other names than the released ones."""
        return self.models is not None

    @property
    def why_not_tested(self) -> str:
        """The reason why nothing is told of the numbers."""
        return f"values not decoded: this tool does not read these numbers of {self.title}"

    def refusal(self, found: str) -> UnsupportedError:
        """Return the error of what needs them; found says which they are."""
        return UnsupportedError(
            f"Values not decoded: this tool does not read these numbers of {self.title}",
            expected="a checkpoint in a format that it reads, or unquantized",
            found=found,
        )


UNDECODED = {
    known.name: known
    for known in (
        Undecoded("quark", "Quark"),
        Undecoded("bitsandbytes", "bitsandbytes"),
        # Others have other norms or other names: mlx-lm's `sanitize`.
        Undecoded(
            MLX_METHOD,
            "MLX",
            frozenset(
                {
                    *("glm4_moe", "mimo", "mimo_v2_flash", "mellum", "qwen3_next"),
                    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
                    *("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
                }
            ),
        ),
    )
}
