"""Models whose forward takes more than tensors, and models that compute gradients themselves, under ``tp=2`` and in one process."""

import torch
from step.plain import mine
from torch import nn
from torch.nn import functional

import shardwise as sw


class Graph(nn.Module):
    """Nodes of several graphs, whose number is a number."""

    def __init__(self):
        super().__init__()
        self.enter, self.up, self.down, self.out = nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, x, edges, batch, num):
        h = self.enter(x)
        h = h + torch.zeros_like(h).index_add(0, edges[1], self.down(torch.tanh(self.up(h[edges[0]]))))
        return self.out(h.new_zeros(num, 8).index_add(0, batch, h))


class Containers(nn.Module):
    """Tensors in containers, beside None, a text and a number."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(4, 16), nn.Linear(16, 4), nn.Parameter(torch.ones(()))

    def forward(self, *, inp, objects, mode="sum"):
        x, nothing = inp["t"]
        assert nothing is None and mode == "sum" and objects[1] == 2
        return self.down(torch.tanh(self.up(x + objects[0]))) * self.scale * objects[1]


class Implicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, u, z):
        ctx.save_for_backward(w, z)
        return z.clone()

    @staticmethod
    def backward(ctx, given):
        w, z = ctx.saved_tensors
        v = given
        for _ in range(60):
            v = given + (v * (1 - z * z)) @ w
        inner = v * (1 - z * z)
        return inner.T @ z, inner, None


class Equilibrium(nn.Module):
    """A fixed point, whose gradient a function computes from the weight itself; the layers beside it can be cut."""

    def __init__(self):
        super().__init__()
        self.enter, self.w, self.up, self.down = (
            nn.Linear(4, 8),
            nn.Parameter(torch.randn(8, 8) * 0.1),
            nn.Linear(8, 16),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        u = self.enter(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(60):
                z = torch.tanh(z @ self.w.T + u)
        return self.down(torch.tanh(self.up(Implicit.apply(self.w, u, z))))


def graph(turn):
    at = torch.Generator().manual_seed(turn)
    edges = torch.randint(6, (2, 9), generator=at)
    return {
        "x": torch.randn(6, 4, generator=at).double(),
        "edges": edges,
        "batch": torch.tensor([0, 0, 0, 1, 1, 1]),
        "num": 2,
    }


def containers(turn):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(turn)).double()
    return {"inp": {"t": [x, None]}, "objects": (x[:1] * 0.5, 2), "mode": "sum"}


def rows(turn):
    return {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(turn)).double()}


CASES = {"graph": (Graph, graph), "containers": (Containers, containers), "equilibrium": (Equilibrium, rows)}


def build(name):
    torch.manual_seed(0)
    return CASES[name][0]().double()


def gradients(name, layout=None):
    """The gradients of two micro-batches; and the parameters that are cut."""
    batches = [CASES[name][1](turn) for turn in range(2)]
    if layout is None:
        model = build(name)
        sum(model(**batch).square().sum() / 2 for batch in batches).backward()
        return {key: p.grad for key, p in model.named_parameters()}
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = sw.parallelize(build(name), world, example=batches[0])
        with sw.window(model, mine(batches, world), count=lambda _: 1) as w:
            for batch in w:
                (model(**batch).square().sum() / w.num_tokens).backward()
        cut = {key for key, param in sw.recipe_of(model).params.items() if param.cuts}
        return {key: sw.full_tensor(p.grad) for key, p in model.named_parameters()}, cut


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, ids):
        return self.down(functional.relu(self.up(self.table(ids))))


def refused():
    """What is said before anything is run: of sparse gradients, of a module that another model has."""
    with sw.init("tp=2", device="cpu", timeout_s=30) as world:
        said, trunk = [], nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        sw.parallelize(nn.Sequential(trunk, nn.Linear(4, 4)), world, example={"input": torch.ones(4, 4)})
        for model, example in (
            (Bag(), {"ids": torch.arange(8).view(4, 2)}),
            (nn.Sequential(trunk, nn.Linear(4, 2)), {"input": torch.ones(4, 4)}),
        ):
            try:
                sw.parallelize(model, world, example=example)
            except sw.ShardwiseError as error:
                said.append(str(error))
        return said
