"""Buffers of every dtype under every policy, in plain and in skipped windows: what plain torch makes of the ranks' values, or refused by
name. So are buffers that a forward makes in unusual ways."""

import functools
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UnsupportedError
from shardwise.testing import RankPool

NAN, INF = float("nan"), float("inf")
WORDS = ("sum", "mean", "min", "max", "rank0", "own")
ROWS = {  # of a window: what each rank writes
    0: ([1, NAN, -2, INF, 0.5], [3, 1, NAN, -INF, -0.5]),
    1: ([9] * 5, [8] * 5),  # skipped
    2: ([-1, 2, 1, 0, NAN], [NAN, 4, 1, -INF, 0]),
}


@functools.cache
def can(dtype: torch.dtype, what: str) -> bool:
    """Whether torch computes with a dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        try:
            zeros = torch.zeros(1).to(dtype)
            return what == "copy" or (zeros + zeros).dtype == dtype
        except (NotImplementedError, RuntimeError):
            return False


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def values(dtype: torch.dtype, window: int, rank: int) -> torch.Tensor:
    if dtype == torch.uint64:  # beyond what int64 holds, too
        return torch.tensor([-1 - rank, 5 + rank, window, 0, 1]).view(dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.tensor([3 * window + rank, 100 - rank, 5, 2, 1]).to(dtype)
    found = torch.tensor(ROWS[window][rank], dtype=torch.float64)
    return (found * (1 - 2j) if dtype.is_complex else found).to(dtype)


class Written(nn.Module):
    """Each forward writes a buffer, and one of two bytes: what is sent together lets a buffer begin anywhere. ``x`` is [window, rank]."""

    def __init__(self, dtype: torch.dtype, word: str) -> None:
        super().__init__()
        self.body, self.word = nn.Linear(2, 2).double(), word
        self.register_buffer("beside", torch.zeros((), dtype=torch.float16))
        self.register_buffer("one", torch.zeros_like(values(dtype, 0, 0)))

    def forward(self, x):
        new = values(self.one.dtype, int(x[0, 0]), int(x[0, 1]))
        self.one = self.one + new if self.word == "sum" else new
        self.beside += 1
        return self.body(x)


def expected(dtype: torch.dtype, word: str, rank: int) -> torch.Tensor:
    """What the windows that count leave, by plain torch."""
    if word in ("own", "rank0"):
        return values(dtype, 2, rank if word == "own" else 0)
    if word == "sum":
        return sum((values(dtype, *at) for at in itertools.product((0, 2), range(2))), torch.zeros(()).to(dtype))
    a, b = values(dtype, 2, 0), values(dtype, 2, 1)
    if not dtype.is_floating_point and not dtype.is_complex:  # torch does not compare all of them
        return torch.from_numpy(getattr(np, f"{word}imum")(a.numpy(), b.numpy()))
    if dtype.is_complex:
        a, b = (torch.view_as_real(x.to(torch.complex128)) for x in (a, b))
        return torch.view_as_complex((a + b) / 2).to(dtype)
    a, b = a.double(), b.double()
    return ((a + b) / 2 if word == "mean" else getattr(torch, f"{word}imum")(a, b)).to(dtype)


def steps(world: sw.World, model: nn.Module, word: str = "rank0", num: int = 3) -> nn.Module:
    """The model after some windows, of which the second is skipped."""
    model = sw.parallelize(model, world, sharding=sw.Sharding(buffers={"*": word}))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sw.TrainStep(model, optim, loss=lambda y, b: y.sum(), count=lambda b: 1, on_nonfinite="skip")
    for window in range(num):
        last = INF if window == 1 else 1.0
        step([{"x": torch.tensor([[window, world.rank], [1.0, last]], dtype=torch.float64)}])
    sw.full_state_dict(model)
    return model


def _every(layout, stride):
    found = {}
    with sw.init(layout, device="cpu", timeout_s=30) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental, and these counters count forwards
        for dtype, word in itertools.islice(itertools.product(DTYPES, WORDS), None, None, stride):
            if not can(dtype, "add" if word == "sum" else "copy"):
                continue
            try:
                found[dtype, word] = shown(steps(world, Written(dtype, word), word).one)
            except sw.ShardwiseError as error:
                found[dtype, word] = error.name
    return found


def is_refused(dtype: torch.dtype, word: str) -> bool:
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    return {"sum": dtype == torch.bool, "mean": is_whole}.get(word, word in ("min", "max") and dtype.is_complex)


def shown(x: torch.Tensor) -> str:
    """Its numbers, exactly; a NaN whatever its bits."""
    if x.is_floating_point() or x.is_complex():
        x = x.to(torch.complex128 if x.is_complex() else torch.float64) + 0
    return str([x.dtype, *x.tolist()])


@pytest.mark.parametrize("stride", [pytest.param(1, id="all", marks=pytest.mark.soak), pytest.param(5, id="a fifth")])
def test_every_dtype_under_every_policy_is_what_torch_makes_of_the_ranks_values_or_refused(ranks: RankPool, stride):
    for rank, found in enumerate(ranks.run(_every, 2, "dp_replicate=2", stride, timeout_s=120)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for (dtype, word), one in found.items():
                if is_refused(dtype, word):
                    assert one == "one", (dtype, word)
                else:
                    assert one == shown(expected(dtype, word, rank)), (dtype, word)
    assert len(found) > 90 // stride


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not can(dtype, "copy")], ids=str)
def test_a_dtype_that_torch_only_stores_is_refused_by_the_buffers_name(dtype):
    model = Written(torch.float32, "own")
    model.one = torch.empty(4, dtype=dtype)
    with (
        sw.init("dp_shard=1", device="cpu") as world,
        pytest.raises(UnsupportedError, match="one: a buffer") as refused,
    ):
        sw.parallelize(model, world)
    assert "torch.uint8" in refused.value.fix


# ---- made in unusual ways ----------------------------------------------------------------------------------------------


class Made(nn.Module):
    """A buffer that is made anew in each forward, or after the step; ``x`` is [window, rank]."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.how = nn.Linear(2, 2).double(), how
        self.register_buffer("one", torch.zeros(4, dtype=torch.complex64 if how == "conjugated" else torch.float32))

    def forward(self, x):
        self.make(float(x[0, 0] * 2 + x[0, 1] + 1))
        return self.body(x)

    def make(self, number: float) -> None:
        if self.how == "expanded":
            self.one = torch.tensor([number]).expand(4)
        elif self.how == "conjugated":
            self.one = torch.full((4,), complex(number, 1)).conj()
        elif self.how == "negated":
            self.one = torch.full((4,), complex(0, -number)).conj().imag
        elif self.how == "one in rows":
            self.one = torch.full((4, 3), number)[:, 1]
        else:
            with torch.inference_mode():
                self.one = torch.full((4,), number) if self.how == "inference" else torch.tensor([number]).expand(4)


HOWS = ("expanded", "conjugated", "negated", "one in rows", "inference", "inference expanded")


def _made(layout):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        return {
            (how, word): [steps(world, Made(how), word, num).one.tolist() for num in (2, 3)]
            for how, word in itertools.product(HOWS, ("rank0", "mean", "max", "own"))
            if (how, word) != ("conjugated", "max")
        }


@pytest.mark.quick("dp_shard=2")
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_buffers_made_in_any_way_go_back_and_become_equal(ranks: RankPool, layout):
    for rank, found in enumerate(ranks.run(_made, 2, layout, timeout_s=60)):
        for (how, word), by_num in found.items():
            for one, first in zip(by_num, (1, 5), strict=True):  # after the skipped window, and after one that counts
                number = first + {"rank0": 0, "mean": 0.5, "max": 1, "own": rank}[word]
                assert one == [complex(number, -1) if how == "conjugated" else number] * 4, (how, word)
