"""Parameters that a loss uses outside of the model's forward, paddings among them, and writes that torch does not count."""

import pytest
from step.outside import CASES, errors


@pytest.mark.parametrize(
    ("layout", "size"), [("dp_shard=2", 2), ("dp_replicate=2", 2), ("dp_replicate=2,dp_shard=2", 4)]
)
def test_as_one_process(ranks, layout, size):
    for found in ranks.run(errors, size, layout):
        assert found.keys() == CASES.keys()
        assert {name: error for name, error in found.items() if not error < 1e-12} == {}
