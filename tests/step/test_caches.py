"""Caches in buffers, in ranks whose sequences have other lengths: the numbers of one process, or an error that names the buffer."""

import itertools
import tempfile
from unittest import mock

import pytest
import torch
from models.caches import build_cached, by_ids, summed_loss, texts

import shardwise as sw
from shardwise.data.batch import MicroBatch
from shardwise.model.module_state import Attributes

# What becomes of the buffer, and the lengths of the micro-batches of a window, one for each of four ranks; LONGEST: of each window.
LONGEST = (5, 9, 9, 11)
KINDS = {
    "longer on rank 0": ("written", lambda n: (n, 3, 4, 3)),
    "longer on rank 1": ("written", lambda n: (3, n, 3, 4)),
    "equal": ("written", lambda n: (n,) * 4),
    "registered on one rank": ("registered", lambda n: (n, 3, 4, 3)),
    "replaced": ("replaced", lambda n: (n, 3, 5, 4)),
    "grown": ("grown", lambda n: (3, n, 3, 4)),
    "dtype changed": ("of another dtype", lambda n: (n, 3, 5, 4)),
}
SITUATIONS = ("plain", "skip", "scaler", "padding", "evaluate between", "remat", "resume")
LAYOUTS = {"dp_replicate=2": 2, "dp_shard=2": 2, "dp_replicate=2,dp_shard=2": 4, "dp_shard=1,tp=2": 2}
BAD = 1  # the window that is skipped is the first with a long sequence


def windows(kind: str, situation: str) -> list[list[dict[str, torch.Tensor]]]:
    lengths = KINDS[kind][1]
    num = 3 if situation == "padding" else 4
    # The loss is no number; or it is one, and what it is scaled to is none.
    bad = {"skip": (float("nan"), 1.0, 1.0, 1.0), "scaler": (1e300, 1.0, 1.0, 1.0)}.get(situation, ())
    return [texts(s, lengths(n)[:num], bad if s == BAD else ()) for s, n in enumerate(LONGEST)]


def one_process(kind: str, persistent: bool, situation: str):
    model = build_cached(KINDS[kind][0], persistent)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for micros in windows(kind, situation):
        total = sum(summed_loss(by_ids(model, b), b) for b in micros) / sum(b["labels"].numel() for b in micros)
        optim.zero_grad()
        if len(losses) != BAD or situation not in ("skip", "scaler"):
            total.backward()
            optim.step()
        losses.append(total.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def _share(world: sw.World, micros):
    """This rank's micro-batches; where a rank has fewer than others, a padding."""
    axis = world.axis("dp")
    own = [MicroBatch(b, index=i) for i, b in enumerate(micros)][axis.rank :: axis.size]
    most = -(-len(micros) // axis.size)
    return own + [MicroBatch(micros[-1], index=len(micros) + axis.rank, padding=True)] * (most - len(own))


def _step(world: sw.World, kind: str, persistent: bool, situation: str) -> sw.TrainStep:
    model = sw.parallelize(
        build_cached(KINDS[kind][0], persistent),
        world,
        sharding=sw.Sharding(min_unit_bytes=0),
        remat="full" if situation == "remat" else None,
    )
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    options = {"skip": {"on_nonfinite": "skip"}, "scaler": {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**40)}}
    return sw.TrainStep(model, optim, loss=summed_loss, forward=by_ids, **options.get(situation, {}))


def trained(layout: str, kind: str, persistent: bool, situation: str):
    """Losses and parameters after all windows; or the class, name and text of an error."""
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        step, losses = _step(world, kind, persistent, situation), []
        root = world.broadcast(tempfile.mkdtemp() if world.is_main else None) if situation == "resume" else ""
        try:
            for s, micros in enumerate(windows(kind, situation)):
                if situation == "evaluate between" and s == 2:
                    sw.evaluate(
                        step.model, texts(90 + world.axis("dp").rank, (9, 11)), loss=summed_loss, forward=by_ids
                    )
                if situation == "resume" and s == 2:
                    with sw.CheckpointManager(root, step, async_save=False) as manager:
                        manager.save()
                    step = _step(world, kind, persistent, situation)
                    with sw.CheckpointManager(root, step, async_save=False) as manager:
                        manager.load()
                losses.append(step(_share(world, micros)).loss)
        except sw.ShardwiseError as error:
            return type(error).__name__, error.name, str(error)
        return losses, sw.full_state_dict(step.model)


def check(ranks, layout: str, kind: str, persistent: bool, situation: str) -> None:
    found = ranks.run(trained, LAYOUTS[layout], layout, kind, persistent, situation)
    if isinstance(found[0][0], str):
        for name, where, text in found:
            assert where.startswith("blocks.") and "'table'" in text + repr(where.rpartition(".")[2]), (name, text)
        # Nothing but what ranks hold differently, or a checkpoint would lack, is refused.
        is_remat = situation == "remat" and "in some forwards only" in found[0][2]
        by_length = (
            kind in ("longer on rank 0", "longer on rank 1", "grown") and "tp" not in layout
        )  # tp ranks run the same
        differs = persistent and (by_length or kind == "registered on one rank")
        assert is_remat or differs, found[0]
        return
    losses, values = one_process(kind, persistent, situation)
    for here, state in found:
        assert [a for a in here if a == a] == pytest.approx([a for a in losses if a == a], rel=1e-12)
        for name, value in values.items() if state else ():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
    assert not (persistent and kind == "registered on one rank"), "a checkpoint would lack the buffer"


# Each value of each factor once; all combinations in soak.
SOME = [
    ("dp_shard=2", "longer on rank 0", False, "plain"),
    ("dp_replicate=2", "longer on rank 1", False, "skip"),
    ("dp_shard=1,tp=2", "longer on rank 0", False, "skip"),
    ("dp_replicate=2,dp_shard=2", "longer on rank 1", False, "scaler"),
    ("dp_shard=2", "grown", False, "padding"),
    ("dp_replicate=2", "registered on one rank", False, "evaluate between"),
    ("dp_shard=2", "replaced", False, "remat"),
    ("dp_shard=2", "registered on one rank", False, "remat"),
    ("dp_shard=2", "dtype changed", True, "resume"),
    ("dp_shard=1,tp=2", "grown", True, "resume"),
    ("dp_replicate=2", "grown", True, "plain"),
    ("dp_shard=2", "longer on rank 1", True, "padding"),
    ("dp_shard=2", "equal", True, "skip"),
    ("dp_shard=2", "registered on one rank", True, "plain"),
    ("dp_shard=1,tp=2", "registered on one rank", True, "plain"),
]


@pytest.mark.quick(
    "dp_shard=2-longer on rank 0-False-plain",
    "dp_replicate=2,dp_shard=2-longer on rank 1-False-scaler",
    "dp_shard=2-grown-False-padding",
    "dp_replicate=2-registered on one rank-False-evaluate between",
    "dp_shard=2-dtype changed-True-resume",
    "dp_shard=1,tp=2-grown-True-resume",
    "dp_replicate=2-grown-True-plain",
    "dp_shard=2-equal-True-skip",
    "dp_shard=1,tp=2-registered on one rank-True-plain",
)
@pytest.mark.parametrize(("layout", "kind", "persistent", "situation"), SOME)
def test_a_cache_in_a_buffer(ranks, layout, kind, persistent, situation):
    check(ranks, layout, kind, persistent, situation)


def test_an_idle_rank_takes_the_values_of_the_others(ranks):
    """Three micro-batches for four ranks: the last has a padding, and has not filled its cache."""
    check(ranks, "dp_replicate=2,dp_shard=2", "equal", True, "padding")


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cache_in_a_buffer(ranks, layout):
    for kind, persistent, situation in itertools.product(KINDS, (False, True), SITUATIONS):
        check(ranks, layout, kind, persistent, situation)


def test_the_cases_see_a_cache_that_is_put_back_without_its_count(ranks):
    found = ranks.run(_without_python_state, 2, "dp_shard=2")
    losses, _ = one_process("longer on rank 1", False, "skip")
    assert abs(found[0] - losses[-1]) > 1e-6


def _without_python_state(layout: str) -> float:
    with mock.patch.object(Attributes, "restore", lambda self: None):
        losses, _ = trained(layout, "longer on rank 1", False, "skip")
    return losses[-1]
