"""The names of a Hugging Face model's tensors in its files, where they differ from those in its modules.

For every kind of model, transformers has rules that convert names in files to names in modules and back: other names,
or experts that are separate in files and one tensor in the module. The rules are called, not copied: they are run on
tensors without values, and the offset and strides of a result show which part of which tensor it is.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from shardwise.errors import UnsupportedError
from shardwise.model import is_pretrained
from shardwise.recipe.boxes import whole
from shardwise.state.stored_parts import View, view_at


def stored_views(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, View]:
    """Name in files -> the part of a tensor that it is, for the tensors of ``shapes``; ``{}`` if files have the
    module's names."""
    revert = _rules("revert_weight_conversion") if is_pretrained(model) else None
    if revert is None:
        return {}
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    homes = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    with _own_classes(model), _WithoutCopies():
        found = revert(model, dict(empty))
    views: dict[str, View] = {}
    for name, tensor in found.items():
        home = homes.get(tensor.untyped_storage()._cdata)
        view = None
        if home is not None:
            place = tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())
            view = view_at(home, shapes[home], *place)
        if view is None:
            raise UnsupportedError(
                f"{type(model).__name__}, whose files hold {name} in another form than its modules",
                why="transformers computes it from several tensors, or reorders what is in one, so no rank has a part of it",
                fix="use the model's own save_pretrained on sw.full_state_dict(model), or from_pretrained before parallelize",
                name=home,
            )
        views[name] = view
    return {} if set(views) == set(shapes) and all(view.name == name for name, view in views.items()) else views


def older_name(model: nn.Module) -> Callable[[str], str]:
    """A function from a name in files of an older version to its current name."""
    if not is_pretrained(model):
        return lambda name: name
    apply = _rules("apply_renamings")
    mapping = _rules("get_model_conversion_mapping", "transformers.conversion_mapping")
    kind = _rules("WeightRenaming")
    if apply is None or mapping is None or kind is None:
        return lambda name: name
    with _own_classes(model):
        renamings = [rule for rule in mapping(model) if isinstance(rule, kind)]
    return lambda name: apply(name, renamings)


def turned_view(model: nn.Module, name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> View | None:
    """The view for a stored tensor of shape ``stored`` that is the model's ``name``, of ``shape``, with permuted dims;
    None if no rule permutes it.

    Some rules permute a tensor of files only if its shape is not the module's (published experts of Qwen3-VL-MoE, whose
    dims have been swapped since), so they say nothing about how a tensor is saved.
    """
    kind, apply = _rules("WeightConverter"), _rules("apply_converters")
    mapping = _rules("get_model_conversion_mapping", "transformers.conversion_mapping")
    if not is_pretrained(model) or kind is None or apply is None or mapping is None or sorted(stored) != sorted(shape):
        return None
    empty = torch.empty(stored, device="meta")
    with _own_classes(model), _WithoutCopies():
        rules = [rule for rule in mapping(model) if isinstance(rule, kind) and len(rule.source_patterns) == 1]
        now, pattern = apply(name, rules)
        rule = copy.deepcopy(next((rule for rule in rules if pattern in rule.source_patterns), None))
        if now != name or rule is None:
            return None
        rule.add_tensor(name, name, pattern, empty)
        try:
            made = rule.convert(name, model=model, config=model.config).get(name)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return None  # the rule is for tensors of another form
    made = made[0] if isinstance(made, list) else made
    if made is None or tuple(made.shape) != shape or made.untyped_storage()._cdata != empty.untyped_storage()._cdata:
        return None
    found = view_at(name, stored, made.storage_offset(), shape, made.stride())
    if found is None or found.box != whole(stored):
        return None
    return View(name, whole(shape), tuple(found.dims.index(dim) for dim in range(len(stored))))


def _rules(name: str, module: str = "transformers.core_model_loading") -> Any:
    """A function of transformers; None in versions before 5, which do not have it."""
    import importlib

    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


@contextlib.contextmanager
def _own_classes(model: nn.Module) -> Iterator[None]:
    """Within: every module has the class that it had before it was sharded, since the rules use the names of
    classes."""
    swapped = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, kind in swapped:
            module.__class__ = next(cls for cls in kind.__mro__ if not issubclass(cls, FSDPModule))
        yield
    finally:
        for module, kind in swapped:
            module.__class__ = kind


class _WithoutCopies(TorchFunctionMode):
    """Within: functions that would copy a permuted tensor return the view itself."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))
