"""Measures and draws the pictures of the docs: the bytes that a rank holds, gathers and keeps; precision of dtypes.

    python tools/draw_pages.py           # measures (some minutes on 2 cores) into docs/data/pages.json, then draws
    python tools/draw_pages.py --draw    # draws from the existing figures

The figures come from the tests' own models and measurements, so the pages show what the tests assert.
"""

import argparse
import functools
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["DRAWINGS", "draw", "main", "measure"]

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "pages.json"
ROWS, COLUMNS, RANKS = 10, 3, 8
PICTURED = 512  # MiB of the model whose weights come and go
TUNED = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8}  # a Llama of 8 billion parameters, never made  # fmt: skip
BLUE, LIGHT, ORANGE, GREY = "#3182bd", "#9ecae1", "#fd8d3c", "#e8e8e8"


# ---- measure -------------------------------------------------------------------------------------------------------------


def measure(only: str | None = None) -> dict[str, Any]:
    """The figures of every picture, or of one, as JSON."""
    sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "tools")]
    from conftest import PRELOAD

    from shardwise.testing import RankPool

    with RankPool(preload=PRELOAD) as pool:
        made: dict[str, Callable[[], Any]] = {
            "layout": _layout,
            "units": lambda: _units(pool.run),
            "remat": lambda: _remat(pool.run),
            "precision": lambda: _precision(pool.run),
            "init": lambda: _init(pool.run),
            "weights": lambda: _weights(pool.run),
            "checkpoint": lambda: _checkpoint(pool.run),
            "tensor-parallel": lambda: _plan(pool.run),
            "adapters": lambda: _adapters(pool.run),
            "quantize": _quantize,
            "context-parallel": _orders,
            "context-curve": _packed_chat,
            "watching": lambda: _watching(pool.run),
        }
        return {name: make() for name, make in made.items() if only in (None, name)}


def _layout() -> dict[str, list[list[int]]]:
    """Layout -> by rank, the rows it holds of one parameter: from the recipe, without any process."""
    import torch
    from torch import nn

    from shardwise import Precision, Sharding
    from shardwise.layout import layout_of
    from shardwise.model import read_anatomy
    from shardwise.techniques.fold import make_recipe

    with torch.device("meta"):
        anatomy = read_anatomy(nn.Linear(COLUMNS, ROWS, bias=False))
    found = {}
    for text in (f"dp_shard={RANKS}", f"dp_replicate=2,dp_shard={RANKS // 2}", f"dp_replicate={RANKS}"):
        recipe = make_recipe(anatomy, layout_of(text, RANKS), precision=Precision(), sharding=Sharding())
        pieces = [recipe.at(rank).extents("weight") for rank in range(RANKS)]
        found[text] = [[row for p in held for row in range(ROWS)[p.full_index[0]]] for held in pieces]
    return found


def _packed_chat() -> dict[str, list[float]]:
    """Losses by step of ``shardwise train`` on packed conversations, in float64: of one process, and of ranks that share each sequence.

    Raises:
        AssertionError: one is off by 1e-4 nats; Llama's norms round to float32, also in float64.
    """
    layouts = {"one process": "dp_shard=1", "2 ranks": "cp=2", "4 ranks": "cp=4"}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        run = functools.partial(subprocess.run, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        run([sys.executable, ROOT / "examples" / "small_chat.py", "runs/chat"])
        for name, layout in layouts.items():
            train = [sys.executable, "-m", "shardwise", "train", ROOT / "examples" / "chat.yaml", "--data.seq_len=256"]
            train += ["--data.pack=true", f"--parallel.layout={layout}", f"--nproc={layout[-1]}", f"--log.dir={layout}"]
            train += ["--parallel.precision=fp64", "--train.steps=60", "--train.eval_every=0", "--log.every=1"]
            run([*train, "--train.prove=false", "--checkpoint.export=null"])
            lines = Path(folder, layout, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            found[name] = [line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"]
    one = found["one process"]
    apart = max(abs(x - y) for losses in found.values() for x, y in zip(one, losses, strict=True))
    assert apart < 1e-4, f"off by {apart:.1e}"
    return found


def _plan(run: Callable[..., list]) -> dict[str, dict[str, list]]:
    """Matrix of GPT-2 -> its shape, and for each of two ranks the first row, first column, rows and columns of its pieces."""
    from techniques.tp.pieces import pieces_of_gpt2

    return run(pieces_of_gpt2, 2, "tp=2")[0]


def _adapters(run: Callable[..., list]) -> dict[str, dict[str, list]]:
    """Layer and tensor -> its shape, and the pieces of each of four ranks."""
    from techniques.tp.pieces import pieces_of_adapters

    return run(pieces_of_adapters, 4, "dp_shard=2,tp=2")[0]


def _quantize() -> dict[str, dict[str, int]]:
    """Kind of training -> layout -> bytes of :func:`state_bytes`, of a Llama of 8 billion parameters."""
    import shardwise as sw

    low = {"precision": "bf16", "lora": sw.LoRA(rank=16)}
    kinds = {"all trained": {"precision": "bf16"}, "LoRA": low, "QLoRA": {**low, "quantize": "nf4"}}
    layouts = [f"dp_shard={degree}" for degree in (1, 2, 4, 8, 16)]
    return {kind: state_bytes(TUNED, layouts, **options) for kind, options in kinds.items()}


def state_bytes(sizes: Mapping[str, Any], layouts: Sequence[str], **options: Any) -> dict[str, int]:
    """Layout -> bytes of parameters, gradients and AdamW on the rank that has most of them: of a Llama's recipe, without any process or
    memory for the model."""
    import math

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwise.layout import layout_of
    from shardwise.model import read_anatomy
    from shardwise.recipe import DTYPE_BYTES
    from shardwise.techniques import Parallel
    from shardwise.techniques.fold import make_recipe, prepared

    with torch.device("meta"):
        anatomy = read_anatomy(prepared(LlamaForCausalLM(LlamaConfig(**sizes)), Parallel.of(**options)))
    found = {}
    for text in layouts:
        degree = math.prod(int(part.partition("=")[2]) for part in text.split(","))
        recipe, held = make_recipe(anatomy, layout_of(text, degree), **options), []
        for rank in range(degree):
            of_rank = recipe.at(rank)
            numbers = {name: sum(math.prod(piece.sizes) for piece in of_rank.extents(name)) for name in recipe.params}
            held.append(
                sum(
                    numbers[name] * DTYPE_BYTES[param.storage] * (4 if param.trainable else 1)
                    for name, param in recipe.params.items()
                )
            )
        found[text] = max(held)
    return found


def _orders() -> dict[str, list[list[int]]]:
    """Order -> the positions of each rank of 4, of a sequence of 32."""
    from shardwise.model.rows import rows_of

    return {order: [rows.tolist() for rows in rows_of(32, 4, order)] for order in ("contiguous", "zigzag")}  # type: ignore[arg-type]


def _units(run: Callable[..., list]) -> dict[str, list[int]]:
    """Setting -> bytes of gathered parameters after each event of one window of two micro-batches, on rank 0 of 2."""
    from techniques.observed import see

    from shardwise import Sharding

    settings = {
        'units="none"': Sharding(units="none"),
        "a unit for each block, reshard_after_forward=False": Sharding(min_unit_bytes=0, reshard_after_forward=False),
        "a unit for each block": Sharding(min_unit_bytes=0),
    }
    return {name: run(see, 2, "dp_shard=2", {"sharding": chosen})[0].held for name, chosen in settings.items()}


def _remat(run: Callable[..., list]) -> dict[str, dict[str, int]]:
    """Setting -> bytes that forward keeps for backward, and operators that backward runs, of four blocks of a norm and two linears with GELU."""
    from techniques.remat.recompute import kept_and_run, of_feed

    from shardwise import Remat

    settings = {
        "none": None,
        "Remat(every=2)": Remat(every=2),
        'remat="selective"': "selective",
        'remat="400KiB"': "400KiB",
        'remat="full"': "full",
    }
    found = {name: run(kept_and_run, 1, remat, of_feed)[0] for name, remat in settings.items()}
    return {name: {"bytes": seen.then, "operators": seen.operators} for name, seen in found.items()}


def _precision(run: Callable[..., list]) -> dict[str, dict[str, float]]:
    """Dtype -> where -> error of the gradient to the one in float64, relative."""
    import torch
    from layouts import LAYOUTS
    from techniques.precision.test_precision import error_norm, on_ranks, one_process

    exact = one_process(torch.float64, 4)
    size = sum(float(grad.double().pow(2).sum()) for grad in exact.values()) ** 0.5
    found: dict[str, dict[str, float]] = {}
    dtypes = {"fp32": (torch.float32, 1.0), "bf16": (torch.bfloat16, 1.0), "fp16": (torch.float16, 1024.0)}
    for name, (dtype, scale) in dtypes.items():
        row = {"one plain process": error_norm(one_process(dtype, 4, scale), exact)}
        for label, key in {"1 rank": "one", "2 replicas": "ddp-2", "4 shards": "fsdp-4"}.items():
            layout, ranks, _ = LAYOUTS[key]
            row[label] = error_norm(run(on_ranks, ranks, layout, 4 // ranks, name, scale)[0], exact)
        found[name] = {label: error / size for label, error in row.items()}
    return found


def _init(run: Callable[..., list]) -> dict[str, list[float]]:
    """Way -> MiB of a rank's shards, and the growth of its peak memory while it was made."""
    from parallel.on_ranks import host_growth

    ways = {"seeded, 1 rank": ("dp_shard=1", 1, "seeded"), "seeded, 2 ranks": ("dp_shard=2", 2, "seeded"),
            "rank 0, which sends, of 2": ("dp_shard=2", 2, "rank0")}  # fmt: skip
    return {name: list(run(host_growth, count, layout, how)[0]) for name, (layout, count, how) in ways.items()}


def _weights(run: Callable[..., list]) -> dict[str, list[float]]:
    """Call -> by rank of four, the growth of its peak memory while it ran, in models."""
    import tempfile

    from safetensors.torch import save_file

    sys.path.insert(0, str(ROOT / "benchmarks"))
    weights = importlib.import_module("weights")
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights.build(PICTURED).state_dict(), f"{folder}/model.safetensors")
        loaded = run(weights.run_load, 4, next(iter(weights.LOADERS)), PICTURED, folder, True, timeout_s=300)
        gathered = run(weights.run_gather, 4, next(iter(weights.GATHERERS)), PICTURED, folder, True, timeout_s=300)
        saved = run(
            weights.run_save, 4, next(iter(weights.SAVERS)), PICTURED, folder, f"{folder}/saved", True, timeout_s=300
        )
    return {
        "load_weights": [round(answer["memory"] / 4, 3) for answer in loaded],  # that is in shards
        "save_weights": [round(answer["memory"], 3) for answer in saved],
        "full_state_dict": [round(answer["memory"], 3) for answer in gathered],
    }


def _checkpoint(run: Callable[..., list]) -> dict[str, dict[str, Any]]:
    """Moment of the second save at which all ranks are killed -> what is there then, under which names."""
    import tempfile

    from state.test_checkpoint_kill import AtPoint, saving

    from shardwise import RankError
    from shardwise.state.checkpoint.fault_points import POINTS
    from shardwise.state.integrity.manifest import step_of, steps_in

    found = {}
    for point in POINTS:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "run"
            try:
                run(saving, 2, str(root), 9, "sync", f"{folder}/ack", AtPoint(point, (1, 0)))
            except RankError:  # they were killed
                hidden = [path.name for path in root.iterdir() if path.is_dir() and ".saving-" in path.name]
                latest = step_of((root / "latest").resolve())
                found[point] = {"steps": steps_in(root), "hidden": len(hidden), "latest": latest}
    assert list(found) == list(POINTS)
    return found


def _watching(run: Callable[..., list]) -> list[tuple[str, float, float]]:
    """Name, start and length in microseconds of each span of a step, on rank 0 of 2."""
    from step.spans_of import traced

    from shardwise import Sharding

    return run(traced, 2, "dp_shard=2", Sharding(units=("Block",)))[0][0]


# ---- draw ----------------------------------------------------------------------------------------------------------------


def draw(name: str, figures: Mapping[str, Any], path: Path) -> None:
    """Draws one picture as an SVG; the same figures give the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "shardwise", "font.size": 9}):
        figure = Figure(figsize=(7.6, 2.9), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        DRAWINGS[name](figure, figures)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _draw_layout(figure: Any, figures: Mapping[str, list[list[int]]]) -> None:
    for axes, (layout, held) in zip(figure.subplots(1, len(figures)), figures.items(), strict=True):
        for rank, rows in enumerate(held):
            for row in range(ROWS):
                color = BLUE if row in rows else GREY
                axes.add_patch(_box(rank * 1.25, -row, color))
            axes.text(rank * 1.25 + 0.5, 1.35, str(rank), ha="center")
        axes.set(title=layout, xlim=(-0.2, RANKS * 1.25), ylim=(-ROWS + 0.5, 2.6))
        axes.axis("off")


def _draw_plan(figure: Any, figures: Mapping[str, Mapping[str, list]]) -> None:
    """Matrices to one scale: what is the first rank's, and what the second's."""
    from matplotlib.patches import Rectangle

    widths = [of_matrix["shape"][1] for of_matrix in figures.values()]
    all_axes = figure.subplots(1, len(figures), width_ratios=[max(width, 14) for width in widths])
    for axes, (name, of_matrix) in zip(all_axes, figures.items(), strict=True):
        rows, columns = of_matrix["shape"]
        for color, pieces in zip((BLUE, ORANGE), of_matrix["pieces"], strict=True):
            for row, column, num_rows, num_columns in pieces:
                look = {"facecolor": color, "edgecolor": "white"}
                # A clip would be named by the last bits of its place, which differ from drawing to drawing.
                axes.add_patch(Rectangle((column, row), num_columns, num_rows, clip_on=False, **look))
        short = name.removeprefix("transformer.").removeprefix("h.0.")
        axes.set(title=f"{short}\n{rows} x {columns}", xlim=(-0.5, columns + 0.5), ylim=(50, -1), aspect="equal")
        axes.axis("off")
        if short == "attn.c_attn":
            for i, letter in enumerate("qkv"):
                axes.text((i + 0.5) * columns / 3, rows + 4, letter, ha="center")


def _draw_adapters(figure: Any, figures: Mapping[str, Mapping[str, list]]) -> None:
    """Each layer's W, with A above it and B and m beside it, to one scale; a piece has the numbers of the ranks that hold it."""
    from matplotlib.patches import Rectangle

    titles = {"mlp.gate_proj": "cut by its outputs", "mlp.down_proj": "cut by its inputs"}
    for axes, (layer, title) in zip(figure.subplots(1, len(titles)), titles.items(), strict=True):
        of_layer = {part: figures[f"{layer} {part}"] for part in "WABm"}
        rows, columns = of_layer["W"]["shape"]
        rank = of_layer["A"]["shape"][0]
        corners = {"W": (0, 0), "A": (0, -rank - 2), "B": (columns + 3, 0), "m": (columns + rank + 6, 0)}
        for part, (left, top) in corners.items():
            holders: dict[tuple[int, ...], list[int]] = {}
            for number, pieces in enumerate(of_layer[part]["pieces"]):
                for piece in pieces:
                    holders.setdefault(tuple(piece), []).append(number)
            for piece, ranks in holders.items():
                y, x, height, width = (piece[0], 0, piece[1], 3) if len(piece) == 2 else piece
                color = (BLUE, LIGHT, ORANGE, "#fdd0a2")[ranks[0]] if len(ranks) == 1 else GREY
                look = {"facecolor": color, "edgecolor": "white", "clip_on": False}
                axes.add_patch(Rectangle((left + x, top + y), width, height, **look))
                middle = (left + x + width / 2, top + y + height / 2)
                axes.text(*middle, " ".join(map(str, ranks)), ha="center", va="center", fontsize=6)
            axes.text(left - 1, top + 1, part, ha="right", va="center", fontsize=8)
        axes.set(title=f"{layer}, {title}", xlim=(-4, columns + rank + 10), ylim=(rows + 1, -rank - 3), aspect="equal")
        axes.axis("off")


def _draw_quantize(figure: Any, figures: Mapping[str, Mapping[str, int]]) -> None:
    axes = figure.subplots()
    layouts = list(next(iter(figures.values())))
    for i, (color, (kind, held)) in enumerate(zip(("#808080", LIGHT, BLUE), figures.items(), strict=True)):
        sizes = [size / 2**30 for size in held.values()]
        bars = axes.bar([x + (i - 1) * 0.28 for x in range(len(layouts))], sizes, 0.26, color=color, label=kind)
        axes.bar_label(bars, labels=[f"{size:.3g}" for size in sizes], fontsize=7, padding=2)
    axes.set(yscale="log", ylabel="GiB on a rank", xticks=range(len(layouts)))
    axes.set_xticklabels(layouts)
    axes.margins(y=0.2)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.2))


def _draw_orders(figure: Any, figures: Mapping[str, list[list[int]]]) -> None:
    """Under a causal mask, each position's keys, in the colour of its rank; and how many each rank has."""
    colors = (BLUE, ORANGE, LIGHT, "#74c476")
    for axes, (order, held) in zip(figure.subplots(1, len(figures)), figures.items(), strict=True):
        num = sum(map(len, held))
        for rank, rows in enumerate(held):
            for row in rows:
                axes.add_patch(_bar(0, -row - 1, row + 1, 1, colors[rank]))
            share = sum(row + 1 for row in rows) / (num * (num + 1) / 2)
            axes.text(num * 0.62, -5 - 3 * rank, f"rank {rank}: {share:.0%} of the work", color=colors[rank])
        axes.set(title=order, xlim=(-0.5, num + 6), ylim=(-num - 0.5, 0.5))
        axes.axis("off")


def _box(x: float, y: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), 1.0, 0.86, facecolor=color, edgecolor="none")


def _draw_units(figure: Any, figures: Mapping[str, list[int]]) -> None:
    axes = figure.subplots()
    for color, (name, held) in zip(("#b0b0b0", ORANGE, BLUE), figures.items(), strict=True):
        place = [i / (len(held) - 1) for i in range(len(held))]
        axes.step(place, [num / 1024 for num in held], where="post", color=color, linewidth=2, label=name)
    axes.set(xlabel="two micro-batches, forward and backward, event by event", ylabel="KiB gathered", xticks=[])
    axes.set_ylim(0)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.3), ncols=3, fontsize=8)


def _draw_remat(figure: Any, figures: Mapping[str, Mapping[str, int]]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(figures)[::-1]
    for axes, key, scale, label, color in (
        (left, "bytes", 1024, "KiB kept from forward to backward", BLUE),
        (right, "operators", 1, "operators run in backward", ORANGE),
    ):
        bars = axes.barh(names, [figures[name][key] / scale for name in names], color=color)
        axes.bar_label(bars, fmt="%.1f" if scale > 1 else "%d", padding=3)
        axes.set(xlabel=label)
        axes.margins(x=0.16)


def _draw_precision(figure: Any, figures: Mapping[str, Mapping[str, float]]) -> None:
    axes = figure.subplots()
    places = list(next(iter(figures.values())))
    for i, (place, color) in enumerate(zip(places, ("#808080", LIGHT, BLUE, ORANGE), strict=True)):
        x = [column + (i - 1.5) * 0.2 for column in range(len(figures))]
        bars = axes.bar(x, [row[place] for row in figures.values()], 0.18, color=color, label=place)
        axes.bar_label(bars, fmt="%.1e", fontsize=7, padding=2)
    axes.set(yscale="log", ylabel="error of the gradient\nto float64, relative", xticks=range(len(figures)))
    axes.set_xticklabels(list(figures))
    axes.margins(y=0.25)
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2))


def _draw_init(figure: Any, figures: Mapping[str, list[float]]) -> None:
    axes = figure.subplots()
    names = list(figures)[::-1]
    peak = axes.barh(names, [figures[name][1] for name in names], color=LIGHT, label="growth of the peak, MiB")
    axes.barh(names, [figures[name][0] for name in names], color=BLUE, height=0.4, label="held afterwards, MiB")
    axes.bar_label(peak, fmt="%d", padding=3)
    axes.margins(x=0.1)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.2))


def _draw_weights(figure: Any, figures: Mapping[str, list[float]]) -> None:
    axes = figure.subplots()
    for rank, color in enumerate(("#08519c", BLUE, "#6baed6", LIGHT)):
        x = [column + (rank - 1.5) * 0.2 for column in range(len(figures))]
        bars = axes.bar(x, [held[rank] for held in figures.values()], 0.18, color=color, label=f"rank {rank}")
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.set(ylabel="peak memory, in models", xticks=range(len(figures)))
    axes.set_xticklabels(list(figures))
    axes.margins(y=0.15)
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2))


_PHASES = {  # the first moment of each, and who does what
    "begun": "rank 0: a hidden\ndirectory, files",
    "met": "all ranks: their bytes,\nsummed, fsync",
    "summed": "rank 0: the manifest,\nfsync",
    "renamed": "rename,\nfsync",
    "latest": "latest is\nthis one",
    "pruning": "prune\nolder ones",
}


def _draw_checkpoint(figure: Any, figures: Mapping[str, Mapping[str, Any]]) -> None:
    axes, points = figure.subplots(), list(figures)
    begins = [points.index(first) for first in _PHASES] + [len(points)]
    for text, begin, end in zip(_PHASES.values(), begins, begins[1:], strict=False):
        color, ink = (LIGHT, "black") if begin < points.index("renamed") else (BLUE, "white")
        axes.add_patch(_bar(begin, 4.1, end - begin - 0.12, 0.9, color))
        axes.text((begin + end - 0.12) / 2, 4.55, text, ha="center", va="center", fontsize=7, color=ink)
    rows = {
        "a run that resumes takes": [f"step {max(seen['steps'])}" for seen in figures.values()],
        "latest names": [f"step {seen['latest']}" for seen in figures.values()],
        "a hidden directory stays\nfor the next save to remove": [
            "yes" if seen["hidden"] else "no" for seen in figures.values()
        ],
    }
    for x, point in enumerate(points):
        axes.text(x + 0.42, 2.1, point, rotation=50, rotation_mode="anchor", ha="left", va="bottom", fontsize=7)
        axes.plot([x + 0.44], [1.95], "v", color="black", markersize=3)
    for row, (name, cells) in enumerate(rows.items()):
        axes.text(-0.2, 1.2 - row + 0.3, name, ha="right", va="center", fontsize=8)
        for x, cell in enumerate(cells):
            color = {"step 1": LIGHT, "step 2": BLUE, "yes": ORANGE}.get(cell, GREY)
            axes.add_patch(_bar(x, 1.2 - row, 0.88, 0.6, color))
            ink = "white" if color == BLUE else "black"
            axes.text(x + 0.44, 1.5 - row, cell.removeprefix("step "), ha="center", va="center", fontsize=7, color=ink)
    axes.text(-0.2, 4.55, "a save of step 2,\nwhere step 1 is", ha="right", va="center", fontsize=8)
    axes.text(-0.2, 2.7, "all ranks are killed at", ha="right", va="center", fontsize=8)
    axes.set(xlim=(-4.6, len(points) + 0.9), ylim=(-1.0, 5.1))
    axes.axis("off")


_LANES = (  # of the picture of a step, from the top: title, what the names of its spans begin with, colour
    ("exchange", ("exchange",), GREY),
    ("micro-batch", ("micro-batch",), GREY),
    ("forward, backward", ("forward of", "backward of"), LIGHT),
    ("gather a unit", ("gather", "prefetch"), BLUE),
    ("sum or keep gradients", ("reduce", "accumulate"), ORANGE),
    ("optimizer", ("step of",), GREY),
)


def _draw_watching(figure: Any, figures: Sequence[tuple[str, float, float]]) -> None:
    axes = figure.subplots()
    last = max(start + length for _, start, length in figures)
    for row, (_, begins, color) in enumerate(_LANES):
        for name, start, length in figures:
            if not name.startswith(begins):
                continue
            axes.add_patch(_bar(start / 1000, -row - 0.4, max(length, last / 400) / 1000, 0.8, color))
            text = name.partition(" ")[0] if begins[0] == "forward of" else name.rpartition(" ")[2]
            if (len(text) * last / 110 < length and color != GREY) or begins[0] == "micro-batch":
                axes.text((start + last / 300) / 1000, -row, text, fontsize=6, va="center")
    axes.set(
        xlim=(0, last / 1000),
        ylim=(-len(_LANES) + 0.5, 0.5),
        xlabel="milliseconds",
        yticks=[-i for i in range(len(_LANES))],
    )
    axes.set_yticklabels([title for title, _, _ in _LANES])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_packed_chat(figure: Any, figures: Mapping[str, list[float]]) -> None:
    curves, apart = figure.subplots(1, 2)
    one = figures["one process"]
    steps = range(1, len(one) + 1)
    for (name, losses), color, width in zip(figures.items(), (LIGHT, BLUE, ORANGE), (5, 2.5, 1), strict=True):
        curves.plot(steps, losses, color=color, linewidth=width, label=name)
        if losses is not one:
            off = [max(abs(x - y), 1e-17) for x, y in zip(one, losses, strict=True)]
            apart.semilogy(steps, off, color=color, linewidth=1, label=name)
    curves.set(title="loss of packed conversations", xlabel="step", ylabel="nats per token")
    apart.set(title="apart from one process", xlabel="step", ylim=(1e-17, 1))
    for axes in (curves, apart):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)


def _bar(x: float, y: float, width: float, height: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color, edgecolor="none")


DRAWINGS: dict[str, Callable[[Any, Any], None]] = {
    "layout": _draw_layout,
    "units": _draw_units,
    "remat": _draw_remat,
    "precision": _draw_precision,
    "init": _draw_init,
    "weights": _draw_weights,
    "checkpoint": _draw_checkpoint,
    "tensor-parallel": _draw_plan,
    "adapters": _draw_adapters,
    "quantize": _draw_quantize,
    "context-parallel": _draw_orders,
    "context-curve": _draw_packed_chat,
    "watching": _draw_watching,
}


def _stamp() -> str:
    sys.path.insert(0, str(ROOT / "tools"))
    from stamp import stamp

    return stamp("docs/data/pages.json")


def main(argv: list[str] | None = None) -> int:
    """Measures unless told not to, then draws. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="only draw, from the figures there are")
    parser.add_argument("--to", type=Path, default=ROOT / "docs", help="the folder of the pictures (docs)")
    parser.add_argument("--only", choices=list(DRAWINGS), help="measure this one anew")
    given = parser.parse_args(argv)
    if not given.draw:
        known = json.loads(DATA.read_text(encoding="utf-8")) if given.only else {"made_from": _stamp()}
        DATA.write_text(json.dumps(known | measure(given.only), indent=1) + "\n", encoding="utf-8")
    figures = json.loads(DATA.read_text(encoding="utf-8"))
    for name in DRAWINGS:
        draw(name, figures[name], given.to / f"{name}.svg")
        print(given.to / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
