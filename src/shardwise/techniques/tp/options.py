"""Options of tensor parallelism: which layers are cut. Torch-free.

>>> tensor_parallel_of("hf")
TensorParallel(plan='hf')
>>> register_tp_plan("models.gpt:GPT", {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
"""

from collections.abc import Mapping
from typing import Annotated, Any

from shardwise.config.record import Options, doc
from shardwise.config.suggest import did_you_mean
from shardwise.config.target import check_target, looks_like_target
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.techniques.targets import named_record

WORDS = ("auto", "all", "hf", "llama")

REGISTERED: dict[str, dict[str, str]] = {}
"""``module:class`` -> the plan that is registered for it."""

COLUMN = frozenset({"colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"})
ROW = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"})
TABLE = frozenset({"embedding_rowwise"})
WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "all_reduce", "mla_kv_a_proj"})
"""Styles, by the words of transformers' plans: of column-parallel layers, row-parallel ones, tables that are cut by tokens,
and what every rank has whole."""

OTHERS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("ep_router", "ep_dispatch_experts", "moe_tp_experts", "moe_identity_expert", "grouped_gemm", "gather"),
            *("local", "local_colwise", "local_rowwise", "local_packed_rowwise", "local_params"),
        ),
        "it is of experts, which are whole on every rank of tp",
    ),
    "sequence_parallel": "it is no style of one module: TensorParallel(sequence_parallel=True) finds where sequences are cut",
    "embedding_colwise": "an embedding is cut by tokens: embedding_rowwise",
}
"""Style -> why it is not supported."""

LLAMA: dict[str, str] = {
    **dict.fromkeys((f"*.{name}_proj" for name in ("q", "k", "v", "gate", "up")), "colwise"),
    **dict.fromkeys((f"*.{name}_proj" for name in ("o", "down")), "rowwise"),
    "*.embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}
"""Last part of a name -> style, for models with the names of Llama."""


class TensorParallel(Options, frozen=True, kw_only=True):
    """Tensor parallelism: which of the layers that can be cut are cut over ``tp``, and whether sequences are cut between them."""

    plan: Annotated[
        str | dict[str, str],
        doc(
            "auto: a plan that is registered for the model's class, or else all that can be; all: all that can be; hf: the model's own "
            "tp_plan; llama: the names of Llama; or a mapping of module patterns to colwise, rowwise, embedding_rowwise, replicate; or "
            "pkg.mod:NAME of one. What a plan names must be right, or is an error"
        ),
    ] = "auto"
    sequence_parallel: Annotated[
        bool,
        doc(
            "between the layers that are cut, each rank has its positions of what every rank has else: activations kept there fall by tp, and as "
            "many bytes are sent"
        ),
    ] = False

    def check(self) -> None:
        if isinstance(self.plan, str):
            if self.plan in WORDS:
                return
            if not looks_like_target(self.plan):
                raise ConfigError(
                    f"TensorParallel(plan={self.plan!r})",
                    why="there is no plan of this name",
                    fix=did_you_mean(self.plan, list(WORDS), what="plans") + ', or a mapping, or "pkg.mod:NAME"',
                )
            check_target(self.plan, what="TensorParallel.plan")
            return
        check_plan(self.plan, "TensorParallel(plan=")


def register_tp_plan(of: type | str, plan: Mapping[str, str]) -> None:
    """Registers a plan of tensor parallelism for a class of modules, as the ``plan`` of models of that class, and of its
    subclasses that have none of their own, that are sharded without another.

    It is also used for modules of the class within another model, whose other layers are left whole then. Call it on
    every rank, before ``parallelize``: best beside the class. The plan that is registered last for a class counts.

    Args:
        of: the class, or ``"pkg.mod:Class"`` for one that need not be imported.
        plan: patterns of names of modules, within a module of the class, to styles; see :class:`TensorParallel`.

    Raises:
        ConfigError: it is no class, no mapping, or there is no such style.
        UnsupportedError: a style of experts or sequences.

    Example:
        >>> register_tp_plan("models.gpt:GPT", {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    """
    is_name = isinstance(of, str) and looks_like_target(of)
    call = f"register_tp_plan({of if isinstance(of, str) else getattr(of, '__qualname__', of)!r}, "
    if not (is_name or isinstance(of, type)):
        raise ConfigError(
            f"{call}...)",
            why="the first argument is neither a class nor the name of one",
            fix='give the class, or "pkg.mod:Class"',
        )
    check_plan(plan, call)
    REGISTERED[of if isinstance(of, str) else f"{of.__module__}:{of.__qualname__}"] = dict(plan)


def check_plan(plan: Any, call: str) -> None:
    """Refuses what is no plan.

    Args:
        plan: a mapping of patterns to styles, if it is one.
        call: where it was given, up to it, for messages: ``TensorParallel(plan=``.
    """
    known = sorted(COLUMN | ROW | TABLE | WHOLE)
    if not isinstance(plan, Mapping):
        raise ConfigError(
            f"{call}...)",
            why=f"it is a {type(plan).__name__}, and no mapping of patterns to styles",
            fix='{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}',
        )
    if not plan:
        raise ConfigError(
            f"{call}{{}})",
            why="it names no module",
            fix='name some: {"blocks.*.up": "colwise", ...}, or "auto"',
        )
    for pattern, style in plan.items():
        if style in OTHERS:
            raise UnsupportedError(
                f"{call}{{{pattern!r}: {style!r}}})",
                why=OTHERS[style],
                fix=f"leave {pattern!r} out of the plan",
            )
        if style not in known:
            raise ConfigError(
                f"{call}{{{pattern!r}: {style!r}}})",
                why="there is no such style",
                fix=did_you_mean(str(style), known, what="styles"),
            )


def tensor_parallel_of(value: Any) -> TensorParallel:
    fix = f"{', '.join(map(repr, WORDS))}, or tensor_parallel=sw.TensorParallel(plan={{...}})"
    return named_record("tensor_parallel", value, TensorParallel(), "plan", fix)
