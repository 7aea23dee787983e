"""``Parallel``: the layout and the options of every technique as one record, made from ``techniques``. Torch-free."""

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shardwise.config.record import Options, default_of, doc
from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError
from shardwise.techniques.technique import Option, Technique


class ParallelOptions(Options, frozen=True, kw_only=True):
    """The layout and the options of every technique: the arguments of ``init`` and ``parallelize``, as one record."""

    declared: ClassVar[Mapping[str, Option]] = {}

    layout: Annotated[
        str,
        doc("degree of each mesh axis: dp_replicate=2,dp_shard=-1; -1 is inferred, dp_shard=node: the ranks of a node"),
    ] = "dp_shard=-1"
    init: Annotated[
        Literal["seeded", "rank0", "load"] | None,
        doc(
            "seeded: from the seed and each name; rank0: built once, scattered; load: none, until weights are loaded; null: "
            "load where there are weights to start from, else seeded for a builder and rank0 for a module"
        ),
    ] = None

    def __post_init__(self) -> None:
        for key, option in self.declared.items():
            msgspec.structs.force_setattr(self, key, option.from_python(getattr(self, key)))
        super().__post_init__()

    def __getattr__(self, key: str) -> Any:  # for type checkers: the fields are only known at run time
        raise AttributeError(f"Parallel has no field {key!r}")

    @classmethod
    def of(cls, **options: Any) -> Any:
        """The record for keyword arguments of ``parallelize``, of which None stands for the default.

        Raises:
            ConfigError: an option that does not exist, or a value that it does not accept.
        """
        known = [key for key in cls.__struct_fields__ if key != "layout"]
        given = {}
        for key, value in options.items():
            if key not in known:
                raise ConfigError(
                    f"parallelize({key}={value!r:.60})",
                    why="it has no option of this name",
                    fix=did_you_mean(key, known, what="options of parallelize"),
                )
            given[key] = default_of(cls, key) if value is None else value
            if key in cls.declared:
                _check(cls.declared[key], given[key])
        return cls(**given)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``parallelize``: all fields but the layout, which belongs to ``init``."""
        return {key: getattr(self, key) for key in self.__struct_fields__ if key != "layout"}

    def without(self, keys: Sequence[str]) -> Any:
        return msgspec.structs.replace(self, **{key: default_of(type(self), key) for key in keys})

    def check(self) -> None:
        for key, option in self.declared.items():
            option.check(getattr(self, key))
        if not self.layout.strip():
            raise ConfigError(
                "Parallel(layout='')",
                why="a layout names at least one axis",
                fix='use layout="dp_shard=-1" for all ranks on one axis',
            )


def _check(option: Option, value: Any) -> None:
    if option.record is not None and not isinstance(value, option.record[0]):
        name = option.record[0].__name__
        raise ConfigError(
            f"{option.key}={value!r}",
            why=f"that is not a {name} record",
            fix=f"write {option.key}=sw.{name}({option.record[1]}), or leave it out",
        )
    option.check(value)


def make_parallel(techniques: Sequence[Technique]) -> Any:
    """The class ``Parallel`` with the options of all ``techniques``, in their order."""
    options = {option.key: option for technique in techniques for option in technique.options}

    def fill(body: dict[str, Any]) -> None:
        body["__module__"] = __name__.rpartition(".")[0]  # where pickle finds it
        body["__doc__"] = ParallelOptions.__doc__
        body["__annotations__"] = {key: option.hint for key, option in options.items()}
        body |= {"declared": options, "functions": frozenset(k for k, o in options.items() if o.holds_functions)} | {
            k: o.default for k, o in options.items()
        }

    return types.new_class("Parallel", (ParallelOptions,), {"frozen": True, "kw_only": True}, fill)
