"""One import from end to end: sources -> facts -> our keys, and an answer for each key of the sources."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config.loader import UNWRITTEN, load_values
from shardwise.config.sources import read_file
from shardwise.config.suggest import did_you_mean
from shardwise.dialects.collect import (
    SECTIONS,
    collect,
    detect,
    interpolated,
    merge,
    refuse_other_system,
    systems,
)
from shardwise.dialects.facts import Fact, Facts, Note
from shardwise.dialects.objects import of_environment, of_object
from shardwise.dialects.settle_adapters import settle_adapters, settle_positions, settle_regions
from shardwise.dialects.settle_data import (
    settle_checkpoints,
    settle_compile,
    settle_data,
    settle_figures,
    settle_remat,
    settle_validation,
)
from shardwise.dialects.settle_layout import settle_batch, settle_layout, settle_ranks
from shardwise.dialects.settle_precision import settle_precision, settle_sharding
from shardwise.dialects.settle_run import settle_length, settle_optimizer, settle_schedule
from shardwise.dialects.table import VERDICTS, load
from shardwise.dialects.values import RefusedError, literal, short
from shardwise.errors import ConfigError
from shardwise.techniques import Parallel

_SHOWN_FIRST = ("changed", "kept", "dropped")


@dataclass(frozen=True)
class Finding:
    """What became of one key of the source.

    Attributes:
        key: the key; in parentheses, a meaning that no key has.
        value: its value there.
        given: the source says it; else it is the default there.
        verdict: ``kept``, ``changed`` or ``dropped``; what is refused ends the import.
        say: what is different, or why it is not needed.
        ours: our keys with their values.
    """

    key: str
    value: Any
    given: bool
    verdict: str
    say: str
    ours: tuple[str, ...]

    def __str__(self) -> str:
        what = f"{self.key}={short(self.value)}" if self.given or self.value is not None else self.key
        default = " (the default there)" if not self.given and self.value is not None else ""
        ours = f" -> {', '.join(self.ours)}" if self.ours else ""
        return f"{self.verdict:8} {what}{default}{ours}{f': {self.say}' if self.say else ''}"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A configuration of another system as one of ours, with an answer for each of its keys.

    Attributes:
        dialect: the system.
        run: our configuration, as sections.
        config: ``run`` as it was loaded and checked: what ``shardwise train`` would read, what has to be written at its default.
        findings: what became of each key, and of the defaults there that are not ours.
        missing: what the source cannot say.
        followed: keys of ``run`` that others were computed from, beside those of its length, batch and layout.
        samples: how many samples a step has, and why; empty: the source does not say.
    """

    dialect: str
    run: dict[str, Any]
    config: Any = None
    findings: tuple[Finding, ...] = ()
    missing: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()
    samples: str = ""

    @property
    def layout(self) -> str:
        """For ``sw.init``."""
        return self.run["parallel"]["layout"]

    @property
    def parallel(self) -> Parallel:
        """For ``sw.parallelize``: ``**imported.parallel.options()``."""
        return load_values(self.run["parallel"], Parallel, origin=self.dialect).config

    def yaml(self) -> str:
        """The run file."""
        from io import StringIO

        from ruamel.yaml import YAML

        writer, text = YAML(typ="safe", pure=True), StringIO()
        writer.default_flow_style, writer.sort_base_mapping_type_on_output, writer.width = None, False, 110
        writer.dump({name: self.run[name] for name in SECTIONS if name in self.run}, text)
        return text.getvalue()

    def __str__(self) -> str:
        lines = [str(one) for verdict in _SHOWN_FIRST for one in self.findings if one.verdict == verdict]
        lines += [f"missing  {text}" for text in self.missing]
        return "\n".join([*lines, *([f"samples  {self.samples}"] if self.samples else [])])


def imported(
    *sources: Any,
    dialect: str | None = None,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    allow: tuple[str, ...] = (),
    exact: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Imported:
    """Imports sources as one configuration, whose run file is not checked yet; see :func:`shardwise.from_config`.

    Raises:
        ConfigError: a key would silently change training, or is not known; all of them are named.
    """
    if dialect is not None and dialect not in systems():
        fix = did_you_mean(dialect, systems(), what="systems")
        raise ConfigError(f"dialect={dialect!r}", why="there is no such system", fix=fix)
    for name, count in (("ranks", ranks), ("ranks_per_node", ranks_per_node)):
        if count is not None and (type(count) is not int or count < 1):
            fix = f"give {name} a whole number from 1 on"
            raise ConfigError(f"{name}={count!r}", why="a run has one rank or more", fix=fix)
    if ranks and ranks_per_node and ranks % ranks_per_node:
        raise ConfigError(
            f"ranks={ranks} with ranks_per_node={ranks_per_node}",
            why="each machine has as many",
            fix=f"use a multiple of {ranks_per_node}, or another ranks_per_node",
        )
    if not sources and environ is None:
        raise ConfigError("no configuration", why="there is nothing to import", fix="name a file, or use --env")
    read = list(_read_all(sources, dialect, allow, environ))
    read.sort(
        key=lambda one: load(one.table.name).head.get("kind") != "run"
    )  # a whole run first, what is beside it then
    facts, *others = read
    for other in others:
        merge(facts, other, is_within="wins" in other.decides.head)
    _refuse_all(facts)
    facts.is_exact = exact
    try:
        settle(facts, ranks, ranks_per_node)
    except RefusedError as error:
        facts.refuse_error(error)
    _refuse_all(facts)
    for name in allow:
        if name not in facts.left_out:
            why = "no such key is refused, so it would have no effect"
            raise ConfigError(f"--allow {name}", why=why, fix="remove it")
    facts.end_of_notes()
    run = {section: keys for section, keys in facts.run.items() if keys}
    return Imported(
        dialect=facts.table.name,
        run=run,
        findings=tuple(_findings(facts)),
        missing=tuple(facts.missing),
        followed=tuple(sorted(facts.followed)),
        samples=facts.arithmetic,
    )


def _read_all(
    sources: tuple[Any, ...], dialect: str | None, allow: tuple[str, ...], environ: Mapping[str, str] | None
) -> Iterator[Facts]:
    for place, source in enumerate(sources):
        folder, name = None, dialect if place == 0 else None
        if isinstance(source, str | os.PathLike):
            folder = Path(source).parent
            values: Mapping[str, Any] = read_file(Path(source)).values
        elif isinstance(source, Mapping):
            values = {str(key): value for key, value in source.items()}
        else:
            name, values = of_object(source)
        if name is not None and name == dialect:
            refuse_other_system(name, values)
        facts = Facts(load(name or detect(interpolated(values))), allow=allow)
        yield collect(values, facts, folder)
    if environ is not None:
        notes = Facts(load(systems()[0]), allow=allow)
        name, values = of_environment(environ, notes)
        facts = Facts(load(name), allow=allow)
        facts.notes, facts.refused, facts.left_out = notes.notes, notes.refused, notes.left_out
        yield collect(values, facts, None)


def settle(facts: Facts, total: int | None, per_node: int | None) -> None:
    is_run = facts.table.head.get("kind") == "run" and not facts.is_record
    _refuse_auto(facts)
    ranks = settle_ranks(facts, total, per_node)
    settle_positions(facts)
    is_sharded = settle_layout(facts, ranks)
    settle_regions(facts, ranks.tp)
    settle_batch(facts, ranks)
    settle_precision(facts, is_sharded, ranks)
    settle_sharding(facts, is_sharded)
    settle_adapters(facts)
    settle_remat(facts)
    settle_compile(facts)
    steps = settle_length(facts)
    settle_optimizer(facts)
    settle_schedule(facts, steps)
    if facts.get("launch.device") == "cpu":
        facts.drop("train.tf32")
    if is_run:
        settle_data(facts)
        settle_validation(facts, steps)
        settle_checkpoints(facts, steps)
        settle_figures(facts, steps)
    elif facts.get("model.build") is None and facts.get("model.hf") is None:
        text = "this file does not say what is trained: a run without them trains the built-in demo"
        facts.missing.append(f"model.hf or model.build, and data.path: {text}")
    _leave_open(facts)
    if "clip" not in facts.known:
        facts.put("train.max_grad_norm", None)
    if "optim" in facts.run and "schedule" not in facts.run:
        facts.put("schedule.name", "constant")
        facts.put("schedule.warmup_steps", 0)
        facts.missing.append("schedule: no curve is named, so the rate is constant, unless a script makes one")
    for key, row in facts.table.rows.items():
        if row.is_of_all and (is_run or key == "(loss)"):
            verdict = row.verdicts[""]
            there = f" (there: {row.meaning})" if verdict == "changed" else ""
            facts.notes.append(Note(key, None, False, verdict, f"{row.says['']}{there}", is_used=True))


def _leave_open(facts: Facts) -> None:
    """What decides a run, and the source does not say, has to be written: no default of ours stands in its place."""
    has_own = facts.get("optim.build") is not None  # whose class has a rate of its own
    is_named, has_rate = facts.has("optimizer"), facts.get("optim.lr") is not None
    which = "learning rate" if is_named else "optimizer (optim.name), and which learning rate,"
    for key, other, text in (
        (
            "data.seq_len",
            None,
            "how long samples are is not said, and there none may be cut: write the longest, in tokens",
        ),
        ("data.global_batch", None, "how many samples a step has over all ranks is not said"),
        (
            "train.steps",
            facts.get("train.epochs"),
            "how long the run is is not said: write it, or train.epochs in its place",
        ),
        ("optim.lr", has_own or None, f"which {which} is not said"),
        (
            "optim.name",
            is_named or not has_rate or None,
            "the rate is said, and of which optimizer not, nor its betas and weight decay: write them, else ours are used",
        ),
    ):
        if facts.get(key) is None and other is None:
            facts.put(key, UNWRITTEN)
            facts.missing.append(f"{key}: {text}")


def _refuse_auto(facts: Facts) -> None:
    """``auto`` that the outer configuration fills in, and there is none."""
    if facts.table.head.get("auto") != "refused":
        return
    for name, value in facts.table.pairs("filled").items():  # which it fills in itself, where there is no other
        if name in facts.known and facts.known[name].value == "auto":
            facts.known[name] = Fact(literal(value), facts.known[name].note)
    for name in [name for name, fact in facts.known.items() if fact.value == "auto" and name != "load_dtype"]:
        if name in facts.table.words("by_script"):
            facts.say(
                name, "dropped", "the data loader of a script fills it in: write data.global_batch, data.micro_batch"
            )
        else:
            text = "another configuration fills it in: import that one, which names this file, or write the value"
            facts.say(name, "refused", text)
        del facts.known[name]


def _findings(facts: Facts) -> Iterator[Finding]:
    for note in facts.notes:
        if note.is_given or (note.is_used and (note.ours or note.verdict == "changed" or note.key.startswith("("))):
            assert note.verdict in VERDICTS
            ours = tuple(f"{key}={shown}" for key, shown in note.ours.items())
            yield Finding(note.key, note.value, note.is_given, note.verdict, note.say, ours)


def _refuse_all(facts: Facts) -> None:
    """Raises ConfigError for all that is refused, each with its reason and what to write."""
    found = list({(one.key, one.text): one for one in facts.refused}.values())
    if not found:
        return
    by_text: dict[str, list[str]] = {}
    for one in found:
        by_text.setdefault(one.text, []).append(one.given)
    given = ", ".join(one.given for one in found)
    if len(by_text) == 1:
        why, fix = _parts(found[0].text)
        raise ConfigError(given, why=why, fix=fix)
    raise ConfigError(
        given,
        why="each of them would train something else than there, or is not known",
        fix="\n       ".join(f"{', '.join(keys)}: {text}" for text, keys in by_text.items()),
    )


def _parts(text: str) -> tuple[str, str]:
    """A sentence of a row as why and fix: ``there is no fp8: write bf16``, or what to write alone."""
    match = re.match(r"(?!(?:write|remove|set|give|name|import|use) )([^:{]+): (.+)", text)
    return (match[1], match[2]) if match else ("there is nothing of that meaning here", text)
