"""Modules by the way their constructors make values, all of which a recorded constructor can replay."""

import copy
import functools
import math
import types

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.init import trunc_normal_

from models.record import Model

D = 48


class Holder(nn.Module):
    """Parameters, buffers and other attributes by name."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)


def parameter(make, *shape):
    """A parameter of ``shape`` that an initialiser ``make`` has filled."""
    found = nn.Parameter(torch.empty(*shape))
    make(found)
    return found


class NanoGPT(nn.Module):
    """Initialised by ``self.apply``, with a special case by name, and a tie."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64, D), nn.Embedding(16, D)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)) for _ in range(3)]
        )
        self.head = nn.Linear(D, 64, bias=False)
        self.wte.weight = self.head.weight
        self.apply(self._init_weights)
        for name, param in self.named_parameters():
            if name.endswith("2.weight"):
                nn.init.normal_(param, mean=0.0, std=0.02 / math.sqrt(6))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


class Rope(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, D, 2).float() / D)), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8).bool())
        self.register_buffer("inf", torch.full((8, 8), float("-inf")).triu(1), persistent=False)
        self.register_buffer("ids", torch.arange(8).expand(4, -1))
        self.table = torch.outer(torch.arange(8.0), self.inv_freq)  # a plain attribute
        self.weight = nn.Parameter(torch.ones(D))


class Copies(nn.Module):
    """A target network, by state dict and by deepcopy, and a slow average."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(D, D), nn.Linear(D, D)
        self.target.load_state_dict(self.online.state_dict())
        self.frozen = copy.deepcopy(self.online).requires_grad_(False)
        self.scaled = nn.Parameter(self.online.weight.detach() * 0.5)


class Kept(nn.Module):
    """Tensors in a list, a dict, a tuple and an object, one of them registered as well."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tables = {"cos": torch.cos(torch.arange(4.0)), "more": [torch.sin(torch.arange(4.0))]}
        self.pair = (torch.full((2,), 3.0), torch.full((2,), 4.0))
        self.space = types.SimpleNamespace(scale=torch.full((4,), 2.0))
        self.watched = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.tables["cos"] + self.tables["more"][0]
        return x * self.space.scale * self.pair[0].sum() + self.pair[1].sum()


def weight_norm():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, D)), nn.Linear(D, 1))


def gaussians():
    return Holder(
        scaled=nn.Parameter(torch.randn(D, D) * 0.02),
        shifted=nn.Parameter(torch.rand(D, D) + 3),
        ints=torch.randint(0, 10, (D, D)),
        order=torch.randperm(D),
        coins=torch.bernoulli(torch.full((D, D), 0.3)),
    )


def constants():
    return Holder(
        scalar=nn.Parameter(torch.tensor(0.5)),
        listed=nn.Parameter(torch.tensor([1.0, 2.0, 3.0])),
        keyword=torch.tensor(data=[4, 5]),
        viewed=nn.Parameter(torch.from_numpy(np.arange(4, dtype=np.float32))),
        changed=nn.Parameter(torch.from_numpy(np.arange(4, dtype=np.float32)).mul_(2)),
        cast=torch.from_numpy(np.eye(3)).float(),
        as_given=torch.as_tensor(np.arange(3)),
        legacy=nn.Parameter(torch.Tensor([7.0, 8.0])),
        legacy_changed=nn.Parameter(torch.Tensor([7.0, 8.0]).mul_(3)),
        made_like=torch.ones(2).new_tensor([5.0, 6.0]),
        ramp=torch.linspace(0, 1, 7, dtype=torch.float64),
        written=_written(),
        brain=torch.arange(4).to(torch.bfloat16),
        phase=torch.polar(torch.ones(3), torch.arange(3.0)),
        smallest=torch.full((2,), torch.iinfo(torch.int64).min),
        unset=torch.full((2,), float("nan")),
        nothing=torch.empty(0, 3),
    )


def _written() -> Tensor:
    made = torch.zeros(3, 4)
    made[0] = 5.0
    made[:, 1] = torch.tensor([1.0, 2.0, 3.0])
    made[[1, 2], 3] = 7.0
    return made.t()


def standard():
    return Holder(
        linear=nn.Linear(D, 2 * D),
        conv=nn.Conv2d(8, 16, 3),
        transposed=nn.ConvTranspose1d(8, 16, 5),
        embedding=nn.Embedding(80, D, padding_idx=3),
        lstm=nn.LSTM(D, 32, num_layers=2, bidirectional=True),
        gru=nn.GRU(D, 32),
        attention=nn.MultiheadAttention(D, 4),
        batch=nn.BatchNorm2d(8),
        group=nn.GroupNorm(2, 8),
        norm=nn.LayerNorm(D),
        bilinear=nn.Bilinear(16, 16, 16),
        prelu=nn.PReLU(),
    )


def initialisers():
    init = nn.init
    return Holder(
        trunc=parameter(functools.partial(trunc_normal_, std=0.02), D, D),
        cut=parameter(functools.partial(init.trunc_normal_, std=1.0, a=-0.5, b=0.5), D, D),
        orthogonal=parameter(init.orthogonal_, D, D),
        tall=parameter(functools.partial(init.orthogonal_, gain=2.0), 2 * D, D),
        xavier=parameter(init.xavier_normal_, D, D),
        kaiming=parameter(init.kaiming_uniform_, D, D),
        sparse=parameter(functools.partial(init.sparse_, sparsity=0.5), D, D),
        eye=parameter(init.eye_, D, D),
        dirac=parameter(init.dirac_, 8, 8, 3),
        constant=parameter(functools.partial(init.constant_, val=3.0), D),
    )


def further_initialisers():
    init = nn.init
    return Holder(
        xavier_uniform=parameter(init.xavier_uniform_, D, D),
        kaiming_normal=parameter(functools.partial(init.kaiming_normal_, mode="fan_out", nonlinearity="relu"), D, D),
        spread=parameter(functools.partial(init.trunc_normal_, std=10.0), D, D),
        grouped=parameter(functools.partial(init.dirac_, groups=2), 8, 4, 3, 3),
        turned=parameter(lambda weight: init.orthogonal_(weight.data.t()), D, 2 * D),
    )


def _small_(weight: Tensor, scale: float) -> None:
    with torch.no_grad():
        weight.copy_(torch.randn_like(weight).clamp_(-2, 2) * scale)


class OwnInit(nn.Module):
    """A user's own functions: by ``apply`` of a closure, and one kept in a table by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        ways = {"first": functools.partial(_small_, scale=0.3), "second": lambda w: trunc_normal_(w, std=0.01)}
        scale = 0.1

        def each(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, gain=scale)

        self.apply(each)
        for name, way in ways.items():
            way(getattr(self, name).weight)


class Key:
    """A key that prints as its address."""


class ByObject(nn.Module):
    """Tensors in a dict whose keys have no names."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tables = {Key(): torch.randn(3), Key(): torch.randn(3), "last": torch.ones(2)}


def dtypes():
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D).double(), nn.Linear(D, D).to(torch.bfloat16))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model.append(nn.Linear(D, D))
        model.append(Holder(doubled=torch.ones(3) * 2, drawn=nn.Parameter(torch.randn(D, D) + 1)))
    finally:
        torch.set_default_dtype(before)
    return model


def two_alike():
    torch.manual_seed(0)
    first = nn.Linear(D, D)
    torch.manual_seed(0)
    return nn.Sequential(first, nn.Linear(D, D), nn.Linear(D, D))


class HalvedOnce(nn.Module):
    """Its own method has the name that Hugging Face models use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D, bias=False)
        nn.init.ones_(self.linear.weight)
        self.initialize_weights()

    def initialize_weights(self):
        with torch.no_grad():
            self.linear.weight.mul_(0.5)


class Rates(nn.Module):
    """Numbers looked at while building that are the same each time: rates of stochastic depth, in the three ways they
    are usually written."""

    def __init__(self):
        super().__init__()
        steps = torch.linspace(0, 0.3, 4)
        self.items, self.listed = [x.item() for x in steps], [x.tolist() for x in steps.split([1, 3])]
        self.moved = nn.Parameter(steps.cpu() * 2)
        self.alone = nn.Parameter(torch.linspace(0, 1, 6).cpu())
        self.weight = nn.Parameter(torch.randn(6, 5) * self.items[1])
        self.wide = bool((steps > 0.2).any())


MODELS = tuple(
    Model(name=made.__name__, build=made, tags=("constructor",), hard=(made.__doc__ or "").partition("\n")[0])
    for made in (
        NanoGPT,
        Rope,
        Copies,
        Kept,
        weight_norm,
        gaussians,
        constants,
        standard,
        initialisers,
        further_initialisers,
        OwnInit,
        ByObject,
        dtypes,
        two_alike,
        HalvedOnce,
        Rates,
    )
)
