"""Worlds of real ranks: axes, talking, agreement, start-up, the end; each environment is fed to it."""

import importlib
import json
import os
import time

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.errors import ConfigError, LayoutError, RankError, UsageError
from shardwise.world.collectively import collectively
from shardwise.world.init import _OTHER_WORDS, World

# ---- environments -------------------------------------------------------------------------------------------------


def _alone():
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    with sw.init() as world:
        total = torch.ones(2)
        dist.all_reduce(total)
        found = (world.size, world.is_main, dist.get_world_size(), str(world.layout), total.tolist(), str(world))
        axis = world.axis("dp_shard")
        same = torch.equal(axis.gather(total), total) and torch.equal(axis.reduce(total), total)
        return found, same, world.broadcast(3), world.gather(4)


def test_nothing_in_the_environment_is_a_real_group_of_one(ranks):
    ((size, main, group, layout, total, text), same, three, four), *_ = ranks.run(_alone, 1)
    assert (size, main, group, layout, total) == (1, True, 1, "dp_shard=1", [1.0, 1.0])
    assert "World(layout=" in text and same and three == 3 and four == [4]


def _recorded(size: str | None) -> tuple[bool, bool]:
    """Whether torch keeps tracebacks, and whether the environment is as before, in a process's first group."""
    os.environ.pop("TORCH_FR_BUFFER_SIZE", None)
    if size:
        os.environ["TORCH_FR_BUFFER_SIZE"] = size
    before = {name: value for name, value in os.environ.items() if name.startswith("TORCH_")}
    with sw.init(device="cpu"):
        dist.all_reduce(torch.ones(1))
        kept = json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", ())
        after = {name: value for name, value in os.environ.items() if name.startswith("TORCH_")}
        return len(kept) > 0, after == before


@pytest.mark.parametrize("size", [None, "100"])
def test_torch_keeps_no_tracebacks_of_collectives_unless_it_is_asked_to(fresh_ranks, size):
    """In a process of its own: the recorder is made with the first group."""
    assert fresh_ranks.run(_recorded, 1, size) == [(size is not None, True)]


def _slurm(port):
    rank = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(
        SLURM_PROCID=rank, SLURM_STEP_NUM_TASKS="2", SLURM_LOCALID=rank, SLURM_STEP_TASKS_PER_NODE="2",
        SLURM_STEP_NODELIST="localhost", SLURM_JOB_ID="7", MASTER_PORT=str(port),
    )  # fmt: skip
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        return world.source, world.rank, world.local_rank, world.gather(world.rank * 10)


def test_a_slurm_step_of_two_tasks(ranks):
    from shardwise.launch import held_port

    with held_port() as port:
        assert ranks.run(_slurm, 2, port) == [("slurm", rank, rank, [0, 10]) for rank in range(2)]


def _existing_group():
    dist.init_process_group("gloo")
    with sw.init("dp_replicate=2", device="cpu") as world:
        gathered = world.gather(world.rank)
    total = torch.ones(1)
    dist.all_reduce(total)
    return gathered, dist.is_initialized(), float(total), world.source


def test_an_existing_group_is_used_and_left_alone(ranks):
    assert ranks.run(_existing_group, 2) == [([0, 1], True, 2.0, "process group")] * 2


def _reopened(num):
    found = []
    for i in range(num):
        with sw.init("dp_shard=2" if i % 2 else "dp_replicate=2", device="cpu", timeout_s=20, seed=i) as world:
            found.append((str(world.layout), world.gather((i, world.rank))))
        assert not dist.is_initialized()
        world.close()  # again: nothing happens
    return found


def test_a_world_can_be_closed_and_opened_again(ranks):
    layouts = ["dp_replicate=2,dp_shard=1", "dp_shard=2", "dp_replicate=2,dp_shard=1"]
    for found in ranks.run(_reopened, 2, 3):
        assert [gathered for _, gathered in found] == [[(i, 0), (i, 1)] for i in range(3)]
        assert [layout.replace(",dp_shard=1", "") for layout, _ in found] == [
            layout.replace(",dp_shard=1", "") for layout in layouts
        ]


# ---- options ------------------------------------------------------------------------------------------------------


def _backend(named):
    if named:
        os.environ["TORCH_DISTRIBUTED_BACKEND"] = named
    try:
        with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
            return dist.get_backend(), world.gather(world.rank)
    except ConfigError as error:
        return str(error)


def test_the_backend_of_a_cpu_world(ranks):
    assert ranks.run(_backend, 2, None) == [("gloo", [0, 1])] * 2


def test_the_backend_can_be_named_by_the_environment(ranks):
    assert ranks.run(_backend, 2, "cpu:gloo")[0][1] == [0, 1]
    for text in ranks.run(_backend, 2, "carrier-pigeon"):
        assert text.startswith("backend='carrier-pigeon' from TORCH_DISTRIBUTED_BACKEND on cpu")
        assert 'use "gloo"' in text


def _refused(arguments):
    with pytest.raises((ConfigError, LayoutError)) as caught:
        sw.init(**arguments)
    assert not dist.is_initialized()
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "banana"}, ["device='banana'", "only cpu and cuda"]),
        ({"device": "mps"}, ["device='mps'"]),
        ({"device": "cuda:x"}, ["device='cuda:x'"]),
        ({"timeout_s": 0}, ["timeout_s=0", "600"]),
        ({"timeout_s": float("inf")}, ["timeout_s=inf"]),
        ({"timeout_s": float("nan")}, ["timeout_s=nan"]),
        ({"layout": "dp_shard=3"}, ["dp_shard=3", "2 ranks"]),
        ({"layout": "dp_sahrd=2"}, ["dp_sahrd", "dp_shard"]),
        ({"layout": "dp_shard=0"}, ["dp_shard=0"]),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_any_group(ranks, arguments, words):
    for text in ranks.run(_refused, 2, arguments):
        assert all(word in text for word in words), text


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
def test_a_device_that_is_not_there(ranks):
    for text in ranks.run(_refused, 2, {"device": "cuda"}):
        assert "shows 0 CUDA devices" in text and "device='cpu'" in text


# ---- axes ---------------------------------------------------------------------------------------------------------


def _axes():
    with sw.init("dp_replicate=2,dp_shard=2", device="cpu", timeout_s=20) as world:
        found = {}
        for name in ("dp_replicate", "dp_shard", "dp", "fsdp", "loss", "tp"):
            axis = world.axis(name)
            mine = torch.full((1 + world.rank, 2), float(world.rank))
            found[name] = {
                "place": (axis.size, axis.rank, axis.ranks),
                "gather": axis.gather(mine)[:, 0].tolist(),
                "gather1": axis.gather(torch.full((2, axis.rank), 1.0), dim=-1).shape,
                "split": axis.split(torch.arange(5))[:].tolist(),
                "sums": [
                    float(axis.reduce(torch.tensor(world.rank + 1.0), op)) for op in ("sum", "mean", "max", "min")
                ],
                "product": axis.reduce(torch.tensor([world.rank + 1]), "product").tolist(),
            }
        odd = torch.arange(6.0).view(2, 3).t()  # not contiguous
        kept = odd.clone()
        total = world.axis("dp").reduce(odd)
        assert torch.equal(odd, kept) and torch.equal(total, 4 * kept)
        assert torch.equal(world.axis("dp_shard").gather(odd), torch.cat([kept, kept]))
        return found, world.mesh.mesh_dim_names, tuple(world.mesh.shape)


def test_axes_of_four_ranks(ranks):
    for rank, (found, names, shape) in enumerate(ranks.run(_axes, 4)):
        assert names == ("dp_replicate", "dp_shard") and shape == (2, 2)
        along = {
            "dp_replicate": (rank % 2, rank % 2 + 2),
            "dp_shard": (rank // 2 * 2, rank // 2 * 2 + 1),
            "dp": (0, 1, 2, 3),
            "fsdp": (rank // 2 * 2, rank // 2 * 2 + 1),
            "loss": (0, 1, 2, 3),
            "tp": (rank,),
        }
        for name, members in along.items():
            got, index = found[name], members.index(rank)
            assert got["place"] == (len(members), index, members)
            assert got["gather"] == [float(r) for r in members for _ in range(1 + r)]
            assert got["gather1"] == (2, sum(range(len(members))) if len(members) > 1 else 0)
            pieces = torch.arange(5).chunk(len(members))
            assert got["split"] == (pieces[index].tolist() if index < len(pieces) else [])
            numbers = [r + 1.0 for r in members]
            assert got["sums"] == [sum(numbers), sum(numbers) / len(numbers), max(numbers), min(numbers)]
            assert got["product"] == [int(torch.tensor(numbers).prod())]


def _axis_refusals():
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        axis, texts = world.axis("dp"), []
        for call in (
            lambda: world.axis("dpp"),
            lambda: axis.reduce(torch.ones(1), "median"),
            lambda: axis.gather(torch.tensor(1.0)),
            lambda: axis.gather(torch.ones(2, 2 + world.rank)),
            lambda: axis.gather(torch.ones(2, dtype=torch.float64 if world.rank else torch.float32)),
            lambda: world.broadcast(1, src=2),
        ):
            with pytest.raises(UsageError) as caught:
                call()
            texts.append(str(caught.value))
        return texts, world.gather("still in order")


def test_what_cannot_be_gathered_is_refused_on_every_rank(ranks):
    for texts, after in ranks.run(_axis_refusals, 2):
        assert after == ["still in order"] * 2
        assert "dp_shard" in texts[0] and "sum" in texts[1]
        assert "rank 0: [2, 2] torch.float32; rank 1: [2, 3] torch.float32" in texts[3]
        assert "rank 1: [2] torch.float64" in texts[4]


# ---- talking ------------------------------------------------------------------------------------------------------


def _talk():
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        tensor = torch.arange(6).view(2, 3).t() if world.rank == 1 else None
        return (
            world.broadcast({"a": [1, world.rank]}, src=1),
            world.broadcast(tensor, src=1),
            world.broadcast(torch.tensor(2.5) if world.is_main else "ignored"),
            world.gather({"rank": world.rank}),
        )


def test_broadcast_and_gather_of_objects_and_tensors(ranks):
    for thing, tensor, number, gathered in ranks.run(_talk, 2):
        assert thing == {"a": [1, 1]}
        assert torch.equal(tensor, torch.arange(6).view(2, 3).t())
        assert float(number) == 2.5
        assert gathered == [{"rank": 0}, {"rank": 1}]


def _over_all_ranks():
    with sw.init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        own = torch.full((1 + world.rank,), float(world.rank), requires_grad=True)
        tensors = world.gather(own)
        mean = world.reduce(torch.tensor([1.0 + world.rank]), "mean")
        by_torch = torch.ones(1)
        torch.distributed.all_reduce(by_torch, group=world.group)
        texts = []
        for name in (*_OTHER_WORDS, "colour"):
            assert not hasattr(world, name)
            try:
                getattr(world, name)
            except AttributeError as error:
                texts.append(str(error))
        numbers = (world.local_size, world.is_local_main, float(mean), float(by_torch))
    with pytest.raises(UsageError, match="a reduction in a world that was closed"):
        world.reduce(torch.ones(1))
    return numbers, [(tensor.tolist(), tensor.requires_grad) for tensor in tensors], texts


def test_what_is_done_over_all_ranks_and_what_others_call_it(ranks):
    for rank, (numbers, tensors, texts) in enumerate(ranks.run(_over_all_ranks, 2)):
        assert numbers == (2, rank == 0, 1.5, 2.0)
        assert tensors == [([0.0], False), ([1.0, 1.0], False)]
        assert texts[0] == "World has no attribute 'world_size': here it is world.size"
        assert texts[-1] == "World has no attribute 'colour'"
    for other in _OTHER_WORDS.values():
        name = other.split("(")[0].split(".")[0]
        assert name in vars(World) or name in ("size", "local_size", "device", "mesh"), other


def _leaders(path, local):
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        with world.leader_first(local=local) as leads, open(path, "a+") as file:
            file.seek(0)
            seen = file.read()
            file.write(str(world.rank))
        return leads, seen


@pytest.mark.parametrize("local", [False, True])
def test_the_leader_comes_first(ranks, tmp_path, local):
    assert ranks.run(_leaders, 2, str(tmp_path / "order"), local) == [(True, ""), (False, "0")]


def _leader_fails():
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world, world.leader_first():
        if world.is_main:
            raise OSError("the disk is full")


def test_a_leader_that_fails_is_named(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(_leader_fails, 2, timeout_s=15)
    assert caught.value.ranks == (0,) and "the disk is full" in str(caught.value)


# ---- disagreement -------------------------------------------------------------------------------------------------


def _start_differently(what):
    module = importlib.import_module("shardwise.world.init")  # by name: the package has a function of that name

    rank = int(os.environ["RANK"])
    arguments = {"layout": "dp_shard=2", "seed": 0}
    versions = {"python": "3.11.9", "torch": "2.13.0"}
    if rank == 1:
        arguments = {**arguments, **({"layout": "dp_replicate=2"} if what == "layout" else {})}
        arguments = {**arguments, **({"seed": 5} if what == "seed" else {})}
        versions = {**versions, **({"torch": "2.12.1"} if what == "versions" else {})}
    real, module.package_versions = module.package_versions, lambda: versions
    try:
        with pytest.raises(RankError) as caught:
            sw.init(device="cpu", timeout_s=20, **arguments)
        assert not dist.is_initialized()
    finally:
        module.package_versions = real
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize(
    ("what", "words"),
    [("layout", ["layout", "dp_replicate=2"]), ("seed", ["rank 0: 0; rank 1: 5"]), ("versions", ["2.13.0", "2.12.1"])],
)
def test_ranks_started_differently_are_named_with_what_differs(ranks, what, words):
    for text, who in ranks.run(_start_differently, 2, what):
        assert who == (1,) and f"start-up differ between ranks: {what}" in text
        assert all(word in text for word in words), text


def _different_models():
    from torch import nn

    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world, pytest.raises(RankError) as caught:
        sw.parallelize(nn.Sequential(nn.Linear(2, 2 + world.rank)), world)
    return str(caught.value), caught.value.ranks


def test_ranks_with_different_models_are_named(ranks):
    for text, who in ranks.run(_different_models, 2):
        assert who == (1,) and "parameter 0.weight" in text and "2" in text and "3" in text


def _elsewhere():
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world, pytest.raises(RankError) as caught:
        if world.is_main:
            world.barrier()
        else:
            world.agreement.sum({"a": torch.ones(30)}, "a count of sheep")
    return str(caught.value), caught.value.ranks


def test_ranks_that_come_to_different_exchanges_are_told(ranks):
    for text, who in ranks.run(_elsewhere, 2):
        assert who == (1,)
        assert "rank 1 came to a count of sheep, the others to a barrier" in text


def _slow_on_main():
    with sw.init("dp_shard=2", device="cpu", timeout_s=1) as world:
        collectively(world, "counting sheep", lambda: time.sleep(3), on_main=True)


def test_ranks_that_wait_for_what_rank_0_does_alone_say_so(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(_slow_on_main, 2, timeout_s=15)
    assert "at counting sheep" in str(caught.value)
    assert "rank 0 alone does counting sheep, and the others wait for it" in caught.value.fix
    assert "use a larger timeout_s" in caught.value.fix


def _sums():
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        agreement = world.agreement
        big = torch.arange(500.0).view(5, 100)
        summed = agreement.sum({"a": world.rank + 1, "b": big, "c": torch.zeros(0)}, "sums")
        same = agreement.sum({"x": agreement.same(2**60 - 1)}, "same")["x"]
        other = agreement.sum({"x": agreement.same(7 + (world.rank << 40))}, "other")["x"]
        return float(summed["a"]), torch.equal(summed["b"], 2 * big.double()), agreement.all_same(same), agreement.all_same(other)  # fmt: skip


def test_an_exchange_sums_and_tells_equality(ranks):
    assert ranks.run(_sums, 2) == [(3.0, True, True, False)] * 2


def _fails_beside_an_exchange():
    """Rank 1 has an error while its exchange is under way, and goes on."""
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        done = []

        def meanwhile():
            done.append(world.rank)
            if world.rank == 1:
                raise ValueError("a fault of this rank")

        try:
            done.append(float(world.agreement.sum({"a": 1.0}, "the first", meanwhile=meanwhile)["a"]))
        except ValueError as error:
            done.append(str(error))
        done.append(float(world.agreement.sum({"a": 10.0}, "the next")["a"]))
        return done


def test_an_error_while_an_exchange_is_under_way(ranks):
    """The other rank has the sums, and the next exchange its own."""
    assert ranks.run(_fails_beside_an_exchange, 2) == [[0, 2.0, 20.0], [1, "a fault of this rank", 20.0]]


# ---- the end ------------------------------------------------------------------------------------------------------


class _Counted:
    """A collective under way that counts how often one asks whether it is done."""

    def __init__(self, work):
        self.work, self.num_looks = work, 0

    def is_completed(self):
        self.num_looks += 1
        return self.work.is_completed()

    def wait(self, *args):
        return self.work.wait(*args)


def _long_wait(seconds):
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        found = torch.full((3,), world.rank + 1.0)
        if world.rank == 1:
            time.sleep(seconds)
        works = [_Counted(dist.all_reduce(found, async_op=True))]
        world.agreement.carry_out(lambda: works, "a long wait")
        return found.tolist(), works[0].num_looks


def test_a_long_wait_leaves_the_processor_to_others(ranks):
    """Ranks of one machine share its cores: one that polls takes them from those it waits for."""
    (total, num_looks), (other, _) = ranks.run(_long_wait, 2, 0.6)
    assert total == other == [3.0, 3.0, 3.0]
    assert 5 < num_looks < 30  # one each 50 ms, where polling looked 300 times


def _leaves_early():
    """Rank 1 closes its world in order while rank 0 waits for it."""
    world = sw.init("dp_shard=2", device="cpu", timeout_s=30)
    try:
        if world.is_main:
            world.barrier()
    finally:
        world.close() if world.rank else None


def test_a_rank_that_left_in_order_is_named(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(_leaves_early, 2, timeout_s=15)
    assert "rank 1 left while rank 0 waited at a barrier" in str(caught.value)


def _fails(where):
    with sw.init("dp_shard=2", device="cpu", timeout_s=30) as world:
        if world.rank == 1:
            raise RuntimeError("out of memory")
        if where == "exchange":
            world.barrier()
        elif where == "collective":
            dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("where", ["exchange", "collective", "close"])
def test_a_rank_that_fails_inside_the_world_is_the_cause(ranks, where):
    with pytest.raises(RankError) as caught:
        ranks.run(_fails, 2, where, timeout_s=15)
    assert caught.value.ranks == (1,) and "out of memory" in str(caught.value)
    assert ranks.run(_reopened, 2, 1)  # the ranks that are left, or new ones, are in order


def _never_closed(rank):
    if rank == 1 and int(os.environ["RANK"]) == 0:
        return "no world"
    return sw.init("dp_shard=-1", device="cpu", timeout_s=20).size


def test_worlds_that_were_never_closed_do_not_disturb_the_next(ranks):
    for _ in range(3):
        assert ranks.run(_never_closed, 2, 0) == [2, 2]
        assert ranks.run(_alone, 1)
    assert len(ranks.run(_reopened, 2, 3)) == 2


def gathered_over_dp(layout):
    """How many samples a collective of torch over the group of the data ranks brings."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        group, mine = world.axis("dp").group, torch.full((1,), float(world.rank))
        found = torch.cat(torch.distributed.nn.functional.all_gather(mine, group=group))
        return found.tolist(), world.axis("dp").ranks, group is world.axis("dp").group


@pytest.mark.parametrize("layout", ["tp=2", "dp_shard=2", "dp_shard=2,tp=2"])
def test_the_group_of_an_axis_is_of_its_ranks_at_degree_1_too(ranks, layout):
    """None would mean all ranks to torch: under tp=2 a contrastive loss would have each sample twice."""
    for found, along, is_kept in ranks.run(gathered_over_dp, 4 if "," in layout else 2, layout):
        assert found == [float(rank) for rank in along] and is_kept


def test_an_axis_of_a_world_of_one_has_no_group(ranks):
    assert ranks.run(alone, 1) == [None]


def alone():
    with sw.init("tp=1", device="cpu") as world:
        return world.axis("dp").group
