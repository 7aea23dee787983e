"""The data position in a checkpoint: after the last trained window, even if a reader is further ahead; and the
dataset's own state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.data.dataset_state import DatasetState, load_states
from shardwise.errors import ConfigError
from shardwise.state.checkpoint.json_state import to_plain, to_text
from shardwise.world.rng import is_generator


def loader_in(given: Any) -> Any:
    """The :class:`~shardwise.Loader` that ``given`` is or wraps; None if there is none."""
    return next(_loaders(given, set(), 3), None)


def _loaders(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if hasattr(value, "used_state_dict"):
        yield value
    elif depth and hasattr(value, "__dict__"):
        for inner in list(vars(value).values()):
            yield from _loaders(inner, seen, depth - 1)


def trained_position(given: Any, num_trained: int | None) -> tuple[Any, list[str]]:
    """The loader's state dict, moved back to the last trained window, and notes for the user.

    Args:
        given: a Loader, or an object that wraps one and has a ``state_dict``.
        num_trained: windows that were trained since its position was set; None: not known.
    """
    state, loader = given.state_dict(), loader_in(given)
    if loader is None:
        return state, []
    used, num_lost = loader.used_state_dict(num_trained)
    notes = []
    if num_lost:
        notes = [
            f"{num_lost} windows were read from the Loader and not trained when this checkpoint was saved: a resumed run leaves them out. "
            "Something reads ahead of training, and gives micro-batches without their place: keep it, "
            "sw.MicroBatch(tensors, index=b.index, padding=b.padding, window=b.window) in place of a dict"
        ]
    return _moved_back(state, used), notes


def _moved_back(state: Any, used: Mapping[str, Any]) -> Any:
    """``state`` with each Loader position in it that is beyond ``used`` replaced by ``used``."""
    if isinstance(state, Mapping) and state.keys() == used.keys():
        place = state["epoch"], state["position"]
        return dict(used) if place > (used["epoch"], used["position"]) else state
    if type(state) is dict:
        return {key: _moved_back(inner, used) for key, inner in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_moved_back(inner, used) for inner in state)
    return state


# ---- the dataset's own state -------------------------------------------------------------------------------------


def dataset_states(given: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """Place -> state of the stateful objects in a loader's dataset, on this rank; and notes for the user."""
    loader = loader_in(given)
    own = loader.own_states() if loader is not None else DatasetState({})
    if not own:
        return None, []
    states = loader.used_states()
    if states is not None:
        return dict(states.values), []
    return None, [
        f"{', '.join(own.values)}: the state after the last window that was trained is not known, since it was read in another "
        "process or too far ahead. It is not in this checkpoint, and a resumed run begins with a new one"
    ]


def check_states(given: Any, saved: Sequence[Any], size: int, override: Sequence[str]) -> None:
    """Refuses dataset states that another number of ranks cannot restore."""
    loader = loader_in(given)
    if loader is None or len(saved) == size or "dataset" in override:
        return
    for place, value in loader.own_states().values.items():
        if not is_generator(value) and not _is_shared(place, saved):
            raise ConfigError(
                f"the state of {place} of {len(saved)} ranks, on {size}",
                why="its state_dict() was another on each rank, and which samples a rank reads depends on their number",
                fix=f"resume on {len(saved)} ranks; or let state_dict() give what all share; or resume(loader, override=('dataset',))",
            )


def put_dataset(given: Any, saved: Sequence[Any] | None, rank: int, size: int) -> list[str]:
    """Restores the states of the stateful objects in a loader's dataset; returns notes for the user."""
    loader = loader_in(given)
    own = loader.own_states() if loader is not None else DatasetState({})
    if not own and not any(saved or ()):
        return []
    saved = saved or [None] * size
    theirs = (saved[rank] if len(saved) == size else saved[0]) or {}
    states = {place: state for place, state in theirs.items() if len(saved) == size or _is_shared(place, saved)}
    lost = [place for place in own.values if place in theirs and place not in states]
    notes = []
    if lost:
        notes = [
            f"{', '.join(lost)}: random numbers start from their seed, since the checkpoint has those of {len(saved)} ranks, and there are {size}"
        ]
    strange = [place for place in load_states(own, states) if place not in lost]
    if strange:
        notes.append(
            f"{', '.join(strange)}: the checkpoint has no state of it, or the dataset does not have it any more"
        )
    return notes


def _is_shared(place: str, saved: Sequence[Any]) -> bool:
    """Whether the state at ``place`` was equal on every rank of the saved run."""
    first, *others = ((state or {}).get(place) for state in saved)
    return all(_equal(first, other) for other in others)


def _equal(one: Any, other: Any) -> bool:
    tensors: list[dict[str, torch.Tensor]] = [{}, {}]
    texts = [to_text(to_plain(value, "state", into)) for value, into in zip((one, other), tensors, strict=True)]
    return texts[0] == texts[1] and all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
