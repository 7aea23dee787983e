"""Options of context parallelism. Torch-free.

>>> context_parallel_of("gather")
ContextParallel(method='gather')
"""

from typing import Annotated, Any

from shardwise.config.record import Options, doc
from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.techniques.targets import named_record

METHODS = ("auto", "gather", "ulysses")
ORDERS = ("auto", "zigzag", "contiguous")
FALLBACKS = ("refuse", "gather")


class ContextParallel(Options, frozen=True, kw_only=True):
    """Context parallelism: how positions are cut over ``cp``, and what is exchanged."""

    method: Annotated[
        str,
        doc(
            "gather: each rank gathers the keys and values of all positions; ulysses: queries, keys and values change from positions to "
            "heads before attention, and back behind it; auto: ulysses where it sends fewer bytes and the numbers of heads allow it"
        ),
    ] = "auto"
    order: Annotated[
        str,
        doc(
            "zigzag: rank r has the chunks r and 2n-1-r of 2n, so that each has as much to compute under a causal mask; contiguous: chunk r "
            "of n; auto: zigzag with gather, contiguous with ulysses"
        ),
    ] = "auto"
    fallback: Annotated[
        str,
        doc(
            "what is done with a module that mixes positions in another way than by attention: refuse: an error that names it; gather: it runs "
            "on the whole sequence on every rank, with the same numbers, and n times the work"
        ),
    ] = "refuse"

    def check(self) -> None:
        for key, words in (("method", METHODS), ("order", ORDERS), ("fallback", FALLBACKS)):
            value = getattr(self, key)
            if value == "ring" and key == "method":
                raise UnsupportedError(
                    'ContextParallel(method="ring")',
                    why="there is no ring attention here: gathered keys are exact, and are not kept for backward",
                    fix='use method="gather", or "ulysses"',
                )
            if value not in words:
                raise ConfigError(
                    f"ContextParallel({key}={value!r})",
                    why=f"there is no such {key}",
                    fix=did_you_mean(str(value), list(words), what=f"values of {key}"),
                )
        if self.method == "ulysses" and self.order == "zigzag":
            raise ConfigError(
                'ContextParallel(method="ulysses", order="zigzag")',
                why="with ulysses attention sees whole sequences, in which no order of positions balances anything",
                fix='leave order out, or use method="gather"',
            )


def context_parallel_of(value: Any) -> ContextParallel:
    fix = f"{', '.join(map(repr, METHODS))}, or context_parallel=sw.ContextParallel(...)"
    return named_record("context_parallel", value, ContextParallel(), "method", fix)
