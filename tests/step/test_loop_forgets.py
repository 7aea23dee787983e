"""What a loop forgets, or does on one rank alone: each ran without a word."""

import functools
import warnings

import torch
from step.plain import batch, build, shard, sum_loss
from torch import nn
from torch.optim import lr_scheduler

import shardwise as sw


def told_by(call):
    """The texts of warnings that ``call`` gave, or of its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except sw.ShardwiseError as error:
            return [f"{type(error).__name__}: {error}"]
    return [str(each.message) for each in caught]


# ---- loops of one's own ---------------------------------------------------------------------------------------------


def loops():
    """What each loop over three windows is told."""
    told = {}
    with sw.init("dp_shard=-1", device="cpu") as world:
        for name in LOOPS:
            model = sw.parallelize(build(), world)  # each warning is given once a model
            optim = torch.optim.SGD(model.parameters(), lr=0.01)
            told[name] = told_by(functools.partial(loop, model, optim, LOOPS[name]))
    return told


def loop(model, optim, does):
    for _ in range(3):
        with sw.window(model, [batch(i) for i in range(2)]) as w:
            if "clears inside" in does:
                optim.zero_grad(set_to_none="to zero" not in does)
            if "penalty" in does:
                sw.parameter_penalty(model, sum(param.square().sum() for param in model.parameters()))
            for given in w:
                loss = sum_loss(model(given["input_ids"]), given) / w.num_tokens
                if "backward" in does:
                    loss.backward()
        if "steps" in does:
            optim.step()
        if "clears" in does:
            optim.zero_grad(set_to_none="to zero" not in does)


LOOPS = {
    "right": "backward, steps, clears",
    "right, to zero": "backward, steps, clears to zero",
    "cleared as the first line": "backward, steps, clears inside",
    "the same, to zero": "backward, steps, clears inside to zero",
    "windows that are added up": "backward",
    "a penalty before": "penalty, backward, steps, clears",
    "never cleared": "backward, steps",
    "no backward": "steps, clears",
}


def test_a_backward_or_a_zero_grad_that_is_left_out_is_told_once(ranks):
    first, second = ranks.run(loops, 2)
    assert {name: len(told) for name, told in first.items() if told} == {"never cleared": 1, "no backward": 1}
    assert first["never cleared"][0].startswith("gradients of an earlier window are added to those of window 2")
    assert first["no backward"][0].startswith("a window without a backward") and not any(second.values()), second


# ---- settings that change on one rank -------------------------------------------------------------------------------


def changed(layout):
    """What a step says after one rank alone, or all alike, have changed something."""
    told = {}
    for name, change in CHANGES.items():
        for whose in ("own", "all"):
            world, model = shard(layout)
            with world:
                optim = torch.optim.AdamW(model.parameters(), lr=0.1)
                step = sw.TrainStep(model, optim, loss=sum_loss)
                plateau = lr_scheduler.ReduceLROnPlateau(optim, patience=0)
                step([batch(world.rank)])
                change(optim, plateau, world.rank if whose == "own" else 1)
                told[name, whose] = told_by(lambda step=step, world=world: step([batch(world.rank)]))
                assert model.training and not any(param.grad is not None for param in model.parameters())
    return told


def plateau_of_its_own(optim, plateau, rank):
    plateau.step(1.0)
    plateau.step(2.0 * rank)


def set_on_one(key, value):
    def change(optim, plateau, rank):
        if rank:
            optim.param_groups[0][key] = value

    return change


CHANGES = {
    "lr": plateau_of_its_own,
    "weight_decay": set_on_one("weight_decay", 0.5),
    "betas": set_on_one("betas", (0.8, 0.9)),
    "eps": set_on_one("eps", torch.tensor(1e-3)),
}


def test_a_step_whose_settings_were_changed_on_one_rank_is_refused_on_every_rank(ranks):
    for layout in ("dp_replicate=2", "dp_shard=2"):
        for told in ranks.run(changed, 2, layout):
            for name in CHANGES:
                assert told[name, "all"] == [], told
                (text,) = told[name, "own"]
                assert text.startswith(f"RankError: the ranks' steps differ between ranks: group 0: {name}"), text


# ---- counts and shapes ----------------------------------------------------------------------------------------------


def sums():
    told = {}
    given = {"x": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), "y": torch.arange(5.0)}
    with sw.init("dp_shard=1", device="cpu") as world:
        for name, (loss, count) in SUMS.items():
            model = sw.parallelize(nn.Linear(3, 1), world)
            step = sw.TrainStep(
                model,
                torch.optim.SGD(model.parameters(), lr=1e-4),
                loss=loss,
                count=count,
                forward=lambda model, b: model(b["x"]),
            )
            told[name] = told_by(lambda step=step: (step([given]), step([given])))
    return told


def of_all(given):
    return len(given["y"])


SUMS = {
    "right": (lambda out, b: (out.squeeze(-1) - b["y"]).square().sum(), of_all),
    "broadcast": (lambda out, b: (out - b["y"]).square().sum(), of_all),
    "nothing counted": (lambda out, b: (out.squeeze(-1) - b["y"]).square().sum(), lambda b: 0),
    "nothing to count": (lambda out, b: (out.squeeze(-1) - b["y"]).square().sum() * 0, lambda b: 0),
    "cubes of the size": (lambda out, b: (out.squeeze(-1) - b["y"]).square().sum() * len(out) ** 2, of_all),
}


def test_a_count_of_0_and_a_loss_of_n_by_n_are_told(ranks):
    (told,) = ranks.run(sums, 1)
    (square,) = told["broadcast"]
    assert (
        square.startswith("the loss grows with the square of the number of samples") and "output.squeeze(-1)" in square
    )
    (zero,) = told["nothing counted"]
    assert zero.startswith("ConfigError: a window of 0 tokens whose loss is ")
    (nothing,) = told["nothing to count"]  # once
    assert nothing.startswith(
        "window 1 has nothing to train on: on every rank all labels are -100, or count= gave 0"
    ), nothing
    assert not any(told[name] for name in ("right", "cubes of the size")), told


# ---- labels that are shifted twice ----------------------------------------------------------------------------------


def causal(layout):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    small = {"num_hidden_layers": 1, "num_attention_heads": 2}
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, **small)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        ),
    }
    samples = [(torch.arange(9) * 3 + i) % 32 for i in range(8)]

    def targets(given):
        return (given["labels"][:, 1:] != -100).sum()

    def whole(given):
        return {**given, "labels": given["input_ids"].clone()}

    told = {}
    with sw.init(layout, device="cpu") as world:
        for name, make in models.items():
            for how, prepare in (("twice", sw.shift_labels), ("once", whole)):
                model = sw.parallelize(make, world)
                num_hooks = len(model._forward_pre_hooks)
                step = sw.TrainStep(
                    model,
                    torch.optim.SGD(model.parameters(), lr=0.01),
                    forward=lambda model, b: model(**b),
                    loss=lambda out, b: out.loss * targets(b),
                    count=targets,
                )
                loader = sw.Loader(samples, world, global_batch=4, micro_batch=2, prepare=prepare)
                told[name, how] = told_by(lambda step=step, loader=loader: [step(window) for window in loader])
                if how == "twice":  # in a loop of one's own, and not where the model is not asked for a loss
                    told[name, "own loop"] = told_by(lambda model=model, loader=loader: own(model, loader, True))
                    told[name, "logits"] = told_by(lambda model=model, loader=loader: own(model, loader, False))
                assert len(model._forward_pre_hooks) == num_hooks
    return told


def own(model, loader, asks):
    for window in loader:
        with sw.window(model, window) as w:
            for b in w:
                out = model(**b) if asks else model(b["input_ids"])
                loss = out.loss * (b["labels"] != -100).sum() if asks else sum_loss(out.logits, b)
                (loss / w.num_tokens).backward()
        model.zero_grad()


def test_shifted_labels_given_to_a_model_that_shifts_them_are_refused(ranks):
    for told in ranks.run(causal, 2, "dp_shard=2"):
        for name in ("llama", "gpt2"):
            for how in ("twice", "own loop"):
                (text,) = told[name, how]
                assert "labels that are shifted already, given to " in text and "after next" in text, text
            assert told[name, "once"] == told[name, "logits"] == [], told
