"""Operations of the model, its part of the device's, and the bytes of collectives."""

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.run.config import RunConfig
from shardwise.run.device_use import DeviceUse, flops_of_sample, mean_flops, peak_flops
from shardwise.run.reference import build
from shardwise.world import init

VOCAB, SEQ = 256, 32


def reference(**sizes) -> nn.Module:
    return build(**{"dim": 32, "num_layers": 2, "ffn": 48, "vocab": VOCAB, **sizes})


def counted(model: nn.Module, samples: int = 1) -> int:
    """By torch, of a real forward and backward."""
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(samples, SEQ, dtype=torch.long)).sum().backward()
    return counter.get_total_flops()


def test_t63_operations_are_those_of_the_plain_model():
    by_hand = counted(reference(), 3)
    of_sample = flops_of_sample(reference(), SEQ)
    # On the CPU torch calls one kernel for attention, which its counter does not know.
    attention = 3 * 2 * 2 * SEQ * SEQ * 32 * 2
    assert by_hand // 3 < of_sample <= by_hand // 3 + 2 * attention
    linear = sum(m.weight.numel() for m in reference().modules() if isinstance(m, nn.Linear))
    assert abs(of_sample - (6 * linear * SEQ + attention)) <= attention


def test_a_frozen_layer_has_no_products_of_its_weights_gradient():
    model = reference()
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    frozen = sum(m.weight.numel() for m in model.blocks[0].modules() if isinstance(m, nn.Linear))
    model.embed.weight.requires_grad_(False)
    less = flops_of_sample(reference(), SEQ) - flops_of_sample(model, SEQ)
    assert less >= 2 * frozen * SEQ  # and none of what would only be passed on to frozen layers


def test_of_a_hugging_face_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert 6 * linear * SEQ <= flops_of_sample(model, SEQ) <= 8 * linear * SEQ


def test_samples_of_unequal_length_count_with_their_tokens():
    lengths = np.array([5, 5, 9, 14, 20, 31, 32])
    exact = sum(flops_of_sample(reference(), int(length)) for length in lengths) / len(lengths)
    assert mean_flops(reference(), lengths) == pytest.approx(exact, rel=1e-12)
    assert mean_flops(reference(), lengths[:2]) == flops_of_sample(reference(), 5)
    assert mean_flops(Reads(), lengths) is None


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, ids):
        x = self.table(ids)
        return x * 2 if x.sum() > 0 else x


def test_a_model_that_reads_values_has_no_figure():
    assert flops_of_sample(Reads(), SEQ) is None


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "float16", 756e12),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),  # not 156 or 624, of TF32 and of sparse matrices
        ("NVIDIA A100-SXM4-40GB", "tf32", 156e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA A100-SXM4-40GB", "float64", None),
        ("Some GPU", "bfloat16", None),
    ],
)
def test_t63_peaks_are_dense(device, dtype, peak):
    assert peak_flops(device, dtype) == peak


def config_of(**log) -> RunConfig:
    given = {"model": {"args": {"dim": 32, "num_layers": 2, "ffn": 48}}, "data": {"seq_len": SEQ, "global_batch": 8, "micro_batch": 4},
             "log": log}  # fmt: skip
    return msgspec.convert(given, RunConfig)


def figures(layout: str, log: dict, lengths: np.ndarray | None = None):
    with init(layout, device="cpu") as world:
        use = DeviceUse(config_of(**log), world, lengths)
        before = use.figures(2.0)
        for nth in range(3):
            with use.counted(nth):
                torch.distributed.all_reduce(torch.zeros(1000 * (nth + 1)))
        return before, use.figures(2.0), use.figures(0.0)


def test_figures_of_a_step(ranks):
    step = 8 * flops_of_sample(reference(max_seq=256), SEQ)
    (before, then, still), others = ranks.run(figures, 2, "dp_replicate=2", {"peak_tflops": 0.5})
    assert before == {} and still == {"comm_bytes": 8000}
    assert then["tflops"] == pytest.approx(2.0 * step / 2 / 1e12)
    assert then["mfu"] == pytest.approx(then["tflops"] / 0.5)
    assert then["comm_bytes"] == 8000  # of the second step
    assert others == ({}, {}, {})
    of_records = ranks.run(figures, 1, "dp_shard=1", {}, np.array([SEQ // 2] * 3))[0][1]
    assert "mfu" not in of_records
    assert of_records["tflops"] == pytest.approx(16 * flops_of_sample(reference(max_seq=256), SEQ // 2) / 1e12)


def test_a_run_logs_them(ranks, tmp_path):
    """FSDP2 in one unit: two micro-batches, each gathered for forward and kept, one reduction; 4 bytes a number."""
    from cli.commands import on_ranks

    from shardwise.run.metrics import read_metrics

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    sizes = "--model.args={dim: 64, num_layers: 2, ffn: 96}"
    words = (sizes, "--data.seq_len=32", "--data.global_batch=8", "--data.micro_batch=2", "--train.steps=3", "--log.every=1",
             "--log.plot=false", "--train.prove=false", "--log.peak_tflops=0.1", f"--data.path={tmp_path / 'text.txt'}")  # fmt: skip
    on_ranks(ranks, "train", *words, "--parallel.layout=dp_shard=2", folder=tmp_path)
    rows = [row for row in read_metrics(tmp_path / "runs/latest/metrics.jsonl") if row["kind"] == "step"]
    assert ["comm_bytes" in row for row in rows] == [False, True, True]
    assert all(row["mfu"] == pytest.approx(row["tflops"] / 0.1) and row["tflops"] > 0 for row in rows)
    params = 4 * sum(p.numel() for p in build(dim=64, num_layers=2, ffn=96, max_seq=256).parameters())
    assert 2 * params <= rows[-1]["comm_bytes"] <= 2.1 * params
