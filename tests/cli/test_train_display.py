"""The display of a run: every event has its words, a quiet run keeps talking, and a terminal is redrawn in place."""

import contextlib
import io
import shlex
import time

import pytest

from shardwise.cli.train_display import Display, seconds_text
from shardwise.recipe import human_bytes

STEP = {
    "kind": "step",
    "step": 12,
    "steps": 500,
    "loss": 2.34567,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens": 2048,
    "tokens_per_s": 41234.5,
    "seconds_left": 200.2,
    "skipped": False,
    "epoch": 0,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(*events: dict, **options) -> str:
    stream = io.StringIO()
    display = Display(stream=stream, unit="nats/byte", **options)
    for event in events:
        display.on_event(0, event)
    return stream.getvalue()


def test_memory_says_per_rank_against_one_process():
    text = shown(
        {"kind": "memory", "per_rank": [6 << 20, 5 << 20], "one_process": 12 << 20, "rss": [1], "cuda_peak": [0]}
    )
    assert "6.00 MiB of parameters, gradients and optimizer state per rank" in text
    assert "12.00 MiB in one process (50%)" in " ".join(text.split())


def test_rows_of_the_start():
    text = shown(
        {"kind": "world", "device": "cpu, over gloo", "layout": "dp_shard=2", "why": "cut over 2 ranks"},
        {
            "kind": "data",
            "name": "a.txt",
            "train_samples": 3000,
            "val_samples": 300,
            "tokens_per_step": 2048,
            "report": "",
        },
        {"kind": "model", "name": "M", "num_params": 803968, "units": 2, "why": "fsdp2: because"},
        {"kind": "val", "step": 100, "loss": 1.5, "num_tokens": 4},
    )
    lines = text.splitlines()
    assert lines[0] == "device     cpu, over gloo"
    assert lines[1] == "layout     dp_shard=2: cut over 2 ranks"
    assert "3,000 samples to train on, 300 to validate; 2,048 tokens a step" in lines[2]
    assert lines[3:5] == ["model      M, 803,968 parameters in 2 units", "engine     fsdp2: because"]
    assert lines[5].strip() == "step 100: validation loss 1.5000 nats/byte"


def test_a_completion_is_one_line_and_cannot_command_the_terminal():
    text = shown({"kind": "sample", "when": "before", "prompt": "The ", "text": "a\x1b[2J\nb\x07", "word_share": 0.256})
    assert text.split() == ["before", "26%", "real", "words:", "The", "|a", "[2J", "b"]
    assert "\x1b" not in text and text.count("\n") == 1


def test_status_of_a_step_has_everything_asked_for():
    display = Display(stream=io.StringIO())
    display.on_event(0, {"kind": "memory", "per_rank": [6 << 20], "one_process": 12 << 20})
    display.on_event(0, STEP)
    assert display.status() == (
        "step 12/500  loss 2.3457  grad norm 0.500  41,234 tokens/s  6.00 MiB/rank  3 min 20 s left"
    )
    display.on_event(0, {**STEP, "data_s": 0.01})
    assert display.status() == (
        "step 12/500  loss 2.3457  grad norm 0.500  41,234 tokens/s  20% of the time waiting for data  6.00 MiB/rank  3 min 20 s left"
    )
    display.on_event(0, {**STEP, "skipped": True, "grad_norm": None, "seconds_left": None, "loss": float("nan")})
    assert display.status() == "step 12/500  loss nan  41,234 tokens/s  6.00 MiB/rank  SKIPPED: not finite"


def test_status_of_a_phase_has_its_age():
    clock = Clock()
    display = Display(stream=io.StringIO(), clock=clock)
    display.on_event(0, {"kind": "phase", "text": "building the model"})
    clock.now = 7.2
    assert display.status() == "building the model (7 s)"


def test_how_far_a_phase_is_stands_beside_its_age_and_is_no_line_of_its_own():
    clock, stream = Clock(), io.StringIO()
    display = Display(stream=stream, clock=clock)
    display.on_event(0, {"kind": "phase", "text": "reading the data"})
    for far, now in (("tokens of chat.jsonl, 12 %", 5.0), ("tokens of chat.jsonl, 41 %", 10.0)):
        clock.now = now
        display.on_event(0, {"kind": "progress", "text": far})
    assert display.status() == "reading the data: tokens of chat.jsonl, 41 % (10 s)"
    display.on_phase("building the model")
    assert display.status() == "building the model (0 s)"
    assert stream.getvalue() == "... reading the data\n... building the model\n"


def test_a_phase_is_printed_once_and_changes_between_training_and_validating_are_not():
    stream = io.StringIO()
    display = Display(stream=stream)
    for text in ("reading", "reading", "training", "validating", "training"):
        display.on_phase(text)
    assert stream.getvalue() == "... reading\n"


def test_unknown_events_are_left_to_others():
    assert shown({"kind": "brand new", "x": 1}, {"x": 1}) == ""


def test_lines_of_ranks_carry_the_rank():
    stream = io.StringIO()
    Display(stream=stream).on_line(1, "stderr", "a warning [bold]")
    assert stream.getvalue() == "[rank 1] a warning [bold]\n"


@pytest.mark.timeout(30)
def test_a_quiet_run_keeps_talking():
    """With a clock that a test moves: two silent seconds of the run bring a line, again and again."""
    clock, stream = Clock(), io.StringIO()
    with Display(stream=stream, live=False, clock=clock) as display:
        display.on_phase("loading torch")
        for expected in (2, 3, 4):
            clock.now += 2.0
            while len(stream.getvalue().splitlines()) < expected:
                time.sleep(0.01)
    assert stream.getvalue().splitlines()[1:] == [f"{'':<11}loading torch ({n} s)" for n in (2, 4, 6)]


@pytest.mark.timeout(30)
def test_a_run_that_stands_still_does_not_repeat_its_last_step():
    clock, stream = Clock(), io.StringIO()
    with Display(stream=stream, live=False, clock=clock) as display:
        display.on_event(0, STEP)
        for expected in (1, 2, 3):
            clock.now += 8.0
            while len(stream.getvalue().splitlines()) < expected:
                time.sleep(0.01)
        clock.now += 1.0
        time.sleep(0.5)
    first, *later = [line.strip() for line in stream.getvalue().splitlines()]
    assert first.startswith("step 12/500  loss 2.3457")
    assert later == [f"step 12/500, and no other for {n} s" for n in (16, 24)]


def test_ctrl_c_is_called_that_and_not_by_the_signal_that_the_ranks_are_sent():
    stop = {"kind": "stop", "reason": "SIGTERM"}
    assert shown(stop) == "... SIGTERM: saving, to stop\n"
    assert shown({"kind": "interrupted"}, stop).splitlines() == [
        "... Ctrl-C: ending the ranks",
        "... Ctrl-C: saving, to stop",
    ]


class Narrow(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_commands_fit_a_narrow_terminal_and_can_be_copied(monkeypatch):
    command = (
        "somewhere/.venv/bin/shardwise train runs/latest/config.yaml --parallel.layout=dp_replicate=-1 --log.dir=a"
    )
    monkeypatch.setattr("shardwise.cli.train_display._width", lambda stream: 80)
    stream = Narrow()
    Display(stream=stream, live=False).commands("try", [(command, "whole copies")])
    assert all(len(line) <= 80 for line in stream.getvalue().splitlines())
    label, *lines = stream.getvalue().splitlines()
    assert label == "try        # whole copies" and shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(
        command
    )
    pipe = io.StringIO()
    Display(stream=pipe, live=False).commands("try", [(command, "whole copies")])
    assert pipe.getvalue() == f"try        {command}  # whole copies\n"


@pytest.mark.timeout(30)
def test_a_run_that_talks_is_not_talked_over():
    clock, stream = Clock(), io.StringIO()
    with Display(stream=stream, live=False, clock=clock) as display:
        for _ in range(10):
            clock.now += 1.0
            display.say("busy")
            time.sleep(0.05)
    assert stream.getvalue().splitlines() == ["busy"] * 10


@pytest.mark.timeout(30)
def test_a_terminal_is_redrawn_in_place_and_given_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Display(stream=stream) as display:
        display.row("ranks", "2 [not markup]")
        display.on_event(0, STEP)
        while "step 12/500" not in stream.getvalue():
            time.sleep(0.01)
    text = stream.getvalue()
    assert "2 [not markup]" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor comes back


def test_a_terminal_that_cannot_be_redrawn_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = io.StringIO()
    stream.isatty = lambda: True
    assert not Display(stream=stream).live


def test_units_for_people():
    sizes = ["12 B", "2.00 KiB", "3.00 MiB", "5.00 GiB", "7.00 TiB"]
    assert [human_bytes(n) for n in (12, 2048, 3 << 20, 5 << 30, 7 << 40)] == sizes
    assert [seconds_text(n) for n in (0.4, 59.4, 200, 7500)] == ["0 s", "59 s", "3 min 20 s", "2 h 5 min"]


def test_a_log_on_a_full_disk_does_not_end_the_run(capsys):
    with open("/dev/full", "w") as full:
        display = Display(stream=full, live=False)
        for n in range(3):
            display.say(str(n))
        assert capsys.readouterr().err == "the output cannot be written (No space left on device); the run continues\n"
        with contextlib.suppress(OSError):
            full.close()


def test_a_path_is_never_cut():
    out = io.StringIO()
    path = "/somewhere/" + "long-name-" * 20
    Display(stream=out, live=False).row("kept", f"{path} (weights)")
    assert path in out.getvalue()
