"""Options of other tools: each is refused with the override to write, and every override in the table is one that is taken."""

import re

import pytest
from dialect_files import values_of

from shardwise.cli import main as cli
from shardwise.config.loader import dotted_keys
from shardwise.dialects import words
from shardwise.dialects.words import hint
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig, load_config

NEXT_TO = {  # a key without which another would have no effect
    "data.pack": ("data.path=a.jsonl", "data.tokenizer=here"),
    "data.prefetch": ("data.num_workers=1",),
    "data.val_path": ("data.path=a.jsonl",),
    "checkpoint.keep": ("checkpoint.every=2",),
    "checkpoint.keep_every": ("checkpoint.every=2",),
    "optim.name": ("parallel.layout=dp_replicate=-1",),
    "log.name": ("log.to=wandb",),
    "model.adapter": ("model.hf=here", "parallel.lora.rank=8"),
    "data.micro_batch": ("data.global_batch=8",),
    "data.global_batch": ("data.micro_batch=2",),
    "optim.momentum": ("optim.name=sgd",),
    "schedule.decay_ratio": ("schedule.name=wsd",),
    "checkpoint.background": ("checkpoint.every=2",),
    "model.vocab": ("model.hf=here", "data.tokenizer=here"),
    **dict.fromkeys(("data.chat_template", "data.eos_token"), ("data.path=b.jsonl", "data.tokenizer=here")),
}
FOR_USER = {"N": "8", "DIRECTORY": "here", "FILE": "a.txt", "FILE.jsonl": "b.jsonl", "PATH": "there"}
KEYS = dotted_keys(RunConfig)


def is_key(name: str) -> bool:
    return name in KEYS or name.startswith("model.args.") or any(key.startswith(f"{name}.") for key in KEYS)


def hints():
    """Each option of the tables with the values that it takes."""
    for key, rows in words._index()[0].items():
        if "bool" in rows[0][1].takes:
            yield key, ""
        for value in values_of(rows[0][1]):
            if not isinstance(value, list | dict) and value is not None:
                yield key, str(value)


def test_every_override_that_is_shown_is_taken():
    shown = {}
    for key, value in hints():
        fix = hint(f"--{key}", value or None, "override").fix
        assert fix, f"nothing is said of {key} {value}"
        for override in re.findall(r"write (?:'--([^']+)'|--([^; ]+))", fix):
            shown.setdefault("".join(override), f"{key} {value}")
    assert len(shown) > 120
    for override, of in shown.items():
        key, _, ours = override.partition("=")
        assert is_key(key), (key, of)
        if ours in ("word", "a.b") or "{}" in ours:  # a name that stands for one of the user's
            assert "{}" not in ours, (override, of)
            continue
        load_config(None, [f"{key}={FOR_USER.get(ours, ours)}", *NEXT_TO.get(key, ())])


def test_an_override_is_shown_as_sections_of_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    for key, value in (("learning_rate", "2e-5"), ("gradient_checkpointing", "true"), ("tensor_parallel_degree", "2")):
        file.write_text(hint(key, value, "file").fix.removeprefix("write ").partition("; ")[0])
        load_config(file)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--learning_rate", "2e-5"], "write --optim.lr=2e-5"),
        (["--learning-rate=2e-5"], "write --optim.lr=2e-5"),
        (["--bf16"], "write --parallel.precision=bf16"),
        (["--bf16=true"], "write --parallel.precision=bf16"),
        (["--bf16", "true"], "write --parallel.precision=bf16"),
        (["--bf16", "run.yaml"], "write --parallel.precision=bf16"),
        (["--bf16", "False"], "leave it out"),
        (["--mixed_precision", "bf16"], "write --parallel.precision=bf16"),
        (["--gradient_accumulation_steps", "4"], "data.micro_batch x 4 x data-parallel ranks"),
        (["--fsdp", "shard_grad_op auto_wrap"], "write --parallel.sharding.reshard_after_forward=false"),
        (["--training.steps", "100"], "write --train.steps=100"),
        (["--training.steps=100"], "write --train.steps=100"),
        (["--train.learning_rate=1e-4"], "write --optim.lr=1e-4"),
        (["--checkpoint.interval=5"], "write --checkpoint.every=5"),
        (["--adam_beta2", "0.95"], "write '--optim.betas=[0.9,0.95]'"),
        (["optimizer.lr=1e-3"], "write --optim.lr=1e-3"),
        (["batch_size=4"], "write --data.micro_batch=4"),
        (["--max_steps", "-1"], "leave it out"),
        (["--model", "here"], "write --model.hf=here"),
        (["--lora"], "write --parallel.lora.rank=16"),
        (["--lora_r", "8"], "write --parallel.lora.rank=8"),
        (["--lora_target_modules", "q_proj,v_proj"], "write --parallel.lora.targets=q_proj,v_proj"),
        (["--use_dora"], "write --parallel.lora.dora=true"),
        (["--qlora"], "parallel.quantize=nf4"),
        (["--load_in_4bit"], "parallel.quantize=nf4"),
        (["--load_in_8bit"], "8 bits are not supported"),
        (["--bnb_4bit_quant_type", "nf4"], "parallel.quantize=nf4"),
        (["--use_bnb_nested_quant"], "are always stored in 8 bits"),
        (["--deepspeed", "ds.json"], "ZeRO-3 is parallel.layout=dp_shard=-1"),
        (["--epochs", "3"], "write --train.epochs=3; fractions too; in place of train.steps"),
        (["--resume"], "when its command is given again"),
        (["--lr_scheduler_type", "linear"], "write --schedule.name=linear"),
        (["--optim", "adafactor"], "transformers' Adafactor has other steps than torch's"),
        (
            ["--optim", "adamw_bnb_8bit"],
            "there is no such optimizer here",
        ),
        (["--enable_activation_offloading", "true"], "write '--parallel.remat={mode: full, offload: true}'"),
        (["--enable_activation_offloading", "false"], "leave it out"),
        (["--completion_only_loss", "true"], "leave it out: only answers are trained on"),
        (["--completion_only_loss", "false"], "only answers are trained on, and no key changes that"),
        (["--shuffle", "true"], "leave it out: samples are always shuffled"),
        (["--shuffle", "false"], "samples are always shuffled, in each epoch"),
        (["--pin_memory"], "leave it out: a run needs no such setting"),
        (["--dataloader_pin_memory", "false"], "leave it out: a run needs no such setting"),
        (["--eval_strategy", "no"], "write --train.eval_every=0"),
        (["--eval_strategy", "epoch"], "write --train.eval_every=N; train.eval_every counts optimizer steps"),
        (
            ["--checkpoint.keep_latest_k=0"],
            "write --checkpoint.keep_every=1; with checkpoint.every=N",
        ),
        (["--checkpoint.keep_latest_k=4"], "write --checkpoint.keep=4; with checkpoint.every=N"),
    ],
)
def test_a_command_line_of_another_tool_is_answered_with_what_to_write(capsys, words, fix):
    assert cli.main(["train", *words]) == 2
    told = capsys.readouterr().err
    assert f"fix: {fix}" in told or fix in told.partition("fix: ")[2]
    assert words[0] in told


def test_all_options_of_a_command_are_answered_at_once(capsys):
    assert (
        cli.main(["train", "run.yaml", "--bf16", "--learning_rate", "2e-5", "--nproc", "2", "--num_train_epochs=3"])
        == 2
    )
    told = capsys.readouterr().err
    assert "--bf16 --learning_rate 2e-5 --num_train_epochs=3\n" in told
    assert "fix: --bf16: write --parallel.precision=bf16; " in told
    assert "\n       --learning_rate 2e-5: write --optim.lr=2e-5\n" in told


def test_a_file_of_another_tool_is_answered_key_by_key(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "[optim]\nlr = 0.1\n[training]\nsteps = 5\nseq_len = 64\n[parallelism]\ntensor_parallel_degree = 2\n"
    )
    with pytest.raises(ConfigError) as told:
        load_config(file)
    assert told.value.given.endswith(f"({file}:3)")
    assert "training.steps: 5: write train: {steps: 5}\n" in told.value.fix
    assert 'tensor_parallel_degree: 2: write parallel: {layout: "dp_shard=-1,tp=2"}' in told.value.fix
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  learning_rate: 2e-5\n")
    with pytest.raises(ConfigError) as told:
        load_config(file)
    assert told.value.given == f"train.learning_rate: 2e-05 ({file}:2)" and told.value.fix == "write optim: {lr: 2e-05}"


def test_a_slip_is_still_told_with_the_nearest_key(capsys):
    assert cli.main(["train", "--stpes=5"]) == 2
    assert "did you mean --train.steps=5?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("--dp=2", "in parallel.layout write dp_shard=2, which shards"),
        ("--parallel.dp=2", "in parallel.layout write dp_shard=2, which shards"),
        ("--dp_shard=2", "write --parallel.layout=dp_shard=2"),
        ("--parallel.dp_replicate=2", "write --parallel.layout=dp_replicate=2"),
        ("--ddp", "write --parallel.layout=dp_replicate=-1"),
        ("--hsdp", "write --parallel.layout=dp_replicate=-1,dp_shard=node"),
        ("--parallel.fsdp=true", "write --parallel.layout=dp_shard=-1"),
        ("--data_parallel_shard_degree=8", "write --parallel.layout=dp_shard=8"),
        ("--tensor-model-parallel-size=2", "write --parallel.layout=dp_shard=-1,tp=2"),
        ("--pipeline-model-parallel-size=2", "leave it out: there is no pipeline parallelism yet"),
        ("--parallel.ep=2", "leave it out: there is no expert parallelism yet"),
        ("--parallelism.context_parallel_degree=2", "write --parallel.layout=dp_shard=-1,cp=2"),
    ],
)
def test_an_axis_of_another_tool_is_answered_with_a_layout(capsys, word, fix):
    assert cli.main(["train", "--no-config", word]) == 2
    assert f"fix: {fix}" in capsys.readouterr().err
