"""The line of ``shardwise verify`` names the allowance that was used."""

from shardwise.verify.compare import Difference, Report


def test_the_allowance_of_the_largest_difference_is_shown():
    """``largest difference 2.3e-10, allowed 1e-12`` was called equal: the bias before a norm was allowed more."""
    worst = {
        "loss": Difference("loss", 1e-14, "loss", 1, allowed=1e-12),
        "grad": Difference("grad", 2.3e-10, "conv.bias", 2, allowed=4e-10),
    }
    report = Report(
        layout="dp_shard=2",
        engine="fsdp2",
        num_ranks=2,
        num_steps=2,
        gate=1e-12,
        worst=worst,
        collectives={},
        num_units=1,
        bytes_per_rank=(1, 1),
    )
    assert "largest difference 2.3e-10 (grad in conv.bias, step 2), allowed 4e-10" in str(report)
