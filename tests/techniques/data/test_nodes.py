"""``dp_shard=node``, and FSDP1's hybrid strategies: shards lie within a node, copies across nodes, as the launcher says it."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from models.towers import TwoTowers
from torch.distributed.fsdp import ShardingStrategy

import shardwise as sw


def hybrid(strategy: ShardingStrategy):
    """A user's script on 4 ranks, started as two nodes of two are."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2), "GROUP_WORLD_SIZE": "2"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meant = sw.from_fsdp1(strategy, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls="Linear")
    with sw.init(meant.layout, device="cpu", timeout_s=30, seed=3) as world:
        torch.manual_seed(0)
        model = sw.parallelize(TwoTowers().double(), world, **meant.options())
        with sw.window(model, [{"x": torch.full((2, 4), 1.0 + rank, dtype=torch.float64)}], count=len) as w:
            for batch in w:
                model(batch["x"]).pow(2).sum().backward()
        used = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        grads = {name: grad.full_tensor() for name, grad in used.items()}
        reshard = {unit.reshard for unit in sw.recipe_of(model).units if unit.name}
        held = sum(param.to_local().numel() for param in model.parameters()) / sum(
            p.numel() for p in model.parameters()
        )
        return str(world.layout), world.axis("dp_shard").ranks, reshard, held, grads


@pytest.mark.parametrize(
    ("strategy", "reshard"), [(ShardingStrategy.HYBRID_SHARD, True), (ShardingStrategy._HYBRID_SHARD_ZERO2, False)]
)
def test_a_hybrid_strategy_on_two_nodes_has_the_gradients_of_one_process(ranks, strategy, reshard):
    torch.manual_seed(0)
    plain = TwoTowers().double()
    for rank in range(4):
        plain(torch.full((2, 4), 1.0 + rank, dtype=torch.float64)).pow(2).sum().backward()
    for rank, (layout, node, freed, held, grads) in enumerate(ranks.run(hybrid, 4, strategy)):
        assert (layout, node, freed) == ("dp_replicate=2,dp_shard=2", (rank // 2 * 2, rank // 2 * 2 + 1), {reshard})
        assert held == pytest.approx(0.5, abs=0.1)
        used = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
        assert set(grads) == set(used) and len(used) == 4
        for name, grad in used.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-14)


def imagined(environ: dict[str, str], size: int) -> str:
    """What becomes of a layout of many ranks that one process imagines."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ |= environ
    dist.init_process_group("fake", store=dist.HashStore(), rank=9, world_size=size)
    try:
        with sw.init("dp_replicate=-1,dp_shard=node", device="cpu") as world:
            return str(world.layout)
    except sw.LayoutError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("environ", "size", "told"),
    [
        ({}, 64, "give the number: dp_shard=8"),
        (
            {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
            64,
            "no LOCAL_WORLD_SIZE for this group",
        ),  # it is of the real rank
        ({"LOCAL_WORLD_SIZE": "8"}, 64, "dp_replicate=8,dp_shard=8"),
        ({"LOCAL_WORLD_SIZE": "8"}, 60, "8 does not divide 60"),
    ],
)
def test_imagined_ranks_are_on_no_node_unless_the_environment_says_so(ranks, environ, size, told):
    assert told in ranks.run(imagined, 1, environ, size)[0]
