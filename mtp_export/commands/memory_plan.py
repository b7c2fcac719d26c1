"""Dry run of the commands that decode: the memory that they take, by headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group as Lines

from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.output import FiguresTable, Reporting, heading, print_result
from mtp_export.progress import format_bytes

if TYPE_CHECKING:
    from mtp_export.commands.runtime import Runtime
    from mtp_runtime.models.draft_cost import DraftCost
    from mtp_runtime.models.memory_plan import MemoryPlan
    from mtp_runtime.parallel.group import Group
    from mtp_runtime.run_plan import RunMemory

_USUAL_ACCEPTANCE = 0.9  # at most, of second tokens: DeepSeek-V3's report, section 5.4.3


def print_memory_plan(
    bundle: Path, runtime: Runtime, group: Group | None, reporting: Reporting, **sizes: Any
) -> None:
    """Print the memory that a bundle takes with some options, of several ranks that of the first;
    nothing is loaded. sizes: those of the engine, as LLM takes them.

    Raises what loading it would: ResourceError where it does not fit.
    """
    options = runtime.options(**sizes)
    with gc_paused():
        from mtp_runtime.parallel.group import LONE
        from mtp_runtime.run_plan import expert_read_speed, planned_memory

        memory = planned_memory(bundle, options, LONE if group is None else group)
        facts = memory_facts(memory, options.device)
        if memory.plan.slots is not None:
            facts |= _read_facts(facts, expert_read_speed(bundle, options))
        facts |= _draft_facts(memory.plan, options.speculation().draft_tokens)
    table = Lines(heading(f"Memory plan of {bundle}"), _table(facts), *_lines(facts))
    print_result({"bundle": str(bundle), **facts}, table, reporting)
    if memory.refusal is not None:
        raise memory.refusal


def memory_facts(memory: RunMemory, device: str) -> dict[str, Any]:
    """Return the memory of a run: sizes in bytes; free_bytes and fits are None where nobody knows
    what the device has free."""
    plan = memory.plan
    limit, free = min(memory.limits.items(), key=lambda each: each[1], default=(None, None))
    fits = None if free is None and memory.refusal is None else memory.refusal is None
    return {
        "device": device,
        "dtype": plan.dtype_name,
        "weight_bytes": plan.weight_bytes,
        **_expert_facts(plan),
        "dense_bytes": plan.dense_bytes,
        "cache_tokens": memory.cache_tokens,
        "cache_bytes": memory.cache_tokens * plan.token_bytes,
        "working_bytes": memory.working_bytes,
        "needed_bytes": memory.needed_bytes,
        "limit": limit,
        "free_bytes": free,
        "fits": fits,
    }


def _expert_facts(plan: MemoryPlan) -> dict[str, Any]:
    """Return what a cache of routed experts holds; nothing where all weights are loaded."""
    if plan.experts is None or plan.slots is None:
        return {}
    return {
        "expert_bytes": plan.slot_bytes,
        "experts_in_memory": plan.slots,
        "experts": plan.experts.number,
        "token_read_bytes": plan.experts.row_picks * plan.experts.stored_bytes,
        "holds_two_tokens": plan.holds_two_tokens,
    }


def _read_facts(facts: dict[str, Any], speed: float | None) -> dict[str, Any]:
    """Return how fast experts are read now, and the seconds that a token's take; both None where
    that cannot be told."""
    seconds = None if speed is None else facts["token_read_bytes"] / speed
    return {"read_bytes_per_second": speed, "token_read_seconds": seconds}


def _draft_facts(plan: MemoryPlan, most: int) -> dict[str, Any]:
    """Return what a step costs with each number of drafts up to some, by the bytes of weights that
    it touches, and by those that it reads where none of its experts is in memory."""
    if plan.drafts is None:
        return {}
    facts = {"drafts": _costs(plan.drafts, most)}
    return facts if plan.slots is None else facts | {"read_drafts": _costs(plan.drafts.read, most)}


def _costs(drafts: DraftCost, most: int) -> list[dict[str, Any]]:
    return [
        {"k": k, "bytes_ratio": drafts.step(k), "needed_acceptance": drafts.needed_acceptance(k)}
        for k in range(1, most + 1)
    ]


def _table(facts: dict[str, Any]) -> FiguresTable:
    table = FiguresTable()
    table.add_words("memory")
    table.add_figures("bytes")
    table.add_words("what")
    experts = facts.get("expert_bytes", 0)
    rows = [("weights", facts["weight_bytes"] - experts, _stored(facts))]
    if experts:
        held = f"{facts['experts_in_memory']:,} of {facts['experts']:,} routed ones"
        rows.append(("experts", experts, held))
    rows += [
        ("cache", facts["cache_bytes"], f"{facts['cache_tokens']:,} tokens"),
        ("workspaces", facts["working_bytes"], "packages, and what is being read or computed"),
    ]
    for name, size, what in rows:
        table.add_row(name, format_bytes(size), what)
    table.add_section()
    table.add_row("needed", format_bytes(facts["needed_bytes"]), "all together")
    if facts["free_bytes"] is not None:
        table.add_row("there is", format_bytes(facts["free_bytes"]), facts["limit"])
    return table


def _stored(facts: dict[str, Any]) -> str:
    """Return words on how weights are kept."""
    dense = f"{format_bytes(facts['dense_bytes'])} in {facts['dtype']}"
    if facts["dense_bytes"] == facts["weight_bytes"]:
        return dense
    return f"as they are stored, {dense}" if facts["dense_bytes"] else "as they are stored"


def _lines(facts: dict[str, Any]) -> list[str]:
    answer = {
        True: "yes",
        False: "no",
        None: f"unknown, the memory of {facts['device']} is not compared",
    }[facts["fits"]]
    return [*_expert_lines(facts), *_draft_lines(facts), f"Fits: {answer}. Nothing was loaded."]


def _expert_lines(facts: dict[str, Any]) -> list[str]:
    """Return what a token reads where not all experts are in memory."""
    if "experts" not in facts:
        return []
    most = f"{format_bytes(facts['token_read_bytes'])} a token"
    if facts["read_bytes_per_second"] is not None:
        speed = format_bytes(round(facts["read_bytes_per_second"]))
        most += f", {facts['token_read_seconds']:.2f} s at the {speed}/s of this disk"
    lines = [f"Other experts are read from disk when they are used: at most {most}."]
    if not facts["holds_two_tokens"]:
        lines.append("That is most of them: less than two tokens' experts are in memory.")
    return lines


def _draft_lines(facts: dict[str, Any]) -> list[str]:
    """Return whether the most drafts of a step pay, by what is read where a disk decides."""
    verb = "reads" if "read_drafts" in facts else "touches"
    costs = facts.get("read_drafts", facts.get("drafts"))
    if not costs:
        return []
    most = costs[-1]
    number = "1 draft" if most["k"] == 1 else f"{most['k']} drafts"
    needed = 1.0 if most["needed_acceptance"] is None else most["needed_acceptance"]
    advice = " Use --speculate-method none." if needed > _USUAL_ACCEPTANCE else ""
    return [
        f"With {number} a step {verb} up to {most['bytes_ratio']:.2f} times the bytes of weights:"
        f" that pays where over {needed:.0%} of drafts are accepted.{advice}"
    ]
