"""A script that is edited and started again: what the checkpoint would put back is refused by name, or taken with ``override``."""

import itertools

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import shardwise as sw

DATA = [{"input": torch.linspace(-1, 1, 4) * (i + 1) / 32, "labels": torch.tensor(i % 3)} for i in range(32)]


def summed(output, batch):
    return nn.functional.cross_entropy(output, batch["labels"], reduction="sum")


def script(
    root, steps, *, optim=None, scheduler=None, override=(), by_hand=None, layout="dp_shard=1", save=True, **options
):
    """A user's script; the rates of its steps, and what the groups have in the end."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), world)
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
        kind, settings = optim or (torch.optim.AdamW, {"lr": 0.01})
        made = kind([{"params": others}, {"params": biases, "weight_decay": 0.0}], **settings)
        rule = scheduler(made) if scheduler is not None else None
        step = sw.TrainStep(model, made, loss=summed, count=lambda b: len(b["labels"]), scheduler=rule, **options)
        loader, rates, before = sw.Loader(DATA, world, global_batch=4, micro_batch=2), [], sw.full_state_dict(model)
        with sw.CheckpointManager(root, step, async_save=False) as ckpt:
            try:
                windows = ckpt.resume(loader, override=override)
            except sw.ConfigError:
                after = sw.full_state_dict(model)
                assert all(torch.equal(before[name], after[name]) for name in before) and step.num_steps == 0
                raise
            for window in windows:
                if step.num_steps == steps:
                    break
                rates.append([float(group["lr"]) for group in made.param_groups])
                out = step(window)
                if by_hand is not None:
                    by_hand(made, out.step)
            if save:
                ckpt.save()
        return rates, [{key: group[key] for key in group if key != "params"} for group in made.param_groups]


def refused(*args, **kwargs):
    """What is said."""
    try:
        script(*args, **kwargs)
    except sw.ConfigError as error:
        return error.given, error.why, error.fix
    return None


SGD = torch.optim.SGD


def every_setting_is_refused(root):
    script(root, 2)
    script(root / "sgd", 2, optim=(SGD, {"lr": 0.01, "momentum": 0.9}))
    return [
        refused(root, 3, optim=(torch.optim.AdamW, {"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.3, "eps": 1e-3})),
        refused(root, 3, optim=(torch.optim.AdamW, {"lr": 0.5, "amsgrad": True}), override=("lr",)),
        refused(root / "sgd", 3, optim=(SGD, {"lr": 0.01, "momentum": 0.5, "nesterov": True})),
        refused(root, 3, override=("lrr",)),
        refused(root, 3, override="lr"),
    ]


def test_settings_of_the_optimizer_that_were_edited_are_refused_by_name(ranks, tmp_path):
    (found,) = ranks.run(every_setting_is_refused, 1, tmp_path)
    adamw, one, sgd, unknown, text = found
    assert adamw[0].startswith("lr, betas, eps, weight_decay: not as in the run that") and "step-00000002" in adamw[0]
    assert "lr of group 0 (0.weight and 1 more) is 0.5, and was 0.01" in adamw[1]
    assert "betas of group 1 (0.bias and 1 more) is (0.8, 0.9), and was (0.9, 0.999)" in adamw[1]
    assert "weight_decay of group 0 (0.weight and 1 more) is 0.3, and was 0.01" in adamw[1]
    assert "weight_decay of group 1" not in adamw[1]  # 0.0 in both
    assert "override=('lr', 'betas', 'eps', 'weight_decay')" in adamw[2]
    assert one[0].startswith("amsgrad: not as") and "override=('lr', 'amsgrad')" in one[2]
    assert sgd[0].startswith("momentum, nesterov: not as")
    assert "'lrr'" in unknown[1] and "did you mean 'lr'?" in unknown[2]
    assert text[2] == "write override=('lr',)"


def overridden(root):
    found = []
    script(root, 2)
    found.append(script(root, 4, optim=(torch.optim.AdamW, {"lr": 0.5, "betas": (0.8, 0.9)}), override=("lr", "betas")))
    # The same script again, killed and restarted: nothing has changed since, and what the loop did to the rate stays.
    found.append(
        script(
            root,
            5,
            optim=(torch.optim.AdamW, {"lr": 0.5, "betas": (0.8, 0.9)}),
            override=("lr", "betas"),
            by_hand=halved,
        )
    )
    found.append(
        script(root, 6, optim=(torch.optim.AdamW, {"lr": 0.5, "betas": (0.8, 0.9)}), override=("lr",), by_hand=halved)
    )
    found.append(script(root, 7, optim=(torch.optim.AdamW, {"lr": 0.5, "betas": (0.8, 0.9)}), by_hand=halved))
    return found


def halved(optim, step):
    for group in optim.param_groups:
        group["lr"] *= 0.5


def test_an_overridden_setting_takes_effect_and_one_that_the_loop_has_moved_is_no_change(ranks, tmp_path):
    (found,) = ranks.run(overridden, 1, tmp_path)
    assert [rates for rates, _ in found] == [[[0.5] * 2] * 2, [[0.5] * 2], [[0.25] * 2], [[0.125] * 2]]
    assert found[0][1][0]["betas"] == (0.8, 0.9)


def warm_up(optim, total=9, rise=3):
    return lr_scheduler.SequentialLR(
        optim,
        [
            lr_scheduler.LinearLR(optim, 0.1, total_iters=rise),
            lr_scheduler.CosineAnnealingLR(optim, total, eta_min=0.001),
        ],
        [rise],
    )


class Rise:
    """A rule with settings of its own, as a callable object."""

    def __init__(self, num):
        self.num = num

    def __call__(self, done):
        return min(1.0, done / self.num)


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda done: min(1.0, done / 5)),
    "object": lambda o: lr_scheduler.LambdaLR(o, Rise(5)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda done: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 9, eta_min=0.001),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.5, 3)]),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, 3, mode="triangular2"),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=40),
    "sequential": warm_up,
}  # fmt: skip


def plain(scheduler, num, lr=0.01):
    """The rates of ``num`` steps of torch alone."""
    optim = torch.optim.AdamW(
        [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))]}], lr=lr
    )
    rule, rates = scheduler(optim), []
    for _ in range(num):
        rates.append([float(group["lr"]) for group in optim.param_groups])
        optim.step()
        rule.step()
    return rates


def unchanged(root):
    """Each schedule in pieces; those of which it comes out otherwise than in one."""
    wrong = []
    for name, scheduler in SCHEDULERS.items():
        tensor = name in ("cosine", "sequential", "one cycle")

        def rate(tensor=tensor):
            return torch.tensor(0.01) if tensor else 0.01

        pieces = [
            script(root / name, n, optim=(torch.optim.AdamW, {"lr": rate()}), scheduler=scheduler)[0] for n in (3, 7)
        ]
        if list(itertools.chain(*pieces)) != plain(scheduler, 7, rate()):
            wrong.append((name, pieces))
    return wrong


def test_an_unchanged_script_resumes_under_every_scheduler_of_torch(ranks, tmp_path):
    known = {name for name in lr_scheduler.__all__ if name not in ("LRScheduler", "ReduceLROnPlateau")}
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    assert known == {type(scheduler(sgd)).__name__ for scheduler in SCHEDULERS.values()}
    assert ranks.run(unchanged, 1, tmp_path) == [[]]


EDITS = {  # what is given now, and the settings that are refused
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.001), "T_max"),
    "step": (lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5), "step_size, gamma"),
    "multistep": (lambda o: lr_scheduler.MultiStepLR(o, [1, 5]), "milestones"),
    "object": (lambda o: lr_scheduler.LambdaLR(o, Rise(50)), "num"),
    "sequential": (lambda o: warm_up(o, 30), "T_max"),
    "chained": (lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.8), lr_scheduler.ConstantLR(o, 0.5, 3)]), "gamma"),
    "one cycle": (lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=40, pct_start=0.5), "scheduler"),
    "cyclic": (lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, 5, mode="triangular2"), "total_size"),
    "restarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2), "T_0"),
}  # fmt: skip


def edited(root):
    found = {}
    for name, (now, settings) in EDITS.items():
        script(root / name, 3, scheduler=SCHEDULERS[name])
        told = refused(root / name, 5, scheduler=now)
        rates, _ = script(root / name, 6, scheduler=now, override=tuple(settings.split(", ")))
        rates += script(root / name, 8, scheduler=now, override=tuple(settings.split(", ")))[0]  # restarted as it is
        found[name] = told, rates == plain(now, 8)[3:]
    return found


def test_settings_of_a_scheduler_are_refused_and_overridden_as_if_they_had_been_these_from_the_beginning(
    ranks, tmp_path
):
    (found,) = ranks.run(edited, 1, tmp_path)
    for name, (told, is_right) in found.items():
        assert told is not None and told[0].startswith(f"{EDITS[name][1]}: not as in the run"), (name, told)
        assert is_right, name


def faster(root):
    """Another rate under a schedule: it is in force at once, and stays so."""
    wrong = []
    optim = torch.optim.AdamW, {"lr": 0.5}
    for name in (
        "lambda",
        "object",
        "step",
        "cosine",
        "chained",
        "sequential",
        "polynomial",
        "restarts",
        "exponential",
    ):
        at, scheduler = root / name, SCHEDULERS[name]
        script(at, 3, scheduler=scheduler)
        told = refused(at, 6, optim=optim, scheduler=scheduler)
        rates, _ = script(at, 6, optim=optim, scheduler=scheduler, override=("lr",))
        rates += script(at, 8, optim=optim, scheduler=scheduler)[0]
        if told is None or "is 0.5, and was 0.01" not in told[1] or rates != plain(scheduler, 8, 0.5)[3:]:
            wrong.append((name, told, rates))
    # One cycle sets the rates itself: the optimizer's own has no effect, in a run that begins either.
    script(root / "cycle", 3, scheduler=SCHEDULERS["one cycle"])
    rates, _ = script(root / "cycle", 6, optim=optim, scheduler=SCHEDULERS["one cycle"])
    short = refused(
        root / "cycle", 9, scheduler=lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=2), override=("scheduler",)
    )
    return wrong, rates == plain(SCHEDULERS["one cycle"], 6)[3:], short


def test_a_rate_that_is_overridden_under_a_scheduler_is_that_of_the_new_schedule(ranks, tmp_path):
    ((wrong, is_cycle_right, short),) = ranks.run(faster, 1, tmp_path)
    assert wrong == [] and is_cycle_right
    assert "cannot be stepped 6 times" in short[1]


def other_scaler(root):
    def scaler(**options):
        return torch.amp.GradScaler("cpu", init_scale=4.0, **options)

    script(root, 2, scaler=scaler())
    assert refused(root, 3, scaler=scaler(), save=False) is None
    told = refused(root, 3, scaler=scaler(growth_interval=7))
    own = scaler(growth_interval=7)
    script(root, 3, scaler=own, override=("growth_interval",), max_grad_norm=0.1)
    return told, own.state_dict()


def test_settings_of_a_scaler_are_refused_or_overridden_and_clipping_takes_the_new_value(ranks, tmp_path):
    ((told, state),) = ranks.run(other_scaler, 1, tmp_path)
    assert told[0].startswith("growth_interval: not as") and "of the gradient scaler is 7, and was 2000" in told[1]
    assert state["growth_interval"] == 7 and state["_growth_tracker"] == 3


class OwnLoop:
    """A loop of the user's own, which steps a scheduler outside of it."""

    def __init__(self, model, optim):
        self.model, self.optim = model, optim

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    check_state_dict = load_state_dict


def own_loops(root):
    def own(lr, patience, override=(), by_hand=False):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(lambda: nn.Linear(4, 3), world)
            optim = torch.optim.SGD(model.parameters(), lr=lr, fused=False)
            cosine = None if by_hand else lr_scheduler.CosineAnnealingLR(optim, 9)
            plateau = lr_scheduler.ReduceLROnPlateau(optim, patience=patience)
            extra = {"plateau": plateau} | ({} if cosine is None else {"cosine": cosine})
            loader = sw.Loader(DATA, world, global_batch=4, micro_batch=2)
            with sw.CheckpointManager(
                root / str(by_hand), OwnLoop(model, optim), extra=extra, async_save=False
            ) as ckpt:
                try:
                    windows = ckpt.resume(loader, override=override)
                except sw.ConfigError as error:
                    return error.given, error.why, error.fix
                for _, window in zip(range(2), windows, strict=False):
                    with sw.window(model, window, count=lambda b: len(b["labels"])) as w:
                        for b in w:
                            (summed(model(b["input"]), b) / w.num_tokens).backward()
                    optim.step()
                    optim.zero_grad()
                    plateau.step(1.0)
                    if cosine is not None:
                        cosine.step()
                ckpt.save()
                return optim.param_groups[0]["lr"]

    first = own(0.01, 0)
    return [
        first,
        own(0.02, 0),
        own(0.02, 0, ("lr",)),
        own(0.01, 4),
        own(0.01, 0),
        own(0.01, 0, by_hand=True),
        own(0.01, 0, by_hand=True),
        own(0.02, 0, ("lr",), by_hand=True),
    ]


def test_a_loop_of_ones_own_with_schedulers_in_extra(ranks, tmp_path):
    (found,) = ranks.run(own_loops, 1, tmp_path)
    first, rate, override, patience, again, once, twice, faster = found
    assert 0 < first < 0.01 and rate[0].startswith("lr: not as in the run")
    assert "with a scheduler that the step does not have" in override[0]
    assert patience[0].startswith("patience: not as in the run") and "extra['plateau'] is 4, and was 0" in patience[1]
    assert 0 < again < first
    assert once == pytest.approx(0.001) and twice == pytest.approx(1e-5) and faster == pytest.approx(2e-4)


def saved_at_the_end(root):
    """What is said of resuming, by the manager that saved: one made when the run had ended, and one made before it."""
    said = {}
    for when in ("the end", "the beginning"):
        for lr in (0.1, 0.2):
            with sw.init("dp_shard=1", device="cpu") as world:
                model = sw.parallelize(lambda: nn.Linear(4, 3), world)
                optim = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=0.1 if lr == 0.1 else 0.2)
                extra = {"plateau": lr_scheduler.ReduceLROnPlateau(optim, patience=0)}
                folder, loop = root / when, OwnLoop(model, optim)
                if folder.exists():
                    try:
                        sw.CheckpointManager(folder, loop, extra=extra).load()
                    except sw.ConfigError as error:
                        said[when] = f"{error.given} {error.why}"
                    continue
                early = sw.CheckpointManager(folder, loop, extra=extra) if when == "the beginning" else None
                for _ in range(2):
                    with sw.window(model, [DATA[0]], count=lambda _: 1) as w:
                        for b in w:
                            summed(model(b["input"]), b).backward()
                    optim.step()
                    optim.zero_grad()
                    extra["plateau"].step(1.0)
                with early or sw.CheckpointManager(folder, loop, extra=extra) as ckpt:
                    ckpt.save()
    return said


def test_what_a_plateau_has_set_before_the_manager_was_made_is_no_changed_setting(ranks, tmp_path):
    """It was refused: lr is 0.1, and was 0.01."""
    (said,) = ranks.run(saved_at_the_end, 1, tmp_path)
    assert "weight_decay" in said["the end"] and "lr of group" not in said["the end"], said
    assert "weight_decay" in said["the beginning"] and "lr of group 0" in said["the beginning"], said
