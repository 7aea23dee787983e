"""The sections of a run: the demo's defaults, and checks over several keys."""

import msgspec
import pytest

from shardwise.config.check import doc_of
from shardwise.config.record import default_of, hints_of
from shardwise.errors import ConfigError
from shardwise.run.config import Data, Model, Optim, RunConfig, Schedule, Train


def test_defaults_are_the_demo():
    config = RunConfig()
    assert (config.train.steps, config.optim.lr) == (500, 3e-3)
    assert config.data.seq_len * config.data.global_batch == 2048
    assert config.schedule.warmup_steps == 50


@pytest.mark.parametrize(("steps", "warmup"), [(500, 50), (40, 4), (5, 0), (100_000, 50)])
def test_warmup_is_a_tenth_of_the_run_at_most_50(steps, warmup):
    assert RunConfig(train=Train(steps=steps)).schedule.warmup_steps == warmup


def records(cls):
    yield cls
    for key in hints_of(cls):
        default = default_of(cls, key)
        if isinstance(default, msgspec.Struct):
            yield from records(type(default))


@pytest.mark.parametrize("cls", list(records(RunConfig)), ids=lambda cls: cls.__name__)
def test_every_key_is_described(cls):
    assert [key for key, hint in hints_of(cls).items() if not doc_of(hint)] == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Data(global_batch=10, micro_batch=4), "use micro_batch=5, or global_batch=12"),
        (lambda: Data(global_batch=4, micro_batch=8), "use micro_batch=4, or global_batch=8"),
        (lambda: Data(dtype="int32", path="a.npy"), "only a .bin file"),
        (lambda: Data(val_fraction=1.0), "expected a number >= 0 and < 1"),
        (lambda: Optim(name="adam"), "did you mean 'adamw'"),
        (lambda: Optim(name="sgd", betas=(0.9, 0.99)), "sgd has no betas"),
        (lambda: Optim(momentum=0.5), "adamw has no momentum"),
        (lambda: Optim(lr=0), "expected a number > 0"),
        (lambda: Optim(lr=float("nan")), "not a finite number"),
        (lambda: Optim(lr=float("inf")), "not a finite number"),
        (lambda: Schedule(name="constant", min_lr_ratio=0.5), "a constant rate has no floor"),
        (lambda: Train(steps=0), "expected a whole number >= 1"),
        (lambda: Train(seed=-1), "expected a whole number >= 0"),
        (lambda: Model(build="mymodel"), "does not name a function"),
        (lambda: RunConfig(train=Train(steps=10), schedule=Schedule(warmup_steps=11)), "warmup_steps=11"),
    ],
)
def test_values_that_cannot_work_are_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


def test_free_arguments_are_not_shared_between_records():
    first, second = Model(), Model()
    first.args["dim"] = 3
    assert second.args == {}


def test_another_word_for_a_key_is_no_key_and_means_one():
    found = [(cls, *pair) for cls in records(RunConfig) for pair in cls.also_called.items()]
    assert found
    for cls, word, key in found:
        assert word not in hints_of(cls) and key in hints_of(cls)
