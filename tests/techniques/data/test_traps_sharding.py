"""How sharding goes silently wrong, each as a script one would write: here it is right, or refused by name.

The names are those of the list of traps; where plain torch shows the fault in a line or two, the test shows it too.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from models.constructors import Rope
from models.shared_layer import Block, Net, build
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from shardwise import Sharding
from shardwise._torch.autograd import TorchDispatchMode
from shardwise.errors import ShardwiseError, UsageError
from shardwise.parallel import parallelize, recipe_of, runtime_of
from shardwise.step.window import window
from shardwise.world import World, init

BLOCKS = Sharding(min_unit_bytes=0)
DDP, FSDP = "dp_replicate=2", "dp_shard=2"


def batch(rank: int) -> dict[str, Tensor]:
    """Rank 0's holds id 0 at its start, and so uses one parameter more."""
    ids = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 1]][rank])
    return {"ids": ids, "labels": (ids + 1) % 7}


def loss_of(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(given["ids"]), given["labels"], reduction="sum")


def one_process() -> dict[str, Tensor | None]:
    model = build()
    for rank in range(2):
        (loss_of(model, batch(rank)) / 8).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def gradients(world: World, model: nn.Module, num_micro: int = 1) -> dict[str, Tensor | None]:
    with window(model, [batch(world.rank)] * num_micro) as w:
        for given in w:
            (loss_of(model, given) / w.num_tokens).backward()
    runtime = runtime_of(model)
    found: dict[str, Tensor | None] = {}
    for name, param in runtime.parameters.items():
        grad = param.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


# ---- ties ------------------------------------------------------------------------------------------------------------


def t_tied_two_groups(layout: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        problem = None
        if layout == FSDP:
            plain = build()
            fully_shard(plain.blocks[0], mesh=world.mesh["dp_shard"])
            try:
                fully_shard(plain.blocks[2], mesh=world.mesh["dp_shard"])
                fully_shard(plain, mesh=world.mesh["dp_shard"])
            except (ValueError, RuntimeError) as error:
                problem = str(error)
        model = parallelize(build(), world, sharding=BLOCKS if layout == FSDP else None)
        units = [unit.modules for unit in recipe_of(model).units]
        tied = model.head.weight is model.embed.weight and model.blocks[0].inner is model.blocks[2].inner
        return problem, units, tied, gradients(world, model)


@pytest.mark.parametrize("layout", [FSDP, DDP])
def test_t_tied_two_groups(ranks, layout):
    for problem, units, tied, grads in ranks.run(t_tied_two_groups, 2, layout):
        assert tied
        for name, want in one_process().items():
            assert (grads[name] is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(grads[name], want, rtol=1e-12, atol=1e-14)
        if layout == FSDP:
            assert problem is not None  # what one would write by hand
            assert units == [("blocks.0", "blocks.2"), ("blocks.1",), ("",)]


def t_meta_to_empty_unties():
    """By hand: on meta, then to_empty: the tie is gone. Here ties, and an optimizer built afterwards, are right."""
    with torch.device("meta"):
        plain = Net()
    plain.to_empty(device="cpu")
    with init(FSDP, device="cpu", timeout_s=20) as world:
        model = parallelize(Net, world, sharding=BLOCKS)
        before = model.embed.weight.full_tensor().clone()
        optim = torch.optim.SGD(model.parameters(), lr=1.0)
        gradients(world, model)
        optim.step()
        moved = not torch.equal(before, model.head.weight.full_tensor())
        return plain.head.weight is plain.embed.weight, model.head.weight is model.embed.weight, moved


def test_t_meta_to_empty_unties(ranks):
    assert ranks.run(t_meta_to_empty_unties, 2) == [(False, True, True)] * 2


# ---- buffers ---------------------------------------------------------------------------------------------------------


def t_meta_nonpersistent_buffer(layout: str):
    """A table outside the state dict: garbage after to_empty and a strict, clean load; here it is the constructor's."""
    from shardwise.state import full_state_dict

    with init(layout, device="cpu", timeout_s=20) as world:
        model = parallelize(Rope, world)
        saved = full_state_dict(model)
        with torch.device("meta"):
            by_hand = Rope()
        by_hand = by_hand.to_empty(device="cpu")
        by_hand.inv_freq.fill_(7.7)  # what the memory held
        clean = by_hand.load_state_dict(saved) if world.is_main else None
        return model.inv_freq, str(clean), by_hand.inv_freq, "inv_freq" in saved


@pytest.mark.parametrize("layout", [FSDP, DDP])
def test_t_meta_nonpersistent_buffer(ranks, layout):
    want = Rope().inv_freq
    for rank, (ours, clean, by_hand, saved) in enumerate(ranks.run(t_meta_nonpersistent_buffer, 2, layout)):
        assert torch.equal(ours, want) and not saved
        if rank == 0:
            assert clean == "<All keys matched successfully>" and not torch.equal(by_hand, want)


def t_bn_buffers(layout: str, policy: str):
    """Running statistics after one window in which ranks saw other data."""
    sharding = Sharding(buffers=policy)
    with init(layout, device="cpu", timeout_s=20) as world:
        model = parallelize(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double(), world, sharding=sharding)
        x = torch.arange(12.0, dtype=torch.float64).view(4, 3) * (1 + world.rank)
        with window(model, [{"x": x}], count=len) as w:
            for given in w:
                model(given["x"]).sum().backward()
        return model[0].running_mean.clone(), model[0].num_batches_tracked.clone()


@pytest.mark.parametrize("policy", ["rank0", "mean"])
@pytest.mark.parametrize("layout", [FSDP, DDP])
def test_t_bn_buffers(ranks, layout, policy):
    first, second = ranks.run(t_bn_buffers, 2, layout, policy)
    assert torch.equal(first[0], second[0]) and first[1] == second[1] == 1
    mean = torch.tensor([4.5, 5.5, 6.5], dtype=torch.float64) * 0.1
    torch.testing.assert_close(first[0], mean if policy == "rank0" else mean * 1.5)


# ---- rules of fully_shard ------------------------------------------------------------------------------------------------


class WithMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        return self.encode(x)

    def encode(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def t_fully_shard_rules():
    """Twice; a list as a unit; a child after its parent; a method that is not forward; a deepcopy."""
    said = {}

    def attempt(name, call):
        try:
            call()
            said[name] = None
        except ShardwiseError as error:
            said[name] = (type(error).__name__, error.given, error.name)
        except Exception as error:
            said[name] = type(error).__name__

    with init(FSDP, device="cpu", timeout_s=20) as world:
        model = parallelize(WithMethod(), world, sharding=BLOCKS)
        attempt("twice", lambda: parallelize(model, world))
        attempt("part of it", lambda: parallelize(model.blocks[0], world))
        attempt("a list", lambda: parallelize(WithMethod(), world, sharding=Sharding(units=("ModuleList",))))
        attempt(
            "nested", lambda: parallelize(WithMethod(), world, sharding=Sharding(units=("Block", "blocks.*.inner")))
        )
        attempt("inner units", lambda: parallelize(WithMethod(), world, sharding=Sharding(units=("blocks.*.inner",))))
        x = torch.ones(2, 4)
        whole = [block.inner.weight.full_tensor() for block in model.blocks]
        out = model.encode(x)  # another method: blocks are called by their forward, so they are gathered
        said["method"] = [
            torch.equal(w, b.inner.weight.full_tensor()) for w, b in zip(whole, model.blocks, strict=True)
        ]
        said["method"].append(bool(torch.isfinite(out).all()))
        attempt("forward past hooks", lambda: model.blocks[0].forward(x))
        attempt("deepcopy", lambda: copy.deepcopy(model))
        wrapped = WithMethod()
        fully_shard(wrapped.blocks[0], mesh=world.mesh["dp_shard"])
        attempt("by another", lambda: parallelize(wrapped, world))
        return said


def test_t_fully_shard_rules(ranks):
    said = ranks.run(t_fully_shard_rules, 2)[0]
    assert said["twice"] == ("UsageError", "a module that was sharded already", None)
    assert said["part of it"][0] == "UsageError"
    assert said["a list"] == ("UnsupportedError", "a ModuleList as a unit", "blocks")
    assert said["nested"][0] == "PlanError" and said["nested"][2] == "blocks.0.inner"
    assert said["inner units"] is None  # leaves first, whatever the order
    assert all(said["method"])
    assert said["forward past hooks"] == (
        "UsageError",
        "a call of a part of the model, Linear, by itself",
        "blocks.0.inner",
    )
    assert said["deepcopy"] is not None
    assert said["by another"][0] == "UsageError" and said["by another"][2] == "blocks.0"


def t_reshard_int(value):
    """An int stays an int all the way to fully_shard, and the root's False stays False."""
    from shardwise._torch.fully_shard import unit_groups

    with init("dp_shard=4", device="cpu", timeout_s=20) as world:
        model = parallelize(build(), world, sharding=Sharding(min_unit_bytes=0, reshard_after_forward=value))
        grads = gradients_alike(world, model)
        meshes = [group.post_forward_mesh_info for child in model.modules() for group in unit_groups(child)]
        return [None if mesh is None else getattr(mesh, "shard_mesh_size", None) for mesh in meshes], grads


def gradients_alike(world: World, model: nn.Module) -> dict[str, Tensor | None]:
    with window(model, [batch(world.rank % 2)]) as w:
        for given in w:
            (loss_of(model, given) / w.num_tokens).backward()
    return {n: p.grad.full_tensor() if p.grad is not None else None for n, p in runtime_of(model).parameters.items()}


@pytest.mark.parametrize(("value", "sizes"), [(True, {4}), (False, {None}), (2, {2})])
def test_t_reshard_after_forward_keeps_its_number(ranks, value, sizes):
    found, grads = ranks.run(t_reshard_int, 4, value)[0]
    assert set(found[1:]) == sizes and found[0] is None  # the root's group comes first and stays gathered
    for name, want in one_process().items():
        if want is not None:
            torch.testing.assert_close(grads[name], want, rtol=1e-12, atol=1e-14)


# ---- parameters that some ranks, or none, used ---------------------------------------------------------------------------


def t_unused(layout: str, engine: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        sharding = Sharding(engine=engine, **({} if engine == "ddp" else {"min_unit_bytes": 0}))
        model = parallelize(build(), world, sharding=sharding)
        first, second = gradients(world, model), None
        for param in model.parameters():
            param.grad = None
        second = gradients(world, model)  # (plain DDP raises here)
        return first, second


@pytest.mark.parametrize(("layout", "engine"), [(DDP, "ddp"), (FSDP, "fsdp2"), (DDP, "fsdp2")])
def test_t_grad_none_zero_mismatch(ranks, layout, engine):
    want = one_process()
    assert want["never"] is None and want["sometimes"] is not None
    for found in ranks.run(t_unused, 2, layout, engine):
        for grads in found:
            assert grads["never"] is None  # not zero: AdamW would decay it
            torch.testing.assert_close(grads["sometimes"], want["sometimes"], rtol=1e-12, atol=1e-14)


class OneExpertEach(nn.Module):
    """Rank 0's tokens go to one expert, rank 1's to the other."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts[int(x[0, 0])](x))


def t_one_expert_each(units):
    with init(FSDP, device="cpu", timeout_s=6) as world:
        torch.manual_seed(3)
        sharding = Sharding(min_unit_bytes=0) if units is None else Sharding(units=units)
        model = parallelize(OneExpertEach().double(), world, sharding=sharding)
        x = torch.full((2, 4), float(world.rank), dtype=torch.float64)
        with window(model, [{"x": x}], count=len) as w:
            for given in w:
                model(given["x"]).sum().backward()
        return recipe_of(model).params["experts.0.inner.weight"].unit, {
            name: param.grad.full_tensor() for name, param in runtime_of(model).parameters.items()
        }


@pytest.mark.parametrize("units", [None, ("experts.*",)])
def test_t_experts_in_units_of_their_own(ranks, units):
    """Plain FSDP2 gives no error here, and gradients that are off by 0.5 to 2 times."""
    torch.manual_seed(3)
    plain = OneExpertEach().double()
    for rank in range(2):
        plain(torch.full((2, 4), float(rank), dtype=torch.float64)).sum().backward()
    for unit, grads in ranks.run(t_one_expert_each, 2, units):
        assert unit == "experts.0"
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14)


# ---- traffic ---------------------------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").rstrip("_")
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def t_no_sync_is_a_no_op(layout: str, num_micro: int):
    """How often gradients are reduced in a window."""
    with init(layout, device="cpu", timeout_s=20) as world:
        options = None if layout == DDP else BLOCKS
        model = parallelize(build(), world, sharding=options)
        gradients(world, model)  # the first forward sets things up
        for param in model.parameters():
            param.grad = None
        with Count() as counter:
            gradients_only(world, model, num_micro)
        return counter.calls


def gradients_only(world: World, model: nn.Module, num_micro: int) -> None:
    with window(model, [batch(world.rank)] * num_micro) as w:
        for given in w:
            (loss_of(model, given) / w.num_tokens).backward()


@pytest.mark.parametrize("layout", [DDP, FSDP])
def test_t_no_traffic_while_gradients_accumulate(ranks, layout):
    once, many = (ranks.run(t_no_sync_is_a_no_op, 2, layout, n)[0] for n in (1, 4))
    assert once.get("_reduce_scatter_base", 0) == many.get("_reduce_scatter_base", 0)
    assert once.get("allreduce", 0) == many.get("allreduce", 0)
    if layout == FSDP:
        assert once["_reduce_scatter_base"] == 3  # a unit each
        assert many["_allgather_base"] == 4 * once["_allgather_base"]  # parameters are gathered anew


def t_grad_sync_never_enabled(layout: str):
    """An exception while gradients accumulate must not leave reduction off."""
    with init(layout, device="cpu", timeout_s=20) as world:
        model = parallelize(build(), world, sharding=None if layout == DDP else BLOCKS)
        try:
            with window(model, [batch(world.rank)] * 2) as w:
                for _given in w:
                    raise KeyError("in the user's code")
        except KeyError:
            pass
        return gradients(world, model)


@pytest.mark.parametrize("layout", [DDP, FSDP])
def test_t_grad_sync_never_enabled(ranks, layout):
    for grads in ranks.run(t_grad_sync_never_enabled, 2, layout):
        for name, want in one_process().items():
            assert (grads[name] is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(grads[name], want, rtol=1e-12, atol=1e-14)


# ---- changes after sharding ------------------------------------------------------------------------------------------------


def add_a_layer(model):
    model.extra = nn.Linear(4, 4).double()


def replace_a_parameter(model):
    model.embed.weight = nn.Parameter(torch.ones(9, 4, dtype=torch.float64))


def unfreeze(model):
    model.never.requires_grad_(True)


def freeze(model):
    model.sometimes.requires_grad_(False)


def to_another_dtype(model):
    model.half()


def t_changed_after_sharding(layout: str, change: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        module = build()
        module.never.requires_grad_(False)
        model = parallelize(module, world, sharding=None if layout == DDP else BLOCKS)
        try:
            globals()[change](model)
            gradients(world, model)
        except UsageError as error:
            return error.given, error.name
        return None


@pytest.mark.parametrize("layout", [DDP, FSDP])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("add_a_layer", "extra"),  # t_new_layer_not_wrapped
        ("replace_a_parameter", "embed.weight"),  # t_param_swap_after_shard
        ("unfreeze", "never"),  # t_ddp_unfreeze_after_wrap
        ("freeze", "sometimes"),
        ("to_another_dtype", "sometimes"),
    ],
)
def test_t_changed_after_sharding(ranks, layout, change, name):
    for said in ranks.run(t_changed_after_sharding, 2, layout, change):
        assert said is not None and said[1] == name, said


# ---- weights used from elsewhere, backwards inside backwards ----------------------------------------------------------------


class Odd(nn.Module):
    """Blocks, run through reentrant checkpoints; or with a block's weight used by the parent, in its output or its loss."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.inp, self.head = how, nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.how == "reentrant" else block(x)
        if self.how == "output":
            x = F.linear(x, self.blocks[1].inner.weight)
        out = self.head(x).sum()
        return out + self.blocks[1].inner.weight.pow(2).sum() if self.how == "penalty" else out


def odd(how: str) -> nn.Module:
    torch.manual_seed(3)
    return Odd(how).double()


def t_odd(how, layout, sharding):
    """Name -> whole gradient, or the error."""
    with init(layout, device="cpu", timeout_s=20) as world:
        model = parallelize(odd(how), world, sharding=sharding)
        try:
            with window(model, [{"x": torch.full((2, 4), 1.0 + world.rank, dtype=torch.float64)}], count=len) as w:
                for given in w:
                    model(given["x"]).backward()
        except (RuntimeError, ShardwiseError) as error:
            return error
        grads = {name: param.grad for name, param in model.named_parameters()}
        return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


ONE_UNIT = Sharding(units="none")


@pytest.mark.parametrize(
    ("layout", "sharding", "how"),
    [
        *[(DDP, None, how) for how in ("output", "penalty", "reentrant")],
        *[(FSDP, ONE_UNIT, how) for how in ("output", "penalty", "reentrant")],
        (FSDP, BLOCKS, "reentrant"),
    ],
)
def test_t_parent_uses_a_weight_of_a_block(ranks, how, layout, sharding):
    """Right where both are in one unit. Under reentrant checkpoints torch's DDP ends in
    "Expected to mark a variable ready only once"."""
    plain = odd(how)
    for rank in range(2):
        plain(torch.full((2, 4), 1.0 + rank, dtype=torch.float64)).backward()
    for found in ranks.run(t_odd, 2, how, layout, sharding):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sharding", [BLOCKS, Sharding(units=("blocks.*",))])
@pytest.mark.parametrize("how", ["output", "penalty"])
def test_t_parent_uses_a_weight_of_another_unit(ranks, how, sharding):
    """torch speaks of mixed tensors in an operator, without a module."""
    for error in ranks.run(t_odd, 2, how, FSDP, sharding):
        assert isinstance(error, UsageError) and "used by code outside that unit" in str(error)
        assert 'units="none"' in error.fix


# ---- calls that go around the module ----------------------------------------------------------------------------------------


def t_direct_submodule_call(layout: str, part: str, warm: bool):
    """Gradients, or what was said, where only a part of the module is called."""
    with init(layout, device="cpu", timeout_s=20) as world:
        model = parallelize(build(), world, sharding=None if layout == DDP else BLOCKS)
        if warm:
            gradients(world, model)
            for param in model.parameters():
                param.grad = None
        x = torch.full((2, 4), 1.0 + world.rank, dtype=torch.float64)
        try:
            with window(model, [{"x": x}], count=len) as w:
                for given in w:
                    model.get_submodule(part)(given["x"]).sum().backward()
        except (RuntimeError, ShardwiseError) as error:
            return type(error).__name__, str(error)[:200], None
        found = {}
        for name, param in model.get_submodule(part).named_parameters():
            grad = param.grad
            found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        return None, None, found


@pytest.mark.combinations("pairs")
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("part", ["blocks.1", "blocks.1.inner", "head"])
@pytest.mark.parametrize("layout", [DDP, FSDP])
def test_t_direct_submodule_call(ranks, layout, part, warm):
    """Also t_ddp_module_bypass: either an error, or the gradients of both ranks; never those of one."""
    plain = build().get_submodule(part)
    for rank in range(2):
        plain(torch.full((2, 4), 1.0 + rank, dtype=torch.float64)).sum().backward()
    for kind, text, found in ranks.run(t_direct_submodule_call, 2, layout, part, warm):
        assert layout == FSDP or kind is None
        if kind is None:
            for name, param in plain.named_parameters():
                torch.testing.assert_close(found[name], param.grad, rtol=1e-12, atol=1e-14)
        if layout == FSDP and part != "blocks.1":
            assert kind == "UsageError" and part in text and "gathered only while the model's own forward runs" in text


def t_bypass_in_last_micro_batch():
    with init(DDP, device="cpu", timeout_s=20) as world:
        model = parallelize(build(), world)
        batches = [{"ids": torch.tensor([0, 2, 3 + world.rank])}, {"ids": torch.tensor([1, 4 - world.rank])}]
        with window(model, batches, count=len) as w:
            for i, given in enumerate(w):
                bypass(model, i, given["ids"]).sum().backward()
        return {name: param.grad for name, param in model.named_parameters()}


def bypass(model: nn.Module, i: int, ids: Tensor) -> Tensor:
    return model(ids) if i == 0 else model.head(model.embed(ids))


def test_t_ddp_bypass_in_the_last_micro_batch(ranks):
    """The first call goes through the module, the last does not: torch's DDP then sums nothing over the ranks."""
    plain = build()
    for rank in range(2):
        for i, ids in enumerate([torch.tensor([0, 2, 3 + rank]), torch.tensor([1, 4 - rank])]):
            bypass(plain, i, ids).sum().backward()
    for found in ranks.run(t_bypass_in_last_micro_batch, 2):
        assert found["never"] is None
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.grad, rtol=1e-12, atol=1e-14)
