"""Two runs given one folder: the second is refused, and a killed one leaves no lock behind."""

import fcntl
import subprocess
import sys

TINY = ["--train.steps=1", "--launch.nproc=1", "--log.plot=false", "--train.eval_every=1"]


def _train(folder, *args):
    command = [sys.executable, "-m", "shardwise", "train", f"--log.dir={folder}", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_a_folder_in_use_is_refused_and_left_as_it_is(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("4711\n")
        held.flush()
        done = _train(folder, *TINY)
    assert done.returncode == 1 and "another run is writing there (process 4711)" in done.stderr
    assert (folder / "metrics.jsonl").read_text() == "{}\n" and not (folder / "config.yaml").exists()
