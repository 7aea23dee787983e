"""Code that runs twice gets the numbers of Python's, numpy's and torch's global generators twice, and leaves them as one run does."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.world import generator_state
from shardwise.world.rng import GlobalNumbers


def other_generator() -> float:
    np.random.set_bit_generator(np.random.MT19937(5))
    return float(np.random.rand())


def drawn_and_put_back(
    read: Callable[[], Any], write: Callable[[Any], Any], draw: Callable[[], Any]
) -> Callable[[], Any]:
    """A function that leaves the generator as it found it."""

    def draws() -> Any:
        state = read()
        found = draw()
        write(state)
        return found

    return draws


DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "python": random.random,
    "numpy": np.random.rand,
    "both": lambda: (random.random(), np.random.rand()),
    "all words of numpy's state": lambda: np.random.rand(
        312
    ).tolist(),  # each takes two of 624: the position is the same
    "all words of Python's state": lambda: [random.random() for _ in range(312)],
    "one of Python's pair": lambda: random.gauss(0, 1),
    "the other of Python's pair": lambda: [random.gauss(0, 1) for _ in range(2)],
    "one of a pair": np.random.randn,
    "the other of a pair": lambda: np.random.randn(2).tolist(),
    "seeded, one of a pair": lambda: (np.random.seed(0), np.random.randn()),
    "torch": lambda: torch.rand(3).tolist(),
    "one of torch's pair": lambda: torch.randn(1).item(),
    "all three": lambda: (random.random(), np.random.rand(), torch.bernoulli(torch.full((9,), 0.5)).tolist()),
    "seeded": lambda: (np.random.seed(3), random.seed(4), np.random.rand(), random.random())[2:],
    "torch, seeded": lambda: (torch.manual_seed(3), torch.rand(2).tolist())[1:],
    "another generator": other_generator,
    "one's own part of torch's": drawn_and_put_back(
        torch.get_rng_state, torch.set_rng_state, lambda: torch.rand(2).tolist()
    ),
    "one's own part of numpy's": drawn_and_put_back(np.random.get_state, np.random.set_state, np.random.rand),
    "one's own part of Python's": drawn_and_put_back(random.getstate, random.setstate, random.random),
}


@pytest.fixture(autouse=True)
def _as_before():
    bits, state, python = np.random.get_bit_generator(), np.random.get_state(), random.getstate()
    of_torch = torch.get_rng_state()
    yield
    torch.set_rng_state(of_torch)
    np.random.set_bit_generator(bits)
    np.random.set_state(state)
    random.setstate(python)


def states() -> tuple[Any, str, bytes]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("reads_words", [True, False])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("draws", DRAWS)
def test_the_second_run_draws_what_the_first_did(monkeypatch, draws, before, reads_words, between):
    if not reads_words:
        monkeypatch.setattr(generator_state, "_reads_words", lambda: False)
        monkeypatch.setattr(generator_state, "_reads_words_of_python", lambda: False)
    np.random.seed(1)
    random.seed(1)
    torch.manual_seed(1)
    torch.randn(before)
    for _ in range(before):
        random.gauss(0, 1)
    np.random.randn(before)  # with 1, the other number of a pair is left
    for _ in range(3):  # what is known of the state before
        numbers = GlobalNumbers(torch.device("cpu"))
        first = DRAWS[draws]()
        if between:
            random.random(), np.random.randn(), torch.rand(2)  # code after the block
        kept = states()
        with numbers.again():
            assert DRAWS[draws]() == first
        if draws != "another generator":  # which stays, as after any code that sets it
            assert states() == kept


@pytest.mark.parametrize("reads_words", [True, False])
def test_a_number_left_of_a_pair_is_seen_where_no_word_is_another(monkeypatch, reads_words):
    if not reads_words:
        monkeypatch.setattr(generator_state, "_reads_words", lambda: False)
    np.random.seed(0)
    np.random.randn()
    state = np.random.get_state()  # with a number left
    np.random.randn()
    GlobalNumbers(torch.device("cpu"))  # knows the state without it
    np.random.set_state(state)
    numbers = GlobalNumbers(torch.device("cpu"))
    first = np.random.randn()
    with numbers.again():
        assert np.random.randn() == first


@pytest.mark.parametrize(
    ("module", "name", "draw"), [(np.random, "get_state", np.random.rand), (random, "getstate", random.random)]
)
def test_a_draw_while_a_state_is_copied_is_seen(monkeypatch, module, name, draw):
    """As of another thread: the copy is that from before, and the generator's memory that from after the draw."""
    copy = getattr(module, name)

    @functools.wraps(copy)
    def copied_late():
        state = copy()
        monkeypatch.setattr(module, name, copy)
        draw()
        return state

    copied_late.__self__ = copy.__self__
    monkeypatch.setattr(generator_state, "_of_numpy", None)
    monkeypatch.setattr(generator_state, "_of_python", None)
    monkeypatch.setattr(module, name, copied_late)
    GlobalNumbers(torch.device("cpu"))
    numbers = GlobalNumbers(torch.device("cpu"))
    first = draw()
    with numbers.again():
        assert draw() == first


@pytest.mark.parametrize(("module", "name"), [(np.random, "get_state"), (random, "getstate")])
def test_a_state_is_copied_once_where_nothing_is_drawn(monkeypatch, module, name):
    assert generator_state._reads_words() and generator_state._reads_words_of_python()
    monkeypatch.setattr(generator_state, "_of_numpy", None)
    monkeypatch.setattr(generator_state, "_of_python", None)
    copies, copy = [], getattr(module, name)
    counted = functools.wraps(copy)(lambda: copies.append(1) or copy())
    counted.__self__ = copy.__self__
    monkeypatch.setattr(module, name, counted)
    for _ in range(5):
        numbers = GlobalNumbers(torch.device("cpu"))
        with numbers.again():
            pass
    assert len(copies) == 1
