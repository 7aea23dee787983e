"""Finds where the stream between blocks may be on some positions of each rank, beside layers that are cut over ``tp``: for each region of
them a site at which it is joined, and islands that run on all positions."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise.model.block_kinds import in_block, is_in_block
from shardwise.model.blocks import find_block_lists
from shardwise.model.layers import is_norm
from shardwise.model.names import canonical_tensors
from shardwise.model.pytrees import keyed_leaves
from shardwise.model.row_facts import Differs, Facts, Plan
from shardwise.model.row_gradients import BackwardDiffers
from shardwise.model.stream_rows import NeedsWhole, StreamFacts, StreamPlan, StreamRows
from shardwise.model.trial import Trial
from shardwise.techniques.row_search import Search, spread_over
from shardwise.techniques.tp.layers import is_plain
from shardwise.techniques.tp.search.region_records import Found, Region

_TRIES = 300


class _Site(NamedTuple):
    """A place at which the stream is joined before a region.

    Attributes:
        entry: place of a module, within the block, at whose entry it is joined, ...
        stay: ... but for these paths of its arguments.
        outputs: the outputs of modules are joined, that are the inputs of its layers.
        inputs: the inputs of its layers are joined.
    """

    entry: str = ""
    stay: tuple[str, ...] = ()
    outputs: bool = False
    inputs: bool = False


@dataclasses.dataclass
class StreamSearch(Search):
    """The search for one model.

    Args:
        found: what is cut over the ranks.
        cut: names of the parameters that are.
        partial: those of whose gradient each rank has a part already.
    """

    found: Found = dataclasses.field(default_factory=lambda: Found([], {}))
    cut: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.kind = StreamRows
        frozen = {
            name for name, owner, attr in canonical_tensors(self.module, "_parameters") if _is_frozen(owner, attr)
        }
        self._free = frozenset({*frozen, *self.partial} - self.cut)

    def starts(self) -> set[str]:
        return {weight for region in self.found.regions for weight in region.sources}

    @property
    def num_samples(self) -> int:
        given = dict(keyed_leaves(self.sequences.of_length(self.length)))
        x = given[self.sequences.path]
        return int(x.shape[1 - self.sequences.dims[self.sequences.path][0]])

    @property
    def has_streams(self) -> bool:
        """Whether an argument of blocks has the length of the sequences."""
        return bool(self._blocks)

    @property
    def has_regions(self) -> bool:
        return bool(self._regions)

    def _plan(self, trial: Trial) -> Plan:
        names = {name for name, _ in trial.module.named_modules()}
        lists = [[b for b in each.blocks if b in names] for each in find_block_lists(self.module)]
        whole = self._whole_arguments(lists)
        # Lists through which no stream of this length goes are left as they are.
        self._lists = [blocks for blocks in lists if any(len(whole[b]) < len(self._of_length(b)) for b in blocks)]
        self._blocks = [block for blocks in self._lists for block in blocks]
        self._regions = [part for region in self.found.regions for part in self._in_blocks(region)]
        regions = self.found.regions
        self._base = StreamPlan(
            parted={r.module: tuple(_paths(r)) for r in regions},
            cut=tuple(self._blocks),
            whole={block: whole[block] for block in self._blocks},
            join=tuple(blocks[-1] for blocks in self._lists),
            masks_of_rows=False,
            needs_whole=frozenset(
                {w for r in regions for w in r.layers if not is_norm(w)} | {t.weight for t in self.found.tables}
            ),
        )
        self._sites: dict[int, _Site] = {}  # number of a region -> its site
        for _ in range(_TRIES):
            plan = self._with_sites(trial, self._sites)
            wrong = self._difference(trial, plan)
            if wrong is None:
                return plan
            self.met.append(wrong)
            if not (isinstance(wrong, NeedsWhole) and self._found_site(trial, wrong)):
                self._repair(trial, plan, wrong)
        raise self.met[-1]

    def _facts(self, trial: Trial, plan: Plan, known: Facts | None = None) -> Facts:
        facts = super()._facts(trial, plan, known)
        assert isinstance(facts, StreamFacts)
        self._refuse_both_ways(facts)
        return facts

    def _confirmed(self, trial: Trial, plan: Plan) -> Facts:
        facts = super()._confirmed(trial, plan)
        assert isinstance(facts, StreamFacts)
        self._refuse_both_ways(facts)
        return facts

    def refuse_other(self, found: Facts) -> None:
        assert isinstance(found, StreamFacts) and isinstance(self.facts, StreamFacts)
        super().refuse_other(dataclasses.replace(found, ends=self.facts.ends))  # which are those of the rows, or of all
        used = {name: module for name, module in found.on_rows.items() if name not in self.facts.on_rows}
        for name, module in used.items():
            raise Differs(module, f"it uses {name} with some positions, and did not when all were there")
        self._refuse_both_ways(dataclasses.replace(found, on_rows=self.facts.on_rows))

    def _refuse_both_ways(self, facts: StreamFacts) -> None:
        for name, module in facts.on_rows.items():
            if name in self.cut or (name in facts.with_whole and name not in self._free):
                raise Differs(
                    module,
                    f"the gradient of {name} is a part here, and not elsewhere: it is used with some positions, and with all",
                )

    def _in_blocks(self, region: Region) -> Iterator[Region]:
        """A region, or the part of it in each block if it is in several, as where blocks share a table of biases."""
        if self._block_of(region.module):
            yield region
            return
        for block in self._blocks:
            inside = [w for w in region.layers if is_in_block(w, block)]
            if inside:
                yield dataclasses.replace(
                    region,
                    module=_around(inside),
                    columns={w: rows for w, rows in region.columns.items() if w in inside},
                    rows=tuple(w for w in region.rows if w in inside),
                    whole=tuple(w for w in region.whole if w in inside),
                    arguments={},
                    narrowed=(),
                )

    def _with_sites(self, trial: Trial, sites: dict[int, _Site]) -> StreamPlan:
        plan, base = {"join": [*self._base.join], "gathers": [], "scatters": []}, self._base
        entries: dict[str, tuple[str, ...]] = {}
        plain: dict[str, str] = {}
        for number, site in sites.items():
            region = self._regions[number]
            rows = _scattered(region)
            if site.entry:
                entries[self._block_of(region.layers[0]) + site.entry] = site.stay
            plan["join"] += self._makers(region) or [] if site.outputs else []
            plan["gathers"] += self._columns(region) if site.inputs else []
            plan["scatters"] += rows
            for weight in rows:
                owner = weight.rpartition(".")[0]
                callers = self.found.callers.get(weight, (owner,))
                if tuple(callers) == (owner,) and is_plain(trial.module.get_submodule(owner)):
                    plain[owner] = weight
        join, gathers, scatters = (tuple(dict.fromkeys(plan[key])) for key in ("join", "gathers", "scatters"))
        return dataclasses.replace(base, join=join, gathers=gathers, scatters=scatters, sites=entries, plain=plain)

    def _found_site(self, trial: Trial, wrong: NeedsWhole) -> bool:
        """Whether there is a site for the regions of a layer, and those like them in other blocks."""
        number = next((i for i, r in enumerate(self._regions) if wrong.layer in r.layers), None)
        if number is None or number in self._sites or not _scattered(self._regions[number]):
            return False
        region = self._regions[number]
        like = [i for i, other in enumerate(self._regions) if i not in self._sites and self._are_alike(region, other)]
        like = [i for i in like if not self._is_in_island(self._regions[i])]
        for site in self._candidates(region):
            sites = {**self._sites, **dict.fromkeys(like, site)}
            after = self._first_difference(trial, self._with_sites(trial, sites))
            if after is None or self._is_further(after, region):
                self._sites = sites
                return True
        return False

    def _is_further(self, after: Differs, region: Region) -> bool:
        if isinstance(after, NeedsWhole):
            return after.layer not in region.layers
        module, block = region.module, self._block_of(region.layers[0])
        inside = (module,) if module != block else tuple(w.rpartition(".")[0] for w in region.layers)
        is_around = after.name in (module, block) or is_in_block(module, after.name)
        return not is_around and not any(after.name == name or is_in_block(after.name, name) for name in inside)

    def _candidates(self, region: Region) -> Iterator[_Site]:
        block, parted = self._block_of(region.layers[0]), _paths(region)
        for module in dict.fromkeys([region.module, _around(self._columns(region))]):
            if not is_in_block(module, block):
                continue
            yield _Site(entry=in_block(module, block, ""))
            paths = [path for path, x in self._of_length(module) if x.is_floating_point() and path not in parted]
            for path in paths if len(paths) > 1 else ():
                yield _Site(entry=in_block(module, block, ""), stay=(path,))
        if parted:  # which each rank has a part of, for the region's module
            return
        if self._makers(region):
            yield _Site(outputs=True)
        yield _Site(inputs=True)

    def _columns(self, region: Region) -> list[str]:
        return [w for w in (*region.columns, *region.whole) if not is_norm(w) and w not in region.inner]

    def _makers(self, region: Region) -> list[str] | None:
        """The modules in the same block whose outputs are the inputs of a region's layers; None: some are not such outputs."""
        made: dict[int, str] = {}
        for (name, _), output in self.whole.outputs.items():  # the innermost first
            for _, x in keyed_leaves(output):
                if isinstance(x, Tensor):
                    made.setdefault(id(x), name)
        found, block = dict[str, None](), self._block_of(region.layers[0])
        for weight in self._columns(region):
            _, x = self.whole.layer_inputs.get((weight, 0), (None, None))
            maker = made.get(id(x))
            if maker is None or not is_in_block(maker, block):
                return None
            found[maker] = None
        return list(found)

    def _block_of(self, name: str) -> str:
        return next((b for b in self._blocks if name == b or is_in_block(name, b)), "")

    def _are_alike(self, one: Region, other: Region) -> bool:
        mine, its = self._block_of(one.layers[0]), self._block_of(other.layers[0])
        return [in_block(name, mine, "") for name in (one.module, *one.layers)] == [
            in_block(name, its, "") for name in (other.module, *other.layers)
        ]

    def _is_in_island(self, region: Region) -> bool:
        return any(is_in_block(w, island) for island in self._base.islands for w in region.layers)

    # ---- repairs

    def _repair(self, trial: Trial, plan: StreamPlan, wrong: Differs) -> None:
        """Changes the plan where a module differs."""
        block = self._block_of(wrong.name)
        if not block:
            if {*self._base.join} >= {*self._blocks} or isinstance(wrong, NeedsWhole):
                raise wrong
            self._base = dataclasses.replace(self._base, join=tuple(self._blocks))
            return
        if isinstance(wrong, BackwardDiffers):
            self._make_island(wrong.name, block, wrong)
            return
        if isinstance(wrong, NeedsWhole):
            region = next((r for r in self._regions if wrong.layer in r.layers), None)
            self._make_island(
                block if region is None or region.module in ("", *self._blocks) else region.module, block, wrong
            )
            return
        for path in self._base.whole.get(block, ()):
            whole = {b: tuple(p for p in paths if p != path) for b, paths in self._base.whole.items()}
            if self._helps(trial, dataclasses.replace(plan, whole=whole), wrong):
                self._base = dataclasses.replace(self._base, whole=whole)
                return
        for path in self._without_positions(block):
            if path in self._base.parts.get(block, ()):
                continue
            parts = {b: tuple(dict.fromkeys([*self._base.parts.get(b, ()), path])) for b in self._blocks}
            if self._helps(trial, dataclasses.replace(plan, parts=parts), wrong):
                self._base = dataclasses.replace(self._base, parts=parts)
                return
        if (other := self._unjudged(trial, plan, wrong.name, block)) is not None:
            after = self._first_difference(trial, other)
            if after is None or self._block_of(after.name) != block:
                self._base = dataclasses.replace(self._base, unjudged=other.unjudged)
                return
        self._make_island(wrong.name, block, wrong)

    def _helps(self, trial: Trial, plan: StreamPlan, wrong: Differs) -> bool:
        after = self._first_difference(trial, plan)
        return after is None or (after.name, after.why) != (wrong.name, wrong.why)

    def _make_island(self, name: str, block: str, wrong: Differs) -> None:
        while name in self._base.islands:  # it takes more than that module
            if name == block:
                raise wrong
            name = name.rpartition(".")[0]
        if not (name == block or is_in_block(name, block)):
            raise wrong
        islands = (*(each for each in self._base.islands if not is_in_block(each, name)), name)
        self._base = dataclasses.replace(self._base, islands=islands)
        self._sites = {i: site for i, site in self._sites.items() if not self._is_in_island(self._regions[i])}

    # ---- arguments of blocks

    def _whole_arguments(self, lists: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """Block -> its arguments with positions that are the same for all blocks, such as rotary tables: they may stay whole."""
        found = {}
        for blocks in lists:
            given = {block: dict(self._of_length(block)) for block in blocks}
            for i, block in enumerate(blocks):
                others = [x for other in (blocks[i - 1 : i] or blocks[i + 1 : i + 2]) for x in given[other].values()]
                stream = [
                    path
                    for path, x in given[block].items()
                    if x.is_floating_point() and not any(x is other for other in others)
                ]
                if len(blocks) == 1:
                    stream = stream[:1]
                found[block] = tuple(path for path in given[block] if path not in stream)
        return found

    def _of_length(self, module: str) -> list[tuple[str, Tensor]]:
        given = keyed_leaves(self.whole.inputs.get((module, 0), ()))
        return [(path, x) for path, x in given if isinstance(x, Tensor) and [*x.shape].count(self.length) == 1]

    def _without_positions(self, module: str) -> list[str]:
        given = keyed_leaves(self.whole.inputs.get((module, 0), ()))
        is_float = lambda x: isinstance(x, Tensor) and x.is_floating_point()  # noqa: E731
        return [path for path, x in given if is_float(x) and self.length not in x.shape]

    # ---- models of many blocks

    def _compared(self, facts: Facts) -> frozenset[str]:
        assert isinstance(facts, StreamFacts)
        return super()._compared(facts) | facts.sites.keys() | facts.gathers.keys()

    def plan_for_all(self, kinds: Sequence[Sequence[str]]) -> Plan:
        plan = super().plan_for_all(kinds)
        assert isinstance(plan, StreamPlan)

        def spread(found: Any) -> Any:
            return {name: paths for like, paths in found.items() for name in spread_over(kinds, [like])}

        plain = {w.rpartition(".")[0]: w for w in spread_over(kinds, plan.plain.values())}
        return dataclasses.replace(
            plan,
            sites=spread(plan.sites),
            parts=spread(plan.parts),
            gathers=spread_over(kinds, plan.gathers),
            scatters=spread_over(kinds, plan.scatters),
            plain=plain,
        )


def _scattered(region: Region) -> list[str]:
    """Weights of the layers behind which the region ends: of which each rank has a part of the outputs, and nothing goes on with all of them."""
    return [w for w in region.rows if not is_norm(w) and w not in region.whole]


def _paths(region: Region) -> set[str]:
    """Paths of the arguments of a region's module of which each rank is given a part."""
    places = [*region.arguments, *region.narrowed]
    first = [f"[0][{place[0]}]" if isinstance(place[0], int) else f"[1][{place[0]!r}]" for place in places]
    return {path + "".join(f"[{key!r}]" for key in place[1:]) for path, place in zip(first, places, strict=True)}


def _around(layers: Sequence[str]) -> str:
    """The innermost module that layers are in, by their weights."""
    owners = [weight.split(".")[:-1] for weight in layers]
    same = list(itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*owners, strict=False)))
    return ".".join(parts[0] for parts in same)


def _is_frozen(owner: nn.Module, attr: str) -> bool:
    param = owner._parameters[attr]
    return param is not None and not param.requires_grad
