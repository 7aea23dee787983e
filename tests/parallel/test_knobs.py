"""Every knob leaves every number as it is, and changes what it is for."""

import pytest
from parallel.knobs import KNOBS, Knob, see
from zoo import CASES

from shardwise.verify import verify

pytestmark = pytest.mark.timeout(180)

ON_RANKS = [pytest.param(knob, size, id=f"{knob.name}-{size}") for knob in KNOBS for size in knob.layouts]


@pytest.mark.parametrize(("knob", "size"), ON_RANKS)
def test_a_knob_leaves_the_numbers_and_shows(ranks, knob: Knob, size: int):
    layout = knob.layouts[size]
    for case in ("reference",):
        chosen = CASES[case]
        verify(
            chosen.build,
            layout,
            batches=chosen.windows(3, 3 * size),
            loss=chosen.loss,
            count=chosen.count,
            forward=chosen.forward,
            max_grad_norm=0.5,
            run=ranks.run,
            **_for(knob, case),
        )
    for with_knob, by_default in zip(
        ranks.run(see, size, layout, knob.options), ranks.run(see, size, layout, knob.base), strict=True
    ):
        assert knob.differs(with_knob, by_default), f"{with_knob}\n{by_default}"


def _for(knob: Knob, case: str) -> dict:
    """Options that name modules are for the model whose modules they name."""
    sharding = knob.options.get("sharding")
    if case != "reference" and sharding is not None and isinstance(sharding.reshard_after_forward, dict):
        return knob.base
    return knob.options
