"""What stock transformers has saved comes in sharded, computes the same, and goes out as stock transformers had written it."""

import json
import warnings
from pathlib import Path

import models
import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw

STOCK = models.select("transformers")
SAMPLE = ("llama", "t5", "mixtral", "wav2vec2")


def stored(folder):
    return {n: t for file in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(file).items()}


def example(case):
    batch = case.windows(1, 1)[0][0]
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def first_output(out):
    return out if isinstance(out, torch.Tensor) else out[0]


def round_trip(name, source, dest, layout, batch):
    case = STOCK[name]
    with sw.init(layout, device="cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sw.parallelize(case.build, world, init="load", sharding=sw.Sharding(min_unit_bytes=0))
        report = sw.load_weights(model, source, cast=True)
        model.eval()
        with torch.no_grad():
            out = first_output(case.forward(model, batch))
        sw.save_weights(model, dest, max_shard_bytes=2000)
        return report, out


def published_with_turned_experts(folder):
    """As Qwen published theirs: an expert's input before its output."""
    for file in Path(folder).glob("*.safetensors"):
        turned = {n: t.mT.contiguous() if ".mlp.experts." in n else t for n, t in load_file(file).items()}
        assert any(".mlp.experts." in n for n in turned)
        save_file(turned, file, metadata={"format": "pt"})


def check(ranks, tmp_path, name, layout="dp_shard=2", num_ranks=2, publish=None):
    case = STOCK[name]
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = case.build().eval()
        with torch.no_grad():
            for tensor in (*plain.parameters(), *plain.buffers()):
                if tensor.is_floating_point() and tensor.dim():
                    tensor.add_(torch.randn(tensor.shape, dtype=tensor.dtype) * 0.01)
        plain.save_pretrained(tmp_path / "stock")
        as_saved = stored(tmp_path / "stock")
        if publish is not None:
            publish(tmp_path / "stock")
        plain = type(plain).from_pretrained(tmp_path / "stock", dtype=plain.dtype).eval()
        batch = example(case)
        answers = ranks.run(
            round_trip, num_ranks, name, str(tmp_path / "stock"), str(tmp_path / "ours"), layout, batch, timeout_s=120
        )
        with torch.no_grad():
            twin = case.build().eval()  # with the attention that the ranks use, which from_pretrained chooses by itself
            twin.load_state_dict(plain.state_dict())
            expected = first_output(case.forward(twin, batch))
        again = type(plain).from_pretrained(tmp_path / "ours", dtype=plain.dtype)
    first, second = as_saved, stored(tmp_path / "ours")
    assert first.keys() == second.keys()
    assert all(torch.equal(second[n].to(t.dtype), t) for n, t in first.items())
    state = plain.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in again.state_dict().items())
    for report, found in answers:
        assert (report.missing, report.unexpected) == ((), ())
        assert torch.equal(found, expected)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == [type(plain).__name__]


@pytest.mark.quick("llama", "t5")
@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.soak) for n in STOCK])
def test_a_model_saved_by_stock_transformers_comes_in_and_goes_out_as_it_was(ranks, tmp_path, name):
    check(ranks, tmp_path, name)


def test_published_tensors_whose_dims_are_in_another_order_come_in_and_go_out_as_transformers_saves_them(
    ranks, tmp_path
):
    check(ranks, tmp_path, "qwen3-vl-moe", publish=published_with_turned_experts)
