"""An imported configuration trains what its system trains: every optimizer, decay rule, clipping, accumulation and curve of each, in
float64 on two ranks, beside plain torch with that system's arithmetic."""

import pytest
from dialects import numbers


@pytest.fixture(scope="module")
def runs(ranks):
    return ranks.run(numbers.in_runs, numbers.RANKS, list(numbers.CASES))[0]


@pytest.mark.parametrize("name", numbers.CASES)
def test_a_run_trains_what_the_system_trains(runs, name):
    losses, norms, expected = numbers.in_torch(numbers.CASES[name])
    found_losses, found_norms, state = runs[name]
    assert found_losses == pytest.approx(losses, rel=1e-10, abs=0)
    if numbers.CASES[name].clip is not None:
        assert found_norms == pytest.approx(norms, rel=1e-10, abs=0)
    before = {key: param.detach() for key, param in numbers.tuned.build().named_parameters()}
    for key, value in expected.items():
        assert float((state[key] - value).abs().max()) <= 1e-10, key
        assert float((before[key] - value).abs().max()) > 1e-5, key
