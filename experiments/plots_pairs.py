"""Pictures of a model of pairs: its errors by length, and where its heads look."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from experiments import plots
from experiments.report import fixed

CELL = 0.145  # inches of a weight: its token's name is then 7 points high, and legible
LONGEST = 12  # characters of a token's name that are drawn
MOST_PIXELS = 1 << 26  # of a picture: a quarter of a GiB while it is drawn
LONGEST_SIDE = 60_000  # pixels: matplotlib's end is at 65,536, names and margins included
# Beside matplotlib's own DejaVu Sans, which has Latin, IPA, Greek, Cyrillic, Arabic, Georgian and more.
FAMILIES = (
    "DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans", "Hiragino Sans", "PingFang SC", "Yu Gothic",
    "Microsoft YaHei", "Malgun Gothic", "Arial Unicode MS", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Unifont",
)  # fmt: skip


@functools.cache
def fonts() -> tuple[list[str], frozenset[int]]:
    """(those of FAMILIES that are installed, the code points that they have)."""
    from matplotlib import font_manager

    files = {entry.name: entry.fname for entry in font_manager.fontManager.ttflist if entry.style == "normal"}
    names = [name for name in FAMILIES if name in files]
    points: set[int] = set()
    for name in names:
        points |= set(font_manager.get_font(files[name]).get_charmap())
    return names, frozenset(points)


def drawable(text: str) -> str:
    """A token's name that the fonts can show: what they lack stands as its code point, what is long is cut."""
    _, points = fonts()
    parts = [c if ord(c) in points else f"<{ord(c):X}>" for c in text]
    shown = ""
    for i, part in enumerate(parts):
        if len(shown) + len(part) > LONGEST - (i < len(parts) - 1) and shown:
            return shown + "…"
        shown += part
    return shown


def can_draw(layers: int, heads: int, tokens: int) -> bool:
    """Whether the picture of so many layers and heads, for so many tokens a side, is of a size that can be drawn."""
    height, width = (count * (tokens + 1) * CELL * plots.DPI for count in (layers, heads))
    return height * width <= MOST_PIXELS and max(height, width) <= LONGEST_SIDE


def attention(path: Path, weights_LNTS: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> float:
    """A heat map for each layer (downwards) and head (to the right), white 0 and dark 1; its width in inches.

    rows, columns: the tokens' names, of T and S.
    """
    L, N, T, S = weights_LNTS.shape
    grid = np.full((L * (T + 1) - 1, N * (S + 1) - 1), np.nan)
    for layer, head in np.ndindex(L, N):
        i, j = layer * (T + 1), head * (S + 1)
        grid[i : i + T, j : j + S] = weights_LNTS[layer, head]
    names = [[drawable(name) for name in side] for side in (rows, columns)]
    longest = [max(map(len, side)) * 0.065 for side in names]
    width, height = grid.shape[1] * CELL + longest[0] + 0.9, grid.shape[0] * CELL + longest[1] + 0.7
    with plots.drawing(path, height, width) as figure:
        axes = figure.add_subplot()
        axes.imshow(grid, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
        axes.set_facecolor("white")
        axes.grid(visible=False)
        axes.tick_params(length=0, pad=2)
        style = {"fontsize": 7, "family": fonts()[0], "parse_math": False}
        places = [layer * (T + 1) + t for layer in range(L) for t in range(T)]
        axes.set_yticks(places, names[0] * L, **style)
        places = [head * (S + 1) + s for head in range(N) for s in range(S)]
        axes.set_xticks(places, names[1] * N, rotation=90, **style)
        for spine in axes.spines.values():
            spine.set_visible(False)
        above = axes.secondary_xaxis("top")
        above.set_xticks([head * (S + 1) + (S - 1) / 2 for head in range(N)], [f"head {n + 1}" for n in range(N)])
        right = axes.secondary_yaxis("right")
        middles = [layer * (T + 1) + (T - 1) / 2 for layer in range(L)]
        right.set_yticks(middles, [f"layer {n + 1}" for n in range(L)], rotation=270, va="center")
        for side in (above, right):
            side.tick_params(length=0, labelsize=8)
            for spine in side.spines.values():
                spine.set_visible(False)
        for layer, head in np.ndindex(L, N):
            at = head * (S + 1) - 0.5, layer * (T + 1) - 0.5
            axes.add_patch(_frame(at, S, T))
    return width


def _frame(at: tuple[float, float], width: float, height: float) -> "object":
    from matplotlib.patches import Rectangle

    return Rectangle(at, width, height, fill=False, edgecolor="#bbbbbb", linewidth=0.5)


def by_length(path: Path, labels: Sequence[str], values: Sequence[float], counts: Iterable[int], label: str) -> None:
    """Bars of a metric for lengths of the source, with the number of items above each."""
    with plots.drawing(path, 2.9) as figure:
        axes = figure.add_subplot()
        axes.bar(range(len(values)), values, color=plots.colour(0), width=0.75)
        for i, (value, count) in enumerate(zip(values, counts, strict=True)):
            note = {"ha": "center", "va": "bottom", "fontsize": 7, "color": "#444444"}
            axes.annotate(f"{fixed(value, 1)}\nof {count:,}", (i, value), (0, 2), textcoords="offset points", **note)
        axes.set_xticks(range(len(labels)), labels)
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0, 1.25 * max([*values, 1e-9]))
        axes.set_xlabel("tokens of the source")
        axes.set_ylabel(label, parse_math=False)
