"""Public calls with words that they do not have, or without what they need: an error of ours, before anything is done."""

import pytest

import shardwise as sw
from shardwise.config.keywords import public_call
from shardwise.errors import ConfigError

# Made by Shardwise and not by users, or called in the middle of a step, where torch traces them.
NOT_CHECKED = {
    "Axis", "Layout", "Finding", "Imported", "LoadReport", "MicroBatch", "Recipe", "StateDictType", "StepOutput", "StepState", "World",
    "column_parallel_linear", "default_collate", "linear_cross_entropy", "make_labels", "model_loss", "next_token_loss",
    "pad_collate", "parallel_embedding", "register_tp_plan", "row_parallel_linear", "shift_labels", "tp_copy", "tp_gather",
    "tp_reduce", "tp_scatter", "transform", "verify",
}  # fmt: skip


# By name: a look at ``sw.verify`` would hide the room of that name from the tests of it.
CALLS = [name for name in sw.__all__ if name not in NOT_CHECKED and not name.endswith("Error") and name != "Stopped"]


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_word_is_an_error_with_the_nearest_one(name):
    with pytest.raises(ConfigError, match="no_such_word"):
        getattr(sw, name)(no_such_word=1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sw.init(dp_shard=2), ("init(dp_shard=2)", 'sw.init("dp_shard=2")')),
        (lambda: sw.init(world_size=2), ("world_size=2", "launcher")),
        (lambda: sw.parallelize(list), ("parallelize without world", "sw.init")),
        (lambda: sw.save_weights(None, "x", tokenizer=1), ("tokenizer=1", "save_pretrained")),
        (lambda: sw.evaluate(None), ("evaluate without loader", "sw.evaluate(model, loader")),
        (lambda: sw.evaluate(None, [], criterion=1), ("criterion=1", "loss=")),
        (lambda: sw.window(None, [], accumulation_steps=4), ("accumulation_steps=4", "micro-batches")),
        (lambda: sw.accumulate(None, last=True), ("last=True", "is_last")),
        (lambda: sw.accumulate(None), ("accumulate without is_last",)),
        (lambda: sw.clip_grad_norm_(None, 1.0, foreach=True), ("foreach=True", "leave it out")),
        (lambda: sw.gathered(None, writeback=True), ("writeback=True", "load_full_state_dict")),
        (lambda: sw.load_weights(None, "x", map_location="cpu"), ("map_location", "its part")),
        (lambda: sw.parameter_groups(None, lr=1), ("lr=1", "optimizer")),
        (lambda: sw.CheckpointManager("x", None, []), ("3 positional arguments", "name them")),
        (lambda: sw.Loader([]), ("Loader without world",)),
        (lambda: sw.TaskModel(None, loss_fn=1), ("loss_fn=1", "'loss'")),
        (lambda: sw.describe(), ("describe without model",)),
    ],
)
def test_foreign_and_missing_words_are_answered(call, words):
    with pytest.raises(ConfigError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_type_error_from_within_stays_what_it_is():
    @public_call()
    def call(number, *, text=""):
        return number + text

    assert call("a", text="b") == "ab"
    with pytest.raises(TypeError, match=r"can only concatenate|unsupported operand"):
        call(1)
    with pytest.raises(TypeError, match=r"can only concatenate|unsupported operand"):
        call(1, text="b")


@pytest.mark.parametrize("given", [[], (), iter(()), None, 3])
def test_what_is_no_model_is_named(given):
    with pytest.raises(sw.UsageError, match="in place of a model"):
        sw.window(given, [{}]).__enter__()
