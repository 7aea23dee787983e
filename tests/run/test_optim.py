"""The optimizer of a run: parameter groups, frozen parameters, schedules; with the numbers of plain torch under every layout."""

import copy

import numpy as np
import pytest
import torch
from run import tuned
from run.tuned import rates
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.run.build import freeze_parameters
from shardwise.run.config import Model, RunConfig, load_config
from shardwise.run.optim import base_rate, make_optimizer, make_scheduler
from shardwise.run.optim_config import Optim, Schedule

LAYOUTS = {"dp_shard=1": 1, "dp_replicate=2": 2, "dp_shard=2": 2, "dp_replicate=2,dp_shard=2": 4, "dp_shard=1,tp=2": 2}


@pytest.mark.quick(
    "frozen-dp_shard=1,tp=2",
    "train only-dp_replicate=2",
    "groups-dp_shard=2",
    "adafactor-dp_shard=1",
    "muon-dp_shard=1",
    "sgd-dp_replicate=2,dp_shard=2",
)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in tuned.SETTINGS
        for layout in LAYOUTS
        if name not in ("adafactor", "muon") or "2" not in layout.partition("dp_shard")[2]
    ],
)
def test_the_parameters_are_those_of_plain_torch(ranks, name, layout):
    expected = tuned.in_torch(name)
    state, trained = ranks.run(tuned.in_a_run, LAYOUTS[layout], name, layout)[0]
    before = dict(tuned.build().named_parameters())
    for key, value in expected.items():
        # Muon multiplies matrices in bfloat16, where a last bit that differs is seen.
        assert float((state[key] - value).abs().max()) <= (1e-4 if name == "muon" else 1e-12), key
        assert (key in trained) == (not torch.equal(value, before[key].detach())), key


def test_linear_ends_at_the_floor():
    assert rates(Schedule(name="linear", warmup_steps=0, min_lr_ratio=0.0), 5) == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert rates(Schedule(name="linear", warmup_ratio=0.4, min_lr_ratio=0.5), 5) == pytest.approx(
        [1 / 3, 2 / 3, 1, 0.75, 0.5]
    )


def test_wsd_is_constant_and_then_a_line():
    found = rates(Schedule(name="wsd", warmup_steps=1, decay_ratio=0.4, min_lr_ratio=0.2), 10)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert rates(Schedule(name="wsd", warmup_steps=0, decay_ratio=0.0), 4) == [1.0] * 4


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_no_schedule_rises_after_its_warm_up(name):
    for steps in (1, 2, 3, 7, 50):
        found = rates(Schedule(name=name, warmup_steps=steps // 3), steps)
        assert np.all(np.diff(found[steps // 3 :]) <= 0) and min(found) > 0 and max(found) <= 1.0


def test_the_learning_rate_of_a_pretrained_model_is_small(tmp_path):
    assert RunConfig().optim.lr == 3e-3
    assert RunConfig(model=Model(hf=str(tmp_path))).optim.lr == 2e-5
    assert RunConfig(model=Model(hf=str(tmp_path)), optim=Optim(lr=1e-4)).optim.lr == 1e-4


def family(name, **more):
    """A small model of transformers, without memory."""
    import transformers

    sizes = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "state_size": 8, **more,
    }  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Config")(**sizes)
        return transformers.AutoModelForCausalLM.from_config(model)


class Named(nn.Module):
    """What the rule says of classes and of names, beside each other."""

    def __init__(self):
        super().__init__()
        self.first, self.q_norm = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.q_norm.weight = self.first.weight  # the first name counts, which is that of no norm
        self.last_norm, self.after = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.after.weight = self.last_norm.weight
        self.plain = torch.nn.utils.parametrizations.weight_norm(
            nn.LayerNorm(2)
        )  # its parameters are in a module below
        self.MyRMSNorm, self.norms, self.norm = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.Bias, self.vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))


def with_dora():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(family("Llama"), peft.LoraConfig(use_dora=True, target_modules=["q_proj"]))


FAMILIES = ("Llama", "GPT2", "GptOss", "Mamba", "Qwen3Next", "Rwkv", "DiffLlama", "GPTNeoX", "Gemma3Text")


@pytest.mark.filterwarnings(
    "ignore:.*checkpointing.* is deprecated:FutureWarning"
)  # names of transformers that PEFT reads
@pytest.mark.parametrize("name", [*FAMILIES, "names and classes", "DoRA"])
def test_decay_by_names_is_the_rule_of_the_trainer(name):
    from transformers import Trainer

    model = {"names and classes": Named, "DoRA": with_dora}.get(name, lambda: family(name))()
    wanted = {*Trainer.get_decay_parameter_names(None, model)}
    names = {param: key for key, param in model.named_parameters() if param.requires_grad}
    groups = make_optimizer(Optim(decay_on="names", fused=False), model).param_groups
    found = {names[param] for group in groups if group["weight_decay"] for param in group["params"]}
    assert found == wanted & {*names.values()}
    assert len(found) > 0 and (len(found) < len(names)) == (name != "DoRA")  # its vectors decay too
    by_dims = {key for param, key in names.items() if param.dim() > 1}
    assert (found == by_dims) == (name in ("Llama", "GPT2", "GPTNeoX", "Gemma3Text"))


def test_adafactor_keeps_less_than_the_parameters():
    model = nn.Linear(64, 64)
    optim = make_optimizer(Optim(name="adafactor"), model)
    model(torch.ones(1, 64)).sum().backward()
    optim.step()
    numbers = sum(t.numel() for state in optim.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    assert numbers < 64 * 64 / 8


def test_muon_resumes_from_its_state():
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
        return model, make_optimizer(Optim(name="muon", lr=0.1), model)

    def step(model, optim, number):
        optim.zero_grad()
        model(torch.tensor([number, 3])).square().sum().backward()
        optim.step()

    whole, optim = made()
    for number in range(4):
        step(whole, optim, number)
        if number == 1:
            kept = copy.deepcopy((whole.state_dict(), optim.state_dict()))
    assert [group["muon"] for group in optim.param_groups] == [True, False]
    assert [p.shape for p in optim.param_groups[0]["params"]] == [(4, 4)]  # neither the embedding nor the head
    again, other = made()
    again.load_state_dict(kept[0])
    other.load_state_dict(kept[1])
    for number in (2, 3):
        step(again, other, number)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


class Grouped(nn.Linear):
    def make_parameter_groups(self):
        return [{"params": [self.weight], "lr": 0.1}, {"params": [self.bias]}]


REFUSED = {
    "optim.groups={'*.wieght': {lr: 1}}": "optim.groups['*.wieght']\n  why: it names no parameter that is trained",
    "optim.groups={'*.bias': {lr: 1}, 'embed.bais': {lr: 2}}": "why: it names no parameter that is trained",
    "optim.groups={'*': {lr: 1}, '*.bias': {lr: 2}}": "an earlier pattern has all of these parameters",
    "model.freeze=[blocks.3.*]": "model.freeze: 'blocks.3.*'\n  why: it names no parameter of the model",
    "model.freeze=['*']": "no parameter would be left to train",
    "model.train_only=[nosuch]": "model.train_only: 'nosuch'",
}


@pytest.mark.parametrize("word", REFUSED)
def test_patterns_without_effect_are_refused(word):
    config = load_config(None, [word]).config
    with pytest.raises(ConfigError) as caught:
        model = tuned.build()
        freeze_parameters(model, config.model)
        make_optimizer(config.optim, model)
    assert REFUSED[word] in str(caught.value)


def test_groups_beside_those_of_the_model_are_refused():
    for optim in (Optim(decay_on="matrices"), Optim(groups={"bias": {"lr": 1.0}})):
        with pytest.raises(ConfigError, match=r"its method make_parameter_groups\(\) says which"):
            make_optimizer(optim, Grouped(2, 2))


CONFIGS = {
    ("optim.groups={x: {lr: 1, lr_scale: 2}}",): "optim.groups['x']: optim.groups: lr=1.0 with lr_scale=2.0",
    ("optim.groups={x: {}}",): "a pattern without settings",
    ("optim.groups={x: {momentum: 1}}",): "Group(momentum=1)",
    ("optim.name=adafactor", "optim.betas=[0.9, 0.99]"): "adafactor has no betas",
    ("optim.name=adafactor",): "with parallel.layout='dp_shard=-1'",
    ("optim.name=adafactor", "parallel.layout=dp_shard=1,tp=2"): "with tp a rank holds a part of it",
    ("optim.name=muon",): "with dp_shard a rank holds a part of it",
    ("optim.name=muon", "optim.momentum=0.5"): "muon has no momentum",
    ("schedule.warmup_steps=3", "schedule.warmup_ratio=0.1"): "each of them says how long",
    ("schedule.decay_ratio=0.3",): "use name=wsd",
    ("schedule.name=constant", "schedule.min_lr_ratio=0"): "a constant rate has no floor",
    ("schedule.args={power: 2}",): "without schedule.build",
    ("schedule.build=curve",): "a function of your own",
    ("schedule.build=a:b", "schedule.warmup_steps=3"): "the function says the whole curve",
    ("schedule.build=a:b", "schedule.name=linear"): "remove schedule.name",
    ("schedule.build=a:b", "schedule.args={done: 1}"): "leave done out",
    ("schedule.name=wsd", "schedule.warmup_ratio=0.5", "schedule.decay_ratio=0.6"): "has risen, and gone down",
    ("model.freeze=[a]", "model.train_only=[b]"): "each of them says which parameters are trained",
}


@pytest.mark.parametrize("words", CONFIGS, ids=" ".join)
def test_settings_that_cannot_work_together_are_refused(words):
    with pytest.raises(ConfigError) as caught:
        load_config(None, list(words))
    assert CONFIGS[words] in str(caught.value)


def test_a_run_is_described_by_its_file_again(tmp_path):
    """What is written beside a checkpoint, with everything resolved, is the same run."""
    from shardwise.config.render import dump_config

    config = tuned.config_of("groups").config
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml").config == config


def lion(groups, lr, sign=1.0):
    return torch.optim.Adamax(groups, lr=lr * sign)


def nothing(groups):
    return groups


def test_an_optimizer_of_the_users_own():
    model = nn.Linear(2, 2)
    made = make_optimizer(load_config(None, ["optim.build=torch.optim:NAdam"]).config.optim, model)
    assert isinstance(made, torch.optim.NAdam)
    assert (made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"]) == (2e-3, 0)  # of its own
    words = [
        f"optim.build={__file__}:lion",
        "optim.args={sign: 2}",
        "optim.lr=0.25",
        "optim.groups={bias: {lr_scale: 2}}",
    ]
    made = make_optimizer(load_config(None, words).config.optim, model)
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.5]  # the function's, and the group's


OWN = {
    ("optim.args={a: 1}",): "without optim.build",
    ("optim.build=NAdam",): "such as torch.optim:NAdam",
    ("optim.build=torch.optim:NAdam", "optim.betas=[0.8, 0.9]"): "or pass it: optim.args={betas: ...}",
    ("optim.build=torch.optim:NAdam", "optim.name=sgd"): "remove optim.name",
    ("optim.build=torch.optim:NAdam", "optim.args={lr: 1}"): "give it as optim.lr",
    ("optim.build=torch.optim:NAdam", "optim.groups={'*': {lr_scale: 2}}"): "give optim.lr",
    ("optim.build=torch.optim:NAdam", "optim.args={bets: 1}"): "did you mean 'betas'",
    (f"optim.build={__file__}:nothing",): "it returned list, and training needs a torch.optim.Optimizer",
    (f"optim.build={__file__}:nothing", "optim.lr=1"): "with lr=1.0\n  why: it cannot be called with them",
}


@pytest.mark.parametrize("words", OWN, ids=" ".join)
def test_an_optimizer_that_cannot_be_built_is_refused(words):
    with pytest.raises(ConfigError) as caught:
        make_optimizer(load_config(None, list(words)).config.optim, nn.Linear(2, 2))
    assert OWN[words] in str(caught.value)


def halved(done, steps, power=1.0):
    return (1 - done / steps) ** power


def grown(done, steps):
    return True


def below(done, steps):
    return 1.0 - done


def test_a_curve_of_the_users_own():
    words = [f"schedule.build={__file__}:halved", "train.steps=4"]
    config = load_config(None, words).config
    assert config.schedule.warmup_steps is None  # of its own
    assert rates(config.schedule, 4) == [1.0, 0.75, 0.5, 0.25]
    config = load_config(None, [*words, "schedule.args={power: 2, steps: 8}"]).config
    assert rates(config.schedule, 4) == [1.0, (7 / 8) ** 2, (6 / 8) ** 2, (5 / 8) ** 2]


CURVES = {
    (f"schedule.build={__file__}:nothing",): "it cannot be called with them",
    (f"schedule.build={__file__}:halved", "schedule.args={pwer: 2}"): "did you mean 'power'",
    (f"schedule.build={__file__}:grown",): "it returned True, and a learning rate",
    (f"schedule.build={__file__}:below",): "it returned -1.0, and a learning rate",
    (f"schedule.build={__file__}:nothing_such",): "nothing_such",
}


@pytest.mark.parametrize("words", CURVES, ids=" ".join)
def test_a_curve_that_gives_no_rate_is_refused(words):
    with pytest.raises(ConfigError) as caught:
        rates(load_config(None, list(words)).config.schedule, 4)
    assert CURVES[words] in str(caught.value)


def test_the_rate_that_is_logged_is_that_of_parameters_without_one_of_their_own():
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4)), world)
        for groups, shown in (({"0.*": {"lr_scale": 0.1}}, 0.04), ({"*": {"lr_scale": 0.1}}, 0.004)):
            config = Optim(lr=0.04, groups=groups)
            optim = make_optimizer(config, model)
            make_scheduler(Schedule(name="constant", warmup_steps=0), optim, 4)
            assert base_rate(config, optim) == pytest.approx(shown)
