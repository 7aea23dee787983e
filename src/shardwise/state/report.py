"""The report of loading weights: which tensors were loaded, under which names, and which were not."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.config.dtype_words import DTYPE_WORDS
from shardwise.recipe import human_bytes

_SHOWN = 8
_WORDS = {name: word for word, name in DTYPE_WORDS.items() if word[:2] in ("fp", "bf")}


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The report of :func:`~shardwise.load_weights`; ``print`` it. Equal on every rank except for ``num_bytes`` and
    ``seconds``.

    Attributes:
        place: where the weights came from.
        num_tensors: tensors of the model that were loaded; tied ones count once.
        num_bytes: bytes that this rank read or received.
        seconds: how long it took on this rank.
        missing: names in the model that the source does not have; their values are as before, or ``fresh``
            (``strict=False``).
        fresh: the model had no values before (``init="load"``): missing tensors got those of its constructor.
        unexpected: names in the source that the model does not have (``strict=False``).
        ignored: name in the source -> why it is not the model's to load.
        renamed: the changes of names, as text with counts.
        cast: name -> (dtype there, dtype here), where they differ (``cast``).
        rounded: of these pairs, those of frozen weights that are stored in a smaller dtype because adapters are trained beside them; it
            needs no ``cast``.
        beside: parameters that a technique has added (adapters), none of which the source has; they are as before, or ``fresh``.
        packed: weights whose plain values were packed (``quantize=``).
        unpacked: weights that are packed there and plain in the model.
        grown: tables to which ``shardwise train`` has added rows for new tokens, each the mean of the others.
    """

    place: str
    num_tensors: int
    num_bytes: int = 0
    seconds: float = 0.0
    missing: tuple[str, ...] = ()
    fresh: bool = False
    unexpected: tuple[str, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    rounded: tuple[tuple[str, str], ...] = ()
    beside: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.num_tensors} tensors from {self.place}: {human_bytes(self.num_bytes)} on this rank, {self.seconds:.2f} s"
        ]
        lines += [f"  renamed: {text}" for text in self.renamed]
        pairs = sorted(set(self.cast.values()))
        lines += [
            f"  cast: {sum(1 for other in self.cast.values() if other == pair)} from {pair[0]} to {pair[1]}"
            for pair in pairs
        ]
        lines += [
            f"  a base of {there} is stored in {here}; Precision(parts={{...: {_WORDS.get(there, there)!r}}}) keeps it"
            for there, here in self.rounded
        ]
        if self.packed:
            lines.append(f"  packed ({len(self.packed)}): {shortened(self.packed)}")
        if self.unpacked:
            lines.append(
                f"  packed there, and plain in the model ({len(self.unpacked)}): {shortened(self.unpacked)}; quantize= keeps the bytes"
            )
        if self.grown:
            lines.append(f"  rows added, each the mean of the others ({len(self.grown)}): {shortened(self.grown)}")
        now = "with their constructor's values" if self.fresh else "left as they were"
        if self.beside:
            lines.append(f"  adapters not there ({len(self.beside)} tensors), {now}")
        if self.missing:
            lines.append(f"  missing ({len(self.missing)}), {now}: {shortened(self.missing)}")
        if self.unexpected:
            lines.append(f"  not in the model ({len(self.unexpected)}): {shortened(self.unexpected)}")
        reasons = dict.fromkeys(self.ignored.values())
        for why in reasons:
            names = [name for name, reason in self.ignored.items() if reason == why]
            lines.append(f"  ignored ({len(names)}), {why}: {shortened(names)}")
        return "\n".join(lines)


def shortened(names: "tuple[str, ...] | list[str]") -> str:
    """The first names as text, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
