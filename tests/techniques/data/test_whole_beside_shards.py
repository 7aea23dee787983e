"""Parameters that are cut, beside whole tensors: refused with words that can be followed, each of which is followed here."""

import pytest
from step.plain import assert_close
from techniques.data import whole_beside_shards as cases
from techniques.tp.read_values import build

SAYS = {
    "a parameter of the model used by code outside of its forward": ("start = p.detach().clone()", "sw.TaskModel(model, loss)", "sw.gathered"),
    "is cut over the ranks, as a parameter is": ("sw.parameter_penalty", "weight_decay="),
    "a loss that uses a parameter outside the model's forward": ("sw.parameter_penalty(model, penalty)", "inside forward"),
    "that is cut over tp, outside of the model's forward": ("sw.full_tensor", "p.grad.add_(p.detach()"),
    "of a tensor that is not cut as it is": ("start = p.detach().clone()", "sw.full_tensor"),
    "a backward through sw.full_tensor(p)": ("p.grad.add_(p.detach()", "into the model's forward"),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2", pytest.param("dp_shard=2,tp=2", marks=pytest.mark.soak)])
def test_refused_with_what_to_do(ranks, layout):
    for found in ranks.run(cases.refused, 4 if "," in layout else 2, layout):
        for name, text in found.items():
            known = [words for what, words in SAYS.items() if what in text]
            assert len(known) == 1 and all(word in text for word in known[0]), f"{name}: {text}"


@pytest.mark.quick("dp_shard=2-a penalty-clone", "dp_replicate=2-a penalty-clone")
@pytest.mark.parametrize("start", cases.STARTS)
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        ("dp_shard=2", "a penalty"),
        ("dp_shard=2", "after the window"),
        ("tp=2", "after the window"),
        ("dp_replicate=2", "a penalty"),
        pytest.param("dp_shard=2,tp=2", "after the window", marks=pytest.mark.soak),
    ],
)
def test_what_is_cut_alike_may_stand_beside_a_parameter(ranks, layout, way, start):
    wanted = cases.followed_alone(way, start)
    for found in ranks.run(cases.followed, 4 if "," in layout else 2, layout, way, start):
        assert_close(found, wanted)


def test_code_that_computes_with_a_parameter_runs_in_a_forward(ranks):
    wanted = cases.in_a_forward_alone()
    for found in ranks.run(cases.in_a_forward, 2, "dp_shard=2", cases.ONE):
        assert_close(found, wanted)
    for text in ranks.run(cases.in_a_forward, 2, "dp_shard=2", cases.EACH):
        assert "a parameter of one unit used by code outside that unit" in text and 'Sharding(units="none")' in text


def test_what_is_gathered_is_whole_for_reading(ranks):
    wanted = float((build().head.weight.detach() - cases.PRIOR).norm())
    assert ranks.run(cases.read_in_the_loss, 2, "dp_shard=2") == pytest.approx([wanted] * 2, rel=1e-12)
