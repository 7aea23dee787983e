"""The user's code around an optimizer's step: hooks, a step set on the object, the model's own methods. It sees the model's parameters, or is
refused by the name of one; never the parts of a rank as if they were whole."""

import contextlib
import types

import pytest
import torch
from step.rows import by_x, ce, mine, rows
from techniques.tp.searches import searched_once
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shardwise as sw
from shardwise._torch.optimizers import step_within
from shardwise.testing import RankPool

LAYOUTS = {"dp_shard=2": 2, "dp_replicate=2": 2, "dp_shard=1,tp=2": 2, "dp_shard=2,tp=2": 4}


class Net(nn.Module):
    def __init__(self, own: str = "") -> None:
        super().__init__()
        self.own, self.up, self.down = own, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))

    @torch.no_grad()
    def pre_optimizer_step(self) -> None:
        if self.own == "before":
            _shorten(self.parameters())
        if self.own == "before, one":
            grad = self.up.weight.grad
            grad.sub_(grad.mean())

    @torch.no_grad()
    def post_optimizer_step(self) -> None:
        if self.own == "after":
            _renormalise(self.parameters())
        if self.own == "after, columns":
            self.up.weight.div_(self.up.weight.norm(dim=0, keepdim=True))


# ---- the user's code -----------------------------------------------------------------------------------------------------


def _params(optim):
    return [param for group in optim.param_groups for param in group["params"]]


def _shorten(params) -> None:
    for param in params:
        param.grad.div_(param.grad.norm() + 1)


def _renormalise(params) -> None:
    for param in params:
        param.div_(param.norm().clamp(min=0.5))


@torch.no_grad()
def shorten(optim, *_):
    _shorten(_params(optim))


@torch.no_grad()
def renormalise(optim, *_):
    _renormalise(_params(optim))


@torch.no_grad()
def by_layer(optim, *_):  # LARS
    for param in _params(optim):
        param.grad.mul_(param.norm() / (param.grad.norm() + 1e-8))


@torch.no_grad()
def centre(optim, *_):
    for param in _params(optim):
        if param.dim() > 1:
            param.grad.sub_(param.grad.mean(dim=1, keepdim=True))


@torch.no_grad()
def by_one_norm(optim, *_):
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in _params(optim)]))
    for param in _params(optim):
        param.grad.div_(norm)


@torch.no_grad()
def by_state(optim, *_):
    for param in _params(optim):
        state = optim.state[param]
        param.mul_(1 / (1 + 0.1 * state.get("exp_avg", state.get("momentum_buffer")).norm()))


@torch.no_grad()
def of_state(optim, *_):  # element by element
    for param in _params(optim):
        state = optim.state[param]
        param.sub_(state.get("exp_avg", state.get("momentum_buffer")), alpha=0.1)


@torch.no_grad()
def by_sign(optim, *_):  # element by element, a new gradient
    for param in _params(optim):
        param.grad = param.grad.sign() * param.grad.abs().sqrt()


def same_arguments(optim, args, kwargs):
    return args, kwargs


def _lookahead(optim):
    slow: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def after(optim, *_):
        for i, param in enumerate(_params(optim)):
            slow.setdefault(i, param.detach().clone()).lerp_(param, 0.5)
            param.copy_(slow[i])

    optim.register_step_post_hook(after)


def _calling(optim):
    inner = optim.step

    def step(self, closure=None):
        shorten(self)
        return inner()

    optim.step = types.MethodType(step, optim)


def _alone(optim):
    @torch.no_grad()
    def step(self, closure=None):
        for param in _params(self):
            param.sub_(param.grad / (param.grad.norm() + 1), alpha=0.1)

    optim.step = types.MethodType(step, optim)


def _scheduled(optim):
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
    optim.register_step_post_hook(lambda *_: scheduler.step())


CODE = {
    "a norm before": lambda o: o.register_step_pre_hook(shorten),
    "a norm after": lambda o: o.register_step_post_hook(renormalise),
    "by layer": lambda o: o.register_step_pre_hook(by_layer),
    "centred": lambda o: o.register_step_pre_hook(centre),
    "one norm": lambda o: o.register_step_pre_hook(by_one_norm),
    "before every optimizer": lambda o: register_optimizer_step_pre_hook(shorten),
    "after every optimizer": lambda o: register_optimizer_step_post_hook(renormalise),
    "by the state": lambda o: o.register_step_post_hook(by_state),
    "of the state": lambda o: o.register_step_post_hook(of_state),
    "by sign": lambda o: o.register_step_pre_hook(by_sign),
    "lookahead": _lookahead,
    "same arguments": lambda o: o.register_step_pre_hook(same_arguments),
    "a scheduler": _scheduled,
    "a step around": _calling,
    "a step alone": _alone,
}
ELEMENTWISE = {"of the state", "by sign", "lookahead", "same arguments", "a scheduler"}
METHODS = ["before", "before, one", "after", "after, columns"]
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
}


# ---- training ------------------------------------------------------------------------------------------------------------


def one_process(own: str, optimizer: str, code: str):
    torch.manual_seed(0)
    model = Net(own).double()
    optim = OPTIMIZERS[optimizer](model.parameters())
    handle = CODE[code](optim) if code else None
    for window in range(3):
        optim.zero_grad()
        (sum(ce(by_x(model, b), b) for b in rows(window)) / 10).backward()
        model.pre_optimizer_step()
        optim.step()
        model.post_optimizer_step()
    if handle is not None:
        handle.remove()
    return {name: param.detach() for name, param in model.named_parameters()}


def trained(world, own: str, optimizer: str, code: str, loop: str):
    """The largest difference to one process; or the class and the name of an error. ``loop``: who steps; "later": code comes after it."""
    torch.manual_seed(0)
    options = {"example": {"x": rows(0)[3]["x"]}} if world.axis("tp").size > 1 else {}
    with searched_once((Net, own)):
        model = sw.parallelize(Net(own).double(), world, sharding=sw.Sharding(min_unit_bytes=0), **options)
    optim = OPTIMIZERS[optimizer](model.parameters())
    is_later, handle = loop.endswith("later"), None
    try:
        if code and not is_later:
            handle = CODE[code](optim)
        step = sw.TrainStep(model, optim, loss=ce, forward=by_x) if loop.startswith("TrainStep") else None
        if loop.startswith("local"):
            sw.local_optimizer(optim)
        if code and is_later:
            handle = CODE[code](optim)
        for window in range(3):
            micros = mine(world, rows(window))
            if step is not None:
                step(micros)
                continue
            optim.zero_grad()
            with sw.window(model, micros) as w:
                for b in w:
                    (ce(by_x(model, b), b) / w.num_tokens).backward()
            model.pre_optimizer_step()
            optim.step()
            model.post_optimizer_step()
        if handle is not None:
            handle.remove()
        want, found = one_process(own, optimizer, code), sw.full_state_dict(model)
        return max(float((found[name] - value).abs().max()) for name, value in want.items()) if found else 0.0
    except sw.ShardwiseError as error:
        return type(error).__name__, error.name or error.given
    finally:
        if handle is not None:
            handle.remove()


def outcomes(layout: str, cases):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        return [trained(world, *case) for case in cases]


def cases(optimizer: str, loop: str):
    return [("", optimizer, code, loop) for code in CODE] + [(own, optimizer, "", loop) for own in METHODS]


@pytest.mark.quick("SGD-TrainStep-dp_shard=2", "AdamW-local-dp_replicate=2", "AdamW-own loop-dp_shard=1,tp=2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("optimizer", "loop"),
    [
        ("SGD", "TrainStep"),
        ("AdamW", "local"),
        ("AdamW", "own loop"),
        *[
            pytest.param(optimizer, loop, marks=pytest.mark.soak)
            for optimizer in OPTIMIZERS
            for loop in ("TrainStep", "TrainStep later", "local", "local later", "own loop")
            if (optimizer, loop) not in (("SGD", "TrainStep"), ("AdamW", "local"), ("AdamW", "own loop"))
        ],
    ],
)
def test_code_around_a_step_is_right_or_refused(ranks: RankPool, layout, optimizer, loop):
    given = cases(optimizer, loop)
    for found in ranks.run(outcomes, LAYOUTS[layout], layout, given):
        for (own, _, code, _), outcome in zip(given, found, strict=True):
            if code.startswith("a step") and loop == "local":
                assert outcome[0] == "UnsupportedError" and "replaced on the object" in outcome[1], code
            elif "tp" in layout and code not in ELEMENTWISE:
                assert outcome in [("UsageError", "up.weight"), ("UsageError", "down.weight")], (own, code, outcome)
            else:
                assert isinstance(outcome, float) and outcome < 1e-12, (own, code, outcome)


def with_other_arguments():
    with sw.init("dp_shard=1", device="cpu", timeout_s=20) as world:
        model = sw.parallelize(Net().double(), world, sharding=sw.Sharding(engine="fsdp2"))
        optim = sw.local_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        optim.register_step_pre_hook(lambda optim, args, kwargs: (args, {"closure": None}))
        with sw.accumulate(model, is_last=True):
            model(rows(0)[0]["x"]).sum().backward()
        try:
            optim.step()
        except sw.ShardwiseError as error:
            return str(error)
        return ""


def test_a_hook_that_gives_the_step_other_arguments_is_refused(ranks: RankPool):
    assert "gives the step other arguments" in ranks.run(with_other_arguments, 1)[0]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_is_wrapped_once_inside_of_its_hooks(is_first):
    """Whether torch had put its own wrapper around it, as it does when the first optimizer of a class is made, or does so later."""
    seen: list[str] = []

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            seen.append("step")
            if len(seen) == 3:
                raise ArithmeticError

    @contextlib.contextmanager
    def around(optim):
        seen.append(type(optim).__name__)
        try:
            yield
        finally:
            seen.append("end")

    params = [nn.Parameter(torch.ones(2))]
    if is_first:
        Own(params)
    step_within(Own, around), step_within(Own, around)
    optim = Own(params)
    with pytest.raises(ArithmeticError):
        optim.step(lambda: seen.append("closure"))
    assert seen == ["closure", "Own", "step", "end"]
    optim.register_step_pre_hook(lambda *_: seen.append("before"))
    optim.register_step_post_hook(lambda *_: seen.append("after"))
    optim.step()
    assert seen[4:] == ["before", "Own", "step", "end", "after"]
