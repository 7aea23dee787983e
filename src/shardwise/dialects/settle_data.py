"""From facts to our keys: what runs again or is compiled, model and data, validation, checkpoints, figures. See ``settle_layout.py``."""

import math
import re
from pathlib import Path
from typing import Any

from shardwise.config.loader import SOME_DATA, SOME_MODEL, UNWRITTEN
from shardwise.config.tokenizer import read_json
from shardwise.dialects.facts import Facts
from shardwise.dialects.settle_precision import class_names

_LOSSES = ("crossentropy", "cewithchunked")  # what a loss that is the cross entropy of labels is called
_VALIDATION = ("validation", "valid", "val", "dev")  # names of a split that a run validates on
_LOGGERS = ("wandb", "tensorboard", "csv")
_TOKENS = "of so many tokens of a record all but the first are predicted, and data.seq_len counts those"
_PACKED = "; of records that share a sample too, so that more may fit into one than there"
_OTHER_MODELS = re.compile(r"For(?!CausalLM\b)[A-Z]|(?:^|[._])(?:reward|classifier|vision|clip)(?:[._]|$)")
_NOT_IN_STEPS = "it has no effect there with {}={}"
_OF_REMAT = (
    "remat", "remat_bool", "remat_some", "remat_option", "remat_every", "remat_classes", "remat_only", "remat_ops", "remat_offload",
)  # fmt: skip
_OF_COMPILE = (
    "compile", "compile_backend", "compile_with", "compile_mode", "compile_dynamic", "compile_fullgraph", "compile_budget",
)  # fmt: skip


def settle_remat(facts: Facts) -> None:
    mode, every = facts.take("remat"), facts.number("remat_every")
    if facts.take("remat_bool") is True or facts.has("remat_classes"):
        mode = "full"
    if facts.take("remat_some") is not None:  # some of the blocks whole, or some results of all
        option = facts.take("remat_option", facts.take("remat_every"))
        mode, every = ("full", int(option)) if str(option).isdigit() else ("selective", None)
        if mode == "full" and every and every > 1:
            text = "the first of every so many blocks runs again; which one does not change numbers"
            facts.say("remat_option", "kept", text)
    record: dict[str, Any] = {}
    if classes := facts.take("remat_classes") or facts.take("remat_only"):
        record["targets"] = class_names(classes)
    elif mode and "remat_only" in facts.known:
        mode = None
        facts.say("remat_only", "dropped", "no class is named, so nothing runs again there")
    if mode and (results := facts.take("remat_ops")):
        mode = "selective"
        record["save"] = [name.removeprefix("torch.ops.").removesuffix(".default") for name in results]
    if every and every > 1:
        record["every"] = every
    if mode == "budget":
        facts.say("remat_budget", "changed", "the part of activations that may be kept is an option of compile")
        facts.put("parallel.compile.activation_memory_budget", facts.take("remat_budget", 0.5), "remat_budget", "remat")
        mode = None
    if facts.take("remat_offload") is True:
        if mode != "full":
            facts.say("remat_offload", "changed", "inputs of blocks that run again are offloaded, so blocks run again")
        mode, record["offload"] = "full", True
    if mode:
        facts.put("parallel.remat", {"mode": mode, **record} if record else mode, *_OF_REMAT)


def settle_compile(facts: Facts) -> None:
    switch, named = facts.take("compile"), str(facts.take("compile_backend") or "no").lower()
    is_by_name = named != "no" and ("compile" not in facts.known or facts.is_given("compile_backend"))
    is_on = any(switch.values()) if isinstance(switch, dict) else bool(switch)
    is_on = is_on or (is_by_name and not facts.is_given("compile"))
    names = ("mode", "dynamic", "fullgraph", "activation_memory_budget")
    said = dict(zip(names, map(facts.take, _OF_COMPILE[3:]), strict=True))
    if (budget := facts.get("parallel.compile.activation_memory_budget")) is not None:  # of activations to keep
        said["activation_memory_budget"] = budget
    if not is_on or facts.take("compile_disable") is True:
        for name in filter(facts.is_given, _OF_COMPILE[2:]):
            facts.say(name, "dropped", "nothing is compiled there")
        return
    usual = {"mode": "default", "fullgraph": False, "activation_memory_budget": 1.0}
    options = {key: value for key, value in said.items() if value is not None and value != usual.get(key)}
    backend = named if named not in ("no", "true") else str(facts.take("compile_with") or "inductor").lower()
    if backend != "inductor":
        options["backend"] = backend
    facts.put("parallel.compile", options or "blocks", *_OF_COMPILE)


# ---- of a whole run --------------------------------------------------------------------------------------------------


def settle_data(facts: Facts) -> None:
    model, data = facts.take("model"), facts.take("data_file") or facts.take("data")
    _settle_class(facts)
    if whose := facts.take("weights_of"):
        text = f"it is in {whose}'s format, which is not read: give the directory of the same model with config.json and safetensors"
        facts.say("model", "changed", text)
        model = None
    if isinstance(data, list) and len(data) != 1:
        facts.say("data", "refused", "there is one file: write the mixture into it")
    elif isinstance(data, list):
        data = data[0]
    if facts.get("model.build") is None:
        facts.put("model.hf", model or SOME_MODEL, "model")
        if facts.get("parallel.remat") is not None:
            facts.put("model.args.use_cache", False, *_OF_REMAT)  # as there, where blocks run again
    if not model:
        facts.missing.append("model.hf: a directory that save_pretrained has written")
    if facts.get("data.path") is None:
        facts.put("data.path", data or SOME_DATA, "data")
        _settle_splits(facts, data)
    if not data:
        facts.missing.append("data.path: a text, tokens (.npy, .bin), records (.jsonl) or a saved dataset")
    is_usual = facts.take("prompts_usual", False)
    if facts.take("prompts", is_usual) is True:  # refused where it is asked for against the default there
        text = 'prompts are trained on there, here only answers: write the whole as one text, {"text": ...} a line'
        facts.say(
            "prompts" if facts.is_given("prompts") else "prompts_usual", "changed" if is_usual else "refused", text
        )
    if names := facts.take("freeze"):
        facts.put("model.freeze", [name if "*" in name else f"{name}.*" for name in names], "freeze")
    _settle_tokens(facts)
    if length := facts.take("pack_to", 0):
        facts.put("data.pack", True, "pack_to")
        facts.put("data.seq_len", length, "pack_to")
    elif "packs" in facts.table.head and _may_be_packed(facts):
        facts.put("data.pack", True)
    workers = facts.take("workers")
    if workers == "auto":
        facts.put("data.num_workers", 4, "workers")
        facts.say("workers", "changed", "four processes a rank")
    elif isinstance(workers, int):
        facts.put("data.num_workers", workers, "workers")
    if facts.get("data.num_workers"):
        facts.pass_on("data.prefetch", "prefetch_factor")
    loss = str(facts.take("loss", ""))
    if loss and not any(name in loss.lower() for name in _LOSSES):
        facts.say("loss", "refused", "another loss: write train.loss=pkg.mod:fn and train.count in the run file")
    facts.pass_on("train.seed", "seed")


def _settle_tokens(facts: Facts) -> None:
    """``data.seq_len`` of a source that counts the tokens of a record, the first of which is not predicted."""
    tokens, note = facts.number("record_tokens"), facts.note("record_tokens")
    if tokens is None or note is None:
        return
    if tokens < 2:
        facts.say("record_tokens", "refused", "nothing of a record of so many tokens is predicted: write 2 or more")
        return
    facts.put("data.seq_len", tokens - 1, "record_tokens")
    is_packed = facts.get("data.pack") is True
    facts.say("record_tokens", "changed" if is_packed else note.verdict, f"{_TOKENS}{_PACKED if is_packed else ''}")


def _settle_class(facts: Facts) -> None:
    """What the class or function of the model predicts: only the next token is trained on here."""
    name = str(facts.take("builder") or "")
    if _OTHER_MODELS.search(name):
        text = "it does not predict the next token of a text, which alone is trained: write one that does, or a script of yours"
        facts.say("builder", "refused", text)
    elif name.endswith(".from_config"):
        text = "its weights are drawn there, and a run starts from those of a directory: model.build=pkg.mod:fn draws new ones"
        facts.say("builder", "changed", text)


def _settle_splits(facts: Facts, data: Any) -> None:
    """The splits that are trained and validated on, where the source names them: directories in that of the saved dataset."""
    train, test = facts.take("train_split"), facts.take("test_split")
    if train is None or not data:
        return
    for name in filter(facts.is_given, ("train_split", "test_split")):
        split, usual = facts.known[name].value, {"train_split": "train"}.get(name)
        if not re.fullmatch(r"[\w.-]+", str(split)):
            facts.say(name, "refused", "a part of a split, or several: save it as a dataset of its own, and name that")
        elif Path(str(data)).suffix and split != usual:
            facts.say(name, "refused", "a file has no splits: name a file for each, data.path and data.val_path")
    is_tested = facts.take("eval_strategy", "no") != "no"
    if facts.is_given("test_split") and not is_tested:
        facts.say("test_split", "dropped", "nothing is validated on there")
    is_named = is_tested and (facts.is_given("test_split") or test in _splits_of(data))
    if train != "train" or is_named:
        facts.put("data.path", f"{data}/{train}", "data", "train_split")
    if is_named:
        facts.put("data.val_path", f"{data}/{test}", "test_split")


def _splits_of(data: Any) -> list[Any]:
    """The splits of a saved dataset; empty: it is something else, or not here."""
    found = read_json(Path(str(data)) / "dataset_dict.json").get("splits")
    return found if isinstance(found, list) else []


def _may_be_packed(facts: Facts) -> bool:
    """Whether the data is of records, which alone are packed, and their attention is not cut over ranks."""
    path = Path(str(facts.get("data.path")))
    is_records = path.suffix in (".jsonl", ".ndjson", ".json", ".parquet") or (not path.suffix and not path.is_file())
    return is_records and "cp=" not in str(facts.get("parallel.layout"))


def _often(facts: Facts, name: str) -> Any:
    """How often something is done: in steps, or, below one, as a part of the run."""
    every = facts.take(name)
    if isinstance(every, int | float) and (every < 0 or (every > 1 and every != int(every))):
        facts.say(name, "refused", "it is a whole number of steps, or a part of the run below 1: write 1 or more")
        return None
    return every


def _put_often(facts: Facts, key: str, every: float | str, steps: int | None, *names: str) -> None:
    """Our key that counts steps: of a part of the run, rounded up; where that has no number of steps, it has to be written."""
    if isinstance(every, float) and every < 1:
        every = UNWRITTEN if steps is None else math.ceil(every * steps)
    if every == UNWRITTEN:
        text = "it is a part of the run, whose steps are not known"
        facts.say(facts.first(*names), "changed", text)
        facts.missing.append(f"{key}: {facts.key(*names)} is a part of the run, whose steps are not known: write steps")
    facts.put(key, every if every == UNWRITTEN else int(every), *names)


def settle_validation(facts: Facts, steps: int | None) -> None:
    """Nothing of the data is kept for validation unless the source keeps some: our default is a tenth."""
    is_split = any(name in _VALIDATION for name in _splits_of(facts.get("data.path")))  # which a run takes by itself
    if is_split and facts.is_given("val_percent"):
        facts.say("val_percent", "dropped", "the dataset has a split for validation")
    elif facts.is_given("val_percent") and (percent := facts.take("val_percent")) and not facts.get("data.val_path"):
        facts.put("data.val_fraction", percent / 100, "val_percent")
    if not facts.get("data.val_path"):
        facts.drop("data.val_path")
        if facts.get("data.val_fraction") is None and not is_split:
            facts.put("data.val_fraction", 0)
    when, every = facts.take("eval_strategy"), _often(facts, "eval_steps")
    if when in ("no", "epoch") and facts.is_given("eval_steps"):
        facts.say("eval_steps", "dropped", _NOT_IN_STEPS.format(facts.key("eval_strategy"), when))
    if every is None and when == "steps" and "log_every" in facts.known:
        every = facts.known["log_every"].value
    if not (facts.get("data.val_path") or facts.get("data.val_fraction") or is_split):
        named = ("val_enable",) if when in ("no", "epoch") else ("eval_steps", "val_enable", "eval_strategy")
        if given := [name for name in named if facts.is_given(name)]:
            facts.say(given[0], "changed", "nothing to validate on is named: data.val_path, or data.val_fraction")
        facts.drop("train.eval_every")
    elif when in ("no", "epoch") or facts.take("val_enable") is False:
        facts.put("train.eval_every", 0, "eval_strategy")
    elif every:
        by_log = () if facts.has("eval_steps") else ("log_every",)
        _put_often(facts, "train.eval_every", every, steps, "eval_steps", *by_log, "eval_strategy")


def settle_checkpoints(facts: Facts, steps: int | None) -> None:
    kind, every = facts.take("save_strategy", "steps"), _often(facts, "save_steps")
    if facts.take("ckpt_enable") is True:
        every = facts.take("ckpt_every", every)
    if facts.take("ckpt_enable") is False:
        facts.drop("checkpoint.every")
        every = None
    if kind != "steps" and facts.is_given("save_steps"):
        facts.say("save_steps", "dropped", _NOT_IN_STEPS.format(facts.key("save_strategy"), kind))
    if kind == "steps" and every:
        _put_often(facts, "checkpoint.every", every, steps, "save_steps", "ckpt_every", "save_strategy")
    if not facts.get("checkpoint.every"):
        facts.drop("checkpoint.keep")
        facts.drop("checkpoint.background")
        return
    if facts.take("keep"):
        facts.pass_on("checkpoint.keep", "keep")
    elif facts.has("keep"):
        facts.put("checkpoint.keep_every", 1, "keep")
    elif "keep" in facts.known:
        text = "all stay there, here the last of them (checkpoint.keep), or all by checkpoint.keep_every=1"
        facts.say("keep", "changed", text)
    facts.pass_on("checkpoint.background", "ckpt_background")


def settle_figures(facts: Facts, steps: int | None) -> None:
    loggers = facts.take("report_to")
    loggers = [*loggers] if isinstance(loggers, list) else [loggers]
    if facts.has("wandb_on", "run_name_wandb"):
        facts.take("wandb_on")
        loggers.append("wandb")
    loggers = [name for name in [*loggers, *(facts.get("log.to") or [])] if name not in (None, "none", "all")]
    known = [name for name in dict.fromkeys(loggers) if name in _LOGGERS]
    for other in sorted({*map(str, loggers)} - {*known}):
        facts.say("report_to", "changed", f"{other}: log.to=pkg.mod:fn, a logger of yours")
    if known:
        facts.put("log.to", known if len(known) > 1 else known[0], "report_to", "wandb_on")
    else:
        facts.drop("log.to")
    names = (("log.name", "run_name"), ("log.name", "run_name_wandb"), ("log.project", "log_project"))
    for key, name in names:
        if (text := facts.take(name)) and "wandb" in known:
            facts.put(key, text, name)
    every = _often(facts, "log_every")
    if isinstance(every, int | float) and every:
        _put_often(facts, "log.every", every, steps, "log_every")
    if facts.take("timeout_min"):
        facts.pass_on("train.timeout_s", "timeout_min", lambda minutes: 60.0 * minutes)
