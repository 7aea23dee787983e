"""From neutral facts to our keys: adapters, weights in 4 bits, and positions cut over ranks."""

import re
from typing import Any

from shardwise.dialects.facts import Facts
from shardwise.techniques.lora.options import ALL_LINEAR
from shardwise.techniques.tp.options import TensorParallel

_CHOSEN_BY_PEFT = ["q_proj", "v_proj"]  # for Llama, Mistral, Mixtral, Qwen and Gemma
_PLAIN = {
    "alpha": "adapter_alpha",
    "dropout": "adapter_dropout",
    "rslora": "adapter_rslora",
    "dora": "adapter_dora",
    "init": "adapter_init",
}
_NAMES = {"exclude": "adapter_exclude", "train": "adapter_train", "experts": "adapter_experts"}


def settle_positions(facts: Facts) -> None:
    """``parallel.context_parallel``, and the number of ranks along ``cp`` for the layout: before ``layout`` is settled."""
    cp, by_heads = ((facts.take(fact) or 1) for fact in ("cp", "ulysses"))
    if cp > 1 and by_heads > 1:
        other = facts.key("cp")
        facts.say("ulysses", "refused", f"positions are cut over one axis, and {other}={cp} cuts them too: write one")
    elif by_heads > 1:
        facts.known["cp"] = facts.known["ulysses"]
        facts.put("parallel.context_parallel.method", "ulysses", "ulysses")
    elif cp > 1:
        for key, fact in (("method", "cp_method"), ("order", "cp_order")):
            if facts.is_given(fact):
                facts.put(f"parallel.context_parallel.{key}", facts.take(fact), fact)


def settle_regions(facts: Facts, tp: int) -> None:
    """``parallel.tensor_parallel.sequence_parallel``: after ``layout``."""
    if tp == 1 or not facts.is_given("sequence_parallel") or facts.take("sequence_parallel") is not True:
        return
    if "sequence_parallel" not in TensorParallel.__struct_fields__:
        facts.say(
            "sequence_parallel",
            "changed",
            "activations between layers are whole on each rank of tp: the same numbers, more memory",
        )
        return
    plan = facts.run.get("parallel", {}).get("tensor_parallel")
    if isinstance(plan, str):
        facts.put("parallel.tensor_parallel", {"plan": plan})
    facts.put("parallel.tensor_parallel.sequence_parallel", True, "sequence_parallel")


def settle_adapters(facts: Facts) -> None:
    """``parallel.lora``, ``parallel.quantize``, and which files of adapters a run leaves."""
    builder = str(facts.take("builder") or "").rpartition(".")[2]
    in_4_bits = "in_4_bits" if facts.take("in_4_bits") is True else "builder" if builder.startswith("qlora_") else None
    if facts.take("adapter") is None:
        if in_4_bits is not None:
            text = "weights in 4 bits are frozen, and no adapters are trained beside them: add adapters, or remove it"
            facts.say(in_4_bits, "refused", text)
        return
    targets = _targets(facts)
    if targets is not None:
        facts.put("parallel.lora.targets", targets, "adapter_targets", "adapter_all", "adapter_also", "adapter_head")
    if (rank := facts.take("adapter_rank")) is not None:
        facts.put("parallel.lora.rank", rank, "adapter_rank", "adapter")
    for key, fact in _PLAIN.items():
        if (value := facts.take(fact)) not in (None, False, 0.0) or (key == "alpha" and value is not None):
            facts.put(f"parallel.lora.{key}", float(value) if key == "alpha" else value, fact)
    for key, fact in _NAMES.items():
        if names := _listed(facts.take(fact)):
            _refuse_expressions(facts, fact, names)
            facts.put(f"parallel.lora.{key}", names, fact)
    if (facts.take("adapter_dropout") or 0) > 0 and facts.take("adapter_dropout_at") == "post":
        facts.say("adapter_dropout", "changed", "inputs of the adapters are dropped, there what they give")
    if (saved := facts.take("adapter_saved")) is not None:
        facts.put("checkpoint.export" if saved == "alone" else "checkpoint.adapter", None, "adapter_saved")
    if in_4_bits is not None:
        _weights(facts, in_4_bits)


def _targets(facts: Facts) -> str | list[str] | None:
    """The layers with an adapter: names, or all linear ones."""
    given, excluded = facts.take("adapter_targets"), facts.take("adapter_exclude")
    names = [_renamed(facts, name) for name in _listed(given)]
    if names == [ALL_LINEAR] or facts.take("adapter_all") is True or (not names and excluded):
        what = "adapter_all" if facts.take("adapter_all") is True else "adapter_targets"
        no_head = "; there the head has one: name it, as parallel.lora.targets" if what == "adapter_all" else ""
        facts.say(
            what, "changed", f"all linear layers but the head and routers of experts, and no stacked experts{no_head}"
        )
        return ALL_LINEAR
    for fact in ("adapter_also", "adapter_head"):
        names += _listed(facts.take(fact))
    if names:
        _refuse_expressions(facts, "adapter_targets", names)
        return names
    if facts.take("adapter_experts"):
        return []
    if given is None and facts.note("adapter_targets") is not None:
        of = ", ".join(_CHOSEN_BY_PEFT)
        facts.say(
            "adapter_targets",
            "changed",
            f"{of}: what PEFT chooses for Llama, Mistral, Qwen and Gemma; name the layers of others",
        )
        return list(_CHOSEN_BY_PEFT)
    name = "adapter_targets" if facts.note("adapter_targets") is not None else "adapter"
    text = "no layer is named, so that nothing would be trained: name some, such as q_proj, v_proj"
    facts.say(name, "refused", text)
    return None


def _renamed(facts: Facts, name: str) -> str:
    """A layer's name in a Hugging Face directory, where the table says that it is another there."""
    return facts.table.pairs("layers").get(name, name)


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else [str(part) for part in value]


def _refuse_expressions(facts: Facts, fact: str, names: list[str]) -> None:
    if (wrong := next((name for name in names if not re.fullmatch(r"[\w*?-]+(\.[\w*?-]+)*", name)), None)) is not None:
        text = f"{wrong!r} is an expression: name layers, their last parts, or patterns as *.q_proj"
        facts.say(fact, "refused", text)


def _weights(facts: Facts, what: str) -> None:
    """Frozen weights in 4 bits."""
    bits, code = facts.take("bits") or 4, facts.take("code_4bit") or "nf4"
    if bits != 4:
        facts.say("bits", "refused", f"weights in {bits} bits are not supported: write 4")
    if code != "nf4":
        facts.say("code_4bit", "refused", "a worse code of the same size, which is not supported: write nf4")
    if facts.note("nested_4bit") is not None and facts.take("nested_4bit") is not True:
        facts.say(
            "nested_4bit",
            "changed",
            "scales of blocks are stored in 8 bits too: values of weights differ by up to 0.75 %",
        )
    plain = _listed(facts.take("plain_4bit"))
    facts.put(
        "parallel.quantize",
        {"kind": "nf4", "keep": plain} if plain else "nf4",
        what,
        "code_4bit",
        "nested_4bit",
        "plain_4bit",
        "bits",
    )
