"""Pictures of a sweep: loss curves, learning-rate curves, and lines in general.

Each function writes one PNG. matplotlib is imported where it draws, on its Agg canvas and
without pyplot, so that nothing global is changed, opened or kept.
"""

import contextlib
import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Okabe & Ito's colours, told apart with any colour vision; their yellow is too pale for lines.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D", "#8C564B")
# From the ninth arm on the colours come again, with another marker.
MARKERS = ("o", "s", "D")
DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)), (0, (3, 1.2, 1.2, 1.2, 1.2, 1.2)))
WIDTH = 5.6  # inches: 9-point text is then legible on a phone, where the picture is 360 CSS pixels wide
DPI = 230
LEGEND_CHARACTERS = 66  # of 9-point text that surely fit side by side in WIDTH
STYLE: Any = {
    "font.size": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#222222",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "lines.linewidth": 1.5,
    "legend.frameon": False,
}


def colour(i: int) -> str:
    """The colour of arm i, in plots and tables alike."""
    return PALETTE[i % len(PALETTE)]


def marker(i: int) -> str:
    """The marker of arm i: all circles for the first eight arms."""
    return MARKERS[i // len(PALETTE) % len(MARKERS)]


@contextlib.contextmanager
def drawing(path: Path, height: float, width: float = WIDTH) -> Iterator[Any]:
    """A matplotlib Figure of width x height inches, saved to `path` at the end."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
        engine: Any = figure.get_layout_engine()
        engine.set(w_pad=0.08, h_pad=0.08)
        canvas = FigureCanvasAgg(figure)
        yield figure
        canvas.draw()
    # A picture of few colours: with a palette it has a third of the bytes, and looks the same.
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    picture.quantize(256).save(path, format="PNG", optimize=True)


def _key(names: Sequence[str]) -> tuple[list[str], int]:
    """Names wrapped to the figure's width, and the legend columns that fit, so that rows are evenly long."""
    wrapped = [textwrap.fill(name, LEGEND_CHARACTERS - 9) for name in names]
    longest = max(len(line) for name in wrapped for line in name.split("\n"))
    fit = max(1, LEGEND_CHARACTERS // (longest + 9))
    return wrapped, math.ceil(len(names) / math.ceil(len(names) / fit))


def _legend_height(names: Sequence[str]) -> float:
    """Inches that a legend of these names needs."""
    wrapped, columns = _key(names)
    return 0.19 * (math.ceil(len(names) / columns) * max(name.count("\n") + 1 for name in wrapped) + 0.5)


def legend(figure: Any, handles: Sequence[Any], names: Sequence[str], where: str = "lower center") -> None:
    """A legend outside the axes, in reading order. Names are shown as they are: no formulas, no hidden underscores."""
    wrapped, columns = _key(names)
    # matplotlib fills column by column: hand it the entries in the order that reads row by row.
    order = [i for column in range(columns) for i in range(column, len(names), columns)]
    style = {"ncols": columns, "handlelength": 2.4, "borderaxespad": 0.1, "labelcolor": "#222222"}
    made = figure.legend([handles[i] for i in order], ["x"] * len(names), loc=f"outside {where}", **style)
    for text, i in zip(made.get_texts(), order, strict=True):
        text.set_parse_math(False)
        text.set_text(wrapped[i])


def _arm_legend(figure: Any, names: Sequence[str]) -> None:
    """Each arm's colour and marker, below."""
    legend(figure, [line(color=colour(i), marker=marker(i), markersize=4) for i in range(len(names))], names)


def line(**style: Any) -> Any:
    """A legend entry."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def split_layer(name: str) -> tuple[str, int | None]:
    """ "ARM, layer n" -> (ARM, n); any other name -> (name, None)."""
    match = re.fullmatch(r"(.*), layer (\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def lines(
    path: Path,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
) -> None:
    """One line for each of `series` over x [n]; NaN is a gap.

    Names of the form "ARM, layer n" share their arm's colour and differ by dashes, and the legend
    then lists arms and layers apart. bands: name -> (low, high), shaded. A log axis leaves out
    values that are not positive, but an x of 0 is kept at its left end.
    """
    split = {name: split_layer(name) for name in series}
    arms = list(dict.fromkeys(arm for arm, _ in split.values()))
    layers = sorted({layer for _, layer in split.values() if layer is not None})
    layer_names = [f"layer {layer}" for layer in layers] if len(layers) > 1 else []
    xs = np.asarray(x, np.float64)
    values = {name: np.asarray(y, np.float64) for name, y in series.items()}
    height = 3.0 + (_legend_height(arms) if len(arms) > 1 else 0) + (0.25 if layer_names else 0)
    with drawing(path, height) as figure:
        axes = figure.add_subplot()
        for name, y in values.items():
            arm, layer = split[name]
            i = arms.index(arm)
            dash = DASHES[layers.index(layer) % len(DASHES)] if layer is not None else "-"
            shown = marker(i) if len(xs) <= 20 else None
            axes.plot(xs, y, color=colour(i), linestyle=dash, marker=shown, markersize=3.2)
            if bands and name in bands:
                low, high = (np.asarray(edge, np.float64) for edge in bands[name])
                axes.fill_between(xs, low, high, color=colour(i), alpha=0.15, linewidth=0)
        if log_x:
            _log_x(axes, xs)
        if log_y and any((y[np.isfinite(y)] > 0).any() for y in values.values()):
            log_axis(axes)
        axes.set_xlabel(x_label, parse_math=False)
        axes.set_ylabel(y_label, parse_math=False)
        if layer_names:
            dashes = [DASHES[i % len(DASHES)] for i in range(len(layers))]
            handles = [line(color="#444444", linestyle=dash) for dash in dashes]
            legend(figure, handles, layer_names, "upper right")
        if len(arms) > 1:
            _arm_legend(figure, arms)


def _log_x(axes: Any, xs: np.ndarray) -> None:
    positive = xs[xs > 0]
    if len(positive) == len(xs):
        axes.set_xscale("log")
    elif len(positive):
        axes.set_xscale("symlog", linthresh=positive.min())


def log_axis(axes: Any) -> None:
    """A log axis with plain numbers at it: 1, 2, 5 of each decade where there are few decades."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    subs = (1.0, 2.0, 5.0) if high < 200 * low else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _finite_mean(x: np.ndarray) -> np.ndarray:
    """Mean over axis 0 of the finite values; NaN where there are none (without numpy's warning)."""
    finite = np.isfinite(x)
    count = finite.sum(axis=0)
    return np.where(count > 0, np.where(finite, x, 0.0).sum(axis=0) / np.maximum(count, 1), np.nan)


def smoothed(loss: np.ndarray, points: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """(steps, means) of consecutive stretches of loss [steps]: about `points` of them."""
    width = max(1, len(loss) // points)
    ends = range(0, len(loss), width)
    means = np.array([_finite_mean(loss[i : i + width, None])[0] for i in ends])
    return np.array([i + (len(loss[i : i + width]) - 1) / 2 for i in ends]), means


def _limits(parts: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """Lowest and highest finite value with a margin, or None."""
    values = np.concatenate([np.ravel(part) for part in parts] or [np.zeros(0)])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def loss_curves(path: Path, outcome: Any, results: Mapping[str, Any]) -> None:
    """Each arm at its own best learning rate: the whole run above, its second half enlarged below.

    Thick: validation loss at the marks, mean over seeds, with its 95% interval. Thin: training
    loss, mean over seeds, smoothed over a hundredth of the run. A cross is a seed that diverged.
    """
    from experiments.results import mean_curves

    names = [arm["name"] for arm in results["arms"]]
    curves = [mean_curves(outcome, i, arm["best_learning_rate"]) for i, arm in enumerate(results["arms"])]
    steps = curves[0]["loss"].shape[1]
    half = steps // 2
    with drawing(path, 5.2 + _legend_height(names)) as figure:
        whole, late = figure.subplots(2, 1)
        for axes, first in ((whole, 0), (late, half)):
            shown = []
            for i, curve in enumerate(curves):
                at, train = smoothed(_finite_mean(curve["loss"]))
                axes.plot(at, train, color=colour(i), linewidth=0.6, alpha=0.35)
                style = {"color": colour(i), "marker": marker(i), "markersize": 3.2, "zorder": 3}
                axes.plot(curve["marks"], curve["mean"], **style)
                axes.fill_between(curve["marks"], curve["low"], curve["high"], color=colour(i), alpha=0.15, linewidth=0)
                inside = curve["marks"] >= first
                shown += [curve["mean"][inside], train[at >= first]]
                _crosses(axes, curve["loss"], first, colour(i))
            limits = _limits(shown)
            if limits:
                axes.set_ylim(*limits)
            axes.set_xlim(first - 0.01 * steps if first else -0.02 * steps, 1.02 * steps)
            axes.set_ylabel(f"{results['metric_label']}, {results['unit']}", parse_math=False)
        late.set_title(f"enlarged: from step {half} on", fontsize=9, color="#444444", loc="left")
        late.set_xlabel("step")
        kinds = {
            "validation, 95% interval": line(color="#444444", marker="o", markersize=3.2),
            "training, smoothed": line(color="#444444", linewidth=0.7, alpha=0.6),
        }
        if not all(np.isfinite(curve["loss"]).all() for curve in curves):
            kinds["a seed diverges"] = line(color="#444444", marker="x", markersize=6, linestyle="")
        legend(figure, list(kinds.values()), list(kinds), "upper right")
        _arm_legend(figure, names)


def _crosses(axes: Any, loss: np.ndarray, first: int, shade: str) -> None:
    """A cross at the top of the axes at each step, from `first` on, where a seed's loss [seeds, steps] ends."""
    for run in loss:
        bad = np.flatnonzero(~np.isfinite(run))
        if len(bad) and bad[0] >= first:
            where = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
            axes.plot([bad[0]], [1.0], marker="x", color=shade, markersize=6, markeredgewidth=1.8, **where)


def learning_rates(path: Path, results: Mapping[str, Any]) -> None:
    """Final loss against learning rate, a line for each arm: mean and 95% interval over seeds.

    A ring is the arm's best rate, as the selection split chose it. A cross is a rate at which seeds
    diverged: on the mean of those that did not, or at the top if there are none.
    """
    arms = results["arms"]
    names = [arm["name"] for arm in arms]
    rates = [row["learning_rate"] for row in arms[0]["learning_rates"]]
    spread = min([b / a for a, b in itertools.pairwise(rates)] or [2.0]) ** 0.22
    any_diverged = any(arm["diverged"] for arm in arms)
    kinds = ["best rate of an arm", "some seeds diverged"][: 1 + any_diverged]
    with drawing(path, 3.6 + _legend_height(names)) as figure:
        axes = figure.add_subplot()
        axes.set_xscale("log")
        for i, arm in enumerate(arms):
            # Arms stand side by side at a rate, so that their intervals can be told apart.
            shift = spread ** (i / max(1, len(arms) - 1) - 0.5)
            x = np.array([rate * shift for rate in rates])
            rows = [row["report"] for row in arm["learning_rates"]]
            mean = np.array([math.nan if row["mean"] is None else row["mean"] for row in rows])
            ends = np.array([row["ci95"] or (m, m) for row, m in zip(rows, mean, strict=True)])
            style = {"color": colour(i), "marker": marker(i), "markersize": 4}
            axes.errorbar(x, mean, yerr=[mean - ends[:, 0], ends[:, 1] - mean], linewidth=1.3, capsize=2, **style)
            best = rates.index(arm["best_learning_rate"])
            axes.plot(x[best], mean[best], "o", markersize=10, markerfacecolor="none", color=colour(i))
            lost = {row["learning_rate"] for row in arm["diverged"]}
            for at, rate, m in zip(x, rates, mean, strict=True):
                if rate in lost and math.isfinite(m):
                    axes.plot(at, m, "x", color="black", markersize=6, zorder=5)
                elif rate in lost:
                    top = {"transform": axes.get_xaxis_transform(), "clip_on": False}
                    axes.plot(at, 1.0, "x", color=colour(i), markersize=7, markeredgewidth=2, **top)
        means = [row["report"]["mean"] for arm in arms for row in arm["learning_rates"]]
        found = [m for m in means if m is not None]
        if found and min(found) > 0 and max(found) > 4 * min(found):
            log_axis(axes)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.set_xlim(min(rates) / spread**1.6, max(rates) * spread**1.6)
        axes.set_xlabel("learning rate")
        axes.set_ylabel(f"final {results['metric_label']}, {results['unit']}", parse_math=False)
        ring = line(color="#444444", marker="o", markersize=9, markerfacecolor="none", linestyle="")
        cross = line(color="black", marker="x", markersize=6, linestyle="")
        legend(figure, [ring, cross][: len(kinds)], kinds, "upper right")
        _arm_legend(figure, names)
