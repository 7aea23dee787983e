"""A technique is one folder and one row: toys, put into a copy of the package, are taken by everything that takes a technique.

The copy is the package of the moment; each toy's folder is copied into ``techniques`` and its row is written into ``__init__.py``.
Nothing else is changed, and what a user would start is run: the command line, ranks of a launcher, a script. What takes ranks is run
on warm ones, of a process that has the copy imported.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import UnsupportedError
from shardwise.layout import layout_of
from shardwise.techniques import AXES_IN_USE

SRC = Path(__file__).resolve().parents[2] / "src"
TOYS = Path(__file__).parent / "toys"
COMMANDS = Path(__file__).resolve().parents[1] / "cli" / "commands.py"
ROWS = dict.fromkeys(
    ("adapter", "pair", "positions", "rows", "spread"), '        "precision",'
)  # a toy's row stands before this one


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A folder with a copy of the package that has the toys, and the scripts that use them."""
    folder = tmp_path_factory.mktemp("toys")
    shutil.copytree(SRC / "shardwise", folder / "shardwise")  # with its bytecode: made anew it takes a second
    rows = folder / "shardwise" / "techniques" / "__init__.py"
    text = "".join(line for line in rows.read_text().splitlines(True) if '"cp",' not in line)  # a toy takes its place
    for toy in sorted(path.name for path in TOYS.iterdir() if (path / "__init__.py").is_file()):
        shutil.copytree(TOYS / toy, rows.parent / toy, ignore=shutil.ignore_patterns("__pycache__"))
        assert ROWS[toy] in text
        text = text.replace(ROWS[toy], f'        "{toy}",\n{ROWS[toy]}')
    rows.write_text(text)
    for script in (*TOYS.glob("*.py"), COMMANDS):
        shutil.copy(script, folder)
    return folder


CUT_OVER_CP = [
    "--model.build=models.py:Words",
    "--model.args={size: 256}",
    "--parallel.layout=cp=2",
    "--data.seq_len=16",
    "--log.plot=false",
]


def environment(tree):
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture(scope="module")
def warm(tree):
    """A function that gives what a command prints on two warm ranks, or what a script on them writes into ``out.json``."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import warm; warm.main()"],
        cwd=tree,
        env=environment(tree),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run_warm(how, *words, code=0):
        process.stdin.write(json.dumps([how, *words]) + "\n")
        process.stdin.flush()
        line = next(line for line in process.stdout if line.startswith("ANSWER "))
        found, text = json.loads(line.removeprefix("ANSWER "))
        assert found == code, text
        return text

    yield run_warm
    process.stdin.close()
    process.wait(timeout=60)
    process.stdout.close()


def run(tree, *command, code=0):
    """What a command in ``tree`` prints."""
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment(tree), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def sw(tree, *words, code=0):
    return run(tree, "-m", "shardwise", *words, code=code)


# ---- parameters that are added before the module is read ----------------------------------------------------------------


def test_the_adapter_is_a_key_of_files_and_commands(tree):
    assert "parallel.adapter=null" in sw(tree, "train", "--help")
    assert "parallel.adapter.rank" in sw(tree, "verify", "--help")
    (tree / "run.yaml").write_text("parallel:\n  adapter:\n    rank: 3\n")
    assert "rank: 3" in sw(tree, "train", "run.yaml", "--print-config")
    assert "rank: 4" in sw(tree, "train", "run.yaml", "--parallel.adapter.rank=4", "--print-config")
    assert "expected a whole number >= 1" in sw(tree, "train", "--parallel.adapter.rank=0", code=2)
    assert "did you mean --parallel.adapter.rank=3?" in sw(tree, "train", "--parallel.adapter.rnk=3", code=2)


@pytest.mark.soak
def test_a_run_with_the_adapter_is_proved_and_exports_it(tree):
    from safetensors import safe_open

    words = ["--model.build=models.py:Words", "--model.args={size: 256}", "--parallel.adapter.rank=2", "--nproc=2"]
    shown = sw(tree, "train", *words, "--train.steps=2", "--data.seq_len=16", "--log.dir=run", "--log.plot=false")
    assert "largest gradient difference" in shown and "11 gradients" in shown  # 7 parameters, and 4 of adapters
    with safe_open(next((tree / "run" / "weights").glob("*.safetensors")), "pt") as weights:
        assert {"a.low", "a.high", "b.low", "b.high", "a.linear.weight"} <= {*weights.keys()}


def test_verify_changes_both_sides(warm):
    words = ["verify", "models.py:Needs", "--layout=dp_shard=2", "--steps=2", "--accumulate=1"]
    assert "its layers have no adapter" in warm(*words, code=2)
    assert "equal: 2 ranks" in warm(*words, "--parallel.adapter.rank=2")


def test_the_adapter_is_told_by_describe_the_recipe_and_the_agreement(warm):
    out = json.loads(warm("script", "use_adapter.py"))
    assert "adapter: rank 2: beside 2 linear layers" in out["described"]
    assert out["trained"] == ["embed.weight", "a.low", "a.high", "norm.weight", "norm.bias", "b.low", "b.high"]
    assert out["again"] and "adapter" in out["signature"]
    assert out["differs"].startswith("RankError") and "ranks' modules" in out["differs"]


# ---- weights that are stored as other tensors ----------------------------------------------------------------------------


def test_weights_that_are_pairs_are_plain_in_files_and_bits_in_checkpoints(warm):
    out = json.loads(warm("script", "use_pair.py"))
    assert out["names"] and out["dtypes"]["a.weight_high"] == out["dtypes"]["a.weight_low"] == "torch.float16"
    assert 0 < out["full"] < 1e-6 and out["saved"] == 0.0 and 0 < out["answers"] < 1e-5
    assert out["losses"][0] == out["losses"][1]


# ---- a new axis, and gradients of which each rank has a part ------------------------------------------------------------


def test_an_axis_is_refused_until_a_technique_uses_it_and_says_what_it_does(warm):
    for axis in ("ep",):
        with pytest.raises(
            UnsupportedError, match=f"{axis} is a planned axis(.|\n)*axes that work: dp_replicate, dp_shard, cp, tp$"
        ):
            layout_of(f"dp_shard=2,{axis}=2", 4, axes=AXES_IN_USE)
    shown = warm("train", *CUT_OVER_CP, "--train.steps=1", "--log.dir=cp")
    assert "positions are cut over" in shown
    assert "no prompt is continued before training: under cp=2 a forward gets a part of its batch" in shown


@pytest.mark.soak
def test_rows_cut_over_pp_train_as_one_process_does(tree):
    run(tree, "use_rows.py")
    found = json.loads((tree / "rows.json").read_text())
    broken, outside = found.pop("nothing summed"), found.pop("outside")
    for alone, within in outside:
        assert "outside of a window" in alone and "each rank has a part of some gradients" in alone
        assert within == "nothing was raised"
    assert {text.split(",")[0] for text in found.values()} == {"equal"}, found
    held = {words: int(text.split()[-2]) for words, text in found.items()}
    # A cut that is none would be equal too; replicas hold what one process does.
    for layout, whole in (("pp=2", "pp=2"), ("dp_replicate=2,pp=2", "pp=2"), ("dp_shard=2,pp=2", "dp_shard=2,pp=2")):
        assert held[layout] < held[f"{whole} without rows"]
    assert "norm.weight: ranks" in broken and "with other gradients of a parameter that each holds whole" in broken


def test_a_run_on_a_new_axis_is_proved(warm):
    words = ["--model.build=models.py:Words", "--model.args={size: 256}", "--parallel.rows=true"]
    more = ["--parallel.layout=pp=2", "--train.steps=2", "--data.seq_len=16", "--log.dir=cut", "--log.plot=false"]
    assert "largest gradient difference" in warm("train", *words, *more)


# ---- an axis carved out of another, and parameters on a mesh of their own ---------------------------------------------------


@pytest.mark.parametrize(
    "layouts",
    [
        ["dp_shard=4,ep=2"],
        pytest.param(["dp_shard=2,ep=2", "dp_replicate=2,dp_shard=2,ep=2"], marks=pytest.mark.soak),
    ],
)
def test_parameters_on_a_mesh_of_their_own_train_as_one_process_does(warm, layouts):
    found = json.loads(warm("with the pool", "use_spread", *layouts))
    assert found.pop("cuts") == ["ep", "efsdp"]
    for layout in layouts:
        assert found.pop(layout).startswith("equal, fsdp2"), found
    # Of checkpoints that were continued under other layouts; gloo adds the numbers of four ranks in an order of its own.
    assert max(found.values()) < 1e-14, found


# ---- micro-batches that are split, and a schedule of the technique's own -----------------------------------------------------


@pytest.mark.parametrize("more", [[], pytest.param(["--rest"], marks=pytest.mark.soak)])
def test_positions_over_an_axis_in_pairs_of_micro_batches_train_as_one_process_does(warm, more):
    told = json.loads(warm("with the pool", "use_positions", *more))
    assert {text.split(",")[0] for text in told["found"].values()} == {"equal"}, told["found"]
    (loss, tokens), (other, as_many) = told["evaluations"]
    assert abs(loss - other) < 1e-12 and tokens == as_many
    for texts in told["own"]:
        assert len(texts) == 2 and all("a training loop of your own under cp=2" in text for text in texts)
    for text in told["mesh"]:  # what an axis that is left out of the mesh came to before: shards of twice the rows
        assert "has a piece of shape (9, 8)" in text and "the recipe says (" in text
