"""What users get wrong with worlds, modules and optimizers, and the words they then read."""

import pytest
import torch
from step.plain import batch, build, gradients, mine, plain_backward, sum_loss, values
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError, UsageError


def _world(layout):
    return sw.init(layout, device="cpu", timeout_s=20)


def _text(call):
    with pytest.raises(ShardwiseError) as caught:
        call()
    text = str(caught.value)
    assert caught.value.given and "\n  why: " in text and "\n  fix: " in text
    return text


# ---- an optimizer built before sharding -----------------------------------------------------------------------------


def _stale_optimizer(kind, local):
    with _world("dp_shard=2") as world:
        module = build()
        optim = getattr(torch.optim, kind)(module.parameters(), lr=0.1)
        model = sw.parallelize(module, world)
        before = values(model)
        texts = [_text(lambda: sw.TrainStep(model, optim, loss=sum_loss))]
        with sw.window(model, mine([batch(i) for i in range(2)], world)) as w:
            for b in w:
                (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
        if local:
            sw.local_optimizer(optim)
        texts.append(_text(optim.step))
        return texts, all(torch.equal(before[n], t) for n, t in values(model).items())


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_an_optimizer_built_before_sharding(ranks, kind, local):
    for (at_step, in_loop), same in ranks.run(_stale_optimizer, 2, kind, local):
        assert f"{kind} holds a parameter of shape" in at_step and at_step.startswith(("gate:", "embed.weight:"))
        assert f"{kind} was built before the module was sharded" in in_loop
        assert (
            "build the optimizer from model.parameters() after parallelize" in at_step
            and "after parallelize" in in_loop
        )
        assert same


def _kept_optimizer():
    """Under DDP the parameters stay the same objects, so an optimizer built before is right."""
    with _world("dp_replicate=2") as world:
        module = build()
        optim = torch.optim.SGD(module.parameters(), lr=0.1)
        model = sw.parallelize(module, world)
        step = sw.TrainStep(model, optim, loss=sum_loss)
        step(mine([batch(i) for i in range(2)], world))
        return values(model)


def test_an_optimizer_built_before_replication_still_steps_right(ranks):
    plain = build()
    plain_backward(plain, [batch(i) for i in range(2)])
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found in ranks.run(_kept_optimizer, 2):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-12, atol=1e-14)


def _foreign_optimizer():
    with _world("dp_shard=2") as world:
        model = sw.parallelize(build(), world)
        other = nn.Linear(3, 3)
        optim = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        return _text(lambda: sw.TrainStep(model, optim))


def test_an_optimizer_with_parameters_of_another_model(ranks):
    for text in ranks.run(_foreign_optimizer, 2):
        assert "holds a parameter of shape (3, 3) that the model does not have" in text


def _changed_module(layout, change):
    with _world(layout) as world:
        model = sw.parallelize(build(), world)
        if change == "replaced":
            model.head = nn.Linear(3, 3)
        elif change == "added":
            model.blocks.append(nn.Linear(3, 3))
        else:
            model.scale = nn.Parameter(torch.ones(3))
        return _text(lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1)))


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
@pytest.mark.parametrize(
    ("change", "name", "what"),
    [
        ("replaced", "head", "a Linear was added or replaced"),
        ("added", "blocks.", "a Linear was added or replaced"),
        ("parameter", "scale", "a parameter was added"),
    ],
)
def test_an_optimizer_of_a_part_that_came_after_sharding_names_the_part(ranks, layout, change, name, what):
    for text in ranks.run(_changed_module, 2, layout, change):
        assert text.startswith(f"{name}") and f"the module changed after it was sharded: {what}" in text
        assert "change the module first, then call parallelize on it, then build the optimizer" in text


# ---- a module that cannot be sharded (again) ------------------------------------------------------------------------


def _bad_modules(layout):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    with _world(layout) as world:
        sharded = sw.parallelize(build(), world)
        wrapped = DistributedDataParallel(build())
        by_hand = build()
        fully_shard(by_hand.blocks[0], mesh=world.mesh["dp_shard"])
        with torch.device("meta"):
            on_meta = build()
        texts = {
            "twice": _text(lambda: sw.parallelize(sharded, world)),
            "inside": _text(lambda: sw.parallelize(nn.Sequential(sharded), world)),
            "ddp": _text(lambda: sw.parallelize(wrapped, world)),
            "fsdp": _text(lambda: sw.parallelize(by_hand, world)),
            "meta": _text(lambda: sw.parallelize(on_meta, world)),
            "number": _text(lambda: sw.parallelize(3, world)),
            "none": _text(lambda: sw.parallelize(lambda: None, world)),
        }
        step = sw.TrainStep(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), loss=sum_loss)
        step(mine([batch(i) for i in range(2)], world))
        return texts


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_modules_that_cannot_be_sharded(ranks, layout):
    for texts in ranks.run(_bad_modules, 2, layout):
        assert "sharded already" in texts["twice"] and "once per module" in texts["twice"]
        assert texts["inside"].startswith("0: a module that holds a sharded one")
        assert "DistributedDataParallel" in texts["ddp"] and "plain module" in texts["ddp"]
        assert texts["fsdp"].startswith("blocks.0: ")
        assert "on meta" in texts["meta"] and "lambda: MyModel(config)" in texts["meta"]
        assert "a int" in texts["number"] and "NoneType" in texts["none"]


def _unsharded():
    module = build()
    calls = (sw.describe, sw.recipe_of, sw.world_of, lambda m: sw.clip_grad_norm_(m, 1.0), lambda m: sw.window(m, []))
    return [_text(lambda call=call: call(module)) for call in calls]


def test_calls_that_need_a_sharded_module_say_so():
    for text in _unsharded():
        assert "a Tied that was not sharded" in text and "sw.parallelize(model, world)" in text


def test_a_wrapper_of_torch_around_a_parallel_model_is_told_not_to_wrap():
    with sw.init("dp_replicate=-1", device="cpu") as world:
        model = sw.parallelize(nn.Linear(4, 4), world)
        with pytest.raises(
            sw.UsageError, match="DistributedDataParallel around a model that parallelize has made"
        ) as told:
            nn.parallel.DistributedDataParallel(model)
        assert "do not wrap it" in told.value.fix


@pytest.mark.parametrize("call", ["step", "window", "describe"])
def test_a_wrapper_around_a_parallel_model_is_told_not_to_wrap(call):
    batch = {"x": torch.ones(2, 4)}
    with sw.init("dp_replicate=-1", device="cpu") as world:
        model = nn.Sequential(sw.parallelize(nn.Linear(4, 4), world))
        with pytest.raises(sw.UsageError, match="a Sequential around a model that parallelize has made") as told:
            if call == "describe":
                sw.describe(model)
            elif call == "window":
                sw.window(model, [batch]).__enter__()
            else:
                sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))([batch])
        assert "do not wrap it" in told.value.fix


@pytest.mark.parametrize(
    "loss, shown",
    [
        (nn.MSELoss(), "F.mse_loss(output, "),
        (nn.functional.mse_loss, "F.mse_loss(output, "),
        (nn.BCEWithLogitsLoss(), "F.binary_cross_entropy_with_logits(output, "),
        (nn.CrossEntropyLoss(), "F.cross_entropy(output, "),
    ],
)
def test_a_loss_of_torch_is_shown_as_the_sum_that_is_wanted(loss, shown):
    with sw.init(device="cpu") as world:
        model = sw.parallelize(nn.Linear(4, 1), world)
        with pytest.raises(sw.UsageError) as told:
            sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    assert shown in told.value.fix and 'reduction="sum"' in told.value.fix


def _after_the_end():
    world = _world("dp_shard=2")
    model = sw.parallelize(build(), world)
    world.close()
    with pytest.raises(UsageError) as caught:
        sw.window(model, [batch(0)]).__enter__()
    return str(caught.value), gradients(model)


def test_a_window_after_the_world_was_closed(ranks):
    for text, _ in ranks.run(_after_the_end, 2):
        assert "closed" in text
