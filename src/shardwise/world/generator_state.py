"""The state of Python's and numpy's global generators, read and written without copying their words where they have not moved on."""

import ctypes
import functools
import random
import struct
import sys
from typing import Any

import numpy as np

SCRATCH = np.random.MT19937()  # numpy's global functions draw from it inside forked_streams
_NUM_WORDS = 624  # of 32 bits, in the state of a Mersenne twister
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


def python_state() -> Any:
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


def numpy_state() -> Any:
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
    state: Any = SCRATCH.state["state"]
    known = state["key"].tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
    return _bytes_at(SCRATCH.ctypes.state_address, _NUM_WORDS * 4 + 4).tobytes() == known and _place_of_left_over() > 0


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
