"""Options of other tools: each is refused with the override to write, and every override in the table is one that is taken."""

import re
from typing import Literal, get_args, get_origin

import pytest

from shardwise.cli import main as cli
from shardwise.config.check import struct_in
from shardwise.config.loader import dotted_keys
from shardwise.config.other_tools import hint
from shardwise.config.other_tools_table import WORDS
from shardwise.config.record import hints_of
from shardwise.errors import ConfigError
from shardwise.run.config import LOGGERS, RunConfig, load_config

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
    **dict.fromkeys(("data.chat_template", "data.eos_token"), ("data.path=b.jsonl", "data.tokenizer=here")),
}
FOR_USER = {"N": "8", "DIRECTORY": "here", "FILE": "a.txt", "FILE.jsonl": "b.jsonl", "PATH": "there"}
KEYS = dotted_keys(RunConfig)


def is_key(name: str) -> bool:
    return name in KEYS or any(key.startswith(f"{name}.") for key in KEYS)


@pytest.mark.parametrize("name", WORDS)
def test_every_override_of_the_table_is_taken(name, tmp_path):
    word = WORDS[name]
    for value in {word.like, *word.values, *word.texts}:
        fix = hint(f"--{name}", value or None, "override").fix
        assert fix, f"nothing is said of {name} {value}"
        for override in re.findall(r"^write '?--([^;']+)'?", fix):
            key, _, ours = override.partition("=")
            assert is_key(key), key
            for one in ours.split("|"):  # of which the user takes one
                full = f"{key}={FOR_USER.get(one, one)}" if "=" not in one.partition("=")[0] else one
                load_config(None, [full, *NEXT_TO.get(key, ())])
        inside = hint(name, value or None, "file").fix
        if inside.startswith("write "):
            text = inside.removeprefix("write ").partition("; ")[0]
            for theirs, ours in FOR_USER.items():
                text = re.sub(rf"\b{re.escape(theirs)}(?![\w.])", ours, text)
            if "|" not in text:
                file = tmp_path / "run.yaml"
                file.write_text(f"{text}\n")
                load_config(file, NEXT_TO.get(text.split(": ")[0] + "." + text.split("{")[1].split(":")[0], ()))


def test_every_key_that_a_text_of_the_table_names_is_there():
    for name, word in WORDS.items():
        named = re.findall(
            rf"\b((?:{'|'.join(RunConfig.__struct_fields__)})\.[a-z_.]*[a-z_0-9]*[a-z0-9])",
            f"{word.text} {' '.join(word.texts.values())} {word.write}",
        )
        assert all(map(is_key, named)), (name, named)


def words_of(key: str) -> tuple[str, ...]:
    """The values that a key takes, if they are words."""
    *sections, last = key.split(".")
    cls = RunConfig
    for section in sections:
        cls = struct_in(hints_of(cls)[section])
    kinds = [kind for kind in (hints_of(cls)[last], *get_args(hints_of(cls)[last])) if get_origin(kind) is Literal]
    return {"log.to": LOGGERS}.get(key, tuple(value for kind in kinds for value in get_args(kind)))


def test_a_choice_has_every_value_that_its_key_takes():
    choices = {name: word for name, word in WORDS.items() if word.write.endswith("=VALUE")}
    found = {}
    for name, word in choices.items():
        key = word.write.removesuffix("=VALUE")
        written = {ours.partition("=")[2] for ours in word.values.values() if ours.startswith(f"{key}=")}
        known = words_of(key) if key in KEYS else ()
        found[key] = known
        assert {value for value in known if value not in written and word.values.get(value) != ""} == set(), name
    assert found["optim.name"] and found["schedule.name"] and found["launch.device"] and found["log.to"]


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
        (["--optim", "adafactor"], "write --optim.name=adafactor; it needs parameters that are whole on each rank"),
        (
            ["--optim", "adamw_bnb_8bit"],
            "write --optim.name=adamw|sgd|adafactor|muon; any other is a class or function: optim.build=",
        ),
        (["--enable_activation_offloading", "true"], "write '--parallel.remat={mode: full, offload: true}'; on cuda"),
        (["--enable_activation_offloading", "false"], "leave it out"),
        (["--completion_only_loss", "true"], "leave it out: of a conversation"),
        (["--completion_only_loss", "false"], "only the answers are trained on, and no key changes that"),
        (["--shuffle", "true"], "leave it out: samples are always shuffled"),
        (["--shuffle", "false"], "samples are always shuffled, in each epoch"),
        (["--pin_memory"], "leave it out: a run needs no such setting"),
        (["--dataloader_pin_memory", "false"], "leave it out: a run needs no such setting"),
        (["--eval_strategy", "no"], "write --train.eval_every=0; only at the end"),
        (["--eval_strategy", "epoch"], "write --train.eval_every=N; every N"),
        (
            ["--checkpoint.keep_latest_k=0"],
            "write --checkpoint.keep_every=1; all of them stay; with checkpoint.every=N",
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
    assert "fix: --bf16: write --parallel.precision=bf16\n       --learning_rate 2e-5: write --optim.lr=2e-5\n" in told


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
