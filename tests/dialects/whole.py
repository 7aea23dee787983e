"""Whole runs by the libraries' own trainers, in one process, of samples whose numbers of labels differ; each step takes all samples, so
that their order does not matter."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

SAMPLES, LENGTH, VOCAB, STEPS = 16, 12, 61, 4
SETTINGS = {"lr": 3e-3, "decay": 0.2, "beta2": 0.97, "clip": 0.25}
ARGS = {
    "output_dir": "trainer", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": STEPS, "learning_rate": 3e-3,
    "lr_scheduler_type": "linear", "weight_decay": 0.2, "adam_beta2": 0.97, "max_grad_norm": 0.25, "report_to": "none", "save_strategy": "no",
    "use_cpu": True, "seed": 5, "dataloader_pin_memory": False, "logging_steps": 1,
}  # fmt: skip
SFT = {**ARGS, "max_length": 64, "bf16": False, "activation_checkpointing": False, "completion_only_loss": True, "packing": False}  # fmt: skip
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "down_proj"]}  # fmt: skip
FABRIC = {
    "strategy": "ddp", "devices": 2, "accelerator": "cpu", "precision": "32-true", "max_steps": STEPS, "accumulate_grad_batches": 4,
    "gradient_clip_val": 0.25, "log_every_n_steps": 1,
}  # fmt: skip
ACCELERATE = {"distributed_type": "MULTI_CPU", "num_processes": 2, "mixed_precision": "no", "use_cpu": True}


def samples():
    generator = torch.Generator().manual_seed(3)
    made = []
    for n in range(SAMPLES):
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: n % 7 + 1] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def shifted():
    """For a run, whose loss takes labels of the next token at the place of the token."""
    end = torch.tensor([-100])
    return [{"input_ids": one["input_ids"], "labels": torch.cat([one["labels"][1:], end])} for one in samples()]


def small_llama(folder: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def _model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _logged(trainer):
    return [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one]


def by_trainer(folder: Path, rows=None):
    """Loss and norm of each step, by transformers' Trainer: all micro-batches of a step in one process."""
    from transformers import Trainer, TrainingArguments

    given = {**ARGS, "output_dir": str(folder / "trainer"), "gradient_accumulation_steps": 8, "disable_tqdm": True}
    trainer = Trainer(
        _model(folder / "model"), TrainingArguments(**given), train_dataset=rows or samples(), data_collator=_padded
    )
    trainer.train()
    return _logged(trainer)


def _padded(rows):
    """A batch of rows of any lengths; what pads them is neither attended to by what is before it nor a label."""
    ends = {"input_ids": 0, "labels": -100}
    return {
        key: pad_sequence([row[key] for row in rows], batch_first=True, padding_value=end) for key, end in ends.items()
    }


def _words(folder: Path):
    """A tokenizer of the words w00, w01, ...; w01 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({f"w{n:02}": n for n in range(VOCAB)}, unk_token="w00"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="w01", pad_token="w02", unk_token="w00")
    tokenizer.save_pretrained(folder)
    return tokenizer


def records(folder: Path, most: int):
    """A file of texts, most of them longer than ``most`` tokens; its rows as SFTTrainer has them, which cuts each after so many, and how
    many tokens of them are predicted."""
    tokenizer, generator = _words(folder / "model"), torch.Generator().manual_seed(4)
    rows, lines = [], []
    for n in range(SAMPLES):
        ids = torch.randint(3, VOCAB, (most // 2 + 2 * n,), generator=generator).tolist()
        lines.append(json.dumps({"text": tokenizer.decode(ids)}))
        ids = torch.tensor([*ids, tokenizer.eos_token_id][:most])
        rows.append({"input_ids": ids, "labels": ids.clone()})
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return rows, sum(len(row["labels"]) - 1 for row in rows)


def by_sft(folder: Path, lora: bool):
    """The same by TRL's SFTTrainer, with PEFT's adapters or without; the adapters as they began are left in ``adapter``."""
    from datasets import Dataset
    from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

    given = {**SFT, "output_dir": str(folder / "trainer"), "gradient_accumulation_steps": 8, "disable_tqdm": True}
    rows = [
        {"input_ids": one["input_ids"].tolist(), "completion_mask": (one["labels"] != -100).long().tolist()}
        for one in samples()
    ]
    peft = get_peft_config(ModelConfig(**LORA)) if lora else None
    trainer = SFTTrainer(
        _model(folder / "model"), SFTConfig(**given), train_dataset=Dataset.from_list(rows), processing_class=_words(folder / "words"),
        peft_config=peft,
    )  # fmt: skip
    if lora:
        trainer.model.save_pretrained(folder / "adapter")
    trainer.train()
    return _logged(trainer)


def _loop(model, optim, backward, clip):
    """A loop that divides by all labels of a step, as the libraries' pages say for causal language models."""
    found = []
    for _ in range(STEPS):
        batches = [samples()[n : n + 2] for n in range(0, SAMPLES, 2)]
        number = sum(int((one["labels"][1:] != -100).sum()) for batch in batches for one in batch)
        whole = 0.0
        for batch in batches:
            ids, labels = (torch.stack([one[key] for one in batch]) for key in ("input_ids", "labels"))
            logits = model(ids).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / number
            backward(loss)
            whole += float(loss.detach())
        norm = clip(model, optim)
        optim.step()
        optim.zero_grad()
        found.append((whole, float(norm)))
    return found


def _adamw(model):
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) is many], "weight_decay": decay}
        for many, decay in ((True, SETTINGS["decay"]), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=SETTINGS["lr"], betas=(0.9, SETTINGS["beta2"]))


def by_fabric(folder: Path):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
    model = _model(folder / "model")
    model, optim = fabric.setup(model, _adamw(model))
    return _loop(model, optim, fabric.backward, lambda m, o: fabric.clip_gradients(m, o, max_norm=SETTINGS["clip"]))


def by_accelerate(folder: Path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = _model(folder / "model")
    model, optim = accelerator.prepare(model, _adamw(model))
    return _loop(
        model, optim, accelerator.backward, lambda m, o: accelerator.clip_grad_norm_(m.parameters(), SETTINGS["clip"])
    )


SCRIPT = {
    "optim": {"lr": SETTINGS["lr"], "betas": [0.9, SETTINGS["beta2"]], "weight_decay": SETTINGS["decay"], "decay_on": "matrices"},
    "schedule": {"name": "constant", "warmup_steps": 0},
    "train": {"steps": STEPS, "max_grad_norm": SETTINGS["clip"]},
    "data": {"global_batch": SAMPLES, "micro_batch": 2},
}  # fmt: skip
"""What the scripts of Fabric and accelerate say, and no configuration of theirs."""


def run_file(folder: Path, imported, script=None) -> Path:
    """The imported run of the same model and samples, with what a configuration cannot say."""
    run = {**(script or {}), **{key: dict(keys) for key, keys in imported.run.items()}}
    for section, keys in (script or {}).items():
        run[section] = {**imported.run.get(section, {}), **keys}
    data = {**run["data"], "val_fraction": 0}
    if not (folder / "texts.jsonl").exists():
        data = {key: value for key, value in data.items() if key not in ("path", "seq_len", "pack")}
        data["build"] = f"{__file__}:shifted"
    run |= {
        "model": {"hf": str(folder / "model")},
        "data": data,
        "log": {"dir": str(folder / "ours"), "every": 1, "plot": False},
        "checkpoint": {"export": None},
        "launch": {"nproc": 2, "device": "cpu"},
    }
    run["train"]["prove"] = False
    if (folder / "adapter").exists():
        run["model"]["adapter"] = str(folder / "adapter")
    (folder / "run.json").write_text(json.dumps(run))
    return folder / "run.json"
