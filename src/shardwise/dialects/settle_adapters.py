"""From neutral facts to our keys: adapters, weights in 4 bits, and positions cut over ranks."""

import re
from typing import Any

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


def positions(c: Any) -> None:
    """``parallel.context_parallel``, and the number of ranks along ``cp`` for the layout: before ``layout`` is settled."""
    cp, by_heads = ((c.take(fact) or 1) for fact in ("cp", "ulysses"))
    if cp > 1 and by_heads > 1:
        given, other = c.note("ulysses").key, c.note("cp").key
        c.refuse(
            given, f"{given}={by_heads}: positions are cut over one axis, and {other}={cp} cuts them too: write one"
        )
    elif by_heads > 1:
        c.facts["cp"] = c.facts["ulysses"]
        c.put("parallel.context_parallel.method", "ulysses", "ulysses")
    elif cp > 1:
        for key, fact in (("method", "cp_method"), ("order", "cp_order")):
            if c.given(fact):
                c.put(f"parallel.context_parallel.{key}", c.take(fact), fact)


def rows_of_regions(c: Any, tp: int) -> None:
    """``parallel.tensor_parallel.sequence_parallel``: after ``layout``."""
    if tp == 1 or not c.given("sequence_parallel") or c.take("sequence_parallel") is not True:
        return
    if "sequence_parallel" not in TensorParallel.__struct_fields__:
        c.say(
            "sequence_parallel",
            "changed",
            "activations between layers are whole on each rank of tp: the same numbers, more memory",
        )
        return
    plan = c.run.get("parallel", {}).get("tensor_parallel")
    if isinstance(plan, str):
        c.put("parallel.tensor_parallel", {"plan": plan})
    c.put("parallel.tensor_parallel.sequence_parallel", True, "sequence_parallel")


def adapters(c: Any) -> None:
    """``parallel.lora``, ``parallel.quantize``, and which files of adapters a run leaves."""
    builder = str(c.take("builder") or "").rpartition(".")[2]
    in_4_bits = "in_4_bits" if c.take("in_4_bits") is True else "builder" if builder.startswith("qlora_") else None
    if c.take("adapter") is None:
        if in_4_bits is not None:
            what = c.note(in_4_bits).key
            c.refuse(
                what,
                f"{what}: weights in 4 bits are frozen, and no adapters are trained beside them: add adapters, or remove it",
            )
        return
    targets = _targets(c)
    if targets is not None:
        c.put("parallel.lora.targets", targets, "adapter_targets", "adapter_all", "adapter_also", "adapter_head")
    if (rank := c.take("adapter_rank")) is not None:
        c.put("parallel.lora.rank", rank, "adapter_rank", "adapter")
    for key, fact in _PLAIN.items():
        if (value := c.take(fact)) not in (None, False, 0.0) or (key == "alpha" and value is not None):
            c.put(f"parallel.lora.{key}", float(value) if key == "alpha" else value, fact)
    for key, fact in _NAMES.items():
        if names := _listed(c.take(fact)):
            _refuse_expressions(c, fact, names)
            c.put(f"parallel.lora.{key}", names, fact)
    if (c.take("adapter_dropout") or 0) > 0 and c.take("adapter_dropout_at") == "post":
        c.say("adapter_dropout", "changed", "inputs of the adapters are dropped, there what they give")
    if (saved := c.take("adapter_saved")) is not None:
        c.put("checkpoint.export" if saved == "alone" else "checkpoint.adapter", None, "adapter_saved")
    if in_4_bits is not None:
        _weights(c, in_4_bits)


def _targets(c: Any) -> str | list[str] | None:
    """The layers with an adapter: names, or all linear ones."""
    given, excluded = c.take("adapter_targets"), c.take("adapter_exclude")
    names = [_renamed(c, name) for name in _listed(given)]
    if names == [ALL_LINEAR] or c.take("adapter_all") is True or (not names and excluded):
        what = "adapter_all" if c.take("adapter_all") is True else "adapter_targets"
        no_head = "; there the head has one: name it, as parallel.lora.targets" if what == "adapter_all" else ""
        c.say(
            what, "changed", f"all linear layers but the head and routers of experts, and no stacked experts{no_head}"
        )
        return ALL_LINEAR
    for fact in ("adapter_also", "adapter_head"):
        names += _listed(c.take(fact))
    if names:
        _refuse_expressions(c, "adapter_targets", names)
        return names
    if c.take("adapter_experts"):
        return []
    if given is None and c.note("adapter_targets") is not None:
        of = ", ".join(_CHOSEN_BY_PEFT)
        c.say(
            "adapter_targets",
            "changed",
            f"{of}: what PEFT chooses for Llama, Mistral, Qwen and Gemma; name the layers of others",
        )
        return list(_CHOSEN_BY_PEFT)
    key = (c.note("adapter_targets") or c.note("adapter")).key
    c.refuse(key, f"{key}: no layer is named, so that nothing would be trained: name some, such as q_proj, v_proj")
    return None


def _renamed(c: Any, name: str) -> str:
    """A layer's name in a Hugging Face directory, where the table says that it is another there."""
    others = dict(pair.strip().split("=") for pair in c.table.head.get("layers", "").split(",") if pair.strip())
    return str(others.get(name, name))


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else [str(part) for part in value]


def _refuse_expressions(c: Any, fact: str, names: list[str]) -> None:
    if (wrong := next((name for name in names if not re.fullmatch(r"[\w*?-]+(\.[\w*?-]+)*", name)), None)) is not None:
        key = c.note(fact).key
        c.refuse(
            key, f"{key}={wrong!r}: an expression is not taken: name layers, their last parts, or patterns as *.q_proj"
        )


def _weights(c: Any, what: str) -> None:
    """Frozen weights in 4 bits."""
    bits, code = c.take("bits") or 4, c.take("code_4bit") or "nf4"
    if bits != 4:
        c.say("bits", "refused", f"{c.note('bits').key}={bits}: weights in {bits} bits are not supported: write 4")
    if code != "nf4":
        key = c.note("code_4bit").key
        c.refuse(key, f"{key}={code}: a worse code of the same size, which is not supported: write nf4")
    if c.note("nested_4bit") is not None and c.take("nested_4bit") is not True:
        c.say(
            "nested_4bit",
            "changed",
            "scales of blocks are stored in 8 bits too: values of weights differ by up to 0.75 %",
        )
    plain = _listed(c.take("plain_4bit"))
    c.put(
        "parallel.quantize",
        {"kind": "nf4", "keep": plain} if plain else "nf4",
        what,
        "code_4bit",
        "nested_4bit",
        "plain_4bit",
        "bits",
    )
