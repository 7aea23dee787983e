"""Random streams whose numbers depend on what they are for, not on which rank draws them.

A stream is named by the run's seed and a place ("init", "blocks.0.weight", 3): the same place gives the same
numbers under every layout and after a resume. Seeds are derived by SHA-256, so places never collide by arithmetic.
"""

import contextlib
import copy
import ctypes
import functools
import hashlib
import random
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.config.caller import level_of_caller

_SCRATCH = np.random.MT19937()  # numpy's global functions draw from it inside forked_streams
_seeded: int | None = None  # torch's seed, as the last world of this process has set it
_NUM_WORDS = 624  # of 32 bits, in the state of a Mersenne twister


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
        np.random.set_bit_generator(_SCRATCH)
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
        return _python_state(), _numpy_state(), [generator.get_state() for generator in self._torch_generators]

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
        self._numbers._put(self._before, (_python_state(), _numpy_state()))


# A Mersenne twister makes all its words anew together, and one that was seeded otherwise differs in each word but the first:
# whether a state is another is seen from the position in the words, and these.
_FIRST_WORDS = 32


class _KnownState:
    """A state of a generator that lasts until it draws: seen in its memory, as reading a state whole takes long.

    The memory is read here, before the state is: a draw in between (of another thread) leaves a state that does not last.
    """

    __slots__ = ("_seen", "generator", "state")

    def __init__(self, generator: Any, *memory: tuple[int, int]):
        """``memory``: addresses and sizes in bytes of what differs between any two states."""
        self.generator = generator
        self.state: Any = None
        parts = [_bytes_at(address, size) for address, size in memory]
        self._seen = [(part, part.tobytes()) for part in parts]

    def lasts(self) -> bool:
        for part, seen in self._seen:  # noqa: SIM110 - asked often: quicker than a generator
            if part.tobytes() != seen:
                return False
        return True


_of_python: _KnownState | None = None
_of_numpy: _KnownState | None = None


def _bytes_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address))


def _python_state() -> Any:
    """``random.getstate()``; the same object as before where nothing was drawn in between."""
    global _of_python
    generator: Any = getattr(random.getstate, "__self__", None)
    # With a number left of a pair of normal numbers, the next draw may change no word.
    is_plain = getattr(generator, "gauss_next", 0) is None
    known = _of_python
    if is_plain and known is not None and known.generator is generator and known.lasts():
        return known.state
    known = None
    if is_plain and type(generator) is random.Random and _reads_words_of_python():
        known = _KnownState(generator, (_position_in_python(generator), 4 + 4 * _FIRST_WORDS))
    state = random.getstate()
    if known is not None:
        known.state = state
    _of_python = known if state[2] is None else None
    return state


def _position_in_python(generator: random.Random) -> int:
    """The address of the position in the words of CPython's Mersenne twister, before the words: its fields after those of any
    object."""
    return id(generator) + object.__basicsize__


@functools.cache
def _reads_words_of_python() -> bool:
    """Whether Python keeps them there."""
    generator = random.Random(7)
    words = generator.getstate()[1]
    size = 4 + _NUM_WORDS * 4
    if generator.__sizeof__() < object.__basicsize__ + size or len(words) != _NUM_WORDS + 1:
        return False
    known = b"".join(word.to_bytes(4, sys.byteorder) for word in (words[-1], *words[:-1]))
    return _bytes_at(_position_in_python(generator), size).tobytes() == known


def _numpy_state() -> Any:
    """``np.random.get_state()``; the same object as before where nothing was drawn in between."""
    global _of_numpy
    bits: Any = np.random.get_bit_generator()
    known = _of_numpy
    if known is not None and known.generator is bits and known.lasts():
        return known.state
    known, owner = None, getattr(np.random.get_state, "__self__", None)
    if type(bits) is np.random.MT19937 and type(owner) is np.random.RandomState and _reads_words():
        address = bits.ctypes.state_address
        # Whether a number is left of a pair of normal numbers, and which: the next draw of one changes no word.
        left_over = id(owner) + _place_of_left_over(), 16
        known = _KnownState(bits, (address + _NUM_WORDS * 4, 4), (address, 4 * _FIRST_WORDS), left_over)
    state: Any = np.random.get_state()
    if known is not None:
        known.state = state
    _of_numpy = known
    return state


@functools.cache
def _reads_words() -> bool:
    """Whether numpy keeps the words of a Mersenne twister, and after them the position, where it says; and in its generator
    whether a number is left of a pair."""
    state: Any = _SCRATCH.state["state"]
    known = state["key"].tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
    return _bytes_at(_SCRATCH.ctypes.state_address, _NUM_WORDS * 4 + 4).tobytes() == known and _place_of_left_over() > 0


@functools.cache
def _place_of_left_over() -> int:
    """Where in a ``RandomState`` is whether it has a number left of a pair of normal numbers, and 8 bytes on that number; 0: it
    is not to be seen."""
    generator = np.random.RandomState(7)
    bits = np.random.MT19937(7).state["state"]
    found = []
    for is_left in (0, 1, 0):  # the number itself stays the same
        generator.set_state(("MT19937", bits["key"], bits["pos"], is_left, 0.5))
        found.append(_bytes_at(id(generator), generator.__sizeof__()).tobytes())
    before, left, after = found
    places = [i for i, pair in enumerate(zip(before, left, strict=True)) if pair[0] != pair[1]]
    if len(places) != 1 or before != after or left[places[0] + 8 :][:8] != struct.pack("d", 0.5):
        return 0
    return places[0]


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
    """A function that restores ``generator`` to its current state."""
    if isinstance(generator, np.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state())
    state = _python_state() if generator is random else generator.getstate()
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
