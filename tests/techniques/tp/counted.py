"""What goes over the wire in one window of a model that is cut over tp."""

from typing import NamedTuple

import models
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw


class Counted(NamedTuple):
    """Bytes of each sum that a layer makes, and of each gather; other collectives."""

    layers: list
    gathers: list
    others: list


class Sums(TorchDispatchMode):
    """Within: the bytes of each sum over ranks that a layer makes, of each gather, and each other collective."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.layers, self.gathers, self.others = [], [], []

    @classmethod
    def ignore_compile_internals(cls):
        """True: otherwise compiled blocks would run uncompiled within this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "all_reduce" in str(func):
            self.layers.append(args[0].numel() * args[0].element_size())
        elif func.namespace == "_c10d_functional" and "all_gather" in str(func):
            self.gathers.append(args[0].numel() * args[0].element_size())
        elif func.namespace == "c10d":
            self.others.append((func._schema.name, args[0][0].numel() if isinstance(args[0], list) else None))
        return func(*args, **(kwargs or {}))


def sums_of_a_window(name: str, layout: str, num_micro: int, fused: bool = False, **options):
    model = models.get(name)
    counters.clear()
    with sw.init(layout, device="cpu") as world:
        module = sw.parallelize(model.build, world, example=model.windows(1, 1)[0][0], **options)
        step = sw.TrainStep(module, torch.optim.SGD(module.parameters(), lr=0.1), fused=fused)
        first, second = model.windows(2, num_micro)
        step(first)
        graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        with Sums() as counted:
            step(second)
        assert counters["stats"]["unique_graphs"] == graphs[0]
        return Counted(counted.layers, counted.gathers, counted.others), graphs
