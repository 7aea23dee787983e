"""What regions say, carried out on real ranks: the gradients are those of the whole model."""

import models
import pytest
from techniques.tp.search.cut_by_hand import errors, regions_of

OWN = list(models.select("linears"))
ON_4 = [f"linears: {name}" for name in ("qkv-kv-1", "lora", "latent", "table")]
FAMILIES = ["llama", "gpt2", "qwen3", "t5", "bert", "vit", "albert", "mamba", "bloom", "falcon", "whisper", "nanogpt"]
ALL = [name for name, model in models.MODELS.items() if model.batch is not None and name not in {*OWN, *FAMILIES}]


@pytest.mark.parametrize(
    ("names", "degree"),
    [
        pytest.param(OWN, 2, id="own-2", marks=pytest.mark.soak),
        pytest.param(ON_4, 4, id="some-4"),  # with fewer key/value heads than ranks, or layers of other kinds
        pytest.param(OWN, 4, id="own-4", marks=pytest.mark.soak),
        pytest.param(FAMILIES, 2, id="families-2", marks=pytest.mark.soak),
        pytest.param(ALL, 2, id="others-2", marks=[pytest.mark.soak, pytest.mark.filterwarnings("ignore")]),
    ],
)
def test_gradients_are_those_of_the_whole_model(ranks, names, degree):
    given = {name: regions_of(name, degree) for name in names}
    for found in ranks.run(errors, degree, given, timeout_s=100):
        assert {name: (error, where) for name, (error, where, _) in found.items() if not error < 1e-12} == {}


def test_ranks_hold_their_part(ranks):
    """Of every layer but the head, which has rows for all words."""
    name = "linears: qkv"
    held = [found[name][2] for found in ranks.run(errors, 4, {name: regions_of(name, 4)})]
    whole = models.get(name).build()
    cut = sum(param.numel() for key, param in whole.named_parameters() if "blocks" in key and ".be" not in key)
    rows = sum(param.numel() for key, param in whole.named_parameters() if key.endswith(("out.bias", "down.bias")))
    rest = sum(param.numel() for param in whole.parameters()) - cut
    assert held == [rest + rows + (cut - rows) // 4] * 4
