"""Remat and Compile: words and records; what contradicts itself is refused, in Python and in a file."""

import pytest

from shardwise import Compile, Parallel, Remat
from shardwise.errors import ConfigError
from shardwise.run.config import load_config
from shardwise.techniques.compile.options import compile_of
from shardwise.techniques.remat.options import remat_of


@pytest.mark.parametrize("value", [None, "none"])
def test_none_is_none(value):
    assert remat_of(value) is None and compile_of(value) is None


def test_words_stand_for_records():
    assert remat_of("full") == Remat() and remat_of("selective") == Remat(mode="selective")
    assert compile_of("blocks") == Compile() and compile_of(Compile(dynamic=True)).dynamic is True


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: remat_of("ful"), "did you mean 'full'?"),
        (lambda: remat_of(True), "neither a word for remat nor a Remat record"),
        (lambda: compile_of("block"), "did you mean 'blocks'?"),
        (lambda: Remat(mode="half"), "expected one of 'full', 'selective'"),
        (lambda: Remat(every=0), "expected a whole number >= 1"),
        (lambda: Remat(save=("matmul",)), "so save would have no effect"),
        (lambda: Remat(mode="selective", save=()), "none is named"),
        (lambda: Remat(mode="selective", save=("",)), "an empty name"),
        (lambda: Remat(mode="selective", offload=True), "only a part would be offloaded"),
        (lambda: Remat(targets=()), "means no module"),
        (lambda: Compile(targets=("",)), "means no module"),
        (lambda: Compile(backend=""), "no backend has this name"),
        (lambda: Compile(backend="eager", mode="max-autotune"), "mode would have no effect"),
        (lambda: Compile(backend="eager", activation_memory_budget=0.5), "the budget would have no effect"),
        (lambda: Compile(activation_memory_budget=1.5), "expected a number >= 0 and <= 1"),
        (
            lambda: Parallel(remat="some"),
            "words: none, full, selective, or a size that it may keep on each rank (8GiB), or a record",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


def test_from_a_file_and_the_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("parallel:\n  remat: {mode: selective, every: 2, save: [attention]}\n  compile: {backend: eager}\n")
    parallel = load_config(path).config.parallel
    assert parallel.remat == Remat(mode="selective", every=2, save=("attention",)) and parallel.compile == Compile(
        backend="eager"
    )
    changed = load_config(path, ["--parallel.remat.every=3", "--parallel.compile.backend=aot_eager"]).config.parallel
    assert changed.remat.every == 3 and changed.compile == Compile(backend="aot_eager")


def test_a_wrong_key_is_told_with_its_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("parallel:\n  remat:\n    mode: full\n    evry: 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "run.yaml:4" in str(caught.value) and "did you mean" in str(caught.value)


class Block:
    """Stands for a module's class, which a record takes by its path."""


@pytest.mark.parametrize("record", [Remat, Compile])
def test_targets_are_a_text_a_list_or_classes(record):
    assert record(targets="Block, blocks.*.attn").targets == ("Block", "blocks.*.attn")
    assert record(targets=(Block, "Other")).targets == (f"{__name__}.Block", "Other")
    assert record(targets=Block).targets == (f"{__name__}.Block",) and record(targets="blocks").targets == "blocks"
    with pytest.raises(ConfigError, match="means no module"):
        record(targets="Block,")
