"""Which file of the user's is being imported for what it defines: there nothing may be started. Torch-free."""

import contextlib
from collections.abc import Iterator

from shardwise.errors import UsageError

_places: list[str] = []


@contextlib.contextmanager
def importing(place: str) -> Iterator[None]:
    """Context manager: the file or module ``place`` runs, for its functions and classes alone."""
    _places.append(place)
    try:
        yield
    finally:
        _places.pop()


def refuse_while_imported(what: str) -> None:
    """Raises UsageError if ``what``, which starts ranks or training, is called by a file that is only imported."""
    if _places:
        raise UsageError(
            f"{what} at the top level of {_places[-1]}",
            why="the file is run once more, to have its functions and classes, on every rank: it would train, or start ranks of its own",
            fix='put it below if __name__ == "__main__":, as multiprocessing asks for',
        )
