"""From facts to our keys: ranks, layout and batch, for every system at once.

What is said beyond a row's own sentence is said of the fact that decides it. The other
``settle_*.py`` settle the rest.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

from shardwise.dialects.facts import Facts, settles
from shardwise.dialects.values import RefusedError

_IS_FREED = {  # words of a strategy -> whether parameters are freed after forward
    "full": True, "full_shard": True, "hybrid": True, "hybrid_shard": True,
    "grad_op": False, "shard_grad_op": False, "hybrid_grad_op": False, "hybrid_shard_zero2": False,
}  # fmt: skip
_KINDS = {"shard_grad_op": "grad_op", "hybrid_shard": "hybrid", "hybrid_shard_zero2": "hybrid_grad_op"}  # others: full
_OF_ZERO = {0: "ddp", 1: "grad_op", 2: "grad_op", 3: "full"}
_OF_LAYOUT = (
    "engine", "strategy", "strategy_v1", "zero", "replicate", "shard", "tp", "cp", "dp", "mesh2", "mics", "fsdp_words", "hybrid",
    "hybrid_over",
)  # fmt: skip
_OF_PRODUCT = ("mesh2", "shard", "replicate", "dp", "mics", "hybrid_over", "shard_auto", "tp_auto", "tp", "cp")
_LEAST = {"tp": 0, "micro": -1, "global": -1}  # values below one that stand for something
_COUNTS = ("nodes", "ranks", "tp", "cp", "micro", "accumulate", "accumulate_sum", "global", "shard_auto", "tp_auto")


class Ranks:
    """How many ranks there are: of all machines, of one machine, and groups that read different data; None: not known."""

    def __init__(self, total: int | None, per_node: int | None):
        self.total, self.per_node = total, per_node
        self.rows: int | None = None
        self.tp = 1
        self.shards: int | None = None  # of each parameter, beside those of tensor parallelism


def settle_ranks(facts: Facts, total: int | None, per_node: int | None) -> Ranks:
    """The ranks that the source and the user say, as far as they are known."""
    for name in _COUNTS:
        value = facts.number(name)
        if value is not None and value < 1 and value != _LEAST.get(name) and (name, value) != ("ranks", -1):
            raise RefusedError(facts.key(name), "it is one or more: write 1 or more", value)
    nodes, said, own = facts.take("nodes", 1), facts.number("ranks"), facts.take("per_node")
    said = None if said == -1 else said
    if facts.take("one_rank"):
        if said not in (None, 1):
            text = f"{facts.key('one_rank')} starts one process there, however many are written"
            facts.known.pop("ranks").note.drop(text)
        said = 1
    here = _devices(own)
    if here is None and isinstance(own, str) and own.strip().lower() not in ("auto", "-1", "0", ""):
        raise RefusedError(facts.key("per_node"), "it is a number of devices, a list of them, or auto: write one", own)
    known = here * nodes if here else said
    if total and known and total != known:
        facts.say("ranks" if facts.has("ranks") else "per_node", "changed", f"--ranks {total} holds")
    total = total or known
    if total and total % nodes:
        text = f"{total} ranks are not split evenly over {nodes} machines: write --ranks N"
        raise RefusedError(facts.key("nodes"), text, nodes)
    per_node = per_node or here or (total // nodes if total else None)
    if per_node and nodes == 1 and (said or here):
        facts.put("launch.nproc", total, "ranks", "per_node", "one_rank")
    facts.nodes = nodes
    return Ranks(total, per_node)


def _devices(own: Any) -> int | None:
    """How many devices of a machine are named, or counted."""
    if isinstance(own, str) and "," in own:
        own = [part for part in own.split(",") if part.strip()]
    if isinstance(own, list):
        return len(own) or None
    return int(own) or None if str(own).isdigit() else None


# ---- layout ----------------------------------------------------------------------------------------------------------


def settle_layout(facts: Facts, ranks: Ranks) -> bool:
    for axis in ("pp", "ep", "sp"):
        facts.take(axis)  # more than one rank is refused by its row
    replicate, shard, dp = map(facts.number, ("replicate", "shard", "dp"))
    if mesh := facts.take("mesh2"):
        if not (isinstance(mesh, list) and len(mesh) == 2 and all(isinstance(n, int) and n > 0 for n in mesh)):
            raise RefusedError(facts.key("mesh2"), "it is two numbers: write [copies, shards]", mesh)
        replicate, shard = mesh
    shard, tp = _split_by_machine(facts, ranks, shard, max(1, facts.number("tp") or 1))
    kind, cp = _kind(facts), max(1, facts.number("cp") or 1)
    ranks.tp = tp
    if ranks.total is not None:
        if ranks.total % (tp * cp):
            key = facts.key("tp", "tp_auto", "cp") if tp > 1 or not facts.is_given("cp") else facts.key("cp")
            text = f"tp={tp} x cp={cp} does not divide {ranks.total} ranks: write another, or --ranks N"
            raise RefusedError(key, text)
        ranks.rows = ranks.total // (tp * cp)
    if dp and dp > 0 and ranks.rows and dp != ranks.rows:
        text = f"{dp} x tp={tp} x cp={cp} is not {ranks.total} ranks: write {ranks.rows}, or --ranks N"
        facts.say("dp", "refused", text)
    if dp and dp > 0 and replicate and dp % replicate:
        facts.say("dp", "refused", f"{dp} is not a multiple of {replicate} copies: write one that is")
    axes = _data_axes(facts, kind, replicate, shard, dp, ranks)
    axes += [(axis, degree) for axis, degree in (("cp", cp), ("tp", tp)) if degree > 1]
    _check_product(facts, axes, ranks)
    facts.put("parallel.layout", ",".join(f"{axis}={degree}" for axis, degree in axes), *_OF_LAYOUT)
    is_sharded = any(axis == "dp_shard" for axis, _ in axes)
    ranks.shards = _num_shards(dict(axes), ranks)
    is_freed = _is_freed(facts, kind)
    if is_sharded and is_freed is not True:
        names = ("reshard", "reshard_v2", "hpz", "strategy_v1", "zero", "strategy")
        facts.put("parallel.sharding.reshard_after_forward", is_freed, *names)
    return is_sharded


def _split_by_machine(facts: Facts, ranks: Ranks, shard: int | None, tp: int) -> tuple[int | None, int]:
    """Shards over machines and tensor parallelism within one, where the source leaves both to the machines."""
    if not facts.has("tp_auto", "shard_auto"):
        return shard, tp
    over, within = facts.number("shard_auto"), facts.number("tp_auto")
    if within is None and facts.take("engine") == "2d":
        if over is not None and ranks.total:
            within = ranks.total // over
        elif ranks.per_node:
            within = ranks.per_node
        else:
            text = "it is the ranks of a machine, and how many there are is not known: write --ranks-per-node N"
            raise RefusedError(facts.key("tp_auto"), text, "auto")
    return over if over is not None else shard, within or tp


def _data_axes(
    facts: Facts, kind: str, replicate: int | None, shard: int | None, dp: int | None, ranks: Ranks
) -> list[tuple[str, int | str]]:
    copies, shards = max(replicate or 1, 1), shard if shard and shard > 0 and facts.is_given("shard") else None
    is_cut = (facts.number("cp") or 1) > 1  # shards are over the ranks of cp too
    if kind == "ddp" and not (shard and shard > 1):
        if copies > 1 and ranks.rows and copies != ranks.rows:
            text = f"{copies} copies are not {ranks.rows} data-parallel ranks: write --ranks N"
            raise RefusedError(facts.key("replicate", "mesh2"), text)
        return [("dp_replicate", -1)]
    if kind.startswith("hybrid") and copies == 1 and not (shard and shard > 1):
        return [("dp_replicate", -1), ("dp_shard", _mics(facts) or "node")]
    if copies > 1:
        if dp and dp > 0:
            return [("dp_replicate", copies), ("dp_shard", dp // copies)]
        return [("dp_replicate", copies), *([("dp_shard", shard or -1)] if shard != 1 or is_cut else [])]
    if shards == 1:
        if ranks.rows and ranks.rows > 1:
            text = f"1 x {copies} copies x tp={ranks.tp} is not {ranks.total} ranks: write {ranks.rows}, or --ranks N"
            raise RefusedError(facts.key("shard"), text, 1)
        return [("dp_shard", 1)] if is_cut else [("dp_replicate", -1)]
    return [("dp_shard", shards or -1)]


def _num_shards(degrees: dict[str, int | str], ranks: Ranks) -> int | None:
    """Ranks that a parameter is cut over, those of positions included and those of tensors not; None: not known."""
    shards = degrees.get("dp_shard", 1)
    if shards == -1 and ranks.rows:
        shards = ranks.rows // int(degrees.get("dp_replicate", 1))
    return shards * int(degrees.get("cp", 1)) if isinstance(shards, int) and shards > 0 else None


def _check_product(facts: Facts, axes: Iterable[tuple[str, int | str]], ranks: Ranks) -> None:
    """Degrees that do not multiply to the ranks are refused, with both numbers."""
    degrees = dict(axes)
    known = prod(degree for degree in degrees.values() if isinstance(degree, int) and degree > 0)
    if ranks.total is None or "node" in degrees.values():
        return
    is_open = -1 in degrees.values()
    if ranks.total % known if is_open else known != ranks.total:
        text = ",".join(f"{axis}={degree}" for axis, degree in degrees.items())
        of = "a multiple of " if is_open else ""
        text = f"{text} is {of}{known} ranks, not {ranks.total}: write others, or --ranks N"
        for key in [facts.key(name) for name in _OF_PRODUCT if facts.is_given(name)] or [facts.key(*_OF_PRODUCT)]:
            facts.refuse(key, text)


def _kind(facts: Facts) -> str:
    """ddp, full, grad_op, hybrid or hybrid_grad_op."""
    engine, version = facts.take("engine"), facts.take("fsdp_version")
    if words := facts.take("fsdp_words"):
        words = ["full_shard"] if words is True else [str(word) for word in _names(words)]
        if "offload" in words:
            facts.put("parallel.sharding.offload", True, "fsdp_words")
        named = next((word for word in words if word in _IS_FREED), "full_shard")
        return _KINDS.get(named, "full")
    if engine == "ddp":
        return "ddp"
    if engine == "fsdp" and facts.has("hybrid", "hybrid_over"):
        return _kind_of_hybrid(facts)
    zero = facts.take("zero") if engine in (None, "zero") else None
    if zero is not None:
        return "hybrid" if _mics(facts) and int(zero) == 3 else _OF_ZERO[int(zero)]
    if engine == "zero":
        return "grad_op"
    if engine == "fsdp" and facts.has("strategy_v1") and version in (None, 1, "1"):
        return facts.take("strategy_v1")
    if engine in ("fsdp", "2d"):
        return "full"
    if facts.has("strategy"):
        return facts.take("strategy")
    return "full" if facts.has("shard", "replicate", "tp", "dp", "fsdp_version") else "ddp"


def _kind_of_hybrid(facts: Facts) -> str:
    """Shards over so many ranks, and copies beyond."""
    over = facts.take("hybrid_over")
    if facts.take("hybrid") is False:
        return "full"
    if not facts.is_given("hybrid_over"):
        text = "the default there shards over one rank, so nothing; shards are within a node here, copies beyond"
        facts.say("hybrid_over", "changed", text)
    elif over == 1:
        facts.say("hybrid_over", "changed", "shards over one rank are whole copies: plain data parallelism")
        return "ddp"
    elif isinstance(over, int) and over > 1:
        facts.known["mics"] = facts.known["hybrid_over"]
    return "hybrid"


def _mics(facts: Facts) -> int | None:
    """Ranks that share shards, if they are counted."""
    size = facts.number("mics")
    return size if size and size > 0 else None


def _is_freed(facts: Facts, kind: str) -> bool | int:
    """Whether parameters are freed after forward, or to how many ranks' shards."""
    size = facts.number("hpz")
    if size and size > 1:
        return size
    if facts.has("reshard"):
        said = facts.take("reshard")
        return False if said == 1 and not isinstance(said, bool) else said
    is_version_1 = facts.has("strategy_v1") and facts.take("fsdp_version") in (None, 1, "1")
    if facts.has("reshard_v2") and not is_version_1:
        said = facts.take("reshard_v2")
        if isinstance(said, str) and said.lower() not in _IS_FREED:
            facts.say("reshard_v2", "refused", "it does not say when shards are freed: write true or false")
        return _IS_FREED.get(said.lower(), True) if isinstance(said, str) else said
    return not kind.endswith("grad_op")


# ---- batch -----------------------------------------------------------------------------------------------------------


@settles
def settle_batch(facts: Facts, ranks: Ranks) -> None:
    """Samples of a step, and of one forward on one rank: derived, never guessed."""
    micro, steps, whole = facts.take("micro"), facts.take("accumulate"), facts.take("global")
    if facts.has("accumulate_sum"):
        steps = facts.take("accumulate_sum")
    if facts.has("micro_tokens"):
        micro, whole = _batch_in_tokens(facts)
    micro, steps, whole = (None if value in ("auto", -1) else value for value in (micro, steps, whole))
    if micro is None and whole is None and not (facts.is_given("accumulate") or facts.is_given("accumulate_sum")):
        return
    rows = ranks.rows or 0
    if not rows:
        if micro and whole:
            _put_batch(facts, micro, whole)
            return
        name = facts.first("micro", "accumulate", "accumulate_sum", "micro_tokens", "global")
        text = "a step has that of each data-parallel rank, and how many there are is not known: write --ranks N"
        facts.stop_if(True, name, text)
    if micro and facts.take("split_batches") is True:
        text = f"a batch of {micro} is not split over {rows} ranks: write another"
        facts.stop_if(micro % rows, "split_batches", text)
        micro //= rows
    if micro is None and whole is None:
        text = f"data.global_batch = samples of one forward x {steps} x {rows} data-parallel ranks; data.micro_batch says the first"
        facts.say("accumulate", "changed", text)
        return
    micro = whole // (rows * (steps or 1)) if micro is None else micro
    whole = micro * (steps or 1) * rows if whole is None else whole
    _check_batch(facts, rows, ranks.tp, micro, steps, whole)
    _put_batch(facts, micro, whole)
    steps = whole // (micro * rows)
    facts.arithmetic = f"{micro} x {steps} micro-batches x {rows} data-parallel ranks = {whole} samples of a step"


def _put_batch(facts: Facts, micro: int, whole: int) -> None:
    facts.put("data.global_batch", whole, "global", "accumulate", "accumulate_sum", "global_tokens")
    facts.put("data.micro_batch", micro, "micro", "micro_tokens")


def _check_batch(facts: Facts, rows: int, tp: int, micro: int, steps: int | None, whole: int) -> None:
    name = facts.first("global", "accumulate", "accumulate_sum", "micro")
    cut = f" (tp={tp})" if tp > 1 else ""
    text = f"{whole} is not a multiple of {micro or 1} samples x {rows} data-parallel ranks{cut}: write one that is, or --ranks N"
    facts.stop_if(not micro or whole % (micro * rows), name, text)
    is_said = facts.is_given("accumulate") or facts.is_given("accumulate_sum")
    text = f"{whole} samples of a step are not {micro} x {steps} micro-batches x {rows} data-parallel ranks{cut}: leave one of them out"
    facts.stop_if(is_said and steps and micro * rows * steps != whole, name, text)


def _batch_in_tokens(facts: Facts) -> tuple[int, int]:
    """The batch in samples of whole contexts, where the source counts tokens."""
    length, micro = (max(0, facts.number(name) or 0) for name in ("context", "micro_tokens"))
    whole = facts.take("global_tokens", -1)
    facts.stop_if(
        not (micro and length), "micro_tokens", "how long a sample is, is not known: write max_context_length"
    )
    for name, tokens in (("micro_tokens", micro), ("global_tokens", whole)):
        text = (
            f"it is not a number of samples of {length} tokens: data.micro_tokens makes micro-batches of whole samples"
        )
        facts.stop_if(tokens > 0 and tokens % length, name, text)
    facts.put("data.seq_len", length, "context")
    facts.followed.add("data.seq_len")
    return micro // length, whole // length if whole > 0 else -1


def _names(value: Any) -> list[Any]:
    """A list, or a text of words with commas or blanks."""
    return value.replace(",", " ").split() if isinstance(value, str) else list(value)
