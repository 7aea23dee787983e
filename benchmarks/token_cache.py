"""How long a run takes until its records are there: without a cache, the first time with one, and from then on; and how much memory.

    python benchmarks/token_cache.py [MEGABYTES] [RANKS]

A tokenizer is trained and conversations are written here, 10 MB of them unless told otherwise. Each row is RANKS processes (2) that
open the same file at once, as ranks of a node do: seconds until the last has it, and what the largest of them allocated for it
(VmData at its highest, every 10 ms). Exit status 1: samples differ.
"""

import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import shardwise as sw

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from models import chat

__all__ = ["main", "opened"]

SEQ_LEN = 512


def main(megabytes: int, num_ranks: int) -> int:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        chat.tokenizer().save_pretrained(folder)
        _write(folder / "chat.jsonl", megabytes)
        digests = set()
        print(f"{megabytes} MB of conversations, {num_ranks} processes at once")
        for name, cache in (("no cache", None), ("first start", "kept"), ("second start", "kept")):
            began = time.monotonic()
            rows = opened(folder, None if cache is None else folder / cache, num_ranks)
            seconds, most = time.monotonic() - began, max(row["allocated"] for row in rows)
            digests |= {row["digest"] for row in rows}
            print(
                f"{name:<14} {seconds:8.1f} s {most / 1e6:10.0f} MB allocated by a process, {rows[0]['tokens']:,} tokens"
            )
        print("the same samples" if len(digests) == 1 else "SAMPLES DIFFER")
    return len(digests) > 1


def opened(folder: Path, cache: Path | None, num_ranks: int) -> list[dict[str, Any]]:
    """What each of ``num_ranks`` processes has found, that open the records of ``folder`` at once."""
    with multiprocessing.get_context("fork").Pool(num_ranks) as pool:
        return pool.starmap(_open, [(folder, cache)] * num_ranks, chunksize=1)


def _open(folder: Path, cache: Path | None) -> dict[str, Any]:
    before, most, is_over = _allocated(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            most[0] = max(most[0], _allocated())

    watcher = threading.Thread(target=watch)
    watcher.start()
    data = sw.SFTDataset(folder / "chat.jsonl", str(folder), seq_len=SEQ_LEN, pack=True, cache=cache)
    is_over.set()
    watcher.join()
    digest = 0
    for i in range(0, len(data), max(1, len(data) // 500)):
        for value in data[i].values():
            digest = zlib.crc32(value.numpy().tobytes(), digest)
    return {"allocated": most[0] - before, "digest": digest, "tokens": data.report.tokens}


def _allocated() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmData")).split()[1]) << 10


def _write(path: Path, megabytes: int) -> None:
    draw = random.Random(0)
    words = ["what", "is", "the", "capital", "of", "France", "Paris", "Hello", "there", "today", "sum", "two", "three"]
    with path.open("w") as file:
        while file.tell() < megabytes * 1_000_000:
            said = (" ".join(draw.choices(words, k=draw.randint(5, 80))) for _ in range(2))
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
            file.write(f"{json.dumps({'messages': turns})}\n")


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*(given + [10, 2][len(given) :])))
