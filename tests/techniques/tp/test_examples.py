"""What can be in an example, and what a run of it shows."""

import pytest
from step.plain import assert_close
from techniques.tp import examples

CUT = {
    "graph": {"up.weight", "up.bias", "down.weight"},
    "containers": {"up.weight", "up.bias", "down.weight"},
    "equilibrium": {"up.weight", "up.bias", "down.weight"},
}


@pytest.mark.parametrize("name", examples.CASES)
def test_gradients_are_those_of_one_process(ranks, name):
    """An example with a number or a container was refused; of a weight that an autograd function takes the run had no values."""
    wanted = examples.gradients(name)
    for found, cut in ranks.run(examples.gradients, 2, name, "tp=2"):
        assert_close(found, wanted)
        assert cut >= CUT[name] and "w" not in cut


def test_refused_before_the_model_is_run(ranks):
    for sparse, shared in ranks.run(examples.refused, 2):
        assert "table: a EmbeddingBag with sparse=True" in sparse and "leave sparse out" in sparse
        assert "0.0.weight: a part of a model that was parallelized already" in shared and "into one module" in shared
