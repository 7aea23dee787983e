"""Finds how a model's sequences may be cut over ranks: tries a plan, and repairs it by the first module that differs. Serves context
parallelism, and sequence parallelism within tensor parallelism."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, UsageError, first_line
from shardwise.model.attend import catch_transformers, now
from shardwise.model.block_kinds import block_kinds, in_block, is_in_block
from shardwise.model.blocks import find_block_lists
from shardwise.model.nested_rows import Exchanges, run_nested
from shardwise.model.products import dim_of
from shardwise.model.pytrees import keyed_leaves
from shardwise.model.row_facts import AroundBlocks, Differs, Facts, Plan, Whole
from shardwise.model.row_gradients import BackwardDiffers, Gradients
from shardwise.model.row_runs import run_on_rows, whole_run
from shardwise.model.rows import Order, rows_of
from shardwise.model.tensors import same_bytes
from shardwise.model.trial import Trial
from shardwise.model.unseen_calls import has_backward_hooks
from shardwise.techniques.sequences import Sequences, length_of_example, lengths_of_proof

_SEARCHED = 2  # blocks of each kind that are run, where there are many
_MANY = 8
_TRIES = 200  # runs of repairs
_GATHERS = 30  # plans for one module that may write attention out
_MOST_OWN = 256  # positions of the example, for a run of that length
_OF_LONGER = 128  # positions of that run for longer examples
_SCALES = (1.0, 1e-4, 1e8, 0.0)  # of gradients, for backwards and hooks of the model's own: they may go by a threshold
_EXCEPTIONS = 2  # calls of a module that are none of what the others like them are


@dataclasses.dataclass
class Search:
    """The search for a plan of one model.

    Args:
        module: is not changed.
        sequences: what it is called with.
        degree, order: how sequences are cut.
        heads_over: attention changes to heads over so many ranks; 1: it gathers keys.
        tp: over how many ranks heads are cut besides.
        fallback: modules that mix positions may run on the whole stream.
        kind: of the runs; None: those in which attention exchanges.
        extra: positions that the model adds to its sequences before its blocks, such as a prompt; what is behind the blocks gets all of them.

    Attributes:
        met: what differed on the way.
        known: module whose arguments are cut -> paths of all tensors among them.
        trial, plan: of the last :meth:`run`.
        length: of what is cut, at which the plan was tried last.
        facts: of the last :meth:`run`.
    """

    module: nn.Module
    sequences: Sequences
    degree: int
    order: Order
    heads_over: int = 1
    tp: int = 1
    fallback: bool = False
    kind: Any = None
    extra: int = 0
    met: list[Differs] = dataclasses.field(default_factory=list)
    known: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def run(self) -> Facts:
        """What is to be done with each module.

        Raises:
            Differs: there is no plan: what differs.
        """
        self.facts = self._run()
        if not self.extra and not self.facts.has_cuts and (extra := self._extra_of_blocks()):
            self.extra = extra
            self.facts = self._run()
        return self.facts

    def _extra_of_blocks(self) -> int:
        """How many positions more than the model's sequences the arguments of its blocks have, at both lengths; 0: it is not known."""
        if len(self._sizes) < 2:
            return 0
        (length, sizes), (other, more) = self._sizes.items()
        grown = {size - length for at, size in sizes.items() if more.get(at, 0) - size == other - length}
        return max(*grown, 0) if len(grown) == 1 else 0

    def _lengths(self) -> list[int]:
        return lengths_of_proof(self.module, self.degree, self.order, self.sequences.length, self.extra)

    def refuse_cut_again(self, inner: "Search") -> None:
        """Raises Differs unless each rank's rows may be cut once more, as ``inner`` has found it for whole sequences."""
        if self._kinds != inner._kinds:
            raise Differs("", "blocks that are alike under one of both cuts are not under the other")
        now.makes_masks, first = False, None
        lengths = self._lengths()
        parts = {length: rows_of(length, self.degree, self.order) for length in lengths}
        least = {
            length: min(len(rows_of(len(rows), inner.degree, inner.order)[-1]) for rows in of_length)
            for length, of_length in parts.items()
        }
        lengths.sort(key=lambda length: not least[length])  # stable: those of which each rank has some
        for self.length in lengths:
            try:
                self._whole.clear()
                return self._cut_again(inner, parts[self.length])
            except Exception as error:  # of the model's code, or a number of rows that is one of the model
                first = first or error
        raise first or Differs("", "no length is left at which it may be run")

    def _cut_again(self, inner: "Search", parts: Sequence[Tensor]) -> None:
        training = self._run_whole(self.trial, is_training=True)
        modes = (True,) if training.is_like(self._run_whole(self.trial, is_training=False)) else (True, False)
        for is_training in modes:
            whole = self._run_whole(self.trial, is_training=is_training)
            for rows in parts:
                outer = functools.partial(
                    Exchanges, self.trial, whole, self.plan, self.length, rows, self.facts, self.heads_over
                )
                again = rows_of(len(rows), inner.degree, inner.order)
                for found in run_nested(self.trial, outer, inner.plan, again, inner.facts):
                    inner.refuse_other(found)

    def refuse_other(self, found: Facts) -> None:
        """Raises Differs unless a run has done what this search has found."""
        if not _follows(found, self.facts):
            raise Differs("", "it does other things on the rows of a rank")

    def _run(self) -> Facts:
        kinds = [blocks for blocks in block_kinds(self.module) if len(blocks) > _MANY]
        if not kinds:
            return self._searched([])
        try:
            facts = self._searched(kinds)
            self._hold_for_all(facts, kinds)
            return facts
        except Differs:  # its blocks are not alike after all
            return self._searched([])
        except ShardwiseError as error:
            if not is_of_a_run(error):
                raise
            return self._searched([])  # its code wants all of them

    def _searched(self, kinds: Sequence[Sequence[str]]) -> Facts:
        """What is to be done, found in the first blocks of each of ``kinds``, and in all others."""
        self._kinds = kinds
        without = frozenset(name for blocks in kinds for name in blocks[_SEARCHED:])
        self._whole: dict[tuple[bool, int], Whole] = {}
        self._last: tuple[Plan, Facts | Differs] | None = None
        self.known.clear()
        self._sizes: dict[int, dict[tuple[str, str, int], int]] = {}  # length -> dims of arguments of blocks
        self._written = set[str]()  # modules of which it was tried whether they write attention out
        now.makes_masks = True  # at the first length; at the second none where the example needs none
        try:
            self.trial = self._trial(without)
            self.plan = self._plan(self.trial)
            facts = self._confirmed(self.trial, self.plan)
        finally:
            now.makes_masks = False
        self._note_heads(facts)
        for blocks in kinds:
            facts = _repeated(facts, blocks)
            self.known |= dict.fromkeys(blocks[_SEARCHED:], self.known[blocks[_SEARCHED - 1]])
        return facts

    def _hold_for_all(self, facts: Facts, kinds: Sequence[Sequence[str]]) -> None:
        """Raises Differs unless facts of some blocks are right in the whole model, whose code may treat its blocks in other ways. Of the
        blocks that stand for others only the arguments, outputs and attention are compared; of a rank with the first positions, and one with the last."""
        foreign = {
            in_block(name, blocks[_SEARCHED - 1], other)
            for blocks in kinds
            for other in blocks[_SEARCHED - 1 :]
            for name in self.trial.foreign
        }
        for name, child in self.module.named_modules():
            if has_backward_hooks(child):
                raise Differs(name, "its backward hook is not one of all blocks that are alike")
        for blocks in kinds:
            _refuse_other_buffers(self.module, blocks[_SEARCHED - 1 :])
        self._whole.clear()
        trial = self._new_trial(foreign=frozenset({*self.trial.foreign, *foreign}))
        only = self._compared(facts)
        parts = rows_of(self.length, self.degree, self.order)
        before, plan = None, self.plan_for_all(kinds)
        for is_training in (True, False):
            trial.set_training(is_training)
            whole = whole_run(trial, self.length, only, frozenset(facts.products), self.heads_over, self.kind)
            for name in sorted(whole.hides):
                if any(name == b or is_in_block(name, b) for blocks in kinds for b in blocks):
                    raise Differs(
                        name, "it computes apart from gradients, which is compared in blocks that are run by themselves"
                    )
            for rows in () if before is not None and before.is_like(whole) else (parts[0], parts[-1]):
                found = run_on_rows(trial, whole, plan, self.length, rows, facts, self.heads_over, self.kind)
                if not _follows(found, facts):
                    raise Differs("", "some blocks do other things than those like them")
                facts.add_drops(found)
                facts.add_seen(found)
            before = whole.without_modules()
            del whole  # before the next one is made
        _refuse_mixed_drops(facts)

    def _compared(self, facts: Facts) -> frozenset[str]:
        """The modules that are compared in a model of many blocks."""
        return frozenset({"", *facts.cut, *facts.join, *facts.keys, *facts.islands})

    def plan_for_all(self, kinds: Sequence[Sequence[str]]) -> Plan:
        spread = functools.partial(spread_over, kinds)
        plan, last = self.plan, {b[_SEARCHED - 1]: b[-1] for b in kinds if b[0] not in self.plan.join}
        join = tuple(last.get(name, name) for name in plan.join)
        return dataclasses.replace(
            plan,
            cut=spread(plan.cut),
            whole={name: plan.whole[like] for like in plan.whole for name in spread([like])},
            keys=spread(plan.keys),
            join=tuple(dict.fromkeys([*join, *(n for n in spread(n for n in plan.join if n not in last))])),
            islands=spread(plan.islands),
            positions=spread(plan.positions),
            products={name: plan.products[like] for like in plan.products for name in spread([like])},
            unjudged=spread(plan.unjudged),
        )

    def sends_less_over_heads(self) -> bool:
        """Whether to change to heads sends fewer bytes than to gather keys, in each call of attention: with g heads of queries for one of
        keys, 4 (n - 1) / n (g + 1) / 2 of a gather's 3 (n - 1)."""
        return all(3 * self.degree > 2 * (queries / keys + 1) for queries, keys in self._heads)

    def sent(self) -> int:
        """Numbers that a rank sends for each of its positions, in all calls of attention together, forward and backward."""
        others = self.degree - 1
        if self.heads_over > 1:
            return sum(4 * others * (q + (k + v) // 2) // self.degree for q, k, v in self._widths)
        return others * (3 * (sum(k + v for _, k, v in self._widths) + sum(self._factors)) + 2 * sum(self._keys))

    def _note_heads(self, facts: Facts) -> None:
        """Notes the heads of queries and keys of each call of attention; raises Differs where ranks of tp and cp cannot share them."""
        whole = self.whole
        self._heads = [
            (q.shape[1], k.shape[1])
            for (name, _, number), (q, k, _, _) in whole.attention.items()
            if number in facts.attention.get(name, ()) and q.dim() == 4
        ]
        self._widths = [
            tuple(x.numel() // (x.shape[0] * self.length) for x in (q, k, v))
            for (name, _, number), (q, k, v, _) in whole.attention.items()
            if number in facts.attention.get(name, ())
        ]
        self._factors = [
            x.numel() // (x.shape[0] * self.length)
            for (name, _, number), x in whole.products.items()
            if dim_of(facts.products.get(name, []), number) is not None
        ]
        self._keys = [
            x.numel() // (x.shape[0] * self.length)
            for (name, _), output in whole.outputs.items()
            for path, x in keyed_leaves(output)
            if path in facts.keys.get(name, ())
        ]
        for name, number in [(name, number) for name, calls in facts.attention.items() for number in calls]:
            q, k, *_ = whole.attention[name, 0, number]
            over = self.heads_over * self.tp
            if self.heads_over > 1 and self.tp > 1 and (q.shape[1] % over or k.shape[1] % over):
                raise Differs(
                    name,
                    f"{q.shape[1]} heads of queries and {k.shape[1]} of keys, which cp x tp = {over} does not divide",
                    is_of_heads=True,
                )

    def _trial(self, without: frozenset[str]) -> Trial:
        """A trial at the first length at which the model runs, and another one at which it does."""
        catch_transformers(self.module)  # before a trial, which puts back what it finds changed
        trial, error, runs, lengths = None, None, list[int](), self._lengths()
        for self.length in lengths:
            try:
                trial = trial or self._new_trial(without)
                whole = whole_run(trial, self.length, kind=self.kind)
                if not runs:  # one is kept
                    self._whole[True, self.length] = whole
                del whole
            except ShardwiseError as each:
                if not is_of_a_run(each):  # it writes a file, cannot be copied, ...
                    raise
                error = error or each
            except Exception as each:
                error = error or each
            else:
                runs.append(self.length)
            if len(runs) == 2:
                break
        if trial is None or len(runs) < 2:
            raise error or UsageError(
                f"an example with sequences of {self.sequences.length} positions",
                why="no two lengths are left that are no sizes of the model, at which it may be run",
                fix=f"pass example= with some {8 * self.degree} positions",
            )
        self.length, self._other_length = self._run_lengths = runs
        return trial

    def _new_trial(self, without: frozenset[str] = frozenset(), foreign: frozenset[str] | None = None) -> Trial:
        trial = Trial(self.module, self._call, training=True, without=without, foreign=foreign)
        trial.forget_outputs()
        _shift_values(trial)
        return trial

    def _call(self, copy: nn.Module) -> Any:
        args, kwargs = self.sequences.of_length(self.length - self.extra)
        return copy(*args, **kwargs)

    def _plan(self, trial: Trial) -> Plan:
        names = dict(trial.module.named_modules())
        lists = [[b for b in found.blocks if b in names] for found in find_block_lists(self.module)]
        plan = Plan(cut=tuple(block for blocks in lists for block in blocks))
        if self.extra:
            plan = _joined_behind(plan, lists)
        blocks = plan.cut
        while True:
            try:
                return self._repaired_until_right(trial, plan, lists)
            except Differs as wrong:
                if plan.owners and (wrong.is_kept or wrong.is_of_heads or wrong.is_of_gradients or wrong.is_drawn):
                    raise
                name, owners = self._runs(wrong.name, plan), plan.owners
                is_other = type(wrong) is not Differs or self.kind is not None or self.extra
                if is_other or name in owners or not any(b != name and _is_within(b, name) for b in blocks):
                    if not owners:
                        raise
                    owner = next((o for o in owners if _is_within(wrong.name, o)), owners[-1])
                    why = wrong.why if wrong.name == owner else f"{wrong.name}: {wrong.why}"
                    raise AroundBlocks(owner, why) from wrong
            # Its code around the blocks may be of each position too: x + block(x).
            owners = (*(o for o in owners if not _is_within(o, name)), name)
            others = [each for each in lists if not any(_is_within(b, name) for b in each)]
            plan, lists = Plan(cut=(*blocks, *owners), owners=owners), [*others, [name]]

    def _runs(self, name: str, plan: Plan) -> str:
        """The module whose code may be wrong where one differs: if others are on rows themselves, of a block that none of these runs, the one that does."""
        within = [b for b in plan.cut if _is_within(name, b)]
        if not plan.owners or not within or any(_is_within(name, owner) for owner in plan.owners):
            return name
        name = within[0]
        while name and (name == within[0] or (name, 0) not in self.whole.inputs):
            name = name.rpartition(".")[0]
        return name

    def _repaired_until_right(self, trial: Trial, plan: Plan, lists: Sequence[Sequence[str]]) -> Plan:
        for _ in range(_TRIES):
            wrong = self._difference(trial, plan)
            if wrong is None:
                return plan
            self.met.append(wrong)
            try:
                plan = self._repaired(trial, plan, wrong, lists)
            except Differs as last:
                raise self._cause(plan, last) from None
        raise self.met[-1]

    def _cause(self, plan: Plan, wrong: Differs) -> Differs:
        """What a model is refused for: a stream that is not cut, as it has more positions than the sequences; or the first module within the wrong
        one that returned something else before, of which that is made."""
        if type(wrong) is not Differs or wrong.is_kept or wrong.is_of_heads or wrong.is_of_gradients or wrong.is_drawn:
            return wrong
        block = next((b for b in plan.cut if wrong.name == b or is_in_block(wrong.name, b)), "")
        given = [(path, x) for path, x in keyed_leaves(self.whole.inputs.get((block, 0), ())) if isinstance(x, Tensor)]
        path, stream = next(((path, x) for path, x in given if block and x.is_floating_point()), ("", torch.empty(0)))
        times = max((size // self.length for size in stream.shape if size % self.length == 0), default=0)
        if times > 1 and self.length not in stream.shape:
            why = (
                f"it gets all: in its argument {path} {tuple(stream.shape)} there are {times} times as many in one dim"
            )
            return Differs(block, why)
        unlike = (each for each in self.met if each.name in plan.unjudged and is_in_block(each.name, wrong.name))
        return next(unlike, wrong)

    @property
    def whole(self) -> Whole:
        """The run on all positions, as the trial and the length are now."""
        return self._run_whole(self.trial, is_training=self.trial.module.training)

    def _difference(self, trial: Trial, plan: Plan) -> Differs | None:
        """What differs forward, or else in the backward."""
        found = self._first_difference(trial, plan)
        try:
            if found is None:
                of_values = self._run_whole(trial, is_training=True).of_backwards()
                self._whole.clear()  # gradients take as much again, and it is made once more where it is needed
                self._compare_gradients(trial, plan, of_values)
        except Differs as wrong:
            return wrong
        return found

    def _compare_gradients(
        self,
        trial: Trial,
        plan: Plan,
        of_values: Mapping[str, Any],
        known: Facts | None = None,
        only: frozenset[str] | None = None,
        products: frozenset[str] = frozenset(),
    ) -> None:
        """Runs the backward too, of training, and raises Differs unless gradients are those of all positions. ``of_values``: of a run without it."""
        scales = _SCALES if of_values["copies_all"] else _SCALES[:1]
        for scale in scales:
            gradients = Gradients(self.degree if self.kind is None else 1, scale, **of_values)
            try:
                whole = whole_run(trial, self.length, only, products, self.heads_over, self.kind, gradients, plan)
            except Exception as error:  # code that looks at a tensor as an object: it gets copies, or views, of which some functions take none
                if not of_values["copies_all"]:
                    of_values = {**of_values, "copies_all": True}
                    self._compare_gradients(trial, plan, of_values, known, only, products)
                    return
                if isinstance(error, ShardwiseError | Differs):
                    raise
                why = f"its gradients cannot be compared: {type(error).__name__}: {first_line(error)}"
                raise BackwardDiffers("", why) from error
            for rows in rows_of(self.length, self.degree, self.order):
                run_on_rows(
                    trial, whole, plan, self.length, rows, known, self.heads_over, self.kind, gradients=gradients
                )
            gradients.refuse_wrong()

    def _first_difference(self, trial: Trial, plan: Plan) -> Differs | None:
        found = self._tried(trial, plan)
        return found if isinstance(found, Differs) else None

    def _tried(self, trial: Trial, plan: Plan) -> Facts | Differs:
        """What :meth:`_facts` gives, or what differs; of the plan that was tried last it is known."""
        if self._last is None or self._last[0] != plan:
            try:
                self._last = plan, self._facts(trial, plan)
            except Differs as wrong:
                self._last = plan, wrong
        return self._last[1]

    def _facts(self, trial: Trial, plan: Plan, known: Facts | None = None) -> Facts:
        """What every rank does, in training and in eval mode."""
        found: list[Facts] = []
        training = self._run_whole(trial, is_training=True)
        modes = (True,) if training.is_like(self._run_whole(trial, is_training=False)) else (True, False)
        if len(modes) == 1:
            self._whole[False, self.length] = training  # one is kept
        for is_training in modes:
            whole = self._run_whole(trial, is_training=is_training)
            whole.forget_ranks()
            for rows in reversed(
                rows_of(self.length, self.degree, self.order)
            ):  # the first ones are right under a causal mask, whatever is gathered
                found.append(run_on_rows(trial, whole, plan, self.length, rows, known, self.heads_over, self.kind))
            found[-1].buffers = whole.added({name: value for name, (*_, value) in trial.written.items()})
        for facts in found[1:]:
            found[0].add(facts)
        _refuse_mixed_drops(found[0])
        for facts in found[1:]:
            if facts != found[0]:
                raise Differs(
                    "", "ranks, or the modes of training and evaluation, make their positions at other places"
                )
        return found[0]

    def _run_whole(self, trial: Trial, *, is_training: bool) -> Whole:
        """The run on all positions in a mode, which the trial is in afterwards."""
        if trial.module.training != is_training:
            trial.set_training(is_training)
        key = is_training, self.length
        if key not in self._whole:
            self._whole[key] = whole_run(trial, self.length, kind=self.kind)
        return self._whole[key]

    def _confirmed(self, trial: Trial, plan: Plan) -> Facts:
        """The facts of a plan, followed by number and dim at another length: what was known by its size there is the same here."""
        facts = self._tried(trial, plan)
        if isinstance(facts, Differs):
            raise facts
        self._note_tensors(facts)
        self.length, self._whole, now.makes_masks = self._other_length, {}, False
        again = self._facts(trial, plan, facts)
        if not _follows(again, facts):
            raise Differs("", "it does other things at another length of its sequences")
        facts.add(again)
        self._note_tensors(facts)
        self._add_of_example(trial, plan, facts)
        _refuse_mixed_drops(facts)
        return facts

    def _add_of_example(self, trial: Trial, plan: Plan, facts: Facts) -> None:
        """Adds what training does besides at the length of the example, or the next shorter one that is no size of the model; raises Differs unless
        the facts are right there."""
        given = self.sequences.length + self.extra
        own = length_of_example(self.module, self.degree, self.order, given if given <= _MOST_OWN else _OF_LONGER)
        if own is None or own in self._run_lengths:
            return
        before, self.length = self.length, own
        self._whole.clear()
        try:
            self._add_of_length(trial, plan, facts, self._compared(facts))
        except Differs:  # of blocks, which take less: of each module, which is named
            self._add_of_length(trial, plan, facts, None)
        self.length = before

    def _add_of_length(self, trial: Trial, plan: Plan, facts: Facts, only: frozenset[str] | None) -> None:
        """The same, where of modules ``only`` is compared what they have; None: of all."""
        if not trial.module.training:
            trial.set_training(True)
        products = frozenset(facts.products)
        whole = whole_run(trial, self.length, only, products, self.heads_over, self.kind)
        for rows in rows_of(self.length, self.degree, self.order):
            found = run_on_rows(trial, whole, plan, self.length, rows, facts, self.heads_over, self.kind)
            if not _follows(found, facts):
                raise Differs("", f"it does other things on sequences of {self.length} positions")
            facts.add(found)
        facts.add_buffers(whole.added({name: value for name, (*_, value) in trial.written.items()}))
        of_values = whole.of_backwards()
        del whole
        self._compare_gradients(trial, plan, of_values, facts, only, products)

    def _note_tensors(self, facts: Facts) -> None:
        blocks = {block for found in find_block_lists(self.module) for block in found.blocks}
        self._sizes[self.length] = {
            (of, path, dim): size
            for (of, call), given in self.whole.inputs.items()
            for path, x in keyed_leaves(given)
            for dim, size in enumerate(x.shape if of in blocks and not call and isinstance(x, Tensor) else ())
        }
        for name in facts.cut:
            calls = [given for (of, _), given in self.whole.inputs.items() if of == name]
            paths = [path for given in calls for path, x in keyed_leaves(given) if isinstance(x, Tensor)]
            self.known[name] = sorted({*self.known.get(name, ()), *paths})

    def _repaired(self, trial: Trial, plan: Plan, wrong: Differs, lists: Sequence[Sequence[str]]) -> Plan:
        name = wrong.name
        if wrong.is_of_gradients or (wrong.is_kept and not self.fallback):
            raise wrong
        if isinstance(wrong, BackwardDiffers):
            return self._repaired_behind(trial, plan, wrong, lists)
        if plan.masks_of_rows:
            other = dataclasses.replace(plan, masks_of_rows=False)
            if self._goes_further(self._first_difference(trial, other), wrong):
                return other
        block = next((b for b in plan.cut if name == b or is_in_block(name, b)), None)
        if wrong.is_mask and block is not None:
            for other in self._with_whole_arguments(plan, block):
                after = self._first_difference(trial, other)
                if after is None or not after.is_mask or after.name != name:
                    return other
        if name not in plan.positions:
            other = dataclasses.replace(plan, positions=(*plan.positions, name))
            if self._goes_further(self._first_difference(trial, other), wrong):
                return other
        if block is not None and self.heads_over == 1 and name not in self._written:
            self._written.add(name)
            if (other := self._with_all_positions(trial, plan, wrong, block)) is not None:
                return other
        if block is not None and not plan.square:
            other = dataclasses.replace(plan, square=True)
            if self._goes_further(self._first_difference(trial, other), wrong):
                return other
        if block is None:
            if plan.join:
                raise wrong
            return _joined_behind(plan, lists)
        if (other := self._unjudged(trial, plan, name, block)) is not None:
            return other
        return self._with_island(plan, wrong, block)

    def _repaired_behind(
        self, trial: Trial, plan: Plan, wrong: BackwardDiffers, lists: Sequence[Sequence[str]]
    ) -> Plan:
        """The same, where the backward of a module differs."""
        name = wrong.name
        if name not in plan.positions:
            other = dataclasses.replace(plan, positions=(*plan.positions, name))
            after = self._difference(trial, other)
            if after is None or (isinstance(after, BackwardDiffers) and after.name != name):
                return other
        block = next((b for b in plan.cut if name == b or is_in_block(name, b)), None)
        if block is None and not plan.join:
            return _joined_behind(plan, lists)
        if block is None or any(name == each or is_in_block(name, each) for each in plan.islands):
            wrong.is_of_gradients = True
            raise wrong
        return self._with_island(plan, wrong, block)

    def _with_island(self, plan: Plan, wrong: Differs, block: str) -> Plan:
        """A plan in which a module runs on all positions."""
        if not self.fallback or wrong.is_of_heads:
            raise wrong
        island = wrong.name
        while island in plan.islands:  # it takes more than that module
            if island == block:
                raise wrong
            island = island.rpartition(".")[0]
        islands = tuple(each for each in plan.islands if not is_in_block(each, island))
        return dataclasses.replace(plan, islands=(*islands, island), masks_of_rows=False)  # which need all of them

    def _with_all_positions(self, trial: Trial, plan: Plan, wrong: Differs, block: str) -> Plan | None:
        """A plan in which a module that writes attention out has all positions of its keys and values, and of nothing else: as second factors of
        products, or as outputs of modules that it calls. None: there is none by which its output is right."""
        name, modules = wrong.name, dict(trial.module.named_modules())
        alike = [other for b in plan.cut if (other := in_block(name, block, b)) in modules]
        plans = itertools.chain(self._by_products(plan, name, alike), self._by_keys(plan, name, block, alike))
        for some in itertools.islice(plans, _GATHERS):
            for other in self._with_masks_of_keys(some, block):
                after = self._first_difference(trial, other)
                if after is None or (after.name != name and self._goes_further(after, wrong)):
                    return other
        return None

    def _by_products(self, plan: Plan, name: str, alike: Sequence[str]) -> Iterator[Plan]:
        """Plans in which second factors of products of a module are of all positions, but for some exceptions."""
        products = [
            ("product", number)
            for (of, call, number), x in self.whole.products.items()
            if (of, call) == (name, 0) and isinstance(x, Tensor) and self.length in x.shape
        ]
        calls = [*products, *self.whole.made.get(name, ())]
        plan = dataclasses.replace(plan, positions=(*dict.fromkeys((*plan.positions, *alike)),))
        for num in range(_EXCEPTIONS + 1 if calls else 0):
            for some in itertools.combinations(calls, num):
                yield dataclasses.replace(plan, products={**plan.products, **dict.fromkeys(alike, some)})

    def _by_keys(self, plan: Plan, name: str, block: str, alike: Sequence[str]) -> Iterator[Plan]:
        """Plans in which outputs of one or two modules that a module calls are of all positions, also where its code views them by its length."""
        children = [
            of
            for of, call in self.whole.outputs
            if call == 0
            and is_in_block(of, name)
            and "." not in of.removeprefix(f"{name}.")
            and any(
                isinstance(x, Tensor) and self.length in x.shape for _, x in keyed_leaves(self.whole.outputs[of, 0])
            )
        ]
        for num in (1, 2):
            for some in itertools.combinations(children, num):
                keys = tuple(in_block(child, block, b) for b in plan.cut for child in some)
                other = dataclasses.replace(plan, keys=(*plan.keys, *keys))
                yield other
                yield dataclasses.replace(other, positions=(*dict.fromkeys((*plan.positions, *alike)),))

    def _with_masks_of_keys(self, plan: Plan, block: str) -> Iterator[Plan]:
        """Plans in which nothing, masks of several dims, or all that is of positions alone and not of queries, stays whole; each once."""
        yield plan
        args = [(path, x) for path, x in keyed_leaves(self.whole.inputs[block, 0]) if isinstance(x, Tensor)]
        square = plan.square or any(list(x.shape).count(self.length) == 2 for _, x in args)
        seen = [(plan.whole.get(block, ()), plan.square)]
        for least in (3, 2):
            paths = {
                path
                for path, x in args
                if x.dim() >= least
                and list(x.shape).count(self.length) == 1
                and all(size in (1, x.shape[0], self.length) for size in x.shape)
            }
            whole = tuple(sorted({*plan.whole.get(block, ()), *paths}))
            if (whole, square) not in seen:
                seen.append((whole, square))
                stay = {b: tuple(sorted({*plan.whole.get(b, ()), *paths})) for b in plan.cut}
                yield dataclasses.replace(plan, whole=stay if paths else plan.whole, square=square)

    def _goes_further(self, after: Differs | None, before: Differs) -> bool:
        """Whether what differs now differs in another way, and not before what differed."""
        if after is None or after.name == before.name:
            return after is None or after.why != before.why
        ended = [
            *(name for name, _ in self.whole.outputs),
            after.name,
            before.name,
        ]  # one that was not called is behind all
        return ended.index(after.name) > ended.index(before.name)

    def _unjudged(self, trial: Trial, plan: Plan, name: str, block: str) -> Plan | None:
        """A plan in which a module, and those around it within its block, may return something else, if the block is right; else None."""
        names, wrong = list(plan.unjudged), Differs(name, "")
        if name in names:
            return None
        while name != block:
            names.append(name)
            other = dataclasses.replace(plan, unjudged=tuple(names))
            after = self._first_difference(trial, other)
            is_around = after is not None and (is_in_block(name, after.name) or name == after.name)
            if not is_around and self._goes_further(after, wrong):
                return other
            if not is_in_block(name, block):
                break
            name = name.rpartition(".")[0]
        return None

    def _with_whole_arguments(self, plan: Plan, block: str) -> Iterator[Plan]:
        """Plans in which one more argument of the blocks stays whole: a mask of keys has one dim of positions, as one of queries has."""
        whole = plan.whole.get(block, ())
        args = [(path, x) for path, x in keyed_leaves(self.whole.inputs[block, 0]) if isinstance(x, Tensor)]
        args.sort(key=lambda each: each[1].is_floating_point())
        for path, x in args:
            is_mask = all(size in (1, x.shape[0], self.length) for size in x.shape)  # and no stream, which has a width
            if self.length in x.shape and path not in whole and is_mask:
                yield dataclasses.replace(
                    plan, whole={**plan.whole, **{b: (*plan.whole.get(b, ()), path) for b in plan.cut}}
                )


def spread_over(kinds: Sequence[Sequence[str]], names: Iterable[str]) -> tuple[str, ...]:
    """Names, and those of the same places in all blocks of each of ``kinds``, of which the first were run."""
    names = tuple(names)
    more = [
        in_block(name, blocks[_SEARCHED - 1], other)
        for blocks in kinds
        for other in blocks[_SEARCHED:]
        for name in names
        if name == blocks[_SEARCHED - 1] or is_in_block(name, blocks[_SEARCHED - 1])
    ]
    return (*names, *more)


def _is_within(name: str, owner: str) -> bool:
    return not owner or name == owner or is_in_block(name, owner)


def _joined_behind(plan: Plan, lists: Sequence[Sequence[str]]) -> Plan:
    """A plan in which the stream is joined behind the last block of each list."""
    return dataclasses.replace(plan, join=tuple(blocks[-1] for blocks in lists if blocks))


def is_of_a_run(error: ShardwiseError) -> bool:
    """Whether an error is that of the model's own code in a trial, which may run at another length."""
    return str(error.given).startswith("a run of ")


def _follows(done: Facts, facts: Facts) -> bool:
    """Whether a run has done what facts say. An argument that it did not have, such as a mask, it has not cut."""
    calls = ((done.cut.get(name, []), of_module) for name, of_module in facts.cut.items())
    is_within = all(
        len(some) == len(known)
        and all(a[0].items() <= b[0].items() and a[1].items() <= b[1].items() for a, b in zip(some, known, strict=True))
        for some, known in calls
    )
    return is_within and dataclasses.replace(done, cut=facts.cut) == facts


def _refuse_other_buffers(root: nn.Module, blocks: Sequence[str]) -> None:
    """Raises Differs where a block's buffers hold other values than the first one's, whose backward is proved: they may be factors of it."""
    first = dict(root.get_submodule(blocks[0]).named_buffers())
    for block in blocks[1:]:
        for name, x in root.get_submodule(block).named_buffers():
            if not x.is_meta and not (x is first[name] or same_bytes(x.detach(), first[name].detach())):
                raise Differs(block, f"its buffer {name} is another than in the blocks like it")


def _refuse_mixed_drops(facts: Facts) -> None:
    for name, dims in facts.drops.items():
        if facts.draws and -2 in dims:
            raise Differs(
                name,
                "it drops what is of some positions in one of its forwards, and what every rank has in another, and numbers are drawn for both in its code",
            )


def _shift_values(trial: Trial) -> None:
    """Moves all values of parameters a little: a gate of 0, or a mixture of 1, would hide what it lets through after the first step."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in trial.module.parameters():
            if param.is_floating_point() and not param.is_meta and param.numel():
                noise = torch.randn(param.shape, generator=generator, dtype=param.dtype)
                param.add_(0.1 * float(param.abs().mean().clamp_min(0.5)) * noise)


def _repeated(facts: Facts, blocks: Sequence[str]) -> Facts:
    """The facts of all blocks of a kind, of which the first two were run; the last of these stands for the others."""
    like, last = blocks[_SEARCHED - 1], blocks[-1]

    def spread(found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        more = {
            in_block(name, like, other): in_block(value, like, other) if isinstance(value, str) else value
            for other in blocks[_SEARCHED:]
            for name, value in found.items()
            if name == like or is_in_block(name, like)
        }
        return {**found, **more}

    of_modules = {
        field.name: spread(getattr(facts, field.name))
        for field in dataclasses.fields(facts)
        if field.name not in ("join", "outputs")
    }
    is_each = like in facts.join and blocks[0] in facts.join  # joined behind each of them
    join = spread(facts.join) if is_each else {(last if n == like else n): v for n, v in facts.join.items()}
    join |= {n: v for n, v in spread(facts.join).items() if n not in blocks}
    return dataclasses.replace(facts, **of_modules, join=join)
