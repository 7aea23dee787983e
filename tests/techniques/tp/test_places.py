"""What a forward keeps between calls, or hands out beside its output, wherever Python has room for it: under tp training is that of
one process, or is refused by the name of the place. And what the search for layers to cut runs leaves nothing there."""

import functools

import pytest
import torch
from techniques.tp import places

import shardwise.techniques.tp.search.cut_search
from shardwise.model.calling import run_on

REFUSED = {
    "counter": "UnsupportedError: techniques.tp.places.COUNTER: a count outside of the model, which a forward changes",
    "registered_for_good": ".kept: a persistent buffer that was registered after parallelize",
}
HOOKS = ("of_row", "of_column", "of_block", "before_block", "of_model")
CASES = [
    (kind, where, late)
    for kinds, wheres in (
        (places.KEPT | places.HANDED, ("cut", "outside")),
        (("inside", "no_grad", "measured", *HOOKS), ("cut",)),
    )
    for kind in kinds
    for where in wheres
    for late in (False, True)
]
QUICK = {  # training on ranks; the search alone, where it is seen too, has the others below
    ("attribute", "cut", False), ("class_dict", "cut", True), ("module_global", "cut", False),
    ("context_variable", "cut", True), ("second_count", "outside", False), ("out_list", "cut", True),
    ("out_layer", "cut", True), ("out_shape", "cut", False), ("in_environ", "cut", False), ("in_text", "cut", False),
    ("put_together", "outside", False), ("put_together_elsewhere", "cut", True), ("inside", "cut", True), ("of_row", "cut", True),
}  # fmt: skip


def compared(ranks, layout, kind, where, late):
    """Asserts that training is that of one process; returns the refusals that there are instead."""
    losses, params = places.plain(kind, where, late)
    found = ranks.run(places.trained, 4 if "dp" in layout else 2, layout, kind, where, late)
    if all(isinstance(each, str) for each in found):
        return found
    assert not any(isinstance(each, str) for each in found)
    state = found[0][1]
    assert losses == pytest.approx(found[0][0], abs=1e-12)
    assert max(float((state[name] - value).abs().max()) for name, value in params.items()) < 1e-12
    assert found[0][2] > 2  # something is cut
    return []


@pytest.mark.quick(
    "attribute-cut-False",
    "module_global-cut-False",
    "second_count-outside-False",
    "in_environ-cut-False",
    "put_together-outside-False",
    "put_together_elsewhere-cut-True",
    "in_text-cut-False",
    "inside-cut-True",
    "of_row-cut-True",
)
@pytest.mark.parametrize(
    ("kind", "where", "late"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.soak) for c in CASES]
)
def test_what_a_forward_keeps_is_right_or_refused_by_its_name(ranks, kind, where, late):
    for text in compared(ranks, "tp=2", kind, where, late):
        assert REFUSED[kind] in text


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "where", "late"), [c for c in CASES if not c[0].startswith("second")])
def test_so_it_is_beside_data_ranks(ranks, kind, where, late):
    """Not what one forward keeps for the next, of which each data rank has others."""
    for text in compared(ranks, "dp_shard=2,tp=2", kind, where, late):
        assert REFUSED[kind] in text


SEARCHED = {kind for kind, *_ in QUICK}  # by places.trained, whose search is looked at in the same way


@pytest.mark.quick(
    "own_dict",
    "own_slots",
    "class_attribute",
    "metaclass",
    "function_cache",
    "global_list",
    "global_deque",
    "default_argument",
    "weak_dict",
    "thread_local",
    "library_module",
    "counter",
    "second_forward",
    "registered_for_good",
    "in_log_records",
    "in_c_array",
    "on_torch_class",
    "on_parameter",
    "in_thread",
    "closure_cell",
    "out_class",
    "out_generator",
    "out_context",
    "out_weak",
    "out_array",
)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.soak] if kind in SEARCHED else [])
        for kind in (*places.KEPT, *places.HANDED)
    ],
)
def test_a_search_leaves_nothing_behind(kind):
    places.reset()
    model = places.build(kind, "cut", late=False, num_blocks=2)
    if kind in REFUSED and kind == "counter":
        with pytest.raises(Exception, match="COUNTER"):
            places.searched(model, run_on(None), 2)
        return
    places.searched(model, run_on(None), 2)


@functools.cache
def registry(name):
    return {}


class Sized:
    def __len__(self):
        raise TypeError("it has no length yet")


SIZED = Sized()


class Normed(torch.nn.Module):
    """As in OLMo2, with norms of queries and keys over all heads; it keeps a number of each forward, and asks a registry."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(16, 16, bias=False) for _ in range(4))
        self.qn, self.kn = torch.nn.RMSNorm(16), torch.nn.RMSNorm(16)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.qn(self.q(x)), self.kn(self.k(x)), self.v(x))
        )
        y = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        self.mean = x.mean() if registry("of forwards") is not SIZED else None
        return x + self.o(y)


def test_a_search_with_norms_over_all_heads_looks_at_two_forwards_and_keeps_a_users_registry():
    registry("of the user")["x"] = 1
    found = shardwise.techniques.tp.search.cut_search.search(
        torch.nn.Sequential(Normed(), Normed()), lambda model: model(torch.randn(2, 3, 16, dtype=torch.float64)), 2
    )
    assert len(found.regions) == 6
    assert registry("of the user") == {"x": 1} and registry.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("layout", "num_ranks"), [("tp=2", 2), pytest.param("dp_shard=2,tp=2", 4, marks=pytest.mark.soak)]
)
def test_gradients_of_what_every_rank_holds_whole_are_compared(ranks, layout, num_ranks):
    """Here nothing is proved of later blocks: in the first window the parameter is named, on all ranks."""
    for text in ranks.run(places.trained_without_proof, num_ranks, layout):
        assert text.startswith("RankError: blocks.2.s: ranks ")
        assert "with other gradients of a parameter that each holds whole" in text
