"""Loading: the same configuration from every kind of file, origins, and what each mistake says."""

import math
import textwrap
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import Precision, Sharding
from shardwise.config.sources import BareSwitch, parse_yaml_value
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig, Train, load_config

YAML = """\
# a comment
model:
  build: pkg.mod:build
  args: {dim: 64, deep: {layers: [1, 2]}}
train:
  steps: 1e3

  on_nonfinite: skip
optim:
  lr: 3e-4
  betas: [0.9, 0.99]
parallel:
  layout: dp_shard=2
  precision: {compute: bf16}
"""
TOML = """\
# a comment
[model]
build = "pkg.mod:build"
args = {dim = 64, deep = {layers = [1, 2]}}
[train]
steps = 1_000

on_nonfinite = "skip"
[optim]
lr = 3e-4
betas = [
  0.9, 0.99,
]
[parallel]
layout = '''
dp_shard=2'''
precision.compute = "bf16"
"""
JSON = """\
{
 "model": {
  "build": "pkg.mod:build",
  "args": {"dim": 64, "deep": {"layers": [1, 2]}}},
 "train": {
  "steps": 1000,

  "on_nonfinite": "skip"},
 "optim": {
  "lr": 3e-4,
  "betas": [0.9, 0.99]},
 "parallel": {"layout": "dp_shard=2",
  "precision": {"compute": "bf16"}}
}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    return write


def failure(*args, kind=ConfigError):
    with pytest.raises(kind) as caught:
        load_config(*args)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["yaml", "toml", "json"])
def test_every_kind_of_file_says_the_same(write, kind):
    loaded = load_config(write(f"run.{kind}", {"yaml": YAML, "toml": TOML, "json": JSON}[kind]))
    config = loaded.config
    assert config.model.args == {"dim": 64, "deep": {"layers": [1, 2]}}
    assert (config.train.steps, config.train.on_nonfinite) == (1000, "skip")
    assert (config.optim.lr, config.optim.betas) == (3e-4, (0.9, 0.99))
    assert config.parallel.layout.strip() == "dp_shard=2"
    assert config.parallel.precision == Precision(compute="bfloat16")


@pytest.mark.parametrize(
    ("kind", "text", "lines"),
    [
        ("yaml", YAML, {"model.build": 3, "train.steps": 6, "train.on_nonfinite": 8, "optim.betas": 11}),
        ("toml", TOML, {"model.build": 3, "train.steps": 6, "train.on_nonfinite": 8, "optim.betas": 11}),
        ("json", JSON, {"model.build": 3, "train.steps": 6, "train.on_nonfinite": 8, "optim.betas": 11}),
        ("yaml", YAML, {"model.args.dim": 4, "model.args.deep.layers": 4, "parallel.precision.compute": 14}),
        ("toml", TOML, {"model.args.dim": 4, "parallel.layout": 15, "parallel.precision.compute": 17}),
        ("json", JSON, {"model.args.deep.layers": 4, "parallel.layout": 12, "parallel.precision.compute": 13}),
    ],
)
def test_origins_name_file_and_line(write, kind, text, lines):
    origins = load_config(write(f"run.{kind}", text), ["--train.seed=7"]).origins
    assert {key: origins[key] for key in lines} == {key: f"run.{kind}:{line}" for key, line in lines.items()}
    assert origins["train.seed"] == "override --train.seed"
    assert origins["log.dir"] == "default"


def test_every_value_has_an_origin(write):
    def leaves(record, path=""):
        for key in record.__struct_fields__:
            value = getattr(record, key)
            yield from leaves(value, f"{path}{key}.") if hasattr(value, "__struct_fields__") else [f"{path}{key}"]

    assert sorted(load_config(None).origins) == sorted(leaves(RunConfig()))


def test_nothing_given_is_the_default():
    assert load_config(None).config == RunConfig()


@pytest.mark.parametrize("name", ["empty.yaml", "empty.toml", "empty.json"])
def test_an_empty_file_is_the_default(write, name):
    assert load_config(write(name, "")).config == RunConfig()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e3", 1000.0),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("-5", -5),
        ("+.5", 0.5),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("null", None),
        ("", None),
        ("-.inf", -math.inf),
        ("12:30:45", "12:30:45"),
        ("2020-01-01", "2020-01-01"),
        ("'5'", "5"),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
        ("dp_shard=-1,tp=2", "dp_shard=-1,tp=2"),
    ],
)
def test_values_are_yaml_1_2(text, value):
    found = parse_yaml_value(text, "here")
    assert found == value
    assert type(found) in (type(value), BareSwitch)


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_read_back_as_written(number):
    assert Fraction(parse_yaml_value(repr(number), "here")) == Fraction(number)


# --- what mistakes say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("run.yaml", "train:\n  seed: 1\n  stesp: 3\n", "run.yaml:3"),
        ("run.toml", "[train]\nseed = 1\nstesp = 3\n", "run.toml:3"),
        ("run.json", '{"train": {\n"seed": 1,\n"stesp": 3}}', "run.json:3"),
    ],
)
def test_an_unknown_key_is_told_with_its_line_and_the_right_name(write, name, text, place):
    assert failure(write(name, text)) == (
        f"train.stesp ({place})\n"
        "  why: there is no key 'stesp' in train\n"
        "  fix: did you mean 'steps'? keys of train: steps, epochs, max_grad_norm, norm_type, clip_grad_value, fused, loss, count, forward, callback, seed, eval_every, on_nonfinite, scaler, tf32, deterministic and 6 more"
    )


def test_an_unknown_section_is_told(write):
    said = failure(write("run.yaml", "trian: {steps: 3}\n"))
    assert said.startswith("trian (run.yaml:1)\n")
    assert "did you mean 'train'? sections: model, data, parallel" in said


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("--train.step=5", "did you mean --train.steps=5?"),
        ("train.step=5", "did you mean --train.steps=5?"),
        ("--steps=5", "did you mean --train.steps=5?"),
        ("--seed=5", "did you mean --train.seed=5?"),
        ("--trian.steps=5", "did you mean --train.steps=5?"),
        ("--train.max-grad-norm=1", "did you mean --train.max_grad_norm=1?"),
        ("--parallel.sharding.unit=none", "did you mean --parallel.sharding.units=none?"),
        ("--train.zzzzz=1", "keys there: steps, epochs, max_grad_norm"),
    ],
)
def test_an_unknown_override_is_told_with_the_right_one(override, fix):
    said = failure(None, [override])
    assert said.startswith(f"override --{override.removeprefix('--')}\n  why: there is no key '")
    assert f"\n  fix: {fix}" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "train:\n  steps: many\n",
            "train.steps = 'many' (run.yaml:2)\n  why: expected a whole number >= 1, or null; got the text 'many'",
        ),
        ("train:\n  steps: 2.5\n", "expected a whole number >= 1, or null; got the number 2.5"),
        ("train:\n  steps: true\n", "got the switch true"),
        ("train:\n  steps: -1\n", "got the whole number -1"),
        ("train:\n  seed: null\n", "got null"),
        ("train:\n  steps: {a: 1}\n", "got a mapping"),
        (
            "train: 3\n",
            "train = 3 (run.yaml:1)\n  why: expected a mapping of steps, epochs, max_grad_norm",
        ),
        ("train:\n", "train (run.yaml:1)\n  why: the section is empty"),
        ("optim:\n  betas: [0.9, x]\n", "got the text 'x' at place 2 of the list"),
        ("optim:\n  betas: [0.9]\n", "expected a list of 2 (each: a number >= 0 and < 1); got a list of 1"),
        ("optim:\n  name: adam\n", "optim.name = 'adam' (run.yaml:2)\n  why: expected one of 'adamw', 'sgd'"),
        ("optim:\n  lr: .nan\n", "optim.lr = nan (run.yaml:2)\n  why: it is not a finite number"),
        ("log:\n  plot: no\n", "expected true or false; got the text 'no'"),
        ("parallel:\n  sharding:\n    engine: 3\n", "parallel.sharding.engine = 3 (run.yaml:3)"),
        ("model:\n  args: [1]\n", "model.args = [1] (run.yaml:2)\n  why: expected a mapping; got a list of 1"),
        ("- train\n", "why: it holds a list of 1, not sections with keys"),
    ],
)
def test_a_wrong_type_is_told_with_line_path_and_what_was_expected(write, text, words):
    assert words in failure(write("run.yaml", text))


SECTIONS = ("model", "data", "optim", "schedule")


@pytest.mark.parametrize("word", ["no", "Off", "YES", "on"])
@pytest.mark.parametrize("section", SECTIONS)
def test_a_switch_without_quotes_in_free_arguments_is_refused(write, section, word):
    """The user's code would get the text, and every text but "" is true: `tie: no` tied the weights."""
    meant = "true" if word in ("YES", "on") else "false"
    for where, said in {
        f"{section}:\n  build: own:fn\n  args:\n    tie: {word}\n": f"{section}.args.tie = {word} (run.yaml:4)",
        f"{section}:\n  build: own:fn\n  args: {{deep: [1, {{tie: {word}}}]}}\n": f"{section}.args.deep.tie = {word} (run.yaml:3)",
    }.items():
        assert failure(write("run.yaml", where)).startswith(
            f"{said}\n  why: without quotes it is a text here (YAML 1.2)"
        )
    for override in (f"--{section}.args.tie={word}", f"--{section}.args={{tie: {word}}}"):
        said = failure(None, [f"--{section}.build=own:fn", override])
        assert said.startswith(f"{section}.args.tie = {word} (override --{section}.args")
        assert said.endswith(f'fix: write {meant}, or "{word}" in quotes for the text')


@pytest.mark.parametrize("section", SECTIONS)
def test_a_switch_in_quotes_is_a_text(write, section):
    file = write(
        "run.yaml",
        f'{section}:\n  build: own:fn\n  args: {{a: \'no\', b: "on", c: ["Off"], d: false, e: y, f: Norway}}\n',
    )
    args = getattr(load_config(file, [f"--{section}.args.g='yes'"]).config, section).args
    assert args == {"a": "no", "b": "on", "c": ["Off"], "d": False, "e": "y", "f": "Norway", "g": "yes"}
    assert load_config(write("run.yaml", "data: {path: no}\nmodel: {freeze: [on]}\n"), []).config.model.freeze == (
        "on",
    )


@pytest.mark.parametrize(
    ("name", "text", "places"),
    [
        ("run.yaml", "train:\n  steps: 3\n  seed: 1\n  steps: 4\n", (4, 2)),
        ("run.json", '{"train": {\n"steps": 3,\n"seed": [1, {"steps": 2}],\n"steps": 4}}', (4, 2)),
    ],
)
def test_a_duplicate_key_is_refused_with_both_lines(write, name, text, places):
    assert failure(write(name, text)) == (
        f"{name}:{places[0]}: 'train.steps' is given twice\n"
        f"  why: it was given before, at {name}:{places[1]}, and only one of them could count\n"
        "  fix: remove one of the two"
    )


def test_a_duplicate_key_in_toml_is_refused(write):
    said = failure(write("run.toml", "[train]\nsteps = 3\nsteps = 4\n"))
    assert said.startswith("run.toml, line 3, column 10\n  why: not valid TOML: cannot overwrite a value")
    assert said.endswith("look at: steps = 4")


def test_keys_in_a_list_of_mappings_are_not_duplicates(write):
    file = write("run.json", '{"model": {"args": {"parts": [{"a": 1}, {"a": 2}], "a": 3}}}')
    assert load_config(file).config.model.args == {"parts": [{"a": 1}, {"a": 2}], "a": 3}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: b: c\n", "a.yaml, line 1, column 5\n  why: not valid YAML: mapping values are not allowed here"),
        ("a.yaml", "train:\n  steps: [1,\n  seed: 1\n", "that begins at line 2, column 10"),
        ("a.yaml", "train:\n\tsteps: 1\n", "fix: indent with spaces, not with tabs"),
        ("a.yaml", "train: 'x\n", "line 2, column 1"),
        ("a.yaml", "a: 1\n---\nb: 1\n", "a.yaml, line 2, column 1"),
        ("a.yaml", "a: *nope\n", "undefined alias"),
        ("a.yaml", "train:\n  steps: \x01\n", "a.yaml, line 2\n  why: not valid YAML: it holds the control character"),
        ("a.yaml", "a: &x {b: *x}\n", "contains itself"),
        ("a.yaml", "a:\n  <<: {b: 1}\n", "a.yaml:2: key <<"),
        ("a.yaml", "1: 2\n", 'quote it: "1"'),
        ("a.yaml", "? [1, 2]\n: 3\n", "keys are text"),
        ("a.yaml", "model: !!python/object:os.system x\n", "tags, which could build objects, are refused"),
        ("a.yaml", "model: !Mine {a: 1}\n", "tags, which could build objects, are refused"),
        ("a.yaml", "[1]\n", "a list of 1"),
        ("a.toml", "[train]\nseed = \n", "a.toml, line 2, column 8\n  why: not valid TOML: invalid value"),
        ("a.toml", "[train]\nseed = [1,", "why: not valid TOML: "),
        ("a.json", '{"train": {\n "seed": }}', "a.json, line 2, column 10\n  why: not valid JSON: expecting value"),
        ("a.json", '{"train": {', "a.json, line 1, column 12"),
        ("a.json", "[1]", "a list of 1"),
    ],
)
def test_a_broken_file_is_told_with_line_and_column(write, name, text, said):
    assert said in failure(write(name, text))


def test_a_missing_file_is_told(write, tmp_path):
    assert failure("nope.yaml") == (
        f"configuration file nope.yaml\n  why: no such file or directory\n"
        f"  fix: check the path; the working directory is {tmp_path}"
    )


@pytest.mark.parametrize(("name", "why"), [("a.ini", "files ending in '.ini' are not read"), ("a", "no extension")])
def test_another_kind_of_file_is_told_which_are_read(write, name, why):
    said = failure(write(name, "x"))
    assert why in said
    assert ".yaml, .yml, .toml, .json" in said


def test_a_file_that_is_not_text_is_told(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"a: \xff\xfe")
    assert "byte 3 is not UTF-8" in failure(tmp_path / "a.yaml")


def test_an_error_over_two_keys_names_both_lines(write):
    said = failure(write("run.yaml", "data:\n  global_batch: 10\n  micro_batch: 4\n"))
    assert "data.micro_batch=4 with data.global_batch=10 (run.yaml:2, run.yaml:3)" in said
    said = failure(write("run.yaml", "schedule:\n  warmup_steps: 100\n"), ["--train.steps=10"])
    assert "(run.yaml:2, override --train.steps)" in said


def test_a_scaler_is_for_float16(write):
    text = "train:\n  scaler:\n    init_scale: 1024\n"
    said = failure(write("run.yaml", text))
    assert "would have no effect" in said and "precision=fp16" in said
    config = load_config(write("run.yaml", text + "parallel:\n  precision: fp16\n")).config
    assert (config.train.scaler.init_scale, config.train.scaler.growth_interval) == (1024.0, 2000)
    assert "growth_factor" in failure(write("run.yaml", "train:\n  scaler:\n    growth_factor: 1.0\n"))


# --- overrides ------------------------------------------------------------------------------------------------------


def test_overrides_win_over_the_file_and_reach_free_arguments(write):
    file = write("run.yaml", YAML)
    loaded = load_config(file, ["train.steps=7", "--model.args.dim=32", "--model.args.new.deep=[1, 2]"])
    assert loaded.config.train.steps == 7
    assert loaded.config.model.args == {"dim": 32, "deep": {"layers": [1, 2]}, "new": {"deep": [1, 2]}}
    assert loaded.origins["model.args.dim"] == "override --model.args.dim"
    assert loaded.origins["model.args.deep.layers"] == "run.yaml:4"


def test_an_override_replaces_what_was_there(write):
    loaded = load_config(write("run.yaml", YAML), ["--model.args={depth: 2}", "--parallel.precision=null"])
    assert loaded.config.model.args == {"depth": 2}
    assert loaded.config.parallel.precision is None
    assert "model.args.dim" not in loaded.origins


def test_what_an_override_replaced_is_not_blamed(write):
    file = write("run.yaml", "data:\n  global_batch: 10\n  micro_batch: 5\n")
    said = failure(file, ["--data={micro_batch: 3}"])
    assert said.startswith("data.micro_batch=3 with data.global_batch=16 (override --data)\n")


def test_an_override_into_a_record(write):
    loaded = load_config(None, ["--parallel.sharding={units: [Block], buffers: mean}"])
    assert loaded.config.parallel.sharding == Sharding(units=("Block",), buffers="mean")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--train.steps=x"], "train.steps = 'x' (override --train.steps)\n  why: expected a whole number >= 1"),
        (["--train.seed="], "train.seed = None (override --train.seed)"),
        (["--train.steps.x=3"], "override --train.steps.x"),
        (["--train=3"], "train = 3 (override --train)"),
        (["train.steps"], "fix: write it as --train.steps=20"),
        (["--data.path=[1"], "override --data.path=[1\n  why: not valid YAML"),
        (["--train.steps=5", "train.steps=6"], "override --train.steps is given twice, as 5 and 6"),
        (["--parallel.precision=bf16", "--parallel.precision.compute=fp32"], "which has no keys"),
        (["--parallel.sharding.reshard_after_forward=1"], "(override --parallel.sharding.reshard_after_forward)"),
    ],
)
def test_a_bad_override_is_named(overrides, said):
    assert said in failure(None, overrides)


# --- functions ------------------------------------------------------------------------------------------------------

FUNCTIONS = """\
from shardwise.run.config import RunConfig, Train

def record():
    return RunConfig(train=Train(steps=70))

def mapping():
    return {"train": {"steps": 80, "seed": 1}}

def number():
    return 3

def typo():
    return {"train": {"stesp": 80}}

def odd():
    return {"train": {"steps": object}}
"""


def test_a_function_may_be_the_configuration(write):
    file = write("functions.py", FUNCTIONS)
    loaded = load_config(f"{file}:record", ["--train.seed=3"])
    assert loaded.config.train == Train(steps=70, seed=3)
    assert {key: origin for key, origin in loaded.origins.items() if origin != "default"} == {
        "train.steps": f"{file}:record",
        "train.seed": "override --train.seed",
    }
    assert load_config(f"{file}:mapping").config.train == Train(steps=80, seed=1)


def test_a_computed_default_of_a_function_is_computed_again(write):
    # RunConfig settles warmup_steps when it is built; taken for the function's wish, it would outlive the override.
    config = load_config(f"{write('functions.py', FUNCTIONS)}:record", ["--train.steps=5"]).config
    assert (config.train.steps, config.schedule.warmup_steps) == (5, 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("number", "it returned int, and a configuration is a mapping or a RunConfig"),
        ("typo", "train.stesp (functions.py:typo)"),
        ("odd", "got an object of type type"),
        ("recrod", "did you mean 'record'?"),
    ],
)
def test_a_function_that_does_not_do_is_told(write, name, said):
    assert said in failure(f"{write('functions.py', FUNCTIONS)}:{name}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[INST],[/INST]", """as a list of texts with brackets in them: '["[INST]", "[/INST]"]'"""),
        ("/x/\udcc3\udc9cbung", "set a locale of UTF-8, LC_ALL=C.UTF-8"),
    ],
)
def test_what_a_shell_gives_that_is_no_yaml_says_how_it_is_written(text, said):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"--model.hf={text}"])
    assert said in caught.value.fix


@pytest.mark.parametrize("word", ["proof", "verify", "check_proof", "verification"])
def test_the_proof_of_a_run_by_the_words_of_its_screen_finds_its_key(write, word):
    assert "did you mean --train.prove=false?" in failure(None, [f"--train.{word}=false"])
    assert "did you mean --train.prove=false?" in failure(None, [f"--{word.replace('_', '-')}=false"])
    assert "fix: did you mean 'prove'?" in failure(write("run.yaml", f"train: {{{word}: false}}"), [])
    with pytest.raises(ConfigError, match="did you mean 'prove'"):
        Train(**{word: False})


def test_all_unknown_keys_of_a_file_are_told_at_once(write):
    text = """\
    optim: {weigth_decay: 0}
    parallel: {remat: {mode: ful, evry: 2}, sharding: {offlaod: true}}
    train:
      stpes: 3
      learning_rate: 1e-3
      warmup_steps: 4
    """
    said = failure(write("run.yaml", text), [])
    assert "optim.weigth_decay (run.yaml:1): did you mean 'weight_decay'?" in said
    assert "\n       parallel.remat.evry (run.yaml:2): did you mean 'every'?" in said
    assert "\n       parallel.sharding.offlaod (run.yaml:2): did you mean 'offload'?" in said
    assert "\n       train.stpes (run.yaml:4): did you mean 'steps'?" in said
    assert "\n       train.learning_rate: 0.001: write optim: {lr: 0.001}\n" in said
    assert "\n       train.warmup_steps: 4: write schedule: {warmup_steps: 4}\n" in said
    assert "train.learning_rate: 0.001, train.warmup_steps: 4 (run.yaml:5)" in said and "ful" not in said.split()
    only = failure(write("run.yaml", "train: {steps: 3}\noptim: {weigth_decay: 0}\nlog: {every: no}\n"), [])
    assert only.startswith(
        "optim.weigth_decay (run.yaml:2)\n  why: there is no key 'weigth_decay' in optim\n  fix: did you"
    )


ALIASES = "\n".join(
    ["a: &a [x,x,x,x,x,x,x,x,x]", *[f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]]
)  # fmt: skip


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("bomb.yaml", ALIASES, "aliases make more values"),
        ("deep.yaml", "a: " + "[" * 5000 + "]" * 5000, "too deeply"),
        ("deep.json", '{"a": ' + "[" * 30_000 + "]" * 30_000 + "}", "too deeply"),
        ("deep.toml", "a = " + "[" * 3000 + "]" * 3000, "too deeply"),
        ("digits.yaml", "a: " + "9" * 5000, "digits"),
        ("digits.json", '{"a": ' + "9" * 5000 + "}", "digits"),
        ("digits.toml", "a = " + "9" * 5000, "digits"),
    ],
)
def test_what_no_file_holds_is_told_and_not_read(write, name, text, why):
    with pytest.raises(ConfigError, match=why):
        load_config(write(name, text))


def test_an_override_that_lies_too_deep_is_told():
    with pytest.raises(ConfigError, match="too deeply"):
        parse_yaml_value("[" * 5000 + "]" * 5000, "--train.steps")
