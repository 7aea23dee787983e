"""The benchmark of activation checkpointing checks that its sides have the same gradients, and writes what it measured."""

from benchmarks.scripts import script


def measured() -> str:
    found = script("remat")
    return found.table({8: found.measure(2, 8, depth=2)})


def test_its_table(ranks):
    text = ranks.run(measured, 1)[0]
    assert text.count("\n") == 4 and "| 1.00 |" in text


def test_a_side_with_other_gradients_is_not_timed(ranks):
    assert "other gradients" in ranks.run(broken, 1)[0]


def broken() -> str:
    """As if torch's own checkpoint gave the gradients of another input."""
    found = script("remat")
    run = found.checkpoint
    found.checkpoint = lambda block, x, **options: run(block, 2 * x, **options)
    try:
        found.measure(2, 8, depth=2)
    except AssertionError as error:
        return str(error)
    return "measured"
