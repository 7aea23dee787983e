"""The proof on rows: what it accepts, what it names, and that no other plan passes."""

import copy
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept_tensors import bytes_in_memory
from techniques.cp.sequences import PROVED, REFUSED, WIDTH, Words, batch, build, heads, own_kernel
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import UnsupportedError
from shardwise.model.row_facts import Differs
from shardwise.model.row_gradients import BackwardDiffers
from shardwise.model.row_runs import run_on_rows
from shardwise.model.rows import most_rows, rows_of
from shardwise.techniques.row_search import Search
from shardwise.techniques.sequences import sequences_in


def searched(name, degree=2, order="zigzag", heads_over=1, fallback=False):
    """The search for a model, and what it found."""
    inputs = {key: value for key, value in batch(1, 24, name).items() if key != "labels"}
    search = Search(
        build(name, torch.float32), next(sequences_in(((), inputs))), degree, order, heads_over, fallback=fallback
    )
    return search, search.run()


@given(st.integers(1, 200), st.integers(1, 9), st.sampled_from(["zigzag", "contiguous"]))
def test_rows_tile_every_length(length, degree, order):
    parts = rows_of(length, degree, order)
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    assert len(parts) == degree and max(map(len, parts)) <= most_rows(length, degree, order)


def test_zigzag_gives_each_rank_as_many_keys_under_a_causal_mask():
    keys = [float((rows + 1).sum()) for rows in rows_of(4096, 4, "zigzag")]
    assert max(keys) == min(keys)


@pytest.mark.quick(
    "plain-4",
    "grouped-4",
    "rotary-4",
    "kernel-4",
    "pooled-4",
    "mask in attention-4",
    "hook of rows-4",
    "norm of a gradient-4",
)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", PROVED)
def test_what_is_proved(name, degree):
    _, facts = searched(name, degree)
    assert not facts.islands and len(facts.products if name == "manual" else facts.attention) == 2
    assert facts.output == ("whole" if name == "pooled" else "rows") == ("rows" if not facts.join else "whole")
    made = {
        "rotary": [["arange", 0]],
        "by branches": [["arange", 0]],
        "others' positions": [["arange", 0]],
        "rows of a table": [["getitem", 0], ["narrow", 0]],
        "manual": [["getitem", [0, 1]]],
        "mask in attention": [["getitem", [0, 1]]],
    }
    found = {name: [[kind, arg] for kind, _, arg in calls] for name, calls in facts.positions.items()}
    own = {name: calls for name, calls in found.items() if name.endswith("attention")}
    assert own == ({f"blocks.{i}.attention": made[name] for i in (0, 1)} if name in made else {})
    assert (found == own) == (name != "others' positions")
    assert all(
        re.fullmatch(r"(positions_of\+2 < )?Attention\.forward\+\d+#0", calls[0][1])
        for calls in map(facts.positions.get, own)
    )


@pytest.mark.quick(
    "log of the length-2", "token shift-2", "convolution-2", "batch norm-4", "running mean-2", "best half-4"
)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_positions_is_named_or_runs_whole(name, degree):
    with pytest.raises(Differs) as raised:
        searched(name, degree)
    assert (
        raised.value.name.replace("blocks.1", "blocks.0") == REFUSED[name][0]
    )  # of 17 tokens the best half may be the same by chance
    _, facts = searched(name, degree, fallback=True)
    assert facts.islands and facts.output == "rows"


def searched_own(model, **options):
    inputs = {"input_ids": batch(1, 24)["input_ids"]}
    return Search(model, next(sequences_in(((), inputs))), 2, "zigzag", **options).run()


@pytest.mark.parametrize(
    "how", ["loss of a mean", "loss of a sum", "gradient of one length", "hook", "hook of a node", "hook before a node"]
)
def test_backwards_of_ones_own_that_depend_on_all_positions(how):
    """They are named; on the whole sequence they would get parts of gradients."""
    with pytest.raises(BackwardDiffers) as raised:
        searched_own(Words(extra=how))
    assert raised.value.name == "blocks.1.own" and not raised.value.is_of_gradients
    with pytest.raises(BackwardDiffers) as raised:
        searched_own(Words(extra=how), fallback=True)
    assert raised.value.name.endswith("own") and raised.value.is_of_gradients


@pytest.mark.parametrize(
    "how", ["weight by the length", "packed for backward", "straight through", "stopped by the length"]
)
def test_gradients_that_no_value_shows(how):
    """The module is named, or runs on the whole sequence."""
    with pytest.raises(BackwardDiffers) as raised:
        searched_own(Words(extra=how))
    assert raised.value.name in ("blocks.0.own", "blocks.1.own")
    assert list(searched_own(Words(extra=how), fallback=True).islands) == ["blocks.0.own", "blocks.1.own"]


class Again(nn.Module):
    """Its layer runs again in the backward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=True)


def test_a_reentrant_checkpoint_is_not_run_again_in_the_proof():
    model = Words()
    model.blocks[1].drop = Again()
    assert searched_own(model).output == "rows"


class ByFrequency(nn.Module):
    """A table whose gradient is divided by how often each row is used."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, scale_grad_by_freq=True)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]) % 3)


def test_a_gradient_by_frequency_is_one_of_all_positions():
    model = Words()
    model.tokens.scale_grad_by_freq = True  # of all tokens
    assert searched_own(model).output == "rows"
    model.blocks[1].drop = ByFrequency()
    with pytest.raises(Differs, match="scale_grad_by_freq may depend on all positions") as raised:
        searched_own(model)
    assert raised.value.name == "blocks.1.drop.table"


KINDS = ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook")


@pytest.mark.parametrize(
    ("name", "kind"), [("blocks.1", KINDS[0]), ("blocks.1.up", KINDS[1]), ("norm", KINDS[2]), ("tokens", KINDS[1])]
)
def test_backward_hooks_of_modules_are_refused(name, kind):
    """What runs on every rank, such as the embedding of tokens, has a part of the gradient there."""
    model = Words()
    getattr(model.get_submodule(name), kind)(lambda *_: None)
    with pytest.raises(Differs, match="its backward hook") as raised:
        searched_own(model)
    assert raised.value.name == name and raised.value.is_of_gradients == ("blocks" not in name)


class OnDevice(torch.autograd.Function):
    """A backward that does not run here."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.1

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no kernel for this device")


class Fused(nn.Module):
    def forward(self, x):
        return OnDevice.apply(x)


def test_a_backward_that_does_not_run_is_not_taken_for_one_of_rows():
    model = Words()
    model.blocks[1].drop = Fused()
    for fallback in (False, True):
        with pytest.raises(UnsupportedError, match=r"(?s)blocks.1.drop.*RuntimeError: no kernel for this device"):
            searched_own(model, fallback=fallback)


@pytest.mark.parametrize("name", ["plain", "packed", "grouped", "kernel"])
def test_attention_by_heads_is_proved_too(name):
    _, facts = searched(name, 2, "contiguous", heads_over=2)
    assert len(facts.attention) == 2


def test_heads_that_ranks_cannot_share_are_named():
    with pytest.raises(Differs, match="4 and 2 heads of queries and of keys, which 4 does not divide") as raised:
        searched("grouped", 4, "contiguous", heads_over=4, fallback=True)
    assert raised.value.is_of_heads


class Odd(Words):
    """Does something else than it should where ``how`` says so."""

    def __init__(self, how):
        super().__init__()
        self.how, self.kept = how, None

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        start = x.square().mean()
        for block in self.blocks:
            x = block(x)
        if self.how == "in eval mode" and not self.training:
            x = x - x.mean(1, keepdim=True)
        if self.how == "keeps rows":
            self.kept = x
        if self.how == "keeps a mean":
            self.kept = self.blocks[0].norm(x).square().mean()
        if self.how == "keeps a number":
            self.kept = x.detach().square().mean()
        if self.how == "rolls":
            x = x.roll(1, 1)
        output = self.head(self.norm(x))
        return (output, start) if self.how == "returns a whole number too" else output


class Longer(nn.Module):
    """A layer of numbers that it has from so many positions on, up to so many."""

    def __init__(self, least, most):
        super().__init__()
        self.layer, self.least, self.most = nn.Linear(WIDTH, WIDTH), least, most

    def forward(self, x):
        return x + self.layer(x) * (2 if self.least <= x.shape[1] <= self.most else 1)


def proof_of(module, num=24):
    return Search(module, next(sequences_in(((), {"input_ids": batch(1, num)["input_ids"]}))), 2, "zigzag").run()


@pytest.mark.parametrize(
    "how", ["in eval mode", "keeps a mean", "keeps a number", "rolls", "returns a whole number too"]
)
def test_code_behind_the_blocks_that_mixes_positions_gets_all_of_them(how):
    """In either mode, whether it is returned or kept; and what is whole is not added up beside what is of rows."""
    facts = proof_of(Odd(how))
    assert facts.output == "whole" and facts.join == {"blocks.1": {"": 1}}
    assert proof_of(Odd("")).output == "rows"


def test_a_tensor_of_rows_that_is_kept_is_refused():
    with pytest.raises(Differs, match="keeps a tensor of this rank's positions") as raised:
        proof_of(Odd("keeps rows"))
    assert raised.value.is_kept


class Late(nn.Module):
    """A block that shifts its tokens, or has positions of its own, from the fifth on."""

    def __init__(self, number, how):
        super().__init__()
        self.number, self.how, self.layer = number, how, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("flag", torch.tensor(float(number >= 4)))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = self.layer(x) * self.scale
        if self.how == "by its number" and self.number >= 4:
            y = y.roll(1, 1)
        if self.how == "by a buffer" and self.flag:
            y = y.roll(1, 1)
        if self.how == "straight through" and self.number >= 4:
            mean = y.mean(1, keepdim=True)
            y = y + (mean - mean.detach())
        if self.how == "apart":
            y = y * y.detach().tanh()
        if self.how == "positions" and self.number >= 4:
            y = y + torch.arange(x.shape[1])[:, None].sin()
        return x + y


class Unpacked(Words):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Late(number, "") for number in range(12))

    def forward(self, input_ids):
        first, *others, last = self.blocks
        assert len(others) == 10, "all of its blocks"
        x = first(self.tokens(input_ids))
        for block in others:
            x = block(x)
        return self.head(last(x))


def test_many_blocks_of_which_the_code_wants_all_are_all_run():
    facts = proof_of(Unpacked())
    assert facts.output == "rows" and len(facts.cut) == 12


@pytest.mark.parametrize("how", ["by its number", "by a buffer", "straight through", "positions", ""])
def test_many_blocks_are_all_compared(how):
    model = Odd("")
    model.blocks = nn.ModuleList(Late(number, how) for number in range(12))
    if how in ("by its number", "by a buffer", "straight through"):
        with pytest.raises(Differs, match=r"blocks\.(4|11)"):
            proof_of(model)
        return
    facts = proof_of(model)
    assert facts.output == "rows" and len(facts.cut) == 12
    found = {name: [[kind, arg] for kind, _, arg in calls] for name, calls in facts.positions.items()}
    assert found == ({f"blocks.{i}": [["arange", 0]] for i in range(4, 12)} if how else {})


@pytest.mark.parametrize("how", ["", "apart"])
def test_many_blocks_that_are_alike_are_searched_once(how, monkeypatch):
    """A few of them: what all of them would keep for their backwards may be more than there is."""
    searched = []
    inner = Search._searched
    monkeypatch.setattr(Search, "_searched", lambda self, kinds: searched.append(len(kinds)) or inner(self, kinds))
    model = Odd("")
    model.blocks = nn.ModuleList(Late(0, how) for _ in range(12))
    assert len(proof_of(model).cut) == 12
    assert searched == ([1, 0] if how else [1])


def test_a_proof_keeps_no_tensors():
    """Its graphs have hooks, and what those refer to the garbage collector does not see."""
    model = Odd("")
    proof_of(model, 48)  # what is made once
    before = bytes_in_memory()
    proof_of(model, 48)
    assert bytes_in_memory() <= before


def test_a_backward_hook_of_one_of_many_blocks_is_seen():
    model = Odd("")
    model.blocks = nn.ModuleList(Late(number, "") for number in range(12))
    model.blocks[7].layer.register_full_backward_hook(lambda *_: None)
    with pytest.raises(Differs, match=r"blocks\.7\.layer: its backward hook"):
        proof_of(model)


class OfAll(nn.Module):
    """Goes by what all samples and positions have."""

    def __init__(self, how):
        super().__init__()
        self.how, self.layer = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = {"max": lambda: x / x.abs().max(), "mean": lambda: x - x.mean((0, 1)), "": lambda: x}[self.how]()
        return x + self.layer(y)


@pytest.mark.parametrize(("how", "samples"), [("max", 1), ("max", 2), ("max", 12), ("mean", 1), ("mean", 2)])
def test_samples_that_are_added_are_no_copies(how, samples):
    """Where samples are taken for positions, what all of them have is not what a rank's have."""
    inputs = {"input_ids": torch.randint(61, (samples, 24), generator=torch.Generator().manual_seed(1))}
    _, of_samples = sequences_in(((), inputs))
    for of_all in ("", how):
        model = Odd("")
        model.blocks = nn.ModuleList(OfAll(of_all) for _ in range(2))
        search = Search(model, of_samples, 2, "contiguous")
        if not of_all:
            assert search.run().output == "rows"
            continue
        with pytest.raises(Differs, match=r"blocks\.0"):
            search.run()


@given(st.integers(1, 9), st.integers(1, 40), st.integers(2, 99))
def test_repeats_have_values_of_their_own(num, length, most):
    ids = torch.arange(2 * num).view(2, num) % (most + 1)
    mask, values = torch.ones(2, num, dtype=torch.long), torch.ones(2, num, 1) * 3
    values[0, 0] = -4
    given_ = {"ids": ids, "mask": mask, "values": values}
    _, made = next(sequences_in(((), given_))).of_length(length)
    assert all(x.shape[1] == length for x in made.values()) and made["mask"].all()
    assert made["ids"].min() >= 0 and made["ids"].max() <= ids.max()
    firsts = made["values"][0, ::num, 0].tolist()
    assert len({*firsts}) == len(firsts)
    copies = [{*made["ids"][:, at : at + num].flatten().tolist()} for at in range(0, length, num)]
    if int(ids.max()) >= max(2, len(copies)):
        assert len(set().union(*copies)) == sum(map(len, copies)) or len(copies) == 1


def test_what_is_behind_a_gate_of_0_is_compared():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            # Its gradient shows nothing of the sum at first.
            return x + self.gate * self.layer(x) + self.gate.square() * x.cumsum(1)

    model = Odd("")
    model.blocks[1] = Gated()
    with pytest.raises(Differs, match=r"blocks\.1"):
        proof_of(model)


@pytest.mark.parametrize(("least", "most"), [(18, 64), (18, 19), (20, 64)])
def test_what_longer_sequences_do_is_compared_too(least, most):
    """Lengths of 17 and 19 are run, and nearly the 24 of the example: ranks have less than 18 positions of all."""
    model = Odd("")
    model.blocks[1] = Longer(least, most)
    with pytest.raises(Differs, match=r"blocks\.1: its output"):
        proof_of(model)


class Short(nn.Module):
    """Makes positions, twice where it has less than 8."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if x.shape[1] < 8:
            torch.arange(x.shape[1])
        return x + self.layer(x) * torch.arange(x.shape[1])[:, None]


def test_ranks_that_make_positions_at_other_places_are_told_apart():
    """Of 17 positions one rank has 10, the other 7."""
    model = Odd("")
    model.blocks[1] = Short()
    with pytest.raises(Differs):
        proof_of(model)


class Tempered(nn.Module):
    """Attention with a learned number for each head, in its kernel."""

    def __init__(self):
        super().__init__()
        self.qkv, self.scale = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x):
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        y = sw.attend(lambda q, k, v, rows: own_kernel(q * self.scale[: q.shape[1], None, None], k, v, rows), q, k, v)
        return x + y.transpose(1, 2).flatten(2)


def test_a_number_that_is_learned_for_each_head_is_not_given_to_others():
    model = Odd("")
    model.blocks[1] = Tempered()
    assert proof_of(model).output == "rows"
    inputs = {"input_ids": batch(1, 24)["input_ids"]}
    with pytest.raises(Differs, match=r"blocks\.1"):
        Search(model, next(sequences_in(((), inputs))), 2, "contiguous", heads_over=2).run()


# ---- breaks of a plan ------------------------------------------------------------------------------------------------


def broken(facts):
    """Facts with one fault each, and a name for it."""
    for key in ("cut", "join"):
        for module, found in getattr(facts, key).items():
            dims, again = (
                (found[0][0], lambda dims, rows=found[0][1]: [[dims, rows]])
                if key == "cut"
                else (found, lambda dims: dims)
            )
            for path, dim in dims.items():
                rest = {p: d for p, d in dims.items() if p != path}
                yield f"{key} of {module}{path} dropped", key, module, again(rest)
                other = again({**dims, path: 1 - dim if dim < 2 else 0})
                yield f"{key} of {module}{path} along another dim", key, module, other
    for module, calls in facts.positions.items():
        for i, (kind, place, argument) in enumerate(calls):
            yield f"{kind} of {module} dropped", "positions", module, [*calls[:i], *calls[i + 1 :]]
            for other in (place.replace("#0", "#1"), place.replace("+", "+7")):
                changed = [*calls[:i], [kind, other, argument], *calls[i + 1 :]]
                yield f"{kind} {other} of {module}", "positions", module, changed
    for module, calls in facts.products.items():
        for i, (place, dim) in enumerate(calls):
            yield f"product {place} of {module} dropped", "products", module, [*calls[:i], *calls[i + 1 :]]
            yield f"product {place} of {module} along another dim", "products", module, [[place, dim - 1]]
            other = f"{place.partition('#')[0]}#7"
            yield f"another product of {module}", "products", module, [*calls[:i], [other, dim], *calls[i + 1 :]]
    for module in facts.attention:
        yield f"attention of {module} to its own rows", "attention", module, []
        yield f"another attention of {module}", "attention", module, ["Attention.forward+1#1"]


@pytest.mark.quick(
    "grouped",
    "rotary",
    "pooled",
    "mask in attention",
    "plain",
    "packed",
    "rows of a table",
    "kernel of rows",
)
@pytest.mark.parametrize("name", PROVED)
def test_no_broken_plan_passes(name):
    search, facts = searched(name)
    trial, whole = search.trial, search.whole
    length, plan = search.length, search.plan
    parts = rows_of(length, 2, "zigzag")
    assert [run_on_rows(trial, whole, plan, length, rows, facts) for rows in parts] == [facts, facts]
    faults = list(broken(facts))
    for what, key, module, value in faults:
        wrong = copy.deepcopy(facts)
        getattr(wrong, key)[module] = value
        with pytest.raises(Differs):
            for rows in parts:
                if run_on_rows(trial, whole, plan, length, rows, wrong) != wrong:
                    raise Differs(module, f"{what}: it does not follow the plan")
    assert len(faults) >= 6
