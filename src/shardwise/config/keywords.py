"""An unknown keyword of a public call is an error with the nearest name, as that of an option is. Torch-free."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def public_call(answers: Mapping[str, str] | None = None) -> Callable[[F], F]:
    """Decorator of a public function or an ``__init__``: a call with an unknown keyword, without a needed argument or with too many
    raises ConfigError. It costs nothing where the call is right, and the signature stays that of the function, for readers and for type
    checkers.

    Args:
        answers: keyword of another library, or the name of an argument that may be missing, or "*" for too many positional ones ->
            what to write.
    """
    return functools.partial(_explained, answers or {})


def _explained(answers: Mapping[str, str], function: F) -> F:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def explained(*args: Any, **given: Any) -> Any:
        try:
            return function(*args, **given)
        except TypeError as error:
            fault = _fault_of_call(function, signature, answers, args, given)
            if fault is None:  # it was raised within
                raise
            raise fault from error

    return explained  # type: ignore[return-value]


def _fault_of_call(
    function: Callable[..., Any],
    signature: inspect.Signature,
    answers: Mapping[str, str],
    args: tuple[Any, ...],
    given: Mapping[str, Any],
) -> ConfigError | None:
    try:
        signature.bind(*args, **given)
        return None
    except TypeError as error:
        text = str(error)
    name, known = function.__qualname__.removesuffix(".__init__"), list(signature.parameters)
    if known[:1] == ["self"]:
        known, args = known[1:], args[1:]
    for key, value in given.items():
        if key not in known:
            fix = answers.get(key) or did_you_mean(key, known, what=f"arguments of {name}")
            return ConfigError(f"{name}({key}={value!r:.60})", why="it has no argument of this name", fix=fix)
    call = f"sw.{name}({', '.join(known)})"
    missing = next((each for each in known[len(args) :] if each not in given and f"'{each}'" in text), None)
    if missing is not None:
        return ConfigError(f"{name} without {missing}", why="it is needed", fix=answers.get(missing, call))
    return ConfigError(
        f"{name} with {len(args)} positional arguments", why=text, fix=answers.get("*", f"name them: {call}")
    )
