"""Draws ``docs/curves.svg``, the picture of the README, from figures that are measured and checked first.

    python tools/make_picture.py           # runs benchmarks/curves.py (many minutes on 2 cores), then draws
    python tools/make_picture.py --draw    # draws from the figures in docs/data/curves.json

Above, the losses of 1, 2 and 4 ranks, and of tensor parallelism, on top of each other; below, the distance of each from one plain process, on a
logarithmic scale (the largest of 10 steps), next to the distance of that process from itself with other micro-batches.
On the right, the bytes that each rank holds. The largest distances go into the table of ``docs/parity.md``.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["distances", "draw", "main"]

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data" / "curves.json"
PICTURE = ROOT / "docs" / "curves.svg"
PAGE = ROOT / "docs" / "parity.md"

TITLES = {
    "fp32": "fp32, learning rate 3e-4",
    "fp64": "fp64, the demo's own settings",
}
STYLES = {  # wide and light first, so that each later curve is seen lying on the earlier ones
    "1 rank": ("1 rank", "#9ecae1", 6.0, "-"),
    "2 ranks": ("2 ranks", "#fd8d3c", 3.6, "-"),
    "4 ranks, tp=2": ("4 ranks: 2 shards, tp=2", "#756bb1", 1.9, "-"),
    "4 ranks": ("4 ranks", "#222222", 0.7, "-"),
}
NOISE = ("one plain process against itself, split otherwise", "#74c476", 2.4, "-")
SMOOTH = 10  # each point of the distances is the largest of so many steps
PARTS = {"parameters": "#3182bd", "gradients": "#9ecae1", "optimizer state": "#fdae6b"}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draws ``results`` of benchmarks/curves.py as an SVG; the same figures give the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "shardwise", "font.size": 9, "path.simplify_threshold": 0.2}):
        figure = Figure(figsize=(11, 5.2), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        grid = figure.add_gridspec(2, 3, width_ratios=(1, 1, 0.62), height_ratios=(1.25, 1))
        for column, name in enumerate(TITLES):
            _losses(figure.add_subplot(grid[0, column]), results[name], TITLES[name], legend=column == 0)
            _differences(figure.add_subplot(grid[1, column]), results[name], legend=column == 0)
        figure.supxlabel(
            f"measured at {results['made_from'].replace('`', '')}", fontsize=6, x=0.99, ha="right", color="#888888"
        )
        _bytes(figure.add_subplot(grid[:, 2]), results["fp32"]["bytes"])
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _losses(axes: Any, result: Mapping[str, Any], title: str, *, legend: bool) -> None:
    for name, (label, color, width, style) in STYLES.items():
        losses = result["curves"][name]
        axes.plot(range(1, len(losses) + 1), losses, color=color, linewidth=width, linestyle=style, label=label)
    axes.set(title=f"{title}, {result['steps']} steps", ylabel="training loss (nats/byte)")
    axes.grid(alpha=0.25)
    if legend:
        axes.legend(frameon=False)


def _differences(axes: Any, result: Mapping[str, Any], *, legend: bool) -> None:
    plain = result["curves"]["plain"]
    # No difference has no place on a logarithmic scale: it is drawn on the lower edge.
    smallest = 1e-8 if result["gate"] > 1e-7 else 1e-16
    for name, (label, color, width, style) in {"plain, split otherwise": NOISE, **STYLES}.items():
        gaps = [abs(a - b) for a, b in zip(result["curves"][name], plain, strict=True)]
        worst = [max(smallest, *gaps[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(gaps))]
        shown = label if name == "plain, split otherwise" else None
        axes.plot(range(1, len(gaps) + 1), worst, color=color, linewidth=min(width, 2.4), linestyle=style, label=shown)
    axes.axhline(result["gate"], color="#cb181d", linewidth=1.0, linestyle="--", label=f"allowed: {result['gate']:.0e}")
    axes.set(yscale="log", xlabel="optimizer step", ylabel="distance to one plain\nprocess (nats/byte)")
    axes.set_ylim(smallest, result["gate"] * 30)
    axes.grid(alpha=0.25)
    if legend:
        axes.legend(frameon=False, fontsize=7, loc="upper left")


def _bytes(axes: Any, held: Mapping[str, Any]) -> None:
    names = [name.replace(" ranks", "").replace(" rank", "").replace(", ", "\n") for name in held]
    bottom = [0.0] * len(names)
    for part, color in PARTS.items():
        heights = [max(rank[part] for rank in of_name) / 2**20 for of_name in held.values()]
        axes.bar(names, heights, bottom=bottom, color=color, label=part, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for x, total in enumerate(bottom):
        axes.text(x, total, f"{total:.2f} MiB", ha="center", va="bottom")
    axes.set(title="held by each rank, fp32", xlabel="ranks", ylabel="MiB")
    axes.set_ylim(0, max(bottom) * 1.22)
    axes.legend(frameon=False)


def distances(results: Mapping[str, Any]) -> str:
    """A Markdown table: the largest distance of each curve to one plain process."""
    lines = [
        f"| curve | {' | '.join(label for label, *_ in STYLES.values())} | one process, split otherwise | allowed |",
        f"|---|{'--:|' * (len(STYLES) + 2)}",
    ]
    for name, title in TITLES.items():
        curves = results[name]["curves"]
        cells = [
            f"{max(abs(a - b) for a, b in zip(curves[curve], curves['plain'], strict=True)):.1e}"
            for curve in (*STYLES, "plain, split otherwise")
        ]
        lines.append(f"| {title}, {results[name]['steps']} steps | {' | '.join(cells)} | {results[name]['gate']:.0e} |")
    return "\n".join([*lines, "", f"Measured at {results['made_from']}."])


def _stamp() -> str:
    sys.path.insert(0, str(ROOT / "tools"))
    from stamp import stamp

    return stamp("docs/data/curves.json")


def main(argv: list[str] | None = None) -> int:
    """Measures unless told not to, then draws. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="only draw, from the figures there are")
    args = parser.parse_args(argv)
    if not args.draw:
        code = subprocess.call([sys.executable, str(ROOT / "benchmarks" / "curves.py"), "--out", str(DATA)])
        if code:
            return code
        measured = json.loads(DATA.read_text(encoding="utf-8")) | {"made_from": _stamp()}
        DATA.write_text(json.dumps(measured) + "\n", encoding="utf-8")
    results = json.loads(DATA.read_text(encoding="utf-8"))
    draw(results, PICTURE)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- curves -->\n")
    after = rest.partition("<!-- /curves -->")[2]
    PAGE.write_text(f"{before}<!-- curves -->\n{distances(results)}\n<!-- /curves -->{after}", encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} from {DATA.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
