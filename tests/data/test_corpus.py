"""Token files: every token predicted once, parts that share none, and errors that say what to change."""

import numpy as np
import pytest
import torch

from shardwise.data.corpus import TokenFile, TokenWindows, pydoc_text
from shardwise.errors import ConfigError


def test_pydoc_text_is_english_long_and_the_same_each_time():
    text = pydoc_text()
    assert len(text) > 200_000 and " the " in text
    assert text == pydoc_text()


def test_every_token_but_the_first_is_a_target_once():
    data = TokenWindows(np.arange(100, dtype=np.uint8), 8)
    assert len(data) == 12
    targets = torch.cat([data[i]["input_ids"][1:] for i in range(len(data))])
    assert targets.tolist() == list(range(1, 97))
    assert data[0]["input_ids"].dtype == torch.int64 and data[0]["input_ids"].shape == (9,)
    assert all(data[i]["input_ids"][-1] == data[i + 1]["input_ids"][0] for i in range(11))


def test_windows_end():
    data = TokenWindows(np.arange(9, dtype=np.uint8), 8)
    assert [row["input_ids"].tolist() for row in data] == [list(range(9))]
    for index in (1, -1):
        with pytest.raises(IndexError):
            data[index]


def test_split_is_by_position_and_shares_no_token():
    train, val = TokenWindows(np.arange(200, dtype=np.uint8), 4).split(0.25)
    assert train.tokens.tolist() == list(range(150)) and val.tokens.tolist() == list(range(150, 200))
    assert (len(train), len(val)) == (37, 12)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 1.5])
def test_split_refuses_no_fraction(fraction):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        TokenWindows(np.zeros(200, np.uint8), 4).split(fraction)


def test_split_names_the_part_that_is_too_short():
    with pytest.raises(ConfigError, match=r"tokens \(validation part\) with 2 tokens"):
        TokenWindows(np.zeros(200, np.uint8), 4).split(0.01)


@pytest.mark.parametrize("suffix", [".txt", ".py", ".md", ""])
def test_text_is_its_bytes(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    path.write_text("Hällo, Welt! " * 3, encoding="utf-8")
    data = TokenFile(path, 5)
    assert bytes(data[0]["input_ids"].tolist()) == "Hällo, Welt!".encode()[:6]


def test_arrays_are_mapped_not_read(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "t.npy", tokens)
    tokens.tofile(tmp_path / "t.bin")
    for data in (
        TokenFile(tmp_path / "t.npy", 10, vocab=1000),
        TokenFile(str(tmp_path / "t.bin"), 10, dtype="uint16", vocab=1000),
    ):
        assert isinstance(data.tokens, np.memmap)
        assert data[7]["input_ids"].tolist() == list(range(70, 81))
        assert isinstance(data.split(0.1)[1].tokens, np.memmap)


@pytest.mark.parametrize(
    ("name", "content", "options", "text"),
    [
        ("gone.txt", None, {}, r"gone\.txt'\n  why: there is no such file"),
        ("empty.txt", b"", {}, "it is empty"),
        ("short.txt", b"12345678", {}, "with 8 tokens\n  why: one window of seq_len=8 needs 9 tokens"),
        ("archive.txt", b"PK\x00\x00" * 9, {}, "it holds zero bytes, so it is not a text"),
        ("t.txt", b"a" * 99, {"dtype": "uint16"}, "dtype='uint16' for .*the option would have no effect"),
        ("t.bin", b"a" * 99, {}, "dtype=None for .*does not say which integers"),
        ("t.bin", b"a" * 99, {"dtype": "float32"}, "dtype='float32'"),
        ("t.bin", b"a" * 99, {"dtype": "unit16"}, "dtype='unit16'"),
        ("t.bin", b"a" * 99, {"dtype": "uint16"}, "of 99 bytes as uint16\n  why: the size is not a multiple of 2"),
        ("t.bin", b"\1\1" * 99, {"dtype": "uint16"}, "token 257 at position 0 .*\n  why: the vocabulary has 256"),
        ("t.bin", b"\x01\xff" * 50, {"dtype": "int8"}, "token -1 at position 1"),
        ("t.npy", b"not an array, only text", {}, "cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, name, content, options, text):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="(?s)" + text):
        TokenFile(tmp_path / name, 8, **options)


def test_a_directory_is_not_a_file(tmp_path):
    with pytest.raises(ConfigError, match="it is a directory"):
        TokenFile(tmp_path, 8)


@pytest.mark.parametrize("array", [np.zeros((4, 40), np.uint8), np.zeros(40, np.float32)])
def test_arrays_that_are_no_row_of_integers_are_named(tmp_path, array):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(ConfigError, match="one long row of integers"):
        TokenFile(tmp_path / "t.npy", 8)


def test_pickled_arrays_are_never_executed(tmp_path):
    np.save(tmp_path / "t.npy", np.array([{"a": 1}] * 40, dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenFile(tmp_path / "t.npy", 8)


def test_an_unknown_vocabulary_refuses_only_negative_tokens():
    assert len(TokenWindows(np.full(40, 60_000), 8, vocab=None)) == 4
    with pytest.raises(ConfigError, match="tokens are numbered from 0"):
        TokenWindows(np.full(40, -1), 8, vocab=None)


def test_a_bad_token_behind_the_part_looked_at_is_found_when_read(monkeypatch):
    monkeypatch.setattr("shardwise.data.corpus._SCANNED", 20)
    tokens = np.zeros(100, np.int64)
    tokens[50] = 256
    data = TokenWindows(tokens, 8)
    with pytest.raises(ConfigError, match="token 256 at position 50"):
        [data[i] for i in range(len(data))]
