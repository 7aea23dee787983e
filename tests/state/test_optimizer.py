"""Optimizer state whole and back, by name, from any layout into any other; bare shards under their own topology only."""

import collections
import copy
import functools

import pytest
import torch
import torch.distributed as dist
from layouts import KINDS, LAYOUTS, TRIPS, every_layout
from models.batches import VOCAB
from models.zoo import ConvNet, Odd
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import shardwise as sw
from shardwise.model.tensors import like_parameter
from shardwise.state.shared_state import shared_places

EVERY = sw.Sharding(min_unit_bytes=0)
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}


def build(name, dtype=None):
    torch.manual_seed(0)
    return {"odd": Odd, "conv": ConvNet, "alike": Alike}[name]().to(dtype or torch.float64)


class Alike(nn.Sequential):
    """Layers of one shape."""

    def __init__(self):
        super().__init__(*(nn.Linear(6, 6) for _ in range(3)))


def groups(model, lr=0.01):
    """Two groups, so that settings have to find their way."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for name, param in named if "bias" not in name], "lr": lr},
        {"params": [param for name, param in named if "bias" in name], "lr": lr / 2},
    ]


def steps(name, model, optim, world, numbers):
    generator = torch.Generator()
    loss = None
    for number in numbers:
        generator.manual_seed(number * 10 + world.axis("dp").rank)
        if name == "odd":
            x = torch.randint(0, VOCAB, (2, 5), generator=generator)
        else:
            shape = (4, 6) if name == "alike" else (2, 3, 8, 8)
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
        with sw.accumulate(model, is_last=True):
            loss = model(x).square().sum()
            loss.backward()
        optim.step()
        optim.zero_grad()
    return loss


def fresh(name, layout, kind, local=False):
    world = sw.init(layout, device="cpu")
    model = sw.parallelize(build(name), world, sharding=EVERY)
    optim = OPTIMIZERS[kind](groups(model))
    return world, model, sw.local_optimizer(optim) if local else optim


def train(name, layout, kind, numbers, state=None, local=False, offload=False):
    world, model, optim = fresh(name, layout, kind, local)
    with world:
        if state is not None:
            weights, moments = state if world.is_main else ({}, {})
            sw.load_full_state_dict(model, weights)
            sw.load_full_optimizer_state_dict(model, optim, moments)
        steps(name, model, optim, world, numbers)
        return sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optim)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.quick("one-fsdp-4-odd", "hsdp-2x2-fsdp-2-odd")
@pytest.mark.parametrize("name", ["odd", "conv"])
@pytest.mark.parametrize(("first", "seconds"), TRIPS)
def test_state_goes_from_any_layout_to_any_other_to_the_last_bit(ranks, tmp_path, name, first, seconds):
    layout, num_ranks, _ = LAYOUTS[first]
    saved, *others = ranks.run(train, num_ranks, name, layout, "adamw", (1, 2))
    assert all(other == ({}, {}) for other in others)
    moments = saved[1]["state"]
    assert len(moments) > 5 and all(set(values) == {"step", "exp_avg", "exp_avg_sq"} for values in moments.values())
    assert all(float(values["exp_avg_sq"].abs().sum()) > 0 for values in moments.values() if float(values["step"]) > 1)
    torch.save(saved, tmp_path / "state.pt")
    from_file = torch.load(tmp_path / "state.pt", weights_only=True)
    for layout, num_ranks, _ in (LAYOUTS[second] for second in seconds):
        again = ranks.run(train, num_ranks, name, layout, "adamw", (), from_file)[0]
        assert equal(saved, again)


@pytest.mark.quick("ddp-2-nadam-False", "fsdp-2-sgd-False", "hsdp-2x2-adamw-True")
@pytest.mark.parametrize(
    ("layout", "kind", "local"),
    [
        pytest.param(layout, kind, local, marks=pytest.mark.soak if layout == "hsdp-2x2" and kind != "adamw" else ())
        for layout in ("ddp-2", "fsdp-2", "hsdp-2x2")
        for kind, local in (*((kind, False) for kind in OPTIMIZERS), ("adamw", True))
    ],
)
def test_a_fresh_optimizer_goes_on_exactly_where_the_other_stood(ranks, layout, kind, local):
    text, num_ranks, _ = LAYOUTS[layout]
    whole = ranks.run(train, num_ranks, "conv", text, kind, (1, 2, 3), None, local)[0]
    half = ranks.run(train, num_ranks, "conv", text, kind, (1, 2), None, local)[0]
    rest = ranks.run(train, num_ranks, "conv", text, kind, (3,), half, local)[0]
    assert equal(whole, rest)


def settings(name, layout, state):
    world, model, optim = fresh(name, layout, "adamw")
    with world:
        before = [{key: value for key, value in group.items() if key != "params"} for group in optim.param_groups]
        sw.load_full_optimizer_state_dict(model, optim, state if world.is_main else {})
        return before, [{k: v for k, v in group.items() if k != "params"} for group in optim.param_groups]


def test_groups_take_their_settings_by_the_names_in_them(ranks):
    saved = ranks.run(train, 2, "conv", "dp_shard=2", "adamw", (1,))[0][1]
    for group, lr in zip(saved["param_groups"], (0.5, 0.25), strict=True):
        group["lr"] = lr
    saved["param_groups"].reverse()
    for before, after in ranks.run(settings, 2, "conv", "dp_shard=2", saved):
        assert [group["lr"] for group in before] == [0.01, 0.005]
        assert [group["lr"] for group in after] == [0.5, 0.25]


def refuse(name, layout, how):
    world, model, optim = fresh(name, layout, "adamw")
    with world:
        steps(name, model, optim, world, (1,))
        state = sw.full_optimizer_state_dict(model, optim)
        before = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optim.state.items()}
        if world.is_main:
            first = next(n for n, values in state["state"].items() if values["exp_avg"].dim() == 2 or name == "conv")
            if how == "numbers":
                state = {**state, "state": dict(enumerate(state["state"].values()))}
            if how == "stranger":
                state["state"]["nobody"] = state["state"].pop(first)
            if how == "shape":
                state["state"][first]["exp_avg"] = torch.zeros(3, 3, 3)
            if how == "sgd":
                for group in state["param_groups"]:
                    del group["betas"]
            if how == "groups":
                state["param_groups"][0]["params"].remove(first)
            if how == "mixed":
                state["param_groups"][0]["params"].remove(first)
                state["param_groups"][1]["params"].append(first)
            if how == "form":
                state = {"nothing": 1}
        try:
            sw.load_full_optimizer_state_dict(model, optim, state)
        except sw.ShardwiseError as error:
            after = optim.state
            same = all(
                all(torch.equal(_local(v), _local(before[id(p)][k])) for k, v in s.items()) for p, s in after.items()
            )
            return type(error).__name__, str(error), same
        return None


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("numbers", "keyed by number"),
        ("stranger", "nobody"),
        ("shape", "[3, 3, 3]"),
        ("sgd", "saved by another optimizer"),
        ("groups", "no saved group holds them"),
        ("mixed", "groups with different settings"),
        ("form", "full_optimizer_state_dict"),
    ],
)
def test_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(ranks, how, text):
    answers = ranks.run(refuse, 2, "conv", "dp_shard=2", how)
    assert answers[0] == answers[1]
    kind, message, same = answers[0]
    assert kind == "CheckpointError" and text in message and same


def others_parameters():
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(build("conv"), world)
        optim = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(sw.UsageError, match="not one of the model's"):
            sw.full_optimizer_state_dict(model, optim)
        with pytest.raises(sw.UsageError, match="not one of the model's"):
            sw.load_full_optimizer_state_dict(model, optim, {})
        return True


def test_an_optimizer_of_other_parameters_is_refused(ranks):
    assert ranks.run(others_parameters, 2) == [True, True]


def factored():
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(build("conv"), world)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        name, param = next((n, p) for n, p in model.named_parameters() if p.dim() > 1)
        optim.state[param]["row"] = torch.zeros(7)
        try:
            sw.full_optimizer_state_dict(model, optim)
        except sw.UnsupportedError as error:
            return error.name == name and "row" in error.given
        return False


def test_state_that_is_not_shaped_like_its_parameter_is_refused_by_name(ranks):
    assert ranks.run(factored, 2) == [True, True]


class Histories(torch.optim.Optimizer):
    """Keeps the last gradients of a parameter in a list, and averages in a dict and a tuple."""

    def __init__(self, params, lr=0.01, past=list):
        super().__init__(params, {"lr": lr})
        self.past = past

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                if not state:
                    state |= {"past": self.past(), "means": {"slow": torch.zeros_like(param)}, "none": []}
                    state["pair"] = (torch.zeros_like(param), torch.tensor(0.0))
                state["past"].append(param.grad.clone())
                if len(state["past"]) > 3:
                    del state["past"][0]
                state["means"]["slow"].mul_(0.9).add_(param.grad)
                state["pair"][0].add_(param.grad, alpha=0.1)
                state["pair"][1].add_(1.0)
                for kept in (*state["past"], state["means"]["slow"], state["pair"][0] / state["pair"][1]):
                    param.add_(kept, alpha=-group["lr"] / 10)


def resumed(name, make, layout, root, numbers, kind, state=None):
    """The state behind some steps of an optimizer that ``make`` makes, from a checkpoint or a state dict, if there is one."""
    world = sw.init(layout, device="cpu")
    with world:
        model = sw.parallelize(build(name), world, sharding=EVERY)
        optim = make(model.parameters())
        step = sw.TrainStep(model, optim, loss=lambda *_: None)
        manager = sw.CheckpointManager(root, step, async_save=False) if kind == "checkpoint" else None
        if state is not None:
            sw.load_full_state_dict(model, state[0])
            sw.load_full_optimizer_state_dict(model, optim, state[1])
        elif manager is not None:
            manager.load()
        for number in numbers:
            steps(name, model, optim, SameData(), (number,))
        if manager is not None:
            manager.save()
            manager.close()
        return sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optim)


class SameData:
    """Every rank has the data of the first, so that they are the same under every layout."""

    def axis(self, _):
        return self

    rank = 0


@pytest.mark.parametrize("kind", ["whole", "checkpoint"])
@pytest.mark.parametrize(("first", "second"), [("dp_shard=2", "dp_replicate=2"), ("dp_replicate=2", "dp_shard=2")])
def test_histories_in_lists_dicts_and_tuples_are_cut_as_the_parameter(ranks, tmp_path, first, second, kind):
    half = ranks.run(resumed, 2, "conv", Histories, first, str(tmp_path), (1, 2), kind)[0]
    assert [len(half[1]["state"]["stages.0.0.weight"][key]) for key in ("past", "pair", "none")] == [2, 2, 0]
    through = ranks.run(resumed, 2, "conv", Histories, first, None, (1, 2, 3, 4), "whole")[0]
    got = ranks.run(
        resumed, 2, "conv", Histories, second, str(tmp_path), (3, 4), kind, half if kind == "whole" else None
    )[0]
    for name, value in through[0].items():
        torch.testing.assert_close(got[0][name], value, rtol=1e-12, atol=1e-12)
    for name, values in through[1]["state"].items():
        torch.testing.assert_close(got[1]["state"][name], values, rtol=1e-12, atol=1e-12)


def with_a_deque():
    try:
        resumed("conv", functools.partial(Histories, past=collections.deque), "dp_shard=2", None, (1,), "whole")
    except sw.UnsupportedError as error:
        return str(error)


def test_tensors_in_another_container_are_refused_when_they_are_saved(ranks):
    for told in ranks.run(with_a_deque, 2):
        assert "optimizer state 'past': a deque of tensors" in told and "in a list, or a dict" in told


def with_another_view():
    world, model, optim = fresh("conv", "dp_shard=2", "adamw")
    with world:
        steps("conv", model, optim, world, (1,))
        for state in optim.state.values():
            if state["exp_avg"].dim() == 4:
                state["turned"] = state["exp_avg"].transpose(2, 3)
        try:
            sw.full_optimizer_state_dict(model, optim)
        except sw.UnsupportedError as error:
            return str(error)
        return "nothing was raised"


def test_another_view_of_a_tensor_is_refused_when_it_is_saved(ranks):
    for told in ranks.run(with_another_view, 2):
        assert "optimizer state 'turned', another view of the memory of 'exp_avg'" in told and "x.clone()" in told


class OneCount(torch.optim.Optimizer):
    """Has one count of steps for all parameters, an average at two places, and one average for all parameters of a shape."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        states = [self.state[p] for group in self.param_groups for p in group["params"] if self.state.get(p)]
        count = states[0]["step"] if states else torch.tensor(0.0)
        shapes = {state["mean"].shape: state["mean"] for state in states}
        count += 1
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    mean = shapes.setdefault(param.shape, torch.zeros_like(param))
                    own = torch.zeros_like(param)
                    state |= {"step": count, "mean": mean, "own": own, "again": [own]}
                if param.grad is not None:
                    state["mean"].mul_(0.9).add_(param.grad)
                    state["again"][0].add_(state["mean"])
                    param.add_(state["own"] / state["step"], alpha=-group["lr"])


@pytest.mark.quick("dp_shard=2-dp_replicate=2-whole", "dp_replicate=2-dp_shard=2-checkpoint")
@pytest.mark.parametrize("kind", ["whole", "checkpoint"])
@pytest.mark.parametrize(("first", "second"), [("dp_shard=2", "dp_replicate=2"), ("dp_replicate=2", "dp_shard=2")])
def test_one_tensor_at_several_places_is_one_after_a_resume(ranks, tmp_path, first, second, kind):
    half = ranks.run(resumed, 2, "alike", OneCount, first, str(tmp_path), (1, 2), kind)[0]
    through = ranks.run(resumed, 2, "alike", OneCount, first, None, (1, 2, 3, 4), "whole")[0]
    got = ranks.run(
        resumed, 2, "alike", OneCount, second, str(tmp_path), (3, 4), kind, half if kind == "whole" else None
    )[0]
    for number in (0, 1):
        got_of, wanted = (whole[number]["state"] if number else whole[0] for whole in (got, through))
        torch.testing.assert_close(got_of, wanted, rtol=1e-12, atol=1e-12)
    states = list(got[1]["state"].values())
    assert len(states) == 6 and all(state["step"] is states[0]["step"] for state in states)
    assert all(state["own"] is state["again"][0] for state in states)


class Coded(torch.Tensor):
    """As an 8-bit state of torchao: codes and a scale, which have the memory, behind a face that has none."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} of codes")


def test_tensors_without_memory_of_their_own_are_not_one():
    assert shared_places({name: {"m": Coded(torch.zeros(4))} for name in "ab"}) == []
    sparse = torch.eye(3).to_sparse()
    assert shared_places({name: {"m": sparse} for name in "ab"}) == []
    same = torch.zeros(4)
    assert shared_places({name: {"m": same} for name in "ab"}) == [[["a", "m"], ["b", "m"]]]


def with_a_shared_average(layout, state):
    with sw.init(layout, device="cpu") as world:
        module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        plan = sw.TensorParallel(plan={"0": "colwise", "1": "rowwise"})
        model = sw.parallelize(module, world, example={"input": torch.randn(16, 6)}, tensor_parallel=plan)
        try:
            sw.load_full_optimizer_state_dict(model, OneCount(model.parameters()), state)
        except sw.CheckpointError as error:
            return str(error)
        return "nothing was raised"


def test_one_tensor_for_parameters_that_are_cut_in_other_ways_is_refused(ranks):
    state = ranks.run(resumed, 2, "alike", OneCount, "dp_shard=2", None, (1, 2), "whole")[0][1]
    ours = {"0.weight", "1.weight"}
    state["state"] = {name: values for name, values in state["state"].items() if name in ours}
    state["param_groups"][0]["params"] = sorted(ours)
    state["shared"] = [[at for at in group if at[0] in ours] for group in state["shared"]]
    state["shared"] = [group for group in state["shared"] if len(group) > 1]
    for told in ranks.run(with_a_shared_average, 2, "tp=2", state):
        assert (
            "optimizer state 'mean', which is one tensor with 'mean' of 0.weight" in told and "the layout that" in told
        )
        assert told.startswith("1.weight")


def from_torch(layout):
    """What stock torch saves of a model that it sharded itself is taken as it is."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    world, model, optim = fresh("conv", layout, "adamw")
    with world:
        steps("conv", model, optim, world, (1,))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        theirs = get_optimizer_state_dict(model, optim, options=options)
        ours = sw.full_optimizer_state_dict(model, optim)
        again = OPTIMIZERS["adamw"](groups(model))
        sw.load_full_optimizer_state_dict(model, again, theirs)
        return ours, sw.full_optimizer_state_dict(model, again)


def test_the_form_is_that_of_torch(ranks):
    ours, again = ranks.run(from_torch, 2, "dp_shard=2")[0]
    assert equal(ours["state"], again["state"])


# ---- whole for a moment ----------------------------------------------------------------------------------------------


def read_whole(layout, write):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(build("odd"), world, sharding=EVERY)
        before = {name: param.shape for name, param in model.named_parameters()}
        try:
            with sw.gathered(model) as same:
                assert same is model
                values = {name: param.detach().clone() for name, param in model.named_parameters()}
                if write:
                    with torch.no_grad():
                        model.frozen.weight += 1
        except sw.UsageError as error:
            return error.name
        assert before == {name: param.shape for name, param in model.named_parameters()}
        out = model(torch.ones(2, 3, dtype=torch.long))
        return values, out.detach()


@pytest.mark.quick("one", "fsdp-2", "hsdp-2x2")
@every_layout(*KINDS)
def test_gathered_parameters_are_whole_on_every_rank_and_shards_again_afterwards(ranks, layout):
    plain = build("odd")
    for values, out in ranks.run(read_whole, layout.num_ranks, layout.text, False):
        assert equal(values, {name: param.detach() for name, param in plain.named_parameters()})
        assert torch.equal(out, plain(torch.ones(2, 3, dtype=torch.long)))
    assert ranks.run(read_whole, layout.num_ranks, layout.text, True) == ["frozen.weight"] * layout.num_ranks


# ---- FULL, SHARDED and LOCAL ------------------------------------------------------------------------------------------


def by_kind(layout, kind, state):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(build("odd"), world, sharding=EVERY)
        found = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in sw.state_dict(model, kind).items()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        if state is not None and kind == "LOCAL_STATE_DICT":
            found = state[world.rank % len(state)]
        try:
            report = sw.load_state_dict(model, found, kind)
        except sw.CheckpointError as error:
            return str(error)
        return report.num_tensors, sw.full_state_dict(model), found if kind == "LOCAL_STATE_DICT" else None


@pytest.mark.combinations("values")
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@every_layout(*KINDS)
def test_each_kind_of_state_dict_comes_back_to_the_last_bit(ranks, layout, kind):
    assert equal(ranks.run(by_kind, layout.num_ranks, layout.text, kind, None)[0][1], dict(build("odd").state_dict()))


def test_bare_local_tensors_are_refused_under_another_topology_and_the_error_says_why(ranks):
    state = [answer[2] for answer in ranks.run(by_kind, 2, "dp_shard=2", "LOCAL_STATE_DICT", None)]
    for told in ranks.run(by_kind, 4, "dp_shard=4", "LOCAL_STATE_DICT", state):
        assert "dp_shard=2" in told and "dp_shard=4" in told and "the topology they were taken under only" in told


def test_the_kinds_are_torchs_and_another_word_is_refused():
    from torch.distributed.fsdp import StateDictType

    assert {kind.to_torch() for kind in sw.StateDictType} == set(StateDictType)
    with pytest.raises(sw.ConfigError, match="there is no such type"):
        sw.StateDictType("HALF")


# ---- what is given is not taken --------------------------------------------------------------------------------------


def tensors_of_ones_own(layout):
    world, model, optim = fresh("odd", layout, "adamw")
    with world:
        for group in optim.param_groups:
            group["lr"], group["marks"] = torch.tensor(0.1), [1, [2]]
        steps("odd", model, optim, world, (1,))
        saved = sw.full_optimizer_state_dict(model, optim)
        if world.is_main:
            for group in saved["param_groups"]:
                group["lr"] = saved["param_groups"][0]["lr"]
        kept = copy.deepcopy(saved)
        sw.load_full_optimizer_state_dict(model, optim, saved)
        schedule = torch.optim.lr_scheduler.LambdaLR(optim, [lambda _: 1.0, lambda _: 0.01])
        steps("odd", model, optim, world, (2,))
        optim.param_groups[0]["marks"][1].append(3)
        lrs = [float(group["lr"]) for group in optim.param_groups]
        assert schedule is not None
        return equal(saved, kept), lrs


@pytest.mark.parametrize("layout", ["one", "fsdp-2"])
def test_groups_and_states_are_copies_of_what_was_given(ranks, layout):
    text, num_ranks, _ = LAYOUTS[layout]
    for same, lrs in ranks.run(tensors_of_ones_own, num_ranks, text):
        assert same and lrs == pytest.approx([0.1, 0.001])


def through_scheduler(layout, kind):
    world = sw.init(layout, device="cpu")
    model = sw.parallelize(build("conv"), world, sharding=EVERY)
    with world:
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optim, 0.2, total_steps=9)
        steps("conv", model, optim, world, (1,))
        schedule.step()
        saved = sw.full_optimizer_state_dict(model, optim)
        if kind == "older" and world.is_main:
            for group in saved["param_groups"]:
                del group["decoupled_weight_decay"]
        again = torch.optim.AdamW(model.parameters(), lr=0.1)
        sw.load_full_optimizer_state_dict(model, again, saved)
        return again.param_groups[0]["lr"] == optim.param_groups[0]["lr"], "max_lr" in again.param_groups[0]


@pytest.mark.parametrize("kind", ["scheduled", "older"])
def test_what_schedulers_add_and_older_versions_lack_is_no_other_optimizer(ranks, kind):
    assert ranks.run(through_scheduler, 2, "dp_shard=2", kind) == [(True, True)] * 2


def factored_and_back(layout):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(build("conv"), world)
        optim = torch.optim.Adafactor(model.parameters(), lr=0.1)
        steps("conv", model, optim, world, (1,))
        saved = sw.full_optimizer_state_dict(model, optim)
        again = torch.optim.Adafactor(model.parameters(), lr=0.1)
        sw.load_full_optimizer_state_dict(model, again, saved)
        return equal(saved, sw.full_optimizer_state_dict(model, again))


@pytest.mark.parametrize("layout", ["one", "ddp-2"])
def test_state_of_a_shape_of_its_own_goes_out_and_in_where_parameters_are_whole(ranks, layout):
    text, num_ranks, _ = LAYOUTS[layout]
    assert ranks.run(factored_and_back, num_ranks, text) == [True] * num_ranks


def gathered_twice():
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(build("odd"), world, sharding=EVERY)
        found = []
        with sw.gathered(model), torch.no_grad():
            with sw.gathered(model):
                model(torch.ones(2, 3, dtype=torch.long))
            found.append({name: tuple(param.shape) for name, param in model.named_parameters()})
        with sw.accumulate(model, is_last=True):
            model(torch.ones(2, 3, dtype=torch.long)).square().sum().backward()
        held = {
            name: sum(1 for _ in param.to_local().flatten()) for name, param in model.named_parameters() if param.dim()
        }
        return found[0], held


def test_gathered_parameters_stay_whole_after_a_forward_and_in_each_other(ranks):
    expected = {name: tuple(param.shape) for name, param in build("odd").named_parameters()}
    for found, held in ranks.run(gathered_twice, 2):
        assert found == expected
        assert sum(held.values()) < sum(param.numel() for param in build("odd").parameters())


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def extra_by_kind(kind):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(Counting, world)
        model.seen = 7
        state = sw.state_dict(model, kind)
        other = sw.parallelize(Counting, world, init="load")
        sw.load_state_dict(other, state, kind)
        with torch.no_grad():
            out = other(torch.ones(2, 4))
            same = torch.equal(out, model(torch.ones(2, 4)))
        if kind == "SHARDED_STATE_DICT":
            sw.load_state_dict(other, model.state_dict())
        return other.seen, same


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
def test_extra_states_come_along_and_a_model_made_for_loading_is_ready(ranks, kind):
    assert ranks.run(extra_by_kind, 2, kind) == [(7, True)] * 2


def over_a_mesh_of_devices():
    """On a mesh of devices that are not there: state of a parameter that is offloaded must not be moved to one."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cuda", torch.arange(1), _init_backend=False, _rank=0)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size([6, 3]), (3, 1), torch.bfloat16))
        param = nn.Parameter(DTensor(torch.ones(6, 3, dtype=torch.bfloat16), spec, requires_grad=True))
        value = torch.arange(18.0).view(6, 3)
        state = like_parameter(value, param)
        local = state.to_local()
        return local.device.type, local.data_ptr() == value.data_ptr(), state.dtype, tuple(state.shape)
    finally:
        dist.destroy_process_group()


def test_state_of_an_offloaded_parameter_stays_in_host_memory(ranks):
    assert ranks.run(over_a_mesh_of_devices, 1)[0] == ("cpu", True, torch.float32, (6, 3))
