"""Gradients that a loop clips, scales or drops in a window, after a backward: what the other micro-batches and ranks add is not in them."""

import pytest
import torch
from step.plain import batch, build, sum_loss

import shardwise as sw

LAYOUTS = ["dp_replicate=2", "dp_shard=2", "tp=2"]


def clipped(params):
    torch.nn.utils.clip_grad_norm_(params, 1e-3)


def scaled(params):
    for param in params:
        param.grad.mul_(0.5)


def scaled_together(params):
    torch._foreach_mul_([param.grad for param in params], 0.5)


def dropped(params):
    params[0].grad = None


def replaced(params):
    params[0].grad = params[0].grad * 2


EDITS = (clipped, scaled, scaled_together, dropped, replaced)
PLACES = ("in the loop", "after the loop", "in accumulate", "after the window")


def edited(layout, num_before):
    """What is said of each edit at each place: after the last backward, where each layout has gradients to show."""
    found = {}
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = sw.parallelize(build(), world, example=batch(0))
        data = world.axis("dp")
        given = [batch(i) for i in range(data.rank, 4, data.size)]
        for _ in range(num_before):
            run(model, given, "nowhere", None)
        for place in PLACES:
            for edit in EDITS:
                try:
                    run(model, given, place, edit)
                    found[place, edit.__name__] = "passed"
                except sw.UsageError as error:
                    found[place, edit.__name__] = str(error)
                model.zero_grad()
    return found


def run(model, given, place, edit):
    params = [param for param in model.parameters() if param.requires_grad]

    def backward(batch, tokens):
        (sum_loss(model(batch["input_ids"]), batch) / tokens).backward()

    if place == "in accumulate":
        tokens = sw.count_tokens(model, given)
        for i, each in enumerate(given):
            with sw.accumulate(model, is_last=i == len(given) - 1):
                backward(each, tokens)
                if i == len(given) - 1:
                    edit(params)
        return
    with sw.window(model, given) as w:
        for i, each in enumerate(w):
            backward(each, w.num_tokens)
            if place == "in the loop" and i == len(given) - 1:
                edit(params)
        if place == "after the loop":
            edit(params)
    if place == "after the window":
        edit(params)


@pytest.mark.quick("0-dp_replicate=2", "0-dp_shard=2", "0-tp=2", "6-dp_replicate=2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_before", [0, 6])
def test_gradients_are_changed_when_the_window_is_left(ranks, layout, num_before):
    """Under replicas each rank clipped by the norm of its own, and the sum of what was left was taken for the gradient."""
    for found in ranks.run(edited, 2, layout, num_before):
        for (place, edit), said in found.items():
            if num_before and edit == "scaled_together":
                continue  # seen by values, which are compared in some windows
            if layout == "tp=2" and edit == "clipped":
                assert "that is cut over tp, outside of the model's forward" in said
            elif place == "after the window":
                assert said == "passed", (place, edit, said)
            else:
                assert "a gradient changed within a window" in said and "sw.clip_grad_norm_(model, 1.0)" in said, (
                    place,
                    edit,
                    said,
                )


def added_by_hand():
    """Gradients of a window that adds those of ``torch.autograd.grad`` to what a backward has given, and the ones of one process."""

    def run(model, given, tokens):
        weight = next(model.parameters())
        for each in given:
            (sum_loss(model(each["input_ids"]), each) / tokens()).backward()
            (grad,) = torch.autograd.grad(sum_loss(model(each["input_ids"]), each) / tokens(), [weight])
            weight.grad += grad
        return weight

    plain = build()
    tokens = sum(int((batch(i)["labels"] != -100).sum()) for i in range(4))
    wanted = run(plain, [batch(i) for i in range(4)], lambda: tokens).grad
    with sw.init("dp_replicate=2", device="cpu", timeout_s=30) as world:
        model = sw.parallelize(build(), world)
        with sw.window(model, [batch(i) for i in range(world.rank, 4, 2)]) as w:
            weight = run(model, w, lambda: w.num_tokens)
        return (weight.grad - wanted).abs().max().item()


def test_gradients_of_ones_own_are_added_in_a_window(ranks):
    assert max(ranks.run(added_by_hand, 2)) < 1e-12
