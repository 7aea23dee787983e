"""Numbers of heads and the like that a region needs on a rank: found by trying what its modules read."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwise.model.run import Place, Run
from shardwise.model.trial import Trial
from shardwise.techniques.tp.search.certificate import Settings, calls_of, parts_wrong, whole_run, whole_wrong
from shardwise.techniques.tp.search.region_records import Region, Setting
from shardwise.techniques.tp.search.regions import signature

_MOST_SETTINGS = 4  # kinds of settings that one region changes
_MOST_TRIES = 300
_CONFIGURED = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
"""Numbers that a forward may read from ``self.config``."""


def settled(trial: Trial, region: Region, degree: int, first: Settings | None = None) -> Region | str:
    """The region with the fewest settings under which it is right; or why it is not right without any.

    Args:
        trial: the model.
        region: without settings.
        degree: how many ranks share it.
        first: settings to try before all others.
    """
    whole = whole_run(trial, [region], alone=region)
    if why := whole_wrong(trial, region, whole, degree):
        return why
    narrowed, readers = _may_be_narrowed(region, whole, degree)
    tries = itertools.chain([first] if first else [], [Settings()], _candidates(trial, region, degree))
    for settings in itertools.islice(tries, _MOST_TRIES):
        for places in ((), narrowed) if narrowed else ((),):
            tried = replace(region, settings=settings, narrowed=places, readers=readers if places else ())
            found = parts_wrong(trial, [tried], degree, whole, alone=tried)
            if not found:
                return tried
            if not settings and not places:
                why = found
    return why


def _may_be_narrowed(region: Region, whole: Run, degree: int) -> tuple[tuple[Place, ...], tuple[str, ...]]:
    """The arguments that column-parallel layers read, and the other layers of the module that read them."""
    read = [x for call, x in whole.inputs.items() if call.weight in region.sources]
    places = tuple(
        place
        for place, leaves in whole.arguments.items()
        if place not in region.arguments
        and all(leaf.dim() and leaf.shape[-1] % degree == 0 for leaf in leaves)
        and all(any(_is_same(x, leaf) for x in read) for leaf in leaves)
    )
    leaves = [leaf for place in places for leaf in whole.arguments[place]]
    readers = {
        call.weight: None
        for call, x in whole.inputs.items()
        if call.weight not in region.layers
        and (not region.module or call.weight.startswith(f"{region.module}."))
        and any(_is_same(x, leaf) for leaf in leaves)
    }
    return places, tuple(readers)


def _is_same(x: Tensor, leaf: Tensor) -> bool:
    return x.shape == leaf.shape and torch.equal(x, leaf)


def _candidates(trial: Trial, region: Region, degree: int) -> Iterator[Settings]:
    """Settings to try: the same for modules that differ in the number of their block only; numbers of heads first."""
    kinds: dict[tuple[str, str, int], list[Setting]] = {}
    for (name, attr), old in _numbers_read(trial, region).items():
        kinds.setdefault((signature(f"{name}."), attr, old), []).append((name, attr))
    options = {kind: values for kind in kinds if (values := _values(kind[2], degree))}
    heads = [
        kind for kind in options if "head" in kind[1] and not any(word in kind[1] for word in ("dim", "size", "group"))
    ]
    for divisor in (d for d in range(degree, 1, -1) if degree % d == 0):
        if chosen := [kind for kind in heads if kind[2] % divisor == 0]:
            yield {place: kind[2] // divisor for kind in chosen for place in kinds[kind]}
    for number in range(1, _MOST_SETTINGS + 1):
        for chosen in itertools.combinations(options, number):
            for values in itertools.product(*(options[kind] for kind in chosen)):
                yield {place: value for kind, value in zip(chosen, values, strict=True) for place in kinds[kind]}


def _values(old: int, degree: int) -> list[int]:
    """What a whole number may be on one of ``degree`` ranks: a part of it; 1, of fewer heads than there are ranks."""
    values = [old // d for d in range(degree, 1, -1) if degree % d == 0 and old % d == 0]
    return [*values, 1] if 1 < old < degree and 1 not in values else values


def _numbers_read(trial: Trial, region: Region) -> dict[Setting, int]:
    """The whole numbers that modules of a region read from their attributes when they run."""
    read: dict[Setting, int] = {}
    with contextlib.ExitStack() as stack:
        for name, module in trial.module.named_modules():
            if not region.module or f"{name}.".startswith(f"{region.module}."):
                stack.enter_context(_noting_reads(name, module, read))
        trial.run(until=calls_of(trial, [region]))
    return read


@contextlib.contextmanager
def _noting_reads(name: str, module: nn.Module, read: dict[Setting, int]) -> Iterator[None]:
    """Context manager: notes which whole numbers among the attributes of ``module`` are read, by a class on top of its
    own."""
    kind = type(module)
    numbers = {key: value for key, value in vars(module).items() if type(value) is int and value > 1}
    config = vars(module).get("config")
    # Not that of the whole model, which is written beside its weights.
    keys = _CONFIGURED if name else ()
    configured = {key: value for key in keys if type(value := getattr(config, key, None)) is int}

    def getattribute(self: nn.Module, key: str) -> object:
        if key in numbers:
            read[name, key] = numbers[key]
        elif key == "config":
            read.update(((name, f"config.{inner}"), value) for inner, value in configured.items())
        return kind.__getattribute__(self, key)

    module.__class__ = type(kind.__name__, (kind,), {"__getattribute__": getattribute, "__module__": kind.__module__})
    try:
        yield
    finally:
        module.__class__ = kind
