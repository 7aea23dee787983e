"""Unknown keywords of the classes that a script builds: refused with the nearest name, and signatures stay what they are."""

import inspect

import pytest

import shardwise as sw

SLIPS = {
    "TrainStep": ("max_grad_nrom", "max_grad_norm"),
    "Loader": ("global_bacth", "global_batch"),
    "CheckpointManager": ("keep_evry", "keep_every"),
    "SFTDataset": ("seqlen", "seq_len"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_an_unknown_keyword_is_refused_with_the_nearest_name(name):
    slip, meant = SLIPS[name]
    with pytest.raises(sw.ConfigError) as caught:
        getattr(sw, name)(None, None, **{slip: 1})
    assert caught.value.given == f"{name}({slip}=1)"
    assert caught.value.fix.startswith(f"did you mean '{meant}'? arguments of {name}: ")


def test_a_keyword_without_a_near_name_lists_those_there_are():
    with pytest.raises(sw.ConfigError, match=r"Loader\(xyz=True\)\n.*\n.*: dataset, world, global_batch, micro_batch"):
        sw.Loader([1], None, global_batch=1, xyz=True)


@pytest.mark.parametrize("name", SLIPS)
def test_the_signature_is_that_of_the_constructor(name):
    found = inspect.signature(getattr(sw, name))
    assert SLIPS[name][1] in found.parameters
    assert not {p.kind for p in found.parameters.values()} & {
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }


def test_what_python_says_of_a_missing_argument_stays():
    with pytest.raises(TypeError, match="global_batch"):
        sw.Loader([1], None)
