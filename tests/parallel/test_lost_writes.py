"""Writes into a row, a slice or places of what is cut over dp_shard: those of one process, or refused by name. None is lost."""

import io
import itertools

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise._torch.dtensor import local_tensor

LAYOUTS = {"dp_shard=2": 2, "dp_shard=3": 3, "dp_replicate=2,dp_shard=2": 4}
SHAPES = [(6, 4), (5, 4), (1, 4)]  # as many rows on each rank; fewer on the last; none there
CUT = {  # views along the dim that is cut
    "w[0]": lambda w: w[0],
    "w[-1]": lambda w: w[-1],
    "w[:1]": lambda w: w[:1],
    "w[0, 0]": lambda w: w[0, 0],
    "w[0][:2]": lambda w: w[0][:2],
    "w[:, 0][0]": lambda w: w[:, 0][0],
    "w[None][:, 0]": lambda w: w[None][:, 0],
    "chunk": lambda w: w.chunk(w.shape[0] + 1)[0][0],
    "narrow": lambda w: w.narrow(0, 0, 1)[0],
    "split": lambda w: w.split(1)[0][0],
    "split sizes": lambda w: w.split([1, w.shape[0] - 1])[0],
    "tensor_split": lambda w: w.tensor_split([1])[0][0],
    "select": lambda w: torch.select(w, 0, 0),
    "unbind": lambda w: w.unbind()[0],
    "rows": lambda w: next(iter(w)),
    "t()[:, 0]": lambda w: w.t()[:, 0],
    "movedim": lambda w: w.movedim(0, 1)[:, 0],
    "view(-1)[0]": lambda w: w.view(-1)[0],
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(0, 1, 1)[0],
    "data[0]": lambda w: w.data[0],
    "[0].data": lambda w: w[0].data,
    "detach()[0]": lambda w: w.detach()[0],
    "[0].detach()": lambda w: w[0].detach(),
    "contiguous()[0]": lambda w: w.contiguous()[0],
}
KEPT = {  # views that leave that dim as it is
    "w": lambda w: w,
    "w[:]": lambda w: w[:],
    "w[:, 0]": lambda w: w[:, 0],
    "w[:, :2]": lambda w: w[:, :2],
    "w.t()[0]": lambda w: w.t()[0],
    "w.mT": lambda w: w.mT,
    "chunk columns": lambda w: w.chunk(2, 1)[1],
    "unbind columns": lambda w: w.unbind(1)[0],
    "heads": lambda w: w.unflatten(1, (2, 2))[:, 1],
    "detach": lambda w: w.detach()[:, 1],
}
EITHER = {  # by the shape
    "view(-1)": lambda w: w.view(-1),
    "flatten": lambda w: w.flatten(),
    "blocks of rows": lambda w: w.view(-1, 1, w.shape[1]),
    "complex": lambda w: torch.view_as_complex(w.view(w.shape[0], -1, 2)),
}
FEW = {
    "zero_": lambda v: v.zero_(),
    "add_": lambda v: v.add_(1.0),
    "copy_": lambda v: v.copy_(v * 2 + 1),
    "v[...] = 2": lambda v: v.__setitem__(..., 2.0),
}
WRITES = FEW | {
    "+=": lambda v: v.__iadd__(1.0),
    "fill_": lambda v: torch.fill_(v, 2.0),
    "init.zeros_": lambda v: nn.init.zeros_(v),
    "init.constant_": lambda v: nn.init.constant_(v, 2.0),
    "out=": lambda v: torch.mul(v, 2.0, out=v),
    "_foreach_mul_": lambda v: torch._foreach_mul_([v], 3.0),
    "lerp_": lambda v: v.lerp_(torch.ones_like(v), 0.5),
    "detach().fill_": lambda v: v.detach().fill_(9.0),
    "of a part of it": lambda v: v[..., :1].fill_(9.0) if v.dim() else v.zero_(),
}


def index(*places):
    return torch.tensor(places)


def ones(w, *shape):
    return torch.ones(shape or w.shape, dtype=w.dtype)


PLACED = {  # refused, whatever the shape
    "w[0] = 0": lambda w: w.__setitem__(0, 0.0),
    "w[:1] = 1": lambda w: w.__setitem__((slice(0, 1), 0), 1.0),
    "w[0] += 1": lambda w: exec("w[0] += 1", {"w": w}),
    "w[0] = plain": lambda w: w.__setitem__(0, ones(w, 4)),
    "w[[0]] = 1": lambda w: w.__setitem__([0], 1.0),
    "w[index] = 1": lambda w: w.__setitem__(index(0), 1.0),
    "w[mask] = 1": lambda w: w.__setitem__(w > 0, 1.0),
    "index_fill_": lambda w: w.index_fill_(0, index(0), 1.0),
    "index_copy_": lambda w: w.index_copy_(0, index(0), torch.ones_like(w)[:1]),
    "index_add_": lambda w: w.index_add_(0, index(0), torch.ones_like(w)[:1]),
    "index_add_ of a plain tensor": lambda w: w.index_add_(0, index(0), ones(w, 1, 4)),
    "scatter_": lambda w: w.scatter_(0, torch.zeros(1, 4, dtype=torch.long), 1.0),
    "put_": lambda w: w.put_(index(0), ones(w, 1)),
    "masked_fill_": lambda w: w.masked_fill_(ones(w, 4).bool(), 1.0),
    "masked_scatter_": lambda w: w.masked_scatter_(w > 0, w * 2),
    "triu_": lambda w: w.triu_(),
    "cumsum_": lambda w: w.cumsum_(0),
    "renorm_": lambda w: w.renorm_(2, 0, 0.1),
    "init.eye_": lambda w: nn.init.eye_(w),
    "copy_ of a plain tensor": lambda w: w.copy_(ones(w)),
    "fill_diagonal_": lambda w: w.fill_diagonal_(0.0),
    "as_strided": lambda w: w.as_strided((2,), (1,)).zero_(),
    "zeros(out=)": lambda w: torch.zeros(*w.shape, dtype=w.dtype, out=w),
    "full(out=)": lambda w: torch.full(w.shape, 2.0, out=w),
    "_foreach_copy_ of a plain tensor": lambda w: torch._foreach_copy_([w], [ones(w)]),
    "_foreach_add_ of a plain tensor": lambda w: torch._foreach_add_([w], [ones(w)]),
    "copy_ of its row": lambda w: w.copy_(w[0].expand_as(w)),
    "fill_ of its place": lambda w: w.fill_(w[0, 0]),
    "a column of its place": lambda w: w[:, 1].add_(w[-1, 0]),
    "w[:] = its row": lambda w: w.__setitem__(slice(None), w[0]),
    "lerp_ to its row": lambda w: w.lerp_(w[:1].expand_as(w), 0.5),
    "apply_": lambda w: w.apply_(lambda x: 2 * x),
    "set_": lambda w: w.set_(torch.ones_like(w)),
    "w.data =": lambda w: setattr(w, "data", w * 2),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(torch.arange(w.numel(), dtype=w.dtype), [w]),
}
DRAWN = {  # on the CPU each rank would draw for its part alone
    "normal_": lambda w: w.normal_(),
    "uniform_": lambda w: w.uniform_(-1, 1),
    "exponential_": lambda w: w.exponential_(),
    "bernoulli_": lambda w: w.bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda w: w.bernoulli_(torch.full_like(w, 0.5)),
    "geometric_": lambda w: w.geometric_(0.5),
    "cauchy_": lambda w: w.cauchy_(),
    "log_normal_": lambda w: w.log_normal_(),
    "random_": lambda w: w.random_(5),
    "init.trunc_normal_": lambda w: nn.init.trunc_normal_(w),
    "init.kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w),
    "init.orthogonal_": lambda w: nn.init.orthogonal_(w),
    "a column": lambda w: w[:, 0].normal_(),
    "randn_like": lambda w: torch.randn_like(w),
    "rand_like": lambda w: torch.rand_like(w),
    "randint_like": lambda w: torch.randint_like(w, 3),
    "normal": lambda w: torch.normal(w, 0.1),
    "multinomial": lambda w: torch.multinomial(w, 1),
}
PLACED |= DRAWN
ALLOWED = {  # as in one process
    "w[:, 0] = 1": lambda w: w.__setitem__((slice(None), 0), 1.0),
    "w[...] = 1": lambda w: w.__setitem__(..., 1.0),
    "masked_fill_ by itself": lambda w: w.masked_fill_(w > 0, 1.0),
    "of a row": lambda w: w.add_(w[0].clone()),
    "of a mean": lambda w: w.sub_(w.mean(0)),
    "of norms of rows": lambda w: w.div_(w.norm(dim=1, keepdim=True)),
    "a copy of a row": lambda w: w[0].clone().zero_(),
    "rows by an index": lambda w: w.index_select(0, index(0)).zero_(),
}


def build(shape):
    torch.manual_seed(0)
    return nn.Linear(shape[1], shape[0], bias=False).double()


def trained(shape, world):
    """A model after a step, and its optimizer, whose gradients are left."""
    model = sw.parallelize(build(shape), world, sharding=sw.Sharding(min_unit_bytes=0))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    with sw.window(model, [{"x": x}], count=lambda b: len(b["x"])) as w:
        for each in w:
            (model(each["x"]).square().sum() / w.num_tokens).backward()
    optim.step()
    return model, optim


def cases_of(target):
    views, few = CUT | KEPT | EITHER, target != "w"
    for view in views:
        for write in FEW if few else WRITES:
            yield f"{view} | {write}", lambda w, v=views[view], put=WRITES[write]: put(v(w))
    yield from [(name, call) for name, call in (PLACED | ALLOWED).items() if not few]


def tried(layout, shares=1):
    """What becomes of each write: (shape, target, write) -> right, wrong, or the error. Of several ``shares`` of the writes each
    shape has another."""
    found = {}
    with sw.init(layout, device="cpu", timeout_s=60) as world, torch.no_grad():
        for turn, shape in enumerate(SHAPES):
            with torch.enable_grad():
                model, optim = trained(shape, world)
            w = model.weight
            targets = {"w": w, "data": w.data, "detach": w.detach(), "grad": w.grad, "state": optim.state[w]["exp_avg"]}
            for target, tensor in targets.items():
                own, whole = local_tensor(tensor).clone(), sw.full_tensor(tensor)
                for name, call in itertools.islice(cases_of(target), turn % shares, None, shares):
                    wanted = whole.clone()
                    try:
                        call(wanted)
                    except RuntimeError:
                        continue  # one process refuses it too
                    try:
                        call(tensor)
                        found[shape, target, name] = (
                            "right" if torch.allclose(sw.full_tensor(tensor), wanted, 1e-12) else "wrong"
                        )
                    except sw.ShardwiseError as error:
                        same = sw.full_tensor(tensor).equal(whole) and isinstance(error, sw.UsageError)
                        found[shape, target, name] = str(error) if same else "half written"
                    except Exception as error:
                        found[shape, target, name] = f"raw: {error!r}"
                    local_tensor(tensor).copy_(own)
    return found


@pytest.mark.quick("a third-dp_shard=2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shares", [pytest.param(1, id="all"), pytest.param(len(SHAPES), id="a third")])
def test_no_write_is_lost(ranks, layout, shares):
    first, *others = ranks.run(tried, LAYOUTS[layout], layout, shares, timeout_s=240)
    assert len(first) > 1500 // shares
    for (shape, target, name), became in first.items():
        view = name.split(" | ")[0]
        assert all((each[shape, target, name] == "right") == (became == "right") for each in others), (
            shape,
            target,
            name,
        )
        assert became == "right" or "  fix: " in became, (shape, target, name, became)
        if (view in KEPT and "of a part" not in name) or name in ALLOWED:
            # Of one row torch 2.14 gathers what it transposes: refused then, which the assertion above has seen.
            assert became == "right" or shape[0] == 1, (shape, target, name, became)
        elif view in CUT or name in PLACED:
            # The first row of one row is the whole: a view along it may leave nothing to gather.
            assert became != "right" or shape[0] == 1, (shape, target, name)
        if target in ("w", "data", "detach", "grad") and became != "right":
            assert became.startswith("weight: "), became


OF_ITSELF = {  # one process refuses them too, as memory is read that is written
    "add_": lambda w: w.add_(w[0]),
    "mul_": lambda w: w.mul_(w[-1]),
    "addcmul_": lambda w: w.addcmul_(w[0], w[1]),
    "out=": lambda w: torch.add(w, w[0], out=w),
    "data": lambda w: w.data.add_(w.detach()[0]),
    "+=": lambda w: w.__iadd__(w[0]),
    "two views": lambda w: w[:, :2].add_(w[0, 2:]),
    "_foreach_add_": lambda w: torch._foreach_add_([w], [w[0]]),
}


def of_itself():
    """What is said of each, and whether it is said before anything is written; of draws into what is no parameter too."""
    found = {}
    with sw.init("dp_shard=2", device="cpu", timeout_s=60) as world, torch.no_grad():
        with torch.enable_grad():
            model, optim = trained((3, 4), world)
        w, whole = model.weight, sw.full_tensor(model.weight)
        for name, act in OF_ITSELF.items():
            try:
                act(w)
                found[name] = "nothing"
            except sw.UsageError as error:
                found[name] = str(error) if sw.full_tensor(w).equal(whole) else "half written"
        drawn = []
        for draw in (
            lambda: torch.zeros_like(w).normal_(),
            lambda: optim.state[w]["exp_avg"].normal_(),
            lambda: torch.bernoulli(w.sigmoid()),
            lambda: nn.functional.dropout(w, 0.5),
        ):
            try:
                drawn.append(f"drawn: {draw()}")
            except sw.UsageError as error:
                drawn.append(str(error))
    return found, drawn


def test_a_write_of_what_is_read_from_its_own_rows_is_refused_before_it_is_done(ranks):
    for found, drawn in ranks.run(of_itself, 2):
        assert all("each rank would draw for its part alone" in said and "sw.shard_like" in said for said in drawn), (
            drawn
        )
        for name, said in found.items():
            assert said.startswith("weight: ") and "w[0].clone()" in said, (name, said)


def mended(layout):
    """The fixes of the errors, carried out: what each leaves, less what one process has."""
    found = {}
    with sw.init(layout, device="cpu", timeout_s=60) as world, torch.no_grad():
        for shape in SHAPES:
            with torch.enable_grad():
                model, optim = trained(shape, world)
            for what in ("parameter", "gradient", "state"):
                param = model.weight
                w = {"parameter": param, "gradient": param.grad, "state": optim.state[param]["exp_avg"]}[what]
                wanted = sw.full_tensor(w).clone()
                wanted[0].zero_()
                whole = sw.full_tensor(w)
                whole[0].zero_()
                w.copy_(sw.shard_like(whole, w))
                found[shape, what, "whole"] = sw.full_tensor(w).equal(wanted)
                keep = torch.ones(shape, dtype=w.dtype)
                keep[-1] = 0
                wanted[-1].zero_()
                w.mul_(sw.shard_like(keep, w))
                found[shape, what, "mask"] = sw.full_tensor(w).equal(wanted)
            before = param.detach().clone()
            param.copy_(param * 0.9)
            found[shape, "data"] = sw.full_tensor(param).equal(sw.full_tensor(before) * 0.9)
            found[shape, "view"] = sw.full_tensor(param).unbind()[0].shape == (4,)
    return found


@pytest.mark.quick("dp_replicate=2,dp_shard=2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fixes_do_what_they_say(ranks, layout):
    for found in ranks.run(mended, LAYOUTS[layout], layout):
        assert len(found) == 24 and all(found.values()), found


def read(layout):
    with sw.init(layout, device="cpu", timeout_s=60) as world:
        model, _ = trained((5, 4), world)
        w = model.weight
        whole = sw.full_tensor(w.detach())
        row = w[0]
        with io.BytesIO() as file:
            torch.save(row.detach(), file)
        with sw.window(model, [{"x": w}], count=len) as window:
            for _ in window:
                pass
            sw.parameter_penalty(model, (w[1].square().sum() + row.sum()).full_tensor())
        copied = w.detach()[1].clone()
        pairs = [
            (row.norm().full_tensor(), whole[0].norm()),
            (w[:2].mean().full_tensor(), whole[:2].mean()),
            (w.detach()[2].add(1).full_tensor(), whole[2] + 1),
            (torch.stack([w[0], w[3]]).full_tensor(), whole[[0, 3]]),
            (sw.full_tensor(w.t()[:, 1]), whole[1]),
            (torch.tensor(w[0, 0].item()), whole[0, 0]),
            (copied.mul_(2).full_tensor(), whole[1] * 2),
            (w.detach()[1].requires_grad_().full_tensor(), whole[1]),
        ]
        return [bool(torch.allclose(a.detach().double(), b)) for a, b in pairs], repr(row)[:7]


def test_rows_are_read_as_before(ranks):
    for right, text in ranks.run(read, 2, "dp_shard=2"):
        assert all(right) and text == "DTensor", right


class Padded(nn.Module):
    """Clears a row of its embedding: in its constructor, where it is whole, and ``where`` it is a shard."""

    def __init__(self, where: str = ""):
        super().__init__()
        self.embed, self.where = nn.Embedding(6, 4, padding_idx=0), where
        nn.init.zeros_(self.embed.weight[1])

    def forward(self, x):
        return self.embed(x)

    def clear(self, where):
        if where == self.where:
            with torch.no_grad():
                self.embed.weight[0].zero_()

    def pre_optimizer_step(self):
        self.clear("before")

    def post_optimizer_step(self):
        self.clear("after")


def cleared(where):
    with sw.init("dp_shard=2", device="cpu", timeout_s=60) as world:
        model = sw.parallelize(lambda: Padded(where), world, sharding=sw.Sharding(min_unit_bytes=0))
        rows = sw.full_tensor(model.embed.weight.detach())[:2].abs().sum().item()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        if where == "hook":
            optim.register_step_post_hook(lambda *_: model.embed.weight.data[0].zero_())
        step = sw.TrainStep(model, optim, loss=lambda y, b: y.sum(), forward=lambda m, b: m(b["x"]), count=lambda b: 4)
        try:
            if where == "reset":
                model.embed.reset_parameters()
            step([{"x": torch.tensor([0, 1, 2, 3])}])
        except sw.UsageError as error:
            return rows, str(error)
        return rows, ""


@pytest.mark.parametrize("where", ["before", "after", "hook", "reset"])
def test_wherever_it_is_written(ranks, where):
    for rows, error in ranks.run(cleared, 2, where):
        fix = "generator=g" if where == "reset" else "sw.full_tensor(w)"  # it draws before it clears the row
        assert rows == 0.0 and "embed.weight: " in error and fix in error, error


def reduced_into():
    """What is said of reductions that write into a parameter by out=, and of one written in place before it is brought together."""
    with sw.init("dp_shard=2", device="cpu", timeout_s=30) as world:
        model = sw.parallelize(nn.Linear(6, 6), world)
        w, b, said = model.weight, model.bias, []
        with torch.no_grad():
            mean = w.mean(0).full_tensor()
            for act in (
                lambda: torch.mean(w, 0, out=b),
                lambda: torch.sum(w, 1, out=b),
                lambda: w.mean().clamp_(0.1),
            ):
                try:
                    act()
                except sw.UsageError as error:
                    said.append(str(error))
            b.copy_(w.mean(0))
        return said, (sw.full_tensor(b) - mean).abs().max().item(), sw.full_tensor(w.mean().clamp(0.1)).item()


def test_reductions_do_not_write_into_a_parameter(ranks):
    for said, off, mean in ranks.run(reduced_into, 2):
        assert [text.partition("(")[0] for text in said] == ["bias: mean", "bias: sum", "clamp_"]
        assert off < 1e-6 and mean == pytest.approx(0.1)


def of_other_tensors():
    """What is not a write into what Shardwise has cut stays as torch does it."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    with sw.init("dp_shard=2", device="cpu", timeout_s=30) as world:
        sw.parallelize(nn.Linear(4, 4), world)
        other = init_device_mesh("cpu", (2,))
        w = DTensor.from_local(torch.ones(2, 4), world.mesh, [Shard(0), *[Replicate()] * (world.mesh.ndim - 1)])
        row = DTensor.from_local(torch.ones(2, 4), other, [Shard(0)])
        part = DTensor.from_local(torch.ones(2, 4), other, [Partial()])
        plain, three = torch.zeros(3), distribute_tensor(torch.tensor(3.0), other, [Replicate()])
        said = []
        for act in (
            lambda: w.view(3, 7),
            lambda: w.copy_(torch.ones(3, 3)),
            lambda: part.fill_(torch.tensor(3.0)),
            lambda: plain.fill_(three),
        ):
            try:
                act()
            except Exception as error:
                said.append(type(error).__name__)
        compiled = torch.compile(lambda x: x[:, 0] * 2, backend="aot_eager")
        return said, compiled(row).shape, row[0].zero_().sum().item()


def test_what_is_no_such_write_is_as_torch_does_it(ranks):
    for said, shape, row in ranks.run(of_other_tensors, 2):
        assert "UsageError" not in said and "AttributeError" not in said
        assert shape == (4,) and row == 0
