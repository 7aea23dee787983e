"""``Parallel``: made from the rows of techniques, the same from Python and from a file."""

import pickle

import pytest
import torch

import shardwise as sw
from shardwise.techniques import TECHNIQUES, Parallel
from shardwise.techniques.fold import options_of_proof


def test_none_stands_for_the_default_and_words_stay_words():
    assert Parallel.of(sharding=None, ddp=None, remat=None, precision="bf16") == Parallel(precision="bf16")
    assert Parallel.of(precision=torch.bfloat16).precision == sw.Precision(
        storage="float32", compute="bfloat16", reduce="float32"
    )


@pytest.mark.parametrize(
    ("options", "given", "fix"),
    [
        ({"precison": "bf16"}, "parallelize(precison='bf16')", "did you mean 'precision'?"),
        ({"layout": "dp_shard=2"}, "parallelize(layout='dp_shard=2')", "options of parallelize"),
        ({"sharding": "fsdp"}, "sharding='fsdp'", "write sharding=sw.Sharding("),
        ({"ddp": 25}, "ddp=25", "write ddp=sw.DDP(bucket_cap_mb=50), or leave it out"),
        ({"remat": "half"}, "remat='half'", "Remat(targets="),
        ({"compile": True}, "compile=True", "Compile(targets="),
        ({"precision": "fp8"}, "precision='fp8'", 'use "bf16"'),
    ],
)
def test_what_is_no_option_is_told_with_what_is(options, given, fix):
    with pytest.raises(sw.ConfigError) as caught:
        Parallel.of(**options)
    assert caught.value.given.startswith(given) and fix in caught.value.fix


def test_an_option_that_there_is_not_is_refused_by_parallelize_too(ranks):
    with pytest.raises(sw.RankError, match=r"parallelize\(precison='bf16'\)[\s\S]*did you mean 'precision'"):
        ranks.run(misspelled, 1)


def misspelled():
    with sw.init("dp_shard=1", device="cpu") as world:
        sw.parallelize(torch.nn.Linear(2, 2), world, precison="bf16")


def test_it_travels_to_other_processes_with_functions_in_it():
    given = Parallel(transforms=[choose_units, {"name": "x"}], sharding=sw.Sharding(units=choose_units))
    again = pickle.loads(pickle.dumps(given))
    assert again == given and again.transforms[0] is choose_units


def choose_units(name, module):
    return name.startswith("blocks.")


def test_every_technique_says_what_it_does_in_the_docstring_of_parallelize():
    for technique in TECHNIQUES:
        for option in technique.options:
            assert f"\n        {option.key}: " in sw.parallelize.__doc__
    assert "options: those of the techniques" not in sw.parallelize.__doc__


def test_a_proof_leaves_out_what_cannot_be_proved_there_and_says_so():
    asked = Parallel(precision="bf16", compile="blocks", remat="full", init="rank0")
    on_cpu, told = options_of_proof(asked, "cpu", 2)
    assert (on_cpu.precision, on_cpu.compile, on_cpu.remat, on_cpu.init, told) == (None, "blocks", "full", None, [])
    on_gpu, told = options_of_proof(asked, "cuda", 2)
    assert on_gpu.compile is None and told == ["compile, which would compile for the CPU"]
    assert options_of_proof(Parallel(remat="1MiB"), "cpu", 2)[0].remat.budget == 2 << 20  # the same choice
    assert options_of_proof(Parallel(remat="full"), "cuda", 2)[1] == []  # nothing was asked for that is left out
