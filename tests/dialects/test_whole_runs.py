"""A library's own trainer beside the run that its configuration is imported as, on two ranks: losses and norms of each step, to five digits,
of samples whose numbers of labels differ."""

import pytest
from cli.commands import on_ranks
from dialects import whole

from shardwise.dialects.answers import imported
from shardwise.run.metrics import read_metrics


def compare(ranks, folder, theirs, values, script=None, tokens=None, **how):
    made = imported(values, ranks=2, exact=True, **how)
    path = whole.run_file(folder, made, script)
    on_ranks(ranks, "train", str(path), folder=folder)
    ours = [row for row in read_metrics(folder / "ours" / "metrics.jsonl") if row["kind"] == "step"]
    assert len(ours) == len(theirs) == whole.STEPS
    for row, (loss, norm) in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert tokens in (None, row["tokens"])
    assert ours[-1]["loss"] < ours[0]["loss"]


@pytest.fixture
def folder(tmp_path):
    whole.small_llama(tmp_path / "model")
    return tmp_path


def test_the_trainer(ranks, folder):
    compare(ranks, folder, whole.by_trainer(folder), whole.ARGS, dialect="transformers")


def test_records_that_are_longer_than_a_sample_there(ranks, folder):
    rows, tokens = whole.records(folder, most=14)
    values = {
        **whole.SFT,
        "max_length": 14,
        "dataset_name": str(folder / "texts.jsonl"),
        "gradient_checkpointing": False,
    }
    compare(ranks, folder, whole.by_trainer(folder, rows), values, tokens=tokens, dialect="trl")


@pytest.mark.soak
@pytest.mark.filterwarnings(
    "ignore:.*checkpointing.* is deprecated:FutureWarning"
)  # names of transformers that PEFT reads
@pytest.mark.parametrize("lora", [False, True])
def test_sft(ranks, folder, lora):
    pytest.importorskip("trl")
    values = {**whole.SFT, **(whole.LORA if lora else {})}
    compare(ranks, folder, whole.by_sft(folder, lora), values, dialect="trl")


@pytest.mark.soak
def test_a_loop_of_fabric(ranks, folder):
    compare(ranks, folder, whole.by_fabric(folder), whole.FABRIC, whole.SCRIPT, dialect="fabric")


@pytest.mark.soak
def test_a_loop_of_accelerate(ranks, folder):
    compare(ranks, folder, whole.by_accelerate(folder), whole.ACCELERATE, whole.SCRIPT, dialect="accelerate")
