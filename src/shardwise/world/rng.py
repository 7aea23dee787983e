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
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "GlobalNumbers",
    "derive_seed",
    "forked_generators",
    "forked_rng",
    "forked_streams",
    "generators_among",
    "has_generator",
    "is_generator",
    "seed_all",
    "seed_torch",
    "set_state",
    "set_streams",
    "snapshot",
    "state_of",
    "streams",
]

_SCRATCH = np.random.MT19937()  # numpy's global functions draw from it inside forked_streams
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
def forked_generators(seed: int, generators: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: each of ``generators`` draws from a stream named by its key; the global generators are left alone."""
    with contextlib.ExitStack() as stack:
        for name, generator in generators.items():
            stack.enter_context(_forked(generator, derive_seed(seed, name)))
        yield


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a random generator that :func:`forked_streams` can fork."""
    return _is_kind_of_generator(type(value))


def has_generator(kinds: Iterable[type]) -> bool:
    """Whether one of these types is that of a random generator."""
    return any(map(_is_kind_of_generator, kinds))


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
    they are copied once for all that comes before the next draw, and written only where they are others.
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

    def _put(self, wanted: tuple[Any, Any, list[Tensor]], now: tuple[Any, Any, list[Tensor]]) -> None:
        """Sets the generators to the states ``wanted``; ``now`` are those that they have."""
        if wanted[0] is not now[0] and wanted[0] != now[0]:
            random.setstate(wanted[0])
        if wanted[1] is not now[1]:
            _set_numpy_state(wanted[1])
        for generator, state, current in zip(self._torch_generators, wanted[2], now[2], strict=True):
            if _differs(state, current):
                generator.set_state(state)


class _Again(contextlib.AbstractContextManager[None]):
    """No generator function: an exception that ends the second run early, as most do, would be thrown into it."""

    def __init__(self, numbers: GlobalNumbers):
        self._numbers = numbers

    def __enter__(self) -> None:
        self._before = self._numbers._now()
        self._numbers._put(self._numbers._begin, self._before)

    def __exit__(self, *_: object) -> None:
        self._numbers._put(self._before, self._numbers._now())


def _differs(a: Tensor, b: Tensor) -> bool:
    """Whether two states of a torch generator differ. By their bytes: no operator, which modes of others would see."""
    return ctypes.string_at(a.data_ptr(), a.numel()) != ctypes.string_at(b.data_ptr(), b.numel())


_taken: tuple[Any, bytes, Any] | None = (
    None  # numpy's bit generator, its words, and the whole state that goes with them
)
_taken_of_python: tuple[Any, bytes, Any] | None = None  # the same of Python's generator


def _python_state() -> Any:
    """``random.getstate()``; the same object as before where nothing was drawn in between."""
    global _taken_of_python
    generator: Any = getattr(random.getstate, "__self__", None)
    if type(generator) is not random.Random or not _reads_words_of_python():
        return random.getstate()
    if vars(generator).get("gauss_next") is not None:  # a number left of a pair of normal numbers
        return random.getstate()
    words = _words_of_python(generator)
    if _taken_of_python is None or _taken_of_python[0] is not generator or _taken_of_python[1] != words:
        _taken_of_python = generator, words, random.getstate()
    return _taken_of_python[2]


def _words_of_python(generator: random.Random) -> bytes:
    """The position in the words of CPython's Mersenne twister, and the words: its fields after those of any object."""
    return ctypes.string_at(id(generator) + object.__basicsize__, 4 + _NUM_WORDS * 4)


@functools.cache
def _reads_words_of_python() -> bool:
    """Whether Python keeps them where ``_words_of_python`` reads them."""
    generator = random.Random(7)
    words = generator.getstate()[1]
    if generator.__sizeof__() < object.__basicsize__ + 4 + _NUM_WORDS * 4 or len(words) != _NUM_WORDS + 1:
        return False
    known = b"".join(word.to_bytes(4, sys.byteorder) for word in (words[-1], *words[:-1]))
    return _words_of_python(generator) == known


def _numpy_state() -> Any:
    """``np.random.get_state()``; the same object as before where nothing was drawn in between."""
    global _taken
    bits = np.random.get_bit_generator()
    words = _words_of(bits)
    if _taken is not None and _taken[0] is bits and _taken[1] == words and words:
        return _taken[2]
    state: Any = np.random.get_state()
    # With a number left of a pair of normal numbers, the next draw may change no word.
    _taken = None if not words or state[3] else (bits, words, state)
    return state


def _set_numpy_state(state: Any) -> None:
    global _taken
    np.random.set_state(state)
    _taken = None  # it may bring a number left of a pair, without changing a word


def _words_of(bits: Any) -> bytes:
    """All words of a Mersenne twister and its position in them; empty for another generator."""
    if type(bits) is not np.random.MT19937 or not _reads_words():
        return b""
    return ctypes.string_at(bits.ctypes.state_address, _NUM_WORDS * 4 + 4)


@functools.cache
def _reads_words() -> bool:
    """Whether numpy keeps them where ``_words_of`` reads them."""
    state: Any = _SCRATCH.state["state"]
    read = ctypes.string_at(_SCRATCH.ctypes.state_address, _NUM_WORDS * 4 + 4)
    return read == state["key"].tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)


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
    return functools.partial(generator.setstate, generator.getstate())


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
    own = seed if rank == 0 else derive_seed(seed, "rank", rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    seed_torch(own)


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
