"""Says which fields of other systems' own records have a row in their table, and writes a page about each system from its table::

    python tools/dialects.py --report               # records of what is installed here: fields, rows, defaults; verdicts of each table
    python tools/dialects.py --report SOURCES        # also those of packages unpacked below a folder: trl, oumi, torchtitan, deepspeed, ...
    python tools/dialects.py --published FOLDER      # import each configuration below a folder: how many, and why not
    python tools/dialects.py                         # write docs/other-systems/NAME.md and the table of docs/other-systems.md
    python tools/dialects.py --check                 # exit 1 if these pages are not what the tables say

A field without a row, or with another default than the row says, is shown with its name. Of installed packages that is a failure
of the tests too; of newer ones it is a line to read.
"""

import argparse
import ast
import dataclasses
import enum
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(1, str(ROOT / "tests"))

from dialect_files import BASE, values_of, with_key  # noqa: E402

from shardwise.config.sources import read_file  # noqa: E402
from shardwise.dialects.answers import imported  # noqa: E402
from shardwise.dialects.collect import detect, interpolated  # noqa: E402
from shardwise.dialects.table import (  # noqa: E402
    Row,
    exists,
    load,
    names,
    systems,
)
from shardwise.dialects.values import ABSENT, RefusedError, short, word_of  # noqa: E402
from shardwise.errors import ConfigError  # noqa: E402
from shardwise.run.imported import from_config  # noqa: E402

PAGE, PAGES = ROOT / "docs" / "other-systems.md", ROOT / "docs" / "other-systems"
FIXTURES = ROOT / "tests" / "dialects" / "fixtures"
UNKNOWN: Any = type("Unknown", (), {})()  # a default that is no plain value


# ---- records of the systems ------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """Fields of a system that are keys of a section of its configurations."""

    table: str
    section: str
    package: str  # as it is installed or unpacked
    place: str  # module:class, module:function, or file:class of a source
    key: Callable[[str], str] = str
    without: tuple[str, ...] = ()  # what no configuration says: objects, groups of ranks


def _of_plugin(field: str) -> str:
    others = {"fsdp_version": field, "cpu_offload": "fsdp_offload_params", "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap"}  # fmt: skip
    return others.get(field, f"fsdp_{field}")


_STAGE_3 = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save")  # fmt: skip
INSTALLED = (
    Record("transformers", "", "transformers", "transformers:TrainingArguments"),
    Record("accelerate", "", "accelerate", "accelerate.commands.config.config_args:ClusterConfig"),
    Record(
        "accelerate", "fsdp_config", "accelerate", "accelerate.utils:FullyShardedDataParallelPlugin", _of_plugin,
        ("mixed_precision_policy", "state_dict_config", "optim_state_dict_config", "param_init_fn", "limit_all_gathers"),
    ),
    Record(
        "accelerate", "parallelism_config", "accelerate", "accelerate.utils:ParallelismConfig", "parallelism_config_{}".format,
        ("device_mesh", "tp_handler", "cp_handler", "sp_handler"),
    ),
    Record("fsdp1", "", "torch", "torch.distributed.fsdp:FullyShardedDataParallel.__init__", str, ("module", "mixed_precision", "cpu_offload")),
    Record("fsdp1", "mixed_precision", "torch", "torch.distributed.fsdp:MixedPrecision", str, ("_module_classes_to_ignore",)),
    Record(
        "fsdp1", "", "torch", "torch.nn.parallel:DistributedDataParallel.__init__", str,
        ("module", "device_ids", "output_device", "dim", "check_reduction", "mixed_precision", "delay_all_reduce_named_params",
         "param_to_hook_all_reduce", "skip_all_reduce_unused_params"),
    ),
    Record("fabric", "", "lightning-fabric", "lightning_fabric:Fabric.__init__"),
    Record(
        "fabric", "strategy.init_args", "lightning-fabric", "lightning_fabric.strategies:FSDPStrategy.__init__", str,
        ("accelerator", "parallel_devices", "cluster_environment", "precision", "checkpoint_io"),
    ),
    Record("fabric", "strategy.init_args", "lightning-fabric", "lightning_fabric.strategies:ModelParallelStrategy.__init__"),
    Record("trl", "", "trl", "trl:SFTConfig"),
    Record("trl", "", "trl", "trl:ModelConfig"),
)  # fmt: skip
SOURCES = (
    Record("trl", "", "trl", "trl/trainer/sft_config.py:SFTConfig"),
    Record("trl", "", "trl", "trl/trainer/model_config.py:ModelConfig"),
    *(
        Record("oumi", section, "oumi", f"oumi/core/configs/params/{file}.py:{cls}", str, without)
        for section, file, cls, without in (
            ("fsdp", "fsdp_params", "FSDPParams", ()), ("training", "training_params", "TrainingParams", ()),
            ("model", "model_params", "ModelParams", ()), ("deepspeed", "deepspeed_params", "DeepSpeedParams", ()), ("peft", "peft_params", "PeftParams", ()),
        )
    ),
    Record("deepspeed", "zero_optimization", "deepspeed", "deepspeed/runtime/zero/config.py:DeepSpeedZeroConfig", lambda f: f"stage3_{f}" if f in _STAGE_3 else f),
    Record("deepspeed", "fp16", "deepspeed", "deepspeed/runtime/precision_config.py:DeepSpeedFP16Config"),
    Record("deepspeed", "bf16", "deepspeed", "deepspeed/runtime/precision_config.py:DeepSpeedBF16Config"),
    Record("deepspeed", "tensor_parallel", "deepspeed", "deepspeed/runtime/tensor_parallel/config.py:TPTrainingConfig"),
    Record("nemo", "peft", "nemo_automodel", "nemo_automodel/components/_peft/lora.py:PeftConfig"),
    Record("nemo", "model.backend", "nemo_automodel", "nemo_automodel/components/models/common/utils.py:BackendConfig"),
    Record("nemo", "distributed", "nemo_automodel", "nemo_automodel/components/distributed/config.py:FSDP2Config"),
    *(
        Record("optimus", f"model_transforms.{section}", "optimus_dl", f"optimus_dl/modules/model_transforms/distributed.py:{cls}")
        for section, cls in (("fully_shard", "FullyShardTransformConfig"), ("fully_shard.mixed_precision", "MixedPrecisionConfig"), ("ddp", "DDPTransformConfig"))
    ),
    *(
        Record("torchtitan", section, "torchtitan", f"torchtitan/config/{file}.py:{cls}")
        for file in ("job_config", "configs")
        for section, cls in (
            ("training", "Training"), ("training", "TrainingConfig"), ("parallelism", "Parallelism"), ("parallelism", "ParallelismConfig"),
            ("compile", "Compile"), ("compile", "CompileConfig"), ("comm", "Comm"), ("comm", "CommConfig"), ("debug", "DebugConfig"),
        )
    ),
)  # fmt: skip


class Coverage(NamedTuple):
    """What a table knows of a record."""

    record: Record
    version: str
    fields: int
    missing: list[str]
    other: list[str]


def covered() -> Iterator[Coverage]:
    """Of each record that is installed here."""
    for record in INSTALLED:
        try:
            number = version(record.package)
        except PackageNotFoundError:
            continue
        module, _, name = record.place.partition(":")
        yield _coverage(record, number, _fields(importlib.import_module(module), name))


def covered_sources(folder: Path) -> Iterator[Coverage]:
    """Of each record in the source text of packages below a folder."""
    for record in SOURCES:
        file, _, name = record.place.partition(":")
        for path in sorted(folder.glob(f"{record.package}*/{file}")):
            if fields := _fields_in(path.read_text(encoding="utf-8"), name):
                yield _coverage(record, path.relative_to(folder).parts[0], fields)


def _fields(module: Any, name: str) -> dict[str, Any]:
    for part in name.split("."):
        module = getattr(module, part)
    if dataclasses.is_dataclass(module):
        return {
            one.name: UNKNOWN if one.default is dataclasses.MISSING else one.default
            for one in dataclasses.fields(module)
        }
    signature = inspect.signature(module).parameters.values()
    given = [one for one in signature if one.name != "self" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return {one.name: UNKNOWN if one.default is one.empty else one.default for one in given}


def _fields_in(text: str, name: str) -> dict[str, Any]:
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == name]
    lines = (item for node in classes for item in node.body if isinstance(item, ast.AnnAssign))
    return {item.target.id: _literal(item.value) for item in lines if isinstance(item.target, ast.Name) and item.target.id[0] != "_"}  # fmt: skip


def _literal(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Call):
        given = {one.arg: one.value for one in node.keywords}
        first = node.args[0] if node.args and "default_factory" not in given else None
        return _literal(given.get("default", first))
    if isinstance(node, ast.Attribute):
        return node.attr
    try:
        return UNKNOWN if node is None else ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


def _coverage(record: Record, number: str, fields: Mapping[str, Any]) -> Coverage:
    table, missing, other = load(record.table), [], []
    fields = {name: default for name, default in fields.items() if name not in record.without}
    for name, default in fields.items():
        key = ".".join(filter(None, (record.section, record.key(name))))
        row = table.find(key)
        if row is None and not table.has_section(key):
            missing.append(key)
        elif row is not None and row.key == key and not _is_same(row, key, default):
            other.append(f"{key}: {default!r} there, {short(row.default)} in the table")
    return Coverage(record, number, len(fields), missing, other)


def _is_same(row: Row, key: str, default: Any) -> bool:
    if row.default is ABSENT or default is UNKNOWN or default is None or dataclasses.is_dataclass(default):
        return True
    if isinstance(default, enum.Enum):
        default = default.value if isinstance(default.value, str) else default.name
    if isinstance(default, float | int) and isinstance(row.default, float | int):
        return default == row.default
    try:
        same = word_of(row.coerced(default, key)) == word_of(row.coerced(row.default, key))
    except RefusedError:
        same = str(default).lower() == str(row.default).lower()
    return same or row.action_of(word_of(default)) == row.action_of(word_of(row.default)) != ()


def report(folder: Path | None) -> str:
    lines = []
    found = [*covered(), *(covered_sources(folder) if folder else ())]
    for record, number, fields, missing, other in found:
        gaps = [f"no row: {', '.join(missing)}"] * bool(missing) + [f"other default: {'; '.join(other)}"] * bool(other)
        place = f"{record.package} {number}" if record in INSTALLED else f"{number}, as text"
        lines.append(
            f"{record.table:13}{record.section or '-':38}{fields:4} fields, {place}{''.join(f'; {gap}' for gap in gaps)}"
        )
    total = sum(one.fields for one in found)
    lines.append(f"{total} fields of {len(found)} records, {sum(len(one.missing) for one in found)} without a row, {sum(len(one.other) for one in found)} with another default\n")  # fmt: skip
    lines.append(f"{'table':13}{'keys':>6}{'kept':>6}{'changed':>9}{'dropped':>9}{'refused':>9}  follows")
    whole: Counter[str] = Counter()
    for name in names():
        counts = _verdicts(name)
        whole.update(counts)
        lines.append(_line(name, counts, load(name).head.get("version", "")))
    return "\n".join([*lines, _line("all", whole, "")])


def _line(name: str, counts: Mapping[str, int], follows: str) -> str:
    numbers = (
        f"{sum(counts.values()):6}{counts['kept']:6}{counts['changed']:9}{counts['dropped']:9}{counts['refused']:9}"
    )
    return f"{name:13}{numbers}  {follows}".rstrip()


def rows_of(name: str) -> list[Row]:
    """The rows of a table, without those of another that it extends."""
    extended = load(name).head.get("extends")
    others = load(extended).rows if extended else {}
    return [row for key, row in load(name).rows.items() if others.get(key) is not row and not row.is_of_all]


def _verdicts(name: str) -> Counter[str]:
    return Counter(_settled(row.verdicts[""]) for row in rows_of(name))


def _settled(verdict: str) -> str:
    waits = verdict.removeprefix("needs ")
    return verdict if waits == verdict else "kept" if exists(waits) else "refused"


# ---- published configurations ----------------------------------------------------------------------------------------


def published(folder: Path, ranks: int = 8) -> str:
    """How many of the configurations below a folder are imported, by their system, and why the others are refused."""
    counts: dict[str, Counter[str]] = {}
    causes: Counter[str] = Counter()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml", ".json", ".toml")):
        try:
            name = detect(interpolated(read_file(path).values))
        except ConfigError:
            continue  # of none of these systems
        found = counts.setdefault(name, Counter())
        try:
            from_config(path, ranks=ranks, ranks_per_node=ranks)
            found["imported"] += 1
        except ConfigError as error:
            found["refused"] += 1
            lines = error.fix.split("\n       ") if "\n" in error.fix else [f"{error.given}: {error.why}: {error.fix}"]
            causes.update(f"{name}: {line}" for line in lines)
            print(f"{path.relative_to(folder)}: {error.given}", file=sys.stderr)
    lines = [f"{name:13}{found['imported']:5} imported, {found['refused']:4} refused" for name, found in counts.items()]
    return "\n".join([*lines, *(f"{count:5} {cause}" for cause, count in causes.most_common())])


# ---- pages -----------------------------------------------------------------------------------------------------------


def page(name: str) -> str:
    """The page of one system: what each key becomes, what is different, what is refused."""
    table = load(name)
    extended = table.head.get("extends")
    of_all = [row for key, row in table.rows.items() if row.is_of_all]
    mapped, refused, dropped = [], [], []
    for row in rows_of(name):
        verdict = _settled(row.verdicts[""])
        ours = _ours(row)
        if verdict in ("kept", "changed") or (ours and verdict == "dropped"):
            mapped.append((row.key, _default(row), ours or ("always so" if verdict == "kept" else ""), _different(row)))
        refused += _refusals(row, whole=verdict == "refused")
        if verdict == "dropped" and not ours:
            dropped.append((row.key, row.says[""]))
    lines = [
        f"# Configurations of {name}",
        "",
        f"`shardwise import-config {'--env' if 'dialect' in table.head else f'FILE --from {name}'}` makes a run file of one, and answers each key: see [configurations of other systems](../other-systems.md).",
        f"The table follows {table.head.get('version', '')}.",
        *([f"All keys of [{extended}]({extended}.md) count too; these are others, or have other defaults."] if extended else []),
        "",
        *[f"* {_text(row.says[''])}" + (f" (there: {_text(row.meaning)})" if row.verdicts[""] == "changed" else "") for row in of_all],
        *([""] if of_all else []),
        *_table("Keys with a meaning here", ("key there", "default there", "here", "what is different"), mapped),
        *_table("Refused, until it is written otherwise", ("key or value", "why, and what to write"), refused),
        *_table("Not needed here", ("key", "why"), dropped),
        "",
        "*Written by `python tools/dialects.py`.*",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    body = [f"| `{key}` | {' | '.join(_text(cell) for cell in cells)} |" for key, *cells in rows]
    return [f"## {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *body, ""]


def _text(cell: str) -> str:
    return cell.replace("<", "&lt;").replace("{}", "N")


def _default(row: Row) -> str:
    return "" if row.default is ABSENT else short(row.default)


def _different(row: Row) -> str:
    """What is different, of the value that is usual and of others."""
    said = ["changed"] if row.verdicts[""] == "changed" and not row.says[""] else []
    for word, text in row.says.items():
        verdict = row.verdicts.get(word, row.verdicts[""])
        if text and verdict in ("kept", "changed"):  # what waits for a technique says what is so without it
            changed = "changed: " if verdict == "changed" else ""
            said.append(f"{word}: {changed}{text}" if word not in ("", "*") else f"{changed}{text}")
    return "; ".join(dict.fromkeys(said))


def _refusals(row: Row, *, whole: bool) -> list[tuple[str, str]]:
    if whole:
        return [(row.key, row.says[""])]
    found: dict[str, list[str]] = {}
    for word, verdict in row.verdicts.items():
        if word and _settled(verdict) == "refused":
            found.setdefault(row.says.get(word) or row.says[""], []).append("any other" if word == "*" else word)
    return [(f"{row.key}: {', '.join(words)}", text) for text, words in found.items()]


@cache
def _keys_of_facts() -> dict[str, dict[str, None]]:
    """Fact -> our keys that it becomes, in the configurations that the tests import, and in small ones with one key of each fact more."""
    found: dict[str, dict[str, None]] = {}
    for path in sorted(FIXTURES.glob("*/*")):
        if path.suffix in (".json", ".yaml", ".toml") and ".expected" not in path.name:
            _gather(found, path.parent.name, path)
    for name in (name for name in names() if name in BASE):
        for row in rows_of(name):
            if any(fact not in found for fact in _facts_of(row)) and not row.within:
                for value in values_of(row):
                    _gather(found, name, with_key(name, row.key, value))
    return found


def _gather(found: dict[str, dict[str, None]], name: str, source: Any) -> None:
    try:
        made = imported(source, dialect=name, ranks=8, ranks_per_node=4)
    except ConfigError:
        return
    for one in made.findings:
        row = load(name).find(one.key)
        for fact in _facts_of(row) if row is not None and one.ours else ():
            found.setdefault(fact, {}).update(dict.fromkeys(ours.partition("=")[0] for ours in one.ours))


def _facts_of(row: Row) -> list[str]:
    actions = (action for part in row.actions.values() for action in part)
    return [action[1:].partition("=")[0] for action in actions if action.startswith("@")]


def _ours(row: Row) -> str:
    """What a key becomes here."""
    if row.within:
        return f"read as well: [{row.within}]({row.within}.md)" if row.within in systems() else "read as well"
    if row.alias:
        return f"as `{row.alias}`"
    actions = [action.partition("=")[0].removesuffix("+") for part in row.actions.values() for action in part]
    keys = {key for key in actions if not key.startswith("@")}
    facts = {key for fact in _facts_of(row) for key in _keys_of_facts().get(fact, ())}
    return ", ".join(f"`{key}`" for key in sorted(keys | facts)) or ("read with others" if actions else "")


def index() -> str:
    """The table of systems."""
    lines = ["| system | keys | kept | changed | not needed | refused | follows |", "|---|--:|--:|--:|--:|--:|---|"]
    for name in names():
        counts, follows = _verdicts(name), load(name).head.get("version", "").partition(" (")[0]
        numbers = " | ".join(str(counts[verdict]) for verdict in ("kept", "changed", "dropped", "refused"))
        lines.append(f"| [{name}](other-systems/{name}.md) | {sum(counts.values())} | {numbers} | {follows} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    made = {PAGES / f"{name}.md": page(name) for name in names()}
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition("<!-- systems -->\n")
    _, end, after = rest.partition("\n<!-- /systems -->")
    return {**made, PAGE: f"{before}{mark}{index()}{end}{after}"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", nargs="?", const="", metavar="SOURCES", help="print what the tables know")
    parser.add_argument(
        "--published", metavar="FOLDER", help="import each configuration below a folder, and say why not"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    given = parser.parse_args(argv)
    if given.report is not None:
        print(report(Path(given.report) if given.report else None))
        return 0
    if given.published is not None:
        print(published(Path(given.published)))
        return 0
    made = pages()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if given.check:
            print(f"{path.relative_to(ROOT)} is not what the tables say: python tools/dialects.py", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path], encoding="utf-8")
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
