"""Parameters of several dtypes in one unit: each stored, computed and reduced as the model has it, whatever the layout.

Weights and inputs are small whole numbers, so that every sum is exact in bf16 too and numbers can be compared bit by bit.
"""

from typing import TypeVar

import pytest
import torch
from layouts import every_layout
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel import recipe_of, runtime_of
from shardwise.recipe import dtype_groups
from shardwise.verify.sharded import CountCollectives, share_of

DTYPES = {"base": torch.bfloat16, "low": torch.float32, "wide": torch.float64, "short": torch.bfloat16}


class Medley(nn.Module):
    """Four linears, each in a dtype of its own, ``base`` frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4, dtype=dtype) for name, dtype in DTYPES.items()})
        self.parts["base"].requires_grad_(False)
        self.saw: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        for name, part in self.parts.items():
            self.saw[name] = part.weight.dtype
            x = nn.functional.hardtanh(part(x.to(DTYPES[name])))
        return x.to(torch.float64)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Medley() for _ in range(3)])
        self.head = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


M = TypeVar("M", bound=nn.Module)


def of_small_integers(cls: type[M]) -> M:
    """A module whose sums are exact in every dtype."""
    torch.manual_seed(1)
    model = cls()
    for param in model.parameters():
        param.data = torch.randint(-1, 2, param.shape).to(param.dtype)
    return model


def build() -> Tower:
    return of_small_integers(Tower)


def windows() -> list[list[dict[str, Tensor]]]:
    torch.manual_seed(2)
    return [
        [{"x": torch.randint(-1, 2, (3, 4)).double(), "target": torch.randint(-1, 2, (3, 4))} for _ in range(4)]
        for _ in range(2)
    ]


def plain() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One process, plain torch: gradients of the first window, and parameters after two steps."""
    model = build()
    optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.25)
    grads: dict[str, Tensor] = {}
    for batches in windows():
        for batch in batches:
            (model(batch["x"]) * batch["target"]).sum().div(4).backward()
        grads = grads or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optim.step()
        optim.zero_grad()
    return grads, {name: p.detach() for name, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def trained(layout: str, how: dict) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        sharding = sw.Sharding(**how) if "shard" not in layout else sw.Sharding(min_unit_bytes=0, **how)
        model = sw.parallelize(build(), world, sharding=sharding)
        optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.25)
        step = sw.TrainStep(model, optim, loss=lambda out, b: (out * b["target"]).sum(), count=lambda b: 1)
        grads: dict[str, Tensor] = {}
        handle = optim.register_step_pre_hook(lambda *_: grads.update(gradients(model)) if not grads else None)
        for batches in windows():
            with CountCollectives() as counter:
                step(share_of(batches, world))
        handle.remove()
        recipe = recipe_of(model)
        groups = [len(dtype_groups(recipe.params, unit.name)) for unit in recipe.units]
        values = {name: whole(param) for name, param in runtime_of(model).parameters.items()}
        return grads, values, model.blocks[1].saw, groups, counter.counts


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = runtime_of(model).parameters.items()
    return {name: whole(param.grad) for name, param in found if param.grad is not None}


@every_layout("one-fsdp2", "ddp-2", "fsdp-2", "hsdp-2x2", soak=("hsdp-2x2",))
def test_each_parameter_keeps_its_dtype_and_its_numbers(ranks, layout):
    grads, params = plain()
    for found, values, saw, groups, counts in ranks.run(
        trained, layout.num_ranks, layout.text, {"engine": layout.engine}
    ):
        assert saw == DTYPES
        assert found.keys() == grads.keys() and values.keys() == params.keys()
        for name, grad in grads.items():
            assert found[name].dtype == grad.dtype and torch.equal(found[name], grad), name
        for name, param in params.items():
            assert values[name].dtype == param.dtype and torch.equal(values[name], param), name
        if layout.text == "dp_shard=2":  # frozen bf16 beside bf16, so three groups in a block: a reduction each
            assert groups == [3, 3, 3, 1] and counts["_reduce_scatter_base"] == 10
    assert any(
        not torch.equal(param, before) for param, before in zip(params.values(), build().parameters(), strict=True)
    )


class Sometimes(nn.Module):
    """``extra`` is used where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, uses: Tensor) -> Tensor:
        y = self.first(x)
        return self.extra(y) if uses else y


def build_sometimes() -> Sometimes:
    return of_small_integers(Sometimes)


def batch_of(index: int, uses: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {"x": torch.randint(-1, 2, (3, 4), generator=generator).float(), "uses": torch.tensor(uses)}


def sometimes_used(uses: list[list[bool]]) -> dict[str, Tensor | None]:
    with sw.init(f"dp_shard={len(uses)}", device="cpu", timeout_s=20) as world:
        model = sw.parallelize(build_sometimes(), world, precision="bf16", sharding=sw.Sharding(engine="fsdp2"))
        given = [batch_of(2 * world.rank + i, used) for i, used in enumerate(uses[world.rank])]
        with sw.window(model, given, count=lambda _b: 1) as w:
            for each in w:
                model(**each).float().sum().backward()
        grads = {name: param.grad for name, param in model.named_parameters()}
        return {name: None if grad is None else grad.full_tensor() for name, grad in grads.items()}


@pytest.mark.parametrize(
    "uses",
    [
        [[False, False]],
        [[False, True]],
        [[True, False], [True, False]],
        [[True, False], [False, True]],
        [[True, True], [False, False]],
    ],
)
def test_bf16_and_a_parameter_that_only_some_micro_batches_use(ranks, uses):
    """FSDP2 keeps gradients of earlier micro-batches in fp32, and refused to reduce others beside them."""
    plain = build_sometimes()
    for rank, pattern in enumerate(uses):
        for i, used in enumerate(pattern):
            plain(**batch_of(2 * rank + i, used)).sum().backward()
    for found in ranks.run(sometimes_used, len(uses), uses):
        for name, param in plain.named_parameters():
            assert (param.grad is None) == (found[name] is None), name
            assert param.grad is None or torch.equal(found[name], param.grad), name
