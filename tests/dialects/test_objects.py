"""Objects of other libraries are known by the name of their class, and read as the configuration they stand for."""

import dataclasses
import inspect
import subprocess
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from shardwise import parallelize
from shardwise.config.sources import read_file
from shardwise.errors import ConfigError
from shardwise.run.imported import from_config


def parallel_of(source: Any, **how: Any) -> tuple[str, dict[str, Any]]:
    made = from_config(source, **how)
    return made.dialect, made.run["parallel"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_plugins_of_accelerate_that_have_settled_their_words(monkeypatch):
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig

    first = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy="SHARD_GRAD_OP",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
    )
    sharding = {"reshard_after_forward": False, "units": ["Block"]}
    assert parallel_of(first) == ("accelerate", {"layout": "dp_shard=-1", "sharding": sharding, "remat": "full"})
    second = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False, cpu_offload=True)
    sharding = {"reshard_after_forward": False, "offload": True}
    assert parallel_of(second) == ("accelerate", {"layout": "dp_shard=-1", "sharding": sharding})
    cast = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    assert parallel_of(cast)[1]["precision"] == "bf16"
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    assert parallel_of(sizes, ranks=8)[1]["layout"] == "dp_replicate=2,dp_shard=2,tp=2"
    with pytest.raises(ConfigError, match="is 8 ranks, not 16"):
        from_config(sizes, ranks=16)


@pytest.mark.soak  # its import takes ten seconds
def test_arguments_of_the_trainer_and_a_class_that_inherits_from_them():
    from transformers import TrainingArguments

    class Arguments(TrainingArguments):
        pass

    given = {"output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 50}
    for kind in (TrainingArguments, Arguments):
        made = from_config(
            kind(**given, lr_scheduler_type="cosine", warmup_steps=20, report_to="none", use_cpu=True), ranks=4
        )
        assert made.dialect == "transformers" and made.run["launch"]["device"] == "cpu"
        assert made.run["data"]["global_batch"] == 32 and made.run["schedule"]["name"] == "cosine"


def test_strategies_of_fabric():
    from lightning_fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

    layer = torch.nn.TransformerEncoderLayer
    hybrid = FSDPStrategy(sharding_strategy="HYBRID_SHARD", auto_wrap_policy={layer}, cpu_offload=True)
    sharding = {"offload": True, "units": ["TransformerEncoderLayer"]}
    assert parallel_of(hybrid) == ("fabric", {"layout": "dp_replicate=-1,dp_shard=node", "sharding": sharding})
    policy = FSDPStrategy(auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))
    assert parallel_of(policy)[1]["sharding"] == {"units": ["Linear"]}
    assert parallel_of(DDPStrategy(find_unused_parameters=True))[1] == {"layout": "dp_replicate=-1"}
    plan = ModelParallelStrategy(parallelize_fn=lambda model, mesh: model)
    assert parallel_of(plan, ranks=8, ranks_per_node=4)[1]["layout"] == "dp_shard=-1,tp=4"
    for strategy, says in (
        (FSDPStrategy(ignored_modules=[torch.nn.Linear(1, 1)]), "every parameter is sharded"),
        (FSDPStrategy(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)), "write precision"),
        (FSDPStrategy(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=5)), "it is a function"),
        (plan, "--ranks-per-node N"),
    ):
        with pytest.raises(ConfigError, match=says):
            from_config(strategy)


class BackwardPrefetch(Enum):
    BACKWARD_PRE = 1
    BACKWARD_POST = 2


@dataclasses.dataclass
class FSDPParams:  # by oumi's names and defaults
    enable_fsdp: bool = False
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    cpu_offload: bool = False
    mixed_precision: str | None = None
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    use_orig_params: bool | None = None
    state_dict_type: str = "FULL_STATE_DICT"
    auto_wrap_policy: str = "NO_WRAP"
    min_num_params: int = 100_000
    transformer_layer_cls: str | None = None
    sync_module_states: bool = True


@dataclasses.dataclass
class FSDP2Manager:  # by NeMo's
    dp_size: int | None = None
    dp_replicate_size: int | None = None
    tp_size: int | None = 1
    cp_size: int | None = 1
    sequence_parallel: bool | None = False
    mp_policy: MixedPrecisionPolicy | None = dataclasses.field(
        default_factory=lambda: MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    )
    offload_policy: CPUOffloadPolicy | None = None
    backend: str | None = "nccl"
    world_size: int | None = None


@dataclasses.dataclass
class MixedPrecisionConfig:
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True


@dataclasses.dataclass
class OffloadConfig:
    cpu_offload: bool = False
    pin_memory: bool = True


@dataclasses.dataclass
class FullyShardTransformConfig:  # by optimus-dl's
    reshard_after_forward: bool = False
    mixed_precision: MixedPrecisionConfig | None = None
    offload: OffloadConfig | None = None
    use_hybrid_sharding: bool = True
    sync_grad_accum: bool = False


@dataclasses.dataclass
class ParallelConfig:  # by ml's
    use_fsdp: bool = False
    cpu_offload: bool = False
    sharding_strategy: ShardingStrategy = ShardingStrategy.HYBRID_SHARD
    sync_module_states: bool = True


NODE = "dp_replicate=-1,dp_shard=node"
BF16 = {"compute": "bf16", "reduce": "bf16", "output": "bf16", "cast_inputs": "units"}
RECORDS = [
    (
        FSDPParams(True, ShardingStrategy.HYBRID_SHARD, mixed_precision="bf16", auto_wrap_policy="SIZE_BASED_WRAP"),
        None,
        ("oumi", {"layout": NODE, "precision": "bf16", "sharding": {"min_unit_params": 100_000}}),
    ),
    (
        FSDP2Manager(dp_size=4, dp_replicate_size=2, tp_size=2),
        8,
        ("nemo", {"layout": "dp_replicate=2,dp_shard=2,tp=2", "precision": BF16}),
    ),
    (
        FSDP2Manager(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        2,
        ("nemo", {"layout": "dp_shard=-1", "precision": BF16, "sharding": {"offload": True, "pin_memory": False}}),
    ),
    (
        FullyShardTransformConfig(
            mixed_precision=MixedPrecisionConfig("bfloat16", "float32"), offload=OffloadConfig(True, False)
        ),
        None,
        (
            "optimus",
            {
                "layout": NODE,
                "sharding": {"reshard_after_forward": False, "offload": True, "pin_memory": False},
                "precision": {"compute": "bf16", "reduce": "fp32", "cast_inputs": "units"},
            },
        ),
    ),
    (ParallelConfig(use_fsdp=True), None, ("ml", {"layout": NODE})),
]


@pytest.mark.parametrize(("record", "ranks", "wanted"), RECORDS, ids=lambda value: type(value).__name__)
def test_a_record_by_the_name_of_its_class(record, ranks, wanted):
    assert parallel_of(record, ranks=ranks) == wanted


def test_what_a_record_becomes_is_what_parallelize_takes():
    made = from_config(RECORDS[0][0])
    options = made.parallel.options()
    assert {*options} <= {*inspect.signature(parallelize).parameters} and options["precision"] == "bf16"
    assert made.parallel == made.config.parallel


def test_an_object_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="TrainingArguments"):
        from_config(object())


def test_nothing_of_another_library_is_imported():
    code = (
        "import sys\nfrom shardwise.run.imported import from_config\n"
        "class TrainingArguments:\n    def __init__(self): self.output_dir, self.max_steps = 'o', 5\n"
        "made = from_config(TrainingArguments(), ranks=1)\nassert made.run['train']['steps'] == 5\n"
        "assert not {'torch', 'transformers', 'accelerate'} & {*sys.modules}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_tree_of_records_is_read_as_the_file_that_says_the_same():
    """torchtitan's own is a record of sections; that of 0.2.2, with its defaults, was imported by hand once."""
    path = Path(__file__).parent / "fixtures" / "torchtitan" / "llama3-8b.toml"
    sections = {
        name: dataclasses.make_dataclass(name.title(), [*section])(**section)
        for name, section in read_file(path).values.items()
    }
    job = dataclasses.make_dataclass("JobConfig", [*sections])
    for kind in (job, dataclasses.make_dataclass("Job", [], bases=(job,))):
        made, wanted = from_config(kind(**sections), ranks=8), from_config(path, ranks=8)
        assert (made.dialect, made.run) == ("torchtitan", wanted.run)
        assert made.findings == wanted.findings and made.missing == wanted.missing
    sections["training"].steps = 7
    assert from_config(job(**sections), ranks=8).run["train"]["steps"] == 7
