"""Tiny models with adapters in float64, every B and magnitude drawn, and what ranks do with them."""

import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.techniques.lora.prepare import prepare

VOCAB = 48
IDS = torch.arange(24).view(2, 12)
EVERY = sw.Sharding(min_unit_bytes=0)
RANK = {"rank": 3, "alpha": 8.0}
# Name -> model, options of LoRA beside rank and alpha.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {}),
    "rslora": ("llama", {"rslora": True, "targets": ("q_proj", "v_proj", "layers.0.mlp.down_proj")}),
    "dora": ("llama", {"dora": True}),
    "trained": ("llama", {"train": ("*norm", "lm_head")}),
    "tied": ("tied", {"train": ("embed_tokens",)}),
    "table": ("llama", {"targets": ("embed_tokens", "q_proj")}),
    "own": ("own", {"targets": ("q_proj",)}),
    "ranks": ("llama", {"ranks": {"q_proj": 5, "0.mlp.up_proj": 1}, "alphas": {"1.mlp.up_proj": 2.5, "v_proj": 9}}),
    "gpt2": ("gpt2", {}),
    "gpt2-dora": ("gpt2", {"dora": True}),
}
DOUBLED = {"doubled": ("doubled", {"targets": ("q_proj",)})}
STACKS = ("gate_up_proj", "down_proj")
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"experts": STACKS}),
    "qwen3-moe": ("qwen3-moe", {"experts": STACKS, "rslora": True, "targets": ("q_proj",), "train": ("*norm",)}),
    "alone": ("mixtral", {"experts": ("down_proj", "gate.weight"), "targets": ()}),
    "mixtral-ranks": (
        "mixtral",
        {"experts": STACKS, "ranks": {"gate_up_proj": 6}, "alphas": {"1.mlp.experts.down_proj": 3}},
    ),
}
OTHERS = DOUBLED | EXPERTS


class Turned(nn.Linear):
    """Computes what nn.Linear does, in a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def base(case: str, seed: int = 1) -> nn.Module:
    """The model without adapters."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    kind = (CASES | OTHERS)[case][0]
    torch.manual_seed(seed)
    if kind in ("mixtral", "qwen3-moe"):
        return with_experts(kind)
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_embd=24,
                n_layer=2,
                n_head=4,
                n_positions=32,
                attn_pdrop=0,
                resid_pdrop=0,
                embd_pdrop=0,
            )
        ).double()
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=kind == "tied",
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    if kind in OWN:
        for layer in model.model.layers:
            layer.self_attn.q_proj.__class__ = OWN[kind]
    return model


def with_experts(kind: str) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts_per_tok": 2, "experts_implementation": "eager",
    }  # fmt: skip
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4)).double()
    own = {"moe_intermediate_size": 10, "num_experts": 4, "head_dim": 6}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **own)).double()


OWN = {"own": Turned, "doubled": Doubled}


def option(case: str) -> sw.LoRA:
    return sw.LoRA(**RANK, **(CASES | OTHERS)[case][1])


def drawn(model: nn.Module) -> nn.Module:
    """Gives adapters, and what is trained in full, values that depend on their names alone."""
    for name, param in model.named_parameters():
        if param.requires_grad:
            random = torch.randn(
                param.shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.float64
            )
            with torch.no_grad():
                param.copy_(param + 0.1 * random if "lora_" not in name or "magnitude" in name else 0.2 * random)
    return model


def plain(case: str) -> nn.Module:
    """The model with adapters in one process."""
    return drawn(prepare(base(case), None, None, lora=option(case))).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def sharded(case: str, world: sw.World, *, seed: int = 1, lora: sw.LoRA | None = None, **options: Any) -> nn.Module:
    build = functools.partial(base, case, seed)
    example = {"input_ids": IDS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sw.parallelize(build, world, lora=lora or option(case), example=example, sharding=EVERY, **options)


def saved(case: str, layout: str, folder: str, base_folder: str | None = None) -> list[str]:
    """Writes the adapters to ``folder/adapter``, and the merged weights to ``folder/merged``."""
    with sw.init(layout, device="cpu") as world:
        model = sharded(case, world)
        if base_folder is not None:
            sw.load_weights(model, base_folder)
        sw.load_full_state_dict(model, plain(case).state_dict())
        sw.save_adapter(model, Path(folder, "adapter"))
        try:
            sw.save_weights(model, Path(folder, "merged"))
        except sw.UnsupportedError as error:
            return [str(error)]
        sw.save_weights(model, Path(folder, "base"), merge=False)
        return []


def loaded(
    case: str, layout: str, base_folder: str, adapter: str, again: str | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """All values and the logits of a model made for the adapters of a directory, which are written to ``again``."""
    with sw.init(layout, device="cpu") as world:
        model = sharded(case, world, seed=2, lora=sw.LoRA.of(adapter), init="load")
        sw.load_weights(model, base_folder)
        sw.load_adapter(model, adapter)
        if again is not None:
            sw.save_adapter(model, again)
        return sw.full_state_dict(model), logits(model.eval())


def begun(case: str, layout: str, base_folder: str) -> dict[str, Any]:
    """What a base's directory makes of a model that was seeded otherwise."""
    with sw.init(layout, device="cpu") as world:
        found: dict[str, Any] = {}
        for init in ("load", "seeded"):
            model = sharded(case, world, seed=2, init=init)
            found[f"{init} report"] = str(sw.load_weights(model, base_folder))
            found[init] = sw.full_state_dict(model)
        sw.load_full_state_dict(model, plain(case).state_dict())
        before = sw.full_state_dict(model)
        sw.load_weights(model, base_folder)
        after = sw.full_state_dict(model)
        found["kept"] = [name for name, value in after.items() if "lora_" in name and torch.equal(before[name], value)]
        return found


def rounded(layout: str, folder: str) -> tuple[str, dict[str, set[torch.dtype]], set[torch.dtype]]:
    """Loads a base of float32 into a model that is computed in bfloat16, and writes it merged."""
    with sw.init(layout, device="cpu") as world:
        options = {"lora": option("dora"), "precision": "bf16", "init": "load", "sharding": EVERY}
        model = sw.parallelize(lambda: base("dora").float(), world, **options)
        text = str(sw.load_weights(model, Path(folder, "base")))
        sw.save_weights(model, Path(folder, "merged"))
        dtypes: dict[str, set[torch.dtype]] = {"base": set(), "own": set()}
        for name, value in sw.full_state_dict(model).items():
            dtypes["own" if "lora_" in name else "base"].add(value.dtype)
        from safetensors.torch import load_file

        return text, dtypes, {value.dtype for value in load_file(Path(folder, "merged/model.safetensors")).values()}


def refusals(
    case: str, layout: str, calls: list[tuple[str, Any, dict[str, Any]]], lora: sw.LoRA | None = None
) -> list[str]:
    """The texts of the errors of calls ``(name, argument, options)``; "" where there is none."""
    with sw.init(layout, device="cpu") as world:
        model, texts = sharded(case, world, lora=lora), []
        for name, argument, options in calls:
            try:
                getattr(sw, name)(model, argument, **options)
                texts.append("")
            except sw.ShardwiseError as error:
                texts.append(f"{type(error).__name__}: {error}")
        return texts


def trained(case: str, layout: str, root: str, windows: int, resumes: bool, adapts: bool = True) -> list[float]:
    """The losses of a run that saves a checkpoint after its first window."""
    with sw.init(layout, device="cpu") as world:
        model = sharded(case, world) if adapts else sw.parallelize(base(case), world)
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        step = sw.TrainStep(model, optim, loss=loss, forward=forward, count=count, max_grad_norm=1.0)
        manager = sw.CheckpointManager(root, step, async_save=False)
        if resumes:
            manager.load()
        elif adapts:
            sw.load_full_state_dict(model, plain(case).state_dict())
        dp, losses = world.axis("dp"), []
        for i in range(step.num_steps, windows):
            rows = [{"input_ids": (IDS[j : j + 1] + i) % VOCAB} for j in range(2)]
            losses.append(step(rows[dp.rank :: dp.size]).loss)
            if step.num_steps == 1:
                manager.save()
        return losses


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(input_ids=batch["input_ids"])


def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["input_ids"][:, 1:].reshape(-1)
    return nn.functional.cross_entropy(output.logits[:, :-1].reshape(-1, VOCAB), labels, reduction="sum")


def count(batch: dict[str, Tensor]) -> int:
    return batch["input_ids"][:, 1:].numel()


def ending(outer: bool, targets: str, folder: str) -> str:
    """Writes adapters and an answer; the error, if there is one."""
    from state.test_adapters import Ends

    with sw.init("dp_shard=1", device="cpu") as world:
        torch.manual_seed(0)
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
        lora = sw.LoRA(rank=2, targets=targets, train="out" if outer else "blocks.*.out")
        model = drawn_float(sw.parallelize(Ends(outer), world, example={"x": x}, lora=lora))
        try:
            sw.save_adapter(model, Path(folder, "adapter"))
        except sw.UnsupportedError as error:
            return str(error)
        with torch.no_grad():
            torch.save((model(x), x), Path(folder, "answer.pt"))
        return ""


def drawn_float(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param += 0.1 * torch.randn(param.shape)
    return model
