"""Writes docs/api.md: every public name, its signature and its docstring as Markdown.

Public is what ``__all__`` of shardwise and of shardwise.testing names; of a class also its methods and properties. Docstrings
are Google's style with reStructuredText's roles, as the code has them. A docstring without a first line, or that does not name
an argument, is reported, and the exit status is 1::

    python tools/api_pages.py            # write docs/api.md
    python tools/api_pages.py --check    # exit 1 if the page is not what the code says
"""

import argparse
import enum
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import shardwise  # noqa: E402
import shardwise.testing  # noqa: E402
from shardwise.config.check import describe_type, doc_of  # noqa: E402
from shardwise.config.record import default_of, hints_of  # noqa: E402
from shardwise.config.render import flow_text  # noqa: E402

__all__ = ["GROUPS", "main", "markdown", "page", "problems"]

GROUPS: dict[str, tuple[str, ...]] = {
    "Start": ("init", "World", "Axis", "Layout", "parallelize", "describe", "world_of"),
    "Train": (
        "TrainStep", "StepOutput", "StepState", "evaluate", "next_token_loss", "model_loss", "linear_cross_entropy",
        "TaskModel", "parameter_groups", "adapter_off",
    ),
    "A loop of your own": (
        "window", "accumulate", "count_tokens", "clip_grad_norm_", "clip_grad_value_", "unscale_gradients_", "local_optimizer",
        "full_tensor", "shard_like", "parameter_norms", "parameter_penalty",
    ),
    "Data": ("Loader", "MicroBatch", "make_labels", "shift_labels", "default_collate", "pad_collate", "SFTDataset"),
    "Records of options": (
        "Options", "Parallel", "Sharding", "Prefetch", "DDP", "Precision", "Remat", "Compile", "TensorParallel", "ContextParallel", "LoRA", "Quantize",
        "transform",
        "from_fsdp1",
    ),
    "Other systems": ("from_config", "Imported", "Finding"),
    "Weights": (
        "load_weights", "save_weights", "load_adapter", "save_adapter", "adapter_off", "LoadReport", "full_state_dict", "load_full_state_dict", "full_optimizer_state_dict",
        "load_full_optimizer_state_dict", "state_dict", "load_state_dict", "StateDictType", "gathered",
    ),
    "Checkpoints": ("CheckpointManager", "Stopped"),
    "Tensor parallelism by hand": (
        "attend", "cut_sequence", "join_sequence", "register_tp_plan", "column_parallel_linear", "row_parallel_linear", "parallel_embedding", "tp_copy", "tp_gather",
        "tp_reduce", "tp_scatter",
    ),
    "Recipe and comparison": ("Recipe", "recipe_of", "verify"),
    "Errors": (
        "ShardwiseError", "CheckpointError", "ConfigError", "LayoutError", "NonFiniteError", "PlanError", "RankError",
        "UnsupportedError", "UsageError", "VerifyError",
    ),
    "Tests": ("testing.RankPool",),
}  # fmt: skip
MADE_BY_INIT = ("World", "Axis")
"""Classes whose objects come from :func:`init`: how they are built is no part of what is public."""

SECTIONS = ("Args", "Returns", "Yields", "Raises", "Attributes", "Example", "Note")


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Make docs/api.md from the docstrings.")
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "api.md", help="the page to write or compare")
    args = parser.parse_args(argv)
    objects = public()
    found = [*misplaced(objects), *(problem for name, value in objects.items() for problem in problems(name, value))]
    for problem in found:
        print(problem, file=sys.stderr)
    text = page(objects)
    if args.check:
        current = args.page.read_text(encoding="utf-8") if args.page.exists() else ""
        if current != text:
            print(f"{args.page} is not what the code says: run python tools/api_pages.py", file=sys.stderr)
            return 1
    else:
        args.page.write_text(text, encoding="utf-8")
        print(f"{args.page}: {len(objects)} names")
    return 1 if found else 0


def public() -> dict[str, Any]:
    """Public name -> object."""
    found = {name: getattr(shardwise, name) for name in dir(shardwise)}
    # The package `verify` takes the place of the function of that name where it was imported, and can be called.
    found = {name: value.__call__ if isinstance(value, ModuleType) else value for name, value in found.items()}
    return found | {f"testing.{name}": getattr(shardwise.testing, name) for name in shardwise.testing.__all__}


def misplaced(objects: Mapping[str, Any]) -> Iterator[str]:
    """What is public and in no group, or in one and not public."""
    grouped = [name for names in GROUPS.values() for name in names]
    for name in sorted(set(objects) ^ set(grouped)):
        yield f"{name}: {'public, and in none of GROUPS' if name in objects else 'in GROUPS, and not public'}"


# ---- what a docstring has to say -----------------------------------------------------------------------------------


def problems(name: str, value: Any) -> Iterator[str]:
    """What the docstrings of a public name lack."""
    own: str = (value.__doc__ if not inspect.isclass(value) else vars(value).get("__doc__")) or ""
    if not own.strip():
        yield f"{name}: no docstring"
        return
    if not inspect.isclass(value):
        yield from _unnamed(name, value, own)
        return
    if "__init__" in vars(value) and name not in MADE_BY_INIT and not issubclass(value, (msgspec.Struct, enum.Enum)):
        yield from _unnamed(name, value.__init__, own)
    for key, member in members(value):
        text = _function(member).__doc__ or ""
        if not text.strip() and key not in _items(_sections(inspect.cleandoc(own)).get("Attributes", "")):
            yield f"{name}.{key}: no docstring"


def _unnamed(name: str, function: Callable[..., Any], text: str) -> Iterator[str]:
    """Arguments that no section names."""
    named = {
        word
        for section in ("Args", "Attributes")
        for word in _items(_sections(inspect.cleandoc(text)).get(section, ""))
    }
    for argument in inspect.signature(function).parameters:
        if argument not in ("self", "cls", "args", "kwargs") and argument not in named:
            yield f"{name}: its docstring has no Args for {argument}"


def _items(section: str) -> set[str]:
    heads = re.findall(r"^(\*{0,2}\w[\w, *]*):", inspect.cleandoc(section), re.MULTILINE)
    return {word.strip().lstrip("*") for head in heads for word in head.split(",")}


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that a class itself brings in, in order."""
    for key, member in vars(cls).items():
        is_own = not key.startswith("_") and not any(hasattr(base, key) for base in cls.__bases__)
        if is_own and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)):
            yield key, member


def _function(member: Any) -> Any:
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(objects: Mapping[str, Any]) -> str:
    """The Markdown page."""
    lines = [
        "# API",
        "",
        "Every public name, as `import shardwise as sw` has it. This page is made from the docstrings: `make docs`. How they are used",
        "together is on the [other pages](index.md); keys of a configuration are in `shardwise train --help`.",
        "",
        "| | |",
        "|---|---|",
    ]
    for title, names in GROUPS.items():
        lines.append(f"| [{title}](#{title.lower().replace(' ', '-')}) | {', '.join(_link(name) for name in names)} |")
    for title, names in GROUPS.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", *_entry(name, objects[name])]
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> list[str]:
    lines = [f"### {name}", ""]
    spelled = f"sw.{name}" if not name.startswith("testing.") else f"shardwise.{name}"
    text = inspect.cleandoc(value.__doc__ or "")
    if not inspect.isclass(value):
        return [*lines, *_code(signature(spelled, value)), "", markdown(text)]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    is_record = issubclass(value, msgspec.Struct)
    if issubclass(value, enum.Enum) or (issubclass(value, BaseException) and "__init__" not in vars(value)):
        shown = [f"class {spelled}({bases})"]
    elif name in MADE_BY_INIT:
        shown = [f"class {spelled}"]
    else:
        shown = signature(spelled, value, result=False) if not is_record else [f"{spelled}(...)"]
    lines += [*_code(shown), "", markdown(text)]
    if issubclass(value, enum.Enum):
        lines += ["", "Values: " + ", ".join(f"`{member.name}`" for member in value) + "."]
    if is_record and value.__struct_fields__:
        lines += ["", "| field | default | | |", "|---|---|---|---|"]
        lines += [_field(value, key, hint) for key, hint in hints_of(value).items()]
    for key, member in members(value):
        if not _function(member).__doc__:  # a property that the class has among its attributes
            continue
        what = (
            [f"{name.rpartition('.')[2]}.{key}"]
            if isinstance(member, property)
            else signature(f".{key}", _function(member))
        )
        lines += [
            "",
            f"#### {name.removeprefix('testing.')}.{key}",
            "",
            *_code(what),
            "",
            markdown(inspect.cleandoc(_function(member).__doc__ or "")),
        ]
    return lines


def _field(cls: type[msgspec.Struct], key: str, hint: Any) -> str:
    field = next(field for field in msgspec.structs.fields(cls) if field.name == key)
    try:
        default = flow_text(default_of(cls, key)) if not field.required else "required"
    except Exception:  # a record inside a record
        default = "its defaults"
    kind = re.sub(
        r"<class '(?:\w+\.)*(\w+)'>|(?:\w+\.)+([A-Z]\w*)", lambda found: found[1] or found[2], describe_type(hint)
    )
    return f"| `{key}` | `{default}` | {_cell(kind)} | {_cell(doc_of(hint))} |"


def signature(name: str, function: Callable[..., Any], *, result: bool = True) -> list[str]:
    """A signature as lines of code, with types by their last names."""
    found = inspect.signature(function)
    shown, star = [], False
    for argument in found.parameters.values():
        if argument.name in ("self", "cls"):
            continue
        if argument.kind is argument.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        star = star or argument.kind is argument.VAR_POSITIONAL
        mark = (
            "*" if argument.kind is argument.VAR_POSITIONAL else "**" if argument.kind is argument.VAR_KEYWORD else ""
        )
        kind = "" if argument.annotation is argument.empty else f": {_type(argument.annotation)}"
        default = "" if argument.default is argument.empty else f"{' = ' if kind else '='}{_default(argument.default)}"
        shown.append(f"{mark}{argument.name}{kind}{default}")
    after = f" -> {_type(found.return_annotation)}" if result and found.return_annotation is not found.empty else ""
    line = f"{name}({', '.join(shown)}){after}"
    return [line] if len(line) <= 100 else [f"{name}(", *(f"    {part}," for part in shown), f"){after}"]


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"~(\w+)", r"\1", re.sub(r"\b(?:[A-Za-z_]\w*\.)+([A-Z]\w*)", r"\1", text)).replace("NoneType", "None")
    # as newer versions of Python write it
    return re.sub(r"\bUnion\[(\w+), (\w+(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\])?)\]", r"\1 | \2", text)


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = getattr(value, "__name__", None) or repr(value)
    return "..." if text.startswith("<") else text


# ---- docstrings as Markdown ------------------------------------------------------------------------------------------


def markdown(text: str) -> str:
    """A docstring as Markdown: sections become lists, roles become links or code, indented examples become blocks."""
    parts = _sections(text)
    out = [_prose(parts.pop(""))]
    for title, body in parts.items():
        body = inspect.cleandoc("\n" + body)
        if title == "Example":
            out.append("\n".join(_code([_DOCTEST.sub("", line) for line in body.splitlines()])))
        elif (items := _list(body)) is not None:
            out.append(f"**{title}**\n\n" + "\n".join(items))
        else:
            out.append(f"**{title}** {_prose(body)}")
    return "\n\n".join(part for part in out if part)


_DOCTEST = re.compile(r"\s*# doctest: \+\w+")


def _sections(text: str) -> dict[str, str]:
    """Title -> text below it; "" for what comes first."""
    found: dict[str, list[str]] = {"": []}
    title = ""
    for line in text.splitlines():
        head = re.fullmatch(rf"((?:{'|'.join(SECTIONS)})(?: \([^)]*\))?)s?::?", line)
        if head:
            title = head[1]
            found.setdefault(title, [])
        elif title and line and not line.startswith(" "):  # prose after a section
            title = ""
            found[""] += ["", line]
        else:
            found[title].append(line)
    return {key: "\n".join(lines).strip("\n") for key, lines in found.items()}


def _list(body: str) -> list[str] | None:
    """The items of a section, or None if it is a text."""
    items: list[str] = []
    for line in body.splitlines():
        head = re.match(r"([*\w][\w, *.`|()\[\]]*?): (.*)", line) if not line.startswith(" ") else None
        if head:
            items.append(f"* `{head[1]}`: {head[2]}")
        elif not items:
            return None
        elif line.strip():
            items[-1] += f" {line.strip()}"
    return [_inline(item) for item in items]


def _prose(text: str) -> str:
    """Paragraphs; what is indented below ``::`` is a block of code."""
    out: list[str] = []
    for part in re.split(r"\n\s*\n", text):
        if part.startswith("    ") and out:
            out[-1] = re.sub(r":?:$", ":", out[-1])
            out.append("\n".join(_code(inspect.cleandoc("\n" + part).splitlines())))
        elif part.strip():
            out.append(_inline(" ".join(part.split())))
    return "\n\n".join(out)


def _inline(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", lambda found: _link(found[1].rpartition(".")[2]), text)
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if index % 2 else part.replace("<", "&lt;").replace("*", "\\*") if index else _first(part)
        for index, part in enumerate(parts)
    )


def _first(part: str) -> str:
    """The text before the first code: the star of a list stays one."""
    star = "* " if part.startswith("* ") else ""
    return star + part.removeprefix(star).replace("<", "&lt;").replace("*", "\\*")


def _link(name: str) -> str:
    public_names = {*dir(shardwise), *(f"testing.{each}" for each in shardwise.testing.__all__)}
    return f"[`{name}`](#{name.lower().replace('.', '')})" if name in public_names else f"`{name}`"


def _code(lines: Sequence[str]) -> list[str]:
    return ["```python", *lines, "```"]


def _cell(text: str) -> str:
    return _inline(" ".join(text.split())).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
