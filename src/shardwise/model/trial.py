"""Runs of a model in which every linear layer returns a random tensor.

:class:`Trial` runs a copy of the model in which each call of a linear layer returns a leaf of autograd. What the model
does between its linear layers is then all that runs, so that no weights are needed and a gradient says which outputs of
one layer which inputs of the next depend on.
"""

import contextlib
import copy
import functools
import gc
import itertools
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, UnsupportedError, first_line
from shardwise.launch.imports import uncollected
from shardwise.model.attention import attentions, write_out
from shardwise.model.calling import line_of
from shardwise.model.closures import rebind_functions
from shardwise.model.computed import with_plain_weights
from shardwise.model.isolated import Isolated
from shardwise.model.layers import Layer
from shardwise.model.leaves import Ended, Leaves
from shardwise.model.module_state import Attributes, HookState, TensorAttributes, content_of
from shardwise.model.names import canonical_modules, canonical_tensors, module_of_error
from shardwise.model.packed import packed_layers
from shardwise.model.pytrees import leaves_of, tensors_within
from shardwise.model.run import Call, Place, Run
from shardwise.model.tensors import hidden_tensors, loose_tensors, parameter_like

Change = Callable[[Place, Tensor], Tensor]

_MOST_GENERATED = 1000  # that a generator gives
_MOST_KEPT = 64 << 20  # bytes of a run that is kept


Uses = dict[str, dict[str, set[Layer]]]
"""Weight of a layer -> module in whose forward it is called, the innermost one that runs then -> what it is there."""

OUTSIDE = "a hook of the model"
"""Stands for a module where a layer is called outside of the model's forward."""


class Trial:
    """A copy of ``module`` in float64 whose linear layers and embeddings return random leaves.

    Other parameters and buffers have the values of ``module``, or random ones where it is on meta; all floating ones
    require gradients. Weights of linear layers have no values. Nothing is dropped out. Changes nothing in ``module``.

    Args:
        module: any module, on meta or not.
        call: ``call(copy)`` runs it once and returns its output. An :class:`Isolated` serves several trials.
        training: whether the copy is in training mode.
        without: modules of lists that the copy does not have.
        norms: modules that are taken for layers: what they are called with is seen, and they return random leaves.
        foreign: of an earlier trial of these modules: then nothing is run before it is asked for.
        computed: weights that are computed; in the copy they are parameters.

    Raises:
        UnsupportedError: the module cannot be copied, or does not run.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[nn.Module], Any],
        *,
        training: bool = False,
        without: frozenset[str] = frozenset(),
        norms: frozenset[str] = frozenset(),
        foreign: frozenset[str] | None = None,
        computed: frozenset[str] = frozenset(),
    ):
        self._call = call if isinstance(call, Isolated) else Isolated(module, call)
        self._values = dict[tuple[Call, int], Tensor]()
        self._original, self._training, self._without, self.norms = module, training, without, norms
        self._computed = computed
        self._widths: dict[str, int] = {}  # of norms
        self._running: Leaves | None = None
        self.layers: dict[str, Layer] = {}
        """Name of a weight -> its layer, once a run has called it."""
        self.foreign: dict[str, str] = {}
        """Name of a parameter with two dims or more -> the function that used it in another way than as a layer."""
        self._constant: set[str] = set()  # buffers that a forward writes in place, with gradients: none come to these
        self.read: dict[str, dict[str, None]] = {}
        """Parameter -> the functions other than layers that have used it."""
        self.measured: set[str] = set()
        """Parameters of which the model's code has read the shape: it would be that of a rank's part."""
        self.uses: dict[str, dict[Layer, None]] = {}
        """Name of a weight -> all layers that it is the weight of: an embedding and a head, with one bias and another."""
        self._on_read: Callable[[str], None] = _ignored
        self.written: dict[str, tuple[nn.Module, str, Tensor]] = {}
        """The buffers that a run writes -> their module, attribute and value before. Each run starts with that."""
        self._has_run = False
        self._plain = dict[tuple[int, str | None], Run]()
        self._uses: Uses = {}
        self._readers: dict[str, set[str]] = {}
        self._statistics: dict[int, Tensor] = {}  # that batch norm writes
        self.module = self._copy(module, foreign or frozenset())
        while foreign is None:
            used = len(self.foreign)
            before = dict(self.module.named_modules())
            try:
                self.calls = tuple(self.run().inputs)
                """The calls of one whole run, in order."""
            except ShardwiseError:
                raise
            except Exception as error:
                if self._is_write(error):
                    self.written, self._has_run = {}, False
                    self.module = self._copy(module, frozenset(self.foreign))
                    continue
                if len(self.foreign) == used:
                    raise UnsupportedError(
                        f"a run of {type(module).__name__} without its linear layers",
                        why=f"{type(error).__name__}: {first_line(error)}{line_of(error)}",
                        fix="let it run on a batch as training gives it (example= of parallelize), on the CPU and in float64",
                    ) from error
            _refuse_replaced(before, dict(self.module.named_modules()))
            if len(self.foreign) == used:
                break
            # A function that is no linear layer needs the values of these.
            self.written, self._has_run = {}, False
            self.module = self._copy(module, frozenset(self.foreign))

    def run(
        self,
        *,
        draw: int = 0,
        rows: Mapping[str, Tensor] | None = None,
        detached: str | None = None,
        changes: Mapping[str, Change] | None = None,
        until: frozenset[Call] = frozenset(),
        note: Callable[[Layer], None] = lambda _: None,
        watch: Callable[[Call, Tensor], None] | None = None,
        outputs: Callable[[Call, Tensor], Tensor] | None = None,
        again: bool = False,
    ) -> Run:
        """Runs the copy. Whatever it keeps, in modules or outside of them, is put back at the end.

        Args:
            draw: of the random outputs: other numbers, other outputs.
            rows: name of a weight -> the outputs of its layer that are computed, as indices; others: all.
            detached: name of a module whose floating arguments are replaced by leaves.
            changes: name of a module -> a function that gets the place and the value of each of its floating
                arguments, and returns what takes its place.
            until: ends the run when these calls have been made; empty: it runs to its end.
            note: called with each layer that is called.
            watch: called with each call and its input, which are then not kept, for large models; without gradients.
            outputs: with ``watch``: called with each call and its outputs, returns what takes their place; with gradients then.
            again: the run is the second forward: what the first one keeps, it finds.
        """
        # Outputs of models may be in circles, such as a cache of keys, and hold the whole graph of an earlier run.
        gc.collect(1)
        seen, missing = Run(), set(until)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_changed_arguments(self.module, seen, detached, changes or {}))
            attributes = self._enter(stack, has_gradients=watch is None or outputs is not None)
            if again:
                first = Leaves(
                    self, Run(), draw, rows or {}, set(), lambda _: None, watch and (lambda *_: None), outputs
                )
                with first as self._running:
                    self._call(self.module)
            self._running = stack.enter_context(Leaves(self, seen, draw, rows or {}, missing, note, watch, outputs))
            if again or not self._has_run:
                stack.enter_context(self._call.noting((self.module.training, self._without, again)))
            with contextlib.suppress(Ended):
                seen.output = _tensors_of(self._call(self.module))
                self._note_kept(seen, attributes)
        return seen

    def plain(self, draw: int = 0, detached: str | None = None) -> Run:
        """:meth:`run` with these options alone; where it has been made before, and is small, what that has seen.
        Of a model that writes buffers it is made each time, as its tensors are others then."""
        key = draw, detached
        if key not in self._plain:
            run = self._noted() if key == (0, None) else self.run(draw=draw, detached=detached)
            self._plain = {known: x for known, x in self._plain.items() if known in ((0, None), (0, detached))}
            if run.nbytes > _MOST_KEPT or self.written:
                return run
            self._plain[key] = run
        return self._plain[key]

    def run_within(
        self,
        mode: contextlib.AbstractContextManager[Any],
        *,
        has_gradients: bool = False,
        then: Callable[[Run], None] = lambda _: None,
    ) -> tuple[Any, Run]:
        """Runs the copy within ``mode``, which makes the calls of its layers. Returns its output, and a record with
        tensors of the output and of what the run has kept. ``then`` is called with it before buffers have their values again."""
        gc.collect(1)  # as in run()
        seen = Run()
        with contextlib.ExitStack() as stack:
            attributes = self._enter(stack, has_gradients=has_gradients)
            for buffer in self.module.buffers():  # as in training: the model may write it
                buffer.requires_grad_(buffer.requires_grad and not has_gradients)
            stack.enter_context(mode)
            output = self._call(self.module)
            seen.output = _tensors_of(output)
            self._note_kept(seen, attributes)
            then(seen)
        return output, seen

    def _enter(self, stack: contextlib.ExitStack, *, has_gradients: bool) -> list[Attributes | TensorAttributes]:
        """Within ``stack``: the copy may be run; what it keeps is put back at the end. Returns its Python state."""
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # such as those of numbers taken from tensors that have gradients only here
        # So many objects are made that Python would look for circles many times in a run.
        stack.enter_context(uncollected())
        stack.enter_context(_default_dtype(torch.float64))
        stack.enter_context(torch.set_grad_enabled(has_gradients))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        # For what the model, or the function that calls it, draws by itself. Generators of other devices stay as they are.
        torch.default_generator.manual_seed(0)
        return stack.enter_context(self._restored())

    def _note_kept(self, seen: Run, attributes: Iterable[Attributes | TensorAttributes]) -> None:
        """Notes what a run has kept anywhere: tensors, numbers and texts."""
        values = [(getattr(each, "module", None), value) for each in attributes for value in each.changed()]
        values += self._call.kept()
        if not values:
            return
        names = {id(hidden.tensor): hidden.name for hidden in hidden_tensors(self.module)}
        modules = {id(module): name for name, module in canonical_modules(self.module)}
        found: dict[int, tuple[str, Tensor]] = {}
        for home, value in values:
            for tensor in _tensors_of(value):
                found.setdefault(id(tensor), (names.get(id(tensor), modules.get(id(home), str(home))), tensor))
        seen.keeps, seen.kept = True, list(found.values())

    def forget_outputs(self) -> None:
        """Frees the random outputs of layers; a later run draws them again."""
        self._values.clear()
        self._plain.clear()
        self._running = None  # it has what the last run has seen

    def set_training(self, is_training: bool) -> None:
        """Puts the copy in training mode, or in eval mode: other code may run, and write other buffers."""
        self.module.train(is_training)
        self._has_run = False
        self._plain.clear()

    def in_training(self) -> "Trial":
        return Trial(
            self._original, self._call, training=True, without=self._without, norms=self.norms, computed=self._computed
        )

    def callers(self) -> dict[str, tuple[str, ...]]:
        """Weight of a layer -> the modules in whose forward it is called: the innermost ones that run then."""
        self.plain()
        return {weight: tuple(callers) for weight, callers in self._uses.items()}

    def readers(self) -> dict[str, set[str]]:
        """Parameter -> the modules in whose forward functions other than layers use it."""
        self.plain()
        return self._readers

    def _noted(self) -> Run:
        """A plain run, which shows :meth:`callers` and :meth:`readers` too. Not the first one, in which code may fill what it keeps from
        then on."""
        self._uses, self._readers = {}, {}
        with self.noting(self._uses, self._readers) as note:
            return self.run(note=note)

    @contextlib.contextmanager
    def noting(self, uses: Uses, readers: dict[str, set[str]] | None = None) -> Iterator[Callable[[Layer], None]]:
        """Context manager: gives a function for ``note`` of :meth:`run` that adds each layer to ``uses``; parameters that other functions
        use are added to ``readers``."""
        running = [OUTSIDE]
        if readers is not None:
            self._on_read = lambda name: readers.setdefault(name, set()).add(running[-1])
        try:
            with around_modules(self.module, running.append, lambda _: running.pop()):
                yield lambda layer: uses.setdefault(layer.weight, {}).setdefault(running[-1], set()).add(layer)
        finally:
            self._on_read = _ignored

    @contextlib.contextmanager
    def _restored(self) -> Iterator[list[Attributes | TensorAttributes]]:
        """Context manager: buffers have their values again at the end, modules their Python state, and places outside of them what they
        held. Gives the Python state. The first run shows which buffers are written."""
        known = {} if self._has_run else self._buffers()
        modules, parts = [*self.module.modules()], dict[int, Any]()
        for module in modules:
            if module not in self._attributes or not self._attributes[module].are_same():
                self._attributes[module] = Attributes(module, all_tensors=True, known=parts)
        before = [(set(module._buffers), self._attributes[module]) for module in modules]
        hooks, of_tensors = HookState(modules), TensorAttributes(modules)
        try:
            yield [of_tensors, *(attributes for _, attributes in before)]
        finally:
            self._has_run = True
            for name, (owner, attr, buffer, value) in known.items():
                is_same = owner._buffers.get(attr) is buffer and torch.equal(buffer.detach(), value)
                if not is_same or id(buffer) in self._statistics:
                    self.written[name] = owner, attr, value
            with contextlib.ExitStack() as stack:  # all of them, whichever raises
                stack.callback(self._call.restore)
                stack.callback(hooks.restore)
                stack.callback(of_tensors.restore)
                for names, attributes in before:
                    for attr in attributes.module._buffers.keys() - names:
                        delattr(attributes.module, attr)
                    attributes.restore()
            for owner, attr, value in self.written.values():  # another tensor: gradients may need what was written
                owner._buffers[attr] = _cloned(value)

    def _buffers(self) -> dict[str, tuple[nn.Module, str, Tensor, Tensor]]:
        found = [
            (name, owner, attr, owner._buffers[attr])
            for name, owner, attr in canonical_tensors(self.module, "_buffers")
        ]
        return {name: (owner, attr, x, _cloned(x)) for name, owner, attr, x in found if x is not None}

    def _is_write(self, error: Exception) -> bool:
        """Whether a run failed as a module wrote a buffer of its own in place, with gradients. They are constant from now on."""
        home = module_of_error(self.module, error) if "leaf Variable that requires grad" in str(error) else None
        module = self.module if home is None else self.module.get_submodule(home)
        names = {
            f"{home}.{attr}" if home else attr
            for attr, b in module._buffers.items()
            if b is not None and b.requires_grad
        }
        is_new = "leaf Variable that requires grad" in str(error) and bool(names - self._constant)
        self._constant |= names if is_new else set()
        return is_new

    def entered(self) -> list[str]:
        """The modules in the order in which they are first entered."""
        found: dict[str, None] = {}
        with around_modules(self.module, found.setdefault, lambda _: None):
            self.run()
        return list(found)

    def others(self) -> dict[str, Tensor]:
        """Floating parameters and buffers that are part of no layer, by canonical name."""
        layers = {name for layer in self.layers.values() for name in layer.names}
        norms = tuple(f"{name}." for name in self.norms)
        found, seen = dict[str, Tensor](), set[int]()
        for kind in ("_parameters", "_buffers"):
            for name, owner, attr in canonical_tensors(self.module, kind):
                tensor = getattr(owner, kind)[attr]
                has_values = tensor.requires_grad and tensor.is_floating_point() and not tensor.is_meta
                if name not in layers and has_values and id(tensor) not in seen and not name.startswith(norms):
                    found[name] = tensor
                    seen.add(id(tensor))
        return found

    def unused(self) -> list[str]:
        layers = {name for layer in self.layers.values() for name in layer.names}
        norms = tuple(f"{name}." for name in self.norms)
        names = {self.name_of(param) for param in self.module.parameters()} - layers - self.read.keys() - {None}
        return sorted(name for name in names if name is not None and not name.startswith(norms))

    def _copy(self, module: nn.Module, with_values: frozenset[str]) -> nn.Module:
        self._attributes: dict[nn.Module, Attributes] = {}  # before a run
        self._shapes: dict[str, torch.Size] = {}
        memo: dict[int, Any] = {id(module.get_submodule(name)): nn.Identity() for name in self._without}
        self._names: dict[int, tuple[Tensor, str]] = {}  # by id, with the tensor: an id alone may be another's later
        generator = torch.Generator().manual_seed(0)
        for kind in ("_parameters", "_buffers"):
            for name, owner, attr in canonical_tensors(module, kind):
                tensor = getattr(owner, kind)[attr]
                if id(tensor) in memo:
                    continue
                is_weight = kind == "_parameters" and tensor.dim() > 1 and name not in with_values
                made = _without_values(tensor) if is_weight else _with_values(tensor, generator)
                memo[id(tensor)] = (
                    parameter_like(tensor, made, made.is_floating_point()) if kind == "_parameters" else made
                )
                if kind == "_parameters":
                    param = memo[id(tensor)]
                    self._names[id(param)] = param, name
        for tensor in loose_tensors(module).values():
            memo[id(tensor)] = _with_values(tensor, generator)
        try:
            copied = copy.deepcopy(module, memo).train(self._training)
        except Exception as error:
            raise UnsupportedError(
                f"a {type(module).__name__} that cannot be copied",
                why=f"copy.deepcopy: {type(error).__name__}: {error}",
                fix="keep what cannot be copied (files, locks, processes) out of the module's attributes",
            ) from error
        rebind_functions(copied, memo)
        plain = [
            name
            for name in self._computed - with_values
            if not any(name.startswith(f"{block}.") for block in self._without)
        ]
        for name, weight in with_plain_weights(copied, plain).items():
            self._names[id(weight)] = weight, name
        for layer in packed_layers(copied).values():
            codes = self.name_of(layer.weight_nf4)
            if (
                codes is not None and layer.weight_nf4.is_meta
            ):  # reading the weight is no use of it: its dtype may be asked for
                layer.stand_in = torch.empty(layer.packing.shape, dtype=torch.float64, device="meta")
                self._names[id(layer.stand_in)] = layer.stand_in, codes
        for name in attentions(copied):
            write_out(copied.get_submodule(name), is_cut=False)  # type: ignore[arg-type]
        for name in self._without:
            parent, _, key = name.rpartition(".")
            del copied.get_submodule(parent)._modules[key]
        for name in self.norms:
            copied.get_submodule(name).forward = functools.partial(self._norm, f"{name}.")
        constant = {id(copied.get_buffer(name)) for name in self._constant}
        for buffer in copied.buffers():
            if buffer.is_floating_point() and id(buffer) not in constant:
                buffer.requires_grad_()
        return copied

    def _norm(self, name: str, x: Tensor) -> Any:
        assert self._running is not None
        return self._running.called(Layer(name, None, 0), x)

    def num_outputs(self, layer: Layer, x: Tensor) -> int:
        """How many outputs a layer has in the whole model; ``x``: an input, whole when a norm is called first."""
        if layer.is_norm:
            return self._widths.setdefault(layer.weight, x.shape[-1])
        return self.shape_of(layer.weight)[layer.out_dim]

    def shape_of(self, weight: str) -> torch.Size:
        """The shape of a weight of the whole model."""
        if weight not in self._shapes:
            owner, _, attr = weight.rpartition(".")
            param = self.module.get_submodule(owner)._parameters[attr]  # over which an adapted weight may lie
            assert param is not None
            self._shapes[weight] = param.shape
        return self._shapes[weight]

    def name_of(self, tensor: Any) -> str | None:
        param, name = self._names.get(id(tensor), (None, None))
        return name if param is tensor else None

    def value(self, call: Call, shape: tuple[int, ...], draw: int) -> Tensor:
        """The random output of a call; the same in every run of this ``draw``."""
        if (call, draw) not in self._values:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{call.weight} {call.number} {draw}".encode()))
            self._values[call, draw] = torch.randn(shape, generator=generator, dtype=torch.float64)
        return self._values[call, draw]


@contextlib.contextmanager
def around_modules(root: nn.Module, before: Callable[[str], Any], after: Callable[[str], Any]) -> Iterator[None]:
    """Context manager: functions are called with the name of each module, before and after its forward, which its hooks are outside
    of."""

    def around(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            before(name)
            try:
                return forward(*args, **kwargs)
            finally:
                after(name)

        inside.__wrapped__ = forward  # type: ignore[attr-defined]  # its signature may be asked for
        return inside

    with contextlib.ExitStack() as stack:
        for name, module in canonical_modules(root):
            if "forward" in vars(module):
                stack.callback(setattr, module, "forward", module.forward)
            else:
                stack.callback(vars(module).pop, "forward")
            module.forward = around(name, module.forward)
        yield


def _ignored(_: Any) -> None:
    pass


def _refuse_replaced(before: Mapping[str, nn.Module], after: Mapping[str, nn.Module]) -> None:
    """Raises UnsupportedError if a run has replaced modules of the model."""
    name = next((name for name in {**before, **after} if before.get(name) is not after.get(name)), None)
    if name is not None:
        raise UnsupportedError(
            "a model that replaces its own modules when it runs",
            why="what is changed in a module for this rank's part would be gone with it",
            fix="run one such batch through the plain model before parallelize, so that it has the modules that it will use",
            name=name,
        )


def _cloned(tensor: Tensor) -> Tensor:
    """A copy of its value that requires gradients if the tensor does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _without_values(tensor: Tensor) -> Tensor:
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _with_values(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().clone()
    if not tensor.is_meta:
        return tensor.detach().to("cpu", torch.float64, copy=True)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return 1 + 0.1 * drawn if tensor.dim() < 2 else drawn / max(tensor.shape[-1], 1) ** 0.5


def _tensors_of(value: Any) -> list[Tensor]:
    """Tensors, numbers, arrays of them and texts (as a number) in a value, also in the attributes of objects, in closures, and those that a generator gives. Not in a
    cache of keys and values of transformers, which is a rank's own."""
    found: list[Tensor] = []
    waiting, seen = leaves_of(value), set[int]()
    while waiting:
        leaf = waiting.pop(0)
        if isinstance(leaf, Tensor | int | float | complex):
            found.append(torch.as_tensor(leaf))
        elif isinstance(leaf, str):
            found.append(torch.tensor(zlib.crc32(leaf.encode())))
        elif (
            type(leaf).__module__ == "numpy" and getattr(leaf, "dtype", None) is not None and leaf.dtype.kind in "biufc"
        ):
            found.append(torch.as_tensor(leaf))
        elif id(leaf) not in seen and not _is_cache(leaf):
            seen.add(id(leaf))
            waiting += _held(leaf)
    return found


def _held(leaf: Any) -> list[Any]:
    """What calling a function, or going through a generator, would show; the tensors of another object."""
    if isinstance(leaf, types.GeneratorType):
        return leaves_of(list(itertools.islice(leaf, _MOST_GENERATED)))
    if isinstance(leaf, functools.partial):
        return leaves_of([leaf.func, leaf.args, leaf.keywords])
    if isinstance(leaf, types.MethodType):
        return [leaf.__self__]
    if isinstance(leaf, types.FunctionType):
        cells = [value for cell in leaf.__closure__ or () for value in content_of(cell)]
        return leaves_of([cells, leaf.__defaults__ or (), leaf.__kwdefaults__ or {}])
    return list(tensors_within([leaf])[0])


def _is_cache(value: Any) -> bool:
    return any(
        cls.__name__.endswith("Cache") and cls.__module__.startswith("transformers.") for cls in type(value).__mro__
    )


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _changed_arguments(
    root: nn.Module, seen: Run, detached: str | None, changes: Mapping[str, Change]
) -> Iterator[None]:
    """Context manager: floating arguments of modules are replaced by leaves, and by what ``changes`` returns; arguments that are
    one tensor stay one."""

    def walk(name: str, value: Any, place: Place, known: dict[int, tuple[Tensor | None, Tensor]]) -> Any:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            if id(value) not in known:
                leaf = value.detach().clone().requires_grad_() if name == detached else None
                given = value if leaf is None else leaf.clone()
                known[id(value)] = leaf, changes[name](place, given) if name in changes else given
            leaf, given = known[id(value)]
            if leaf is not None:
                seen.arguments.setdefault(place, []).append(leaf)
            return given
        if type(value) in (tuple, list):
            return type(value)(walk(name, item, (*place, i), known) for i, item in enumerate(value))
        return value

    def hook(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known: dict[int, tuple[Tensor | None, Tensor]] = {}
        changed = {key: walk(name, value, (key,), known) for key, value in kwargs.items()}
        return tuple(walk(name, arg, (i,), known) for i, arg in enumerate(args)), changed

    names = {*changes, *(() if detached is None else (detached,))}
    handles = [
        root.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: hook(name, args, kwargs), with_kwargs=True
        )
        for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
