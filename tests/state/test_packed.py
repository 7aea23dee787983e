"""Weights in 4 bits, loaded, gathered and saved: the bytes are those of the whole tensor under every layout."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from state import packing
from state.adapting import logits
from state.packing import base, left_half, loaded, of_widths, packed, refusals, saved, trained, unpacked, weights

LAYOUTS = {"dp_shard=1": 1, "dp_replicate=2": 2, "dp_shard=2": 2, "dp_shard=3": 3, "tp=2": 2, "dp_shard=2,tp=2": 4}
WIDTHS = (2, 3, 5, 8, 16, 31, 33, 63, 64, 65, 70)


def same(found, expected, place=""):
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), (place, name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Directory of a base, by its width and dtype, as transformers writes it."""
    made = {}

    def folder(wide=64, dtype=torch.float32):
        if (wide, dtype) not in made:
            made[wide, dtype] = tmp_path_factory.mktemp("base")
            base(wide, dtype=dtype).save_pretrained(made[wide, dtype])
        return str(made[wide, dtype])

    return folder


@pytest.mark.parametrize(
    "widths", [pytest.param(WIDTHS, id="few"), pytest.param((*range(2, 71),), id="all", marks=pytest.mark.soak)]
)
def test_each_width_has_the_bytes_of_the_whole_weight(ranks, widths):
    state = packing.Widths(widths).state_dict()
    of_layers = {name: value for name, value in state.items() if name.endswith("weight")}
    for num in (1, 2, 3):
        parts, plain, again, _ = ranks.run(of_widths, num, f"dp_shard={num}", widths)[0]
        for found in (parts, again):
            same(found, packed(of_layers), num)
            assert not set(found) & set(of_layers)
        assert [*plain] == [*state]
        same(plain, {**state, **unpacked(of_layers)}, num)


@pytest.mark.parametrize("wide", [64, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_is_packed_under_every_layout_as_the_whole_tensors_are(ranks, folders, layout, wide):
    expected = base(wide).state_dict()
    results = ranks.run(loaded, LAYOUTS[layout], layout, folders(wide), wide)
    found = results[0]
    for shared in (True, False):
        same(found[f"parts {shared}"], packed(weights(expected)), shared)
        assert set(found[f"report {shared}"].packed) == set(weights(expected))
        assert "packed (14): model.layers.0" in str(found[f"report {shared}"])
    same(found["plain"], {**expected, **unpacked(weights(expected))})
    assert ("tp" in layout) == any("_nf4" in name for name in found["cut"])
    truth = base(wide)
    truth.load_state_dict({**expected, **unpacked(weights(expected))})
    assert (found["logits"] - logits(truth.eval())).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_every_floating_dtype_are_packed_without_a_cast(ranks, folders, dtype):
    found = ranks.run(loaded, 2, "dp_shard=2", folders(64, dtype), 64, 1)[0]
    same(found["parts True"], packed(weights(base(dtype=dtype).state_dict())))
    assert not set(found["report True"].cast) & set(weights(found["plain"]))
