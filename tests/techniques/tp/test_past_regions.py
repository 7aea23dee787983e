"""What comes to parameters past the layers that are cut counts once, as in one process, or is refused by the parameter's name before the backward."""

import pytest
from techniques.tp.past_regions import USES, gradients_off, losses

import shardwise as sw

REFUSED = {
    "what the layers have computed of it": "blocks.1.attention.k_norm.weight: a value of a parameter that is used both",
    "heads of a rank": "blocks.1.attention.k.weight: a loss that comes to a parameter that is cut over tp past",
    "heads of a rank, not trained": "a loss of what lies between layers that are cut over tp",
    "between the layers": "blocks.1.attention.gain: a parameter of whose gradient each rank along tp gets a part",
    "a parameter itself": "blocks.1.attention.temperature: a backward that begins with a parameter itself",
    "in a reentrant checkpoint": "blocks.1.attention.k_norm.weight: a parameter of whose gradient each rank along tp has a part, used in",
    "a part, in its forward": "blocks.0.up.bias: a loss that comes to a parameter that is cut over tp past",
}
GATHERED = [
    "called by the loss",
    "in its forward",
    *(how for how in REFUSED if "checkpoint" not in how),
]  # other uses are refused beside shards, whatever tp does
COMPILED = {"compile": sw.Compile(backend="aot_eager")}
SHOWN = [
    how for how in USES if how not in (*REFUSED, "of two backwards", "with a gradient of the loss")
]  # torch's limits


@pytest.mark.parametrize(
    ("layout", "sequence", "hows", "options"),
    [
        ("tp=2", False, [*USES], {}),
        ("tp=2", True, [*USES], {}),
        ("dp_shard=2,tp=2", False, GATHERED, {}),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("tp=4", False, [*USES], {}),
                ("tp=4", True, [*USES], {}),
                ("dp_shard=2,tp=2", True, GATHERED, {}),
                ("dp_replicate=2,tp=2", True, [*USES], {}),
                ("tp=2", True, [*USES], {"remat": "full"}),
                ("tp=2", False, SHOWN, COMPILED),
                ("tp=2", True, SHOWN, COMPILED),
            )
        ),
    ],
)
def test_it_counts_once_or_is_refused(ranks, layout, sequence, hows, options):
    # On rows, that parameter is summed over the ranks, and so are parts of it.
    refused = {how: text for how, text in REFUSED.items() if not (sequence and how == "between the layers")}
    for found in ranks.run(
        gradients_off, 4 if "," in layout or "4" in layout else 2, layout, sequence, hows, timeout_s=240, **options
    ):
        for how in hows:
            if how in refused:
                assert str(found[how]).startswith(refused[how]), (how, found[how])
            else:
                assert found[how] < 1e-12, (how, found[how])


@pytest.mark.parametrize(
    ("layout", "sequence"),
    [
        ("tp=2", False),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("tp=2", True), ("dp_replicate=2,tp=2", False))),
    ],
)
def test_a_loss_without_gradients_of_what_a_rank_has_a_part_of_is_refused(ranks, layout, sequence):
    """An evaluation, or an entry of the loss, that another way through the code computes."""
    for found in ranks.run(losses, 2 if layout == "tp=2" else 4, layout, sequence, timeout_s=120):
        for (what, name), (alone, parallel) in found.items():
            if name == "heads":
                assert "of a loss, of which ranks along tp have other values" in str(parallel), (what, parallel)
            else:
                assert parallel == pytest.approx(alone, rel=1e-12), (what, name)
