"""Weights that somebody has damaged, on purpose or not: made from good ones by a seed, kind by kind.

Every kind is a function ``(rng, good, place) -> path``: it writes one damaged copy of something good under ``place`` and
returns what a user would name. ``KINDS`` lists them all.
"""

import random
from collections.abc import Callable
from pathlib import Path

from state import mutant_files as files
from state import mutant_pickles as pickles
from state.good_sources import Good

__all__ = ["KINDS"]

KINDS: dict[str, Callable[[random.Random, Good, Path], Path]] = {
    "truncated file": files.truncated,
    "wrong header length": files.wrong_header_length,
    "overlapping offsets": files.overlapping_offsets,
    "offsets out of range": files.offsets_out_of_range,
    "gaps between tensors": files.gaps,
    "duplicate names": files.duplicate_names,
    "huge sizes": files.huge_sizes,
    "wrong dtype in the header": files.wrong_dtype,
    "wrong shape in the header": files.wrong_shape,
    "index names what is missing": files.index_names_missing,
    "index does not name what is there": files.index_misses_extra,
    "paths that leave the directory": files.paths_that_leave,
    "links out of the directory": files.links_out,
    "torch file that runs code": pickles.torch_file_that_runs_code,
    "DCP directory that runs code": pickles.dcp_that_runs_code,
    "memo bombs": pickles.memo_bombs,
    "storages out of range": pickles.storages_out_of_range,
    "archives that lie": pickles.archives_that_lie,
    "chunks that do not tile": pickles.chunks_that_do_not_tile,
    "a bit in a safetensors header or index": files.bit_in_safetensors_header,
    "a bit in a torch archive": files.bit_in_torch_archive,
    "a bit in DCP metadata": files.bit_in_dcp_metadata,
}
