import re

import pytest
import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.model.calling import cropped, run_on

IDS = torch.arange(1, 401).view(4, 100)
LEFT = torch.ones(4, 100, dtype=torch.long)
LEFT[1, :70] = 0  # padded on the left
HALVES = torch.ones(4, 160, dtype=torch.long)
HALVES[0, :80] = HALVES[1, 80:] = 0
CASES = {
    "tokens": ({"input_ids": IDS, "labels": IDS}, {"input_ids": IDS[:2, :64], "labels": IDS[:2, :64]}),
    "padded on the left": ({"a": IDS, "m": LEFT}, {"a": IDS[:2, -64:], "m": LEFT[:2, -64:]}),
    "padded on both sides": ({"m": HALVES}, {"m": HALVES[:2, :64]}),
    "a number": ({"a": IDS, "n": torch.tensor(3.0)}, {"a": IDS[:2, :64], "n": torch.tensor(3.0)}),
    "images": ({"x": torch.ones(32, 3, 9, 9)}, {"x": torch.ones(16, 3, 9, 9)}),
    "floats are no tokens": ({"x": torch.ones(80, 90)}, {"x": torch.ones(16, 90)}),
    "a mask of pairs": (
        {"a": torch.ones(20, 100).long(), "m": torch.ones(20, 1, 100, 100).bool()},
        {"a": torch.ones(16, 100).long(), "m": torch.ones(16, 1, 100, 100).bool()},
    ),
    "small": ({"x": torch.ones(2, 6)}, None),
    "packed": ({"a": IDS, "ends": torch.arange(7)}, None),
}


NARROW, WIDE = nn.Linear(30, 20, device="meta"), nn.Linear(8192, 16000, device="meta")
OF_A_WIDE_MODEL = {
    "tokens": ({"input_ids": IDS, "labels": IDS}, {"input_ids": IDS[:2, :4], "labels": IDS[:2, :4]}),
    "padded on the left": ({"a": IDS, "m": LEFT}, {"a": IDS[:2, -4:], "m": LEFT[:2, -4:]}),
    "images": ({"x": torch.ones(32, 3, 9, 9)}, {"x": torch.ones(2, 3, 9, 9)}),
    "features": ({"x": torch.ones(80, 90)}, {"x": torch.ones(16, 90)}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_example_is_cropped_where_that_is_safe(case):
    example, want = CASES[case]
    found = cropped(example, NARROW)
    assert (found is None) == (want is None)
    if want is not None:
        assert found.keys() == want.keys() and all(torch.equal(found[key], value) for key, value in want.items())


@pytest.mark.parametrize("case", OF_A_WIDE_MODEL)
def test_an_example_of_a_wide_model_is_cropped_more(case):
    example, want = OF_A_WIDE_MODEL[case]
    found = cropped(example, WIDE)
    assert found.keys() == want.keys() and all(torch.equal(found[key], value) for key, value in want.items())


class Shape(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(16, width, device="meta")

    def forward(self, input_ids):
        return input_ids.shape


@pytest.mark.parametrize(("width", "columns"), [(8, 8), (4096, 8), (8192, 4)])
def test_tokens_for_a_model_that_is_given_no_example(width, columns):
    assert run_on(None)(Shape(width)) == (2, columns)


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return super().forward(x)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, left, right):
        return self.embed(left) + right


def test_a_model_of_which_it_is_not_known_what_it_runs_on_is_told_an_example_that_runs():
    with pytest.raises(UsageError) as caught:
        run_on(None)(Mlp())
    assert str(caught.value) == (
        "Mlp.forward(x) without example=\n"
        "  why: under tp and cp a model is run once to find what can be cut; it has no embedding, so its 'x' has a shape and a dtype that "
        "are not known\n"
        "  fix: give it a micro-batch of the shapes and dtypes of training: "
        'sw.parallelize(model, world, example={"x": torch.randn(16, 12)})'
    )
    example = re.search(r"example=({.*})", caught.value.fix).group(1)
    assert run_on(eval(example, {"torch": torch}))(Mlp()).shape == (16, 4)


def test_a_model_of_which_it_is_not_known_where_tokens_go_is_told_so():
    with pytest.raises(UsageError) as caught:
        run_on(None)(Pair())
    assert caught.value.given == "Pair.forward(left, right) without example="
    assert "it has an embedding, but takes left and right: which of them are tokens is not known" in caught.value.why
    assert 'example={"left": torch.randn(16, 8), "right": torch.randn(16, 8)}' in caught.value.fix
