"""Option records: short words, checks at construction from Python, no torch."""

import msgspec
import pytest

from shardwise import Parallel, Precision, Sharding
from shardwise.config.dtype_words import DTYPE_WORDS
from shardwise.errors import ConfigError
from shardwise.techniques.precision.options import precision_of


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (None, (None, None, None, None, "root", {})),
        ("", (None, None, None, None, "root", {})),
        ("fp32", ("float32", "float32", "float32", None, "root", {})),
        ("bf16", ("float32", "bfloat16", "float32", None, "root", {})),
        ("fp16", ("float32", "float16", "float32", None, "root", {})),
        ("half", ("float32", "float16", "float32", None, "root", {})),
        ("fp64", ("float64", "float64", "float64", None, "root", {})),
    ],
)
def test_precision_words(word, expected):
    assert msgspec.structs.astuple(precision_of(word)) == expected


def test_a_precision_record_passes_through():
    record = Precision(compute="bf16", cast_inputs="none")
    assert precision_of(record) is record


@pytest.mark.parametrize("word", ["int8", "FP32", "float8", 16])
def test_other_precision_words_are_refused(word):
    with pytest.raises(ConfigError, match=r"(?s)precision=.*float32.*fp64"):
        precision_of(word)


@pytest.mark.parametrize("word", list(DTYPE_WORDS))
def test_dtype_words_become_torchs_names(word):
    torch = pytest.importorskip("torch")
    name = Precision(storage=word).storage
    assert getattr(torch, name) is getattr(torch, word, getattr(torch, DTYPE_WORDS[word]))


def test_an_empty_dtype_is_none():
    assert Precision(storage="", reduce=None) == Precision()


@pytest.mark.parametrize("key", ["storage", "compute", "reduce", "output"])
def test_an_unknown_dtype_lists_those_there_are(key):
    with pytest.raises(ConfigError) as caught:
        Precision(**{key: "int4"})
    assert str(caught.value) == (
        f"Precision({key}='int4')\n"
        "  why: that is not a dtype Shardwise knows\n"
        "  fix: use one of float32, float16, bfloat16, float64, double, half, fp32, fp16, bf16, fp64"
    )


@pytest.mark.parametrize("reshard", [True, False, 2, 8])
def test_reshard_takes_switches_and_numbers_from_two(reshard):
    kept = Sharding(reshard_after_forward=reshard).reshard_after_forward
    assert kept == reshard
    assert type(kept) is type(reshard)  # 1 and True are equal, and mean different things


@pytest.mark.parametrize("reshard", [1, 0, -1])
def test_reshard_over_less_than_two_ranks_is_refused(reshard):
    with pytest.raises(ConfigError, match="2 or more"):
        Sharding(reshard_after_forward=reshard)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_unit_bytes": -1}, "expected a whole number >= 0, or null; got the whole number -1"),
        ({"min_unit_bytes": True}, "got the switch true"),
        ({"min_unit_bytes": "16MiB"}, "got the text '16MiB'"),
        ({"engine": "fsdp"}, "did you mean 'fsdp2'"),
        ({"buffers": "rank1"}, "did you mean 'rank0'"),
        ({"units": 3}, "expected text, or a list (each: text); got the whole number 3"),
        ({"units": "Block", "min_unit_params": 3}, "each module named is a unit, whatever its size"),
        (
            {"min_unit_params": 3, "min_unit_bytes": 4},
            "units are merged by number, so min_unit_bytes would have no effect",
        ),
        ({"pin_memory": False}, "nothing is kept in host memory, so pin_memory would have no effect"),
        ({"prefetch": "noen"}, "did you mean 'none'?"),
        ({"sync_every_microbatch": "all"}, "expected true or false, or one of 'reduce_scatter'"),
        ({"reshard_after_forward": {"a": 1}}, "so it is 2 or more"),
        ({"reshard_after_forward": False, "reshard_every": 2}, "no unit frees its parameters"),
        ({"engine": "ddp", "prefetch": "none"}, "ddp keeps whole copies, so prefetch would have no effect"),
        ({"units": ["a", 3]}, "the whole number 3 at place 2 of the list"),
        ({"units": [""]}, "an empty pattern matches no module"),
        ({"units": "none", "min_unit_bytes": 0}, "one unit whatever its size, so min_unit_bytes would have no effect"),
        ({"units": ("blocks.*",), "min_unit_bytes": 0}, "each module named is a unit, whatever its size"),
        ({"engine": "ddp", "min_unit_bytes": 0}, "min_unit_bytes would have no effect"),
        ({"engine": "ddp", "units": "none"}, "units would have no effect"),
        ({"engine": "ddp", "reshard_after_forward": False}, "reshard_after_forward would have no effect"),
    ],
)
def test_sharding_refuses(options, words):
    with pytest.raises(ConfigError) as caught:
        Sharding(**options)
    assert words in str(caught.value)


def test_patterns_may_come_as_a_list():
    assert Sharding(units=["Block*"]).units == ("Block*",)
    assert Sharding(units="Block, blocks.*").units == ("Block", "blocks.*")
    assert Sharding(units=callable).units is callable


def test_records_are_frozen_and_take_keywords_only():
    with pytest.raises(AttributeError):
        Sharding().engine = "ddp"
    with pytest.raises(TypeError):
        Sharding("ddp")
    with pytest.raises(ConfigError, match="egine"):
        Sharding(egine="ddp")


def test_records_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match="an object of type Precision"):
        Parallel(sharding=Precision())


def test_a_layout_needs_an_axis():
    with pytest.raises(ConfigError, match="names at least one axis"):
        Parallel(layout=" ")


class Block:
    """Stands for a module's class, which a record takes by its path."""


def test_classes_are_named_by_their_path():
    path = f"{__name__}.Block"
    assert Sharding(units=Block).units == (path,) and Sharding(units=[Block, "head"]).units == (path, "head")  # type: ignore[arg-type]
    assert Sharding(reshard_after_forward={Block: False}).reshard_after_forward == {path: False}  # type: ignore[arg-type]
    assert Precision(parts={Block: "fp32"}).parts == {path: "fp32"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Precision(parts={"Norm": 3}), "expected text as parts['Norm']; got the whole number 3"),
        (lambda: Precision(parts={"a": "fp32", "b": Precision()}), "as parts['b']; got an object of type Precision"),
        (lambda: Precision(parts={4: "fp32"}), "expected text as its key; got the whole number 4"),
        (
            lambda: Sharding(reshard_after_forward={"Block": "no"}),
            "expected true or false, or a whole number as reshard_after_forward['Block']; got the text 'no'",
        ),
    ],
)
def test_of_a_mapping_the_entry_at_fault_is_named(make, why):
    with pytest.raises(ConfigError) as caught:
        make()
    assert why in caught.value.why
