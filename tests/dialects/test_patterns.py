"""A row for all keys of a section that drops them: only where no key of it could change a training run, each with its reason."""

import pytest

from shardwise.dialects.table import load, names

A_LOG = "it says what is logged"
A_START = "it says how ranks are started"
ELSEWHERE = "what counts is said by keys that have rows of their own"
UNREAD = "nothing there reads it in a training run"
BUILT_IN = "how a thing is computed or stored, not which"
REFUSED_WITH = "it counts only with another key, which is refused"

DROPPED = {
    "accelerate": {"mpirun_config.*": A_START},
    "deepspeed": {
        **dict.fromkeys(
            ("flops_profiler.*", "comet.*", "comms_logger.*", "monitor_config.*", "timers.*"),
            A_LOG,
        ),
        **dict.fromkeys(("aio.*",), REFUSED_WITH),
        **dict.fromkeys(("zero_optimization.leaf_module.*", "nebula.*", "datastates_ckpt.*"), BUILT_IN),
    },
    "ml": {"logger.*": A_LOG, "launcher.slurm.*": A_START, "launcher.torchrun.*": A_START},
    "nemo": {
        **dict.fromkeys(("mlflow.*", "comet.*", "benchmark.*"), A_LOG),
        **dict.fromkeys(("slurm.*", "skypilot.*"), A_START),
        **dict.fromkeys(("_validation_dataloader.*", "_validation_dataset.*", "ci.*", "tool_call_eval.*"), UNREAD),
        **dict.fromkeys(
            ("distributed.pipeline.*", "distributed.moe.*", "autopipeline.*", "model.backend.mok.*"), REFUSED_WITH
        ),
        **dict.fromkeys(("prewarm.*", "validation_dataloader.*"), BUILT_IN),
    },
    "optimus": {
        **dict.fromkeys(("args.*", "hydra.*", "data.scratch.*"), ELSEWHERE),
        **dict.fromkeys(("metrics.*", "loggers.*", "logger_manager.*"), A_LOG),
        **dict.fromkeys(("evaluator.*", "checkpoint_manager.*"), BUILT_IN),
    },
    "oumi": {
        "data.test.*": UNREAD,
        **dict.fromkeys(
            ("training.grpo.*", "training.gkd.*", "training.gold.*", "training.verl_config_overrides.*"), REFUSED_WITH
        ),
        **dict.fromkeys(("training.profiler.*", "training.telemetry.*"), A_LOG),
        "deepspeed.activation_checkpointing.*": UNREAD,
    },
    "torchtitan": {
        **dict.fromkeys(("quantize.*", "float8.*", "mx.*"), REFUSED_WITH),
        "memory_estimation.*": A_LOG,
    },
    "torchtune": {"tensor_parallel_plan.model.*": ELSEWHERE},
}


@pytest.mark.parametrize("name", [name for name in names() if "extends" not in load(name).head])
def test_a_pattern_drops_keys_only_where_none_has_a_meaning(name):
    rows = load(name).rows
    found = [key for key, row in rows.items() if key.endswith(".*") and row.verdicts[""] == "dropped"]
    switched = {key for key in found if _is_off_unless_refused(rows, key)}
    assert {*found} - switched == {*DROPPED.get(name, {})}
    for key in found:
        beside = [other for other in rows if other.startswith(key[:-1]) and other != key]
        with_meaning = [other for other in beside if any(rows[other].actions.values())]
        assert with_meaning == [], f"{key} would hide a misspelt one of them"


def _is_off_unless_refused(rows, pattern):
    switch = rows.get(pattern[:-1] + "enabled")
    return switch is not None and any(v == "refused" or v.startswith("needs ") for v in switch.verdicts.values())


WEAK = ("nothing depends on it here", "how it is computed or stored there, not what is computed", "it has no effect")


@pytest.mark.parametrize("name", names())
def test_a_reason_says_what_is_so_here(name):
    weak = [key for key, row in load(name).rows.items() if {*row.says.values()} & {*WEAK}]
    assert weak == []


@pytest.mark.parametrize("name", names())
def test_what_has_no_effect_without_another_key_waits_for_one_that_is_refused(name):
    """ "it has no effect without X" is right only while X is refused: adapters, 4 bits and context parallelism are not."""
    possible = ("use_peft", "load_in_4bit", "q_lora", "context parallelism", "sequence parallelism", "adapters")
    wrong = [
        key
        for key, row in load(name).rows.items()
        for text in row.says.values()
        if text.startswith("it has no effect without") and any(word in text for word in possible)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", names())
def test_a_text_that_no_word_of_a_row_means_is_not_passed_over(name):
    """Of a key that takes any text, and of which only some mean something: the others have a verdict of their own."""
    wrong = []
    for key, row in load(name).rows.items():
        is_free = {"str", "any"} & {*row.takes}
        has_words = any(actions for word, actions in row.actions.items() if word)
        if is_free and has_words and not row.actions.get("") and not row.within and "*" not in row.verdicts:
            wrong += [] if "*" in row.actions else [key]
    assert wrong == []
