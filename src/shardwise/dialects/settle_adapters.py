"""From facts to our keys: adapters, weights in 4 bits, and positions cut over ranks. See ``settle_layout.py``."""

import re
from typing import Any

from shardwise.dialects.facts import Facts
from shardwise.techniques.lora.options import ALL_LINEAR

_CHOSEN_BY_PEFT = ["q_proj", "v_proj"]  # for Llama, Mistral, Mixtral, Qwen and Gemma
_AS_THEY_ARE = ("adapter_dropout", "adapter_rslora", "adapter_dora", "adapter_init")  # said where they are not none
_NAMES = ("adapter_exclude", "adapter_train", "adapter_experts")
_PATTERN = re.compile(r"[\w*?-]+(\.[\w*?-]+)*")


def settle_positions(facts: Facts) -> None:
    """``parallel.context_parallel``, and the ranks along ``cp``, of which ``settle_layout`` makes the layout."""
    cp, by_heads = facts.number("cp") or 1, facts.number("ulysses") or 1
    if cp > 1 and by_heads > 1:
        text = f"positions are cut over one axis, and {facts.key('cp')}={cp} cuts them too: write one of them"
        facts.say("ulysses", "refused", text)
    elif by_heads > 1:
        facts.known["cp"] = facts.known["ulysses"]
        facts.put("parallel.context_parallel.method", "ulysses", "ulysses")
    elif cp > 1:
        for key, name in (("method", "cp_method"), ("order", "cp_order")):
            if facts.is_given(name):
                facts.put(f"parallel.context_parallel.{key}", facts.take(name), name)


def settle_regions(facts: Facts, tp: int) -> None:
    if tp == 1 or not facts.is_given("sequence_parallel") or facts.take("sequence_parallel") is not True:
        return
    plan = facts.get("parallel.tensor_parallel")
    if isinstance(plan, str):
        facts.put("parallel.tensor_parallel", {"plan": plan})
    facts.put("parallel.tensor_parallel.sequence_parallel", True, "sequence_parallel")


def settle_adapters(facts: Facts) -> None:
    """``parallel.lora``, ``parallel.quantize``, and which files of adapters a run leaves."""
    in_4_bits = _of_4_bits(facts)
    if facts.take("adapter") is None:
        if in_4_bits is not None:
            text = "weights in 4 bits are frozen, and no adapters are trained beside them: add adapters, or remove it"
            facts.say(in_4_bits, "refused", text)
        return
    targets = _targets(facts)
    if targets is not None:
        facts.put("parallel.lora.targets", targets, "adapter_targets", "adapter_all", "adapter_also", "adapter_head")
    facts.put("parallel.lora.rank", facts.take("adapter_rank", 8), "adapter", "adapter_rank")
    facts.pass_on("parallel.lora.alpha", "adapter_alpha", float)
    for name in _AS_THEY_ARE:
        if facts.take(name):
            facts.pass_on(f"parallel.lora.{name[8:]}", name)
    for name in _NAMES:
        if names := _listed(facts.take(name)):
            _refuse_expressions(facts, name, names)
            facts.put(f"parallel.lora.{name[8:]}", names, name)
    facts.take("adapter_begins")  # A's first values: its row says what is other here
    if facts.take("adapter_dropout") and facts.take("adapter_dropout_at") == "post":
        facts.say("adapter_dropout", "changed", "inputs of the adapters are dropped, there what they give")
    if saved := facts.take("adapter_saved"):
        facts.put("checkpoint.export" if saved == "alone" else "checkpoint.adapter", None, "adapter_saved")
    if in_4_bits is not None:
        _settle_4_bits(facts, in_4_bits)


def stored_beside_adapters(
    facts: Facts, stored: str | None, word: str | None, is_raised: bool
) -> tuple[str | None, str | None]:
    """The dtype in which trained parameters are stored, and the word of mixed precision: where adapters are float32 beside a model that is
    loaded in less, frozen weights alone are stored in that. Adapters of weights in 4 bits may have less, unless the engine raises them."""
    head = facts.table.head
    less = head.get("adapters_4bit") if facts.take("in_4_bits") is True and not is_raised else None
    if less is not None:
        is_same = less == (word or stored) and not facts.take("adapter_dora")
        text = "adapters and their optimizer state are bfloat16, as there"
        more = f"adapters and their optimizer state are float32, there {less} but for DoRA's magnitudes"
        facts.say("in_4_bits", "kept" if is_same else "changed", text if is_same else more)
        if is_same:
            return less, word
    if stored in (None, "fp32") or head.get("adapters") != "fp32":
        return stored, word
    if less is None:
        text = "frozen weights are stored in it, adapters in float32, as PEFT's are; both compute in it"
        facts.say("load_dtype", "changed", text)
    return None, word or stored


def _of_4_bits(facts: Facts) -> str | None:
    """The fact that says that frozen weights are stored in 4 bits: a switch, or a builder's name."""
    builder = str(facts.take("builder", "")).rpartition(".")[2]
    return "in_4_bits" if facts.take("in_4_bits") is True else "builder" if builder.startswith("qlora_") else None


def _targets(facts: Facts) -> str | list[str] | None:
    given = facts.take("adapter_targets")
    others = _layers(facts)
    names = [others.get(name, name) for name in _listed(given)]
    if "patterns" in facts.table.head:  # of whole names, where a dot is any character
        names = [f"*{name[2:]}" if name.startswith("*.") else name for name in names]
    with_head = facts.take("adapter_all") is True
    if with_head or names == [ALL_LINEAR] or (not names and facts.take("adapter_exclude")):
        text = "all linear layers but the head and routers of experts, and no stacked experts"
        text += "; there the head has one too, which has to be named: parallel.lora.targets" if with_head else ""
        facts.say("adapter_all" if with_head else "adapter_targets", "changed", text)
        return ALL_LINEAR
    for name in ("adapter_also", "adapter_head"):
        names += [others.get(one, one) for one in _listed(facts.take(name))]
    if names:
        names = [*dict.fromkeys(names)]
        _refuse_expressions(facts, "adapter_targets", names)
        return names
    if facts.take("adapter_experts"):
        return []
    if given is None and "adapter_targets" in facts.known:
        text = f"{', '.join(_CHOSEN_BY_PEFT)}: what PEFT chooses for Llama, Mistral, Qwen and Gemma; name the layers of others"
        facts.say("adapter_targets", "changed", text)
        return list(_CHOSEN_BY_PEFT)
    name = "adapter_targets" if "adapter_targets" in facts.known else "adapter"
    facts.say(name, "refused", "no layer is named, so that nothing would be trained: name some, such as q_proj, v_proj")
    return None


def _layers(facts: Facts) -> dict[str, str]:
    """Layers there -> here, with those that are one layer here in the models that a line of the head is named after."""
    model = str(facts.take("builder", ""))
    line = next((line for line in facts.table.head if line.startswith("layers_") and line[7:] in model), "")
    joined = facts.table.pairs(line)
    if joined:
        text = f"{', '.join(dict.fromkeys(joined.values()))} are one layer each here, with one adapter for all that is in them"
        facts.say("adapter_targets", "changed", text)
    return {**facts.table.pairs("layers"), **joined}


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else [str(part) for part in value]


def _refuse_expressions(facts: Facts, name: str, names: list[str]) -> None:
    if not all(map(_PATTERN.fullmatch, names)):
        text = "an expression is not taken: name layers, their last parts, or patterns as *.q_proj"
        facts.say(name, "refused", text)


def _settle_4_bits(facts: Facts, name: str) -> None:
    if (bits := facts.take("bits", 4)) != 4:
        facts.say("bits", "refused", f"weights in {bits} bits are not supported: write 4")
    if facts.take("code_4bit", "nf4") != "nf4":
        facts.say("code_4bit", "refused", "a worse code of the same size, which is not supported: write nf4")
    if name == "builder" or facts.take("rounded_4bit") is True:
        text = "scales of blocks are rounded to 8 bits by another rule there, so that weights differ a little"
        facts.say(name, "changed", text)
    elif "nested_4bit" in facts.known and facts.take("nested_4bit") is not True:
        text = "scales of blocks are stored in 8 bits too: values of weights differ by up to 0.75 %"
        facts.say("nested_4bit", "changed", text)
    plain = _listed(facts.take("plain_4bit"))
    value = {"kind": "nf4", "keep": plain} if plain else "nf4"
    facts.put("parallel.quantize", value, name, "code_4bit", "nested_4bit", "plain_4bit", "bits")
