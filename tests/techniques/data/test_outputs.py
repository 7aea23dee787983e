"""Whatever a forward returns, and wherever the loss is taken from, the gradients are those of one process."""

import pytest
import torch
import torch.nn.functional as F
from techniques.data.outputs import OF_MODELS, WRAP, batch, build, logits_of
from torch import Tensor, nn

from shardwise import Sharding
from shardwise.errors import ShardwiseError
from shardwise.parallel import parallelize, recipe_of, runtime_of
from shardwise.step.step import TrainStep
from shardwise.step.window import window
from shardwise.world import init

SHARDED = {
    "one unit": ("dp_shard=2", 2, {}),
    "many units": ("dp_shard=2", 2, {"min_unit_bytes": 0}),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4, {"min_unit_bytes": 0}),
    "replicas": ("dp_replicate=2", 2, {}),
    "one rank": ("dp_shard=1", 1, {"engine": "fsdp2"}),
}


def loss_of(model: nn.Module, out, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits_of(model, out).float(), given["labels"], reduction="sum")


def exact_loss_of(model: nn.Module, out, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits_of(model, out), given["labels"], reduction="sum")


def one_process(kind: str, of_blocks: str, num: int) -> dict[str, Tensor]:
    plain = build(kind, of_blocks)
    batches = [batch(i) for i in range(num)]
    count = sum(int((b["labels"] != -100).sum()) for b in batches)
    for given in batches:
        (exact_loss_of(plain, plain(given["x"]), given) / count).backward()
    return {name: param.grad for name, param in plain.named_parameters()}


def trained(where: str, cells: list[tuple[str, str, str, int]], precision: str | None, remat: str | None = None):
    """(kind, kind of the blocks, loop, micro-batches) -> whole gradients, or the name and module of an error of ours; and the
    number of units."""
    layout, _, sharding = SHARDED[where]
    dtype = torch.float32 if precision else torch.float64
    options = {"precision": precision, "sharding": Sharding(**sharding), "remat": remat}
    found = {}
    with init(layout, device="cpu", timeout_s=30) as world:
        for kind, of_blocks, loop, num in cells:
            model = parallelize(build(kind, of_blocks, dtype), world, **options)
            mine = [batch(i, dtype) for i in range(world.rank, num * world.size, world.size)]
            try:
                found[kind, of_blocks, loop, num] = _gradients(model, mine, loop, precision)
            except ShardwiseError as error:
                found[kind, of_blocks, loop, num] = type(error).__name__, error.name
        return found, len(recipe_of(model).units)


def _gradients(model: nn.Module, mine: list, loop: str, precision: str | None) -> dict[str, Tensor]:
    loss = loss_of if precision else exact_loss_of
    whole: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        for name, param in runtime_of(model).parameters.items():
            grad = param.grad
            whole[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()

    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.register_step_pre_hook(keep)
    if loop == "step":
        TrainStep(model, optim, loss=lambda out, b: loss(model, out, b), forward=lambda m, b: m(b["x"]))(mine)
        return whole
    with window(model, mine) as w:
        for given in w:
            (loss(model, model(given["x"]), given) / w.num_tokens).backward()
    optim.step()
    return whole


def check(found: dict, size: int, precision: str | None, refused: tuple[str, ...] = ()) -> None:
    """Equal to one process, to 1e-12; in bf16, to the bit, to the same model when it returns a tensor."""
    for (kind, of_blocks, loop, num), grads in found.items():
        if of_blocks in refused:
            assert grads == ("UnsupportedError", "blocks.2"), grads
            continue
        assert isinstance(grads, dict), (kind, of_blocks, loop, num, grads)
        if precision is None:
            for name, want in one_process(kind, of_blocks, num * size).items():
                torch.testing.assert_close(grads[name], want, rtol=1e-12, atol=1e-14)
            continue
        for name, want in found["tensor", "tensor", loop, num].items():
            if kind == "Categorical":  # it normalises what it is given, which rounds
                assert 0 < (grads[name] - want).norm() / want.norm() < 0.02 or name.startswith("inp"), name
            else:
                assert torch.equal(grads[name], want), (kind, of_blocks, loop, num, name)


LOOPS = [("step", 1), ("window", 3)]
SOME = [("tensor", "tensor"), ("Categorical", "tensor"), ("attribute", "tensor"), ("closure", "plain object")]
KINDS = [(kind, "tensor") for kind in OF_MODELS]
BLOCKS = [
    ("tensor", "tensor"),
    *(("tensor", kind) for kind in WRAP),
    ("closure", "closure"),
    ("generator", "plain object"),
]
SAMPLE = {("one unit", None): KINDS, ("one rank", "bf16"): KINDS, ("replicas", None): SOME, ("hsdp", None): SOME}


def cells(kinds: list[tuple[str, str]], loops: list[tuple[str, int]]) -> list[tuple[str, str, str, int]]:
    return [(*kind, *loop) for kind in kinds for loop in loops]


@pytest.mark.quick("one rank-bf16", "replicas-None")
@pytest.mark.parametrize(("where", "precision"), list(SAMPLE))
def test_a_models_output(ranks, where, precision):
    """A distribution, a closure, features caught by a hook: FSDP2 looks into outputs for what to wait for, and did not train
    the model: a constant loss, a gradient norm of 0, no error."""
    size = SHARDED[where][1]
    for found, units in ranks.run(
        trained, size, where, cells(SAMPLE[where, precision], LOOPS), precision, timeout_s=120
    ):
        assert units == (4 if "min_unit_bytes" in SHARDED[where][2] else 1)
        check(found, size, precision)


@pytest.mark.soak
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("where", list(SHARDED))
def test_every_output_in_every_loop(ranks, where, precision):
    size, loops = SHARDED[where][1], [(loop, num) for loop in ("step", "window") for num in (1, 3)]
    for found, _ in ranks.run(trained, size, where, cells(KINDS, loops), precision, timeout_s=600):
        check(found, size, precision)


@pytest.mark.quick("many units-full")
@pytest.mark.parametrize(
    ("where", "remat"),
    [("many units", None), ("many units", "full"), pytest.param("hsdp", None, marks=pytest.mark.soak)],
)
def test_a_blocks_output(ranks, where, remat):
    """A block that is a unit is freed after it has run, and gathered when a gradient comes to what it returned. What is
    returned by a generator can be looked at once, and is not what a block that runs again could be compared by."""
    size, refused = SHARDED[where][1], ("generator",) if remat else ()
    for found, _ in ranks.run(trained, size, where, cells(BLOCKS, LOOPS[1:]), None, remat, timeout_s=120):
        check(found, size, None, refused)
