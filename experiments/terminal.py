"""What a sweep prints: its plan, and its answer. Good at 80 columns, and in a file or a pipe."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.report import (
    DIVERGED,
    certificate,
    clauses,
    digits_for,
    duration,
    fixed,
    half_width,
    interval,
    memory,
    plural,
    probability,
    sentence,
    short,
)

if TYPE_CHECKING:
    from rich.console import Console


def console_of(console: "Console | None") -> "Console":
    """`console`, or one on stdout as it is now."""
    if console is None:
        from rich.console import Console

        console = Console()
    return console


def say(console: "Console", text: str = "", style: str = "") -> None:
    """Text as it stands (no markup, no highlighting), wrapped at words."""
    from rich.text import Text

    console.print(Text(text, style=style))


def table(console: "Console", header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows under a header: the first cell a name, the others set to the right.

    Where a name would be broken for want of columns, each row is written below its name instead.
    A name of several lines keeps them.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    widths = [max(_width(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    if sum(widths) + 3 * (len(widths) - 1) <= console.width:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
        for i, name in enumerate(header):
            table.add_column(Text(name), justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        return
    for row in rows:
        # A soft wrap leaves a long name in one piece, for a person to copy.
        console.print(Text(row[0]), soft_wrap=True)
        say(
            console,
            "    " + "  ".join(f"{name} {cell}" for name, cell in zip(header[1:], row[1:], strict=True) if cell),
        )


def _width(cell: str) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, cell.split("\n")))


def print_results(results: Mapping[str, Any], folder: Path, console: "Console | None" = None) -> None:
    """The answer: question, arms, comparisons, verdict, warnings, and where the report is.

    results: as experiments.results.build makes it, or as results.json holds it. console: where
    to print; stdout by default.
    """
    console = console_of(console)
    say(console)
    say(console, results["title"], "bold")
    runs = results["seeds"] * sum(len(arm["learning_rates"]) for arm in results["arms"])
    programs = plural(results["programs_compiled"], "program")
    facts = f"{plural(runs, 'run')} of {plural(results['steps'], 'step')}, {plural(results['seeds'], 'seed')}"
    say(console, f"{facts}, {programs}, {duration(results['wall_seconds'])}", "dim")
    say(console)
    _arms(console, results)
    if results["comparisons"]:
        say(console)
        _comparisons(console, results["comparisons"])
    say(console)
    for clause in clauses(results["verdict"]):
        say(console, clause, "bold")
    by_warning: dict[str, list[str]] = {}
    for arm in results["arms"]:
        if arm["warning"]:
            by_warning.setdefault(sentence(arm["warning"]), []).append(arm["name"])
    if by_warning:
        say(console)
    for warning, names in by_warning.items():
        say(console, f"warning: {warning} ({', '.join(names)})", "yellow")
    say(console)
    say(console, f"Certificate: {certificate(results['certificate'])}.", "dim")
    from rich.text import Text

    console.print(Text(f"Report: {folder / 'report.html'}"), soft_wrap=True)


def _arms(console: "Console", results: Mapping[str, Any]) -> None:
    metrics = [arm["metrics"][results["primary_metric"]] for arm in results["arms"]]
    digits = digits_for(found["ci95"] for found in metrics)
    rows = []
    for arm, found in zip(results["arms"], metrics, strict=True):
        half = half_width(found["ci95"])
        loss = DIVERGED if found["mean"] is None else fixed(found["mean"], digits)
        loss += "" if half is None else f" ± {fixed(half, digits)}"
        runs = results["seeds"] * len(arm["learning_rates"])
        lost = len(arm["diverged"])
        rows.append((arm["name"], f"{arm['best_learning_rate']:g}", loss, f"{lost} of {runs}" if lost else "0"))
    table(console, ("arm", "best rate", results["metric_label"], "diverged"), rows)


def _comparisons(console: "Console", comparisons: Sequence[Mapping[str, Any]]) -> None:
    digits = digits_for(row["ci95"] for row in comparisons)
    rows = []
    for row in comparisons:
        p = probability(row["p"])
        adjusted = probability(row["p_adjusted"])
        difference = fixed(row["difference"], digits, sign=True)
        rows.append((f"{row['a']} − {row['b']}", difference, interval(row["ci95"], digits, sign=True), p, adjusted))
    table(console, ("comparison", "difference", "95% interval", "p", "adjusted"), rows)
    floors = sorted({row["p_floor"] for row in comparisons})
    say(console, "smallest p these seeds can give: " + ", ".join(map(probability, floors)), "dim")


def print_plan(plan: Mapping[str, Any], console: "Console | None" = None) -> None:
    """What a sweep would do: arms, groups, parameters, estimated time and memory. plan: of experiments.sweep.plan."""
    console = console_of(console)
    arms, rates, groups = plan["arms"], plan["learning_rates"], plan["groups"]
    say(console)
    say(console, "Plan (nothing was run)", "bold")
    say(console)
    say(console, f"{plural(len(arms), 'arm')}:")
    from rich.text import Text

    for name in arms:
        console.print(Text(f"  {name}"), soft_wrap=True)
    shown = ", ".join(f"{rate:g}" for rate in rates)
    say(console, f"{plural(len(rates), 'learning rate')}: {shown}; {plural(plan['seeds'], 'seed')}")
    say(console)
    rows = [
        (
            f"{i}",
            f"{group['runs']:,}",
            f"{group['steps']:,}",
            f"{group['parameters']:,}",
            short(group["flops"]),
            duration(group["seconds"]),
            memory(group["bytes"]),
        )
        for i, group in enumerate(groups, 1)
    ]
    table(console, ("group", "runs", "steps", "parameters", "FLOPs", "time", "memory"), rows)
    say(console)
    runs = sum(group["runs"] for group in groups)
    time, most = sum(group["seconds"] for group in groups), max(group["bytes"] for group in groups)
    say(
        console,
        f"In all {plural(runs, 'run')} in {plural(len(groups), 'program')}: about {duration(time)}, "
        f"and {memory(most)} for weights, gradients and optimiser states at once (groups follow one another).",
    )
    say(console, "Times are estimates from a few steps on this machine; compiling and measuring come on top.", "dim")
