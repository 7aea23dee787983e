"""The loss curve of a run as a picture. Drawing needs matplotlib (the extra ``plot``), which is loaded only here."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[float, float]]


def plot_losses(curves: Mapping[str, Curve], path: str | Path, *, title: str, unit: str = "nats/token") -> str | None:
    """Draws one line per curve and writes the picture to ``path`` (.png or .svg by its suffix).

    Args:
        curves: name -> points (step, loss). Points that are not finite leave a gap. Curves of up to 20 points get
            markers.
        path: the picture; its folder must exist.
        title: text above the picture.
        unit: of the loss, on the vertical axis.

    Returns:
        None if the picture was written; else one line for the user that says why not: a missing drawing library must
        not end a run.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: matplotlib is not installed ({error}); pip install 'shardwise[plot]'"
    # A figure without pyplot: no window system, and no state shared with the user's figures.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        steps = [step for step, _ in points]
        losses = [loss if math.isfinite(loss) else math.nan for _, loss in points]
        few = len(points) <= 20
        axes.plot(steps, losses, label=name, marker="o" if few else None, linewidth=2.0 if few else 1.0)
    axes.set(title=title, xlabel="optimizer step", ylabel=f"loss ({unit})")
    axes.grid(alpha=0.3)
    if curves:
        axes.legend()
    try:
        figure.savefig(Path(path), dpi=130)
    except OSError as error:
        return f"no picture: {path} cannot be written: {error.strerror or error}"
    return None
