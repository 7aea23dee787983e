"""``shardwise.yaml`` in the working directory, and the command by which a run that ended early resumes."""

import io
import shlex

import pytest

from shardwise.cli import main as cli
from shardwise.cli.resume_command import FOUND, Command
from shardwise.cli.train_display import Display, _continued
from shardwise.cli.train_folder import RunFolder
from shardwise.errors import ConfigError, NonFiniteError, Stopped
from shardwise.run.config import load_config

END = {
    "SIGTERM": Stopped("SIGTERM", 4, "checkpoints/step-00000004"),
    "not finite": NonFiniteError("step 5", why="a NaN", fix="another rate"),
    "an exception": RuntimeError("bad"),
    "Ctrl-C": KeyboardInterrupt(),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.cli.resume_command.program", lambda: "shardwise")
    return tmp_path


def command(*words: str, **given) -> Command:
    return Command(words=words, **given)


def ended(end: BaseException, how: Command, *overrides: str, done: int = 5, saved: int | None = None) -> str:
    """What the screen says of a run in ``run`` that has ended so, after ``done`` steps."""
    config, out = load_config(None, ["log.dir=run", "train.steps=100", *overrides]).config, io.StringIO()
    with (
        pytest.raises(type(end)),
        Display(stream=out, live=False) as display,
        RunFolder(config, display, how) as folder,
    ):
        display.began, display.latest = True, {"step": done}
        if saved is not None:
            (folder.path / "checkpoints" / f"step-{saved:08}").mkdir(parents=True, exist_ok=True)
        raise end
    return out.getvalue()


@pytest.mark.parametrize("end", END.values(), ids=END)
def test_a_run_with_a_checkpoint_says_the_command_that_resumes_it(here, end):
    words = ("run file.yaml", "--checkpoint.every=2", "--model.args={dim: 32}", "--nproc", "2")
    text = ended(end, command(*words), "checkpoint.every=2", saved=4)
    last = text.splitlines()[-1]
    shown, _, why = last.removeprefix("resume").strip().partition("  # ")
    assert why == "continues after step 4 of 100"
    assert shlex.split(shown) == ["shardwise", "train", *words]
    assert ("the same command resumes" in text) == isinstance(end, Stopped)


@pytest.mark.parametrize(("code", "name"), [(143, "SIGTERM"), (138, "SIGUSR1"), (129, "SIGHUP")])
@pytest.mark.parametrize("began", [False, True])
def test_a_run_that_a_signal_ends_outside_its_steps_is_started_again_from_its_checkpoint(here, code, name, began):
    """It was loading, or wrote its weights: nothing was saved for the signal, and a checkpoint is there all the same."""
    config, out = load_config(None, ["log.dir=run", "train.steps=100", "checkpoint.every=2"]).config, io.StringIO()
    (here / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)
    with (
        pytest.raises(Stopped) as stopped,
        Display(stream=out, live=False) as display,
        RunFolder(config, display, command("a.yaml")),
    ):
        display.began = began
        raise SystemExit(code)
    assert (stopped.value.code, stopped.value.reason, stopped.value.step) == (75, name, 4)
    assert f"stopped    {name}; the same command resumes" in out.getvalue()
    assert "resume     shardwise train a.yaml  # continues after step 4 of 100" in out.getvalue()


@pytest.mark.parametrize("overrides", [["checkpoint.every=2"], ["checkpoint.every=2", "checkpoint.resume=false"]])
def test_a_run_that_a_signal_ends_without_a_checkpoint_of_its_own_is_not(here, overrides):
    config, out = load_config(None, ["log.dir=run", *overrides]).config, io.StringIO()
    if len(overrides) == 2:  # of an older run: this one would have begun anew, and has not moved it aside yet
        (here / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)
    with (
        pytest.raises(SystemExit) as ended_by,
        Display(stream=out, live=False) as display,
        RunFolder(config, display, command("a.yaml")),
    ):
        raise SystemExit(143)
    assert ended_by.value.code == 143 and "stopped" not in out.getvalue()


@pytest.mark.parametrize("fresh", ["--fresh", "--checkpoint.resume=false", "checkpoint.resume=false"])
def test_what_starts_from_the_beginning_is_left_out_of_it(here, fresh):
    text = ended(END["SIGTERM"], command("a.yaml", fresh, "--train.steps=100"), "checkpoint.every=2", saved=4)
    assert "resume     shardwise train a.yaml --train.steps=100  # continues after step 4" in text
    assert "SIGTERM; the command below resumes" in text


def test_a_file_that_starts_from_the_beginning_is_overridden(here, monkeypatch):
    (here / "a.yaml").write_text("checkpoint: {resume: false, every: 2}\n")
    seen = []
    monkeypatch.setattr("shardwise.cli.train._launch", lambda loaded, how: seen.append(how) or 0)
    assert cli.main(["train", "a.yaml"]) == cli.main(["train", "a.yaml", "--fresh", "--nproc=2"]) == 0
    assert seen[0].resuming() == "shardwise train a.yaml --checkpoint.resume=true"
    assert seen[1].resuming() == "shardwise train a.yaml --nproc=2 --checkpoint.resume=true"


def test_under_a_launcher_its_own_command_resumes(here):
    text = ended(END["SIGTERM"], command("a.yaml", is_of_launcher=True), "checkpoint.every=2", saved=4)
    assert "resume     the same command of your launcher continues after step 4 of 100" in text
    text = ended(END["SIGTERM"], command("a.yaml", "--fresh", is_of_launcher=True), "checkpoint.every=2", saved=4)
    told = "your launcher without --fresh, or with --checkpoint.resume=true, continues after step 4"
    assert told in " ".join(text.split())


@pytest.mark.parametrize(
    ("overrides", "done", "told"),
    [
        ((), 57, "no checkpoint was asked for; --checkpoint.every=10 would have kept step 50"),
        ((), 3, "no checkpoint was asked for; --checkpoint.every=3 would have kept step 3"),
        ((), 0, "no checkpoint was asked for; --checkpoint.every=1 keeps some"),
        (
            ("checkpoint.every=50",),
            20,
            "the first was due after step 50; --checkpoint.every=10 would have kept step 20",
        ),
        (("checkpoint.every=2",), 2, "no save after step 2 or later was finished"),
    ],
)
def test_a_run_without_a_checkpoint_says_what_would_have_kept_one(here, overrides, done, told):
    text = " ".join(ended(END["an exception"], command(), *overrides, done=done).split())
    assert f"resume not possible, no checkpoint is there: {told}" in text


def test_a_long_command_is_continued_between_words_only():
    words = [
        "shardwise",
        "train",
        "--model.args={dim: 32, layers: 2, ffn: 48}",
        "--train.steps=5",
        "--log.dir=it's here",
    ]
    lines = _continued(shlex.join(words), 40)
    assert len(lines) > 2 and shlex.split("\n".join(lines).replace("\\\n", " ")) == words


# ---- a configuration found in the working directory --------------------------------------------------------


def printed(capsys, *words: str) -> str:
    assert cli.main(["train", *words, "--print-config"]) == 0
    return capsys.readouterr().out


def test_the_configuration_of_the_directory_is_used_and_named(here, capsys):
    assert "steps: 500" in printed(capsys)
    (here / FOUND).write_text("train:\n  steps: 7\n")
    (here / "other.yaml").write_text("train: {seed: 3}\n")
    text = printed(capsys)
    assert text.startswith(f"# shardwise.yaml of {here}\n") and "# shardwise.yaml:2\n" in text and "steps: 7" in text
    assert "steps: 500" in printed(capsys, "other.yaml")
    assert "steps: 500" in printed(capsys, "--no-config")
    assert "steps: 9" in printed(capsys, "--train.steps=9")
    assert cli.main(["train", "other.yaml", "--no-config"]) == 2
    assert "leave one of them out" in capsys.readouterr().err
    assert cli.main(["train", "--train.stpes=1"]) == 2
    (here / FOUND).write_text("trian: {}\n")
    assert cli.main(["train"]) == 2
    assert "trian (shardwise.yaml:1)" in capsys.readouterr().err


def test_a_file_with_nearly_that_name_is_refused(here, capsys):
    (here / "shardwise.yml").write_text("train: {steps: 7}\n")
    assert cli.main(["train"]) == 2
    assert "only shardwise.yaml is read" in capsys.readouterr().err
    assert "steps: 500" in printed(capsys, "--no-config") and "steps: 7" in printed(capsys, "shardwise.yml")


def test_the_screen_says_in_its_first_lines_which_configuration_was_found(here, monkeypatch, capsys):
    def start(*_, **__):
        raise ConfigError("no ranks", why="this test", fix="none")

    monkeypatch.setattr("shardwise.launch.launch_local", start)
    (here / FOUND).write_text("train: {steps: 7}\n")
    assert cli.main(["train", "--nproc", "1"]) == 2
    assert capsys.readouterr().out.startswith(
        "config     shardwise.yaml, found in this directory (--no-config: without it)\n"
    )
    assert cli.main(["train", "--nproc", "1", "--no-config"]) == 2
    assert "config " not in capsys.readouterr().out
