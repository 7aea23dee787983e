"""Sequence parallelism: a model whose sequences are cut between layers that are cut over tp trains as in one process."""

import pytest
import torch
from techniques.tp.streams import (
    BY_ROWS,
    EXACT,
    PARALLEL,
    WHOLE,
    WIDTH,
    Build,
    Clip,
    buffers_of,
    count,
    counted,
    dropped,
    dropped_otherwise,
    every_length,
    kept_between,
    loss_of,
    own_loop,
    plain_buffers,
    refused,
    windows,
)
from techniques.tp.test_parity import compared as compared_with_model

import shardwise as sw


def compared(ranks, how, layout, **options):
    return sw.verify(
        Build(how),
        layout,
        batches=windows(micro=4),
        loss=loss_of,
        count=count,
        run=ranks.run,
        tensor_parallel=PARALLEL,
        max_grad_norm=0.3,
        optimizer="adamw",
        **options,
    )


QUICK = {
    "kv-1",
    "distances",
    "inline",
    "norm inside",
    "norm of the root",
    "condition",
    "used both ways",
    "list twice",
    "batch norm",
}


@pytest.mark.quick("inline", "norm inside", "norm of the root", "condition")
@pytest.mark.parametrize("how", [pytest.param(how, marks=[] if how in QUICK else [pytest.mark.soak]) for how in EXACT])
def test_models(ranks, how):
    assert compared(ranks, how, "tp=2")


CELLS = [
    ("kv-2", "dp_shard=2,tp=2", {"remat": "full"}, False),
    ("", "dp_replicate=2,tp=2", {"norm_type": float("inf")}, False),
    ("full-width norm", "tp=4", {}, True),
    ("root between", "tp=4", {"remat": "selective"}, True),
    ("gate inside", "dp_shard=2,tp=2", {}, True),
    ("tied norms", "dp_shard=2,tp=2", {"sharding": sw.Sharding(offload=True)}, True),
    ("frozen norm", "dp_shard=2,tp=2", {"sharding": sw.Sharding(sync_every_microbatch=True)}, True),
    ("norm inside", "dp_replicate=2,dp_shard=2,tp=2", {"remat": "full"}, True),
    ("inline", "tp=2", {"remat": "full"}, True),
    ("condition", "dp_shard=2,tp=2", {"remat": "full"}, True),
    ("", "tp=2", {"lora": sw.LoRA(rank=4)}, True),
    ("shift", "dp_shard=2,tp=2", {"lora": sw.LoRA(rank=4), "remat": "full"}, True),
]


@pytest.mark.quick("kv-2-dp_shard=2,tp=2-remat")
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
    assert compared(ranks, how, layout, **options)


FAMILIES = (
    "llama",
    "qwen3",
    "gemma3",
    "gpt2",
    "bert",
    "mixtral",
    "nanogpt",
    "opt",
    "bloom",
    "deepseek-v3",
    "vocabularies: tied",
)


@pytest.mark.quick("llama-tp=2")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in {("llama", "tp=2"), ("mixtral", "tp=2")} else [pytest.mark.soak])
        for name in FAMILIES
        for layout in ("tp=2", "dp_shard=2,tp=2", "dp_replicate=2,tp=2", *(["tp=4"] if name != "mixtral" else []))
    ],
)  # fmt: skip
def test_families(ranks, name, layout):
    compared_with_model(ranks, name, layout, tensor_parallel=PARALLEL)


def test_towers_of_tokens_and_of_patches(ranks):
    """The stream of tokens is cut; the blocks of patches, of another length, are as without it."""
    sw.verify(
        Clip(),
        "tp=2",
        batches=Clip.windows(),
        loss=Clip.loss,
        count=Clip.count,
        run=ranks.run,
        tensor_parallel=PARALLEL,
    )


@pytest.mark.soak
def test_a_decoder_that_looks_at_an_encoder_is_refused_by_name(ranks):
    with pytest.raises(sw.RankError) as error:
        compared_with_model(ranks, "t5", "tp=2", tensor_parallel=PARALLEL)
    assert "decoder.block.0.layer.0.SelfAttention.q: TensorParallel(sequence_parallel=True) of a T5" in str(error.value)


def test_a_fused_loss_gets_all_positions(ranks):
    compared_with_model(ranks, "llama", "tp=2", tensor_parallel=PARALLEL, fused=True)


# ---- exchanges, memory -----------------------------------------------------------------------------------------------


COMPILED = {"compile": sw.Compile(backend="aot_eager", fullgraph=True)}


@pytest.mark.parametrize("options", [{}, pytest.param(COMPILED, marks=pytest.mark.soak)])
def test_exchanges_are_those_of_the_textbook(ranks, options):
    """Of a block and micro-batch 4 gathers and 4 sums to rows; one gather behind the last block, one before the first in backward."""
    for found in ranks.run(counted, 2, "", "tp=2", **options):
        gathers = [shape for kind, shape in found if kind == "all_gather_into_tensor" and shape[-1] == WIDTH]
        sums = [shape for kind, shape in found if kind == "reduce_scatter_tensor"]
        assert gathers == [(7, 2, WIDTH)] * (4 * 2 + 2) * 2  # of 13 positions
        assert sums == [(14, 2, WIDTH)] * 4 * 2 * 2
        assert [shape for kind, shape in found if kind == "all_reduce"] == [(2, 13, WIDTH)] * 2 * 2  # table and head


def test_what_is_kept_between_regions_falls_by_tp(ranks):
    whole = kept_between("")
    for degree in (2, 4):
        assert max(ranks.run(kept_between, degree, f"tp={degree}")) <= 1.03 / degree * whole


# ---- lengths, randomness, buffers ------------------------------------------------------------------------------------


@pytest.mark.quick("shift-tp=4-4")
@pytest.mark.parametrize(("how", "layout", "num"), [("inline", "tp=2", 2), ("shift", "tp=4", 4)])
def test_every_length(ranks, how, layout, num):
    """Where a rank has no positions one stands for them, which counts nowhere."""
    assert max(ranks.run(every_length, num, how, layout, [1, 2, 3, 5, 1, 6, 9])) < 1e-12


@pytest.mark.parametrize(
    ("how", "lengths"),
    [
        ("two streams", [1]),
        ("no eps", [1]),
        ("in place", [13]),
        ("late behind the blocks", [9, 30]),  # what a block has used on rows is used with all positions too
        ("late in a region", [9, 30]),
    ],
)
def test_lengths_of_single_models(ranks, how, lengths):
    """A stream of one position is as long on rows as it is whole; what stands for none is not zero; what was joined is another once it has
    been written in place."""
    assert max(ranks.run(every_length, 2, how, "tp=2", lengths)) < 1e-12


@pytest.mark.parametrize(
    ("how", "layout", "num"),
    [
        ("inline", "tp=2", 2),
        pytest.param("shift", "tp=2", 2, marks=pytest.mark.soak),
        pytest.param("gate inside", "dp_shard=2,tp=2", 4, marks=pytest.mark.soak),
    ],
)
def test_compiled_blocks(ranks, how, layout, num):
    """With islands, and without a break of the graph."""
    assert max(ranks.run(every_length, num, how, layout, [13, 13], timeout_s=240, **COMPILED)) < 1e-12


def test_own_loop_answer_and_evaluation(ranks):
    for errors in ranks.run(own_loop, 2, "shift", "tp=2"):
        assert max(errors) < 1e-12


def test_dropout_differs_on_rows_and_is_equal_in_regions(ranks):
    (one, end, _), (other, other_end, _) = ranks.run(dropped, 2, "tp=2")
    assert end == other_end and len(one) == len(other) == 8
    for (shape, mine), (other_shape, its) in zip(one, other, strict=True):
        assert shape == other_shape
        is_of_heads = len(shape) == 4  # a rank's heads, of all positions
        assert shape[2 if is_of_heads else 1] == (12 if is_of_heads else 6)
        assert mine != its


def test_what_is_dropped_follows_from_what_it_is(ranks):
    """Rows by other masks on each rank, whatever the code around has; samples and channels, which have no positions, by equal ones."""
    (one, drawn, _), (other, its_drawn, _) = ranks.run(dropped_otherwise, 2, "tp=2")
    assert drawn == its_drawn
    assert len(one) == len(other) == 3 * 7  # in each block, and between them
    for (kind, mine), (_, its) in zip(one, other, strict=True):
        assert (mine == its) == (kind != "rows")


@pytest.mark.parametrize("run", [dropped_otherwise, pytest.param(dropped, marks=pytest.mark.soak)])
def test_what_a_block_drops_it_drops_again(ranks, run):
    """In its second run, in backward: the parameters are those of a run without one."""
    for (_, drawn, plain), (_, again, found) in zip(
        ranks.run(run, 2, "tp=2"), ranks.run(run, 2, "tp=2", remat="full"), strict=True
    ):
        assert drawn == again[: len(drawn)] and found == plain


@pytest.mark.quick("counts")
@pytest.mark.parametrize("how", ["counts", "batch norm"])
def test_buffers_hold_what_they_do_in_one_process(ranks, how):
    expected = plain_buffers(how)
    for found in ranks.run(buffers_of, 2, how, "tp=2"):
        assert all(torch.allclose(found[name], x, rtol=1e-12, atol=0) for name, x in expected.items())


@pytest.mark.quick("mean for a weight")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(h, marks=[] if h in ("loss of a mean", "hook", "mean for a weight") else [pytest.mark.soak])
        for h in (*WHOLE, *BY_ROWS)
    ],
)
def test_backwards_of_ones_own(ranks, how):
    assert max(ranks.run(every_length, 2, how, "tp=2", [13, 1, 8])) < 1e-12


REFUSED = {
    "late": "own: a parameter of whose gradient each rank along tp gets a part",
    "late, in a graph that is not seen": "with other gradients of a parameter that each holds whole",
    "statistics": "into a module of its own",
    "two lengths": "with sequences of two lengths that differ",
    "compiled dropout": "ranks draw numbers of their own for their positions",
    "no blocks": "no list of blocks",
    "halved": "no argument of its blocks is as long as that of the model",
    "nothing cut": "no layers of its blocks are cut over tp",
    "left out": "blocks that were left out",
    "another drop": "that the example did not drop",
    "another flag": "['leave_out']=True",
}


@pytest.mark.quick(
    "late",
    "late, in a graph that is not seen",
    "statistics",
    "two lengths",
    "left out",
    "another drop",
    "another flag",
    "no blocks",
)
@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused(ranks, case):
    for told in ranks.run(refused, 2, case):
        assert REFUSED[case] in told
