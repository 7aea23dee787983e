"""The parts of the main job: data, model, optimizer and schedule as a config names them."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run.tuned import rates
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.run.build import (
    build_model,
    build_plain,
    check_takes_tokens,
)
from shardwise.run.config import Data, Log, Model, Optim, Parallel, RunConfig, Schedule, Train
from shardwise.run.datasets import open_data, prompt_of
from shardwise.run.job import train
from shardwise.run.optim import make_optimizer, make_scheduler, put_on_schedule
from shardwise.run.reference import ReferenceModel

SMALL = {"dim": 32, "num_layers": 1, "ffn": 48}


def test_no_path_is_the_help_text_cut_in_two():
    corpus = open_data(Data(val_fraction=0.25), vocab=256)
    assert corpus.name == "Python's help topics"
    assert 2.8 < len(corpus.train) / len(corpus.val) < 3.2
    assert corpus.text.startswith(bytes(corpus.train.tokens[:50]).decode())


OWN_DATA = """
from torch.utils.data import IterableDataset

class Lines(IterableDataset):
    def __iter__(self):
        return iter([{"x": i} for i in range(5)])

class Going(Lines):
    given = 0
    def __iter__(self):
        while self.given < 5:
            self.given += 1
            yield {"x": self.given - 1}
    def state_dict(self):
        return {"given": self.given}
    def load_state_dict(self, state):
        self.given = state["given"]

def lines(): return Lines()
def going(): return Going()
def nothing_to_validate(): return [{"x": 1}], []
def nothing(): return []
def pair():
    import torch
    return torch.arange(6).view(3, 2), torch.arange(4).view(2, 2)

class NoLength:
    def __getitem__(self, i):
        return {"x": i}

def no_length(): return NoLength()
def forgotten(): [{"x": 1}]
def splits(): return {"train": [{"x": 1}], "test": [{"x": 1}]}
def a_class(): return NoLength
def by_number(): return {0: {"x": 1}, 1: {"x": 2}}
"""


@pytest.mark.parametrize("name", ["lines", "going"])
def test_a_look_at_a_stream_takes_nothing_of_it(tmp_path, name):
    (tmp_path / "own.py").write_text(OWN_DATA)
    corpus = open_data(Data(build=f"{tmp_path}/own.py:{name}"), vocab=None)
    assert corpus.val is None and corpus.example()["x"].tolist() == [0, 1]
    assert [sample["x"] for sample in corpus.train] == [0, 1, 2, 3, 4]


def test_a_pair_of_tensors_is_two_datasets_of_rows(tmp_path):
    (tmp_path / "own.py").write_text(OWN_DATA)
    corpus = open_data(Data(build=f"{tmp_path}/own.py:pair"), vocab=None)
    assert corpus.records is None and corpus.num_samples == (3, 2)


@pytest.mark.parametrize(("name", "what"), [("nothing", "to train on"), ("nothing_to_validate", "to validate")])
def test_no_samples_are_told_before_training(tmp_path, name, what):
    (tmp_path / "own.py").write_text(OWN_DATA)
    with pytest.raises(ConfigError, match=f"a dataset of 0 samples {what}"):
        open_data(Data(build=f"{tmp_path}/own.py:{name}"), vocab=None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_length", r"NoLength, and a dataset has len\(\) and \[i\], or is iterable"),
        ("forgotten", r"(?s)it returned None.*end the function with a return"),
        ("a_class", r"(?s)the class NoLength.*call it: NoLength\(...\)"),
        ("splits", r"(?s)a dict with train, test.*splits\['train'\]"),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path, name, told):
    (tmp_path / "own.py").write_text(OWN_DATA)
    with pytest.raises(ConfigError, match=told):
        open_data(Data(build=f"{tmp_path}/own.py:{name}"), vocab=None)
    assert len(open_data(Data(build=f"{tmp_path}/own.py:by_number", val_fraction=0.0), vocab=None).train) == 2


def test_what_one_device_can_do_says_nothing_for_own_data(tmp_path):
    (tmp_path / "own.py").write_text(OWN_DATA)
    with pytest.raises(ConfigError, match=r"log.peak_tflops=1 with data.build"):
        RunConfig(
            data=Data(build=f"{tmp_path}/own.py:lines"), model=Model(build="a.b:c"), log=Log(peak_tflops=1.0)
        ).check()


def test_text_files_are_bytes_and_arrays_have_no_text(tmp_path):
    (tmp_path / "t.md").write_text("one two three " * 100)
    assert open_data(Data(path=str(tmp_path / "t.md"), seq_len=16), vocab=256).text.startswith("one two")
    np.save(tmp_path / "t.npy", np.arange(1000) % 300)
    np.arange(1000, dtype=np.uint32).tofile(tmp_path / "t.bin")
    assert open_data(Data(path=str(tmp_path / "t.npy"), seq_len=16), vocab=None).text is None
    raw = open_data(Data(path=str(tmp_path / "t.bin"), dtype="uint32", seq_len=16), vocab=1000)
    assert raw.train.tokens.dtype == np.uint32 and raw.text is None
    with pytest.raises(ConfigError, match="the vocabulary has 256 tokens"):
        open_data(Data(path=str(tmp_path / "t.npy"), seq_len=16), vocab=256)


def test_without_validation_everything_is_trained_on():
    corpus = open_data(Data(val_fraction=0), vocab=256)
    assert corpus.val is None and len(corpus.train) > 3500


def test_the_prompt_is_a_sentence_of_text_that_was_not_trained_on():
    corpus = open_data(Data(), vocab=256)
    prompt = prompt_of(corpus)
    assert prompt.endswith(" ") and len(prompt.split()) == 8 and prompt[0].isupper()
    held_out = " ".join(bytes(corpus.val.tokens).decode(errors="ignore").split())
    assert prompt.strip() in held_out


def test_the_prompt_of_a_text_without_sentences(tmp_path):
    (tmp_path / "t.txt").write_text("a1 b2 c3 " * 100)
    assert prompt_of(open_data(Data(path=str(tmp_path / "t.txt"), seq_len=16), vocab=256)).startswith(
        ("b2", "c3", "a1")
    )


def test_no_model_is_the_reference_model_long_enough_for_the_data():
    model = build_plain(RunConfig(data=Data(seq_len=300), model=Model(args=SMALL)))
    assert isinstance(model, ReferenceModel)
    assert model.config.max_seq == 300 and model.config.dim == 32


def test_a_model_of_the_users(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n"
        "def build(width=3): return nn.Linear(width, width)\n"
        "def broken(): return None + 1\n"
        "def nothing(): return 'a model'\n"
    )

    def build(name, **args):
        return build_plain(RunConfig(model=Model(build=f"{file}:{name}", args=args)))

    assert isinstance(build("build", width=5), nn.Linear)
    with pytest.raises(
        ConfigError, match=r"model.args=\{'widht': 5\} .*\n  why: it cannot be called with them"
    ) as told:
        build("build", widht=5)
    assert told.value.fix == "did you mean 'width'? it takes: width"
    with pytest.raises(ConfigError, match="write 'width: 5'"):
        build("build", **{"width:5": None})
    with pytest.raises(TypeError, match="NoneType"):  # a fault of the function itself is not the config's
        build("broken")
    with pytest.raises(ConfigError, match="it returned str, and training needs"):
        build("nothing")


MODELS = """
import torch
from torch import nn

class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))

def mlp():
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, left, right):
        return self.linear(left - right)

class OneHot(nn.Module):  # no embedding, and a dropout that draws
    def __init__(self):
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(256, 256)
    def forward(self, tokens):
        return self.linear(self.drop(nn.functional.one_hot(tokens, 256).float()))
"""


@pytest.mark.parametrize(
    "name, told",
    [
        ("CNN", "CNN has no embedding, and its forward of tokens raised RuntimeError: "),
        ("mlp", "Sequential has no embedding, and its forward of tokens raised RuntimeError: "),
        ("Pairs", "Pairs has no embedding, and its forward of tokens takes no single tensor"),
        ("OneHot", None),
    ],
)
def test_a_run_of_a_model_that_takes_no_tokens_is_refused_before_the_first_step(tmp_path, name, told):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (tmp_path / "takes_no_tokens.py").write_text(MODELS)
    config = RunConfig(
        model=Model(build=f"{tmp_path / 'takes_no_tokens.py'}:{name}"),
        data=Data(path=str(tmp_path / "text.txt"), seq_len=16),
        train=Train(steps=1, eval_every=0),
        log=Log(dir=str(tmp_path / "run"), plot=False),
    )
    with sw.init(device="cpu") as world:
        if told is None:
            assert train(config, world, lambda *_, **__: None)["loss"] > 0
            return
        with pytest.raises(ConfigError) as error:
            train(config, world, lambda *_, **__: None)
    assert told in error.value.why and "shardwise train feeds tokens" in error.value.why
    assert "data.build=pkg.mod:fn" in error.value.fix and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_trial_of_tokens_leaves_a_part_in_eval_mode():
    config = RunConfig(data=Data(seq_len=4), model=Model(build="models:one"))
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(nn.Sequential(nn.Identity(), nn.Dropout(0.9).eval()), world)
        check_takes_tokens(config, model)
    assert [module.training for module in model.modules()] == [True, True, False]


def test_the_reference_model_refuses_unknown_sizes():
    with pytest.raises(ConfigError, match=r"^model\.args\.dmi=3\n  why: the reference model takes no 'dmi'"):
        build_plain(RunConfig(model=Model(args={"dmi": 3})))


def test_sizes_that_are_whole_floats_are_whole_numbers():
    assert build_plain(RunConfig(model=Model(args={"dim": 32.0, "num_layers": 1, "rope_base": 100}))).config.dim == 32


def test_optimizers_have_the_settings_of_the_config_and_leave_frozen_parameters():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    adamw = make_optimizer(Optim(lr=0.1, betas=(0.5, 0.6), weight_decay=0.2), model)
    group = adamw.param_groups[0]
    assert isinstance(adamw, torch.optim.AdamW)
    assert (group["lr"], group["betas"], group["weight_decay"], group["fused"]) == (0.1, (0.5, 0.6), 0.2, True)
    assert group["params"] == [model.weight]
    sgd = make_optimizer(Optim(name="sgd", lr=0.1, momentum=0.7, fused=False), model)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.param_groups[0]["momentum"], sgd.param_groups[0]["fused"]) == (0.7, False)


def test_cosine_rises_over_the_warm_up_and_ends_at_the_floor():
    lr = rates(Schedule(warmup_steps=4, min_lr_ratio=0.25), 20, 2.0)
    assert lr[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert lr[4] == max(lr) and lr[-1] == pytest.approx(0.5)
    assert lr[4:] == sorted(lr[4:], reverse=True)
    assert lr[12] == pytest.approx(0.5 + 1.5 * 0.5 * (1 + np.cos(np.pi * 8 / 15)))


def test_constant_and_no_warm_up():
    assert rates(Schedule(name="constant", warmup_steps=0), 5, 2.0) == [2.0] * 5
    assert rates(Schedule(name="constant", warmup_steps=1), 3, 2.0) == [1.0, 2.0, 2.0]
    assert rates(Schedule(warmup_steps=0, min_lr_ratio=0.0), 1, 2.0) == [2.0]


GROW = """
import shardwise as sw
from torch import nn

import shardwise as sw

@sw.transform("grow")
def grow(module):
    module.head = nn.Sequential(nn.Linear(32, 32), module.head)

def build():
    from shardwise.run.reference import build
    return build(dim=32, num_layers=1, ffn=48)
"""


def _laid_out(transforms, model):
    config = RunConfig(model=model, parallel=Parallel(transforms=transforms))
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        sharded = build_model(config, world)
        return set(sw.recipe_of(sharded).params), sw.describe(sharded)


def test_transforms_change_the_reference_model_and_the_users_and_are_in_the_recipe(ranks, tmp_path):
    file = tmp_path / "grow_it.py"
    file.write_text(GROW)
    for model, name in (
        (Model(args=SMALL), f"{file}:grow"),
        (Model(build=f"{file}:build"), "grow"),  # registered beside the model
    ):
        plain = build_plain(RunConfig(model=model, parallel=Parallel(transforms=(name,))))
        names, told = ranks.run(_laid_out, 2, (name,), model)[0]
        assert names == set(dict(plain.named_parameters())) and any(".0.weight" in n for n in names)
        assert "transform" in told and "grow" in told


def test_a_transform_that_is_not_known_is_refused_for_the_reference_model_too():
    with pytest.raises(ConfigError, match="no transform of that name is registered"):
        build_plain(RunConfig(model=Model(args=SMALL), parallel=Parallel(transforms=("nonesuch",))))


def falling(done, steps):
    return 1 - done / steps


SCHEDULES = {"of a name": Schedule(warmup_steps=1), "of a function": Schedule(build=f"{__file__}:falling")}


def rates_through(steps, stepped, state=None, schedule=SCHEDULES["of a name"]):
    """The rates of the steps, and the state of optimizer and schedule after."""
    optim = make_optimizer(Optim(), nn.Linear(2, 2))
    scheduler = make_scheduler(schedule, optim, steps)
    if state is not None:
        optim.load_state_dict(state[0])
        scheduler.load_state_dict(state[1])
        put_on_schedule(SimpleNamespace(optim=optim, scheduler=scheduler))
    found = []
    for _ in range(stepped):
        found.append(optim.param_groups[0]["lr"])
        optim.step()
        scheduler.step()
    return found, (optim.state_dict(), scheduler.state_dict())


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_run_that_is_made_longer_has_the_rates_of_the_longer_one_at_once(kind):
    through = functools.partial(rates_through, schedule=SCHEDULES[kind])
    whole = through(8, 8)[0]
    assert through(8, 4, through(8, 4)[1])[0] == whole[4:]
    assert through(8, 4, through(4, 4)[1])[0] == whole[4:]
