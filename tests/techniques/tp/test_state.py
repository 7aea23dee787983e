"""Values of a model that is cut over tp: the same from any layout, into any layout."""

import pytest
import torch
from techniques.tp import states

ONE = ("dp_shard=1", 1)
CUT = (("tp=2", 2), ("dp_shard=2,tp=2", 4), ("tp=4", 4))


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.quick("linears: qkv-kv-1")
@pytest.mark.parametrize("name", ["linears: qkv-kv-1", "linears: slopes", pytest.param("t5", marks=pytest.mark.soak)])
def test_initial_values_do_not_depend_on_the_layout(ranks, name):
    seeded = ranks.run(states.initial, 1, name, ONE[0])[0]
    for layout, size in CUT[:2]:
        assert equal(seeded, ranks.run(states.initial, size, name, layout)[0])
        assert ranks.run(states.of_a_module, size, name, layout)[0]


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param("linears: qkv-kv-1", (*CUT[1:], ONE, CUT[0]), id="few"),
        *(
            pytest.param(name, (*CUT, ONE, ("dp_shard=2", 2), CUT[0]), id=name, marks=pytest.mark.soak)
            for name in ("linears: qkv-kv-1", "gpt2")
        ),
    ],
)
def test_a_run_goes_on_under_any_layout(ranks, tmp_path, name, layouts):
    """Every layout reads what another has written: parameters in packed parts, replicas, and AdamW's state."""
    whole = ranks.run(states.train, 1, name, ONE[0], str(tmp_path / "one"), len(layouts))[0]
    losses = []
    for stop, (layout, size) in enumerate(layouts, start=1):
        losses += ranks.run(states.train, size, name, layout, str(tmp_path / "many"), stop)[0]
    assert len(losses) == len(layouts)
    assert losses == pytest.approx(whole, rel=1e-13)


def test_weights_are_those_of_a_hugging_face_model(ranks, tmp_path):
    """Its configuration is that of the whole model, though modules of a rank have fewer heads."""
    differs, heads, _ = ranks.run(states.exported, 2, "falcon", "tp=2", str(tmp_path))[0]
    assert differs == []
    assert heads == {"num_attention_heads": 2, "num_kv_heads": 2}


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bloom", marks=pytest.mark.soak)])
def test_generation_and_evaluation(ranks, name):
    plain = ranks.run(states.generated, 1, name, ONE[0])[0]
    assert ranks.run(states.generated, 2, name, "tp=2") == [plain] * 2
    loss = ranks.run(states.evaluated, 1, name, ONE[0])[0]
    for found in ranks.run(states.evaluated, 4, name, "dp_shard=2,tp=2"):
        assert found == pytest.approx(loss, rel=1e-5)
