"""From facts to our keys: how long the run is, its optimizer, its learning rate curve. See ``settle_layout.py``."""

import math
import re
from typing import Any

from shardwise.dialects import curves
from shardwise.dialects.facts import Curve, Fact, Facts, settles
from shardwise.dialects.settle_curve import ARGUMENTS
from shardwise.dialects.values import short

_CLASSES = {"adamw": "adamw", "adam": "adam", "sgd": "sgd"}
_FUSED = "fusedadam"  # AdamW, unless adam_w_mode is off, with its own decay; as a table names it, which has rows for its arguments
_CLASSES_OF_TORCH = {"adafactor": "adafactor", "muon": "muon"}  # others' of these names take other steps
_DECAYS_OF_TORCH = {"adamw": 0.01, "muon": 0.1}
_DECAYS = {"decay": "all", "decay_names": "names", "decay_matrices": "matrices"}  # fact -> what the decay is for
OF_OPTIMIZER = (
    "lr", *_DECAYS, "betas", "beta1", "beta2", "eps", "momentum", "amsgrad", "fused", "optimizer_arg", "groups", "decoupled",
    "of_torch",
)  # fmt: skip
_OF_CURVE = (
    "warmup", "warmup_ratio", "curve", "curve_args", "floor", "floor_lr", "init_lr", "decay_ratio", "decay_type", "decay_steps",
    "curve_min", "warmup_type", "init_div", "cycles", "curve_steps", "curve_decays",
)  # fmt: skip
_MORE_OF_CURVE = ("curve_max", "curve_min_ratio", "target_lr", "warmup_percent", "sqrt_power")
_OF_BF16 = ("mp", "mp_bf16", "mp_bf16_else", "store_low")
_UNUSED = {  # optimizer -> facts that are none of its arguments
    "adamw": ("momentum",), "adam": ("momentum",), "sgd": ("beta1", "beta2", "betas", "eps", "amsgrad"),
}  # fmt: skip
_PLAIN = ("adafactor", "muon")  # which take no argument here
_RATES = ("floor_lr", "init_lr", "curve_min")
_SHORTER = "{0} steps, there the shorter of them and {1} epochs: where the data has fewer steps, write train.epochs={1} and no train.steps"
_MOST_OFF = 0.1  # of the highest rate: what a step of ours may differ by
_ANY_LENGTH = 997  # steps of a run whose length is not known, for comparing two curves


@settles
def settle_length(facts: Facts) -> int | None:
    steps, epochs = facts.number("steps"), facts.take("epochs")
    for name in ("steps", "steps_cap", "curve_steps", "steps_per_epoch"):
        value = facts.number(name) if name != "curve_steps" or facts.is_given(name) else None
        is_wrong = value is not None and value < 1 and (name, value) != ("steps", -1)
        facts.stop_if(is_wrong, name, "it is one or more: write 1 or more")
    is_counted = (steps is not None and steps > 0) or facts.has("steps_cap")
    is_none = isinstance(epochs, int | float) and epochs <= 0 and not is_counted
    facts.stop_if(is_none, "epochs", "nothing would be trained: write a number above zero, or steps")
    is_shorter = "shorter" in facts.table.words("length") and facts.is_given("epochs")  # of steps and epochs, there
    if steps is not None and steps > 0:
        facts.put("train.steps", steps, "steps")
        if facts.is_given("epochs") and not is_shorter:
            facts.say("epochs", "dropped", f"{facts.key('steps')} counts there")
    elif cap := facts.take("steps_cap"):
        steps, is_shorter = cap, True
        facts.put("train.steps", steps, "steps_cap")
    else:
        steps, is_shorter = None, False
        if epochs:
            facts.put("train.epochs", epochs, "epochs")
    if is_shorter and epochs and epochs > 0:
        facts.say("epochs", "changed", _SHORTER.format(steps, epochs))
    if (most := facts.take("steps_per_epoch")) and isinstance(epochs, int):
        facts.drop("train.epochs")
        steps = most * epochs
        facts.take("epochs")
        facts.put("train.steps", steps, "steps_per_epoch", "epochs")
        text = (
            f"{epochs} times so many steps, through the data without a new beginning; {_SHORTER.format(steps, epochs)}"
        )
        facts.say("steps_per_epoch", "changed", text)
    is_on = any(name in facts.known and facts.known[name].value in (True, "bf16") for name in _OF_BF16)
    if is_on and "bf16" in str(facts.get("parallel.precision")) and facts.take("skips_bf16") is True:
        facts.put("train.on_nonfinite", "skip", "skips_bf16")
    if "clip" in facts.known:
        most = facts.take("clip")
        is_number = isinstance(most, int | float) and most and math.isfinite(most)
        if most and not is_number and isinstance(most, float):
            facts.say("clip", "kept", "no gradient is clipped by it; the norm is logged all the same")
        facts.put("train.max_grad_norm", float(most) if is_number else None, "clip")
    return steps if steps and steps > 0 else None


# ---- optimizer -------------------------------------------------------------------------------------------------------


@settles
def settle_optimizer(facts: Facts) -> None:
    """``optim``: torch's own classes; where an option has no key of ours, ``optim.build`` with the class itself."""
    said = facts.take("optimizer")
    if said is None:
        for name in filter(facts.is_given, OF_OPTIMIZER):
            facts.say(name, "refused", "which optimizer it is of is not said: name it")
        return
    name, build = _class_of(facts, str(said))
    text = "there is no such optimizer: write AdamW or SGD, or a class of yours by optim.build"
    facts.stop_if(name is None and build is None, "optimizer", text)
    is_own = build is not None  # a class that has no name here, with defaults of its own
    if facts.has("groups"):
        _settle_groups(facts)
    betas = _betas(facts)
    args = dict(facts.take("optimizer_arg", {}))
    momentum, fused = facts.take("momentum"), facts.take("fused")
    kind = next(filter(facts.has, _DECAYS), "decay")
    decay = facts.take(kind)
    is_of_torch = "of_torch" in facts.table.words("defaults") or facts.take("of_torch") is True
    if is_of_torch and not facts.is_given("decay"):
        decay = None if is_own else _DECAYS_OF_TORCH.get(str(said).lower().rpartition(".")[2], 0.0)
    if is_own:
        args |= {"betas": betas} if facts.is_given("betas") else {}
        args |= {name: facts.take(name) for name in ("eps", "momentum", "amsgrad") if facts.is_given(name)}
    eps, more = facts.take("eps", 1e-8), {"amsgrad": True} if facts.take("amsgrad") else {}
    if eps != 1e-8 or (name == "adam" and decay):
        more = {"eps": eps, **more}
    if name == "adam" and not decay:
        name = "adamw"  # without decay they are the same
    if name in ("adam", "adamw") and (more or args or name == "adam"):
        build, args = f"torch.optim:{'Adam' if name == 'adam' else 'AdamW'}", {"betas": betas, **more, **args}
    elif name == "sgd" and args:
        build, args = "torch.optim:SGD", {"momentum": momentum or 0.0, **args}
    if build:
        facts.put("optim.build", build, "optimizer")
        if args and fused is not None and build.startswith("torch.optim"):
            args["fused"] = fused
        if args:
            names = [name for name in ("eps", "betas", "amsgrad", "momentum") if name in args]
            facts.put("optim.args", args, *names, *(("beta1", "beta2") if "betas" in args else ()), "optimizer_arg")
            _say_arguments(facts, args)
    else:
        _put_own(facts, str(name), betas, momentum, fused)
    if facts.has("lr") and (facts.is_given("lr") or not is_own):
        facts.put("optim.lr", float(facts.take("lr")), "lr")
    for one in [] if is_own else filter(facts.is_given, _UNUSED.get(str(name), ())):
        facts.say(one, "dropped", f"{said} has no such argument")
    own = [*filter(facts.is_given, ("optimizer_arg", "eps", "momentum", "betas"))] if name in _PLAIN else []
    text = f"optim.name={name} has torch's own of it: remove it, or write a class of yours by optim.build"
    facts.stop_if(own, [*own, "optimizer"][0], text)
    if decay is not None:
        facts.put("optim.weight_decay", float(decay), kind)
        if decay and kind != "decay":
            facts.put("optim.decay_on", _DECAYS[kind], kind)


def _say_arguments(facts: Facts, args: dict[str, Any]) -> None:
    """Of arguments that have no fact of their own, each is said to be one of ``optim.args``: the fact is that of the last."""
    note = facts.note("optimizer_arg")
    section = note.key.rpartition(".")[0] if note else None
    for one in facts.notes:
        place, _, last = one.key.rpartition(".")
        if place == section and last in args and not one.ours:
            one.ours["optim.args"] = short(args)


def _class_of(facts: Facts, said: str) -> tuple[str | None, str | None]:
    module, dot, last = said.rpartition(".")
    name = _CLASSES.get(last.lower())
    if said.lower() == _FUSED:
        name = "adamw" if facts.take("decoupled", True) else "adam"
    if name is None and module.startswith("torch."):
        name = _CLASSES_OF_TORCH.get(last.lower())
    if name == "adam" and facts.take("decoupled", False):
        name = "adamw"
    if name is None and dot:
        text = "a class of another package: it takes parameter groups; what needs whole tensors is refused at the first step"
        facts.say("optimizer", "changed", text)
        return None, f"{module}:{last}"
    return name, None


def _betas(facts: Facts) -> list[float]:
    said = facts.take("betas")
    if said is None:
        return [float(facts.take("beta1", 0.9)), float(facts.take("beta2", 0.999))]
    try:
        betas = [float(beta) for beta in (said.split(",") if isinstance(said, str) else said)]
    except (TypeError, ValueError):
        betas = []
    facts.stop_if(len(betas) != 2, "betas", "it takes two numbers: write [0.9, 0.999]")
    return betas


def _put_own(facts: Facts, name: str, betas: list[float], momentum: float | None, fused: bool | None) -> None:
    if name != "adamw":
        facts.put("optim.name", name, "optimizer")
    else:
        facts.put("optim.betas", betas, "betas", "beta1", "beta2")
    if name == "sgd":
        facts.put("optim.momentum", float(momentum or 0.0), "momentum" if facts.has("momentum") else "optimizer")
    if fused is not None and name in ("adamw", "sgd"):
        facts.put("optim.fused", fused, "fused")


def _settle_groups(facts: Facts) -> None:
    text = "patterns of optim.groups: {pattern: {lr, weight_decay}}; the group that takes all gives optim.*"
    facts.say("groups", "changed", text)
    groups, note = facts.take("groups"), facts.known["groups"].note
    for group in groups if isinstance(groups, list) else [groups]:
        pattern = group.get("pattern", ".*") if isinstance(group, dict) else group
        if pattern not in (".*", ""):
            facts.refuse(note.key, f"{pattern!r} is an expression: write optim.groups with a pattern as *.bias", note)
            return
        options = group.get("optimizer_kwargs", {})
        for key, name in (("lr", "lr"), ("betas", "betas"), ("eps", "eps"), ("weight_decay", "decay")):
            if key in options:
                facts.known[name] = Fact(options[key], note)


# ---- learning rate curve ---------------------------------------------------------------------------------------------


@settles
def settle_schedule(facts: Facts, steps: int | None) -> None:
    """``schedule``: ours where it follows theirs within two steps, else theirs by ``schedule.build``."""
    is_none = facts.has("lr") and not facts.take("lr")
    facts.stop_if(is_none, "lr", "nothing would be trained: write the rate that the run has")
    curve = facts.take("curve")
    # A constant rate has nothing of what may be said of a curve.
    if curve is None and facts.table.head.get("curve", "constant") == "constant":
        unsaid = [*filter(facts.is_given, (*_OF_CURVE, *_MORE_OF_CURVE))]
        for one in unsaid:
            facts.say(one, "refused", "which curve it is of is not said: name it")
        if unsaid:
            return
    curve = curve or _implied(facts)
    if curve is None:
        return
    args = ARGUMENTS[curve.family](facts, curve.kind, steps, facts.take("lr") or 1.0)
    name = "warmup" if "warmup" in facts.known else "curve"
    rise = args.get("warmup", 0)
    if rise is None:
        text = "how long the rate rises is not known: write it in steps, or as a part of a run whose steps are written"
    elif rise < 0:
        text = "a rate rises over no step, or more: write 0 or more"
    elif steps and rise > steps:
        text = f"the rate rises over {rise} steps, and the run has {steps}: write fewer"
        name = facts.first(name, "warmup_ratio", "steps")
    else:
        text = ""
    if text:
        facts.refuse(facts.key(name), text, facts.note(name))
        return
    if _has_rates(facts, args):
        facts.followed.add("optim.lr")
    if facts.has("target_lr"):
        facts.pass_on("optim.lr", "target_lr", float)
    _put_curve(facts, curve.family, args, steps)


def _has_rates(facts: Facts, args: dict[str, Any]) -> bool:
    """Whether the curve begins or ends at a rate of its own, which is a part of the highest here."""
    rates = [facts.take(name) for name in _RATES]
    is_named = re.search(r"\bmin_lr\b", str(facts.take("curve_args"))) is not None
    return is_named or "lr_end_ratio" in args or any(rate for rate in rates if rate != "auto")


def _implied(facts: Facts) -> Curve | None:
    """The curve of a system where no key names one."""
    implied = facts.table.head.get("curve")
    if implied is None or not facts.has("lr"):
        return None
    return Curve("hf", implied) if implied == "constant" else Curve(facts.table.head["family"], implied)


def _rounded_up(part: float) -> float:
    """In two digits that are not below it, since it is said to be the most."""
    places = 1 - math.floor(math.log10(part)) if part else 0
    return round(math.ceil(part * 10**places - 1e-6) / 10**places, places)


def _put_curve(facts: Facts, family: str, args: dict[str, Any], steps: int | None) -> None:
    ratio = args.pop("ratio", None)  # the rise as a part of a run whose length is not known
    own_length = facts.number("curve_steps")
    length = own_length if own_length is not None else steps
    if length is not None and length < 1:
        return  # refused as a length already
    names = [name for name in facts.named(*_OF_CURVE) if facts.known[name].note.is_used]  # not what is of other curves
    ours = ahead = most = None
    if not facts.is_exact and not (steps and length != steps) and not ratio:
        ours, ahead, most = curves.native(family, args, length or _ANY_LENGTH)
    if ours is None or (most or 0.0) > _MOST_OFF:
        args |= {"warmup_ratio": ratio} if ratio else {}
        args |= {"steps": length} if length != steps else {}
        facts.put("schedule.build", f"shardwise.dialects.curves:{family}", *names)
        facts.put("schedule.args", args)
        return
    for key, value in ours.items():
        if not (ours["name"] == "constant" and key == "min_lr_ratio"):
            facts.put(f"schedule.{key}", value, *names)
    if ahead:
        most_off = f"at most {_rounded_up(most or 0.0)} of the highest rate off"
        off = most_off if length else "the longer the run, the nearer"
        text = f"the same curve, at most {ahead} step{'s' * (ahead > 1)} ahead, {off}; --exact keeps theirs"
        facts.say(next((name for name in ("curve", "decay_type", "warmup") if facts.has(name)), "lr"), "changed", text)
