"""The proof line: right for a right model, red for one that computes differently on its ranks, left out when too large."""

import math
import warnings

import msgspec
import pytest
import torch
from layouts import every_layout
from torch import nn

import shardwise as sw
from shardwise.errors import RankError
from shardwise.run.config import Data, Model, Optim, Parallel, RunConfig, Train

SIZES = {"dim": 32, "num_layers": 2, "ffn": 48}


def _config(layout: str, **model) -> RunConfig:
    return RunConfig(
        model=Model(**(model or {"args": SIZES})),
        data=Data(seq_len=16, global_batch=6, micro_batch=1),
        optim=Optim(name="adamw"),
        parallel=Parallel(layout=layout),
    )


def _prove(config: RunConfig, most: int | None = None, seconds: float = math.inf, least_s: float | None = None) -> dict:
    from shardwise.cli import train_proof
    from shardwise.world import init

    limit, least = train_proof.MOST_PARAMS, train_proof._LEAST_S
    train_proof._LEAST_S = least if least_s is None else least_s
    train_proof.MOST_PARAMS = limit if most is None else most
    try:
        with init(config.parallel.layout, device="cpu") as world:
            return train_proof.prove(config, world, seconds=seconds)
    finally:
        train_proof.MOST_PARAMS, train_proof._LEAST_S = limit, least


@pytest.mark.quick("fsdp-2")
@every_layout("one", "fsdp-2", "ddp-2", "hsdp-2x2")
def test_every_rank_gets_one_small_number_and_where(ranks, layout):
    first, *others = ranks.run(_prove, layout.num_ranks, _config(layout.text))
    assert all(other == first for other in others)
    assert 0 <= first["largest"] < 1e-12
    assert first["name"] in first["text"] and f"{first['largest']:.1e}" in first["text"]
    assert f"layout {layout.text} against one plain process" in first["text"]


def test_a_run_that_is_not_to_be_proved_says_so_and_builds_nothing(ranks):
    config = msgspec.structs.replace(_config("dp_shard=2"), train=Train(prove=False))
    told = ranks.run(_prove, 2, msgspec.structs.replace(config, model=Model(build="nowhere.py:build")))
    assert told == [{"largest": None, "name": None, "text": "left out: train.prove=false"}] * 2


def test_a_short_run_is_proved_in_its_time_and_says_what_was_left_out(ranks):
    first, second = ranks.run(_prove, 2, _config("dp_shard=2"), None, 1e-3, 0.0)
    assert first == second and 0 <= first["largest"] < 1e-12
    assert "1 step in fp64" in first["text"]
    assert first["text"].endswith(
        "left out: 4 of the 6 micro-batches of a step, 2 more steps, for which the run was too short"
    )


def test_the_proof_clips_as_the_run_does():
    from types import SimpleNamespace

    from shardwise.cli.train_proof import _task

    config = msgspec.structs.replace(
        _config("dp_shard=1"), train=Train(max_grad_norm=0.5, norm_type="inf", clip_grad_value=0.1)
    )
    task = _task(config, SimpleNamespace(seed=0), num_steps=1, most=1)
    assert (task.max_grad_norm, task.norm_type, task.clip_grad_value) == (0.5, "inf", 0.1)


def test_what_the_optimizer_of_the_proof_does_otherwise_is_said(ranks):
    config = _config("dp_replicate=1")
    optim = Optim(name="muon", groups={"*norm*": {"weight_decay": 0.0}}, decay_on="matrices")
    told = ranks.run(_prove, 1, msgspec.structs.replace(config, optim=optim))[0]["text"]
    assert told.endswith(
        "; left out: muon, in whose place adamw ran, parameter groups (optim.groups), optim.decay_on=matrices"
    )
    assert "left out" not in ranks.run(_prove, 1, config)[0]["text"]


GROUPED = (
    "from torch import nn\n"
    "class Grouped(nn.Sequential):\n"
    "    def make_parameter_groups(self): return [{'params': list(self.parameters()), 'weight_decay': 0.0}]\n"
    "def build(): return Grouped(nn.Embedding(256, 8), nn.Linear(8, 256))\n"
)


def test_groups_of_the_model_itself_are_said_to_be_left_out(ranks, tmp_path):
    (tmp_path / "grouped.py").write_text(GROUPED)
    told = ranks.run(_prove, 1, _config("dp_shard=1", build=f"{tmp_path}/grouped.py:build"))[0]["text"]
    assert told.endswith("; left out: parameter groups of the model")


def evaluating() -> nn.Module:
    return nn.Sequential(nn.Embedding(256, 8), nn.Dropout(0.1), nn.Linear(8, 256)).eval()


def _warnings_in_eval_mode(config: RunConfig) -> tuple[list[str], list[str]]:
    """Of the two comparisons, and of a step of the user's own."""
    ids = torch.arange(8).reshape(2, 4)
    batch = {"input_ids": ids, "labels": ids + 1}
    with warnings.catch_warnings(record=True) as compared:
        warnings.simplefilter("always")
        _prove(config)
        sw.verify(evaluating, "dp_shard=1", batches=[[batch]], run=lambda function, size, *args: [function(*args)])
    with sw.init("dp_shard=1", device="cpu") as world, warnings.catch_warnings(record=True) as stepped:
        warnings.simplefilter("always")
        model = sw.parallelize(evaluating(), world)
        sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))([batch])
    return [str(each.message) for each in compared], [str(each.message) for each in stepped]


def test_comparisons_put_a_model_in_eval_mode_themselves_and_do_not_warn_of_it(ranks, tmp_path):
    (tmp_path / "drop.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Embedding(256, 8), nn.Dropout(0.1), nn.Linear(8, 256))\n"
    )
    compared, stepped = ranks.run(_warnings_in_eval_mode, 1, _config("dp_shard=1", build=f"{tmp_path}/drop.py:build"))[
        0
    ]
    assert compared == [] and len(stepped) == 1 and "eval mode: '1' (dropout" in stepped[0]


def test_a_model_that_computes_otherwise_on_another_rank_is_named(ranks, tmp_path):
    file = tmp_path / "rankish.py"
    file.write_text(
        "import os\n"
        "from shardwise.run.reference import ReferenceConfig, ReferenceModel\n"
        "class Rankish(ReferenceModel):\n"
        "    def forward(self, input_ids):\n"
        "        return super().forward(input_ids) * (1 + 1e-6 * int(os.environ['RANK']))\n"
        f"def build(): return Rankish(ReferenceConfig(**{SIZES}))\n"
    )
    with pytest.raises(RankError, match=r"raised VerifyError: [\w.]+: grad differs at step 1"):
        ranks.run(_prove, 2, _config("dp_shard=2", build=f"{file}:build"))


def test_dropout_does_not_disturb_the_comparison(ranks, tmp_path):
    file = tmp_path / "dropping.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Embedding(256, 8), nn.Dropout(0.5), nn.Linear(8, 256))\n"
    )
    assert ranks.run(_prove, 2, _config("dp_shard=2", build=f"{file}:build"))[0]["largest"] < 1e-12


def test_a_transform_that_takes_the_world_is_given_that_of_the_run_on_both_sides(ranks, tmp_path):
    file = tmp_path / "per_rank.py"
    file.write_text(
        "import shardwise as sw\n"
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))\n"
        "@sw.transform('per_rank')\n"
        "def per_rank(module, world):\n"
        "    module.insert(1, nn.Sequential(nn.Linear(8, 4 * world.size), nn.Tanh(), nn.Linear(4 * world.size, 8)))\n"
    )
    config = _config("dp_shard=2", build=f"{file}:build")
    config = msgspec.structs.replace(config, parallel=Parallel(layout="dp_shard=2", transforms=("per_rank",)))
    result = ranks.run(_prove, 2, config)[0]
    assert result["largest"] < 1e-12 and "7 gradients each" in result["text"]


def test_a_model_too_large_to_gather_is_left_out_with_the_reason(ranks):
    result = ranks.run(_prove, 2, _config("dp_shard=2"), most=1000)[1]
    assert result["largest"] is None
    assert result["text"].startswith("left out: ") and "(at most 1,000)" in result["text"]
