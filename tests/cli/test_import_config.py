"""``shardwise import-config``: the run file to one stream, the answers to the other; ``train`` names it for a file of another system."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.errors import ConfigError
from shardwise.run.config import load_config

FIXTURES = Path(__file__).resolve().parent.parent / "dialects" / "fixtures"
FILE = str(FIXTURES / "accelerate" / "fsdp2-8gpu.yaml")
OPEN = ["data.seq_len=8", "data.global_batch=8", "train.steps=3", "optim.lr=0.1"]  # what such a file does not say
TITAN = str(FIXTURES / "torchtitan" / "hsdp-tp.toml")


def test_the_run_file_is_printed_and_the_answers_beside_it(capsys, tmp_path):
    assert cli.main(["import-config", FILE]) == 0
    printed = capsys.readouterr()
    (tmp_path / "run.yaml").write_text(printed.out)
    assert load_config(tmp_path / "run.yaml", OPEN).config.parallel.layout == "dp_shard=-1"
    assert "kept     num_processes=8 -> launch.nproc=8" in printed.err
    assert "changed  mixed_precision=bf16 -> parallel.precision=bf16: " in printed.err
    assert "dropped  machine_rank=0: torchrun or srun says it" in printed.err


def test_a_run_file_is_written_with_overrides_and_without_a_word(capsys, tmp_path):
    run = tmp_path / "run.yaml"
    assert cli.main(["import-config", FILE, "-o", str(run), "--quiet", "--log.every=7", "--parallel.remat=none"]) == 0
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""
    config = load_config(run, OPEN).config
    assert config.log.every == 7 and config.parallel.remat == "none" and config.launch.nproc == 8


def test_an_override_is_in_the_answer_of_the_key_whose_place_it_takes(capsys):
    assert cli.main(["import-config", TITAN, "--ranks", "8", "--optim.lr=0.5", "--data.path=d.jsonl"]) == 0
    printed = capsys.readouterr()
    assert "lr: 0.5" in printed.out and "replaced by --optim.lr=0.5" in printed.err
    assert "-> optim.lr" not in printed.err and "missing  data.path" not in printed.err


def test_json_has_an_answer_for_each_key(capsys):
    assert cli.main(["import-config", TITAN, "--json", "--ranks", "8"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made) == {"dialect", "run", "findings", "missing", "samples"} and made["dialect"] == "torchtitan"
    assert {"key", "value", "given", "verdict", "say", "ours"} == set(made["findings"][0])
    assert {one["verdict"] for one in made["findings"]} == {"kept", "changed", "dropped"}


def test_nothing_is_written_where_a_key_is_refused(capsys, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(Path(FILE).read_text().replace("mixed_precision: bf16", "mixed_precision: fp8\nmachne_rank: 0"))
    assert cli.main(["import-config", str(bad), "-o", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert "mixed_precision=fp8, machne_rank" in said or "machne_rank, mixed_precision=fp8" in said
    assert "did you mean 'machine_rank'?" in said and "write mixed_precision bf16" in said
    assert not (tmp_path / "run.yaml").exists()
    assert cli.main(["import-config", str(bad), "--allow", "mixed_precision", "--allow", "machne_rank", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name a file, or use --env"),
        ([FILE, "--from", "axolotl"], "there is no such system"),
        ([FILE, "-o", FILE], "it is the file that is imported"),
        ([FILE, "-o", "none/run.yaml"], "the folder is not there"),
        ([FILE, "-o", str(FIXTURES)], "it is no file's name"),
        ([FILE, "-o", ""], "it is no file's name"),
        ([FILE, "-o", "/dev/full"], "it cannot be written"),
        ([FILE, "-o", "-", "--json"], "both would be printed"),
        ([FILE, "--train.stepz=3"], "did you mean --train.steps=3"),
        ([FILE, "--train.steps=3"], "shardwise train run.yaml --train.steps=3"),
        ([FILE, "--parallel.layout=dp_shard=2"], "shardwise train run.yaml --parallel.layout=dp_shard=2"),
        ([str(FIXTURES / "nemo" / "hsdp-tp2.yaml"), "--ranks", "8", "--optim.lr=1"], "follow from"),
        ([FILE, "--allow", "machine_rank"], "no such key is refused"),
        ([TITAN, "--ranks", "6"], "6"),
        ([FILE, "--ranks", "0"], "give ranks a whole number from 1 on"),
        ([FILE, "--ranks", "8", "--ranks-per-node", "3"], "use a multiple of 3"),
    ],
)
def test_a_mistake_of_the_command_line_is_answered(capsys, words, says):
    assert cli.main(["import-config", *words]) == 2
    assert says in capsys.readouterr().err


def test_an_old_run_file_is_replaced_whole_or_not_at_all(capsys, monkeypatch, tmp_path):
    run, link = tmp_path / "run.yaml", tmp_path / "link.yaml"
    link.symlink_to(run)
    run.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "write_text", lambda path, *_, **__: path.write_bytes(b"half") and path.joinpath("x").stat()
        )
        assert cli.main(["import-config", FILE, "-o", str(link)]) == 2
    assert "it cannot be written" in capsys.readouterr().err
    assert run.read_text() == "old" and sorted(tmp_path.iterdir()) == [link, run]
    assert cli.main(["import-config", FILE, "-o", str(link)]) == 0
    assert f"replaced {link}, which was there" in capsys.readouterr().err
    assert link.is_symlink() and load_config(run, OPEN).config.launch.nproc == 8
    assert sorted(tmp_path.iterdir()) == [link, run]


def test_a_link_to_itself_is_no_output(capsys, tmp_path):
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert cli.main(["import-config", FILE, "-o", str(loop)]) == 2
    assert "it is no file's name" in capsys.readouterr().err and loop.is_symlink()


def test_the_run_file_is_printed_by_a_dash(capsys):
    assert cli.main(["import-config", FILE, "-o", "-", "--quiet"]) == 0
    assert "layout: dp_shard=-1" in capsys.readouterr().out


def test_a_closed_output_is_answered(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["import-config", FILE, "--quiet"]) == 2
    assert cli.main(["import-config", FILE, "--quiet", "-o", str(tmp_path / "run.yaml")]) == 0
    assert "a closed standard output" in capsys.readouterr().err
    assert load_config(tmp_path / "run.yaml", OPEN).config.launch.nproc == 8


def no_constant(word):
    raise AssertionError(word)


def test_json_is_json_and_stands_beside_the_run_file(capsys, tmp_path):
    run, file = tmp_path / "run.yaml", tmp_path / "ml.yaml"
    file.write_text("trainer: {max_steps: 3, grad_clipping: {clip_grad_norm: -.inf, clip_grad_norm_type: .inf}}\n")
    words = [str(file), "--from", "ml", "--ranks", "1", "--allow", "trainer.grad_clipping.clip_grad_norm"]
    assert cli.main(["import-config", *words, "--json", "-o", str(run)]) == 0, capsys.readouterr().err
    made = json.loads(capsys.readouterr().out, parse_constant=no_constant)
    assert made["run"]["train"]["norm_type"] == "inf" and load_config(run, OPEN).config.train.norm_type == "inf"
    assert "-inf" in [one["value"] for one in made["findings"] if one["key"] == "trainer.grad_clipping.clip_grad_norm"]


def test_an_error_is_json_too(capsys):
    assert cli.main(["import-config", FILE, "--json", "--ranks", "0"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"]["given"] == "ranks=0" and set(json.loads(printed.out)["error"]) == {
        "given",
        "why",
        "fix",
    }
    assert "ConfigError: ranks=0" in printed.err


def test_variables_of_the_environment_are_read(capsys, monkeypatch):
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2"), ("FSDP_OFFLOAD_PARAMS", "true")):
        monkeypatch.setenv(name, value)
    assert cli.main(["import-config", "--env"]) == 0
    assert "offload: true" in capsys.readouterr().out


def test_train_names_the_command_for_a_file_of_another_system(capsys):
    for file, system in ((TITAN, "torchtitan"), (FILE, "accelerate")):
        assert cli.main(["train", file]) == 2
        said = capsys.readouterr().err
        assert f"it is a configuration of {system}" in said
        assert f"fix: import it: shardwise import-config {file} -o run.yaml" in said


def test_it_is_quick_and_leaves_torch_out():
    code = (
        "import sys\nfrom shardwise.cli.main import main\n"
        f"assert main(['import-config', {TITAN!r}, '--ranks', '8', '--quiet']) == 0\n"
        "assert not {'torch', 'numpy', 'yaml'} & {*sys.modules}, sys.modules.keys()\n"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - began < 5  # half a second on a machine that does nothing else


def test_one_table_is_read_for_a_file_of_one_system():
    code = (
        "import sys\nfrom shardwise.dialects import table\nread = []\nrow = table._row\n"
        "table._row = lambda line: read.append(line) or row(line)\n"
        "from shardwise.run.imported import from_config\n"
        f"from_config({FILE!r})\nassert len(read) < 400, len(read)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


UNSAID = {"per_device_train_batch_size": 2, "max_steps": 6, "learning_rate": 0.01, "output_dir": "out"}
OWN = ("--model.build=own.py:model", "--data.build=own.py:data")


def test_a_function_of_ones_own_takes_the_place_of_what_the_file_leaves_open(capsys, tmp_path, monkeypatch):
    """Of import-config, and of the run: a model's directory, a data file and seq_len stand there since nothing else did."""
    monkeypatch.chdir(tmp_path)
    Path("args.json").write_text(json.dumps(UNSAID))
    words = ["import-config", "args.json", "--ranks", "2", "--from", "transformers", "-o", "run.yaml"]
    assert cli.main(words) == 0
    text = Path("run.yaml").read_text()
    assert "hf: MODEL_DIRECTORY" in text and "path: DATA.jsonl" in text and "TO_BE_WRITTEN" in text
    capsys.readouterr()
    read = load_config("run.yaml", OWN).config
    assert (read.model.build, read.model.hf, read.data.build, read.data.path) == (OWN[0][14:], None, OWN[1][13:], None)
    assert cli.main([*words, *OWN]) == 0
    said, text = capsys.readouterr(), Path("run.yaml").read_text()
    assert not any(
        word in f"{said.err}{text}" for word in ("MODEL_DIRECTORY", "DATA.jsonl", "TO_BE_WRITTEN", "missing  data.")
    )
    assert load_config("run.yaml", []).config == read
    assert (
        load_config("run.yaml", ["--data.build=null", "--data.path=x.txt", "--data.seq_len=8"]).config.data.seq_len == 8
    )


@pytest.mark.parametrize("more", ["--data.seq_len=8", "--data.path=DATA.jsonl", "--model.hf=MODEL_DIRECTORY"])
def test_what_was_given_beside_a_function_is_refused_still(capsys, tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    Path("args.json").write_text(json.dumps(UNSAID))
    assert cli.main(["import-config", "args.json", "--ranks", "2", "--from", "transformers", "-o", "run.yaml"]) == 0
    for words in ((*OWN, more), (more, *OWN)):
        with pytest.raises(ConfigError, match=r"would have no effect|each of them says which model"):
            load_config("run.yaml", words)


def test_what_is_still_to_be_written_contradicts_nothing_and_an_override_mends_what_is_refused(capsys, tmp_path):
    """Checkpoints of a part of the run, of which some are kept; and a value that the run file would refuse."""
    file = tmp_path / "args.json"
    args = {"output_dir": "out", "per_device_train_batch_size": 2, "num_train_epochs": 2, "save_total_limit": 2}
    file.write_text(json.dumps({**args, "save_steps": 0.25}))
    words = ["import-config", str(file), "--ranks", "2", "--from", "transformers"]
    assert cli.main(words) == 0
    assert "checkpoint: {every: TO_BE_WRITTEN, keep: 2}" in capsys.readouterr().out
    assert cli.main([*words, "--checkpoint.every=100"]) == 0
    assert "checkpoint: {every: 100, keep: 2}" in capsys.readouterr().out
    file.write_text(json.dumps({**args, "save_steps": 10, "torch_compile": True, "adam_beta1": 1.5}))
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "adam_beta1" in said and "optim.betas" in said
    assert cli.main([*words, "--optim.betas=[0.9, 0.95]"]) == 0
    assert cli.main([*words, "--optim.betas=[0.9, 1.5]"]) == 2  # nor is what it says believed
    assert "betas" in capsys.readouterr().err
