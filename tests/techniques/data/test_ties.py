"""Modules and weights that stand under several names: one tensor stays one tensor, and its gradient is one process's."""

import functools

import pytest
import torch
import torch.nn.functional as F
from models.shared_layer import Block
from torch import Tensor, nn

from shardwise import Sharding
from shardwise.parallel import parallelize, recipe_of
from shardwise.state import full_state_dict
from shardwise.step.window import window
from shardwise.world import World, init

IDS = 7
COUNTS = (5, 2, 3, 4)  # tokens of each rank: unequal


class Decoder(nn.Module):
    """A tied head and a list of blocks: what the others below put further names on."""

    def __init__(self, dim: int = 4):
        super().__init__()
        self.embed = nn.Embedding(IDS, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(3)])
        self.head = nn.Linear(dim, IDS)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OneAlias(Decoder):
    def __init__(self):
        super().__init__()
        self.alias = self.embed


class ThreeNames(Decoder):
    def __init__(self):
        super().__init__()
        self.alias, self.again = self.embed, self.embed
        self.tail = self.head

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.tail(self.again(ids))


class AliasFirst(Decoder):
    """The other name, and the other owner of the weight, are registered before the module they were made as."""

    def __init__(self):
        super().__init__()
        head, embed = self.head, self.embed
        del self.embed, self.head
        self.alias, self.head, self.embed = embed, head, embed


class AliasOfABlock(Decoder):
    def __init__(self):
        super().__init__()
        self.last = self.blocks[2]

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.head(self.last(self.embed(ids)))


class BlockTwiceInAList(Decoder):
    """As ALBERT shares its layers; and a weight is tied across two others."""

    def __init__(self):
        super().__init__()
        self.blocks.append(self.blocks[0])
        self.blocks[2].out.weight = self.blocks[1].out.weight


class AliasOfAContainer(Decoder):
    def __init__(self):
        super().__init__()
        self.layers = self.blocks
        self.stack = nn.ModuleDict({"layers": self.layers, "embed": self.embed})


class TiedBias(Decoder):
    """As BERT's heads have it: a bias of the parent that is the decoder's too."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(IDS))
        self.head.bias = self.bias
        self.blocks[1].out.bias = self.blocks[0].inner.bias
        self.alias = self.head


class TiedBuffer(Decoder):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.embed.register_buffer("scale", self.scale)
        self.kept = [self.scale, self.embed.weight]
        self.alias = self.embed

    def forward(self, ids: Tensor) -> Tensor:
        assert self.kept[0] is self.scale and self.embed.scale is self.scale
        return super().forward(ids) + (self.embed(ids) * self.scale).sum(-1, keepdim=True)


MODELS = (OneAlias, ThreeNames, AliasFirst, AliasOfABlock, BlockTwiceInAList, AliasOfAContainer, TiedBias, TiedBuffer)


def build(kind: type[nn.Module]) -> nn.Module:
    """In double from the start: ``.double()`` afterwards would untie buffers."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        return kind()
    finally:
        torch.set_default_dtype(torch.float32)


def batch(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, IDS, (1, 5), generator=generator)
    labels = torch.randint(0, IDS, (1, 5), generator=generator)
    labels[:, COUNTS[rank] :] = -100
    return {"ids": ids, "labels": labels}


def loss_of(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(given["ids"]).flatten(0, 1), given["labels"].flatten(), reduction="sum")


def names_of(module: nn.Module) -> list[set[str]]:
    """Which names are one parameter."""
    found: dict[int, set[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), set()).add(name)
    return list(found.values())


def one_process(kind: type[nn.Module], num_ranks: int) -> dict[str, Tensor | None]:
    model = build(kind)
    for rank in range(num_ranks):
        (loss_of(model, batch(rank)) / sum(COUNTS[:num_ranks])).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def gradients(world: World, model: nn.Module) -> dict[str, Tensor | None]:
    with window(model, [batch(world.rank)]) as w:
        for given in w:
            (loss_of(model, given) / w.num_tokens).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def aliased(layout: str, sharding: Sharding | None, way: str) -> dict:
    """Every model: which names are one parameter afterwards, its units, its gradients, its state dict."""
    found = {}
    with init(layout, device="cpu", timeout_s=20) as world:
        for kind in MODELS:
            given = build(kind) if way == "module" else functools.partial(build, kind)
            model = parallelize(given, world, sharding=sharding, init=None if way == "module" else way)
            ties, state = names_of(model), full_state_dict(model)
            grads = gradients(world, model)
            found[kind.__name__] = (ties, len(recipe_of(model).units), grads, state)
    return found


BLOCKS = Sharding(min_unit_bytes=0)
LAYOUTS = {
    "one unit": (2, "dp_shard=2", None, "module"),
    "many units": (2, "dp_shard=2", BLOCKS, "module"),
    "replicas": (2, "dp_replicate=2", None, "module"),
    "both": (4, "dp_replicate=2,dp_shard=2", BLOCKS, "module"),
    "a callable's from rank 0": (2, "dp_shard=2", BLOCKS, "rank0"),
}


@pytest.mark.quick("replicas", "a callable's from rank 0")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_under_two_names_beside_a_tied_weight(ranks, layout):
    """A module was refused ("ties differ"); a callable's values from rank 0 ended in a KeyError."""
    num_ranks, text, sharding, way = LAYOUTS[layout]
    answers = ranks.run(aliased, num_ranks, text, sharding, way, timeout_s=60)
    for kind in MODELS:
        want, plain = one_process(kind, num_ranks), build(kind)
        for rank, found in enumerate(answers):
            ties, num_units, grads, state = found[kind.__name__]
            assert ties == names_of(plain), kind
            if sharding is BLOCKS and kind is not AliasOfAContainer:  # of which the root holds all blocks
                assert num_units > 1, kind
            assert grads.keys() == want.keys()
            for name, grad in want.items():
                torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-14, msg=f"{kind.__name__} {name}")
            assert state.keys() == (plain.state_dict().keys() if rank == 0 else set()), kind
            assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items()), kind
