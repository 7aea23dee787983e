"""A whole short run is the same under every layout: data order, dropout masks, padding, clipping, AdamW, evaluation."""

import pytest
import torch
from layouts import every_layout
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shardwise as sw


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True) for _ in range(3)]
        )
        self.head = nn.Linear(8, 13)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Sequences:
    """22 sequences: the last window of an epoch has 6 of 8."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(0, 13, (7,), generator=generator)}


def run(layout, engine):
    with sw.init(layout, seed=3, device="cpu") as world:
        model = sw.parallelize(Net, world, precision="fp64", sharding=sw.Sharding(engine=engine, min_unit_bytes=0))
        step = sw.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=1.0)
        loader = sw.Loader(Sequences(), world, global_batch=8, micro_batch=2)
        outs = [step(window) for _ in range(2) for window in loader]
        held_out = sw.Loader(Sequences(), world, global_batch=8, micro_batch=2, shuffle=False)
        scores = sw.evaluate(model, held_out)
        assert model.training
        return [(out.loss, out.grad_norm, out.num_tokens) for out in outs], scores, sw.full_state_dict(model)


@pytest.fixture(scope="module")
def one(ranks):
    return ranks.run(run, 1, "dp_shard=1", "auto")[0]


# On 3 ranks, 4 micro-batches: paddings in every window.
@pytest.mark.quick("ddp-2", "hsdp-2x2")
@every_layout("one-fsdp2", "fsdp-2", "ddp-2", "fsdp-3", "hsdp-2x2")
def test_a_run_with_dropout_is_the_same_under_every_layout(ranks, one, layout):
    steps, scores, weights = ranks.run(run, layout.num_ranks, layout.text, layout.engine)[0]
    assert len(steps) == 6
    for ours, reference in zip(steps, one[0], strict=True):
        assert ours == pytest.approx(reference, rel=1e-12)
    assert scores == pytest.approx(one[1], rel=1e-12)
    assert weights.keys() == one[2].keys()
    # AdamW's sign-like first steps turn rounding of tiny gradients into 1e-10 of a weight; masks or data that
    # differed would be 1e-2.
    assert all(torch.allclose(weights[name], one[2][name], atol=1e-8) for name in weights)


def evaluate_unequal(layout):
    """Rank 0 has three batches, rank 1 has one, rank 2 has none."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(Net, world, precision="fp64", sharding=sw.Sharding(min_unit_bytes=0))
        batches = _batches()
        mine = {1: batches, 3: [batches[:3], batches[3:], []][world.rank]}[world.size]
        return sw.evaluate(model, mine)


def _batches():
    generator = torch.Generator().manual_seed(0)
    batches = []
    for i in range(4):
        ids = torch.randint(0, 13, (1 + i, 7), generator=generator)
        batches.append(sw.shift_labels({"input_ids": ids}))
        batches[-1]["labels"][0, : i + 1] = -100
    return batches


def test_evaluation_with_unequal_batches_is_token_weighted(ranks):
    expected = ranks.run(evaluate_unequal, 1, "dp_shard=1")[0]
    for scores in ranks.run(evaluate_unequal, 3, "dp_shard=3"):
        assert scores == pytest.approx(expected, rel=1e-12)
    assert expected["num_tokens"] == sum(int((b["labels"] != -100).sum()) for b in _batches())


def evaluate_the_rest():
    """Of a Loader whose loop was left after its first window."""
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(Net, world)
        samples = [{"input_ids": torch.arange(7)} for _ in range(12)]
        loader = sw.Loader(samples, world, global_batch=4, micro_batch=2)
        next(iter(loader))
        told = []
        for given in (loader, torch.utils.data.DataLoader(TensorDataset(torch.ones(4, 6).long()))):
            try:
                sw.evaluate(model, given)
            except sw.UsageError as error:
                told.append(str(error))
        loader = sw.Loader(samples, world, global_batch=4, micro_batch=2)
        return told, [sw.evaluate(model, loader)["num_tokens"] for _ in range(2)]


def test_an_evaluation_is_of_all_samples(ranks):
    for (partial, tuples), tokens in ranks.run(evaluate_the_rest, 2):
        assert "sw.evaluate of a Loader in the middle of an epoch" in partial and "left after 4 samples" in partial
        assert "a micro-batch that is a Tensor" in tuples
        assert tokens == [12 * 6] * 2


def evaluate_nothing():
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(Net, world)
        try:
            sw.evaluate(model, [])
        except sw.UsageError as error:
            return str(error), model.training
    return None


def test_an_evaluation_without_batches_is_refused_on_every_rank(ranks):
    for text, training in ranks.run(evaluate_nothing, 2):
        assert "an evaluation without batches" in text and training
