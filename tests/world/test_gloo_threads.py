"""Each gloo group of a world has one thread for its collectives: two would write the name of the last one into one
string, and so into freed memory. All groups send and receive by one thread."""

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
    """Names and scheduling policies of gloo's threads that send and receive, and the policy of this one."""
    with sw.init("dp_replicate=2,dp_shard=2", device="cpu") as world:
        world.gradient_group()
        world.barrier()
        named = {int(t.name): (t / "comm").read_text().strip() for t in Path("/proc/self/task").iterdir()}
        return [
            os.sched_getscheduler(t) for t, name in named.items() if name == "gloo_tcp_loop"
        ], os.sched_getscheduler(0)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_all_groups_of_a_process_send_by_one_thread_which_does_not_take_the_core_of_another(ranks):
    assert ranks.run(policies_of_threads, 4) == [([os.SCHED_BATCH], os.SCHED_OTHER)] * 4
    assert (
        ranks.run(policies_of_threads, 4) == [([os.SCHED_BATCH], os.SCHED_OTHER)] * 4
    )  # nor does the next world make one


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
