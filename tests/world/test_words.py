"""The word that a rank leaves when it ends early."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from shardwise.world.beats import read_word
from shardwise.world.liveness import Watch


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (SystemExit(0), "rank 1 ended its program after window 2"),
        (SystemExit(), "rank 1 ended its program after window 2"),
        (SystemExit(3), "rank 1 failed after window 2: SystemExit: 3"),
        (KeyError("boom"), "rank 1 failed after window 2: KeyError: 'boom'"),
    ],
)
def test_sys_exit_of_0_is_no_failure_but_an_end(error, why):
    store = dist.HashStore()
    watch = SimpleNamespace(
        alarm=None, rank=1, keeper=0, place="after window 2", _main_store=store, stopped=threading.Event()
    )
    Watch.failed(watch, error)
    word = read_word(store)
    assert (word.ranks, word.why) == ([1], why)
