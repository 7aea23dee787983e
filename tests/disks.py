"""Small disks for tests, gone when the test is, however it ends."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["mounted"]

# Lazily: a rank that hangs may still have a file open there, and a mount that stays is in the way of whoever removes the folder.
SCRIPT = 'mount -t tmpfs -o "$1" none "$0" && echo mounted && { cat > /dev/null; umount --lazy "$0"; }'


@contextlib.contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """Within, a file system in memory at ``place``, which is made; skips the test where nobody may mount one.

    A process of its own mounts it, and unmounts it when its input ends: if these tests are killed, that is then.
    """
    place.mkdir()
    pipe = subprocess.PIPE
    command = ["sh", "-c", SCRIPT, str(place), options]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as keeper:
        assert keeper.stdout is not None
        if keeper.stdout.readline() != b"mounted\n":
            pytest.skip(f"no disk can be mounted here: {keeper.communicate()[1].decode()}")
        try:
            yield place
        finally:
            told = keeper.communicate()[1].decode()
            assert keeper.returncode == 0, told
