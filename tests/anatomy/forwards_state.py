"""More forwards for :mod:`anatomy.forwards`: what they leave in lists, objects and globals, and contexts that swallow."""
# ruff: noqa - written as users write, not as we do

import contextlib
import os
from collections.abc import Callable

import torch
from torch import nn

from anatomy.forwards import Blocks

SKIPPABLE: dict[str, type[nn.Module]] = {}
PLAIN: dict[str, type[nn.Module]] = {}

RANK = int(os.environ.get("RANK", "0"))
K = 3
N_LAYER = 3
LIMIT = {"k": 3}


class Cfg:
    def __init__(self):
        self.depth = 3
        self.flag = True
        self.seen = [1, 2, 3]

    def note(self, x):
        self.depth = int(x.sum())


class Kept(Blocks):
    """Blocks with things to leave numbers in."""

    def __init__(self):
        super().__init__()
        self.cfg = Cfg()
        self.state = [3]
        self.d = {"k": 3}
        self.rank = RANK
        self.is_main = RANK == 0


class Ignore:
    def __enter__(self):
        return self

    def __exit__(self, *a):
        return True


class Timer:
    def __enter__(self):
        self.t = 0
        return self

    def __exit__(self, *a):
        self.t = 1


@contextlib.contextmanager
def swallow():
    try:
        yield
    except ValueError:
        pass


@contextlib.contextmanager
def timed():
    yield


def adjust(cfg, x):
    cfg.depth = int(x.sum())


def mask_of(cfg, x):
    return x * cfg.depth


def bump(x):
    global K
    K = int(x.sum())


def loop(self, x):
    for b in self.blocks:
        if x.sum() > 0:
            raise ValueError
        x = b(x)
    return x


def skippable(forward: Callable) -> Callable:
    SKIPPABLE[forward.__name__] = type(forward.__name__, (Kept,), {"forward": forward})
    return forward


def plain(forward: Callable) -> Callable:
    PLAIN[forward.__name__] = type(forward.__name__, (Kept,), {"forward": forward})
    return forward


@skippable
def list_state(self, x):
    self.state.append(int(x.sum()))
    for b in self.blocks[: self.state[-1]]:
        x = b(x)
    return x


@skippable
def list_len(self, x):
    if x.sum() > 0:
        self.state.append(1)
    for b in self.blocks[: len(self.state)]:
        x = b(x)
    return x


@skippable
def dict_upd(self, x):
    self.d.update(k=int(x.sum()))
    for b in self.blocks[: self.d["k"]]:
        x = b(x)
    return x


@skippable
def obj_method(self, x):
    self.cfg.note(x)
    for b in self.blocks[: self.cfg.depth]:
        x = b(x)
    return x


@skippable
def obj_fn(self, x):
    adjust(self.cfg, x)
    for b in self.blocks[: self.cfg.depth]:
        x = b(x)
    return x


@skippable
def glob(self, x):
    bump(x)
    for b in self.blocks[:K]:
        x = b(x)
    return x


@skippable
def glob_dict(self, x):
    LIMIT["k"] = int(x.sum())
    for b in self.blocks[: LIMIT["k"]]:
        x = b(x)
    return x


@skippable
def rank_glob(self, x):
    for b in self.blocks:
        if RANK == 0:
            x = b(x)
    return x


@skippable
def rank_attr(self, x):
    for b in self.blocks:
        if self.rank == 0:
            x = b(x)
    return x


@skippable
def rank_main(self, x):
    for b in self.blocks:
        if self.is_main:
            x = b(x)
    return x


@skippable
def environ(self, x):
    for b in self.blocks:
        if os.environ["RANK"] == "0":
            x = b(x)
    return x


@skippable
def ctx_class(self, x):
    with Ignore():
        x = loop(self, x)
    return x


@skippable
def ctx_gen(self, x):
    with swallow():
        x = loop(self, x)
    return x


@skippable
def cls_attr(self, x):
    type(self).depth = int(x.sum())
    for b in self.blocks[: self.depth]:
        x = b(x)
    return x


@skippable
def aliased_list(self, x):
    s = self.state
    s.append(int(x.sum()))
    for b in self.blocks[: self.state[-1]]:
        x = b(x)
    return x


@skippable
def deep_obj(self, x):
    self.cfg.seen.append(int(x.sum()))
    for b in self.blocks[: len(self.cfg.seen)]:
        x = b(x)
    return x


@skippable
def exec_(self, x):
    exec("self.blocks[0](x)") if x.sum() > 0 else None
    for b in self.blocks:
        x = b(x)
    return x


@skippable
def eval_(self, x):
    for b in self.blocks:
        x = b(x)
    return eval("self.blocks[0](x) if x.sum()>0 else x")


@skippable
def call_method(self, x):
    for b in self.blocks:
        x = b.__call__(x) if x.sum() > 0 else x
    return x


@skippable
def modules_iter(self, x):
    for m in self.modules():
        if isinstance(m, nn.Linear) and x.sum() > 0:
            x = m(x)
    return x


@skippable
def hidden_in_dict(self, x):
    fns = {"f": lambda h: self.blocks[0](h)}
    for b in self.blocks:
        x = b(x)
    return fns["f"](x) if x.sum() > 0 else x


@skippable
def returned_fn(self, x):
    def make():
        return lambda h: self.blocks[0](h)

    f = make()
    for b in self.blocks:
        x = b(x)
    return f(x) if x.sum() > 0 else x


@plain
def timer(self, x):
    with Timer():
        for b in self.blocks:
            x = b(x)
    return x


@plain
def timer_gen(self, x):
    with timed(), torch.no_grad():
        for b in self.blocks:
            x = b(x)
    return x


@plain
def cfg_fn(self, x):
    m = mask_of(self.cfg, x)
    for b in self.blocks[: self.cfg.depth]:
        if self.cfg.flag:
            x = b(x) * m
        else:
            x = b(x)
    return x


@plain
def const(self, x):
    for i in range(N_LAYER):
        x = self.blocks[i](x)
    return x
