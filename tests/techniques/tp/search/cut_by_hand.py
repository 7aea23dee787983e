"""Cuts a model into the regions that were found for it, on real ranks, with as little code as it takes: what the regions say is all
that is used, so that a training step by it shows whether they are right."""

import contextlib
import copy
import functools
import random
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import remove_parametrizations

from shardwise.model.attention import attentions, write_out
from shardwise.model.closures import rebind_functions
from shardwise.model.layers import Layer, LayerCalls, is_norm
from shardwise.model.lift import LiftFloat32
from shardwise.model.names import canonical_tensors
from shardwise.techniques.tp.search.cut_search import search
from shardwise.techniques.tp.search.region_records import Found, Region, rows_of
from shardwise.world import init


class Enter(torch.autograd.Function):
    """Identity; the gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad)


class Sum(torch.autograd.Function):
    """The sum over all ranks; the gradient is as it comes."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Gather(torch.autograd.Function):
    """The parts of all ranks side by side; ``has_part``: each rank has a part of the gradient."""

    @staticmethod
    def forward(ctx, x, degree, rank, has_part):
        ctx.given = rank, x.shape[-1], has_part
        parts = [torch.empty_like(x) for _ in range(degree)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        rank, width, has_part = ctx.given
        grad = summed(grad) if has_part else grad
        return grad[..., rank * width : (rank + 1) * width], None, None, None


def summed(x: Tensor) -> Tensor:
    x = x.detach().clone().contiguous()
    dist.all_reduce(x)
    return x


class Cut(LayerCalls):
    """The forward of a model on one rank of ``degree``."""

    def __init__(self, module: nn.Module, layers: dict[str, Layer], regions: list[Region], degree: int, rank: int):
        self.module, self.regions, self.degree, self.rank = module, regions, degree, rank
        self.rows: dict[str, tuple[int, Tensor]] = {}  # tensor -> its dim that is cut, and the indices that are here
        self.summed: dict[
            str, Tensor | None
        ] = {}  # tensor -> those of its local rows of which others have a part; None: all
        self.given: dict[int, tuple[Tensor, Tensor]] = {}  # id of a narrowed argument -> it, and the whole one
        self._layers = layers
        taken = {weight for region in regions for weight in region.layers}
        for name in attentions(module):
            if f"{name}.in_proj_weight" in taken:
                write_out(module.get_submodule(name), is_cut=True)
        for region in regions:
            self._read(region)
        names: dict[int, tuple[nn.Parameter, str]] = {}
        for name, owner, attr in list(canonical_tensors(module, "_parameters")):
            param = getattr(owner, attr)
            if name in self.rows:
                dim, rows = self.rows[name]
                here = param.detach().index_select(dim, rows)
                setattr(owner, attr, nn.Parameter(here, requires_grad=param.requires_grad))
            names.setdefault(id(getattr(owner, attr)), (getattr(owner, attr), name))
        for region in regions:
            self._change(module, region)
        for name in {w for region in regions for w in (*region.columns, *region.rows) if is_norm(w)}:
            self._norm(name, regions)
        super().__init__(lambda x: names[id(x)][1] if id(x) in names and names[id(x)][0] is x else None)

    def _norm(self, name: str, regions: list[Region]) -> None:
        """A norm computes on all of its inputs, and gives a rank its part of the outputs."""
        module = self.module.get_submodule(name[:-1])
        plain, cut = module.forward, next((r.columns[name] for r in regions if name in r.columns), None)
        gathers = any(name in region.rows for region in regions)

        def forward(x):
            x = Gather.apply(x, self.degree, self.rank, cut is not None) if gathers else Enter.apply(x)
            y = plain(x)
            return y if cut is None else y.index_select(-1, rows_of(cut, self.degree, self.rank))

        module.forward = forward
        if cut is not None:
            self.summed |= {f"{name}{key}": None for key, _ in module.named_parameters()}

    def _read(self, region: Region) -> None:
        for weight, cut in region.columns.items():
            if is_norm(weight):
                continue
            rows, at, shared = rows_of(cut, self.degree, self.rank), 0, []
            for part in cut:
                size = part.size * part.replicas // self.degree
                shared += [torch.arange(at, at + size)] if part.replicas > 1 else []
                at += size
            layer = self._layers[weight]
            for name, dim in ((weight, layer.out_dim), (layer.bias, 0)):
                if name is not None:
                    self.rows[name] = dim, rows
                    if shared:
                        self.summed[name] = torch.cat(shared)
        for weight in region.rows:
            if is_norm(weight):
                continue
            layer = self._layers[weight]
            dim = 1 - layer.out_dim
            size = self.module.get_parameter(weight).shape[dim] // self.degree
            self.rows[weight] = dim, torch.arange(self.rank * size, (self.rank + 1) * size)
        for weight in set(region.whole) - set(region.rows):
            layer = self._layers[weight]
            self.summed |= dict.fromkeys(name for name in (weight, layer.bias) if name is not None)
        for name, cut in region.tensors.items():
            if isinstance(cut, tuple):
                self.rows[name] = cut[0], rows_of(cut[1], self.degree, self.rank)
            else:
                self.summed[name] = None

    def _change(self, module: nn.Module, region: Region) -> None:
        for (name, attr), value in region.settings.items():
            holder = module.get_submodule(name)
            if attr.startswith("config."):
                holder.config = copy.copy(holder.config)
                holder, attr = holder.config, attr.removeprefix("config.")
            setattr(holder, attr, value)
        for name, owner, attr in list(canonical_tensors(module, "_buffers")):
            if name in region.tensors and name in self.rows:
                setattr(owner, attr, getattr(owner, attr).index_select(*self.rows[name]))
        hook = functools.partial(self._enter, region)
        module.get_submodule(region.module).register_forward_pre_hook(hook, with_kwargs=True)

    def _enter(self, region: Region, _, args, kwargs):
        def walk(value, place):
            if type(value) in (tuple, list):
                return type(value)(walk(x, (*place, i)) for i, x in enumerate(value))
            if place in region.narrowed:
                part = value.narrow(-1, 0, value.shape[-1] // self.degree)
                self.given[id(part)] = part, value
                return part
            if place not in region.arguments:
                return value
            value = Enter.apply(value) if value.requires_grad else value
            cut = region.arguments[place]
            if not isinstance(cut, tuple):
                return value
            return value.index_select(cut[0], rows_of(cut[1], self.degree, self.rank))

        return tuple(walk(x, (i,)) for i, x in enumerate(args)), {k: walk(x, (k,)) for k, x in kwargs.items()}

    def called(self, layer: Layer, x: Tensor, compute: Any) -> Tensor:
        weight = self.module.get_parameter(layer.weight)
        bias = self.module.get_parameter(layer.bias) if layer.bias is not None else None
        columns, rows, whole, inner = set(), set(), set(), set()
        for region in self.regions:
            columns, rows = columns | region.columns.keys(), rows | {*region.rows}
            whole, inner = whole | {*region.whole}, inner | {*region.inner}
        if layer.weight not in columns | rows | whole | {name for region in self.regions for name in region.readers}:
            return NotImplemented
        x = self.given[id(x)][1] if id(x) in self.given else x
        if layer.is_embedding:
            return nn.functional.embedding(x, weight)
        if layer.weight in (columns | whole) - inner - rows and x.requires_grad:
            x = Enter.apply(x)
        y = x @ (weight.T if layer.out_dim == 0 else weight)
        y = Sum.apply(y) if layer.weight in rows else y
        y = y if bias is None else y + bias
        return Enter.apply(y) if layer.weight in rows & whole else y


@functools.cache
def regions_of(name: str, degree: int) -> Found:
    """The layers of a model, and its regions for ``degree`` ranks."""
    model = models.get(name)
    batch = model.windows(1, 1)[0][0]
    return search(model.build(), lambda module: model.forward(module, batch), degree)


def errors(found: dict[str, Found]) -> dict[str, tuple[float, str, int]]:
    """For each model: the largest error of the loss or a gradient, where, and how many elements of parameters this rank holds."""
    with init("dp_shard=-1", device="cpu", timeout_s=60) as world:
        return {name: _error(models.get(name), each, world.size, world.rank) for name, each in found.items()}


def _error(model: models.Model, found: Found, degree: int, rank: int) -> tuple[float, str, int]:
    torch.manual_seed(0)
    random.seed(0)  # which some constructors draw from
    whole = model.build().double().eval()
    for name in found.computed:  # here such a weight is what it is computed to be
        remove_parametrizations(whole.get_submodule(name.rpartition(".")[0]), "weight")
    with torch.no_grad():
        for param in whole.parameters():
            param.add_(torch.randn_like(param), alpha=0.05)  # no bias of zeros, no norm of ones
    (batches,) = model.windows(1, 2)
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(whole, memo)
    rebind_functions(copied, memo)
    cut = Cut(copied, found.layers, found.regions, degree, rank)
    losses = []
    for module, within in ((whole, None), (cut.module, cut)):
        total = 0.0
        for batch in batches:  # two, so that a sum for each would show
            with within or contextlib.nullcontext(), LiftFloat32():
                output = model.forward(module, batch)
            loss = model.loss(output, batch)
            loss = loss["loss"] if isinstance(loss, dict) else loss
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
    worst = abs(losses[0] - losses[1]) / abs(losses[0]), "loss"
    wanted = {name: param.grad for name, param in whole.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)
    for name, param in cut.module.named_parameters():
        grad, want = param.grad, wanted[name]
        if want is None:
            assert grad is None, name
            continue
        grad = torch.zeros_like(param) if grad is None else grad
        if name in cut.summed:
            grad = _summed_rows(cut, name, grad, want)
        if name in cut.rows:
            dim, rows = cut.rows[name]
            want = want.index_select(dim, rows)
        error = float((grad - want).abs().max()) / max(float(want.abs().max()), 1e-4 * largest)
        worst = max(worst, (error, name))
    return *worst, sum(param.numel() for param in cut.module.parameters())


def _summed_rows(cut: Cut, name: str, grad: Tensor, want: Tensor) -> Tensor:
    rows = cut.summed[name]
    if rows is None:
        return summed(grad)
    dim, here = cut.rows[name]
    full = torch.zeros_like(want)
    full.index_copy_(dim, here[rows], grad.index_select(dim, rows))
    return grad.index_copy(dim, rows, summed(full).index_select(dim, here[rows]))
