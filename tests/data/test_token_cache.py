"""Tokens that are kept: the same as those that are not, made once, made anew when anything changed, and never in the way."""

import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import chat

import shardwise as sw
from shardwise.cli import main as cli
from shardwise.data import file_digest, part_file, token_cache, token_store
from shardwise.data.corpus import TokenWindows, encode
from shardwise.data.same_dataset import digest_of_dataset
from shardwise.data.sft.encode_record import Encoder
from shardwise.data.token_cache import TokenCache, cache_of
from shardwise.data.token_store import open_tokens
from shardwise.errors import ConfigError

WORDS = ["what", "is", "the", "capital", "of", "France", "?", "Paris", "Hello", "there", "how", "are", "you", "today"]


def records(path: Path, num: int = 40) -> Path:
    lines = []
    for i in range(num):
        said = " ".join(WORDS[(i * j) % len(WORDS)] for j in range(1 + i % 7))
        turns = [{"role": "user", "content": f"{i} {said}"}, {"role": "assistant", "content": said[::-1]}]
        lines.append({"messages": turns * (1 + i % 2)} if i % 3 else {"prompt": said, "completion": f" {i}"})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def equal(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)
        for a, b in ((one[i], other[i]) for i in range(len(one)))
    )


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """The lines that were encoded."""
    lines: list[int] = []
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, record: lines.append(record.line) or encode(self, record))
    return lines


@pytest.mark.parametrize("pack", [False, True])
def test_kept_records_are_the_same_samples_and_are_encoded_once(tmp_path, counted, pack):
    path, tokenizer = records(tmp_path / "x.jsonl"), chat.tokenizer()
    options = {"seq_len": 60, "pack": pack}
    plain = sw.SFTDataset(path, tokenizer, **options)
    first = sw.SFTDataset(path, tokenizer, cache=tmp_path / "kept", **options)
    assert len(counted) == 80
    second = sw.SFTDataset(path, tokenizer, cache=tmp_path / "kept", **options)
    assert len(counted) == 80 and not second.documents.rows.flags.writeable
    for one, other in ((plain, first), (plain, second), *zip(plain.split(0.3), second.split(0.3), strict=True)):
        assert equal(one, other) and one.report == other.report and one.question() == other.question()
        assert digest_of_dataset(one) == digest_of_dataset(other)
    assert digest_of_dataset(plain) != digest_of_dataset(plain.split(0.3)[0])
    with pytest.raises(ConfigError) as whole:
        plain.limit(300)
    with pytest.raises(ConfigError) as kept:
        second.limit(300)
    assert str(whole.value) == str(kept.value) and "line 1 of" in str(kept.value)
    second.limit(400)


def test_packed_and_padded_runs_share_what_is_kept_and_every_other_change_makes_it_anew(tmp_path, counted):
    path, kept = records(tmp_path / "x.jsonl", 12), tmp_path / "kept"

    def num_encoded(tokenizer: Any = None, **options: Any) -> int:
        counted.clear()
        sw.SFTDataset(path, tokenizer or chat.tokenizer(), cache=kept, **{"seq_len": 60, **options})
        return len(counted)

    assert [num_encoded(), num_encoded(), num_encoded(pack=True)] == [12, 0, 0]
    assert num_encoded(seq_len=61) == num_encoded(unusable="drop") == num_encoded(chat.tokenizer(chat.MARKED)) == 12
    assert num_encoded(chat.tokenizer(eos="</s>")) == num_encoded(chat.tokenizer(trim_offsets=True)) == 12
    facts = path.stat()
    text = path.read_text()
    path.write_text(text.replace("Hello", "Jello"))  # of the same size, and, as rsync and cp -p do it, the same time
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert path.stat().st_size == facts.st_size and path.stat().st_mtime_ns == facts.st_mtime_ns
    assert num_encoded() == 12
    path.write_text(text)
    assert num_encoded() == 0  # the content it had before
    path = path.rename(tmp_path / "of another name.jsonl")
    assert num_encoded() == 0


def test_a_template_that_writes_the_date_is_rendered_anew_each_day(tmp_path, counted, monkeypatch):
    path, dated = records(tmp_path / "x.jsonl", 3), chat.tokenizer("{# strftime_now #}" + chat.CHATML)
    day = "2026-01-01"

    class Clock:
        @classmethod
        def now(cls):
            return cls()

        def astimezone(self):
            return self

        def date(self):
            return day

    monkeypatch.setattr("shardwise.data.sft.encode_file.datetime.datetime", Clock)
    for day, num in (("2026-01-01", 3), ("2026-01-01", 3), ("2026-01-02", 6)):  # noqa: B007
        sw.SFTDataset(path, dated, seq_len=60, cache=tmp_path / "kept")
        assert len(counted) == num


def test_a_kept_text_is_the_same_row_of_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.data.corpus._PIECE", size := 1 << 15)
    chat.tokenizer().save_pretrained(tmp_path)
    path, file = tmp_path / "text.txt", tmp_path / "tokenizer.json"
    lines = "".join(f"{' '.join(WORDS[i % 9 :])} \u00e9\u65e5{i}\n" for i in range(3_000))
    path.write_text(lines.replace("\n", "\r\n", 50), newline="")  # which stay as they are
    assert path.stat().st_size > 3 * size
    plain, cache = encode(path, file), TokenCache(tmp_path / "kept")
    made, again = (encode(path, file, cache) for _ in range(2))
    assert plain.dtype == made.dtype == again.dtype == np.uint32
    assert np.array_equal(plain, made) and np.array_equal(plain, again)
    assert "made in" in cache.notes[0] and "as kept in" in cache.notes[1]
    assert equal(TokenWindows(plain, 64, vocab=400), TokenWindows(again, 64, vocab=400))
    text = path.read_bytes().decode()
    whole = text[:size]  # the first piece, to the end of its line
    from tokenizers import Tokenizer

    rest = text[size:]
    ids = Tokenizer.from_file(str(file)).encode(whole + rest[: rest.index("\n") + 1], add_special_tokens=False).ids
    assert plain[: len(ids)].tolist() == ids
    path.write_bytes(lines.encode() + b"\xe4 is Latin-1")
    for keeps in (None, cache):
        with pytest.raises(ConfigError, match=f"at byte {len(lines.encode())}"):
            encode(path, file, keeps)
    assert not [*(tmp_path / "kept").glob(".*.part")]


def test_a_damaged_or_foreign_entry_is_made_anew(tmp_path, counted):
    path, kept, tokenizer, told = records(tmp_path / "x.jsonl", 10), tmp_path / "kept", chat.tokenizer(), []
    whole = sw.SFTDataset(path, tokenizer, seq_len=60, cache=kept)
    (entry,) = kept.glob("tokens-*")
    good = entry.read_bytes()
    at = good.index(b'{"inputs"')
    damages = {
        "empty": b"",
        "cut off": good[:-1],
        "cut at the index": good[:at],
        "longer": good + b"x",
        "another name": b"x" + good[1:],
        "index": good[: at + 30] + b"#" + good[at + 31 :],
        "arrays": good[: at - 5] + bytes([good[at - 5] ^ 1]) + good[at - 4 :],
        "tokens": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "tokens outside of the vocabulary": good[:40] + b"\x7f" * 8 + good[48:],
        "tokens are missing": good[:32] + good[40:],
        "not one of ours": b"\0" * len(good),
        "": good[:32].replace(b"version 2", b"version 1")
        + good[32:],  # of an older Shardwise, which had no checksum of tokens
    }
    for name, data in damages.items():
        counted.clear()
        told.clear()
        entry.unlink()
        entry.write_bytes(data)
        cache = TokenCache(kept, say=lambda *words: told.append(" ".join(words)))
        assert equal(sw.SFTDataset(path, tokenizer, seq_len=60, cache=cache), whole), name
        assert len(counted) == 10 and entry.read_bytes() == good, name
        assert len(told) == bool(name) and all(
            "trouble" in text and "damaged (" in text and str(entry) in text for text in told
        ), name
    inputs = json.loads(good[at : good.rindex(b"}") + 1])["inputs"]
    assert open_tokens(entry, inputs) is not None and open_tokens(entry, {**inputs, "seq_len": 61}) is None


def test_a_damaged_entry_that_cannot_be_removed_is_not_used(tmp_path, monkeypatch):
    path, tokenizer, told = records(tmp_path / "x.jsonl", 10), chat.tokenizer(), []
    whole = sw.SFTDataset(path, tokenizer, seq_len=60)
    sw.SFTDataset(path, tokenizer, seq_len=60, cache=tmp_path / "kept")
    (entry,) = (tmp_path / "kept").glob("tokens-*")
    entry.write_bytes(entry.read_bytes()[:40] + bytes(8) + entry.read_bytes()[48:])

    def locked(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    # Root may remove anything, so that no right of the folder keeps it from that.
    monkeypatch.setattr(Path, "unlink", locked)
    for lock in (True, False):  # without: as in a folder that can be read only
        if not lock:
            monkeypatch.setattr("shardwise.data.token_cache.try_lock", locked)
        told.clear()
        cache = TokenCache(tmp_path / "kept", say=lambda *words: told.append(" ".join(words)))
        assert equal(sw.SFTDataset(path, tokenizer, seq_len=60, cache=cache), whole)
        assert len(told) == 1 and "they are damaged there (its tokens have changed)" in told[0]


def test_those_that_wait_for_one_that_checks_take_its_word(tmp_path, monkeypatch):
    source, context = tmp_path / "x.txt", multiprocessing.get_context("fork")
    source.write_text("text")
    sums, troubles, ready = context.Value("i", 0), context.Value("i", 0), context.Barrier(3)
    slow, leave = token_store._sum, token_cache.note_of

    def summed(*given: Any) -> int:
        with sums.get_lock():
            sums.value += 1
        time.sleep(0.5)
        return slow(*given)

    def noted(path: Path) -> Any:
        if not begun:
            begun.append(1)
            found = leave(path)
            ready.wait(20)  # all have looked before the first has the lock
            return found
        return leave(path)

    def produce(add: Any) -> Any:
        add(np.arange(5000))
        return {}, {}

    def run() -> None:
        def say(kind: str, text: str) -> None:
            with troubles.get_lock():
                troubles.value += kind == "trouble"

        found = TokenCache(tmp_path / "kept", say=say).tokens(source, {}, produce, np.int32)
        assert found.path is not None and np.array_equal(found.tokens, np.arange(5000))

    begun: list[int] = [1]
    run()
    (entry,) = (tmp_path / "kept").glob("tokens-*")
    monkeypatch.setattr(token_store, "_sum", summed)
    monkeypatch.setattr(token_cache, "note_of", noted)
    for num_sums, num_troubles in ((1, 0), (2, 3)):  # the second is of what is made anew
        begun.clear()
        sums.value = troubles.value = 0
        processes = [context.Process(target=run) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
        assert sums.value == num_sums and troubles.value == num_troubles
        entry.write_bytes(entry.read_bytes()[:40] + bytes(8) + entry.read_bytes()[48:])


def test_a_folder_that_cannot_be_used_costs_a_sentence_and_nothing_else(tmp_path, monkeypatch):
    path, tokenizer, told = records(tmp_path / "x.jsonl", 10), chat.tokenizer(), []
    plain = sw.SFTDataset(path, tokenizer, seq_len=60)
    (tmp_path / "file").write_text("")
    cache = TokenCache(tmp_path / "file" / "kept", say=lambda kind, text: told.append(f"{kind}: {text}"))
    for _ in range(2):
        assert equal(sw.SFTDataset(path, tokenizer, seq_len=60, cache=cache), plain)
    assert (
        len(told) == 1 and told[0].startswith("trouble: ") and "Not a directory" in told[0] and "data.cache" in told[0]
    )
    full = TokenCache(tmp_path / "full", say=lambda kind, text: told.append(f"{kind}: {text}"))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1][1]))  # as a disk with 600 bytes left
    try:
        assert equal(sw.SFTDataset(path, tokenizer, seq_len=60, cache=full), plain)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])
    assert len(told) == 2 and "File too large" in told[1] and "in memory" in told[1]
    assert not [*(tmp_path / "full").glob("*tokens-*part")] and not [*(tmp_path / "full").glob("tokens-*")]


def slowly(folder: str, source: str, made: Any, seconds: float) -> None:
    def produce(add):
        with made.get_lock():
            made.value += 1
        for i in range(10):
            add(np.full(1000, i, np.int32))
            time.sleep(seconds / 10)
        return {}, {}

    found = TokenCache(Path(folder)).tokens(source, {"kind": "test"}, produce, np.int32)
    assert found.path is not None and found.tokens[::1000].tolist() == [*range(10)]


def test_of_processes_that_start_at_once_one_makes_an_entry_also_after_a_kill(tmp_path):
    source, context = tmp_path / "x.txt", multiprocessing.get_context("fork")
    source.write_text("text")
    made = context.Value("i", 0)

    def begun(seconds: float) -> Any:
        process = context.Process(target=slowly, args=(str(tmp_path / "kept"), str(source), made, seconds))
        process.start()
        return process

    killed = begun(30.0)
    while not [*(tmp_path / "kept").glob(".tokens-*.part")]:
        time.sleep(0.02)
    others = [begun(0.5) for _ in range(3)]
    time.sleep(0.3)
    assert made.value == 1  # the others wait
    os.kill(killed.pid, signal.SIGKILL)
    for process in others:
        process.join(30)
        assert process.exitcode == 0
    assert made.value == 2 and not [*(tmp_path / "kept").glob("*.part")]
    killed.join(5)


def test_what_killed_processes_have_left_of_any_entry_is_removed_and_nothing_else(tmp_path):
    source, kept, context = tmp_path / "x.txt", tmp_path / "kept", multiprocessing.get_context("fork")
    source.write_text("text")

    def begun(name: str) -> Any:
        (tmp_path / name).write_text(name)
        before = {*kept.glob(".tokens-*.part")}
        process = context.Process(
            target=slowly,
            args=(str(kept), str(tmp_path / name), context.Value("i", 0), 6.0 if name == "lives" else 60.0),
        )
        process.start()
        while not ({*kept.glob(".tokens-*.part")} - before):
            time.sleep(0.02)
        return process, ({*kept.glob(".tokens-*.part")} - before).pop()

    (killed, left), (lives, part) = begun("killed"), begun("lives")
    os.utime(part, (0, 0))  # the clock of a file server may say anything
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(5)
    host, old = socket.gethostname(), time.time() - 7200
    parts = {
        f".tokens-0.{host}-{os.getpid()}-00.part": (None, True),  # its number belongs to another process by now
        f".tokens-0.{host}-x-12-00.part": (None, False),  # another host, of which ours is the beginning
        ".tokens-0.elsewhere-12-00.part": (None, False),
        ".tokens-1.elsewhere-12-00.part": (old, True),
        f".file-0.json.{host}-12.part": (None, False),  # a digest that is being written, without a lock
        f".file-1.json.{host}-12.part": (old, True),
    }
    for name, (age, _) in parts.items():
        (kept / name).write_text("")
        if age is not None:
            os.utime(kept / name, (age, age))
    TokenCache(kept).tokens(source, {}, lambda add: (add(np.arange(3)), ({}, {}))[1], np.int32)
    assert not left.exists() and part.exists()
    assert {name for name in parts if not (kept / name).exists()} == {name for name, (_, gone) in parts.items() if gone}
    lives.join(30)
    assert lives.exitcode == 0 and not part.exists()


def test_a_part_that_is_removed_before_it_has_its_lock_is_begun_again(tmp_path, monkeypatch):
    flock, removed = part_file.fcntl.flock, []

    def late(file: Any, kind: int) -> None:
        if not removed:
            removed.append(1)
            (part,) = tmp_path.glob(".*.part")
            part.unlink()
        flock(file, kind)

    monkeypatch.setattr(part_file.fcntl, "flock", late)
    with part_file.written(tmp_path / "tokens-0") as file:
        file.write(b"all")
    assert (tmp_path / "tokens-0").read_bytes() == b"all" and removed


def test_where_the_disk_is_too_small_one_process_finds_it_out_for_those_that_wait(tmp_path, monkeypatch):
    source, kept, context = tmp_path / "x.txt", tmp_path / "kept", multiprocessing.get_context("fork")
    source.write_text("text")
    tries, ready = context.Value("i", 0), context.Barrier(3)
    write, look = token_cache.write_tokens, token_cache.note_of

    def tried(*given: Any) -> None:
        with tries.get_lock():
            tries.value += 1
        time.sleep(0.3)
        write(*given)

    def noted(path: Path) -> Any:
        found = look(path)
        if not looked:
            looked.append(1)
            ready.wait(20)
        return found

    monkeypatch.setattr(token_cache, "write_tokens", tried)
    monkeypatch.setattr(token_cache, "note_of", noted)
    looked: list[int] = []

    def run() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        told: list[str] = []
        cache = TokenCache(kept, say=lambda *words: told.append(" ".join(words)))
        found = cache.tokens(source, {}, lambda add: (add(np.arange(1 << 20)), ({}, {}))[1], np.int32)
        assert found.path is None and len(found.tokens) == 1 << 20
        assert len(told) == 1 and "File too large" in told[0] and "in memory" in told[0]

    for num in (3, 1):  # the next start tries again
        looked[:] = [1] * (num == 1)
        tries.value = 0
        processes = [context.Process(target=run) for _ in range(num)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
        assert tries.value == 1 and not [*kept.glob("*.part")]


def test_how_far_it_is_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.data.token_cache._PROGRESS_S", 0.0)
    monkeypatch.setattr("shardwise.data.corpus._PIECE", 1 << 12)
    told: list[str] = []

    def cache(folder: str = "kept") -> TokenCache:
        told.clear()
        return TokenCache(tmp_path / folder, say=lambda *words: told.append(": ".join(words)))

    path = records(tmp_path / "x.jsonl")
    options = {"tokenizer": chat.tokenizer(), "seq_len": 60}
    for folder in ("kept", "x.jsonl"):  # the second cannot be used
        sw.SFTDataset(path, cache=cache(folder), **options)
        shares = [int(text.split()[-2]) for text in told if text.startswith("progress: tokens of x.jsonl, ")]
        assert len(shares) == 40 and shares == sorted(shares) and 0 < shares[0] < 10 and shares[-1] == 100
    sw.SFTDataset(path, cache=cache(), **options)
    assert told == ["progress: checking the kept tokens of x.jsonl, 100 %"]
    chat.tokenizer().save_pretrained(tmp_path)
    (text := tmp_path / "text.txt").write_text("".join(f"{' '.join(WORDS)} {i}\n" for i in range(3000)))
    encode(text, tmp_path / "tokenizer.json", cache())
    shares = [int(text.split()[-2]) for text in told if text.startswith("progress: tokens of text.txt, ")]
    assert len(shares) > 10 and shares == sorted(shares) and shares[0] < 20 and shares[-1] == 100


def test_those_that_wait_tell_how_much_is_written(tmp_path, monkeypatch):
    for name, value in (("_SAID_S", 0.1), ("_PROGRESS_S", 0.2)):
        monkeypatch.setattr(f"shardwise.data.token_cache.{name}", value)
    source, context, told = tmp_path / "x.txt", multiprocessing.get_context("fork"), []
    source.write_text("text")

    def produce(add: Any) -> Any:
        for _ in range(10):
            add(np.zeros(1 << 19, np.int32))
            time.sleep(0.3)
        return {}, {}

    maker = context.Process(
        target=lambda: TokenCache(tmp_path / "kept", say=lambda *_: 0).tokens(source, {}, produce, np.int32)
    )
    maker.start()
    while not [*(tmp_path / "kept").glob(".tokens-*.part")]:
        time.sleep(0.02)
    cache = TokenCache(tmp_path / "kept", say=lambda *words: told.append(": ".join(words)))
    assert cache.tokens(source, {}, produce, np.int32).path is not None and "made by another process" in cache.notes[-1]
    maker.join(10)
    sizes = [int(text.split()[1]) for text in told if text.endswith("MB are written")]
    assert told[0].startswith(f"phase: waiting for process {maker.pid} on ") and sizes == sorted(sizes)
    assert len({*sizes}) > 1 and 2 <= sizes[-1] <= 21


def test_one_that_writes_nothing_is_named_and_not_waited_for(tmp_path, monkeypatch):
    from shardwise.launch.lock import release, try_lock

    monkeypatch.setattr("shardwise.data.token_cache._SAID_S", 0.1)
    source, told, made = tmp_path / "x.txt", [], []
    source.write_text("text")
    cache = TokenCache(tmp_path, say=lambda kind, text: told.append(f"{kind}: {text}"), patience_s=0.6)

    def produce(add):
        made.append(1)
        add(np.arange(3))
        return {}, {}

    path = cache.tokens(source, {}, produce, np.int32).path
    assert path is not None
    path.unlink()
    held = try_lock(tmp_path / f".{path.name}.lock").held
    assert held is not None
    found = cache.tokens(source, {}, produce, np.int32)
    release(held)
    assert found.path is None and found.tokens.tolist() == [0, 1, 2] and len(made) == 2
    assert f"phase: waiting for process {os.getpid()}" in told[0] and "has written nothing for" in told[1]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    source, cache = tmp_path / "x.txt", TokenCache(tmp_path / "kept")
    source.write_text("text")

    def produce(add):
        add(np.arange(3))
        source.write_text("other")
        return {}, {}

    with pytest.raises(ConfigError, match="changed while its tokens were made"):
        cache.tokens(source, {}, produce, np.int32)
    assert not [*(tmp_path / "kept").glob("tokens-*")]


def test_a_digest_is_remembered_only_while_the_file_cannot_have_changed(tmp_path, monkeypatch):
    source = tmp_path / "x.txt"
    source.write_text("text")
    read = []
    digest = file_digest.hashlib.file_digest
    monkeypatch.setattr(file_digest.hashlib, "file_digest", lambda *given: read.append(1) or digest(*given))
    one = file_digest.digest_of_file(source, tmp_path)
    assert file_digest.digest_of_file(source, tmp_path) == one and len(read) == 2  # changed just now: not remembered
    monkeypatch.setattr(file_digest, "_SETTLED_S", -60.0)
    assert {file_digest.digest_of_file(source, tmp_path) for _ in range(3)} == {one} and len(read) == 3
    (note,) = tmp_path.glob("file-*.json")
    note.write_text(note.read_text().replace(one, "0" * 64))
    assert file_digest.digest_of_file(source, tmp_path) == one and len(read) == 4
    source.write_text("TEXT")
    assert file_digest.digest_of_file(source, tmp_path) != one


def test_where_tokens_are_kept(monkeypatch, tmp_path):
    for name in ("SHARDWISE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_of("none", print) is None and cache_of("a/b", print) == TokenCache(Path("a/b"), 0, print)
    assert cache_of(None, print) == TokenCache(tmp_path / ".cache" / "shardwise", 1 << 20, print)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_of(None, print).folder == Path("/x/shardwise")
    monkeypatch.setenv("SHARDWISE_CACHE", "~/y")
    assert cache_of(None, print).folder == tmp_path / "y"
    monkeypatch.setenv("SHARDWISE_CACHE", "none")
    assert cache_of(None, print) is None


def test_a_small_file_is_not_kept_unless_it_is_asked_for(tmp_path):
    path = records(tmp_path / "x.jsonl", 3)
    sw.SFTDataset(path, chat.tokenizer(), seq_len=60, cache=TokenCache(tmp_path / "kept", 1 << 20))
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--data.path=text.txt"],
        ["--data.path=text.txt", "--data.tokenizer=bytes"],
        ["--data.path=tokens.npy"],
        [],
        ["--data.build=a:b"],
    ],
)
def test_a_cache_without_effect_is_refused(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Hello there. " * 99)
    assert cli.main(["train", *words, "--data.cache=kept"]) == 2
    assert "so it would have no effect" in capsys.readouterr().err


class Words:
    """A token for two bytes, fast."""

    is_fast, chat_template, bos_token_id, eos_token_id = True, None, None, 0

    def __call__(self, text, add_special_tokens):
        return {"input_ids": np.frombuffer(text.encode(), "<u2").tolist()}


def _read_under_a_limit(path: Path, cache: Path, few: Path) -> tuple[int, bool]:
    """The tokens of a file with a cache, and whether there is memory enough without."""
    plain = sw.SFTDataset(few, Words(), seq_len=512, pack=True)  # also imports all there is to import
    used = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (12 << 20),) * 2)
    data = sw.SFTDataset(path, Words(), seq_len=512, pack=True, cache=cache)
    assert len(data.documents) > 30 * len(plain.documents)
    for i in range(len(plain.documents)):
        for one, other in zip(plain.documents[i], data.documents[i], strict=True):
            assert np.array_equal(one, other)
    for i in range(0, len(data), 7):  # all over the file
        assert (data[i]["labels"] != -100).sum() > 0
    try:
        sw.SFTDataset(path, Words(), seq_len=512, pack=True)
    except MemoryError:
        return data.report.tokens, False
    return data.report.tokens, True


def test_a_file_larger_than_memory_is_encoded_and_read(fresh_ranks, tmp_path):
    """Under a limit of what a process may allocate: 12 MB for 10 MB of records, of which 20 MB of tokens are made."""
    text = "".join(chr(97 + i % 23) for i in range(981))
    with (tmp_path / "large.jsonl").open("w") as file:
        for i in range(10_000):
            file.write(f'{{"text": "{i:06} {text}"}}\n')
    few = tmp_path / "few.jsonl"
    with (tmp_path / "large.jsonl").open() as file:
        few.write_text("".join(line for _, line in zip(range(250), file, strict=False)))
    paths = (tmp_path / "large.jsonl", tmp_path / "kept", few)
    ((num, is_read_without),) = fresh_ranks.run(_read_under_a_limit, 1, *paths, timeout_s=120)
    assert num > 4_500_000 and not is_read_without
