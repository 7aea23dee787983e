"""Learning rate curves of other systems: closed forms beside the systems' own functions, and which of our schedules follows one."""

import itertools
import math

import pytest
import torch
from run.tuned import rates

from shardwise.dialects import curves
from shardwise.dialects.table import load, names
from shardwise.run.optim_config import Schedule

STEPS = 101
TRANSFORMERS = {
    "linear": [({}, {})],
    "cosine": [({}, {}), ({"num_cycles": 1.5}, {"cycles": 1.5})],
    "constant": [({}, {})],
    "constant_with_warmup": [({}, {})],
    "inverse_sqrt": [({}, {}), ({"timescale": 300}, {"timescale": 300})],
    "cosine_with_restarts": [({"num_cycles": 3}, {"cycles": 3})],
    "cosine_with_min_lr": [({"min_lr_rate": 0.07}, {"floor": 0.07})],
    "polynomial": [({"lr_end": 0.01, "power": 2.0}, {"lr_end_ratio": 0.01, "power": 2.0})],
    "warmup_stable_decay": [
        ({"num_decay_steps": 25, "decay_type": kind, "min_lr_ratio": 0.05}, {"decay": 25, "decay_type": kind, "floor": 0.05})
        for kind in ("linear", "cosine", "1-sqrt")
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", TRANSFORMERS)
@pytest.mark.parametrize("warmup", [0, 1, 17])
def test_curves_of_transformers_are_its_own(kind, warmup):
    from transformers import get_scheduler

    warmup = 0 if kind == "constant" else warmup
    for theirs, ours in TRANSFORMERS[kind]:
        optim = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        given = {"num_warmup_steps": warmup, "num_training_steps": STEPS, "scheduler_specific_kwargs": theirs}
        scheduler = get_scheduler(kind, optim, **given)
        for done in range(STEPS):
            rate = curves.hf(done, STEPS, kind, warmup=warmup, **ours)
            assert rate == pytest.approx(optim.param_groups[0]["lr"], abs=1e-12), done
            optim.step()
            scheduler.step()


# The systems below are not installed where tests run. What follows is what the code of each does, as it was read: some step from one
# value to the next, and all are written in another way than the closed forms.


def deepspeed(kind, warmup, shape, low, floor=1e-4):
    """lr_schedules.py: ``last_batch_iteration`` is -1 when the scheduler is made, which sets the first rate, and grows after each step."""
    warmup, at, rate = max(2, warmup), -1, low
    inverse_log = 1 / math.log(warmup)
    rate = 0.0 if kind == "WarmupCosineLR" else low
    while True:
        yield rate
        at += 1
        gamma = inverse_log * math.log(at + 1) if shape == "log" else at / warmup
        if kind == "WarmupCosineLR":
            left = 1 + math.cos(math.pi * (at - warmup + 1) / (STEPS - warmup))
            rate = low + (1 - low) * gamma if at < warmup else max(0.0, floor + (1 - floor) / 2 * left)
        else:
            after = 1.0 if kind == "WarmupLR" else max(0.0, (STEPS - at) / max(1.0, STEPS - warmup))
            rate = (1 - low) * (gamma if at < warmup else after) + low


def nemo(kind, warmup, init, floor, decay, shape):
    """scheduler.py: the rate of a number of steps, asked for before each of them."""
    for done in itertools.count():
        if warmup and done <= warmup:
            yield init + (1 - init) * done / warmup
        elif kind == "constant":
            yield 1.0
        elif kind == "WSD":
            begin = STEPS - decay
            part = (done - begin) / decay
            falls = {"linear": 1 - part, "cosine": (math.cos(math.pi * part) + 1) / 2, "exponential": 2 * 0.5**part - 1, "minus_sqrt": 1 - max(0, part) ** 0.5}  # fmt: skip
            yield (1.0 if done <= begin else falls[shape]) * (1 - floor) + floor
        else:
            part = (done - warmup) / (STEPS - warmup)
            yield floor + (1 - floor) * ((math.cos(math.pi * part) + 1) / 2 if kind == "cosine" else 1 - part)


def torchtitan(warmup, ratio, shape, floor):
    """lr_scheduler.py: a rise over warmup, a level, a fall of which one step more than the run is counted."""
    warmup = min(warmup, STEPS)
    fall = STEPS - warmup if ratio is None else min(round(STEPS * ratio), STEPS - warmup)
    level = STEPS + 1 - warmup - fall
    for step in itertools.count():
        if step < warmup:
            yield (step + 1) / warmup
        elif step < warmup + level:
            yield 1.0
        else:
            part = (step + 1 - warmup - level) / fall
            falls = {"linear": 1 - part, "sqrt": 1 - math.sqrt(part), "cosine": 0.5 * (1 + math.cos(math.pi * part))}
            yield floor + (1 - floor) * falls[shape]


def optimus(warmup, fall, shape, floor):
    """wsd_scheduler.py."""
    last = int(fall * STEPS)
    for step in itertools.count():
        hold, part = STEPS - last, (step - (STEPS - last)) / max(1, last)
        if step < warmup:
            yield step / warmup + (1 - step / warmup) / 100
        elif step < hold:
            yield 1.0
        else:
            falls = {
                "linear": lambda p=part: floor + (1 - floor) * (1 - p),
                "exp": lambda p=part: floor**p,
                "cosine": lambda p=part: floor + (1 - floor) * (1 + math.cos(math.pi * p)) / 2,
                "miror_cosine": lambda p=part: floor + (1 - floor) * (2 * (1 - p) - (1 + math.cos(math.pi * p)) / 2),
                "square": lambda p=part: floor + (1 - floor) * (1 - p * p),
                "sqrt": lambda p=part: floor + (1 - floor) * (1 - p**0.5),
            }
            yield falls[shape]()


READ = [
    *[
        (deepspeed(kind, warmup, shape, low), curves.deepspeed, {"kind": kind, "warmup": warmup, "warmup_type": shape, "low": low})
        for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
        for warmup, shape, low in ((10, "log", 0.0), (10, "linear", 0.0), (1, "log", 0.0), (20, "linear", 0.2))
    ],
    *[
        (nemo(kind, warmup, init, floor, decay, shape), curves.nemo, {"kind": kind, "warmup": warmup, "init": init, "floor": floor, "decay": decay, "decay_type": shape})
        for kind, warmup, init, floor, decay, shape in (
            ("cosine", 10, 0.1, 0.01, 0, ""), ("linear", 0, 0.0, 0.0, 0, ""), ("constant", 5, 0.5, 0.01, 0, ""),
            *[("WSD", 7, 0.1, 0.02, 30, shape) for shape in ("linear", "cosine", "exponential", "minus_sqrt")],
        )
    ],
    *[
        (torchtitan(warmup, ratio, shape, floor), curves.torchtitan, {"warmup": warmup, "decay_ratio": ratio, "decay_type": shape, "floor": floor})
        for warmup, ratio, shape, floor in ((200, None, "linear", 0.0), (10, None, "cosine", 0.1), (0, 0.2, "sqrt", 0.0), (10, 0.33, "linear", 0.1), (90, 0.5, "linear", 0.0))
    ],
    *[
        (optimus(10, 0.3, shape, 0.05), curves.optimus, {"kind": "wsd", "warmup": 10, "decay_ratio": 0.3, "decay_type": shape, "floor": 0.05})
        for shape in ("linear", "exp", "cosine", "miror_cosine", "square", "sqrt")
    ],
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(READ)))
def test_curves_are_those_of_the_systems_code(case):
    theirs, curve, args = READ[case]
    for done, rate in zip(range(STEPS), theirs, strict=False):
        assert curve(done, STEPS, **args) == pytest.approx(rate, abs=1e-12), (done, args)


FOLLOWED = [
    ("hf", {"kind": "linear"}, ("linear", 1)),
    ("hf", {"kind": "cosine", "warmup": 30}, ("cosine", 1)),
    ("hf", {"kind": "constant"}, ("constant", 0)),
    ("hf", {"kind": "inverse_sqrt", "warmup": 50}, None),
    ("hf", {"kind": "polynomial", "power": 2.0}, None),
    ("hf", {"kind": "warmup_stable_decay", "warmup": 50, "decay": 100, "decay_type": "linear"}, ("wsd", 1)),
    ("torchtitan", {"warmup": 20, "decay_ratio": 0.2}, ("wsd", 1)),
    ("torchtitan", {"warmup": 20, "decay_ratio": 0.2, "decay_type": "sqrt"}, None),
    ("nemo", {"kind": "cosine", "warmup": 100, "init": 0.1}, None),  # the rise begins at a tenth
    ("deepspeed", {"kind": "WarmupLR", "warmup": 100}, None),  # it rises as a logarithm
    ("deepspeed", {"kind": "WarmupDecayLR", "warmup": 100, "warmup_type": "linear"}, ("linear", 2)),
    ("optimus", {"kind": "cosine_annealing"}, ("cosine", 1)),
    ("ml", {"kind": "linear", "warmup": 10, "floor": 1e-4}, ("linear", 1)),
]


@pytest.mark.parametrize(("family", "args", "expected"), FOLLOWED)
def test_ours_is_written_where_it_follows_within_two_steps(family, args, expected):
    found, ahead, most = curves.native(family, args, 1000)
    assert (found and (found["name"], ahead)) == expected
    if found is not None:
        there = [curves.REGISTRY[family](done, 1000, **args) for done in range(1003)]
        here = rates(
            Schedule(**{k: v for k, v in found.items() if (found["name"], k) != ("constant", "min_lr_ratio")}), 1000
        )
        assert most == pytest.approx(max(abs(a - b) for a, b in zip(here, there, strict=False)))
        for done, rate in enumerate(here):
            near = there[done : done + ahead + 1]
            assert min(near) - 1e-9 <= rate <= max(near) + 1e-9


@pytest.mark.parametrize(("family", "args", "expected"), FOLLOWED)
def test_a_long_run_is_compared_at_its_corners_as_at_each_step(monkeypatch, family, args, expected):
    found, ahead, _ = curves.native(family, args, 2_000_000_000)  # in no more time than a run of 10,000 steps
    assert found is None or ahead in (0, 1, 2)
    each = curves.native(family, args, 1000)
    monkeypatch.setattr(curves, "_EACH_STEP", 999)
    monkeypatch.setattr(curves, "_BETWEEN", 20)
    sampled = curves.native(family, args, 1000)
    assert sampled[0] == each[0]
    assert each[0] is None or sampled[2] == pytest.approx(each[2], abs=0.01)


def test_each_table_names_a_family_of_curves():
    for name in names():
        family = load(name).head.get("family")
        assert family in curves.REGISTRY or family is None


def test_a_rise_that_is_a_part_of_the_run_is_rounded_as_there():
    for steps in (9, 10, 39, 70, 10_009, 10_010, 30_000):
        nemo, zero = min(1000, steps // 10), math.ceil(0.1 * steps)
        for done in (0, 1, nemo, zero, zero + 1):
            assert curves.nemo(done, steps, warmup_ratio=0.1) == curves.nemo(done, steps, warmup=nemo)
            given = {"kind": "WarmupDecayLR", "low": 0.1}
            part = curves.deepspeed(done, steps, warmup_ratio=0.1, **given)
            assert part == curves.deepspeed(done, steps, warmup=zero, **given)
