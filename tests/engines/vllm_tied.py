"""vLLM's own class over a tied model that stores another head too: `python vllm_tied.py JOB
RESULT`. Notes whose values the shared parameter has, for either order of the two tensors."""

from __future__ import annotations

from typing import Any

from vllm_drafts import built, engine_config, stored_in
from vllm_modules import run_job

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def loaded_by(model: Any, tensors: dict[str, Any]) -> str:
    """Return the name of the tensor whose values the head of a model has then."""
    model.load_weights(iter(tensors.items()))
    values = model.lm_head.weight.detach().float()
    equal = [n for n in (HEAD, EMBEDDING) if bool((values[:8] == tensors[n][:8].float()).all())]
    return equal[0] if len(equal) == 1 else "neither"


def in_both_orders(stored: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tensors with a head that is not the embedding, read before and after it."""
    head = {HEAD: stored[EMBEDDING].flip(0).clone()}
    return {"head first": head | stored, "head last": stored | head}


def heads_of(main: str, method: str) -> dict[str, str]:
    orders = in_both_orders(stored_in(main)).items()
    config = engine_config(main, main, method)
    return {order: loaded_by(built(config), tensors) for order, tensors in orders}


if __name__ == "__main__":
    run_job(heads_of)
