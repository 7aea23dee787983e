"""Finds the model's weights, and their names, in the nested mapping of a checkpoint file.

Training scripts store weights alone, or under ``model`` or ``state_dict`` next to the optimizer and counters. Entries
that are left out are reported, each with its reason.
"""

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.errors import CheckpointError

Path = tuple[str, ...]

MODELS = ("model", "state_dict", "model_state_dict")
BESIDE = {
    **dict.fromkeys(
        ("optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict"), "optimizer state"
    ),
    **dict.fromkeys(("lr_scheduler", "lr_schedulers", "scheduler"), "the scheduler's state"),
    **dict.fromkeys(("dataloader", "train_state"), "state of a training run"),
}
MAX_DEPTH = 32


def flatten(
    value: Mapping[Any, Any], place: str, max_entries: int, is_leaf: Callable[[str], bool] = lambda key: False
) -> dict[Path, Any]:
    """Flattens a nested mapping: path -> value that is not a mapping.

    Args:
        value: the mapping; parts of it may be shared, or contain themselves.
        max_entries: more entries than this mean that shared parts are counted again and again.
        is_leaf: whether the value of a key is taken as it is, even if it is a mapping.
    """
    found: dict[Path, Any] = {}
    waiting: list[tuple[Path, Any]] = [((), value)]
    while waiting:
        path, entry = waiting.pop()
        if len(path) > MAX_DEPTH or len(found) + len(waiting) > max_entries:
            raise CheckpointError(
                f"{place}: a mapping within itself",
                why="its entries do not come to an end",
                fix="do not trust this file; if it is yours, save the model's state_dict() again",
            )
        if isinstance(entry, Mapping) and not (path and is_leaf(path[-1])):
            waiting += [((*path, str(key)), part) for key, part in reversed(list(entry.items()))]
        elif path in found:
            raise CheckpointError(
                f"{place}: {'.'.join(path)}",
                why="a number and a text as keys look the same",
                fix="save the model's state_dict() alone",
            )
        else:
            found[path] = entry
    return found


def weights_in(
    leaves: Mapping[Path, Any], place: str, is_weight: Callable[[Any], bool]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Name -> value of the model's entries; and for the others, name -> why they are left out."""
    root = root_of([path for path, leaf in leaves.items() if is_weight(leaf)], place)
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for path, leaf in leaves.items():
        name = ".".join(path[len(root) :])
        if path[: len(root)] != root:
            # Cut at the level of the model's mapping: all of "optim" is one entry.
            depth = next(i for i in range(len(root)) if i >= len(path) or path[i] != root[i]) + 1
            why = f"it stands beside {'.'.join(root)!r}, which has the weights"
            left_out[".".join(path[:depth])] = BESIDE.get(path[depth - 1], why)
        elif not root and len(path) > 1 and path[0] in BESIDE:
            left_out[path[0]] = BESIDE[path[0]]
        elif name in found or name in left_out:
            raise CheckpointError(
                place,
                why="two entries of its mappings have that name when joined by '.'",
                fix="save the model's state_dict() alone",
                name=name,
            )
        elif is_weight(leaf):
            found[name] = leaf
        else:
            left_out[name] = "it is no tensor"
    twice = next((path for path in leaves if root and ".".join(path) in found and is_weight(leaves[path])), None)
    if twice is not None:
        raise CheckpointError(
            f"{place}: it is there, and in {'.'.join(root)!r} too",
            why="each of them could be the model's",
            fix="save the one you mean alone",
            name=".".join(twice),
        )
    return found, left_out


def root_of(paths: list[Path], place: str) -> Path:
    """The path of the model's mapping: ``model``, or ``app.model``; otherwise everything is the model's."""
    roots = {path[:1] for path in paths if len(path) > 1 and path[0] in MODELS}
    homes = {path[0] for path in paths if len(path) > 1 and path[0] not in BESIDE}
    if not roots and len(homes) == 1:
        roots = {path[:2] for path in paths if len(path) > 2 and path[0] in homes and path[1] in MODELS}
    if len(roots) > 1:
        names = " and ".join(sorted(".".join(root) for root in roots))
        raise CheckpointError(
            f"{place}: {names}", why="each of them could be the model's weights", fix="save the one you mean alone"
        )
    return roots.pop() if roots else ()
