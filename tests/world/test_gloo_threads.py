"""Each gloo group of a world has one thread for its collectives: two would write the name of the last one into one
string, and so into freed memory. All groups send and receive by one thread."""

import contextlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.errors import RankError
from shardwise.world.side_group import SideGroup


def threads_of_groups(layout):
    """The number of threads of each group of this process."""
    with sw.init(layout, device="cpu") as world:
        world.gradient_group()
        side = SideGroup(world)
        groups = list(dist.distributed_c10d._world.pg_map)
        found = [group._get_backend(torch.device("cpu")).options._threads for group in groups]
        side.close()
        return found


def test_one_thread_for_each_group(ranks):
    for found in ranks.run(threads_of_groups, 4, "dp_replicate=2,dp_shard=2"):
        assert found == [1] * 6  # the world's, of each axis and of both, of the gradients, of a second thread


def policies_of_threads():
    """Scheduling policies by thread of those of gloo's that send and receive, in two worlds one after the other; and that of
    this thread. Before torch 2.12 they have no name of their own: any with another policy is taken for one."""
    found = []
    for _ in range(2):
        with sw.init("dp_replicate=2,dp_shard=2", device="cpu") as world:
            world.gradient_group()
            world.barrier()
            found.append(_policies("gloo_tcp_loop"))
    return *found, os.sched_getscheduler(0)


def _policies(name):
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            policy = os.sched_getscheduler(int(thread.name))
            if (thread / "comm").read_text().strip() == name or policy != os.SCHED_OTHER:
                found[thread.name] = policy
    return found


def can_choose():
    """Whether this machine is Linux, and lets a process choose the policy ``SCHED_BATCH``."""
    try:
        is_usual = os.sched_getscheduler(0) == os.SCHED_OTHER
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except (AttributeError, OSError):
        return False
    return is_usual


@pytest.mark.skipif(not can_choose(), reason="no scheduling policy can be chosen here")
def test_all_groups_of_a_process_send_by_one_thread_which_does_not_take_the_core_of_another(fresh_ranks):
    # In processes of its own: others may have met on several network interfaces.
    for first, second, own in fresh_ranks.run(policies_of_threads, 4):
        assert list(first.values()) == [os.SCHED_BATCH] and second == first and own == os.SCHED_OTHER


def sum_and_timeout_s(interface):
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        with sw.init("dp_shard=2", device="cpu", timeout_s=77) as world:
            options = dist.group.WORLD._get_backend(torch.device("cpu")).options
            return world.axis("dp").reduce(torch.ones(1)).item(), options._timeout.total_seconds()
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.parametrize("interface", ["lo", "lo,lo"])
def test_the_network_interface_is_the_one_of_the_environment(ranks, interface):
    assert ranks.run(sum_and_timeout_s, 2, interface) == [(2.0, 77.0)] * 2


def test_an_interface_that_does_not_exist_is_named(ranks):
    with pytest.raises(RankError, match=r"GLOO_SOCKET_IFNAME='nosuch0'") as error:
        ranks.run(sum_and_timeout_s, 2, "nosuch0")
    assert "has no network interface 'nosuch0'" in str(error.value) and "fix: name one of lo" in str(error.value)


def test_torch_makes_its_own_groups_as_before(ranks):
    for num_threads in ranks.run(threads_of_a_group_of_ones_own, 2):
        assert num_threads == 2


def threads_of_a_group_of_ones_own():
    with sw.init("dp_shard=2", device="cpu"):
        own = dist.new_group([0, 1], backend="gloo")
        found = own._get_backend(torch.device("cpu")).options._threads
        dist.destroy_process_group(own)
        return found
