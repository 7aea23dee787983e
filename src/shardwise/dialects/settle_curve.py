"""From facts to the arguments of a curve: one function for each family of ``curves.py``, by its name.

``(facts, kind, steps, lr) -> arguments``, with ``ratio`` for a rise that is a part of a run of unknown length.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import msgspec

from shardwise.dialects.facts import Facts

_HF_KINDS = (
    "linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_restarts", "cosine_with_min_lr", "polynomial",
    "warmup_stable_decay",
)  # fmt: skip
_HF_NAMES = {
    "num_cycles": "cycles", "power": "power", "timescale": "timescale", "min_lr_rate": "floor", "min_lr_ratio": "floor",
    "num_decay_steps": "decay", "num_stable_steps": "stable", "decay_type": "decay_type", "warmup_type": "warmup_type",
}  # fmt: skip
_HF_RATES = {"min_lr": "floor", "lr_end": "lr_end_ratio"}  # given as rates, not as parts of the highest
_NO_CURVE = "there is no such curve: write schedule.name=cosine, linear, constant or wsd in the run file"
Arguments = dict[str, Any]


def hf(facts: Facts, kind: str, steps: int | None, lr: float) -> Arguments:
    more = _mapping_of(facts, "curve_args")
    facts.stop_if(kind not in _HF_KINDS, "curve", _NO_CURVE)
    if facts.has("cycles"):
        more["num_cycles"] = facts.take("cycles")
    rise, ratio = (0, None) if kind == "constant" else _rise(facts, steps)
    args: Arguments = {"kind": kind, "warmup": rise}
    for key, value in more.items():
        is_known = key in _HF_RATES or key in _HF_NAMES
        facts.stop_if(not is_known, "curve_args", f"{key} is not known of {kind}: remove it")
        args[_HF_RATES.get(key) or _HF_NAMES[key]] = value / lr if key in _HF_RATES else value
    if kind == "polynomial":
        args.setdefault("lr_end_ratio", 1e-7 / lr)
    return args | ({"ratio": ratio} if ratio else {})


def _rise(facts: Facts, steps: int | None) -> tuple[int, float | None]:
    """Steps of the rise; and, of a run of unknown length, the part of it that they are."""
    rise = facts.take("warmup")
    ratio = None if rise else facts.take("warmup_ratio")
    is_no_rise = rise is not None and (rise < 0 or (rise > 1 and rise != int(rise)))
    facts.stop_if(is_no_rise, "warmup", "it is a whole number of steps, or a part of the run below 1: write 0 or more")
    is_no_part = ratio is not None and not 0 <= ratio <= 1
    facts.stop_if(is_no_part, "warmup_ratio", "it is a part of the run: write 0 to 1")
    if isinstance(rise, float) and 0 < rise < 1:
        rise, ratio = 0, rise
    if ratio and steps:
        rise, ratio = math.ceil(ratio * steps), None
    return int(rise or 0), ratio or None


def _mapping_of(facts: Facts, name: str) -> dict[str, Any]:
    said, made = facts.take(name) or {}, None
    with contextlib.suppress(TypeError, ValueError):
        made = dict(msgspec.json.decode(said) if isinstance(said, str) else said)  # NaN is no rate, and no JSON
    facts.stop_if(made is None, name, "it takes a mapping: write {name: number}")
    return made or {}


def torchtitan(facts: Facts, kind: str, steps: int | None, lr: float) -> Arguments:
    rise = facts.take("warmup", 0)
    if steps and rise > max(steps, facts.number("curve_steps") or 0):
        facts.say("warmup", "changed", f"the rate rises over all {steps} steps, as there: the run has no more")
        rise = steps
    args = {"warmup": rise, "decay_type": facts.take("decay_type", "linear"), "floor": facts.take("floor", 0.0)}
    return args | ({"decay_ratio": facts.take("decay_ratio")} if facts.has("decay_ratio") else {})


def nemo(facts: Facts, kind: str, steps: int | None, lr: float) -> Arguments:
    rise, ratio = facts.take("warmup"), None
    if rise is None and steps:
        rise = min(1000, steps // 10)
    elif rise is None and not facts.has("curve_steps"):
        rise, ratio = 0, 0.1
    init, floor = facts.take("init_lr"), facts.take("floor_lr")
    args = {
        "kind": kind,
        "warmup": rise,
        "init": 0.1 if init is None else init / lr,
        "floor": 0.01 if floor is None else floor / lr,
    }
    if kind == "WSD":
        args |= {"decay": facts.take("decay_steps", 0), "decay_type": facts.take("decay_type", "exponential")}
    return args | ({"ratio": ratio} if ratio else {})


def deepspeed(facts: Facts, kind: str, steps: int | None, lr: float) -> Arguments:
    highest = facts.take("curve_max")
    if kind == "WarmupDecayLR" and highest is None:
        highest = 0.001
    if isinstance(highest, int | float) and kind != "WarmupCosineLR":
        facts.put("optim.lr", float(highest), "curve_max" if facts.has("curve_max") else "curve")
        lr = highest
    facts.stop_if(not lr, "curve_max", "nothing would be trained: write the rate that the run has")
    lowest = facts.take("curve_min", 0.0)
    low = facts.take("curve_min_ratio", 0.0) if kind == "WarmupCosineLR" else (0.0 if lowest == "auto" else lowest) / lr
    rise, ratio = _rise(facts, steps)  # as the configuration around it says, where that fills it in
    return {
        "kind": kind,
        "warmup": rise,
        "warmup_type": facts.take("warmup_type", "log"),
        "low": low,
        "floor": facts.take("floor", 1e-4),
        **({"ratio": ratio} if ratio else {}),
    }


def optimus(facts: Facts, kind: str, steps: int | None, lr: float) -> Arguments:
    text = "the rate begins at its highest divided by it: write 1 or more"
    facts.stop_if(facts.take("init_div", 100) == 0, "init_div", text)
    if kind == "constant":
        return {"kind": kind}
    if kind == "cosine_annealing":
        return {"kind": kind, "floor": facts.take("floor_lr", 0.0) / lr}
    rise = facts.take("warmup")
    is_by_part = rise is None or not facts.is_given("warmup")
    if kind == "linear_warmup":
        if is_by_part:
            rise = _part(facts.take("warmup_percent", 0.05), steps)
        return {"kind": kind, "warmup": rise, "init": facts.take("init_lr", 0.0) / lr}
    facts.stop_if(kind != "wsd", "curve", _NO_CURVE)
    if facts.has("warmup_ratio") and is_by_part:
        rise = _part(facts.take("warmup_ratio"), steps)
    return {
        "kind": kind,
        "warmup": rise,
        "floor": facts.take("floor", 0.0),
        "init_div": facts.take("init_div", 100),
        "decay_ratio": facts.take("decay_ratio", 0.1),
        "decay_type": facts.take("decay_type", "linear"),
        "power": facts.take("sqrt_power", 0.5),
    }


def ml(facts: Facts, kind: str, steps: int | None, lr: float) -> Arguments:
    text = f"it repeats, or is not known: {_NO_CURVE.partition(': ')[2]}"
    facts.stop_if(kind not in ("linear", "linear_no_decay", "constant"), "curve", text)
    rise = facts.take("warmup")
    if kind == "linear" and not facts.is_given("warmup"):
        rise = _part(facts.take("warmup_percent", 0.01), steps)
    elif kind == "linear_no_decay" and not rise:
        rise = 1000
    is_constant = kind != "linear" or facts.take("curve_decays") is False
    return {"kind": "constant" if is_constant else "linear", "warmup": rise or 0, "floor": facts.take("floor", 1e-4)}


def _part(part: float, steps: int | None) -> int | None:
    """A part of the run in whole steps; None: how long the run is, is not known."""
    return None if steps is None else int(part * steps)


ARGUMENTS: dict[str, Callable[[Facts, str, int | None, float], Arguments]] = {
    one.__name__: one for one in (hf, torchtitan, nemo, deepspeed, optimus, ml)
}
