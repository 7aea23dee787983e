"""Stacks of ranks that are ended: shown where they say something."""

import pytest
from launch.test_launch_local import launch

from shardwise.errors import RankError


def test_a_stack_without_a_frame_is_not_shown():
    lines = []
    launch("write_stacks", nproc=1, on_line=lambda rank, stream, line: lines.append(line))
    head = "Thread 0x00007f219d5e2b80 (most recent call first):"
    assert lines == ["before", head, "  Garbage-collecting", '  File "a.py", line 1 in f', "after"]


def test_where_a_rank_has_named_the_one_to_blame_its_stack_alone_follows(capfd):
    with pytest.raises(RankError, match="rank 1 was lost"):
        launch("blame_a_peer", nproc=3)
    text = "".join(capfd.readouterr())
    assert "[rank 1]" in text and "in blame_a_peer" in text
    assert "[rank 2]" not in text
