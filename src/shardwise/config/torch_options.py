"""torch options that Shardwise does not have: a record lists in ``foreign`` what to write in place of each.
Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.config.suggest import did_you_mean

Place = Literal["python", "file", "override"]
"""Where an option was written, which decides how its replacement is shown."""


@dataclass(frozen=True)
class Replacement:
    """What to write in place of an option of torch.

    Attributes:
        text: what Shardwise does, with ``{}`` where the option stands.
        python: the replacement in Python.
        key: the replacement in a file, from its section on; "": nothing is written there.
        value: the value of that key, as YAML.
    """

    text: str
    python: str
    key: str = ""
    value: str = ""

    def shown(self, place: Place) -> str:
        """The replacement as the ``fix`` of an error."""
        if place == "python":
            return self.text.format(self.python)
        if not self.key:
            return self.text.format("leave it out")
        return self.text.format(f"{self.key}: {self.value}" if place == "file" else f"--{self.key}={self.value}")


def replacement_for(record: type, key: str, place: Place) -> str | None:
    """The fix for torch's option ``key`` given to ``record``, from the record's ``foreign``; None: torch has no such
    option."""
    found = getattr(record, "foreign", {}).get(key)
    return found.shown(place) if isinstance(found, Replacement) else found


def why_and_fix(record: type, key: str, known: Sequence[str]) -> tuple[str, str]:
    """``why`` and ``fix`` of an error about a key that a record, built in Python, does not have."""
    name, fix = record.__name__, replacement_for(record, key, "python")
    if fix is not None:
        return f"torch has this option, and {name} does not", fix
    return f"{name} has no option {key!r}", did_you_mean(
        key, known, what=f"options of {name}", also_called=getattr(record, "also_called", None)
    )
