"""Pictures of the masking question: two losses of each arm, and derivatives as heat maps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import plots

SIZES = (9, 5)  # of the hollow and the full mark, points
COLUMNS = 3
DECADES = 6  # a derivative this far below the largest is drawn as palely as can be


def two_dots(
    path: Path,
    names: Sequence[str],
    left: Sequence[Mapping[str, Any]],
    right: Sequence[Mapping[str, Any]],
    labels: tuple[str, str],
    x_label: str,
) -> None:
    """A row for each name with a hollow mark (left) and a full one (right), joined by a line.

    left, right: {"mean", "ci95"} of each name; a mean of None is not drawn.
    """
    with plots.drawing(path, 0.9 + 0.32 * len(names)) as figure:
        axes = figure.add_subplot()
        for i, pair in enumerate(zip(left, right, strict=True)):
            means = [found["mean"] for found in pair]
            if None not in means:
                axes.plot(means, [i, i], color=plots.colour(i), linewidth=1, alpha=0.5)
            # The hollow mark is larger: where both stand at one place, it is a ring around the other.
            for found, face, size in zip(pair, ("white", plots.colour(i)), SIZES, strict=True):
                if found["mean"] is None:
                    continue
                low, high = found["ci95"] or (found["mean"], found["mean"])
                ends = [[found["mean"] - low], [high - found["mean"]]]
                style = {"color": plots.colour(i), "marker": "o", "markersize": size, "markerfacecolor": face}
                axes.errorbar([found["mean"]], [i], xerr=ends, linestyle="", **style)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
        axes.set_xlabel(x_label)
        grey = {"color": "#444444", "marker": "o", "linestyle": ""}
        faces = zip(("white", "#444444"), SIZES, strict=True)
        handles = [plots.line(**grey, markerfacecolor=face, markersize=size) for face, size in faces]
        plots.legend(figure, handles, labels, "upper right")


def heat_maps(path: Path, maps: Mapping[str, np.ndarray]) -> None:
    """Arrays [T, T] by name on one logarithmic scale, above the diagonal in red; white is exactly 0, black NaN."""
    from matplotlib.colors import LogNorm

    finite = [x[np.isfinite(x) & (x > 0)] for x in maps.values()]
    most = max((float(x.max()) for x in finite if x.size), default=1.0)
    rows = -(-len(maps) // COLUMNS)
    with plots.drawing(path, 1.1 + 1.75 * rows) as figure:
        grid = figure.subplots(rows, COLUMNS, squeeze=False)
        for axes in grid.flat[len(maps) :]:
            axes.set_axis_off()
        images = {}
        for axes, (name, x) in zip(grid.flat, maps.items(), strict=False):
            later = np.triu(np.ones(x.shape, bool), 1)
            for side, shades in ((~later, "Blues"), (later, "Reds")):
                # Clipped from below: the palest shade is for the least number, white for none.
                shown = np.where(side & (x > 0), np.maximum(x, most * 10.0**-DECADES), np.nan)
                norm = LogNorm(most * 10.0 ** -(DECADES + 1), most)
                images[shades] = axes.imshow(shown, cmap=shades, norm=norm, interpolation="nearest")
            axes.imshow(np.where(np.isnan(x), 1.0, np.nan), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            axes.grid(visible=False)
            axes.set_title(name, fontsize=9, color="#222222", parse_math=False)
            ends = (0, len(x) - 1)
            axes.set_xticks(ends)
            axes.set_yticks(ends)
        for axes in grid[:, 0]:
            axes.set_ylabel("output i")
        for axes in grid.flat[max(0, len(maps) - COLUMNS) : len(maps)]:
            axes.set_xlabel("input j")
        for shades, label in (("Reds", "j > i"), ("Blues", "j ≤ i")):
            bar = figure.colorbar(images[shades], ax=grid, location="bottom", shrink=0.7, pad=0.01, aspect=50)
            bar.set_label(label, fontsize=9, color="#222222")
            bar.ax.minorticks_off()
            bar.outline.set_visible(False)
