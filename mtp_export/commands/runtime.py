"""Options of the runtime, for all commands that decode, and the LLM that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.errors import UsageError
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.output import status
from mtp_export.options import (
    Access,
    Names,
    Panel,
    argument,
    option,
    parse_path,
    parse_size,
    path_option,
)
from mtp_runtime.config import MAX_DRAFT_TOKENS, EngineConfig, LLMOptions

if TYPE_CHECKING:
    from mtp_runtime import LLM
    from mtp_runtime.parallel.group import Group

BUNDLE = argument("Bundle or checkpoint.", "BUNDLE", parse_path, Access.READ)
DTYPE = option("{names}.", Panel.PERFORMANCE, metavar="DTYPE", values=Names.DTYPE)


def parse_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """Return --k-schedule as (batch size, drafts)."""
    pairs = []
    for entry in text.split(","):
        size, _, drafts = entry.partition(":")
        if not (size.strip().isdecimal() and drafts.strip().isdecimal()):
            raise UsageError(
                "Option --k-schedule cannot be read",
                expected="B:K,... such as 1:5,16:2,64:0",
                found=text,
            )
        pairs.append((int(size), int(drafts)))
    return tuple(pairs)


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Return --draft-temperature as numbers."""
    try:
        return tuple(float(entry) for entry in text.split(","))
    except ValueError:
        raise UsageError(
            "Option --draft-temperature cannot be read",
            expected="numbers such as 0.6,0.8",
            found=text,
        ) from None


@dataclass(frozen=True)
class Drafting:
    """Options that choose drafts, as LLM takes them."""

    speculate_method: str = field(
        default="auto",
        metadata=option(
            "{names}; auto is mtp where the bundle has a module, else none.",
            Panel.SPECULATION,
            metavar="NAME",
            values=Names.DRAFTER,
        ),
    )
    speculate_max_draft_token_num: int | None = field(
        default=None,
        metadata=option(
            "Draft tokens per step; with --adaptive at most so many.",
            Panel.SPECULATION,
            metavar="K",
            low=1,
            high=MAX_DRAFT_TOKENS,
            show_default="1; with --adaptive 5",
        ),
    )
    speculate_max_ngram_size: int = field(
        default=LLMOptions.speculate_max_ngram_size,
        metadata=option(
            "Maximum length of an n-gram.", Panel.SPECULATION, metavar="N", low=1, high=64
        ),
    )
    adaptive: bool = field(
        default=False,
        metadata=option(
            "Choose draft tokens per step by measured acceptance and times.", Panel.DRAFTS
        ),
    )
    k_schedule: tuple[tuple[int, int], ...] | None = field(
        default=None,
        metadata=option(
            "Draft tokens per step from each batch size on: 1:5,16:2,64:0.",
            Panel.DRAFTS,
            metavar="B:K",
            parser=parse_schedule,
            show_default=False,
        ),
    )
    draft_temperature: tuple[float, ...] | None = field(
        default=None,
        metadata=option(
            "Temperatures of the draft tokens of a request that samples: 0.5,0.8.",
            Panel.DRAFTS,
            metavar="X",
            parser=parse_temperatures,
            show_default=False,
        ),
    )
    draft_stop_entropy: float = field(
        default=LLMOptions.draft_stop_entropy,
        metadata=option(
            "Entropy above which no further token is drafted.",
            Panel.DRAFTS,
            metavar="NATS",
            low=0,
            show_default="none",
        ),
    )
    draft_model: Path | None = field(
        default=None,
        metadata=path_option(
            "Second checkpoint, or a draft in a folder of its own.",
            Panel.SPECULATION,
            "DIR",
            access=Access.READ,
        ),
    )


@dataclass(frozen=True)
class Runtime:
    """Options of every command that decodes."""

    device: str = field(
        default=LLMOptions.device,
        metadata=option(
            "{names}.",
            Panel.PERFORMANCE,
            metavar="NAME",
            values=Names.DEVICE,
            takes_others=True,
        ),
    )
    dtype: str = field(default=LLMOptions.dtype, metadata=DTYPE)
    activations: str = field(
        default=LLMOptions.activations,
        metadata=option(
            "Multiply weights as they are stored with activations of: {names}.",
            Panel.PERFORMANCE,
            metavar="DTYPE",
            values=Names.ACTIVATIONS,
        ),
    )
    deterministic: bool = field(
        default=False,
        metadata=option("Make tokens independent of batch and drafts.", Panel.PERFORMANCE),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=option(
            "Tokens of prompt and output together; above index_topk attention is sparse.",
            Panel.PERFORMANCE,
            metavar="N",
            low=1,
        ),
    )
    max_memory: int | None = field(
        default=None,
        metadata=option(
            "Resident memory: routed experts that do not fit are read from disk.",
            Panel.PERFORMANCE,
            metavar="SIZE",
            parser=parse_size,
            show_default=f"a cache of {EngineConfig.cache_tokens} tokens, or what fits",
        ),
    )
    packed_cache: Path | None = field(
        default=None,
        metadata=path_option(
            "Keep weights here as a CPU packs them: the next start maps them.",
            Panel.PERFORMANCE,
            "DIR",
            access=Access.WRITTEN,
        ),
    )
    parallel_mode: str | None = field(
        default=None,
        metadata=option(
            "Way in which the processes of torchrun join their parts: {names}.",
            Panel.PERFORMANCE,
            metavar="MODE",
            values=Names.JOIN_MODE,
            show_default="gather in float32, else reduce",
        ),
    )
    cuda_graphs: bool = field(
        default=False,
        metadata=option("On a GPU, capture steps of decoding as CUDA graphs.", Panel.PERFORMANCE),
    )
    compiled_step: Path | None = field(
        default=None,
        metadata=path_option(
            "Run steps of decoding by a package of mtp-export compile.",
            Panel.PERFORMANCE,
            "FILE.pt2",
            access=Access.READ,
        ),
    )
    dry_run: bool = field(
        default=False,
        metadata=option("Show the memory that it takes, and load nothing.", Panel.PERFORMANCE),
    )
    drafting: Drafting = Drafting()

    @property
    def static_graph(self) -> Path | bool:
        """LLM's option of that name (UsageError where both of the command's are given)."""
        if self.compiled_step is not None and self.cuda_graphs:
            raise UsageError("Give one of --cuda-graphs and --compiled-step")
        return self.compiled_step or self.cuda_graphs

    def options(self, **sizes: Any) -> LLMOptions:
        """Return the options of LLM; sizes: those of the engine (UsageError)."""
        return LLMOptions(
            device=self.device,
            dtype=self.dtype,
            activations=self.activations,
            deterministic=self.deterministic,
            max_model_len=self.max_model_len,
            max_memory_bytes=self.max_memory,
            packed_cache=self.packed_cache,
            static_graph=self.static_graph,
            parallel_mode=self.parallel_mode,
            **vars(self.drafting),
            **sizes,
        )

    def load(self, bundle: Path, group: Group | None, *, quiet: bool = False, **sizes: Any) -> LLM:
        """Load a bundle until it can decode at full speed; group: the ranks that follow, None for
        none; sizes: those of the engine, as LLM takes them.

        Unless quiet, a terminal shows what is being done.
        """
        options = self.options(**sizes)
        told: Callable[[str], AbstractContextManager[object]] = nullcontext if quiet else status
        with gc_paused():
            with told("Loading the runtime"):
                from mtp_export.commands.progress_bar import loading_bars
                from mtp_runtime.llm import llm_of
                from mtp_runtime.parallel.group import LONE

            ranks = LONE if group is None else group
            with loading_bars(quiet=quiet):
                llm = ranks.everywhere(llm_of, bundle, options)
            with told("Decoding the first tokens"):
                llm.warm_up()
        return llm
