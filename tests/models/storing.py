"""Modules that store something else than they hold: each by another of torch's ways."""

import torch
from torch import Tensor, nn

__all__ = ["STORING", "build_storing", "older_state"]


class Logarithm(nn.Module):
    """Holds a logarithm, and stores the number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "scale"] = self.scale.detach().exp()

    def _load_from_state_dict(self, state, prefix, *rest):
        super()._load_from_state_dict({prefix + "scale": state[prefix + "scale"].log()}, prefix, *rest)


class Packed(nn.Module):
    """Holds two weights, and stores one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Parameter(torch.zeros(5, 8)), nn.Parameter(torch.zeros(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.q.T) @ self.k

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "qk"] = torch.cat([self.q, self.k]).detach()

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        if prefix + "qk" not in state:
            missing.append(prefix + "qk")
            return
        both = state[prefix + "qk"]
        self.q.data.copy_(both[:5])
        self.k.data[:2].copy_(both[5:7])
        self.k.data[2:].copy_(both[7:])


class Turned(nn.Linear):
    """Stored its weight the other way round before version 2."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(8, 8)

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version") is None or metadata["version"] < 2:
            state[prefix + "weight"] = state[prefix + "weight"].t().contiguous()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Columns(nn.Linear):
    """Stores its weight the other way round and doubled, beside another linear layer: a pair that tensor parallelism cuts."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = 2 * self.weight.detach().t()

    def _load_from_state_dict(self, state, prefix, *rest):
        weight = state[prefix + "weight"].t() / 2
        super()._load_from_state_dict({**state, prefix + "weight": weight}, prefix, *rest)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Columns(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Stripped(nn.Module):
    """A wrapper whose names are those of what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Logarithm())
        self._register_load_state_dict_pre_hook(self.add_prefix)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        return self.inner.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def add_prefix(self, state, prefix, *_):
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}inner.{name.removeprefix(prefix)}"] = state.pop(name)


class Hooked(nn.Module):
    """Stores half of its weight by a hook, and takes it twice by another: functions that use the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8, bias=False)
        self.factor = 2.0

        def halve(module, state, prefix, metadata):
            state[prefix + "lin.weight"] = state[prefix + "lin.weight"] / self.factor + 0 * self.lin.weight.detach()

        def double(module, state, prefix, *_):
            state[prefix + "lin.weight"] = state[prefix + "lin.weight"] * module.factor

        self.register_state_dict_post_hook(halve)
        self.register_load_state_dict_pre_hook(double)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Dropped(nn.Module):
    """Does not store its frozen base, and is not surprised that it is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.tuned = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))
        self.base.requires_grad_(False)
        self.register_state_dict_post_hook(self.drop)
        self.register_load_state_dict_post_hook(self.excuse)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.tuned

    @staticmethod
    def drop(module, state, prefix, metadata):
        for name in [name for name in state if name.startswith(prefix + "base.")]:
            del state[name]

    @staticmethod
    def excuse(module, keys):
        keys.missing_keys[:] = [name for name in keys.missing_keys if ".base." not in name]


class Counted(nn.Module):
    """Keeps numbers in Python: stores one as a tensor, and others as its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.num_seen, self.notes = 0, {"rate": 0.5, "names": ["a"]}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (1 + self.num_seen) * self.notes["rate"]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "num_seen"] = torch.tensor(self.num_seen)

    def _load_from_state_dict(self, state, prefix, *rest):
        self.num_seen = int(state.pop(prefix + "num_seen"))
        super()._load_from_state_dict(state, prefix, *rest)

    def get_extra_state(self):
        return self.notes

    def set_extra_state(self, state):
        self.notes = state


class Derived(nn.Module):
    """Computes a table from its weight when it has been loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.register_buffer("table", torch.zeros(8), persistent=False)
        self.register_load_state_dict_post_hook(self.fill)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.table

    @staticmethod
    def fill(module, keys):
        module.table.copy_(module.weight.detach().cumsum(0))


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), middle, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Renamed(Net):
    """Takes names of an older version, anywhere in it, as Mamba does."""

    def __init__(self) -> None:
        super().__init__(Logarithm())
        self._register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(state, prefix, *_):
        for name in list(state):
            if "middel." in name:
                state[name.replace("middel.", "middle.")] = state.pop(name)


class Whole(nn.Module):
    """A root whose own ``state_dict`` and ``load_state_dict`` leave out that it wraps anything."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net(Packed())

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def state_dict(self, *args, **options):
        return {name.removeprefix("model."): value for name, value in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state, strict=True):
        return self.model.load_state_dict(state, strict=strict)


STORING = {
    "logarithm": lambda: Net(Logarithm()),
    "packed": lambda: Net(Packed()),
    "turned": lambda: Net(Turned()),
    "pair": lambda: Net(Pair()),
    "stripped": lambda: Net(Stripped()),
    "hooked": lambda: Net(Hooked()),
    "dropped": lambda: Net(Dropped()),
    "counted": lambda: Net(Counted()),
    "derived": lambda: Net(Derived()),
    "renamed": Renamed,
    "whole": Whole,
}


def build_storing(name: str, seed: int) -> nn.Module:
    """One of them with values of its own, which say what it has counted too."""
    torch.manual_seed(seed)
    model = STORING[name]().double()
    with torch.no_grad():
        for child in model.modules():
            frozen = isinstance(child, nn.Linear) and not child.weight.requires_grad
            if frozen:
                torch.manual_seed(99)  # what is not stored is the same wherever it is built
            for param in child.parameters(recurse=False):
                param.copy_(torch.randn_like(param))
            if isinstance(child, Counted):
                child.num_seen, child.notes = seed, {"rate": 0.25 * seed, "names": ["b", "c"]}
            if isinstance(child, Derived):
                child.fill(child, None)
            torch.manual_seed(seed)
    return model


def older_state(name: str, model: nn.Module):
    """Its state dict as an older version had saved it, with and without what torch says of versions."""
    state = model.state_dict()
    metadata = getattr(state, "_metadata", None)
    if name == "turned":
        state["middle.weight"] = state["middle.weight"].t().contiguous()
        metadata["middle"] = {"version": 1}
    if name == "renamed":
        state["middel.scale"] = state.pop("middle.scale")
    return state
