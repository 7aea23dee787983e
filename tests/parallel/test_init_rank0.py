"""Rank 0's values, scattered bit for bit, and nothing else sent."""

import os

import models
import pytest
import torch
import torch.distributed as dist
from layouts import LAYOUTS, VALUES
from parallel.on_ranks import sharded
from parallel.test_tape import constructed
from parallel.values import same
from torch import nn

from shardwise import Sharding
from shardwise.errors import UsageError
from shardwise.parallel import parallelize, runtime_of
from shardwise.recipe import DTYPE_BYTES, Recipe, extents
from shardwise.world import init

MODELS = ["Awkward", "odd", "conv", "recurrent", "Kept", "weight_norm"]


@pytest.mark.combinations("values")
@pytest.mark.parametrize("layout", VALUES)
@pytest.mark.parametrize("name", MODELS)
def test_rank_dependent_init(ranks, name, layout):
    """Every rank builds the module with numbers of its own; what all of them hold in the end are rank 0's."""
    if layout == "one" or name == "Awkward" or layout in ("fsdp-4", "ddp-2"):
        values, said = sharded(ranks, name, layout, how="module")
        assert same(values, constructed(models.get(name).build, seed=1000))
        assert said[-1][0]["init"] == "rank0: values of the module given on rank 0"


def test_a_callable_may_ask_for_rank_0(ranks):
    values, said = sharded(ranks, "Awkward", "hsdp-2x2", how="rank0")
    assert same(
        values, constructed(models.get("Awkward").build, seed=1000)
    )  # the constructor's own, under rank 0's seed
    assert said[1][0]["init"] == "rank0 (asked for)" and said[1][1] == []  # nothing to warn of


def test_the_storage_dtype_asked_for(ranks):
    values, _ = sharded(ranks, "odd", "fsdp-2", how="module", precision="fp64")
    want = constructed(models.get("odd").build, seed=1000)
    assert values["embed.weight"].dtype == torch.float64
    assert all(torch.equal(value, want[name].to(value.dtype)) for name, value in values.items())


# ---- what is sent --------------------------------------------------------------------------------------------------------


def scatter_and_count(name: str, layout: str, engine: str, message_bytes: int | None = None):
    """Bytes that this rank sent and received point to point while values were scattered, and how many messages."""
    from shardwise.parallel.init import values as values_module

    sent, received, kept = [], [], (dist.send, dist.recv, values_module._MESSAGE_BYTES)

    def send(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return kept[0](tensor, *args, **kwargs)

    def recv(tensor, *args, **kwargs):
        received.append(tensor.nbytes)
        return kept[1](tensor, *args, **kwargs)

    dist.send, dist.recv = send, recv
    values_module._MESSAGE_BYTES = message_bytes or kept[2]
    try:
        with init(layout, device="cpu", timeout_s=30) as world:
            module = models.get(name).build()
            keep = {} if engine == "ddp" else {"min_unit_bytes": 0}
            runtime = runtime_of(parallelize(module, world, sharding=Sharding(engine=engine, **keep)))
            others = {n: t.nbytes for n, t in runtime.local_tensors().items() if n not in runtime.recipe.params}
            return sent, received, runtime.recipe.to_json(), others
    finally:
        dist.send, dist.recv, values_module._MESSAGE_BYTES = kept


def bytes_held(recipe: Recipe, rank: int, others: dict[str, int]) -> int:
    """What ``rank`` holds of parameters by the recipe, and whole of everything else."""
    pieces = {name: extents(param, recipe.grid.coord(rank)) for name, param in recipe.params.items()}
    numel = {name: sum(torch.Size(piece.sizes).numel() for piece in found) for name, found in pieces.items()}
    return sum(numel[n] * DTYPE_BYTES[p.storage] for n, p in recipe.params.items()) + sum(others.values())


@pytest.mark.parametrize("message_bytes", [None, 40])
@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2", "fsdp-4", "hsdp-2x2"])
def test_rank_0_sends_each_rank_its_pieces_and_nothing_else(ranks, layout, message_bytes):
    text, count, engine = LAYOUTS[layout]
    answers = ranks.run(scatter_and_count, count, "Awkward", text, engine, message_bytes)
    recipe, others = Recipe.from_json(answers[0][2]), answers[0][3]
    for rank in range(1, count):
        sent, received, *_ = answers[rank]
        assert sent == []
        assert sum(received) == bytes_held(recipe, rank, others)
        assert message_bytes is None or max(received) <= message_bytes, "larger tensors come in several messages"
    assert answers[0][1] == []
    assert sum(answers[0][0]) == sum(sum(answers[rank][1]) for rank in range(1, count))
    dtypes = 6  # float32, bfloat16, int64, bool, uint8, float64
    assert len(answers[1][1]) <= dtypes if message_bytes is None else len(answers[1][1]) > dtypes


def test_messages_do_not_depend_on_how_large_a_ranks_own_shards_are(ranks):
    """Rank 0 holds more rows than the last rank; both must cut the stream of pieces at the same places."""
    values, _ = sharded(ranks, "Awkward", "fsdp-4", how="module")
    for message_bytes in (8, 24, 64):
        answers = ranks.run(scatter_and_count, 4, "Awkward", "dp_shard=4", "auto", message_bytes)
        assert sum(answers[0][0]) == sum(sum(received) for _, received, *_ in answers[1:])
    assert values["uneven"].shape == (7, 3)


# ---- what is refused -----------------------------------------------------------------------------------------------------


def refusals():
    found = {}
    with init("dp_shard=1", device="cpu") as world:
        with torch.device("meta"):
            on_meta = nn.Sequential(nn.Linear(2, 2))
        for key, model, how in (
            ("meta", on_meta, None),
            ("seeded", nn.Linear(2, 2), "seeded"),
            ("word", nn.Linear(2, 2), "rank1"),
            ("kind", 3, None),
            ("gave", lambda: 3, None),
        ):
            try:
                parallelize(model, world, init=how)
            except UsageError as error:
                found[key] = (error.given, error.name)
    return found


@pytest.mark.filterwarnings("ignore:init. rank0")
def test_what_is_no_module_with_values_is_refused(ranks):
    assert ranks.run(refusals, 1)[0] == {
        "meta": ("a module with tensors on meta", "0.weight"),
        "seeded": ('init="seeded" with a module', None),
        "word": ("init='rank1'", None),
        "kind": ("a int", None),
        "gave": ("a callable that gave a int", None),
    }


def build_where_some_fail(how):
    """Constructors that fail once, or for want of values, and are right when they run for real."""
    calls = []

    def build():
        calls.append(1)
        if how == "once on one rank" and len(calls) == 1 and int(os.environ["RANK"]) == 1:
            raise FileExistsError(17, "File exists", "cache")
        module = nn.Linear(2, 2)
        if how == "for want of values":
            try:
                module.weight.tolist()
            except Exception as error:
                raise OSError("Unable to load weights") from error
        return module

    with init("dp_shard=2", device="cpu", timeout_s=30) as world:
        parallelize(build, world)
        return len(calls)


@pytest.mark.parametrize("how", ["once on one rank", "for want of values"])
def test_a_constructor_that_fails_on_meta_alone_is_run_for_real(ranks, how):
    assert ranks.run(build_where_some_fail, 2, how)[0] == 2


def build_from_nowhere(init_word):
    """How often a constructor is called that cannot read its file."""
    calls = []

    def build():
        calls.append(1)
        raise FileNotFoundError(2, "No such file or directory", "nowhere")

    with init("dp_shard=2", device="cpu", timeout_s=30) as world:
        with pytest.raises(FileNotFoundError):
            parallelize(build, world, init=init_word)
        return len(calls)


@pytest.mark.parametrize("init_word", [None, "load", "rank0"])
def test_a_constructor_that_cannot_read_its_file_is_not_tried_again(ranks, init_word):
    """It may have waited for the network for a minute."""
    first, second = ranks.run(build_from_nowhere, 2, init_word)
    assert first == 1 and second <= 2
