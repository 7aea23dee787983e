"""What a forward does outside of the process (files, sockets, processes, memory by ``ctypes``) cannot be put back after the search for
layers to cut, which runs it: it is refused by the name of the module. What libraries do there for themselves is not."""

import contextlib
import ctypes
import importlib
import io
import logging
import logging.handlers
import os
import pathlib
import shelve
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import warnings

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import shardwise as sw
from shardwise.model.read import read_anatomy
from shardwise.techniques.tp.search.cut_search import search

_C = ctypes.CDLL(None)
_BYTES = ctypes.create_string_buffer(8)


def opened(path):
    with open(path, "a") as file:
        file.write("x")


def opened_for_both(path):
    with open(path, "r+") as file:
        file.write("x")


def saved_by_torch(path):
    torch.save({"x": torch.zeros(2)}, path)


def saved_by_safetensors(path):
    safetensors.torch.save_file({"x": torch.zeros(2)}, path)


def saved_by_numpy(path):
    np.save(path, np.zeros(2))


def in_a_database(path):
    with contextlib.closing(sqlite3.connect(f"{path}.db")) as base:
        base.execute("create table if not exists t (x)")


def in_a_shelf(path):
    with shelve.open(f"{path}.shelf") as shelf:
        shelf["x"] = 1


def by_a_descriptor(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))


def by_pathlib(path):
    pathlib.Path(path).write_text("x")


def makes_a_folder(path):
    os.makedirs(f"{path}-folder", exist_ok=True)


def renames(path):
    os.rename(path, f"{path}-other")


def removes(path):
    os.remove(path)


def connects(path):
    with socket.socket() as one, contextlib.suppress(ConnectionError):
        one.settimeout(0.1)
        one.connect(("127.0.0.1", 9))


def starts_a_process(path):
    subprocess.run(["true"], check=True)


def by_a_shell(path):
    os.system("true")


def calls_c(path):
    _C.labs(-1)


def moves_memory(path):
    ctypes.memmove(_BYTES, b"x", 1)


def caught(path):
    """The forward goes on without it."""
    try:
        opened(path)
    except Exception:
        return


def in_a_thread(path):
    thread = threading.Thread(target=opened, args=(path,))
    thread.start()
    thread.join()


REFUSED = {
    opened: "which a forward writes", opened_for_both: "which a forward writes", saved_by_torch: "which a forward writes",
    saved_by_safetensors: "which a forward writes", saved_by_numpy: "which a forward writes", in_a_database: "which a forward writes",
    in_a_shelf: "which a forward writes", by_a_descriptor: "which a forward writes", by_pathlib: "which a forward writes",
    makes_a_folder: "which a forward makes", renames: "which a forward renames", removes: "which a forward removes",
    connects: "which a forward connects", starts_a_process: "a process", by_a_shell: "a process", calls_c: "a function of C",
    moves_memory: "a function of C", caught: "which a forward writes", in_a_thread: "which a forward writes",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, act, path):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act, self.path, self.count = act, path, 0

    def forward(self, x):
        self.act(self.path)
        return x + self.down(torch.tanh(self.up(x)))


def model_of(act, path):
    return nn.Sequential(Block(act, path), Block(act, path))


def searched(act, path):
    return search(model_of(act, path), lambda model: model(torch.randn(2, 8, dtype=torch.float64)), 2)


@pytest.mark.parametrize("act", REFUSED, ids=lambda act: act.__name__)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_refused_by_name_and_not_done(act, tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(sw.UnsupportedError) as caught:
        searched(act, str(path))
    assert REFUSED[act] in str(caught.value) and "test_effects.py, line" in str(caught.value)
    assert caught.value.name in (None if act is in_a_thread else "0", "0")
    assert path.read_text() == "before" and [each.name for each in tmp_path.iterdir()] == ["file"]
    act(str(path))  # outside of a trial it is the user's own


def test_a_run_that_sees_the_order_of_blocks_is_one_too(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(sw.UnsupportedError, match="which a forward writes"):
        read_anatomy(model_of(opened, str(path)), example={"input": torch.randn(2, 8)})
    assert path.read_text() == "before"


# ---- not refused ------------------------------------------------------------------------------------------------------


def reads(path):
    assert pathlib.Path(path).read_text() == "before"
    os.close(os.open(path, os.O_RDONLY))


def writes_to_null(path):
    with open(os.devnull, "w") as file:
        file.write("x")


def in_memory(path):
    with sqlite3.connect(":memory:") as base:
        base.execute("create table t (x)")
    base.close()


def in_a_temporary_file(path):
    with tempfile.TemporaryFile() as file:
        file.write(b"x")


def imports(path):
    """A module that is compiled, and makes a folder for itself when it is first imported."""
    sys.path.insert(0, str(pathlib.Path(path).parent))
    try:
        importlib.invalidate_caches()
        importlib.import_module("made_when_imported")
    finally:
        del sys.path[0]


def test_a_module_that_is_first_imported_in_a_forward_stays_whole(tmp_path):
    """As ``networkx``, which the compiler of torch imports."""
    (tmp_path / "made_when_imported.py").write_text(
        "globals()['first'] = 1\nsecond = 2\n\ndef third():\n    return 3\n"
    )
    try:
        searched(imports, str(tmp_path / "file"))
        module = sys.modules["made_when_imported"]
        assert (module.first, module.second, module.third()) == (1, 2, 3)
    finally:
        sys.modules.pop("made_when_imported", None)


def warns(path):
    warnings.warn("of a forward", stacklevel=1)


_LATE = logging.getLogger("of a file that is opened late")


def logs(path):
    _LATE.warning("a line")


@pytest.mark.parametrize(
    "act", [reads, writes_to_null, in_memory, in_a_temporary_file, imports, warns, logs], ids=lambda act: act.__name__
)
def test_not_refused(act, tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    (tmp_path / "made_when_imported.py").write_text(f"import os\nos.makedirs({str(tmp_path / 'cache')!r})\n")
    handler = logging.FileHandler(tmp_path / "log", delay=True)
    _LATE.addHandler(handler)
    try:
        assert len(searched(act, str(path)).regions) == 2
    finally:
        _LATE.removeHandler(handler)
        handler.close()
        sys.modules.pop("made_when_imported", None)


def test_other_threads_go_on_while_a_trial_runs(tmp_path):
    written, go, done = tmp_path / "written", threading.Event(), threading.Event()

    def write():
        go.wait(30)
        written.write_text("x")
        done.set()

    def act(_):
        go.set()
        assert done.wait(30)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        searched(act, str(tmp_path))
    finally:
        go.set()
        thread.join()
    assert written.read_text() == "x"


# ---- loggers ----------------------------------------------------------------------------------------------------------


class Listing(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record.args)


_LOG = logging.getLogger("of a forward's own")


def to_a_logger(path):
    _LOG.warning("a mean of %s", torch.ones(2))


def to_a_logger_by_name(path):
    logging.getLogger("of a forward's own.below").warning("a mean of %s", torch.ones(2))


@pytest.mark.parametrize("act", [to_a_logger, to_a_logger_by_name], ids=lambda act: act.__name__)
@pytest.mark.parametrize("where", ["its own", "root"])
def test_handlers_hold_what_they_held(act, where, tmp_path):
    text = io.StringIO()
    handlers = Listing(), logging.StreamHandler(text), logging.handlers.MemoryHandler(100)
    home = logging.getLogger() if where == "root" else _LOG
    for handler in handlers:
        home.addHandler(handler)
    try:
        assert len(searched(act, str(tmp_path)).regions) == 2
        assert handlers[0].records == [] and text.getvalue() == "" and handlers[2].buffer == []
        act("")
        assert len(handlers[0].records) == 1 and text.getvalue() and len(handlers[2].buffer) == 1
    finally:
        for handler in handlers:
            home.removeHandler(handler)


def adds_a_handler(path):
    log = logging.getLogger("made by a forward")
    if not log.handlers:
        log.addHandler(Listing())
    log.warning("a mean of %s", 1)


def test_a_handler_that_a_forward_adds_is_not_left(tmp_path):
    logging.root.manager.loggerDict.pop("made by a forward", None)
    searched(adds_a_handler, str(tmp_path))
    assert logging.getLogger("made by a forward").handlers == []


class Compiling(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.compile(_twice)(self.up(x)))


def _twice(x):
    return 2 * torch.tanh(x)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_a_forward_that_compiles_may_write_the_compilers_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(Compiling(), Compiling())
    assert len(search(model, lambda model: model(torch.randn(2, 8, dtype=torch.float64)), 2).regions) == 2
    assert any(tmp_path.iterdir())
