"""Options of other tools, and what to write in their place: a table, as data. Torch-free.

``WORDS`` has a :class:`~shardwise.config.other_tools_answers.Word` for each option, by its name with ``_`` for ``-``. A dotted name
is a key of a configuration file of torchtune or torchtitan. ``config/other_tools.py`` finds a word and shows what to write.
"""

from collections.abc import Mapping
from dataclasses import replace

from shardwise.config.axis_words import AXIS_ANSWERS
from shardwise.config.other_tools_answers import Word, choice, fixed, none, switch, to

_LEAVE = "leave it out"
_BATCH = "samples of one forward on one rank; data.global_batch is those of a step over all ranks, their accumulation included"
_ACCUMULATION = fixed(
    "data.global_batch=N",
    "4",
    "a step has N samples over all ranks: data.micro_batch x {} x data-parallel ranks, so accumulation follows from them",
)
_EPOCHS = Word(like="3", write="train.epochs={}", values={"-1": ""}, text="fractions too; in place of train.steps")
_OTHER_EVERY = fixed("checkpoint.every=N", "epoch", "every N optimizer steps")
_RATIO = to("schedule.warmup_ratio", "0.03")
_NODES = none("start the ranks by torchrun or srun on each node: torchrun --nnodes {} ... -m shardwise train", "2")
_RENDEZVOUS = none(
    f"{_LEAVE}: a free port of this machine is found; over several, torchrun or srun sets address and rank", "29500"
)
_FILE = none(
    "a configuration is named without an option: shardwise train run.yaml; what that file says are keys of it",
    "run.yaml",
)
_DEEPSPEED = none(
    "no DeepSpeed configuration is read: ZeRO-3 is parallel.layout=dp_shard=-1, the default; ZeRO-2 is "
    "parallel.sharding.reshard_after_forward=false with it; offload is parallel.sharding.offload=true",
    "ds.json",
)
_TARGETS = to("parallel.lora.targets", "q_proj,v_proj", "with commas; all-linear is the default")
_RANK, _ALPHA = to("parallel.lora.rank", "16"), to("parallel.lora.alpha", "32", "2 x rank if you say nothing")
_ADAPTERS = switch("parallel.lora.rank=16", "LoRA adapters: A has as many rows")
_RSLORA, _DORA = switch("parallel.lora.rslora=true"), switch("parallel.lora.dora=true")
_BESIDE = to("parallel.lora.train", "lm_head", "what is trained in full beside the adapters, with commas")
_FOUR_BITS = switch(
    "parallel.quantize=nf4", "frozen weights in 4 bits; with parallel.lora.rank=16 adapters are trained beside them"
)
_NESTED = none("the scales of 4-bit weights (parallel.quantize=nf4) are always stored in 8 bits: leave it out")
_BITS = none(
    "weights are stored in 4 bits by parallel.quantize=nf4, with parallel.lora.rank=16 beside them; 8 bits are not supported: "
    "parallel.precision=bf16 stores a frozen base in 16"
)
_RESUME = none(
    "a run resumes from the newest checkpoint in log.dir when its command is given again; checkpoint.every=N makes them. Weights of "
    "another run are where one starts: model.weights=PATH",
    "runs/a/checkpoint-100",
)
_PRECISION = choice(
    "parallel.precision",
    no="",
    bf16="bf16",
    bfloat16="bf16",
    fp16="fp16",
    float16="fp16",
    fp32="fp32",
    float32="fp32",
    auto="",
)
_LAYOUTS = {"full_shard": "dp_shard=-1", "no_shard": "dp_replicate=-1", "hybrid_shard": "dp_replicate=-1,dp_shard=node"}
_SHARDING = Word(
    like="FULL_SHARD",
    write="parallel.layout=VALUE",
    values={
        **{name: f"parallel.layout={layout}" for name, layout in _LAYOUTS.items()},
        **{
            str(i): f"parallel.layout={_LAYOUTS[name]}"
            for i, name in ((1, "full_shard"), (3, "no_shard"), (4, "hybrid_shard"))
        },
        "shard_grad_op": "parallel.sharding.reshard_after_forward=false",
        "2": "parallel.sharding.reshard_after_forward=false",
        "": "parallel.layout=dp_shard=-1",
        "true": "parallel.layout=dp_shard=-1",
        "false": "parallel.layout=dp_replicate=-1",
    },
    text="dp_shard=-1 is the default",
)
_REMAT = switch("parallel.remat=full")
_OFFLOAD = switch("parallel.sharding.offload=true")
_COMPILE = switch("parallel.compile=blocks")
_PACK = switch("data.pack=true", "for records: a .jsonl, a saved dataset")
_RECORDS = fixed(
    "data.path=FILE.jsonl",
    "org/name",
    "nothing is downloaded: records of a chat, or prompt and completion, a line each; or the folder that save_to_disk of datasets wrote",
)
_MODEL = to("model.hf", "DIRECTORY", "a directory that save_pretrained has written; nothing is downloaded")
_NPROC = Word(like="8", write="launch.nproc={}", values={"auto": "", "-1": ""})
_STEPS = Word(like="1000", write="train.steps={}", values={"-1": ""}, text="")
_EVAL = Word(
    like="steps",
    write="train.eval_every=N",
    values=dict.fromkeys(("no", "false"), "train.eval_every=0"),
    text="every N optimizer steps",
    texts=dict.fromkeys(("no", "false"), "only at the end; data.val_fraction=0 keeps nothing for it"),
)
_KEEP = Word(
    like="3",
    write="checkpoint.keep={}",
    values=dict.fromkeys(("0", "-1", "none"), "checkpoint.keep_every=1"),
    text="with checkpoint.every=N",
    texts=dict.fromkeys(("0", "-1", "none"), "all of them stay; with checkpoint.every=N"),
)
_TP = fixed("parallel.layout=dp_shard=-1,tp={}", "2")
_CP = fixed("parallel.layout=dp_shard=-1,cp={}", "2")
_TYPE = choice("launch.device", cpu="cpu", cuda="cuda", gpu="cuda", auto="")
_LATER = {axis: none(AXIS_ANSWERS[axis], "2") for axis in ("pp", "ep")}
_DP = none(f"in parallel.layout {AXIS_ANSWERS['dp']}", "2")
_SHARDS = fixed("parallel.layout=dp_shard={}", "8")
_COPIES = fixed("parallel.layout=dp_replicate={}", "2")
_LR = to("optim.lr", "2e-5")
_NORM = to("train.max_grad_norm", "1.0")
_DECAY = to("optim.weight_decay", "0.01")
_LENGTH = to("data.seq_len", "2048")
_WARMUP = to("schedule.warmup_steps", "100")
_CURVE = choice(
    "schedule.name",
    cosine="cosine",
    linear="linear",
    warmup_stable_decay="wsd",
    constant="constant",
    constant_with_warmup="constant",
    cosine_with_min_lr="cosine",
)
_LOG = to("log.every", "10")
_OUT = to("log.dir", "runs/a")
_SEED = to("train.seed", "42")
_WORKERS = to("data.num_workers", "2")
_BETA1, _BETA2 = fixed("optim.betas=[{},0.95]", "0.9"), fixed("optim.betas=[0.9,{}]", "0.999")
_WHOLE = "it needs parameters that are whole on each rank: parallel.layout=dp_replicate=-1"
_NAMED = choice(
    "optim.name",
    "any other is a class or function: optim.build=torch.optim:NAdam, with optim.args",
    adamw="adamw",
    adamw_torch="adamw",
    adamw_torch_fused="adamw",
    adamw_hf="adamw",
    sgd="sgd",
    adafactor="adafactor",
    muon="muon",
)
_OPTIMIZER = replace(_NAMED, texts={"adafactor": _WHOLE, "muon": _WHOLE})
_MICRO = to("data.micro_batch", "8", _BATCH)
_ANSWERS = none(
    f"{_LEAVE}: of a conversation, or a prompt with its completion, only the answers are trained on",
    off="of a conversation, or a prompt with its completion, only the answers are trained on, and no key changes that: write the "
    'whole as one text, {"text": ...} a line, which is trained on from its first token',
)
_ALREADY = none(f"{_LEAVE}: the layout says it, and a run needs no such setting")
_NEEDLESS = none(f"{_LEAVE}: a run needs no such setting")

_ACCELERATE = {
    "num_processes": _NPROC,
    "mixed_precision": _PRECISION,
    "use_fsdp": switch("parallel.layout=dp_shard=-1", "which is the default"),
    "fsdp_sharding_strategy": _SHARDING,
    "fsdp_reshard_after_forward": Word(
        like="false",
        write="parallel.sharding.reshard_after_forward={}",
        values={"full_shard": "", "shard_grad_op": "parallel.sharding.reshard_after_forward=false"},
    ),
    "fsdp_offload_params": _OFFLOAD,
    "fsdp_activation_checkpointing": _REMAT,
    "fsdp_transformer_layer_cls_to_wrap": fixed("parallel.sharding.units=[{}]", "LlamaDecoderLayer", "blocks are found without it"),
    **dict.fromkeys(
        ("fsdp_auto_wrap_policy", "fsdp_backward_prefetch", "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states",
         "fsdp_use_orig_params", "fsdp_state_dict_type", "fsdp_version", "compute_environment", "distributed_type",
         "downcast_bf16", "main_training_function", "same_network", "enable_cpu_affinity", "use_megatron_lm"),
        _ALREADY,
    ),
    "multi_gpu": none(f"{_LEAVE}: a run uses all accelerators of the machine; launch.nproc=N takes fewer"),
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_clipping": _NORM,
    "config_file": _FILE,
    **dict.fromkeys(("main_process_port", "main_process_ip", "machine_rank", "rdzv_backend", "rdzv_endpoint"), _RENDEZVOUS),
    "num_machines": _NODES,
    **dict.fromkeys(("use_deepspeed", "deepspeed_config_file", "deepspeed_config", "zero_stage"), _DEEPSPEED),
    **dict.fromkeys(("cpu", "use_cpu"), switch("launch.device=cpu")),
    "gpu_ids": none("name them in the environment: CUDA_VISIBLE_DEVICES={}", "0,1"),
    "dynamo_backend": choice("parallel.compile", inductor="blocks", no=""),
}  # fmt: skip

_TRAINER = {
    "bf16": switch("parallel.precision=bf16"),
    "fp16": switch("parallel.precision=fp16"),
    **dict.fromkeys(("torch_dtype", "dtype"), _PRECISION),
    "tf32": Word(like="true", write="train.tf32={}", values={"": "train.tf32=true"}),
    "learning_rate": _LR,
    "num_train_epochs": _EPOCHS,
    "max_steps": _STEPS,
    "per_device_train_batch_size": _MICRO,
    "per_device_eval_batch_size": none(f"{_LEAVE}: validation takes data.micro_batch too", "8"),
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_checkpointing": _REMAT,
    "warmup_ratio": _RATIO,
    "warmup_steps": _WARMUP,
    "lr_scheduler_type": _CURVE,
    "weight_decay": _DECAY,
    "adam_beta1": _BETA1,
    "adam_beta2": _BETA2,
    "adam_epsilon": none(f"{_LEAVE}: it is 1e-8, as in torch", "1e-8"),
    "max_grad_norm": _NORM,
    "optim": _OPTIMIZER,
    "save_steps": to("checkpoint.every", "500"),
    "save_total_limit": _KEEP,
    "save_strategy": Word(like="epoch", write="checkpoint.every=N", values={"no": ""}, text="every N optimizer steps"),
    "eval_steps": to("train.eval_every", "100"),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), _EVAL),
    "logging_steps": _LOG,
    "logging_dir": none(f"{_LEAVE}: figures are in log.dir", "logs"),
    "output_dir": _OUT,
    "overwrite_output_dir": switch("checkpoint.resume=false", "which moves older checkpoints aside; --fresh says the same"),
    "report_to": choice("log.to", "or pkg.mod:fn, a logger of your own", wandb="wandb", tensorboard="tensorboard", csv="csv", none="", all=""),
    "run_name": to("log.name", "first", "with log.to=wandb"),
    "resume_from_checkpoint": _RESUME,
    "model_name_or_path": _MODEL,
    **dict.fromkeys(("dataset_name", "dataset"), _RECORDS),
    "train_file": to("data.path", "FILE.jsonl"),
    "validation_file": to("data.val_path", "FILE.jsonl"),
    **dict.fromkeys(("packing", "pack"), _PACK),
    "chat_template_path": to("data.chat_template", "FILE.jinja", "a file in Jinja"),
    "eos_token": to("data.eos_token", "</s>", "for records; model.add_tokens adds one that is not there"),
    **dict.fromkeys(("max_length", "max_seq_length", "model_max_length", "block_size"), _LENGTH),
    "torch_compile": _COMPILE,
    "torch_compile_backend": to("parallel.compile.backend", "inductor"),
    "torch_compile_mode": to("parallel.compile.mode", "max-autotune"),
    "deepspeed": _DEEPSPEED,
    "fsdp": _SHARDING,
    "fsdp_config": none("its settings are keys of parallel.sharding; blocks are found without it", "fsdp.json"),
    "seed": _SEED,
    "data_seed": none("one seed is for weights, the order of samples and dropout: train.seed={}", "42"),
    "full_determinism": switch("train.deterministic=true"),
    "dataloader_num_workers": _WORKERS,
    "dataloader_prefetch_factor": to("data.prefetch", "2", "with data.num_workers=N"),
    "dataloader_pin_memory": _NEEDLESS,
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), _ANSWERS),
    "use_peft": _ADAPTERS,
    **dict.fromkeys(("lora_r", "lora_rank"), _RANK),
    "lora_alpha": _ALPHA,
    "lora_dropout": to("parallel.lora.dropout", "0.05"),
    **dict.fromkeys(("lora_target_modules", "lora_target"), _TARGETS),
    **dict.fromkeys(("lora_target_parameters", "target_parameters"), to("parallel.lora.experts", "[gate_up_proj, down_proj]")),
    "lora_target_linear": switch("parallel.lora.targets=all-linear", "the default"),
    **dict.fromkeys(("lora_modules_to_save", "additional_target"), _BESIDE),
    **dict.fromkeys(("use_rslora", "peft_use_rslora"), _RSLORA),
    **dict.fromkeys(("use_dora", "peft_use_dora"), _DORA),
    **dict.fromkeys(("adapter_name_or_path", "lora_model_dir"), to("model.adapter", "DIRECTORY", "with model.hf=DIRECTORY of its base")),
    **dict.fromkeys(("qlora", "load_in_4bit"), _FOUR_BITS),
    "load_in_8bit": _BITS,
    "use_bnb_nested_quant": _NESTED,
    "bnb_4bit_quant_type": choice("parallel.quantize", nf4="nf4"),
    "use_liger_kernel": switch("train.fused=true", "the loss without logits"),
    "ddp_find_unused_parameters": none(f"{_LEAVE}: parameters that a step does not use are found"),
    "ddp_bucket_cap_mb": to("parallel.ddp.bucket_cap_mb", "25"),
    "ddp_timeout": to("train.timeout_s", "600"),
    **dict.fromkeys(("do_train", "do_eval", "local_rank", "remove_unused_columns", "ddp_backend"), _NEEDLESS),
    "push_to_hub": none("nothing is uploaded: the weights are in log.dir, as checkpoint.export says, and from_pretrained opens them"),
}  # fmt: skip

_TORCHTUNE = {
    "batch_size": _MICRO,
    "epochs": _EPOCHS,
    "max_steps_per_epoch": fixed("train.steps=N", "100", "optimizer steps, of all epochs together"),
    "gradient_accumulation_steps": _ACCUMULATION,
    "enable_activation_checkpointing": _REMAT,
    "enable_activation_offloading": switch("parallel.remat={mode: full, offload: true}", "on cuda"),
    "fsdp_cpu_offload": _OFFLOAD,
    "tokenizer.path": to("data.tokenizer", "DIRECTORY", "one with a tokenizer.json; that of model.hf without it"),
    "tokenizer.max_seq_len": _LENGTH,
    "dtype": _PRECISION,
    "compile": _COMPILE,
    "device": _TYPE,
    "dataset.packed": _PACK,
    "dataset.source": _RECORDS,
    "dataset.data_files": to("data.path", "FILE.jsonl"),
    "optimizer.lr": _LR,
    "optimizer.weight_decay": _DECAY,
    "optimizer.fused": to("optim.fused", "true"),
    "optimizer_in_bwd": none(
        "the optimizer steps after the whole backward: gradients are clipped by their norm before"
    ),
    "lr_scheduler.num_warmup_steps": _WARMUP,
    "clip_grad_norm": _NORM,
    "log_every_n_steps": _LOG,
    "run_val_every_n_steps": to("train.eval_every", "100"),
    "tensor_parallel_dim": _TP,
    "checkpointer.checkpoint_dir": _MODEL,
    "checkpointer.output_dir": _OUT,
    "output_dir": _OUT,
    "resume_from_checkpoint": _RESUME,
    "seed": _SEED,
    "shuffle": none(
        f"{_LEAVE}: samples are always shuffled",
        off="samples are always shuffled, in each epoch in another order; in a script of your own sw.Loader(shuffle=False) keeps that of "
        "the data",
    ),
}

_TORCHTITAN = {
    "job.config_file": _FILE,
    "job.dump_folder": _OUT,
    "training.steps": _STEPS,
    "training.local_batch_size": _MICRO,
    "training.global_batch_size": to("data.global_batch", "64"),
    "training.seq_len": _LENGTH,
    "training.max_norm": _NORM,
    "training.dataset": fixed("data.path=FILE", "c4", "nothing is downloaded: a text, tokens as .npy or .bin, or records as .jsonl or saved by save_to_disk"),
    "training.dataset_path": to("data.path", "FILE"),
    "training.mixed_precision_param": _PRECISION,
    "training.enable_cpu_offload": _OFFLOAD,
    **dict.fromkeys(("training.seed", "debug.seed"), _SEED),
    **dict.fromkeys(("training.deterministic", "debug.deterministic"), switch("train.deterministic=true")),
    **dict.fromkeys(("training.compile", "compile.enable"), _COMPILE),
    "parallelism.data_parallel_shard_degree": _SHARDS,
    "parallelism.data_parallel_replicate_degree": fixed("parallel.layout=dp_replicate={},dp_shard=-1", "2"),
    "parallelism.tensor_parallel_degree": _TP,
    "parallelism.context_parallel_degree": _CP,
    "parallelism.pipeline_parallel_degree": _LATER["pp"],
    "parallelism.expert_parallel_degree": _LATER["ep"],
    "parallelism.expert_tensor_parallel_degree": _LATER["ep"],
    "data_parallel_shard_degree": _SHARDS,
    "data_parallel_replicate_degree": fixed("parallel.layout=dp_replicate={},dp_shard=-1", "2"),
    "tensor_parallel_degree": _TP,
    "context_parallel_degree": _CP,
    "pipeline_parallel_degree": _LATER["pp"],
    "expert_parallel_degree": _LATER["ep"],
    "parallelism.fsdp_reshard_after_forward": choice(
        "parallel.sharding.reshard_after_forward", default="", always="true", never="false"
    ),
    "optimizer.name": _OPTIMIZER,
    "optimizer.lr": _LR,
    "optimizer.beta1": _BETA1,
    "optimizer.beta2": _BETA2,
    "optimizer.weight_decay": _DECAY,
    "lr_scheduler.warmup_steps": _WARMUP,
    "lr_scheduler.min_lr_factor": to("schedule.min_lr_ratio", "0.1"),
    "lr_scheduler.decay_type": _CURVE,
    "activation_checkpoint.mode": choice("parallel.remat", none="", full="full", selective="selective"),
    **dict.fromkeys(("checkpoint.enable", "checkpoint.enable_checkpoint"), fixed("checkpoint.every=N", "true", "every N optimizer steps")),
    "checkpoint.interval": to("checkpoint.every", "500"),
    "checkpoint.folder": none(f"{_LEAVE}: checkpoints are in log.dir", "checkpoint"),
    "checkpoint.keep_latest_k": _KEEP,
    "checkpoint.initial_load_path": to("model.weights", "PATH"),
    "metrics.log_freq": _LOG,
    "metrics.enable_wandb": switch("log.to=wandb"),
    "metrics.enable_tensorboard": switch("log.to=tensorboard"),
    "profiling.enable_profiling": fixed("train.profile=10:13", "true", "a trace of steps 10 to 12"),
    "model.hf_assets_path": _MODEL,
    **dict.fromkeys(("model.name", "model.flavor"), none("a model is a directory, model.hf=DIRECTORY, or a function, model.build=pkg.mod:fn", "llama3")),
    "comm.init_timeout_seconds": to("train.timeout_s", "600"),
    "validation.freq": to("train.eval_every", "100"),
}  # fmt: skip

_MEGATRON = {
    **dict.fromkeys(("tensor_model_parallel_size", "model_parallel_size"), _TP),
    **dict.fromkeys(("pipeline_model_parallel_size", "pipeline_parallel_size", "virtual_pipeline_model_parallel_size"), _LATER["pp"]),
    "context_parallel_size": _CP,
    **dict.fromkeys(("expert_model_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size"), _LATER["ep"]),
    "sequence_parallel": switch("parallel.tensor_parallel.sequence_parallel=true"),
    "data_parallel_size": _DP,
    "use_distributed_optimizer": fixed("parallel.layout=dp_shard=-1", "", "which is the default, and shards parameters and gradients too"),
}  # fmt: skip

_LIGHTNING = {
    "accelerator": _TYPE,
    "strategy": Word(
        like="fsdp",
        write="parallel.layout=VALUE",
        values={
            "fsdp": "parallel.layout=dp_shard=-1",
            "ddp": "parallel.layout=dp_replicate=-1",
            "ddp_spawn": "parallel.layout=dp_replicate=-1",
            "auto": "",
        },
        text="dp_shard=-1 is FSDP, and ZeRO-3; dp_replicate=-1 is DDP",
    ),
    "devices": _NPROC,
    "num_nodes": _NODES,
    "precision": Word(
        like="bf16-mixed",
        write="parallel.precision=VALUE",
        values={
            **dict.fromkeys(("32", "32-true"), "parallel.precision=fp32"),
            **dict.fromkeys(("16", "16-mixed", "fp16"), "parallel.precision=fp16"),
            **dict.fromkeys(("bf16", "bf16-mixed"), "parallel.precision=bf16"),
            **dict.fromkeys(("64", "64-true"), "parallel.precision=fp64"),
            "bf16-true": "parallel.precision={storage: bf16}",
        },
    ),
    **dict.fromkeys(("epochs", "max_epochs"), _EPOCHS),
    "max_steps": _STEPS,
    "accumulate_grad_batches": _ACCUMULATION,
    "gradient_clip_val": _NORM,
    "log_every_n_steps": _LOG,
    "val_check_interval": to("train.eval_every", "100"),
    "default_root_dir": _OUT,
    "deterministic": switch("train.deterministic=true"),
    "detect_anomaly": switch("train.anomaly=true"),
}

_PLAIN = {
    "lr": _LR,
    "batch_size": _MICRO,
    "global_batch_size": to("data.global_batch", "64"),
    "epochs": _EPOCHS,
    "steps": _STEPS,
    "seq_len": _LENGTH,
    "context_length": _LENGTH,
    **dict.fromkeys(("gpus", "num_gpus", "nproc_per_node", "n_gpu"), _NPROC),
    "nnodes": _NODES,
    **dict.fromkeys(("lora", "peft"), _ADAPTERS),
    **dict.fromkeys(("int8", "quantize", "quantization"), _BITS),
    "resume": _RESUME,
    "config": _FILE,
    "model": _MODEL,
    "data": to("data.path", "FILE"),
    "tokenizer": to("data.tokenizer", "DIRECTORY", "one with a tokenizer.json"),
    "output": _OUT,
    "wandb": switch("log.to=wandb"),
    "tensorboard": switch("log.to=tensorboard"),
    **dict.fromkeys(("amp", "use_amp"), fixed("parallel.precision=bf16", "")),
    "activation_checkpointing": _REMAT,
    **dict.fromkeys(("tp", "tp_size", "tp_degree", "tensor_parallel_size"), _TP),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_degree"), _DP),
    **dict.fromkeys(("dp_shard", "dp_shard_size", "dp_shard_degree", "fsdp_size"), _SHARDS),
    **dict.fromkeys(("dp_replicate", "dp_replicate_size", "dp_replicate_degree", "ddp_size"), _COPIES),
    "ddp": switch("parallel.layout=dp_replicate=-1"),
    "hsdp": switch(
        "parallel.layout=dp_replicate=-1,dp_shard=node", "which shards within each node, and keeps a copy on each"
    ),
    **{name: word for axis, word in _LATER.items() for name in (axis, f"{axis}_size", f"{axis}_degree")},
    "workers": _WORKERS,
    "pin_memory": none(f"{_NEEDLESS.text} for its data; parallel.sharding.pin_memory is for shards in host memory"),
}

_TOOLS: Mapping[str, Mapping[str, Word]] = {
    "accelerate": _ACCELERATE,
    "Trainer/TRL": _TRAINER,
    "torchtune": _TORCHTUNE,
    "torchtitan": _TORCHTITAN,
    "Megatron-LM": _MEGATRON,
    "Lightning": _LIGHTNING,
    "other tools": _PLAIN,
}


def _with_tools() -> dict[str, Word]:
    """Each word with the tools that have it; what the first of them means by it counts."""
    found: dict[str, Word] = {}
    for tool, words in _TOOLS.items():
        for name, word in words.items():
            first = found.get(name, word)
            tools = ", ".join(filter(None, (first.tools, tool)))
            found[name] = replace(first, tools=tools)
    return found


WORDS: Mapping[str, Word] = _with_tools()
"""Name of the option, with ``_`` for ``-`` -> what to write."""
