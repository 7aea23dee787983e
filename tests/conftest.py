"""What all tests share: warm ranks that have the imports of the parity matrix's models behind them."""

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import seldom_collected  # noqa: F401
from combinations import pytest_collection_modifyitems as pytest_collection_modifyitems  # a hook of pytest
from hypothesis import settings

from shardwise.testing import RankPool

# How long an example takes says something about the machine and its other users, nothing about the code.
settings.register_profile("shardwise", deadline=None)
settings.load_profile("shardwise")

# A job that a script started in the background ignores Ctrl-C, and so would every process it starts: those of the tests
# are sent it on purpose.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Programs that tests start find `sitecustomize`, if whoever started these tests has none on the path.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parent))))

# torch's store looks up ::ffff:127.0.0.1 in DNS: a lost answer costs 5 s by default, all the time that some tests give a world.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

PRELOAD = (
    "pytest",  # of the files of tests, whose functions ranks call
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "shardwise.verify.preload",
    "shardwise.state.checkpoint",
    "short_texts",
    "seldom_collected",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "qwen3", "t5", "bert", "vit")),
)


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # it finds nothing while the files are imported: see import_frozen


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.freeze()  # this process ends, and need not look through all it has imported


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test and its fixtures draw the same random numbers whatever ran before them in this process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "shardwise.world.rng" in sys.modules:
        sys.modules["shardwise.world.rng"].seed_torch(0)
    elif "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The plugin's pool with more imported once: transformers takes seconds in every rank that must import it itself."""
    sys.path.insert(0, str(Path(__file__).parent))
    with RankPool(preload=PRELOAD) as pool:
        yield pool


@pytest.fixture
def fresh_ranks(ranks: RankPool) -> Iterator[RankPool]:
    """Ranks that have run nothing and run nothing afterwards: for what a process keeps from its first group on, or of a library that
    changes torch. They are forked with all imports behind them."""

    def end() -> None:
        with ranks._lock:
            ranks._discard(list(ranks._workers.values()))

    end()
    yield ranks
    end()
