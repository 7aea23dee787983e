"""Models whose sequences are cut over cp train as in one process: loss, norm, every gradient, every update; under each engine."""

import functools
import re

import models
import pytest
import torch
from techniques.cp.on_ranks import (
    InPlace,
    attended,
    backward_outside,
    dropped,
    every_length,
    masks_between,
    own_loop,
    refused,
    train_and_save,
    two_outputs,
    whole_answer,
    with_other_data,
)
from techniques.cp.sequences import PROVED, REFUSED, build, count, loss_of, observe, windows

import shardwise as sw
from shardwise.techniques.row_search import Search
from shardwise.techniques.sequences import sequences_in

LAYOUTS = {"cp=2": 2, "cp=4": 4, "dp_shard=2,cp=2": 4, "dp_replicate=2,cp=2": 4, "cp=2,tp=2": 4}


class Build:
    """Builds a model of :mod:`techniques.cp.sequences` on a rank."""

    def __init__(self, name):
        self.name = name

    def __call__(self):
        return build(self.name)


def compared(ranks, name, layout, micro=4, **options):
    steps = windows(name, micro=micro)
    parallel = sw.ContextParallel(
        method=options.pop("method", "gather"), fallback="gather" if name in REFUSED else "refuse"
    )
    return sw.verify(
        Build(name),
        layout,
        batches=steps,
        loss=loss_of,
        count=count,
        run=ranks.run,
        max_grad_norm=0.3,
        optimizer="adamw",
        context_parallel=parallel,
        **options,
    )


QUICK = {
    ("packed", "dp_shard=2,cp=2"), ("rotary", "cp=4"), ("plain", "cp=2"), ("pooled", "dp_replicate=2,cp=2"), ("grouped", "cp=2,tp=2"),
    ("manual", "cp=2"), ("kernel", "cp=2"), ("rows of a table", "cp=2"), ("others' positions", "cp=2"), ("by branches", "cp=2"),
    ("token shift", "cp=2"),
}  # fmt: skip


@pytest.mark.quick(
    "plain-cp=2",
    "by branches-cp=2",
    "packed-dp_shard=2,cp=2",
    "rotary-cp=4",
    "pooled-dp_replicate=2,cp=2",
    "token shift-cp=2",
)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in QUICK else [pytest.mark.soak])
        for name in (*PROVED, *REFUSED)
        for layout in LAYOUTS
    ],
)
def test_models(ranks, name, layout):
    report = compared(ranks, name, layout)
    assert report.engine == "fsdp2"


CELLS = [
    ("plain", "cp=2", {"method": "ulysses"}, False),
    ("grouped", "cp=2,tp=1", {"method": "ulysses"}, True),
    ("packed", "dp_shard=2,cp=2", {"method": "ulysses"}, False),
    ("pooled", "cp=2", {"method": "ulysses"}, True),
    ("plain", "cp=4", {"method": "auto"}, True),
    ("rotary", "cp=2", {"remat": "full"}, False),
    ("rows of a table", "dp_shard=2,cp=2", {"remat": "selective"}, True),
    ("manual", "cp=2", {"remat": "full"}, True),
    ("token shift", "cp=2", {"remat": "full"}, True),
    ("plain", "cp=2", {"sharding": sw.Sharding(engine="ddp")}, False),
    ("pooled", "dp_replicate=2,cp=2", {"sharding": sw.Sharding(engine="ddp")}, True),
    ("packed", "cp=2,tp=2", {"remat": "full"}, True),
    ("packed", "dp_shard=2,cp=2", {"sharding": sw.Sharding(offload=True)}, True),
    ("plain", "cp=4", {"sharding": sw.Sharding(reshard_after_forward=2)}, True),
    ("plain", "dp_shard=2,cp=2", {"sharding": sw.Sharding(sync_every_microbatch=True)}, True),
    ("plain", "dp_replicate=2,dp_shard=2,cp=2", {}, True),
    ("packed", "dp_shard=2,cp=2,tp=2", {}, True),
    ("packed", "cp=2", {"lora": sw.LoRA(rank=4, dora=True), "quantize": "nf4"}, True),
    ("packed", "cp=2,tp=2", {"lora": sw.LoRA(rank=4), "remat": "full"}, True),
]


@pytest.mark.quick("packed-dp_shard=2,cp=2-method", "rotary-cp=2-remat")
@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        pytest.param(
            name, layout, options, id=f"{name}-{layout}-{'-'.join(options)}", marks=[pytest.mark.soak] if slow else []
        )
        for name, layout, options, slow in CELLS
    ],
)
def test_options(ranks, name, layout, options):
    compared(ranks, name, layout.replace(",tp=1", ""), **options)


FAMILIES = [
    "llama",
    "gpt2",
    "qwen3",
    "mixtral",
    "gemma3",
    "bert",
    "deepseek-v3",
    "nanogpt",
    "torch attention: encoder",
    "opt",
    "phi",
]


@pytest.mark.quick("gpt2-cp=2")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name, layout, marks=[] if (name, layout) in {("llama", "cp=2"), ("gpt2", "cp=2")} else [pytest.mark.soak]
        )
        for name in FAMILIES
        if name in models.MODELS
        for layout in ("cp=2", "dp_shard=2,cp=2", "cp=2,tp=2")
    ],
)
def test_families(ranks, name, layout):
    """With blocks as units, as those of models of real sizes are: what gathers them runs within the code of the model."""
    model = models.get(name)
    sw.verify(
        model.build,
        layout,
        batches=model.windows(2, 4 if "dp" in layout else 2),
        loss=model.loss,
        count=model.count,
        forward=model.forward,
        run=ranks.run,
        sharding=sw.Sharding(min_unit_bytes=0),
    )


class Llama:
    """A small Llama, or Gemma 3 with windows, in one of transformers' implementations of attention."""

    def __init__(self, kind, attention):
        self.kind, self.attention = kind, attention

    def __call__(self):
        import transformers

        sizes = {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "use_cache": False}
        config = transformers.AutoConfig.for_model(self.kind, **sizes)
        if self.kind == "gemma3_text":
            config.sliding_window, config.layer_types = 5, ["sliding_attention", "full_attention"]
        config._attn_implementation = self.attention
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).double()


@pytest.mark.quick("False-gemma3_text-sdpa-packed-cp=2")
@pytest.mark.parametrize(
    ("kind", "attention", "name", "layout"),
    [
        ("llama", "sdpa", "packed", "cp=2"),
        ("gemma3_text", "sdpa", "packed", "cp=2"),
        pytest.param("llama", "eager", "plain", "cp=2", marks=pytest.mark.soak),
        pytest.param("gemma3_text", "eager", "plain", "cp=4", marks=pytest.mark.soak),
        pytest.param("llama", "sdpa", "packed", "dp_shard=2,cp=2", marks=pytest.mark.soak),
        pytest.param("llama", "sdpa", "packed", "cp=2,tp=2", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_masks_of_transformers(ranks, kind, attention, name, layout, fused):
    """Documents, and windows: masks are made for this rank's rows alone."""
    options = {"fused": True} if fused else {}
    sw.verify(Llama(kind, attention), layout, batches=windows(name), run=ranks.run, **options)


def test_masks_that_the_example_did_not_need(ranks):
    """Its first micro-batch has one document in each sample, and blocks get no mask."""
    steps = windows("packed")
    steps[0][0]["position_ids"] = torch.arange(steps[0][0]["input_ids"].shape[1]).expand(2, -1)
    sw.verify(Llama("llama", "sdpa"), "cp=2", batches=steps, run=ranks.run)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_masks_of_transformers_are_made_for_rows_alone(kind):
    inputs = {key: value for key, value in windows("packed")[0][0].items() if key != "labels"}
    search = Search(Llama(kind, "sdpa")(), next(sequences_in(((), inputs))), 2, "zigzag")
    assert search.run().masks_of_rows


def test_an_argument_that_is_changed_in_place_between_blocks(ranks):
    sw.verify(InPlace, "cp=2", batches=windows("plain"), loss=loss_of, count=count, run=ranks.run)


def test_a_fused_loss(ranks):
    sw.verify(Build("plain"), "cp=2", batches=windows("plain"), run=ranks.run, fused="head")


@pytest.mark.parametrize(
    "name", ["rotary", pytest.param("plain", marks=pytest.mark.soak), pytest.param("pooled", marks=pytest.mark.soak)]
)
def test_compiled_blocks(ranks, name):
    steps = [[given for given in micro if given["input_ids"].shape[1] == 24] * 2 for micro in windows(name)]
    sw.verify(
        Build(name),
        "cp=2",
        batches=[micro for micro in steps if micro] * 2,
        loss=loss_of,
        count=count,
        run=functools.partial(ranks.run, timeout_s=240),  # compilers take long on a busy machine
        compile=sw.Compile(backend="aot_eager", fullgraph=True),
    )


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("name", ["plain", pytest.param("rotary", marks=pytest.mark.soak)])
def test_every_length(ranks, name, method):
    lengths = range(1, 41) if method == "gather" else range(1, 41, 3)
    if name == "plain":  # every rest of a division by the chunks; all lengths in soak
        lengths = [length for length in lengths if length <= 9 or length in (16, 25, 31, 40)]
    assert max(ranks.run(every_length, 4, name, "cp=4", lengths, context_parallel=method)) <= 1e-12


@pytest.mark.quick("others' positions")
@pytest.mark.parametrize("name", ["others' positions", "rotary", "rows of a table", "manual"])
def test_what_other_modules_and_hooks_call_is_no_call_of_a_modules_own_code(ranks, name):
    """Positions are known by the numbers of calls: a hook that was put on a layer later, or a module that is no child, moved them."""
    sharding = sw.Sharding(units=("Linear",))  # layers with hooks are units of their own
    assert max(ranks.run(every_length, 2, name, "cp=2", [8, 13, 9], observer=observe, sharding=sharding)) <= 1e-12


def of_another_way(layout):
    with pytest.raises(sw.UnsupportedError) as caught:
        every_length("every third forward", layout, [8, 13, 9])
    return str(caught.value)


def test_positions_that_are_made_where_the_example_made_none_are_refused(ranks):
    for told in ranks.run(of_another_way, 2, "cp=2"):
        assert re.match(
            r"a call of arange of [45] positions, which the example did not make at this place of the", told
        )


def test_what_stands_for_no_position_is_not_zero(ranks):
    assert max(ranks.run(every_length, 2, "no eps", "cp=2", [1], context_parallel="ulysses")) <= 1e-12


@pytest.mark.soak
@pytest.mark.parametrize("name", ["manual", "token shift", "pooled", "packed"])
def test_every_length_of_others(ranks, name):
    option = sw.ContextParallel(fallback="gather")
    lengths = range(2 if name == "packed" else 1, 41)
    assert max(ranks.run(every_length, 4, name, "cp=4", lengths, context_parallel=option)) <= 1e-12


@pytest.mark.quick("window")
@pytest.mark.parametrize("kind", ["window", "accumulate", "joined"])
def test_loops_of_ones_own(ranks, kind):
    assert max(ranks.run(own_loop, 4, "rotary", "dp_replicate=2,cp=2", kind)) <= 1e-12


def test_a_block_runs_again_in_a_loop_of_ones_own(ranks):
    """Its calls are known by their places in its code; around its second run stands the loop, and no call of a module."""
    assert max(ranks.run(own_loop, 2, "plain", "cp=2", "window", in_block=True, remat="full")) <= 1e-12


@pytest.mark.parametrize("name", ["packed", pytest.param("pooled", marks=pytest.mark.soak)])
def test_answers_are_whole_and_evaluations_are_cut(ranks, name):
    for error, of_loss, found, expected in ranks.run(whole_answer, 2, name, "cp=2"):
        assert error <= 1e-12 and of_loss <= 1e-12 and found == expected


def test_dropout_is_equal_before_the_cut_and_other_on_rows(ranks):
    (one, losses, _), (other, its_losses, _) = ranks.run(dropped, 2, "cp=2")
    again = ranks.run(dropped, 2, "cp=2", remat="full")
    assert losses == its_losses and [run[1] for run in again] == [losses] * 2
    assert (
        len(one) == len(other) < 2 * 2 * 5
    )  # steps, micro-batches; before, in and behind the blocks, of which some were left out; and channels
    for (shape, mask), (_, its_mask) in zip(one, other, strict=True):
        assert (mask == its_mask) == (shape[1] in (16, 15, 1))
    on_rows = [str(mask) for found in (one, other) for shape, mask in found if shape[1] in (8, 7)]
    assert len(on_rows) == len(set(on_rows)) > 2 * 2 * 2  # no rank, step or place repeats another's
    for (found, *_), plain in zip(again, (one, other), strict=True):
        assert {str(mask) for _, mask in found} == {str(mask) for _, mask in plain}


@pytest.mark.parametrize(("kind", "num"), [("memory", 8), ("latents", 5)])
def test_dropout_of_attention_follows_from_its_queries(ranks, kind, num):
    """A rank's positions, also in the code of the model itself, are dropped by numbers of the rank; latents, which all have, by equal ones."""
    one, other = ranks.run(attended, 2, kind, "cp=2")
    assert len(one) == len(other) == 2
    for (size, mine), (its_size, its) in zip(one, other, strict=True):
        assert size == its_size == num
        assert (mine == its) == (kind == "latents")


def test_checkpoints_resume_under_other_layouts(ranks, tmp_path):
    whole = ranks.run(train_and_save, 1, "dp_shard=1", tmp_path / "plain", 3)[0][1]
    first = ranks.run(train_and_save, 4, "dp_shard=2,cp=2", tmp_path / "cut", 1)[0]
    second = ranks.run(train_and_save, 2, "dp_shard=2", tmp_path / "cut", 1)[0]
    third = ranks.run(train_and_save, 4, "cp=4", tmp_path / "cut", 1)[0]
    losses = [*first[1], *second[1], *third[1]]
    assert losses == pytest.approx(whole, rel=1e-12)
    assert second[0] and third[0]  # they resumed


@pytest.mark.parametrize("how", ["train", "evaluate"])
def test_ranks_with_other_samples_are_named(ranks, how):
    for told in ranks.run(with_other_data, 2, "cp=2", how):
        assert "ranks 0 and 1" in told


def test_ranks_with_equal_samples_train(ranks):
    assert ranks.run(with_other_data, 2, "cp=2", "equal") == ["nothing was raised"] * 2


@pytest.mark.quick(
    "more arguments-words0",
    "own loop of a whole output-words2",
    "join of another tensor-words3",
    "a teacher-words5",
    "a mean over each sample-words6",
    "a pair of answers-words9",
    "an entry of its own-words10",
    "evaluated-words11",
    "a sequence of another length-words12",
    "checkpoint-words13",
    "labels-words14",
    "another flag-words15",
    "a prompt that is trained-words16",
    "an entry of another length-words17",
    "cut before a forward-words19",
    "compiled drops of samples-words20",
)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("more arguments", ["position_ids", "which the example did not have", "example=batch"]),
        ("forward in the loss", ["a forward with gradients in the loss", "forward= of sw.TrainStep"]),
        ("own loop of a whole output", ["a training loop of your own", "sw.TrainStep"]),
        ("join of another tensor", ["join_sequence of a tensor (2, 11)", "this rank has 6 positions"]),
        (
            "join of an older forward",
            ["join_sequence of a tensor (2, ", "of the last forward this rank has 6 positions"],
        ),
        ("a teacher", ["a tensor of 6 positions and one of 12", "sw.cut_sequence(model, teacher_logits)"]),
        ("a mean over each sample", ["no sum over positions", "'loss'", "sw.join_sequence"]),
        ("a shift in the loss", ["no sum over positions", "sw.shift_labels"]),
        ("a pooled output", ["no sum over positions"]),
        ("a pair of answers", ["no sum over positions"]),
        ("an entry of its own", ["no sum over positions", "'spread'"]),
        ("evaluated", ["no sum over positions"]),
        ("a sequence of another length", ["others.0", "[0][0] of 6 positions, for sequences of 12"]),
        ("checkpoint", ["checkpoints a part of its forward itself", 'remat="full"']),
        ("labels", ["a forward with labels, under cp=2", "loss=sw.next_token_loss"]),
        ("another flag", ["['scale']=2.0", "in example="]),
        ("a prompt that is trained", ["a forward with input_ids of which a gradient is taken", "a tensor (2, 4, 32)"]),
        ("an entry of another length", ["entry 'weights' is not as long", "[samples, 1, size]"]),
        ("an entry of another length, in a loop", ["entry 'weights' is not as long"]),
        ("cut before a forward", ["cut_sequence of a micro-batch before a forward", "call the model first"]),
        ("compiled drops of samples", ["blocks.1.drop", "each rank would drop other ones", "Compile(targets=...)"]),
    ],
)
def test_what_is_refused(ranks, case, words):
    for told in ranks.run(refused, 2, case):
        assert all(word in told for word in words), told


def test_two_outputs_and_an_entry_of_samples(ranks):
    assert max(ranks.run(two_outputs, 2, "cp=2")) < 1e-12


def test_no_mask_of_a_causal_kernel_is_kept_for_backward(ranks):
    """They would grow with the square of the length, in each block; one process has none."""
    assert ranks.run(masks_between, 2, "cp=2") == [[], []]


def test_a_backward_outside_of_a_window_is_refused(ranks):
    for told in ranks.run(backward_outside, 2):
        assert "sw.window" in told
