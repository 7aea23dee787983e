"""Adds the modules to checkpoint (that run again in backward) to the recipe."""

from typing import Any

from shardwise.recipe import Draft, Edit, human_bytes
from shardwise.techniques.remat.options import Remat
from shardwise.techniques.targets import resolve


def edit(draft: Draft, *, remat: Remat | None) -> None:
    """Adds an edit for each module that runs again in backward."""
    if remat is None:
        return
    args: dict[str, Any] = {"mode": remat.mode}
    if remat.mode == "selective":
        args["save"] = list(remat.save)
        what = f"run again in backward, but for {', '.join(remat.save)}"
    elif remat.budget is not None:
        args = {"mode": "budget", "budget": remat.budget}
        what = f"run again in backward as far as their activations take more than {human_bytes(int(remat.budget))}"
    else:
        args["offload"] = remat.offload
        what = "run again in backward" + (", its inputs kept in host memory" if remat.offload else "")
    targets = resolve(draft.anatomy, remat.targets, remat.every, "Remat")
    each = f"; the first of every {remat.every}" if remat.every > 1 else ""
    draft.edits += [
        Edit(module=name, technique="remat", action="checkpoint", args=args, why=f"{what}: {why}{each}")
        for name, why in targets
    ]
