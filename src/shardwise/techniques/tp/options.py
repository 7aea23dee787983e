"""Options of tensor parallelism: which layers are cut. Torch-free.

>>> tensor_parallel_of("hf")
TensorParallel(plan='hf')
"""

from collections.abc import Mapping
from typing import Annotated, Any

from shardwise.config.record import Options, doc
from shardwise.config.suggest import did_you_mean
from shardwise.config.target import check_target, looks_like_target
from shardwise.errors import ConfigError, UnsupportedError

__all__ = ["COLUMN", "LLAMA", "OTHERS", "ROW", "TABLE", "WHOLE", "WORDS", "TensorParallel", "tensor_parallel_of"]

WORDS = ("auto", "hf", "llama")

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
    "sequence_parallel": "activations between layers are whole on every rank of tp",
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
    """Tensor parallelism: which of the layers that can be cut are cut over ``tp``."""

    plan: Annotated[
        str | dict[str, str],
        doc(
            "auto: all that can be; hf: the model's own tp_plan; llama: the names of Llama; or a mapping of module patterns to colwise, "
            "rowwise, embedding_rowwise, replicate; or pkg.mod:NAME of one. What a plan names must be right, or is an error"
        ),
    ] = "auto"

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
        refuse_unknown_styles(self.plan)


def refuse_unknown_styles(plan: Mapping[str, str]) -> None:
    """Raises ConfigError for an empty plan or a style that there is not, UnsupportedError for one that is not supported."""
    known = sorted(COLUMN | ROW | TABLE | WHOLE)
    if not plan:
        raise ConfigError(
            "TensorParallel(plan={})",
            why="it names no module",
            fix='name some: {"blocks.*.up": "colwise", ...}, or "auto"',
        )
    for pattern, style in plan.items():
        if style in OTHERS:
            raise UnsupportedError(
                f"TensorParallel(plan={{{pattern!r}: {style!r}}})",
                why=OTHERS[style],
                fix=f"leave {pattern!r} out of the plan",
            )
        if style not in known:
            raise ConfigError(
                f"TensorParallel(plan={{{pattern!r}: {style!r}}})",
                why="there is no such style",
                fix=did_you_mean(str(style), known, what="styles"),
            )


def tensor_parallel_of(value: Any) -> TensorParallel:
    """The record that a value of ``tensor_parallel=`` means.

    Raises:
        ConfigError: it is neither the name of a plan nor a record.
    """
    if value is None:
        return TensorParallel()
    if isinstance(value, str):
        return TensorParallel(plan=value)
    if isinstance(value, TensorParallel):
        return value
    raise ConfigError(
        f"tensor_parallel={value!r}",
        why=f"that is a {type(value).__name__}, and neither the name of a plan nor a TensorParallel record",
        fix=f"use {', '.join(map(repr, WORDS))}, or tensor_parallel=sw.TensorParallel(plan={{...}})",
    )
