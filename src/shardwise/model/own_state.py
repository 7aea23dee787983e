"""Modules that answer for their state themselves: by ``_save_to_state_dict``, ``_load_from_state_dict``, ``state_dict``, hooks
on these, or a ``_version`` that they upgrade from. What they store need not be what they hold.

Their methods are run, by torch's own walk, on a copy of the whole module: on meta, which shows for each entry of a state
dict whether it is a tensor of the module as it is, or computed, and from which tensors; and with values for what is
computed, and for nothing else.
"""

import contextlib
import copy
import functools
import inspect
import json
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UnsupportedError, first_line
from shardwise.model.closures import rebound
from shardwise.model.names import canonical_modules, canonical_tensors, module_of_error, own_attributes, unwrap_module
from shardwise.model.own_methods import answering_functions, is_own, own_methods
from shardwise.model.plain_state import changed_attributes, plain_attributes, tensors_in
from shardwise.model.state_trace import NeedsValuesError, StateTrace, storage_key
from shardwise.model.tensors import follow_parameters, parameter_like

EXTRA_STATE = "_extra_state"  # the key of a module's extra state in a state dict, after the module's name
HELD = "a tensor of the module: "  # before the names of what a tensor is made of: the values that the module holds


@dataclass(frozen=True)
class Entry:
    """An entry of a state dict that is a tensor.

    Attributes:
        home: canonical name of the module's tensor that it is, unchanged; None: it is computed.
        made_of: canonical names of the tensors that it is computed from.
    """

    home: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    made_of: frozenset[str]


@dataclass(frozen=True)
class Encoded:
    """What a module stores.

    Attributes:
        entries: name -> tensor, in the order of its state dict.
        state: the state dict itself.
        values_of: name of an entry that is no tensor -> canonical names of the tensors that it is made of, if there are any.
    """

    entries: Mapping[str, Entry]
    state: Mapping[str, Any]
    values_of: Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class ExtraState:
    """Stands in a state dict for what ``get_extra_state`` returns, under the name that the canonical name of its module gives:
    it is called on the sharded module, not on the copy."""

    name: str


@dataclass
class Decoded:
    """What loading a state dict does to a module.

    Attributes:
        direct: canonical name -> the entry that is copied to it, unchanged.
        computed: canonical name -> the entries that it is computed from.
        values: canonical name -> its tensor after loading; on meta, or with values.
        missing: canonical names that nothing was written to, and whose absence no hook allows; and what else methods miss.
        unexpected: entries that the module does not know.
        attributes: name of a module -> its plain attributes that have changed.
        attributes_of: entries that such attributes are computed from.
        extra: name of an extra state, as in :class:`ExtraState` -> the entry that is given to its module.
    """

    direct: dict[str, str] = field(default_factory=dict)
    computed: dict[str, frozenset[str]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    attributes_of: frozenset[str] = frozenset()
    extra: dict[str, Any] = field(default_factory=dict)


class OwnState:
    """A copy of a module without values, on which its own methods are run.

    Args:
        module: not sharded yet; any device.
        dtypes: canonical name of a parameter -> the dtype that it will be stored in.

    Attributes:
        methods: see :func:`own_methods`.
        versions: of the modules, as JSON, to be stored with their tensors; None: loading does not depend on them.
        stores_itself: every entry of its state dict is a tensor of the module, under its own name, and all are there.

    Raises:
        UnsupportedError: a method that cannot be run on the copy, with its module.
    """

    def __init__(self, module: nn.Module, dtypes: Mapping[str, torch.dtype]):
        self.methods = own_methods(module)
        self._twin = self._copy(module, dtypes)
        self._extra_given: dict[str, Any] = {}
        self._replace_extra_states()
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._bare: dict[str, Tensor] = {}
        first: dict[int, str] = {}
        for kind in ("_parameters", "_buffers"):
            for name, owner, attr in canonical_tensors(self._twin, kind):
                tensor = getattr(owner, kind)[attr]
                home = first.setdefault(id(tensor), name)
                self._bare[home] = tensor
                self._places.setdefault(home, []).append((getattr(owner, kind), attr))
        self._stored = {name for name, owner, attr in canonical_tensors(module, "_parameters")} | {
            name
            for name, owner, attr in canonical_tensors(module, "_buffers")
            if attr not in owner._non_persistent_buffers_set
        }
        self._given: dict[str, dict[str, Any]] = {}  # plain attributes when the module was sharded
        self._foreign = {storage_key(tensor) for kind in ("_parameters", "_buffers") for tensor in _all(module, kind)}
        self.versions: str | None = ""
        self.stores_itself = self._try()
        self._foreign = set()  # sharding frees those tensors, and others may lie where they were

    def begin(self, module: nn.Module) -> None:
        """Called once, with the sharded module: what sharding itself has changed in it is not the user's state."""
        self._given = {
            name: {attr: copy.deepcopy(value) for attr, value in values.items() if not tensors_in(value)}
            for name, values in plain_attributes(module).items()
        }

    def follow(self, buffers: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Gives buffers of the copy the shapes and dtypes, by canonical name, that those of the sharded module have now."""
        for name, (shape, dtype) in buffers.items():
            if name in self._bare:
                self._bare[name] = torch.empty(shape, dtype=dtype, device="meta")

    # ---- out -------------------------------------------------------------------------------------------------

    def encode(self, module: nn.Module | None = None, values: Mapping[str, Tensor] | None = None) -> Encoded:
        """The state dict as the module's own methods give it.

        Args:
            module: the sharded module, whose plain attributes are used.
            values: canonical name -> full tensor, for those that have values; the others are on meta.
        """
        homes = self._filled(values or {})
        trace = StateTrace(homes, self._foreign)
        with self._as_in(module), trace, torch.no_grad():
            state = self._twin.state_dict()
        entries, values_of = {}, {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                values_of[name] = frozenset().union(*map(trace.made_of, tensors_in(value)))
                continue
            trace.refuse_foreign(value)
            entries[name] = Entry(trace.origin(value), tuple(value.shape), value.dtype, trace.made_of(value))
        return Encoded(entries, state, {name: made_of for name, made_of in values_of.items() if made_of})

    # ---- in --------------------------------------------------------------------------------------------------

    def decode(
        self,
        state: Mapping[str, Any],
        metadata: Mapping[str, Any] | None,
        module: nn.Module | None = None,
        real: frozenset[str] | set[str] = frozenset(),
        fill: int = 0,
    ) -> Decoded:
        """Loads a state dict by the module's own methods.

        Args:
            state: name -> tensor, with values or on meta; extra states too.
            metadata: as torch puts it on a state dict; None: there is none.
            module: the sharded module, whose plain attributes are used.
            real: canonical names of tensors that get values.
            fill: what those are filled with before.
        """
        blank = {n: torch.full_like(self._bare[n], fill, device="cpu") for n in real}
        homes = self._filled(blank)
        self._extra_given.clear()
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        trace = StateTrace({**tensors, **{HELD + name: tensor for name, tensor in homes.items()}}, self._foreign)
        with self._as_in(module) as before, trace, torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
            told = self._load(with_metadata(state, metadata))
            found = self._changes(homes, tensors, trace)
            found.attributes = changed_attributes(before, plain_attributes(self._twin))
        found.extra = dict(self._extra_given)
        found.attributes_of = frozenset().union(*(trace.made_of(tensor) for tensor in tensors_in(found.attributes)))
        absent = [n for n in homes if n in self._stored and n not in found.direct and n not in found.computed]
        lacked = [] if told is None else told.missing_keys
        more = (k for k in lacked if not k.endswith(EXTRA_STATE) and not any(_is_named(n, [k]) for n in self._stored))
        found.missing = (*(n for n in absent if told is None or _is_named(n, lacked)), *more)
        used = {*found.direct.values()}.union(found.attributes_of, *found.computed.values())
        strange = () if told is None else told.unexpected_keys
        found.unexpected = tuple(n for n in state if n not in used and _is_named(n, strange))
        return found

    def _load(self, state: Mapping[str, Any]) -> Any:
        taken = inspect.signature(self._twin.load_state_dict).parameters
        is_lenient = "strict" in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values())
        told: Any = self._twin.load_state_dict(state, **({"strict": False} if is_lenient else {}))
        return told if hasattr(told, "missing_keys") and hasattr(told, "unexpected_keys") else None

    def _changes(self, homes: Mapping[str, Tensor], given: Mapping[str, Tensor], trace: "StateTrace") -> Decoded:
        found = Decoded()
        for name, tensor in homes.items():
            held, attr = self._places[name][0]
            now = held.get(attr)
            if not isinstance(now, Tensor):
                continue
            is_own = now is tensor and trace.is_in_place(HELD + name, now)
            if is_own and not trace.was_written(now):
                continue
            trace.refuse_foreign(now)
            source = trace.copied_from(now) if is_own else now
            origin = None if source is None else trace.origin(source)
            if origin in given:
                found.direct[name] = str(origin)
            else:
                found.computed[name] = trace.made_of(now)
            found.values[name] = now.detach()
        return found

    # ---- the copy --------------------------------------------------------------------------------------------

    def _copy(self, module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Any:
        memo: dict[int, Any] = {}
        for kind in ("_parameters", "_buffers"):
            for name, owner, attr in canonical_tensors(module, kind):
                tensor = getattr(owner, kind)[attr]
                bare = torch.empty(tensor.shape, dtype=dtypes.get(name, tensor.dtype), device="meta")
                is_param = kind == "_parameters"
                memo.setdefault(id(tensor), parameter_like(tensor, bare, tensor.requires_grad) if is_param else bare)
        try:
            twin = copy.deepcopy(unwrap_module(module), memo)
        except Exception as error:
            name, methods = next(iter(self.methods.items()))
            raise UnsupportedError(
                f"{', '.join(methods)} of a model that cannot be copied",
                why=f"what it stores is found by running it on a copy without values, and copy.deepcopy fails: {first_line(error)}",
                fix="keep what cannot be copied (files, locks, processes) out of the module's attributes",
                name=name or None,
            ) from error
        for child in twin.modules():
            child._modules.update({n: unwrap_module(c) for n, c in child._modules.items() if c is not None})
            for held, key, function in answering_functions(child):
                held[key] = rebound(function, memo)
        return twin

    def _filled(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gives the copy tensors: those of ``values``, and new ones on meta; returns all of them, by name."""
        before, homes = {}, {}
        for name, bare in self._bare.items():
            held, attr = self._places[name][0]
            before[name] = held[attr]
            made = values[name] if name in values else torch.empty_like(bare, requires_grad=False)
            homes[name] = parameter_like(bare, made, bare.requires_grad) if isinstance(bare, nn.Parameter) else made
            for held, attr in self._places[name]:
                held[attr] = homes[name]
        follow_parameters(self._twin, before, homes)
        return homes

    def _replace_extra_states(self) -> None:
        for name, child in canonical_modules(self._twin):
            if is_own(child, "get_extra_state"):
                key = f"{name}.{EXTRA_STATE}".removeprefix(".")
                vars(child)["get_extra_state"] = functools.partial(ExtraState, key)
                vars(child)["set_extra_state"] = functools.partial(self._extra_given.__setitem__, key)

    def extra_states_of(self) -> dict[str, frozenset[str]]:
        """Name of an extra state, as in :class:`ExtraState` -> canonical names of the tensors that it is made of, as far as that
        is seen without values."""
        found = {}
        homes = self._filled({})
        trace = StateTrace(homes, set())
        for _, child in canonical_modules(self._twin):
            if isinstance(made := vars(child).get("get_extra_state"), functools.partial):
                with contextlib.suppress(Exception, NeedsValuesError), trace, torch.no_grad():
                    state = type(child).get_extra_state(child)
                    found[made().name] = frozenset().union(*map(trace.made_of, tensors_in(state)))
        return found

    @contextlib.contextmanager
    def _as_in(self, module: nn.Module | None) -> Iterator[dict[str, dict[str, Any]]]:
        """Within: the copy has the plain attributes that ``module`` has got since it was sharded; gives all that the
        copy has. After: it has those that it had before."""
        held = dict(canonical_modules(self._twin))
        before = {name: own_attributes(child) for name, child in held.items()}
        kept = copy.deepcopy(plain_attributes(self._twin))
        changes = {} if module is None else changed_attributes(self._given, plain_attributes(module))
        for name, values in changes.items():
            if name in held:
                vars(held[name]).update(copy.deepcopy(values))
        try:
            yield copy.deepcopy(plain_attributes(self._twin))
        finally:
            self._filled({})
            for name, child in held.items():
                for attr in own_attributes(child).keys() - before[name].keys():
                    del vars(child)[attr]
                vars(child).update({**before[name], **kept[name]})

    def _try(self) -> bool:
        """Runs the methods once, both ways; returns :attr:`stores_itself`."""
        with self._refusing("stores"):
            told = self.encode()
        state = {
            name: torch.empty_like(value) if isinstance(value, Tensor) else value for name, value in told.state.items()
        }
        metadata = getattr(told.state, "_metadata", None)
        with self._refusing("loads"):
            found = self._try_load(state, metadata)
            with contextlib.suppress(Exception, NeedsValuesError):
                without = self._try_load(state, None)
                self.versions = None if (without.direct, without.computed) == (found.direct, found.computed) else ""
        if self.versions is not None:
            own = {name: told for name, told in dict(metadata or {}).items() if name in self.methods}
            self.versions = json.dumps(own, default=str)
        kept = {name for name, entry in told.entries.items() if entry.home is not None}
        return all(entry.home is not None for entry in told.entries.values()) and kept == self._stored

    def _try_load(self, state: dict[str, Any], metadata: Any) -> Decoded:
        while True:
            try:
                return self.decode(state, metadata)
            except NeedsValuesError as error:
                if not error.names <= state.keys() or not any(state[name].is_meta for name in error.names):
                    raise
                state.update({n: torch.ones_like(state[n], device="cpu") for n in error.names})

    @contextlib.contextmanager
    def _refusing(self, does: str) -> Iterator[None]:
        fix = (
            "let the method work with shapes and torch's functions alone, so that it runs on tensors without values; or let the module "
            "hold what it stores"
        )
        try:
            yield
        except UnsupportedError:
            raise
        except NeedsValuesError as error:
            why = f"what it {does} depends on the values of {min(error.names).removeprefix(HELD)}, of which each rank may have a part"
            raise self._unfit(error, why, fix) from error
        except Exception as error:
            why = f"on a copy without values it raises {type(error).__name__}: {first_line(error)}"
            raise self._unfit(error, why, fix) from error

    def module_of(self, error: BaseException) -> tuple[str, tuple[str, ...]]:
        """The module in whose own method ``error`` was raised, by canonical name, and its methods."""
        name = module_of_error(self._twin, error) or ""
        name = name if name in self.methods else next(iter(self.methods))
        return name, self.methods[name]

    def _unfit(self, error: BaseException, why: str, fix: str) -> UnsupportedError:
        name, methods = self.module_of(error)
        return UnsupportedError(
            f"{', '.join(methods)} of a {type(self._twin.get_submodule(name)).__name__}",
            why=why,
            fix=fix,
            name=name or None,
        )


def with_metadata(state: Mapping[str, Any], metadata: Any) -> dict[str, Any]:
    """``state`` with the versions of modules where torch's ``load_state_dict`` reads them; None: it has none."""
    found = OrderedDict(state)
    if metadata is not None:
        found._metadata = metadata  # type: ignore[attr-defined]
    return found


def _is_named(name: str, keys: Iterable[str]) -> bool:
    """Whether it is one of ``keys``, or ends in one: a wrapper's ``load_state_dict`` tells names in what it wraps."""
    return any(name == key or name.endswith(f".{key}") for key in keys)


def _all(module: nn.Module, kind: str) -> list[Tensor]:
    return [getattr(owner, kind)[attr] for _, owner, attr in canonical_tensors(module, kind)]
