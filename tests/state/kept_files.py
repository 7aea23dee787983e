"""Checkpoints and exports that the first layout of the code wrote, kept in ``kept/``: later code has to read them as they are.

    PYTHONPATH=src:tests python tests/state/kept_files.py      # writes those that are not there; the ones that are there stay

A file here is never written anew to suit the code: a user's checkpoint of last year is not either.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from layouts import LAYOUTS
from state.runs import make, run

import shardwise as sw
from shardwise.testing import RankPool

__all__ = ["KEPT", "RUNS", "SAVED_AT", "UNTIL", "digests", "expected"]

KEPT = Path(__file__).parent / "kept"
RUNS = {"one": "one", "fsdp-3": "fsdp-3", "hsdp": "hsdp-2x2"}
"""Folder of a run -> name of the layout that it was saved under."""
SAVED_AT, UNTIL = 5, 9


def digests(value: Any) -> Any:
    """``value`` with a digest in place of each tensor, as JSON keeps it."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        head = f"{value.dtype} {tuple(value.shape)}"
        return f"{head} {hashlib.sha256(data).hexdigest()[:16]}"
    if isinstance(value, dict):
        return {str(key): digests(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [digests(part) for part in value]
    return value


def expected(name: str) -> dict[str, Any]:
    """What was written down when the files of ``name`` were written."""
    return json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))


def _saved(layout: str, root: str) -> dict[str, Any]:
    """A run of steps up to SAVED_AT, saved, then gone on with without a save: what a resumed run has to come to."""
    run(layout, root, SAVED_AT, save_at=(SAVED_AT,))
    found = run(layout, root, UNTIL)
    return {
        "at the save": digests(found["first"]),
        "figures": found["figures"],
        "samples": found["samples"],
        "draws": found["draws"],
        "average": digests(found["average"]),
    }


def _exported(layout: str, root: str) -> dict[str, Any]:
    """Weights in several files, rounded weights, and a file of torch's with model and optimizer."""
    world, model, step = make(layout, torch.float32)
    folder = Path(root)
    with world:
        ids = torch.arange(12).reshape(2, 6)
        step([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] * 2)
        sw.save_weights(model, folder / "weights", max_shard_bytes=800)
        sw.save_weights(model, folder / "rounded", dtype="bfloat16")
        whole, state = sw.full_state_dict(model), sw.full_optimizer_state_dict(model, step.optim)
        if world.is_main:
            torch.save({"model": whole, "optimizer": state}, folder / "whole.pt")
        return {"model": digests(whole), "optimizer": digests(state)}


def main() -> None:
    """Writes what is not there."""
    with RankPool() as ranks:
        for name in (*RUNS, "export"):
            folder = KEPT / name
            if folder.exists():
                continue
            folder.mkdir(parents=True)
            layout, size, _ = LAYOUTS[RUNS.get(name, "fsdp-2")]
            found = ranks.run(_exported if name == "export" else _saved, size, layout, str(folder), timeout_s=100)
            (KEPT / f"{name}.json").write_text(json.dumps(found[0], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # Ranks find the functions of this file by the name of its module.
    import state.kept_files

    state.kept_files.main()
