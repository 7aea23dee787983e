"""Functions named by text: ``pkg.mod:fn`` or ``path/to/file.py:fn``.

:func:`check_target` parses the file without running it, so that a missing file, module or function is reported before
any process starts and without importing torch. :func:`load_target` imports it. Modules are also searched in the working
directory, as ``python -m`` does; a file may import modules from its own directory.

>>> looks_like_target("json:loads"), looks_like_target("run.yaml")
(True, False)
"""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.config.suggest import closest, did_you_mean, listing, missing_blank
from shardwise.config.user_script import importing
from shardwise.errors import ConfigError

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def looks_like_target(text: str) -> bool:
    """Whether ``text`` has the form ``pkg.mod:fn`` or ``path/to/file.py:fn``."""
    place, colon, name = text.rpartition(":")
    return bool(colon) and name.isidentifier() and (place.endswith(".py") or bool(_MODULE.fullmatch(place)))


def check_target(text: str, *, what: str = "target", origin: str = "", bare: bool = False) -> None:
    """Raises ConfigError if the file, module or function of a target is certainly missing. Runs none of its code.

    Args:
        text: ``pkg.mod:fn`` or ``path/to/file.py:fn``.
        what: the option that names it, for the message (``model.build``).
        origin: where it was given (``run.yaml:3``), for the message.
        bare: it will be called without arguments, so the message lists only functions that can be.
    """
    given = f"{what}={text!r}" + (f" ({origin})" if origin else "")
    name, file = text.rpartition(":")[2], target_file(text, given)
    if file is None or file.suffix != ".py" or not file.is_file():
        return  # built in, compiled or zipped: only an import can tell
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise ConfigError(
            given, why=f"{file}, line {error.lineno}, is not valid Python: {error.msg}", fix="correct that line"
        ) from None
    names, certain = _names_in(tree)
    if certain and name not in names:
        raise _missing_name(given, name, str(file), names, _defined(tree, bare=bare) or _defined(tree))


def target_file(text: str, given: str) -> Path | None:
    """The file that a target's function is in, found without running it; None if only an import can tell. ``given``: for the error."""
    place, name = split_target(text, given)
    return _existing(place, name, given) if place.endswith(".py") else _module_file(place, given)


def load_target(text: str, *, what: str = "target") -> Any:
    """Imports and returns what a target names.

    Args:
        text: ``pkg.mod:fn`` or ``path/to/file.py:fn``.

    Raises:
        ConfigError: the file, the module or the name is missing. An error inside the imported code is passed on.
    """
    check_target(text, what=what)
    given = f"{what}={text!r}"
    place, name = split_target(text, given)
    if place.endswith(".py"):
        module = _load_file(_existing(place, name, given))
    else:
        _search_in(os.getcwd())
        with importing(place):
            module = importlib.import_module(place)
    if not hasattr(module, name):
        found = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        own = [
            key
            for key, value in found.items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise _missing_name(given, name, place, list(found), own)
    return getattr(module, name)


def called(function: Callable[..., Any], args: Mapping[str, Any], given: str) -> Any:
    """What ``function(**args)`` returns.

    Raises:
        ConfigError: it does not take these arguments. An error inside it is passed on.
    """
    try:
        return function(**args)
    except TypeError as error:
        # Only wrong arguments are an error of the config; a TypeError from inside the function is passed on.
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise
        raise ConfigError(
            given, why=f"it cannot be called with them: {error}", fix=_arguments_of(function, args)
        ) from error


def _arguments_of(function: Callable[..., object], given: Mapping[str, object]) -> str:
    """The keyword arguments that a function takes, as text for an error's fix."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function written in C may have no signature
        return "give the keyword arguments the function takes"
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = next((name for name in given if name not in names), "")
    return missing_blank(unknown, given.get(unknown)) or did_you_mean(unknown, names, what="it takes")


def split_target(text: str, given: str, more: str = "") -> tuple[str, str]:
    """The file or module of a target, and the name in it. ``given`` and ``more``, another fix, are for the message."""
    if not looks_like_target(text):
        raise ConfigError(
            given, why="it does not name a function", fix=f"write pkg.mod:fn, or path/to/file.py:fn{more}"
        )
    place, _, name = text.rpartition(":")
    return place, name


def check_build(section: str, build: str | None, args: Mapping[str, Any], more: str = "") -> bool:
    """Whether a function is named that makes what a section is about; refuses arguments without one. ``more``: another fix."""
    if build is None and args:
        raise ConfigError(
            f"{section}.args={args} without {section}.build",
            why="they are the arguments of that function, so they would have no effect",
            fix=f"add {section}.build, or remove {section}.args",
        )
    return build is not None and bool(split_target(build, f"{section}.build={build!r}", more))


def _existing(place: str, name: str, given: str) -> Path:
    file = Path(place).expanduser()
    if file.is_file():
        return file.resolve()
    beside = sorted(path.name for path in file.parent.glob("*.py")) if file.parent.is_dir() else []
    near = closest(file.name, beside)
    raise ConfigError(
        given,
        why=f"there is no file {place} (looked in {file.absolute().parent})",
        fix=f"did you mean '{file.parent / near}:{name}'?" if near else "give the path of a file that exists",
    )


def _module_file(place: str, given: str) -> Path | None:
    """The source file of a dotted module, found part by part so that no parent package is run."""
    search: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    parts = place.split(".")
    if place in sys.modules or parts[0] in sys.builtin_module_names:
        origin = getattr(sys.modules.get(place), "__file__", None)
        return Path(origin) if origin else None
    for index, part in enumerate(parts):
        spec = PathFinder.find_spec(".".join(parts[: index + 1]), search)
        if spec is None and index == 0:  # of a frozen or editable-installed module; __main__ has none
            with contextlib.suppress(ValueError):
                spec = importlib.util.find_spec(part)
        if spec is None:
            raise _missing_module(given, parts[: index + 1], search)
        search = spec.submodule_search_locations
        if search is None and index + 1 < len(parts):
            raise _missing_module(given, parts[: index + 2], ())
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def _missing_module(given: str, parts: Sequence[str], search: Sequence[str] | None) -> ConfigError:
    there = (path for folder in map(Path, search or ()) if folder.is_dir() for path in folder.iterdir())
    beside = sorted({path.stem for path in there if path.suffix == ".py" or (path / "__init__.py").is_file()})
    near = closest(parts[-1], beside)
    hint = f"did you mean '{'.'.join([*parts[:-1], near])}'? " if near else ""
    return ConfigError(
        given,
        why=f"there is no module {'.'.join(parts)} (looked in the working directory and sys.path)",
        fix=f"{hint}install it, start from the folder that holds it, or name the file: path/to/file.py:fn",
    )


def _missing_name(given: str, name: str, place: str, names: Sequence[str], defined: Sequence[str]) -> ConfigError:
    """``names``: all that exist, searched for the one that was meant; ``defined``: those to list in the message."""
    near = closest(name, defined) or closest(name, [known for known in names if not known.startswith("_")])
    hint = f"did you mean '{near}'? " if near else ""
    return ConfigError(given, why=f"{place} has no '{name}'", fix=f"{hint}it has: {listing(defined)}")


def _defined(tree: ast.Module, *, bare: bool = False) -> list[str]:
    """Functions and classes that a module itself defines; with ``bare``, only those that can be called without
    arguments, as far as the source shows."""
    found = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not bare or _is_bare(node):
            found.append(node.name)
    return found


def _is_bare(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether it can be called without arguments; for a class also whether it has a base, as an ``nn.Module`` must."""
    if isinstance(node, ast.FunctionDef):
        return not _num_required(node)
    inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return bool(node.bases) and all(_num_required(each) <= 1 for each in inits)  # self


def _num_required(function: ast.FunctionDef) -> int:
    given = function.args
    positional = len(given.posonlyargs) + len(given.args) - len(given.defaults)
    return positional + sum(default is None for default in given.kw_defaults)


def _names_in(tree: ast.Module) -> tuple[list[str], bool]:
    """Names a module binds at its top level, functions and classes first, and whether the list is surely complete."""
    made: list[str] = []
    other: list[str] = []
    certain = True
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            other += [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
            certain &= all(alias.name != "*" for alias in node.names)
        elif isinstance(node, ast.Name):
            other.append(node.id)
            certain &= node.id not in ("globals", "exec", "setattr")
    # Names bound inside functions are counted too: at worst a wrong name is accepted here, and the import reports it.
    return [*dict.fromkeys(made + other)], certain and "__getattr__" not in made


def _load_file(file: Path) -> ModuleType:
    name = "shardwise_file_" + re.sub(r"\W", "_", str(file.with_suffix("")))
    if name in sys.modules:
        return sys.modules[name]
    _search_in(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(str(file), why="Python has no loader for this file", fix="give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: its classes must be picklable, and find their module
    try:
        with importing(str(file)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search_in(folder: str) -> None:
    if folder not in sys.path and "" not in sys.path[:1]:
        sys.path.insert(0, folder)
