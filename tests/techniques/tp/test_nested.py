"""Sequence parallelism on the rows of context parallelism: each rank has a part of a part of the positions, and trains as in one process."""

import models
import pytest
import torch
from techniques.cp import sequences
from techniques.cp.test_parity import Build as Cut
from techniques.cp.test_parity import Llama
from techniques.tp.streams import PARALLEL, Build, batch, count, every_length, loss_of, parallel, windows
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError

FAMILIES = [
    pytest.param(name, layout, marks=[] if (name, layout) == ("llama", "cp=2,tp=2") else [pytest.mark.soak])
    for name in ("llama", "gpt2", "bert", "nanogpt")
    for layout in ("cp=2,tp=2", "dp_shard=2,cp=2,tp=2")
]


@pytest.mark.parametrize(("name", "layout"), FAMILIES)
def test_families(ranks, name, layout):
    model = models.get(name)
    sw.verify(
        model.build,
        layout,
        batches=model.windows(2, 4 if "dp" in layout else 2),
        loss=model.loss,
        count=model.count,
        forward=model.forward,
        run=ranks.run,
        tensor_parallel=PARALLEL,
        max_grad_norm=0.3,
    )


@pytest.mark.soak
@pytest.mark.parametrize("name", list(sequences.PROVED))
def test_models_of_context_parallelism(ranks, name):
    """Positions, tables and masks that blocks make themselves, kernels and attention that is written out: within regions of tp."""
    sw.verify(
        Cut(name),
        "cp=2,tp=2",
        batches=sequences.windows(name),
        loss=sequences.loss_of,
        count=sequences.count,
        run=ranks.run,
        tensor_parallel=PARALLEL,
        context_parallel="gather",
        max_grad_norm=0.3,
    )


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_packed_documents_and_windows(ranks, kind):
    windows_of_documents = sequences.windows("packed")
    model = Llama(kind, "sdpa")
    sw.verify(model, "cp=2,tp=2", batches=windows_of_documents, run=ranks.run, tensor_parallel=PARALLEL)


@pytest.mark.soak
def test_compiled_blocks(ranks):
    options = {"context_parallel": "gather", "compile": sw.Compile(backend="aot_eager", fullgraph=True)}
    assert max(ranks.run(every_length, 4, "inline", "cp=2,tp=2", [13, 13], timeout_s=300, **options)) < 1e-12


CELLS = [
    ("tied", "cp=2,tp=2", {"remat": "full"}, True),
    ("", "cp=2,tp=2", {"context_parallel": "gather"}, True),
    ("", "cp=2,tp=2", {"context_parallel": "ulysses"}, True),
    ("inline", "dp_shard=2,cp=2,tp=2", {"remat": "selective"}, True),
    ("kv-2", "dp_shard=2,cp=2,tp=2", {"context_parallel": "gather"}, True),
    ("mask", "cp=2,tp=2", {}, True),
    ("condition", "cp=2,tp=2", {}, True),
    ("first output", "cp=2,tp=2", {}, True),
    ("pooled", "cp=2,tp=2", {}, True),
    ("used both ways", "cp=2,tp=2", {}, True),
    ("norm of the root", "cp=2,tp=2", {}, True),
    ("gate inside", "cp=2,tp=4", {}, True),
    ("", "cp=4,tp=2", {"sharding": sw.Sharding(offload=True)}, True),
    ("", "cp=2,tp=2", {"fused": "head"}, True),
    ("tuple", "dp_replicate=2,cp=2,tp=2", {"sharding": sw.Sharding(engine="ddp")}, True),
]


@pytest.mark.parametrize(
    ("how", "layout", "options"),
    [
        pytest.param(
            how, layout, options, id=f"{how}-{layout}-{'-'.join(options)}", marks=[pytest.mark.soak] if slow else []
        )
        for how, layout, options, slow in CELLS
    ],
)
def test_options(ranks, how, layout, options):
    """Micro-batches of four lengths, of other numbers of labels; clipped."""
    given = {} if "fused" in options else {"loss": loss_of, "count": count}
    sw.verify(
        Build(how),
        layout,
        batches=windows(micro=4),
        run=ranks.run,
        tensor_parallel=PARALLEL,
        max_grad_norm=0.3,
        optimizer="adamw",
        **given,
        **options,
    )


@pytest.mark.parametrize(
    ("how", "layout", "num", "options"),
    [
        ("inline", "cp=2,tp=2", 4, {"context_parallel": "gather"}),
        pytest.param("", "cp=2,tp=4", 8, {"context_parallel": "gather"}, marks=pytest.mark.soak),
        pytest.param("kv-2", "cp=2,tp=2", 4, {"context_parallel": "gather", "remat": "full"}, marks=pytest.mark.soak),
    ],
)
def test_lengths(ranks, how, layout, num, options):
    """Also where a rank has no positions of the sequence, or none of the rows of its ranks of tp."""
    assert max(ranks.run(every_length, num, how, layout, [1, 2, 3, 5, 1, 7, 9, 13], **options)) < 1e-12


def drawn(layout):
    """For each dropout of rows: how many, the shape, and where it dropped."""
    found = []
    with sw.init(layout, device="cpu") as world:
        model = parallel("dropout", world, context_parallel="gather")
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(
                    lambda _, args, y: found.append((tuple(y.shape), ((y == 0) & (args[0] != 0)).flatten().tolist()))
                )
        ends: list[float] = []
        model.norm.register_forward_hook(lambda *_: ends.append(float(torch.rand(()))))
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss_of, count=count)
        step([batch(1, 16)])
        return found, ends


def test_dropout_of_rows_differs_on_all_ranks(ranks):
    """16 positions: 8 of each rank of cp, 4 of each of tp. Behind attention a rank has its heads of 8."""
    found = ranks.run(drawn, 4, "cp=2,tp=2")
    assert len({str(ends) for _, ends in found}) == 1
    for of_ranks in zip(*(calls for calls, _ in found), strict=True):
        assert {shape[-2] for shape, _ in of_ranks} <= {4, 8}
        assert len({str(mask) for _, mask in of_ranks}) == 4


def told(how, layout, **options):
    """The error that ``parallelize`` ends in, or what ``describe`` says."""
    with sw.init(layout, device="cpu") as world:
        try:
            return sw.describe(parallel(how, world, **options))
        except ShardwiseError as error:
            return str(error)


def test_describe_says_both_cuts(ranks):
    for text in ranks.run(told, 4, "", "cp=2,tp=2"):
        assert "context parallelism: 2 blocks work on 1/2 of the positions of every sample" in text
        assert "2 blocks work on 1/2 of this rank's positions" in text


def test_what_either_cut_allows_and_not_both_is_refused_by_name(ranks):
    """A module that runs on the whole sequence, of which a layer's output would be summed to the rows of a rank."""
    option = sw.ContextParallel(fallback="gather")
    for text in ranks.run(told, 4, "shift", "cp=2,tp=2", context_parallel=option):
        assert "blocks.0.attention.out: cp=2 of a Words with TensorParallel(sequence_parallel=True)" in text
        assert "either alone is right" in text and "leave sequence_parallel out" in text


def test_what_mixes_positions_is_refused_by_name(ranks):
    for text in ranks.run(told, 4, "shift", "cp=2,tp=2"):
        assert "blocks.0.attention: cp=2 of a Words" in text and "sw.attend" in text
