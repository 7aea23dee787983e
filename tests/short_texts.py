"""Imported by warm ranks: what a run writes before and after training to show what it has learned is short there.

Each byte of it is a forward on all ranks, more of them than the steps of a test. Runs that tests start as processes of their own
write as much as those of users.
"""

from shardwise.run import sample

sample.SAMPLE_BYTES, sample.ANSWER_TOKENS = 12, 12
