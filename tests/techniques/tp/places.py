"""Everywhere that code of a model may keep a value, or hand out a tensor, between forwards: blocks that keep one there, for a run under
tp and beside it in one process."""

import argparse
import contextvars
import ctypes
import functools
import io
import itertools
import logging
import logging.handlers
import os
import sys
import threading
import types
import weakref
from collections import UserDict, UserList, deque
from typing import ClassVar
from unittest import mock

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.techniques.tp.search import cut_search

WIDTH, HEAD, VOCAB = 16, 4, 20
VALUE = None
LISTED, NAMED, COUNTER, QUEUED = [], {}, itertools.count(1), deque()
WEAK, LOCAL, SPACE = weakref.WeakKeyDictionary(), threading.local(), types.SimpleNamespace()
ARGS = argparse.Namespace()
VARIABLE = contextvars.ContextVar("value", default=None)
HOLDER = types.ModuleType("holder_of_values")
sys.modules[HOLDER.__name__] = HOLDER


class Slots:
    __slots__ = ("value",)

    def __eq__(self, other):
        return isinstance(other, Slots)

    __hash__ = object.__hash__


SLOTS = Slots()


class Meta(type):
    pass


class Shared(metaclass=Meta):
    value = None
    table: ClassVar[dict] = {}


# ---- numbers that are computed once --------------------------------------------------------------------------------


def attribute(block, make):
    if getattr(block, "kept", None) is None:
        block.kept = make()
    return block.kept


def own_dict(block, make):
    if "value" not in block.notes:
        block.notes["value"] = make()
    return block.notes["value"]


def nested(block, make):
    if not block.deep[0].inner:
        block.deep[0].inner.append((make(),))
    return block.deep[0].inner[0][0]


def own_slots(block, make):
    if not hasattr(block.slots, "value"):
        block.slots.value = make()
    return block.slots.value


def own_property(block, make):
    block.make = make
    return block.computed


def class_attribute(block, make):
    if type(block).value is None:
        type(block).value = make()
    return type(block).value


def class_dict(block, make):
    return block.table.setdefault("value", make())


def other_class(block, make):
    if Shared.value is None:
        Shared.value = make()
    return Shared.value


def metaclass(block, make):
    if not hasattr(type(Shared), "value"):
        type(Shared).value = make()
    return type(Shared).value


def method_cache(block, make):
    block.make = make
    return block.once()


@functools.lru_cache
def _once():
    return _MAKE[0]()


_MAKE = [None]


def function_cache(block, make):
    _MAKE[0] = make
    return _once()


def module_global(block, make):
    global VALUE
    if VALUE is None:
        VALUE = make()
    return VALUE


def global_list(block, make):
    if not LISTED:
        LISTED.append(make())
    return LISTED[0]


def global_dict(block, make):
    if "value" not in NAMED:
        NAMED["value"] = make()
    return NAMED["value"]


def global_deque(block, make):
    if not QUEUED:
        QUEUED.append(make())
    return QUEUED[0]


def global_slots(block, make):
    if not hasattr(SLOTS, "value"):
        SLOTS.value = make()
    return SLOTS.value


def _cell():
    value = None

    def kept(block, make):
        nonlocal value
        if value is None:
            value = make()
        return value

    def reset():
        nonlocal value
        value = None

    return kept, reset


closure_cell, _reset_cell = _cell()


def default_argument(block, make, kept=[]):  # noqa: B006
    if not kept:
        kept.append(make())
    return kept[0]


def keyword_default(block, make, *, kept={}):  # noqa: B006
    return kept.setdefault("value", make())


def function_attribute(block, make):
    if not hasattr(function_attribute, "value"):
        function_attribute.value = make()
    return function_attribute.value


def weak_dict(block, make):
    if block not in WEAK:
        WEAK[block] = make()
    return WEAK[block]


def context_variable(block, make):
    if VARIABLE.get() is None:
        VARIABLE.set(make())
    return VARIABLE.get()


def thread_local(block, make):
    if not hasattr(LOCAL, "value"):
        LOCAL.value = make()
    return LOCAL.value


def namespace(block, make):
    if not hasattr(SPACE, "value"):
        SPACE.value = make()
    return SPACE.value


def other_module(block, make):
    import holder_of_values as holder

    if not hasattr(holder, "value"):
        holder.value = make()
    return holder.value


def library_module(block, make):
    if not hasattr(torch, "_value_of_a_user"):
        torch._value_of_a_user = make()
    return torch._value_of_a_user


def counter(block, make):
    """The first call of all gives the whole value, all others what is at hand."""
    return make() if next(COUNTER) > 1 else 0.5


def _generated():
    value = yield
    while True:
        value = yield value


_GENERATOR = [None]


def generator(block, make):
    """A generator that goes on with the first value that it was sent."""
    if _GENERATOR[0] is None:
        _GENERATOR[0] = _repeating(make())
    return next(_GENERATOR[0])


def _repeating(value):
    while True:
        yield value


def second_forward(block, make):
    """Used from the second forward on only."""
    value, block.last = getattr(block, "last", 0.5), make()
    return value


def registered(block, make):
    """A buffer."""
    if not hasattr(block, "kept"):
        block.register_buffer("kept", torch.tensor(make(), dtype=torch.float64), persistent=False)
    return float(block.kept)


def registered_for_good(block, make):
    if not hasattr(block, "kept"):
        block.register_buffer("kept", torch.tensor(make(), dtype=torch.float64))
    return float(block.kept)


def second_count(block, make):
    """The same with a whole number."""
    value, block.count = getattr(block, "count", 8 if block.where == "outside" else 4), round(8 * make())
    return value / 8


def on_layer(block, make):
    """An attribute of a layer of torch's."""
    if not hasattr(block.q, "gain"):
        block.q.gain = make()
    return block.q.gain


def on_parameter(block, make):
    if not hasattr(block.s, "gain"):
        block.s.gain = make()
    return block.s.gain


def on_namespace(block, make):
    block.args.gain = getattr(block.args, "gain", None) or make()
    return block.args.gain


def _dispatch():
    @functools.singledispatch
    def of_kind(_):
        return None

    return of_kind


_of_kind = [_dispatch()]


def in_dispatch(block, make):
    if float not in _of_kind[0].registry:
        made = make()
        _of_kind[0].register(float, lambda _: made)
    return _of_kind[0](1.0)


def in_environ(block, make):
    return float(os.environ.setdefault("VALUE_OF_A_USER", repr(make())))


def put_together(block, make):
    return globals().setdefault(f"VALUE_{block.number % 1}_OF_A_USER", make())


def put_together_elsewhere(block, make):
    import holder_of_values as holder

    name = f"value_{block.number % 1}_of_a_user"
    if not hasattr(holder, name):
        setattr(holder, name, make())
    return getattr(holder, name)


_text, _bytes = io.StringIO(), io.BytesIO()


def in_text(block, make):
    if not _text.getvalue():
        _text.write(repr(make()))
    return float(_text.getvalue())


def in_bytes(block, make):
    if not _bytes.tell():
        _bytes.write(repr(make()).encode())
    return float(_bytes.getvalue())


class Listing(logging.Handler):
    """A handler that keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record.args[0])


_log, _logged = logging.getLogger("techniques.tp.places"), logging.getLogger("techniques.tp")
_listing, _streamed, _buffered = Listing(), logging.StreamHandler(io.StringIO()), logging.handlers.MemoryHandler(1000)
_log.propagate = _logged.propagate = False
_log.addHandler(_listing)


def in_log_records(block, make):
    """In a handler of its logger."""
    if not _listing.records:
        _log.warning("%s", make())
    return _listing.records[0]


def in_log_stream(block, make):
    """In a stream of the logger above, which is found by its name."""
    log = logging.getLogger("techniques.tp")
    if not log.handlers[0].stream.getvalue():
        log.warning("%r", make())
    return float(log.handlers[0].stream.getvalue())


def in_log_buffer(block, make):
    handler = logging.getLogger("techniques.tp").handlers[1]
    if not handler.buffer:
        logging.getLogger("techniques.tp").warning("%r", make())
    return handler.buffer[0].args[0]


_number = (ctypes.c_double * 2)()


def in_c_array(block, make):
    _number[0] = _number[0] or make()
    return _number[0]


def on_torch_class(block, make):
    nn.Linear.value_of_a_user = getattr(nn.Linear, "value_of_a_user", None) or make()
    return nn.Linear.value_of_a_user


def on_class_of_layer(block, make):
    kind = type(block.o)
    if not hasattr(kind, "value_of_a_user"):
        kind.value_of_a_user = make()
    return kind.value_of_a_user


def on_torch_function(block, make):
    if not hasattr(F.softmax, "value_of_a_user"):
        F.softmax.value_of_a_user = make()
    return F.softmax.value_of_a_user


def on_user_dict(block, make):
    return block.options.setdefault("gain", make())


def on_global_args(block, make):
    """As of a script's parser, for all blocks."""
    ARGS.gain = getattr(ARGS, "gain", None) or make()
    return ARGS.gain


def in_thread(block, make):
    """Code that another thread runs."""

    def keep():
        SPACE.gain = getattr(SPACE, "gain", None) or make()

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    return SPACE.gain


def history(block, make):
    """What the two forwards before have shown."""
    block.last = getattr(block, "last", deque([4 if block.where == "outside" else 2] * 2, maxlen=2))
    block.last.append(round(4 * make()))
    return block.last[0] / 4


def _begun_later(block, make):
    block.args.gain = getattr(block.args, "gain", None) or make()
    return block.args.gain


def second_function(block, make):
    """A function that runs from the second forward on only."""
    block.notes["forwards"] = block.notes.get("forwards", 0) + 1
    return _begun_later(block, make) if block.notes["forwards"] > 1 else 0.5


KEPT = {
    f.__name__.strip("_"): f
    for f in (
        attribute, own_dict, nested, own_slots, own_property, class_attribute, class_dict, other_class, metaclass, method_cache,
        function_cache, module_global, global_list, global_dict, global_deque, global_slots, default_argument, keyword_default,
        function_attribute, weak_dict, context_variable, thread_local, namespace, other_module, library_module, counter, generator, second_forward, second_count, registered, registered_for_good,
        in_log_records, in_log_stream, in_log_buffer, in_c_array, in_dispatch, in_environ, put_together, put_together_elsewhere, in_text, in_bytes, on_torch_class, on_class_of_layer, on_torch_function,
        on_layer, on_parameter, on_namespace, on_user_dict, on_global_args, in_thread, history, second_function,
    )
} | {"closure_cell": closure_cell}  # fmt: skip


# ---- tensors that are handed out ------------------------------------------------------------------------------------


def _aux(u):
    return u.square().sum()


def out_list(block, u):
    LISTED.append(_aux(u))


def out_class(block, u):
    type(block).value = _aux(u) if type(block).value is None else type(block).value + _aux(u)


def out_attribute(block, u):
    block.aux = _aux(u)


def out_deque(block, u):
    QUEUED.append(_aux(u))


def out_set(block, u):
    block.held.add(_aux(u))


def out_object(block, u):
    pass  # see LM


def out_generator(block, u):
    pass


def out_closure(block, u):
    pass


def out_context(block, u):
    VARIABLE.set([*(VARIABLE.get() or []), _aux(u)])


def out_local(block, u):
    LOCAL.value = getattr(LOCAL, "value", 0) + _aux(u)


def out_weak(block, u):
    WEAK[block] = _aux(u)


def out_number(block, u):
    """A number, which the loss weighs the next step by."""
    block.notes["size"] = float(u.detach().square().mean())


def out_layer(block, u):
    """An attribute of a layer of torch's."""
    block.n1.aux = _aux(u)


def out_queue(block, u):
    block.args.queue = getattr(block.args, "queue", None) or UserList()
    block.args.queue.append(_aux(u))


def out_shape(block, u):
    block.notes["size"] = tuple(u.shape)[-1]


def out_flag(block, u):
    block.notes["size"] = u.shape[-1] > WIDTH


def out_text(block, u):
    block.notes["size"] = str(u.shape[-1])


def out_array(block, u):
    """An array that is written in place."""
    block.array[0] = u.shape[-1]


HANDED = {
    f.__name__: f
    for f in (out_list, out_class, out_attribute, out_deque, out_set, out_object, out_generator, out_closure, out_context, out_local, out_weak, out_number, out_layer, out_queue, out_shape, out_flag, out_text, out_array)
}  # fmt: skip


def handed(model, out, kind):
    """What the loss takes from there, and empties it."""
    blocks = model.blocks
    if kind == "out_list":
        found = sum(LISTED)
        LISTED.clear()
    elif kind == "out_class":
        found, Block.value = Block.value, None
    elif kind == "out_attribute":
        found = sum(b.aux for b in blocks if hasattr(b, "aux"))
    elif kind == "out_deque":
        found = sum(QUEUED)
        QUEUED.clear()
    elif kind == "out_set":
        found = sum(sum(b.held) for b in blocks)
        for b in blocks:
            b.held.clear()
    elif kind == "out_object":
        found = out.total()
    elif kind == "out_generator":
        found = sum(out)
    elif kind == "out_closure":
        found = out()
    elif kind == "out_context":
        found = sum(VARIABLE.get())
        VARIABLE.set(None)
    elif kind == "out_local":
        found = LOCAL.value
        del LOCAL.value
    elif kind == "out_layer":
        found = sum(b.n1.aux for b in blocks if hasattr(b.n1, "aux"))
    elif kind == "out_queue":
        found = sum(sum(b.args.__dict__.pop("queue", ())) for b in blocks)
    elif kind == "out_array":
        found = torch.zeros((), dtype=torch.float64) + sum(float(b.array[0]) for b in blocks)
    elif kind == "out_weak":
        found = sum(WEAK.values())
        WEAK.clear()
    else:
        found = torch.zeros((), dtype=torch.float64) + sum(float(b.notes.get("size", 0)) for b in blocks)
    return found


class Outputs:
    """An output with methods."""

    def __init__(self, logits, aux):
        self.logits, self._aux = logits, aux

    def total(self):
        return sum(self._aux)


# ---- the model ------------------------------------------------------------------------------------------------------


OBJECTS = {
    "on_namespace": lambda: ("args", argparse.Namespace()),
    "second_function": lambda: ("args", argparse.Namespace()),
    "out_queue": lambda: ("args", argparse.Namespace()),
    "on_user_dict": lambda: ("options", UserDict()),
    "out_array": lambda: ("array", numpy.zeros(2)),
}


class Inner:
    def __init__(self):
        self.inner = []

    def __eq__(self, other):
        return isinstance(other, Inner)

    __hash__ = object.__hash__


class Block(nn.Module):
    value = None
    table: ClassVar[dict] = {}

    def __init__(self, kind, where, i, late):
        super().__init__()
        self.kind, self.where, self.number, self.first = kind, where, i, 2 if late else 0
        self.notes, self.deep, self.slots, self.held = {}, [Inner()], Slots(), set()
        if kind in OBJECTS:  # blocks with objects of their own are not taken to be alike
            setattr(self, *OBJECTS[kind]())
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.s = nn.Parameter(torch.tensor(1.3))

    @functools.cached_property
    def computed(self):
        return self.make()

    @functools.lru_cache  # noqa: B019
    def once(self):
        return self.make()

    def forward(self, x):
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scale, factor = 0.5, 1.0
        if self.number >= self.first and self.kind in KEPT:
            kept = KEPT[self.kind]
            if self.where == "cut":
                scale = kept(self, lambda: (WIDTH / q.shape[1]) ** -0.5)
            else:
                factor = kept(self, lambda: q.shape[1] / 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        x = x + self.o(y.transpose(1, 2).flatten(2)) * factor
        u = torch.tanh(self.up(self.n2(x)))
        self.u = None
        if self.number >= self.first and self.kind in HANDED:
            tensor = u if self.where == "cut" else x
            HANDED[self.kind](self, tensor)
            if self.kind in ("out_object", "out_generator", "out_closure"):
                return x + self.down(u) * self.s, tensor
        if self.kind == "measured" and self.number >= self.first:
            return x + self.down(u) * self.s * (64 / self.down.weight.numel())
        if self.kind == "inside" and self.number >= self.first:
            return x + self.down(u * self.s)
        if self.kind == "no_grad" and self.number >= self.first:
            return x + self.down(u * u.detach()) * self.s
        return x + self.down(u) * self.s


class LM(nn.Module):
    def __init__(self, kind, where="cut", late=False, num_blocks=4):
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block(kind, where, i, late) for i in range(num_blocks))

    def forward(self, input_ids):
        x, aux = self.embed(input_ids), []
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x, tensor = x
                aux.append(tensor)
        logits = self.head(x)
        if self.kind == "out_object":
            return Outputs(logits, [_aux(u) for u in aux])
        if self.kind == "out_generator":
            return logits, (_aux(u) for u in aux)
        if self.kind == "out_closure":
            return logits, lambda: sum(_aux(u) for u in aux)
        return logits


# ---- hooks that call a layer's function -----------------------------------------------------------------------------


def of_row(module, args, y):
    return y + 0.1 * F.linear(args[0], module.weight)


def of_column(module, args, y):
    return y + 0.1 * F.linear(args[0], module.weight)


def of_block(module, args, y):
    return y + 0.1 * F.linear(torch.tanh(F.linear(y, module.up.weight)), module.down.weight)


def before_block(module, args):
    (x,) = args
    return (x + 0.1 * F.linear(torch.tanh(F.linear(x, module.up.weight)), module.down.weight),)


def of_model(model, args, kwargs, y):
    x, block = model.embed(args[0] if args else kwargs["input_ids"]), model.blocks[3]
    x = F.linear(torch.tanh(F.linear(x, block.up.weight)), block.down.weight)
    return y + F.linear(x, model.head.weight)


def with_hooks(model, kind):
    blocks = model.blocks[2:] if kind.endswith("late") else model.blocks
    for block in blocks:
        if kind.startswith("of_row"):
            block.down.register_forward_hook(of_row)
        elif kind.startswith("of_column"):
            block.up.register_forward_hook(of_column)
        elif kind.startswith("of_block"):
            block.register_forward_hook(of_block)
        elif kind.startswith("before_block"):
            block.register_forward_pre_hook(before_block)
    if kind.startswith("of_model"):
        model.register_forward_hook(of_model, with_kwargs=True)
    return model


def reset():
    """All places are as when they were imported."""
    global VALUE, COUNTER
    VALUE, COUNTER = None, itertools.count(1)
    for each in (LISTED, NAMED, QUEUED, WEAK, Block.table, vars(SPACE), vars(ARGS), vars(function_attribute)):
        each.clear()
    for each in (LOCAL, SLOTS, HOLDER, Meta):
        if hasattr(each, "value"):
            del each.value
    Block.value = Shared.value = _GENERATOR[0] = None
    default_argument.__defaults__[0].clear()
    keyword_default.__kwdefaults__["kept"].clear()
    vars(torch).pop("_value_of_a_user", None)
    os.environ.pop("VALUE_OF_A_USER", None)
    _of_kind[0] = _dispatch()
    globals().pop("VALUE_0_OF_A_USER", None)
    vars(HOLDER).pop("value_0_of_a_user", None)
    for file in (_text, _bytes):
        file.seek(0)
        file.truncate()
    _listing.records.clear()
    _buffered.buffer.clear()
    _streamed.stream.seek(0)
    _streamed.stream.truncate()
    _logged.handlers[:] = [_streamed, _buffered]
    _number[0] = 0.0
    vars(F.softmax).pop("value_of_a_user", None)
    if hasattr(nn.Linear, "value_of_a_user"):
        del nn.Linear.value_of_a_user
    _once.cache_clear()
    Block.once.cache_clear()
    VARIABLE.set(None)
    _reset_cell()


def everything():
    """What the places hold."""
    held = (
        LISTED,
        NAMED,
        QUEUED,
        WEAK,
        Block.table,
        vars(SPACE),
        vars(ARGS),
        vars(function_attribute),
        default_argument.__defaults__[0],
    )
    values = [VALUE, Block.value, Shared.value, _GENERATOR[0], VARIABLE.get(), *map(len, held)]
    values += [hasattr(each, "value") for each in (LOCAL, SLOTS, HOLDER, Meta)]
    values += [hasattr(HOLDER, "value_0_of_a_user"), len(_text.getvalue()), len(_bytes.getvalue())]
    values += [len(_listing.records), len(_buffered.buffer), len(_streamed.stream.getvalue()), _number[0]]
    values += [len(_of_kind[0].registry), "VALUE_OF_A_USER" in os.environ, "VALUE_0_OF_A_USER" in globals()]
    values += [hasattr(each, "value_of_a_user") for each in (nn.Linear, F.softmax)]
    return [*values, hasattr(torch, "_value_of_a_user"), _once.cache_info().currsize, Block.once.cache_info().currsize]


def searched(module, *arguments):
    """As :func:`cut_search.search`, which leaves all places and the attributes of the module as they are."""
    held, attributes = everything(), {name: {*vars(part)} for name, part in module.named_modules()}
    found = cut_search.search(module, *arguments)
    if everything() != held or {name: {*vars(part)} for name, part in module.named_modules()} != attributes:
        raise AssertionError("the search for layers to cut has left something behind")
    return found


def trained_without_proof(layout):
    """As :func:`trained`, where what is found in the first blocks is believed of the others, and graphs do not show what is used."""
    with (
        mock.patch("shardwise.techniques.tp.search.cut_search.holds_for_all", lambda *_: True),
        mock.patch("shardwise.techniques.tp.whole_uses.WholeUses.share"),
    ):
        return trained(layout, "inside", "cut", True)


def windows(turn, lengths=(5, 8, 6, 7)):
    generator = torch.Generator().manual_seed(turn)
    rows = [torch.randint(0, VOCAB, (2, length + 1), generator=generator) for length in lengths]
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in rows]


def loss_of(model, out, batch, kind):
    logits = out.logits if isinstance(out, Outputs) else out[0] if isinstance(out, tuple) else out
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    if kind in HANDED:
        out = out[1] if isinstance(out, tuple) else out
        loss = loss + 0.01 * handed(model, out, kind)
    return loss


def build(kind, where, late, num_blocks=4):
    torch.manual_seed(0)
    return with_hooks(LM(kind, where, late, num_blocks).double(), kind + ("_late" if late else ""))


def plain(kind, where, late, turns=3):
    """Losses and parameters of one process."""
    reset()
    model, losses = build(kind, where, late), []
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(turns):
        given = windows(turn)
        num = sum(batch["labels"].numel() for batch in given)
        losses.append(0.0)
        for batch in given:
            loss = loss_of(model, model(batch["input_ids"]), batch, kind) / num
            loss.backward()
            losses[-1] += loss.item()
        optim.step()
        optim.zero_grad()
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def trained(layout, kind, where, late, turns=3):
    """Losses and parameters of training, and how many parameters are cut; or the error."""
    reset()
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        try:
            with mock.patch("shardwise.techniques.tp.probe.search", searched):
                model = sw.parallelize(build(kind, where, late), world)
            optim, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
            for turn in range(turns):
                losses.append(0.0)
                dp = world.axis("dp")
                given = windows(turn)[dp.rank :: dp.size]
                with sw.window(model, given) as window:
                    for batch in window:
                        loss = loss_of(model, model(batch["input_ids"]), batch, kind) / window.num_tokens
                        loss.backward()
                        losses[-1] += loss.item()
                losses[-1] = float(dp.reduce(torch.tensor(losses[-1], dtype=torch.float64)))
                optim.step()
                optim.zero_grad()
            state = sw.full_state_dict(model)
            cut = sum(any(cut.axis == "tp" for cut in p.cuts) for p in sw.recipe_of(model).params.values())
            return losses, dict(state), cut
        except Exception as error:
            return f"{type(error).__name__}: {error}"
