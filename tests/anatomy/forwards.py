"""Forwards that a reader of code could misjudge: ``SKIPPABLE`` may enter other blocks on another rank, ``PLAIN`` do not.

Each is the forward of :class:`Blocks`; what matters is whether ``blocks`` may be cut into units.
"""
# ruff: noqa - written as users write, not as we do

import contextlib
import functools
import random
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SKIPPABLE: dict[str, type[nn.Module]] = {}
PLAIN: dict[str, type[nn.Module]] = {}


class Blocks(nn.Module):
    """Two lists, a layer, a buffer, and helpers that skip."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.other = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.register_buffer("gate", torch.ones(()))
        self.depth = 2
        self.flag = True
        self.extra = nn.Linear(4, 4)

    def maybe(self, b, x):
        if x.sum() > 0:
            return x
        return b(x)

    def run(self, x, k=3):
        for b in self.blocks[:k]:
            x = b(x)
        return x

    @property
    def k(self):
        return int(self.gate.item())

    @property
    def active(self):
        return self.blocks if self.gate > 0 else self.other


def skippable(forward: Callable) -> Callable:
    SKIPPABLE[forward.__name__] = type(forward.__name__, (Blocks,), {"forward": forward})
    return forward


def plain(forward: Callable) -> Callable:
    PLAIN[forward.__name__] = type(forward.__name__, (Blocks,), {"forward": forward})
    return forward


def helper(blocks, x):
    for b in blocks:
        x = b(x)
    return x


def helper_skip(blocks, x):
    for b in blocks:
        if x.sum() > 0:
            continue
        x = b(x)
    return x


class U:
    @staticmethod
    def call_maybe(f, x):
        return f(x) if x.sum() > 0 else x


@skippable
def slice_k(self, x, k):
    for b in self.blocks[:k]:
        x = b(x)
    return x


@skippable
def cond_list(self, x):
    blocks = self.other
    if x.sum() > 0:
        blocks = self.blocks
    for b in blocks:
        x = b(x)
    return x


@skippable
def try_raise(self, x):
    try:
        for b in self.blocks:
            if x.sum() > 0:
                raise StopIteration
            x = b(x)
    except StopIteration:
        pass
    return x


@skippable
def suppress(self, x):
    with contextlib.suppress(ValueError):
        for b in self.blocks:
            if x.sum() > 0:
                raise ValueError
            x = b(x)
    return x


@skippable
def lazy_gen(self, x):
    g = (b(x) for b in self.blocks)
    return next(g)


@skippable
def any_gen(self, x):
    return x * any((b(x).sum() > 0) for b in self.blocks)


@skippable
def walrus(self, x):
    for b in self.blocks:
        if (n := x.sum()) > 0:
            break
        x = b(x)
    return x


@skippable
def match_(self, x):
    match int(x.sum()):
        case 0:
            return x
    for b in self.blocks:
        x = b(x)
    return x


@skippable
def return_in_for(self, x):
    for row in x:
        if row.sum() > 0:
            return x
    for b in self.blocks:
        x = b(x)
    return x


@skippable
def return_in_with(self, x):
    with torch.no_grad():
        if x.sum() > 0:
            return x
    for b in self.blocks:
        x = b(x)
    return x


@skippable
def return_in_try(self, x):
    try:
        if x.sum() > 0:
            return x
    finally:
        pass
    for b in self.blocks:
        x = b(x)
    return x


@skippable
def done_flag(self, x):
    done = False
    for b in self.blocks:
        if done:
            break
        x = b(x)
        done = bool(x.sum() > 0)
    return x


@skippable
def attr_depth(self, x):
    self.depth = int(x.sum())
    for b in self.blocks[: self.depth]:
        x = b(x)
    return x


@skippable
def zip_short(self, x, ys):
    for b, y in zip(self.blocks, ys):
        x = b(x) + y
    return x


@skippable
def reassigned(self, x):
    if x.sum() > 0:
        self.blocks = self.other
    for b in self.blocks:
        x = b(x)
    return x


@skippable
def handed(self, x):
    for b in self.blocks:
        x = U.call_maybe(b, x)
    return x


@skippable
def torch_cond(self, x):
    for b in self.blocks:
        x = torch.cond(x.sum() > 0, b, self.extra, (x,))
    return x


@skippable
def extra_entry(self, x):
    for b in self.blocks:
        x = b(x)
    if x.sum() > 0:
        x = self.blocks[0](x)
    return x


@skippable
def extra_while(self, x):
    for b in self.blocks:
        x = b(x)
    while x.sum() > 0:
        for b in self.blocks:
            x = b(x)
    return x


@skippable
def helper_arg(self, x):
    return self.run(x, int(x.sum()))


@skippable
def prop_depth(self, x):
    for b in self.blocks[: self.k]:
        x = b(x)
    return x


@skippable
def prop_active(self, x):
    for b in self.active:
        x = b(x)
    return x


@skippable
def is_true(self, x):
    f = bool(x.sum() > 0)
    for b in self.blocks:
        if f is True:
            continue
        x = b(x)
    return x


@skippable
def is_nonzero(self, x):
    for b in self.blocks:
        if x.sum().is_nonzero():
            continue
        x = b(x)
    return x


@skippable
def none_local(self, x):
    y = None if x.sum() > 0 else x
    for b in self.blocks:
        if y is None:
            continue
        x = b(x)
    return x


@skippable
def default_none_tensor(self, x, mask=None):
    for b in self.blocks:
        if mask[0] > 0:
            continue
        x = b(x)
    return x


@skippable
def last_of_broken(self, x):
    for b in self.blocks:
        if x.sum() > 0:
            break
    return b(x)


@skippable
def shuffled(self, x):
    bs = list(self.blocks)
    random.shuffle(bs)
    for b in bs:
        x = b(x)
    return x


@skippable
def nested_cond(self, x):
    def go(h):
        for b in self.blocks:
            h = b(h)
        return h

    if x.sum() > 0:
        x = go(x)
    return x


@skippable
def stale_name(self, x):
    b = self.extra
    for y in self.blocks:
        x = y(x)
    y, z = self.pick(x)
    return x if x.sum() > 0 else self.blocks[int(x.sum())](x)


@skippable
def assigned_under_continue(self, x):
    n = 0
    for b in self.blocks:
        if x.sum() > 0:
            continue
        n = n + 1
    for b in self.blocks[:n]:
        x = b(x)
    return x


@skippable
def lambda_hidden(self, x):
    for b in self.blocks:
        x = b(x)
    f = lambda h: self.blocks[0](h)
    return f(x) if x.sum() > 0 else x


@skippable
def generator_forward(self, x):
    for b in self.blocks:
        x = b(x)
        yield x


@skippable
def method_maybe(self, x):
    for b in self.blocks:
        x = self.maybe(b, x)
    return x


@skippable
def helper_skips(self, x):
    return helper_skip(self.blocks, x)


@skippable
def forward_direct(self, x):
    for b in self.blocks:
        x = b.forward(x)
    return x


@skippable
def while_(self, x):
    i = 0
    while i < len(self.blocks) and x.sum() > 0:
        x = self.blocks[i](x)
        i += 1
    return x


@skippable
def rand_ifexp(self, x):
    for b in self.blocks:
        x = b(x) if random.random() < 0.5 else x
    return x


@skippable
def early_else(self, x):
    for y in x:
        if y.sum() > 0:
            break
    else:
        for b in self.blocks:
            x = b(x)
    return x


@skippable
def iter_next(self, x):
    it = iter(self.blocks)
    for _ in range(int(x.sum())):
        x = next(it)(x)
    return x


@skippable
def param_outside(self, x):
    for b in self.blocks:
        x = b(x)
    return torch.nn.functional.linear(x, self.blocks[0].weight)


@skippable
def seq_built(self, x):
    for b in self.blocks:
        x = b(x)
    return nn.Sequential(*self.blocks[: int(x.sum())])(x)


@skippable
def rounds_cut_short(self, x):
    for _ in range(3):
        for b in self.blocks:
            x = b(x)
        if x.sum() > 0:
            break
    return x


@skippable
def set_order(self, x):
    for b in set(self.blocks):
        x = b(x)
    return x


@skippable
def sorted_norm(self, x):
    for b in sorted(self.blocks, key=lambda b: float(b(x).sum())):
        x = b(x)
    return x


@skippable
def and_short(self, x):
    for b in self.blocks:
        y = x.sum() > 0 and b(x)
        x = x if y is False else y
    return x


@skippable
def while_break(self, x):
    i = 0
    while True:
        if x.sum() > 0:
            break
        x = self.blocks[i](x)
        i += 1
    return x


@skippable
def recursion(self, x, i=0):
    if x.sum() > 0 or i == len(self.blocks):
        return x
    return self.forward(self.blocks[i](x), i + 1)


@skippable
def enumerate_depth(self, x):
    for i, b in enumerate(self.blocks):
        if i >= x.size(0):
            break
        x = b(x)
    return x


@skippable
def map_lazy(self, x):
    it = map(lambda b: b(x), self.blocks)
    return next(it)


@skippable
def tuple_swap(self, x):
    a, b = self.blocks, self.other
    if x.sum() > 0:
        a, b = b, a
    for m in a:
        x = m(x)
    return x


@skippable
def dict_pick(self, x):
    k = "a" if x.sum() > 0 else "b"
    for m in {"a": self.blocks, "b": self.other}[k]:
        x = m(x)
    return x


@skippable
def getattr_pick(self, x):
    n = "blocks" if x.sum() > 0 else "other"
    for m in getattr(self, n):
        x = m(x)
    return x


@skippable
def setattr_depth(self, x):
    setattr(self, "depth", int(x.sum()))
    for b in self.blocks[: self.depth]:
        x = b(x)
    return x


@skippable
def dict_state(self, x):
    self.__dict__["depth"] = int(x.sum())
    for b in self.blocks[: self.depth]:
        x = b(x)
    return x


@skippable
def append_list(self, x):
    bs = []
    for b in self.blocks:
        if x.sum() > 0:
            bs.append(b)
    for b in bs:
        x = b(x)
    return x


@skippable
def filtered(self, x):
    for b in [b for b in self.blocks if x.sum() > 0]:
        x = b(x)
    return x


@skippable
def filter_fn(self, x):
    for b in filter(lambda b: x.sum() > 0, self.blocks):
        x = b(x)
    return x


@skippable
def nonlocal_depth(self, x):
    n = 3

    def f():
        nonlocal n
        n = int(x.sum())

    f()
    for b in self.blocks[:n]:
        x = b(x)
    return x


@skippable
def ifexp_none(self, x):
    for b in self.blocks:
        m = b if x.sum() > 0 else None
        if m is not None:
            x = m(x)
    return x


@skippable
def assert_caught(self, x):
    try:
        for b in self.blocks:
            assert x.sum() > 0
            x = b(x)
    except AssertionError:
        pass
    return x


@skippable
def counter_item(self, x):
    c = [3]
    c[0] = int(x.sum())
    for b in self.blocks[: c[0]]:
        x = b(x)
    return x


@skippable
def star_args(self, x):
    def run(h, *bs):
        for b in bs:
            h = b(h)
        return h

    return run(x, *self.blocks[: int(x.sum())])


@skippable
def shape_dep(self, x):
    for b in self.blocks[: x.shape[0]]:
        x = b(x)
    return x


@skippable
def kwargs_dep(self, x, **kw):
    kw["k"] = int(x.sum())
    return self.run(x, **kw)


@skippable
def partial_dep(self, x):
    return functools.partial(self.run, k=int(x.sum()))(x)


@skippable
def del_block(self, x):
    if x.sum() > 0:
        del self.blocks[0]
    for b in self.blocks:
        x = b(x)
    return x


@skippable
def aug_depth(self, x):
    n = 0
    n += int(x.sum())
    for b in self.blocks[:n]:
        x = b(x)
    return x


@skippable
def with_as(self, x):
    n = 3
    with contextlib.nullcontext(int(x.sum())) as n:
        pass
    for b in self.blocks[:n]:
        x = b(x)
    return x


@skippable
def for_target(self, x):
    n = 3
    for n in x.tolist():
        pass
    for b in self.blocks[:n]:
        x = b(x)
    return x


@skippable
def except_name(self, x):
    n = 3
    try:
        pass
    finally:
        n = int(x.sum())
    for b in self.blocks[:n]:
        x = b(x)
    return x


@skippable
def module_attr(self, x):
    for b in self.blocks:
        if self.gate > 0:
            x = b(x)
    return x


@skippable
def getattr_buffer(self, x):
    for b in self.blocks:
        if getattr(self, "gate") > 0:
            x = b(x)
    return x


@skippable
def int_default(self, x, k: int = 3):
    for b in self.blocks[:k]:
        x = b(x)
    return x


@skippable
def chained(self, x):
    for b in self.blocks:
        if 0 < x.sum() < b(x).sum():
            x = x * 2
    return x


@skippable
def starred_unpack(self, x):
    first, *rest = self.blocks
    for b in rest[: int(x.sum())]:
        x = b(x)
    return first(x)


@skippable
def lambda_default(self, x):
    f = (lambda b, h: b(h)) if x.sum() > 0 else (lambda b, h: h)
    for b in self.blocks:
        x = f(b, x)
    return x


@skippable
def compose(self, x):
    return functools.reduce(lambda h, b: b(h) if h.sum() > 0 else h, self.blocks, x)


@skippable
def yield_from(self, x):
    def gen():
        for b in self.blocks:
            yield b

    for b in gen():
        if x.sum() > 0:
            break
        x = b(x)
    return x


@skippable
def ret_list(self, x):
    def pick():
        return self.blocks if x.sum() > 0 else self.other

    for b in pick():
        x = b(x)
    return x


@skippable
def random_global(self, x):
    for b in self.blocks:
        if torch.rand(()) < 0.1:
            continue
        x = b(x)
    return x


@skippable
def rank_dep(self, x):
    import torch.distributed as dist

    for b in self.blocks[: dist.get_rank()]:
        x = b(x)
    return x


@plain
def iterated(self, x):
    for b in self.blocks:
        x = b(x)
    return x


@plain
def indexed(self, x):
    for i in range(len(self.blocks)):
        x = self.blocks[i](x)
    return x


@plain
def counted(self, x):
    n = len(self.blocks)
    for i in range(n):
        x = self.blocks[i](x)
    return x


@plain
def enum(self, x):
    for i, b in enumerate(self.blocks):
        if i in (0, 2) and self.training:
            x = x * 2
        x = b(x)
    return x


@plain
def zipped(self, x):
    for a, b in zip(self.blocks, self.other):
        x = b(a(x))
    return x


@plain
def helped(self, x):
    return helper(self.blocks, x)


@plain
def ckpt(self, x):
    for b in self.blocks:
        x = checkpoint(b, x, use_reentrant=False)
    return x


@plain
def flags(self, x, mask=None, flag: bool = False):
    if mask is not None:
        x = x * mask
    for b in self.blocks:
        if flag:
            x = x + 1
        x = b(x)
    return x


@plain
def comp(self, x):
    return sum([b(x) for b in self.blocks])


@plain
def localfn(self, x):
    def go(h):
        for b in self.blocks:
            h = b(h)
        return h

    return go(x)


@plain
def cond_compute(self, x):
    for b in self.blocks:
        x = b(x)
        if x.isnan().any():
            x = x.nan_to_num()
    return x


@plain
def names_by_key(self, x):
    for k in range(3):
        x = getattr(self.blocks, str(k))(x)
    return x


@plain
def appended(self, x):
    hs = []
    for b in self.blocks:
        x = b(x)
        hs.append(x)
    return sum(hs)


@plain
def built_list(self, x):
    for b in [*self.blocks, self.extra]:
        x = b(x)
    return x


@plain
def early_check(self, x):
    if x.dim() != 2:
        raise ValueError("shape")
    if x.shape[0] == 0:
        raise ValueError("empty")
    for b in self.blocks:
        x = b(x)
    return x


@plain
def ckpt_flag(self, x):
    for b in self.blocks:
        if self.training and self.flag:
            x = checkpoint(b, x, use_reentrant=False)
        else:
            x = b(x)
    return x


@plain
def ckpt_fn(self, x):
    def run(b):
        def inner(*a):
            return b(*a)

        return inner

    for b in self.blocks:
        x = checkpoint(run(b), x)
    return x


@plain
def zip_arg(self, x):
    skips = []
    for a in self.other:
        x = a(x)
        skips.append(x)
    for b, s in zip(self.blocks, reversed(skips)):
        x = b(x) + s
    return x


@plain
def pop_skips(self, x):
    skips = []
    for a in self.other:
        x = a(x)
        skips.append(x)
    for b in self.blocks:
        x = b(x) + skips.pop()
    return x


@plain
def autocast(self, x):
    with torch.autocast("cpu", enabled=False):
        for b in self.blocks:
            x = b(x)
    return x


@plain
def reduced(self, x):
    f = self.blocks
    for i, b in zip(range(3), f):
        x = b(x)
    return x


@plain
def named(self, x):
    for n, b in self.blocks.named_children():
        x = b(x)
    return x


@plain
def loss_or_not(self, x, labels=None):
    for b in self.blocks:
        x = b(x)
    loss = None
    if labels is not None:
        loss = (x - labels).sum()
    return x if loss is None else loss
