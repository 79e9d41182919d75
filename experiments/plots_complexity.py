"""What the complexity experiment shows: its picture, its claims and its tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import plots, terminal
from experiments.complexity import BOTH, DIRECTIONS, METHODS, NUMBERS
from experiments.report import duration, fixed, memory, short

if TYPE_CHECKING:
    from rich.console import Console

# Dense attention under both masks costs the same: dashes and open markers keep both lines in sight.
LOOKS: dict[str, dict[str, Any]] = {
    "dense": {"marker": "o"},
    "dense, window": {"marker": "s", "linestyle": (0, (4, 3)), "markerfacecolor": "white", "markersize": 6},
    "blockwise": {"marker": "D"},
    "banded": {"marker": "^"},
    "linear": {"marker": "v"},
}
PANELS = {"time": ("time, ms", 1e3), "FLOPs": ("FLOPs of products, G", 1e-9), "bytes": ("live bytes, MiB", 2.0**-20)}


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Time, FLOPs and bytes with the backward pass against T, log-log, a line a method; exponents beside each."""
    lengths = sorted({row["T"] for row in results["rows"]})
    fits = {entry["method"]: entry for entry in results["slopes"] if entry["direction"] == BOTH}
    with plots.drawing(path, 7.4) as figure:
        panels = figure.subplots(len(PANELS), 1, sharex=True)
        for axes, (label, (title, unit)) in zip(panels, PANELS.items(), strict=True):
            for i, name in enumerate(METHODS):
                mine = [r for r in results["rows"] if (r["method"], r["direction"]) == (name, BOTH)]
                mine = [r for r in mine if NUMBERS[label] in r]
                style = {"color": plots.colour(i), "markersize": 4, "linestyle": "-", **LOOKS[name]}
                shown = f"{name}\n{exponent(fits[name][label])}"
                axes.plot([r["T"] for r in mine], [r[NUMBERS[label]] * unit for r in mine], label=shown, **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
            axes.minorticks_off()
            plots.log_axis(axes)
            axes.set_ylabel(title)
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=2.6, labelspacing=0.7)
        panels[0].set_title("forward and backward; exponents of T beside the names", fontsize=9, color="#222222")
        skips = "every branch counted: the causal mask lets blockwise skip nearly half"
        panels[1].set_title(skips, fontsize=9, color="#222222")
        panels[-1].set_xlabel("T, positions")


def exponent(fit: Mapping[str, float] | None) -> str:
    """An exponent with its standard error."""
    if fit is None:
        return "–"
    # Counts of products lie on a line but for rounding: no error to speak of.
    return fixed(fit["value"], 2) + (f" ± {fixed(fit['error'], 2)}" if fit["error"] > 1e-6 else "")


def claims_of(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """The articles' sentences beside what was found; each verdict follows from the numbers."""
    fits = {(entry["method"], entry["direction"]): entry for entry in results["slopes"]}
    rows = {(row["method"], row["direction"], row["T"]): row for row in results["rows"]}
    T = min(T for _, _, T in rows)

    def found(name: str, label: str) -> str:
        return exponent(fits[name, BOTH][label])

    def near(name: str, label: str, power: float) -> bool:
        return abs(fits[name, BOTH][label]["value"] - power) < 0.05

    counts, n = results["pairs"]["counts"], results["pairs"]["n"]
    kinds = {kind.split(",")[0]: counted for kind, (_, counted) in counts.items()}
    combined = results["pairs"]["article"]
    same = rows["dense, window", BOTH, T]["products"] / rows["dense", BOTH, T]["products"]
    gaps, crossings = results["differences"], results["crossings"]
    at = ", ".join(f"{c['length']:,} at d = {c['d_model']}" for c in crossings)
    six = all(c["length"] == c["by_hand"] for c in crossings)
    naive = results["window"] * n
    listed = [
        (
            "attention takes O(n² d) time (S1 §6.3, S2 §9)",
            "exponent 2",
            f"FLOPs {found('dense', 'FLOPs')}, time {found('dense', 'time')}",
            "right for q.k and weights.v" if near("dense", "FLOPs", 2) else "not found",
        ),
        (
            "so attention dominates the layer (4 n d² + 8 n d² multiply-adds stand beside it)",
            "at every n",
            f"from n = {at} on",
            "only in rows longer than 6 d" if six else "another crossing",
        ),
        (
            "its memory is quadratic (S1 §6.3)",
            "exponent 2",
            f"dense {found('dense', 'bytes')}, blockwise {found('blockwise', 'bytes')}",
            "right for dense, not for blockwise"
            if near("dense", "bytes", 2) and fits["blockwise", BOTH]["bytes"]["value"] < 1.05
            else "not found",
        ),
        (
            f"pairs are C(n, 2) (S1 §6.3), n = {n:,}",
            f"{combined:,}",
            f"full {kinds['full']:,}, causal {kinds['causal']:,}",
            "right" if combined in (kinds["full"], kinds["causal"]) else "wrong: no mask has as many",
        ),
        (
            f"a window needs n w pairs (S1 §6.3), w = {results['window']}",
            f"{naive:,}",
            f"{kinds['window']:,}",
            "right" if kinds["window"] == naive else "nearly: the first rows have fewer, n w − w (w − 1)/2",
        ),
        (
            "a window mask on dense scores saves work",
            "exponent 1",
            f"{same:.2f} of dense FLOPs, exponent {found('dense, window', 'FLOPs')}; "
            f"banded {found('banded', 'FLOPs')}, time {found('banded', 'time')}",
            "wrong: only a banded implementation does" if same == 1 and near("banded", "FLOPs", 1) else "not found",
        ),
        (
            "linear attention approximates it in O(n) (S2 §9)",
            "exponent 1",
            f"FLOPs {found('linear', 'FLOPs')}, time {found('linear', 'time')}; output differs by {gaps['linear']:.2f}",
            "right in cost, but it is another function" if near("linear", "FLOPs", 1) else "not found",
        ),
        (
            "blockwise (FlashAttention) gives the same result (S2 §9)",
            "difference 0",
            f"{gaps['blockwise']:.1e}, banded {gaps['banded']:.1e}",
            "right, to rounding" if max(gaps["blockwise"], gaps["banded"]) < 1e-5 else "wrong",
        ),
    ]
    return [dict(zip(("claim", "claimed", "measured", "verdict"), line, strict=True)) for line in listed]


def _milliseconds(row: Mapping[str, Any] | None) -> str:
    """Median (least), in ms; a dash where it was not run."""
    if row is None or "median_seconds" not in row:
        return "–"
    pair = [1e3 * row["median_seconds"], 1e3 * row["least_seconds"]]
    median, least = (fixed(x, 0 if pair[0] >= 100 else 1 if pair[0] >= 10 else 2) for x in pair)
    return f"{median} ({least})"


def _formulas(rows: Sequence[Mapping[str, Any]], direction: str) -> list[tuple[str, ...]]:
    """Rows of the table of FLOPs at the shortest length, and whether formula and meter agree at every length."""
    T, table = min(row["T"] for row in rows), []
    for name in METHODS:
        mine = [row for row in rows if (row["method"], row["direction"]) == (name, direction)]
        wrong = [f"not at T {row['T']:,}" for row in mine if row["products"] != row["by_hand"]]
        first = next(row for row in mine if row["T"] == T)
        sizes = [f"{first[field]:,}" for field in ("by_hand", "products")]
        rest = [short(first[field]) for field in ("least_products", "taken")]
        table.append((name, *sizes, wrong[0] if wrong else "at every T", *rest))
    return table


def print_results(results: Mapping[str, Any], folder: Path, console: "Console | None" = None) -> None:
    """The answer: exponents, times, formulas, claims. results: as complexity.json holds them."""
    console = terminal.console_of(console)
    rows = results["rows"]
    lengths = sorted({row["T"] for row in rows})
    by_key = {(row["method"], row["direction"], row["T"]): row for row in rows}

    def say(text: str = "", style: str = "") -> None:
        terminal.say(console, text, style)

    say()
    say(results["title"], "bold")
    say(
        f"one head of {results['head_dim']}, batch 1, causal, float32; window {results['window']}; "
        f"T {lengths[0]:,} to {lengths[-1]:,}; {results['device']}, {results['cores']} cores, "
        f"load {results['load'][0]:.1f} to {results['load'][1]:.1f}; {duration(results['wall_seconds'])}",
        "dim",
    )
    for direction in DIRECTIONS:
        say()
        fits = [entry for entry in results["slopes"] if entry["direction"] == direction]
        header = (f"exponent of T, {direction}", *NUMBERS)
        terminal.table(console, header, [(f["method"], *(exponent(f[name]) for name in NUMBERS)) for f in fits])
    for direction in DIRECTIONS:
        say()
        say(f"ms, median (least), {direction}")
        times = [(f"{T:,}", *(_milliseconds(by_key.get((m, direction, T))) for m in METHODS)) for T in lengths]
        terminal.table(console, ("T", *METHODS), times)
    say()
    say(f"live bytes beside the arguments, {BOTH}")
    sizes = [(f"{T:,}", *(memory(by_key[m, BOTH, T]["working_bytes"]) for m in METHODS)) for T in lengths]
    terminal.table(console, ("T", *METHODS), sizes)
    for direction in DIRECTIONS:
        say()
        say(f"FLOPs of products, T {lengths[0]:,}, {direction}")
        header = ("", "by hand", "meter", "equal", "least", "run")
        terminal.table(console, header, _formulas(rows, direction))
    say(
        "meter: the dearest branch everywhere; least: the cheapest everywhere (blockwise skips all blocks); "
        "run: without the blocks that the causal mask skips",
        "dim",
    )
    say()
    for claim in claims_of(results):
        say(claim["claim"], "bold")
        say(f"    claimed {claim['claimed']}; measured {claim['measured']}")
        say(f"    {claim['verdict']}")
    skipped = [row for row in rows if row["skipped"]]
    if skipped:
        say()
    for row in skipped:
        say(f"not run: {row['method']}, {row['direction']}, T {row['T']:,}: {row['skipped']}", "yellow")
    say()
    from rich.text import Text

    console.print(Text(f"Picture: {folder / 'complexity.png'}"), soft_wrap=True)
