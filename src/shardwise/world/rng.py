"""Random streams whose numbers depend on what they are for, not on which rank draws them.

A stream is named by the run's seed and a place ("init", "blocks.0.weight", 3): the same place gives the same
numbers under every layout and after a resume. Seeds are derived by SHA-256, so places never collide by arithmetic.
"""

import contextlib
import copy
import functools
import hashlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.config.caller import level_of_caller
from shardwise.world.generator_state import SCRATCH, numpy_state, python_state

_seeded: int | None = None  # torch's seed, as the last world of this process has set it


def derive_seed(seed: int, *place: str | int) -> int:
    """A 63-bit seed for ``place`` in the run of ``seed``."""
    text = "\x1f".join([str(seed), *map(str, place)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextlib.contextmanager
def forked_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Context manager: torch draws from a separate stream on CPU and ``device``; afterwards its state is restored."""
    cuda = device if device is not None and device.type == "cuda" else None
    before = torch.get_rng_state()
    before_cuda = torch.cuda.get_rng_state(cuda) if cuda is not None else None
    torch.default_generator.manual_seed(seed)
    if cuda is not None:
        torch.cuda.default_generators[cuda.index or 0].manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if cuda is not None and before_cuda is not None:
            torch.cuda.set_rng_state(before_cuda, cuda)


@contextlib.contextmanager
def forked_streams(seed: int, device: torch.device | None, generators: Mapping[str, Any]) -> Iterator[None]:
    """:func:`forked_rng` for Python's ``random``, ``numpy.random`` and ``generators`` too, each of which draws from a
    stream named by its key. Costs some 20 us, most of them for Python's generator."""
    with forked_rng(seed, device), contextlib.ExitStack() as stack:
        stack.enter_context(_forked(random, seed))
        # numpy's state is not copied (0.4 ms): its generator is replaced. This loses the second number of a pair of
        # normal numbers, if one is left.
        stack.callback(np.random.set_bit_generator, np.random.get_bit_generator())
        np.random.set_bit_generator(SCRATCH)
        np.random.seed(seed % 2**32)
        stack.enter_context(forked_generators(seed, generators))
        yield


@contextlib.contextmanager
def continued_streams(
    left: dict[str, Any], seed: int, device: torch.device, generators: Mapping[str, Any]
) -> Iterator[None]:
    """:func:`forked_streams` that can be left and entered again: draws continue from ``left``, which is empty the first time, and is
    written at the end."""
    with forked_streams(seed, device, generators):
        if left:
            set_streams(left["global"], device)
            for name, generator in generators.items():
                set_state(generator, left["own"][name])
        yield
        left["global"] = streams(device)
        left["own"] = {name: state_of(generator) for name, generator in generators.items()}


@contextlib.contextmanager
def forked_generators(seed: int, generators: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: each of ``generators`` draws from a stream named by its key; the global generators are left alone."""
    with contextlib.ExitStack() as stack:
        for name, generator in generators.items():
            stack.enter_context(_forked(generator, derive_seed(seed, name)))
        yield


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a random generator that :func:`forked_streams` can fork."""
    return _is_kind_of_generator(type(value))


def generators_among(values: Iterable[Any]) -> list[Any]:
    """Those of ``values`` that are random generators: quick, for many values."""
    return [value for value in values if _is_kind_of_generator(type(value))]


@functools.cache
def _is_kind_of_generator(kind: type) -> bool:
    if issubclass(kind, random.SystemRandom):  # has no state
        return False
    return issubclass(kind, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)


class GlobalNumbers:
    """The random numbers that the global generators of Python, numpy and torch (on the CPU and on ``device``) give from now
    on, for code that runs twice: made before the first run, and the second run within :meth:`again`.

    Whether the first run drew some cannot be seen from the states: code may draw and put a state back. So the second run
    begins where the first one did, always. Copying numpy's state takes 50 us and Python's 10, and most code draws nothing:
    they are copied once for all that comes before the next draw, and written only where they are others. For one of torch
    this would take longer than writing it.
    """

    def __init__(self, device: torch.device) -> None:
        self._torch_generators = [torch.default_generator]
        if device.type == "cuda" and torch.cuda.is_initialized():
            self._torch_generators.append(torch.cuda.default_generators[device.index or 0])
        self._begin = self._now()

    def again(self) -> contextlib.AbstractContextManager[None]:
        """Within: the numbers of the first run. Afterwards all go on from where they were."""
        return _Again(self)

    def _now(self) -> tuple[Any, Any, list[Tensor]]:
        return python_state(), numpy_state(), [generator.get_state() for generator in self._torch_generators]

    def _put(self, wanted: tuple[Any, Any, list[Tensor]], now: tuple[Any, Any]) -> None:
        """Sets the generators to the states ``wanted``; ``now`` are those that Python's and numpy's have."""
        python, numpy, of_torch = wanted
        if python is not now[0] and python != now[0]:
            random.setstate(python)
        if numpy is not now[1]:
            np.random.set_state(numpy)
        for generator, state in zip(self._torch_generators, of_torch, strict=True):
            generator.set_state(state)


class _Again(contextlib.AbstractContextManager[None]):
    """No generator function: an exception that ends the second run early, as most do, would be thrown into it."""

    def __init__(self, numbers: GlobalNumbers):
        self._numbers = numbers

    def __enter__(self) -> None:
        self._before = self._numbers._now()
        self._numbers._put(self._numbers._begin, self._before[:2])

    def __exit__(self, *_: object) -> None:
        self._numbers._put(self._before, (python_state(), numpy_state()))


@contextlib.contextmanager
def _forked(generator: Any, seed: int) -> Iterator[None]:
    restore = _reseed(generator, seed)
    try:
        yield
    finally:
        restore()


def _reseed(generator: Any, seed: int) -> Callable[[], Any]:
    """Seeds ``generator`` (or the module ``random``, used as one). Returns a function that restores its state."""
    restore = snapshot(generator)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % 2**32 if isinstance(generator, np.random.RandomState) else seed)
    return restore


def snapshot(generator: Any) -> Callable[[], Any]:
    if isinstance(generator, np.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state())
    state = python_state() if generator is random else generator.getstate()
    return functools.partial(generator.setstate, state)


def state_of(generator: Any) -> Any:
    """The state of a random generator, of tensors, arrays and numbers, as a checkpoint stores it; :func:`set_state` takes it."""
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    version, words, normal = generator.getstate()
    return version, np.array(words, dtype=np.uint32), normal


def set_state(generator: Any, state: Any) -> None:
    """Sets the state that :func:`state_of` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        version, words, normal = state
        generator.setstate((version, tuple(words.tolist()), normal))


def seed_all(seed: int, rank: int) -> None:
    """Seeds Python, numpy and torch: rank 0 with ``seed`` itself, so that it draws what one process would; the other
    ranks with seeds of their own."""
    global _seeded
    own = _seeded = seed if rank == 0 else derive_seed(seed, "rank", rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    seed_torch(own)


def warn_of_lost_seed(num_ranks: int) -> None:
    """Warns of a seed that the user has given to torch: :func:`seed_all` replaces it by 0 on rank 0. Torch's own first one is of 64 random
    bits."""
    seed = torch.initial_seed()
    if seed < 2**32 and seed != _seeded and (seed or num_ranks > 1):
        warnings.warn(
            f"torch was seeded ({seed}) before sw.init, which seeds torch, numpy and Python anew: by its own seed, 0, on rank 0, and by others on the "
            f"other ranks, so that what they draw from here on differs. Pass it: sw.init(seed={seed}); draw what all ranks must have alike, such as a split of the data, from a generator of its own: "
            "torch.Generator().manual_seed(0)",
            stacklevel=level_of_caller(),
        )


def seed_torch(seed: int) -> None:
    """``torch.manual_seed``. Where torch has no accelerator, that takes a millisecond: it notes the seed, with a traceback,
    for each kind of accelerator, to be set should one be initialised later."""
    # What torch was built for. Whether there is one would be asked of the driver, after which forked processes cannot use it.
    if torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def streams(device: torch.device) -> dict[str, Any]:
    """The state of this process's global generators: Python's, numpy's, torch's on the CPU and on a CUDA ``device``."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"python": state_of(random), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), **cuda}


def set_streams(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores the states that :func:`streams` returned."""
    set_state(random, state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
