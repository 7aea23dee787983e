"""Which modules are gathered together: makes the units of a recipe from the block lists of a module.

The rule: the blocks of outermost lists, neighbours merged until a unit holds ``min_unit_bytes``; everything else
belongs to the root unit. A rank may skip units: they are taken in one order at run time. Each unit needs one
collective and the host's time for it, so many small units cost time, and one huge unit costs memory and cannot overlap
its gather with anything. ``benchmarks/step.py`` measures three models on gloo: of 24 blocks of 0.2 MiB one unit takes
half the time of a unit for each, of 12 blocks of 3 MiB three quarters, and of 4 blocks of 11 MiB nine tenths.
"""

from collections.abc import Sequence

from shardwise.recipe.records import DTYPE_BYTES, ROOT, Anatomy, BlockList, Note, TensorFact, Unit, human_bytes
from shardwise.recipe.targets import innermost, modules_named, refuse_nested
from shardwise.techniques.data.options import Sharding
from shardwise.techniques.data.timing import with_timing

_LARGE = 1 << 30  # bytes of a model above which one unit should not hold most of it
_UNIT_BYTES, _SMALL_MODEL_BYTES = 8 << 20, 64 << 20  # where min_unit_bytes is not given


def make_units(anatomy: Anatomy, sharding: Sharding, compute: str | None) -> tuple[tuple[Unit, ...], tuple[Note, ...]]:
    """Units in the order of the module, the root unit last, and notes on what was decided."""
    units, sizes = sharding.units, _Sizes(anatomy, sharding, compute)
    if isinstance(units, tuple):
        lists, notes = [_named_blocks(anatomy, units)], []  # named modules are never merged
    elif units == "none":
        lists, notes = [], [Note(name=ROOT, why='one unit: units="none"')]
    else:
        lists, notes = list(anatomy.lists), []
        if not lists:
            notes.append(Note(name=ROOT, why="one unit: no list of blocks was found"))
        elif sizes.are_small():
            small = f"one unit: the model's {sizes.in_words([ROOT])} are below {sizes.of_small_model}"
            lists, notes = [], [Note(name=ROOT, why=small)]
    made: list[Unit] = []
    for block_list in lists:
        groups = _merge(_free_of_outside_ties(anatomy, block_list.blocks, notes), sizes)
        groups = _join_tied(anatomy, groups, notes)
        why = "named by units=" if isinstance(units, tuple) else "blocks of an outermost list"
        made += [_unit(why, group, sizes) for group in groups]
    rest = "what no other unit holds; stays gathered from forward to backward, which starts with it"
    root = Unit(name=ROOT, modules=(ROOT,), reshard=False, why=rest)
    found = (*made, root)
    return with_timing(anatomy, found, sharding), (*notes, *_large(anatomy, found, sizes))


def check_names(anatomy: Anatomy, sharding: Sharding) -> None:
    """Checks the names of modules in the options as :func:`make_units` does, for a layout without units: a mistake in a
    name is then reported under every layout."""
    if isinstance(sharding.units, tuple):
        _named_blocks(anatomy, sharding.units)
    reshard = sharding.reshard_after_forward
    for pattern in reshard if isinstance(reshard, dict) else ():
        modules_named(anatomy, pattern, f"reshard_after_forward={{{pattern!r}: ...}}")


def unit_of_params(anatomy: Anatomy, units: tuple[Unit, ...]) -> dict[str, str]:
    """The unit of every parameter: the one that contains its first owner, else the root."""
    home = {module: unit.name for unit in units for module in unit.modules if module != ROOT}
    return {name: home.get(innermost(name, home) or ROOT, ROOT) for name in anatomy.params}


def _large(anatomy: Anatomy, units: tuple[Unit, ...], sizes: "_Sizes") -> list[Note]:
    """A warning for a unit that is most of a large model: all of it is gathered on each rank at once."""
    homes = unit_of_params(anatomy, units)
    held: dict[str, int] = {}
    for name, fact in anatomy.params.items():
        held[homes[name]] = held.get(homes[name], 0) + sizes.num_bytes(fact)
    total = sum(held.values())
    return [
        Note(
            name=unit,
            why=f"warning: {human_bytes(size)} of {human_bytes(total)} are in this unit, and whole on every rank at once; "
            "name smaller ones: Sharding(units=(...))",
        )
        for unit, size in held.items()
        if total > _LARGE and 2 * size > total
    ]


class _Sizes:
    """Sizes of modules (each tied tensor counted once), and the size from which on a unit is large enough."""

    def __init__(self, anatomy: Anatomy, sharding: Sharding, compute: str | None):
        self.by_number = sharding.min_unit_params is not None
        self.dtype = compute
        given = sharding.min_unit_params if self.by_number else sharding.min_unit_bytes
        self._is_given = given is not None
        self._least = 0 if isinstance(sharding.units, tuple) else _UNIT_BYTES if given is None else given
        self._below: dict[str, int] = {ROOT: 0}  # module name -> bytes or number
        for name, fact in anatomy.params.items():
            size = fact.numel if self.by_number else self.num_bytes(fact)
            for module in (ROOT, *(name[:end] for end, letter in enumerate(name) if letter == ".")):
                self._below[module] = self._below.get(module, 0) + size

    def num_bytes(self, fact: TensorFact) -> int:
        """Bytes of a tensor when it is gathered."""
        return fact.numel * DTYPE_BYTES[self.dtype or fact.dtype]

    @property
    def goal(self) -> str:
        if self.by_number:
            return f"min_unit_params = {self._least:,}"
        return f"min_unit_bytes = {human_bytes(self._least)}" if self._is_given else human_bytes(self._least)

    @property
    def of_small_model(self) -> str:
        """The size below which a model is one unit, in words."""
        return self.goal if self._is_given else human_bytes(_SMALL_MODEL_BYTES)

    def are_small(self) -> bool:
        """Whether the model is too small for more than one unit."""
        return self._of([ROOT]) < (self._least if self._is_given else _SMALL_MODEL_BYTES)

    def is_full(self, modules: Sequence[str]) -> bool:
        """Whether these modules (none inside another) are large enough for a unit."""
        return self._of(modules) >= self._least

    def in_words(self, modules: Sequence[str]) -> str:
        return f"{self._of(modules):,} parameters" if self.by_number else human_bytes(self._of(modules))

    def _of(self, modules: Sequence[str]) -> int:
        return sum(self._below.get(module, 0) for module in modules)


def _named_blocks(anatomy: Anatomy, patterns: tuple[str, ...]) -> BlockList:
    blocks = {name for pattern in patterns for name in modules_named(anatomy, pattern, f"units={pattern!r}")}
    order = [name for name in anatomy.classes if name in blocks]
    refuse_nested(order, f"units={patterns!r}", "a unit inside a unit would be gathered twice")
    return BlockList(name=", ".join(patterns), blocks=tuple(order))


def _free_of_outside_ties(anatomy: Anatomy, blocks: tuple[str, ...], notes: list[Note]) -> tuple[str, ...]:
    """``blocks`` without those that share a tensor with a module outside ``blocks``: those stay in the root unit, and
    so do the blocks that share one with them."""
    ties = {block: _tied_outside(anatomy, block, blocks) for block in blocks}
    freed = tuple(block for block in blocks if ties[block] is None)
    for block, tied in ties.items():
        if tied is not None:
            notes.append(
                Note(name=block, why=f"kept in the root unit: it shares {tied} with a module outside its list")
            )
    return freed if freed == blocks else _free_of_outside_ties(anatomy, freed, notes)


def _tied_outside(anatomy: Anatomy, block: str, blocks: tuple[str, ...]) -> str | None:
    held = set(blocks)
    for name, fact in anatomy.params.items():
        owners = {innermost(owner, held) for owner in _owners(anatomy, name)} if fact.aliases else ()
        if block in owners and None in owners:
            return name
    return None


def _owners(anatomy: Anatomy, name: str) -> set[str]:
    """The names of a parameter, without those that it has only because a module has several names."""
    found = set()
    for owner in (name, *anatomy.params[name].aliases):
        other = innermost(owner, anatomy.module_aliases)
        found.add(owner if other is None else anatomy.module_aliases[other] + owner[len(other) :])
    return found


def _merge(blocks: tuple[str, ...], sizes: _Sizes) -> list[list[str]]:
    groups: list[list[str]] = []
    full = True
    for block in blocks:
        if full:
            groups.append([])
        groups[-1].append(block)
        full = sizes.is_full(groups[-1])
    if len(groups) > 1 and not full:
        rest = groups.pop()
        groups[-1] += rest
    return groups


def _join_tied(anatomy: Anatomy, groups: list[list[str]], notes: list[Note]) -> list[list[str]]:
    """Joins groups that share a tensor: FSDP gathers and reduces a tied tensor once, in one unit."""
    for name, fact in anatomy.params.items():
        homes = {block: i for i, group in enumerate(groups) for block in group}
        owners = (innermost(owner, homes) for owner in (name, *fact.aliases))
        tied = sorted({homes[block] for block in owners if block is not None})
        if len(tied) > 1:
            notes.append(Note(name=name, why="its owners are in one unit, because they share it"))
            groups[tied[0]] = [block for i in tied for block in groups[i]]
            groups = [group for i, group in enumerate(groups) if i not in tied[1:]]
    return groups


def _unit(source: str, group: list[str], sizes: _Sizes) -> Unit:
    size = sizes.in_words(group) + (f" in {sizes.dtype}" if sizes.dtype and not sizes.by_number else "")
    if len(group) == 1:
        return Unit(name=group[0], modules=tuple(group), reshard=True, why=f"{size}; {source}")
    why = f"{len(group)} neighbours merged to reach {sizes.goal}: {size}; {source}"
    return Unit(name=f"{group[0]}..{group[-1]}", modules=tuple(group), reshard=True, why=why)
