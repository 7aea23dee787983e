"""From facts to our keys: precision, units, offload, prefetch. See ``settle_layout.py``."""

from typing import Any

from shardwise.dialects.facts import Facts
from shardwise.dialects.settle_adapters import stored_beside_adapters
from shardwise.dialects.settle_layout import Ranks

_SHORT = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64",
    "bf16": "bf16", "fp16": "fp16", "fp32": "fp32",
}  # fmt: skip
_OF_PRECISION = (
    "mp", "mp_bf16", "mp_fp16", "mp_bf16_else", "autocast", "autocast_dtype", "store", "load_dtype", "param", "reduce", "out", "cast",
    "cast1", "compute", "store_low", "load_stays",
)  # fmt: skip
_OF_SCALER = {  # option -> fact, and the value that is ours too
    "init_scale": ("scale_init", 65536.0), "growth_factor": ("scale_growth", 2.0), "backoff_factor": ("scale_backoff", 0.5),
    "growth_interval": ("scale_window", 2000),
}  # fmt: skip


def settle_precision(facts: Facts, is_sharded: bool, ranks: Ranks) -> None:
    if not is_sharded and facts.table.head.get("policy") == "sharded":
        for name in ("param", "reduce", "out", "cast"):
            if facts.is_given(name):
                facts.say(name, "dropped", "only the sharded engine there reads it")
            facts.known.pop(name, None)
    stored, word = _stored(facts, _mixed(facts))
    param, reduce, out = (
        _SHORT.get(str(facts.take(name)).removeprefix("torch.")) for name in ("param", "reduce", "out")
    )
    compute = facts.take("compute")
    if compute and _SHORT[compute] == "bf16":
        is_off = ranks.tp > 1 and ranks.shards == 1 and "tp_alone" in facts.table.head
        word, reduce = (None, reduce) if is_off else ("bf16", None)
        if is_off:
            facts.say("compute", "changed", facts.table.head["tp_alone"])
        elif not is_sharded:
            facts.say("compute", "changed", "parameters are cast, not operators by autocast, as there under sharding")
    inputs = "units" if facts.take("cast") or facts.take("cast1") else None
    if inputs is None and (facts.take("cast") is False or facts.take("cast_root") is False) and param:
        inputs = "none"
    record = _precision(facts, word, stored, inputs, param or word, reduce, out)
    if word and _engine(facts) == "zero" and facts.has("zero") and facts.table.head.get("zero") != "autocast":
        more = f"gradients are accumulated and summed in fp32, there in {word}; to keep that: parallel.precision.reduce={word}"
        if reduce is not None:
            more = f"gradients as {facts.key('reduce')} says"
        _say(facts, word, f"the same dtypes for parameters; {more}")  # beside a copy in fp32: nothing is autocast
    if record:
        facts.put("parallel.precision", record, *facts.named(*_OF_PRECISION))
    if word is not None and stored == word:
        text = "parameters have it already, and gradients are summed in it; there autocast computes norms, softmax and the loss in fp32"
        _say(facts, word, text)
    is_of_adapters = "adapters_4bit" in facts.table.head and facts.take("in_4_bits") is True  # and said of them
    if stored not in (None, "fp32") and not is_of_adapters:
        text = "parameters and optimizer state are {}, without an fp32 copy"
        name = "store" if facts.has("store") else "store_low" if facts.take("store_low") else "load_dtype"
        facts.say(name, "changed" if word else "kept", text.format("bfloat16" if stored == "bf16" else "float16"))
    _settle_scaler(facts, param or word)


def _stored(facts: Facts, word: str | None) -> tuple[str | None, str | None]:
    """The dtype in which trained parameters are stored, and the word of mixed precision."""
    name = "store" if facts.has("store") else "load_dtype"
    stored, stays = _SHORT.get(facts.take(name)), facts.take("load_stays") is True
    if facts.take("store_low") is True:
        return "bf16", word
    is_zero = _engine(facts) == "zero" and bool(word or int(facts.take("zero", 3)))
    # either engine updates float32: ZeRO a copy beside what computes, the other what it has raised before it is sharded
    is_raised = is_zero or (_engine(facts) == "fsdp" and word is not None and not facts.has("store") and not stays)
    if facts.has("adapter"):
        version = facts.take("fsdp_version", 2 if facts.has("fsdp_words") else 1)
        return stored_beside_adapters(facts, stored, word, is_zero or (is_raised and version in (1, "1")))
    if stored in (None, "fp32") or not is_raised:
        return stored, word
    if (stored, word, name) == ("fp16", None, "load_dtype"):
        facts.say(
            name, "refused", "no loss is scaled there without fp16 of the engine: switch that on, or load float32"
        )
    facts.say(name, "kept", "what is trained is updated in float32 there too, whatever it was loaded in")
    return None, word or stored


def _engine(facts: Facts) -> str | None:
    """The engine there, where one is named or has words or a stage of its own."""
    own = "zero" if facts.has("zero") else "fsdp" if facts.take("fsdp_words") else None
    return facts.known["engine"].value if facts.has("engine") else own


def _say(facts: Facts, word: str, text: str) -> None:
    """Says ``text`` of the switch of mixed precision that changes something."""
    for name in ("mp", f"mp_{word}", "mp_bf16_else"):
        note = facts.note(name)
        if note is not None and note.verdict == "changed":
            note.say = text


def _mixed(facts: Facts) -> str | None:
    """The word of mixed precision, from the switches there are for it."""
    word, by = facts.take("mp"), "mp"
    for name, meant in (("mp_bf16", "bf16"), ("mp_fp16", "fp16"), ("mp_bf16_else", "bf16")):
        is_said = facts.is_given(name) and facts.known[name].note.value is not None
        # what a launcher says: the run's own default comes before it
        is_of_launcher = by == "mp" and name == "mp_bf16_else" and not is_said
        if not (is_said or not word or is_of_launcher) or facts.take(name) is not True:
            continue
        if is_of_launcher and word not in (None, meant):
            facts.known.pop(by).note.drop(f"{facts.key(name)} counts there")
        elif word not in (None, meant) and facts.is_given(by):
            facts.say(name, "refused", f"it contradicts {facts.key(by)}: write one of them")
        word, by = meant, name
    if facts.known.get("mp_bf16") and facts.is_given("mp_bf16_else") and facts.is_given("mp_bf16"):
        inner, outer = facts.known["mp_bf16"], facts.known["mp_bf16_else"]
        if inner.value != outer.value and "auto" not in (inner.value, outer.value):
            facts.say("mp_bf16", "refused", f"it contradicts {outer.note.key}: write one of them")
    if facts.take("autocast") is True:
        dtype = facts.take("autocast_dtype", "bfloat16")
        word = _SHORT.get(str(dtype).removeprefix("torch."))
        if word not in ("bf16", "fp16"):
            facts.say("autocast_dtype", "refused", "there is no autocast in it: write bfloat16 or float16")
    return word


def _precision(facts: Facts, word: str | None, stored: str | None, inputs: str | None, *dtypes: str | None) -> Any:
    """The record: dtypes of compute, of sums, of outputs, beside that of storage."""
    param, reduce, out = dtypes
    is_low = stored not in (None, "fp32")
    record: Any = {}
    if is_low and param in (None, stored) and not reduce and not out:
        record = {"storage": stored, **({"compute": stored} if facts.has("adapter") else {})}  # what is frozen too
    elif param or reduce or out:
        by_word = "fp32" if word else None
        whole = {"compute": param, "storage": stored or by_word, "reduce": reduce or by_word, "output": out}
        record = {key: value for key, value in whole.items() if value is not None}
        if inputs is not None and param:
            record["cast_inputs"] = inputs
        if record == {"compute": param, "storage": "fp32", "reduce": "fp32"}:
            record = param
        elif reduce is None and param and not word:
            record["reduce"] = param  # FSDP's default: gradients are summed in the dtype of compute
    elif stored == "fp32" and facts.is_given("store"):
        record = "fp32"
    is_plain = isinstance(record, dict) and bool(record) and {*record.values()} == {"fp32"}
    return "fp32" if is_plain else record


def _settle_scaler(facts: Facts, compute: str | None) -> None:
    if compute == "fp16":
        facts.take("hysteresis")  # its row says what is other here
    for key, (name, usual) in _OF_SCALER.items():
        value = facts.take(name, usual)
        if key == "init_scale" and facts.has("scale_power"):
            name, value = "scale_power", 2.0 ** facts.take("scale_power")
        if compute == "fp16" and value != usual:
            facts.put(f"train.scaler.{key}", value, name)


# ---- sharding --------------------------------------------------------------------------------------------------------


def settle_sharding(facts: Facts, is_sharded: bool) -> None:
    """Units, offload, prefetch, buckets: of the engine that there is, so that what is of another has no effect."""
    has_offload = _settle_offload(facts)
    if not is_sharded and not has_offload:
        if size := facts.take("bucket_cap"):
            facts.put("parallel.ddp.bucket_cap_mb", float(size), "bucket_cap")
        return
    facts.drop("parallel.ddp")
    wrap = facts.take("wrap")
    if facts.take("sharded_layers") is not None:
        facts.say("sharded_layers", "changed", "blocks are units, tables and the head belong to the root")
    elif wrap in (None, "TRANSFORMER_BASED_WRAP") and (classes := facts.take("wrap_classes")) is not None:
        facts.put("parallel.sharding.units", class_names(classes), "wrap_classes", "wrap")
    if wrap == "SIZE_BASED_WRAP" and (least := facts.take("wrap_min")):
        facts.put("parallel.sharding.min_unit_params", int(least), "wrap_min", "wrap")
    ahead = {"forward": facts.take("prefetch_fwd"), "backward": facts.take("prefetch_back")}
    if facts.take("prefetch_on") is True:
        ahead = {"forward": facts.take("prefetch_fwd_depth", 1), "backward": facts.take("prefetch_back_depth", 2)}
    for key, name, usual in (("forward", "prefetch_fwd", 0), ("backward", "prefetch_back", 1)):
        if ahead[key] not in (None, usual):
            facts.put(f"parallel.sharding.prefetch.{key}", ahead[key], name, "prefetch_on", f"{name}_depth")


def _settle_offload(facts: Facts) -> bool:
    names = ("offload", "offload_target", "offload_obj")
    by_words = facts.get("parallel.sharding.offload")
    is_on, *_ = map(facts.take, names)
    if not (is_on is True or facts.has(*names[1:]) or by_words):
        return False
    facts.put("parallel.sharding.offload", True, *(name for name in names if facts.has(name)))
    if facts.take("pin") is False:
        facts.put("parallel.sharding.pin_memory", False, "pin")
    return True


def class_names(value: Any) -> list[str]:
    given = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return [str(name).strip().rpartition(".")[2] for name in given]
