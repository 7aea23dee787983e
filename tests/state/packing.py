"""Tiny models with weights in 4 bits, and what ranks do with them."""

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from state.adapting import EVERY, IDS, VOCAB, count, forward, logits, loss
from torch import Tensor, nn

import shardwise as sw
from shardwise.model import nf4
from shardwise.state import check_adapter, check_packed, weights_bytes

LORA = {"rank": 3, "alpha": 8.0}
PARTS = ("_nf4", "_nf4_scales", "_nf4_outer", "_nf4_mean")


def base(wide: int = 64, seed: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Inner widths of 120: no multiple of 64, also not where tp cuts it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=wide,
        intermediate_size=120,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype)


class Widths(nn.Module):
    """A layer of each width, of as many rows; some rows have no part of their own on a rank."""

    def __init__(self, widths: tuple[int, ...], seed: int = 1):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, 1 + width * 7 % 11, bias=width % 2 == 0) for width in widths)
        for layer in self.layers:
            layer.requires_grad_(False)
        self.last = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last * sum(layer(x[:, : layer.in_features]).sum() for layer in self.layers)


def packed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What ``values`` (name -> whole weight) are stored in."""
    return {
        name + suffix: part
        for name, value in values.items()
        for suffix, part in zip(PARTS, nf4.pack(value), strict=True)
    }


def unpacked(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: nf4.unpack(*nf4.pack(value), nf4.Packing.of(tuple(value.shape)), value.dtype)
        for name, value in values.items()
    }


def weights(state: dict[str, Tensor], *but: str) -> dict[str, Tensor]:
    """Those of a base that are packed."""
    return {name: value for name, value in state.items() if name.endswith("_proj.weight") and name not in but}


def sharded(
    world: sw.World, wide: int = 64, seed: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> nn.Module:
    options = {"lora": sw.LoRA(**LORA), "quantize": "nf4", "sharding": EVERY, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sw.parallelize(functools.partial(base, wide, seed, dtype), world, example={"input_ids": IDS}, **options)


def of_widths(layout: str, widths: tuple[int, ...], **options: Any) -> list[dict[str, Tensor]]:
    """What layers of these widths are stored in, loaded from a state dict by every rank, and from rank 0's."""
    with sw.init(layout, device="cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sw.parallelize(
            Widths(widths, 2), world, example={"x": torch.ones(1, max(widths))}, quantize="nf4", sharding=EVERY
        )
        found = []
        for shared in (True, False):
            sw.load_full_state_dict(model, Widths(widths, 3).state_dict())
            sw.load_weights(model, Widths(widths).state_dict(), shared_files=shared)
            found += [sw.full_state_dict(model, packed=True), sw.full_state_dict(model)]
        return found


def loaded(layout: str, folder: str, wide: int, calls: int = 2, **options: Any) -> dict[str, Any]:
    """What a model has after a directory was loaded, by each way."""
    with sw.init(layout, device="cpu") as world:
        found: dict[str, Any] = {}
        for shared in (True, False)[:calls]:
            model = sharded(world, wide, init="load", **options)
            report = sw.load_weights(model, folder, shared_files=shared, cast=True)
            found[f"report {shared}"] = report
            found[f"parts {shared}"] = sw.full_state_dict(model, packed=True)
        found["plain"] = sw.full_state_dict(model)
        found["cut"] = [name for name, p in sw.recipe_of(model).params.items() if {c.axis for c in p.cuts} >= {"tp"}]
        found["logits"] = logits(model.eval())
        return found


def drawn(model: nn.Module) -> None:
    """Gives adapters values that depend on their names alone."""
    state = sw.full_state_dict(model, packed=True)
    for name, value in state.items():
        if "lora_" in name and "magnitude" not in name:
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))) * 0.2)
    sw.load_full_state_dict(model, state)


def saved(layout: str, source: str, folder: str, wide: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Writes a model in all forms; returns its full state dict and logits."""
    with sw.init(layout, device="cpu") as world:
        model = sharded(world, wide, dtype=dtype, **options)
        sw.load_weights(model, source)
        drawn(model)
        sw.save_weights(model, Path(folder, "merged"))
        sw.save_weights(model, Path(folder, "base"), merge=False)
        sw.save_weights(model, Path(folder, "packed"), merge=False, packed=True)
        sw.save_adapter(model, Path(folder, "adapter"))
        found = sw.full_state_dict(model)
        assert weights_bytes(model) == Path(folder, "base/model.safetensors").stat().st_size
        assert check_packed(model) == Path(folder, "packed/model.safetensors").stat().st_size
        assert 0 < Path(folder, "adapter/adapter_model.safetensors").stat().st_size - check_adapter(model) < 1 << 14
        return found, logits(model.eval())


def trained(layout: str, root: str, windows: int, saves: int, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a run that resumes a checkpoint if there is one, and saves one after ``saves`` windows; and all bytes."""
    with sw.init(layout, device="cpu") as world:
        model = sharded(world, dtype=torch.float64, **options)
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        step = sw.TrainStep(model, optim, loss=loss, forward=forward, count=count)
        manager = sw.CheckpointManager(root, step, async_save=False)
        if not manager.load():
            sw.load_weights(model, base(dtype=torch.float64).state_dict())
        dp, losses = world.axis("dp"), []
        for i in range(step.num_steps, windows):
            rows = [{"input_ids": (IDS[j : j + 1] + i) % VOCAB} for j in range(2)]
            losses.append(step(rows[dp.rank :: dp.size]).loss)
            if step.num_steps == saves:
                manager.save()
        return losses, sw.full_state_dict(model, packed=True)


def refusals(layout: str, calls: list[tuple[str, Any, dict[str, Any]]], **options: Any) -> list[str]:
    """The texts of the errors of calls ``(name, argument, options)``; "" where there is none."""
    with sw.init(layout, device="cpu") as world:
        model, texts = sharded(world, **options), []
        for name, argument, keywords in calls:
            try:
                getattr(sw, name)(model, argument, **keywords)
                texts.append("")
            except sw.ShardwiseError as error:
                texts.append(f"{type(error).__name__}: {error}")
        return texts


def left_half(layout: str, bad: str, good: str) -> list[str]:
    """What a forward says after a load that failed, and after one that did not."""
    with sw.init(layout, device="cpu") as world:
        model, texts = sharded(world), []
        for folder in (bad, good):
            try:
                sw.load_weights(model, folder)
            except sw.ShardwiseError as error:
                texts.append(str(error))
            try:
                logits(model)
                texts.append("")
            except sw.ShardwiseError as error:
                texts.append(str(error))
        return texts


def of_bitsandbytes(state: dict[str, Tensor], dtype: str = "float32", **changes: Any) -> dict[str, Tensor]:
    """A state dict as transformers writes it with bitsandbytes. ``changes``: of the texts beside weights."""
    found = {name: value for name, value in state.items() if name not in weights(state)}
    for name, value in weights(state).items():
        codes, scales, outer, mean = nf4.pack(value)
        text = {
            "quant_type": "nf4", "blocksize": 64, "dtype": dtype, "shape": [*value.shape], "nested_blocksize": 256,
            "nested_dtype": "float32", "nested_offset": float(mean), **changes,
        }  # fmt: skip
        found |= {
            name: codes.reshape(-1, 1),
            f"{name}.absmax": scales.reshape(-1),
            f"{name}.nested_absmax": outer,
            f"{name}.nested_quant_map": torch.tensor(nf4.dynamic_map()),
            f"{name}.quant_map": torch.tensor(nf4.TABLE),
            f"{name}.quant_state.bitsandbytes__{text['quant_type']}": torch.tensor(
                [*json.dumps(text).encode()], dtype=torch.uint8
            ),
        }
    return found


def plain_loaded(layout: str, folder: str) -> tuple[sw.LoadReport, dict[str, Tensor]]:
    """What a model whose weights are plain has of a packed directory."""
    with sw.init(layout, device="cpu") as world:
        model = sharded(world, quantize=None)
        return sw.load_weights(model, folder), sw.full_state_dict(model)


def magnitudes(layout: str, folder: str, wide: int) -> dict[str, Tensor]:
    """Full values of a model with DoRA, after plain values, then bytes, were loaded: each time other ones."""
    with sw.init(layout, device="cpu") as world:
        model = sharded(world, wide, lora=sw.LoRA(**LORA, dora=True))
        first = sw.full_state_dict(model, packed=True)
        sw.load_weights(model, folder)
        found = sw.full_state_dict(model)
        sw.load_full_state_dict(model, {name: value for name, value in first.items() if "lora_" not in name})
        again = sw.full_state_dict(model, packed=True)
        assert all(torch.equal(again[name], value) for name, value in first.items())
        return found


class Hooked(Widths):
    """Decides by a method of its own what is stored."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "twice"] = self.last.detach() * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state.pop(prefix + "twice", None)
        super()._load_from_state_dict(state, prefix, *rest)


def odd(folder: str) -> list[str]:
    """What is said of a weight that has no place in bitsandbytes' files; and of plain values where a module's own method decides."""
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(Widths((4, 5)), world, example={"x": torch.ones(1, 5)}, quantize="nf4")
        other = sw.parallelize(Hooked((4, 6)), world, example={"x": torch.ones(1, 6)}, quantize="nf4")
        bytes_ = sw.full_state_dict(other, packed=True)
        sw.load_full_state_dict(other, bytes_)
        texts = []
        for call in (
            lambda: sw.save_weights(model, folder, packed=True),
            lambda: sw.save_weights(other, folder),
            lambda: sw.full_state_dict(other),
            lambda: sw.load_full_state_dict(other, Hooked((4, 6)).state_dict()),
        ):
            try:
                call()
                texts.append("")
            except sw.ShardwiseError as error:
                texts.append(f"{type(error).__name__}: {error}")
        return texts
