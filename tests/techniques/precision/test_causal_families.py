"""Every causal language model of transformers trains under bf16, and where torch refused nothing no bit changes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise import Sharding
from shardwise.errors import ShardwiseError
from shardwise.parallel import describe, parallelize
from shardwise.step.step import TrainStep
from shardwise.world import init

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")
MENDED = {"inkling2_loop_text", "inkling2_text", "minimax", "openai-gpt", "xglm", "xlstm"}
NOT_TRAINED = {"rwkv"}  # its forward writes a parameter
TOO_LARGE = {"blt"}
SUMMED_OTHERWISE = {"inkling2_loop_text", "inkling2_text"}
"""Blocks hand their results to several later ones: with blocks as units autograd adds up gradients in another order."""


def loss_of(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")


def called(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**{key: value for key, value in batch.items() if key != "labels"}).logits


def trained(kind: str, *, casts: bool, units: int | None = None) -> tuple[list[Tensor] | str, str]:
    """The loss and the parameters after two windows, or an error; and what was cast."""
    import causal_lms

    torch.manual_seed(0)
    model = causal_lms.build(kind)
    windows = causal_lms.windows(model, 2, 2)
    with init("dp_shard=1", device="cpu", seed=1) as world:
        try:
            parallelize(model, world, precision="bf16", sharding=Sharding(min_unit_bytes=units))
            if not casts:
                del model.__dict__["forward"]
            step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), loss=loss_of, forward=called)
            losses = [torch.tensor(step(window).loss) for window in windows]
        except (RuntimeError, ShardwiseError) as error:
            return str(error), ""
        found = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]
        return losses + found, next((line for line in describe(model).splitlines() if line.startswith("dtypes:")), "")


def compared(kind: str) -> tuple[str, str]:
    sys.path.insert(0, BENCHMARKS)
    try:
        import causal_lms

        causal_lms.windows(causal_lms.build(kind), 1, 1)
    except Exception as error:
        return "not built", str(error)
    mine, text = trained(kind, casts=True)
    before, _ = trained(kind, casts=False)
    if isinstance(mine, str):
        return "refused", mine
    units, _ = trained(kind, casts=True, units=0)
    num = 2 if kind in SUMMED_OTHERWISE else None  # the losses
    if isinstance(units, str) or not same(mine[:num], units[:num]):
        return "other bits with blocks as units", str(units)[:200]
    if isinstance(before, str):
        return "mended", text
    return ("equal", text) if same(mine, before) else ("changed", text)


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.soak
def test_the_causal_families_of_transformers(ranks):
    sys.path.insert(0, BENCHMARKS)
    import causal_lms

    found = {kind: ranks.run(compared, 1, kind)[0] for kind in causal_lms.names() if kind not in TOO_LARGE}
    by_verdict: dict[str, set[str]] = {}
    for kind, (verdict, _) in found.items():
        by_verdict.setdefault(verdict, set()).add(kind)
    print(
        {verdict: len(kinds) for verdict, kinds in by_verdict.items()},
        {k: v for k, v in found.items() if v[0] not in ("equal", "not built")},
    )
    assert by_verdict["mended"] == MENDED and by_verdict.get("refused", set()) == NOT_TRAINED
    assert set(by_verdict) <= {"equal", "mended", "refused", "not built"}
    assert len(by_verdict["equal"]) >= 170 and all(not found[kind][1] for kind in by_verdict["equal"])
