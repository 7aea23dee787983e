"""Builds the model of a training run with the weights it starts from, and its step, from the configuration."""

import json
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.config.suggest import did_you_mean
from shardwise.config.target import called, load_target
from shardwise.config.tokenizer import is_tokens, tokenizer_path
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError, UsageError, first_line
from shardwise.model.calling import call, run_on
from shardwise.model.mode import eval_mode
from shardwise.model.names import canonical_tensors
from shardwise.parallel import recipe_of, runtime_of, shard, world_of
from shardwise.run.attention import IMPLEMENTATIONS
from shardwise.run.config import Model, RunConfig
from shardwise.run.datasets import RunData
from shardwise.run.optim import make_optimizer, make_scaler, make_scheduler
from shardwise.run.pretrained import build_pretrained
from shardwise.run.reference import build as build_reference
from shardwise.run.reference_config import check_reference_args
from shardwise.run.train_config import MODEL_LOSS
from shardwise.run.vocabulary import saved_files, vocabulary_of
from shardwise.state import LoadReport, load_adapter
from shardwise.state.load import load_by
from shardwise.state.match import Rules
from shardwise.step.model_loss import model_loss
from shardwise.step.step import TrainStep
from shardwise.techniques.fold import prepared
from shardwise.techniques.technique import Example
from shardwise.world import World

_RENAME, _SAME = "--model.rename={pattern: replacement}", "with weights of the same model"
_KEYS = {
    "names": f"{_RENAME}, or --model.strict=false to load what fits and draw the rest",
    "shape": "--model.strict=false with --model.rename={pattern: null} leaves tensors out",
    "dtype": f"--model.cast=true, {_SAME}",
    "drawn": f"{_RENAME}; what is not trained is not drawn either: give weights that have it, or train it (model.freeze, model.train_only)",
    "double": "--model.rename={pattern: null}, with a pattern of the one to leave out",
}
"""What does not fit in the weights that a run starts from -> the keys that say what to do."""


def check_takes_tokens(config: RunConfig, model: nn.Module) -> None:
    """Refuses a user's model that does not accept tokens, before the first step; every rank must call it.

    A model with an embedding is accepted without a trial. Another may look tokens up in a parameter, or make them
    one-hot, so it runs one forward of a sequence, in eval mode, without gradients. The random numbers of the run do not
    change.
    """
    if config.data.build is not None or config.train.forward is not None:
        return  # other batches, or called in another way
    if any(isinstance(child, nn.Embedding) for child in model.modules()):
        return
    device = world_of(model).device
    batch = {"input_ids": torch.zeros(1, config.data.seq_len, dtype=torch.long, device=device)}
    try:
        with eval_mode(model), torch.no_grad(), torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            call(model, batch)
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, UsageError) as error:
        if isinstance(error, ShardwiseError) and not isinstance(error, UsageError):
            raise
        text = first_line(error)
        raised = "takes no single tensor" if isinstance(error, UsageError) else f"raised {type(error).__name__}: {text}"
        raise ConfigError(
            f"model.build={config.model.build!r}" if config.model.build else f"model.hf={config.model.hf!r}",
            why=f"shardwise train feeds tokens (input_ids [B, T], integers) and takes logits [B, T, V]; {recipe_of(model).module_class} has no embedding, "
            f"and its forward of tokens {raised}",
            fix="give a model of tokens; for any other name its data and its loss: data.build=pkg.mod:fn, train.loss=pkg.mod:fn, train.count",
        ) from error
    finally:
        if isinstance(model, FSDPModule):
            model.reshard()  # plain FSDP2 keeps the parameters that the root's last forward gathered


def functions_of(config: RunConfig) -> dict[str, Any]:
    """The functions of the user with which a step trains: ``loss``, ``count`` and ``forward``, those that are named."""
    named = {key: getattr(config.train, key) for key in ("loss", "count", "forward")}
    return {
        key: model_loss if (key, name) == ("loss", MODEL_LOSS) else load_target(name, what=f"train.{key}")
        for key, name in named.items()
        if name is not None
    }


def build_model(config: RunConfig, world: World, corpus: RunData | None = None) -> nn.Module:
    """Builds the model of a config and shards it over the ranks of ``world``; every rank must call it. Where its data are the
    user's own, ``corpus`` shows what a batch looks like."""
    parallel = config.parallel
    if config.model.build is not None:
        load_target(config.model.build, what="model.build")  # its file may also register a transform
    start = parallel.init or ("load" if config.model.start is not None else None)
    tokens = {"input_ids": torch.zeros(1, config.data.seq_len, dtype=torch.long)}  # for a model of a fixed length
    given = msgspec.structs.replace(parallel, init=start)
    runs = Example(run_on(None), otherwise=run_on(tokens))
    if corpus is not None and (config.data.build is not None or config.data.has_records):
        runs = Example(run_on(corpus.example(), functions_of(config).get("forward", call)))
    return shard(lambda: _unprepared(config), world, given, runs=runs)


def load_start(config: RunConfig, model: nn.Module) -> LoadReport | None:
    """Loads the weights that the config names, if any, into the model; every rank must call it."""
    given = config.model
    if given.start is None:
        return None
    rules = Rules(
        strict=given.strict,
        rename=list(given.rename.items()),
        cast="lossless" if given.cast is None else given.cast,
        check_finite=False,
        rows=vocabulary_of(config).growth,
    )
    try:
        report = load_by(model, given.start, rules)
    except CheckpointError as error:  # its fix names arguments of the call; a run has configuration keys
        if error.misfit is not None:
            # Otherwise leaving out was allowed already, and not one name is right.
            may_leave_out = given.strict or error.misfit != "names"
            error.fix = f"in this run: {_KEYS[error.misfit] if may_leave_out else f'{_RENAME}, {_SAME}'}"
            if error.rename is not None:
                key, value = (json.dumps(text) for text in error.rename)
                error.fix = f"in this run: --model.rename='{{{key}: {value}}}' --model.strict=false, for layers that were wrapped"
            _blame_changes(config, error)
        raise
    if given.adapter is not None:
        try:
            load_adapter(model, given.adapter)
        except CheckpointError as error:  # the run's parallel.lora is another than theirs
            error.fix = f"in this run: remove parallel.lora, and it is as the directory says; or: {error.fix}"
            raise
    return report


def _blame_changes(config: RunConfig, error: CheckpointError) -> None:
    """Adds to an error about names or shapes that ``model.args`` builds another model than the weights are of."""
    given = config.model
    changed = {key: value for key, value in given.args.items() if key not in IMPLEMENTATIONS}
    if given.hf is not None and given.weights in (None, given.hf) and changed and error.misfit != "dtype":
        error.why += f"; the model was changed by model.args={changed}, and the weights are those of its directory"
        error.fix += "; or remove what is changed in model.args"
    growth = vocabulary_of(config).growth
    if growth is not None and error.misfit == "shape":
        error.why += f"; rows are added to tables of {growth[0]:,}, as config.json says that there are"
        error.fix += "; or, without the rows, remove model.vocab and model.add_tokens"


def loaded_text(report: LoadReport | None) -> str:
    """What a run says of the weights that it has loaded."""
    if report is None:
        return ""
    pairs = sorted(set(report.cast.values()))
    told = [f"  weights stored in {there}, trained in {here} (model.cast)" for there, here in pairs]
    return "\n".join([str(replace(report, cast={})), *told])


def set_tokenizer(config: RunConfig, model: nn.Module) -> None:
    """Sets the tokenizer that is saved with the weights: the one that the run uses, and none for bytes. For tokens from
    a file it is the tokenizer of the directory that the weights were loaded from."""
    if config.data.build is None and not is_tokens(config.data.path):
        changed = vocabulary_of(config).tokenizer
        kept = saved_files(changed) if changed is not None and world_of(model).is_main else False  # rank 0 saves it
        runtime_of(model).tokenizer = kept if changed is not None else tokenizer_path(config.data.tokenizer) or False


def build_plain(config: RunConfig, world: World | None = None) -> nn.Module:
    """Builds the model of a config without sharding it, on the CPU: what its function returns, or the reference model
    if the config names none, changed by the config's techniques; ``world`` is passed to transforms that ask for it."""
    return prepared(_unprepared(config), config.parallel, world)


def _unprepared(config: RunConfig) -> nn.Module:
    module = _built(config)
    freeze_parameters(module, config.model)
    return module


def _built(config: RunConfig) -> nn.Module:
    model = config.model
    if model.hf is not None:
        vocabulary = vocabulary_of(config)
        rows = None if vocabulary.growth is None else vocabulary.rows
        return build_pretrained(model.hf, model.args, rows=rows, eos=vocabulary.eos)
    if model.build is None:
        sizes = check_reference_args(model.args, seq_len=config.data.seq_len)
        return build_reference(**{"max_seq": max(256, config.data.seq_len), **sizes})
    module = called(
        load_target(model.build, what="model.build"), model.args, f"model.args={model.args} for {model.build}"
    )
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model.build={model.build!r}",
            why=f"it returned {type(module).__name__}, and training needs a torch.nn.Module",
            fix="name a function that returns the module, or the module's class",
        )
    return module


def make_step(config: RunConfig, model: nn.Module, steps: int | None = None) -> TrainStep:
    """Builds the :class:`TrainStep` of a config, with optimizer and scheduler, for a sharded model; every rank must
    call it. ``steps``: those of the config's epochs, where it has some."""
    num_steps = config.train.steps if steps is None else steps
    assert num_steps is not None, "a run of epochs has to be counted first"
    optim = make_optimizer(config.optim, model)
    return TrainStep(
        model,
        optim,
        **functions_of(config),
        scheduler=make_scheduler(config.schedule, optim, num_steps),
        max_grad_norm=config.train.max_grad_norm,
        norm_type=config.train.norm_type,
        clip_grad_value=config.train.clip_grad_value,
        fused=config.train.fused,
        on_nonfinite=config.train.on_nonfinite,
        scaler=make_scaler(config, model),
    )


# ---- parameters that are not trained ---------------------------------------------------------------------------------


def freeze_parameters(module: nn.Module, options: Model) -> None:
    """Calls ``requires_grad_(False)`` on the parameters that the config names. One that is shared is named by each of its
    names."""
    patterns = options.freeze or options.train_only
    if not patterns:
        return
    key = "freeze" if options.freeze else "train_only"
    params = {name: owner._parameters[attr] for name, owner, attr in canonical_tensors(module, "_parameters")}
    named: set[int] = set()
    for pattern in patterns:
        matching = [id(param) for name, param in params.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"model.{key}: {pattern!r}",
                why="it names no parameter of the model",
                fix=did_you_mean(pattern, list(params), what="parameters"),
            )
        named |= set(matching)
    for param in params.values():
        if param is not None and (id(param) in named) == bool(options.freeze):
            param.requires_grad_(False)
    if not any(param is not None and param.requires_grad for param in params.values()):
        raise ConfigError(
            f"model.{key}={list(patterns)}",
            why="no parameter would be left to train",
            fix="name fewer parameters" if options.freeze else "name parameters that the model trains",
        )


# ---- the function after each step ------------------------------------------------------------------------------------


def make_callback(name: str | None) -> Callable[[Any], bool]:
    """The function that ``train.callback`` names, called with the output of every step on every rank: whether the run ends after it, as
    this rank sees it."""
    function = (lambda out: None) if name is None else load_target(name, what="train.callback")
    if not callable(function):
        raise ConfigError(
            f"train.callback={name!r}",
            why=f"it is a {type(function).__name__}, and is called after each step",
            fix="name a function that takes the step's output: def fn(out): ...",
        )

    def callback(out: Any) -> bool:
        answer = function(out)
        if answer is None or isinstance(answer, bool):
            return bool(answer)
        raise ConfigError(
            f"train.callback={name!r}: it returned {type(answer).__name__} {answer!r:.60} after step {out.step}",
            why="only True ends the run, and None or False continues: another value may be a slip",
            fix="return True, False or nothing: bool(...) makes one of a number or a tensor",
        )

    return callback
