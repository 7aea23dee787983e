"""What PEFT puts into the names of a model's tensors, which files of the model do not have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.model.adopted import Adopted, is_of_peft
from shardwise.model.names import canonical_modules


def inner_of_peft(module: nn.Module) -> str | None:
    """The name of the child that holds the model which a class of PEFT is around; None: the module is of no such class. By name: PEFT
    need not be installed."""
    found = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("peft.")}
    return "base_model" if "PeftModel" in found else "model" if "BaseTuner" in found else None


@dataclass(frozen=True)
class NamesOfPeft:
    """What PEFT has put into the names of a module's tensors.

    Attributes:
        layers: adopted layers, below each of which is a ``base_layer``.
        trained: what is trained in full -> its adapter: a copy of the module, beside the ``original_module``.
    """

    layers: frozenset[str] = frozenset()
    trained: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.layers or self.trained)

    def bare(self, name: str) -> str:
        """The name of a tensor or a module without it."""
        head, at, rest = f"{name}.".partition(".base_layer.")
        if at and head in self.layers:
            return f"{head}.{rest}".rstrip(".")
        head, at, rest = f"{name}.".partition(".modules_to_save.")
        if at and rest.partition(".")[0] == self.trained.get(head):
            return f"{head}.{rest.partition('.')[2]}".rstrip(".")
        return name

    def copies(self, names: Any) -> dict[str, str]:
        """Tensor of an original module -> the one that is trained in its place, of these names."""
        found = {}
        for name in names:
            head, at, rest = name.partition(".original_module.")
            if at and head in self.trained:
                found[name] = f"{head}.modules_to_save.{self.trained[head]}.{rest}"
        return found


def names_of_peft(module: nn.Module) -> NamesOfPeft:
    """What PEFT has put into names; nothing if it has wrapped a layer that was not adopted: then all keep theirs."""
    layers, trained = set[str](), dict[str, str]()
    for name, child in canonical_modules(module):
        if is_of_peft(child):
            return NamesOfPeft()
        if isinstance(child, Adopted):
            layers.add(name)
        own = child._modules.get("modules_to_save")
        if "original_module" in child._modules and isinstance(own, nn.ModuleDict) and len(own) == 1:
            (trained[name],) = own
    return NamesOfPeft(frozenset(layers), trained) if layers else NamesOfPeft()
