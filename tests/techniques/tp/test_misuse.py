"""What would be wrong without an error is an error."""

import time

import pytest
from techniques.tp.misuses import MISUSES, WORKS, alone, described, drawn_after, results, sizes_seen

import shardwise as sw

SAYS = {
    "state_dict": ("UsageError: embed.weight: state_dict() of a model that is cut over tp", "sw.full_state_dict"),
    "state_dict of a block": ("UsageError", "state_dict() of a model that is cut over tp"),
    "torch's full state dict": ("UsageError", "state_dict() of a model that is cut over tp"),
    "gathered": (
        "UnsupportedError: embed.weight: sw.gathered(model) of a model that is cut over tp",
        "sw.full_state_dict",
    ),
    "load_state_dict": ("UsageError: embed.weight: load_state_dict into a model that is cut over tp", "sw.load_weights"),
    "an optimizer that mixes": ("UnsupportedError: embed.weight: Adafactor on a parameter that is cut over tp", "AdamW"),
    "TrainStep with one": ("UnsupportedError", "Adafactor on a parameter that is cut over tp"),
    "an optimizer of one's own": ("UnsupportedError", "Signs on a parameter that is cut over tp"),
    "a backward without a window": ("UsageError", "a backward of a sharded model outside of a window", "with sw.window(model, batches)"),
    "other data": ("RankError: ranks 0 and 1 with other micro-batches at window 2", 'rank=world.axis("dp").rank'),
    "an evaluation of other data": ("RankError: ranks 0 and 1 with other inputs in a forward (input_ids)", "DistributedSampler"),
    "a loop over other data": ("RankError: ranks 0 and 1 with other inputs in a forward (0)",),
    "sampling without a seed": ("RankError: ranks 0 and 1 with other inputs in a forward (", "input_ids", "torch.manual_seed with one seed"),
    "torch's clipping": ("UsageError: embed.weight: linalg_vector_norm of the gradient of a parameter that is cut over tp", "sw.clip_grad_norm_(model, max_norm)"),
    "torch's norm": ("UsageError: embed.weight: linalg_vector_norm of the gradient of a parameter that is cut over tp",),
    "another plan": ("RankError: ", "plan", "colwise", "replicate"),
    "a hook": ("UnsupportedError: blocks.0.mlp.up.weight: a hook on a parameter that is cut over the ranks",),
    "a hook on a norm of each head": (
        "UnsupportedError: blocks.0.attention.norm.weight: a hook on a parameter whose gradients on the ranks along tp are parts of a sum",
    ),
    "a hook on it, later": (
        "UsageError: blocks.0.attention.norm.weight: a hook was put on a parameter after the module was sharded",
    ),
    "a token that is none": ("IndexError: token 19 of a vocabulary of 19",),
    "a mask that the example did not have": (
        "UsageError: a forward with attention_mask, which the example did not have", "parallelize(..., example=batch)"
    ),
    "no example": ("UsageError: Plain.forward(x, y) without example=", "example={\"x\": torch.randn(16, "),
    "an example that does not fit": ("UsageError: example={x, y} for Plain", "the model does not run with it on meta"),
    "a model that does not run": ("UnsupportedError: a run of Fails without its linear layers", "head.weight takes 3 inputs", "misuses.py, line", "example= of parallelize"),
    "complex parameters": ("UnsupportedError: tp=2 of a Complex", "leave tp out: the search for what can be cut takes real sums"),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(ranks):
    return ranks.run(results, 2, "misuses")


@pytest.mark.parametrize("case", MISUSES)
def test_refused_by_name(found, case):
    for of_rank in found:
        for words in SAYS[case]:
            assert words in of_rank[case]


def test_what_is_right_works(ranks):
    for of_rank in ranks.run(results, 2, "works"):
        assert of_rank == dict.fromkeys(WORKS, "no error")


def test_rank_0_searches_for_all_on_a_part_of_the_example(ranks):
    seen, of_other = ranks.run(sizes_seen, 2)
    assert (2, 64) in seen and seen <= {(2, 64), (8, 1000)}  # the whole one shows the order of blocks, on every rank
    assert of_other == {(8, 1000)}


def test_the_rank_that_searches_draws_the_same_afterwards(ranks):
    (without, with_tp), (_, on_other) = ranks.run(drawn_after, 2)
    assert with_tp == on_other == without


def test_a_model_that_cannot_be_cut_is_warned_of(ranks):
    (text, told), (_, of_other) = ranks.run(described, 2, "tp=2", "narrow")
    assert len(told) == 1 and not of_other
    assert "layout: tp=2 has no effect on this model: every rank of it does the same. No layer can be cut: " in told[0]
    assert "up.weight: its 3 inputs are not divisible by 2 (they are by 3)" in told[0]
    assert "down.weight: whole on every rank of tp: its 9 inputs are not divisible by 2 (they are by 3, 9)" in text
    assert ranks.run(described, 1, "dp_shard=1", "narrow")[0][1] == []


def test_a_model_of_which_little_can_be_cut_is_warned_of(ranks):
    (_, told), (_, of_other) = ranks.run(described, 2, "tp=2", "little")
    assert len(told) == 1 and not of_other
    assert "layout: tp=2 cuts 12% of the model; every rank has the rest whole, and computes all of it" in told[0]


@pytest.mark.parametrize(("per_node", "size", "layout"), [(1, 2, "tp=2"), (2, 2, "tp=2"), (2, 4, "dp_shard=2,tp=2")])
def test_ranks_of_tp_on_several_nodes_are_warned_of(ranks, per_node, size, layout):
    told = ranks.run(described, size, layout, "named", per_node)[0][1]
    warns = ["layout: tp=2 spans nodes of 1 rank:" in text for text in told]
    assert warns == ([True] if per_node == 1 else [])


def test_describe_says_what_is_cut_and_why_the_rest_is_not(ranks):
    text, told = ranks.run(described, 2, "tp=2", "named")[0]
    assert told == []
    assert "tensor parallelism: 15 of 37 parameters, 88% of their elements, are cut over tp=2" in text
    assert "tp: 4 modules (blocks.0.attention.projections.0, ..., blocks.1.mlp.up): column-parallel" in text
    assert (
        "tp: 1 module (head): vocabulary-parallel head: each rank computes the logits of some tokens, and they are gathered\n"
        in text
    )


@pytest.mark.parametrize("then", ["a barrier", pytest.param("the end", marks=pytest.mark.soak)])
def test_a_forward_on_one_rank_alone_is_told_so(ranks, then):
    """As in: if world.is_main: print(model.generate(...)). It hung until the timeout."""
    start = time.monotonic()
    with pytest.raises(sw.RankError) as caught:
        ranks.run(alone, 2, then, timeout_s=60)
    assert "ranks 0, 1 wait for each other in different collectives" in str(caught.value)
    assert ("rank 1 waits at a barrier" if then == "a barrier" else "has left") in str(caught.value)
    assert "generate among them" in str(caught.value)
    assert time.monotonic() - start < 50  # of a timeout of 100
