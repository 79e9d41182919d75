"""The report: one HTML file with its pictures inside, and the words for numbers that it shares with the terminal."""

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import plots
from experiments.sections import Section
from experiments.workdir import read_json, write_text

if TYPE_CHECKING:
    from experiments.sweep import Outcome

NOTHING = "–"
DIVERGED = "diverged"


# --- numbers in words -----------------------------------------------------------------------


def fixed(x: float | None, digits: int, sign: bool = False) -> str:
    """A number with `digits` decimals and a real minus; a dash where there is none."""
    if x is None or not math.isfinite(x):
        return NOTHING
    text = f"{x:+.{digits}f}" if sign else f"{x:.{digits}f}"
    return text.replace("-", "−")


def digits_for(intervals: Iterable[Sequence[float] | None]) -> int:
    """Decimals at which the narrowest interval's half-width shows two digits: 3 to 5."""
    widths = [(high - low) / 2 for low, high in filter(None, intervals)]
    widths = [width for width in widths if math.isfinite(width) and width > 0]
    return min(5, max(3, 1 - math.floor(math.log10(min(widths))))) if widths else 4


def half_width(ci95: Sequence[float] | None) -> float | None:
    """Half of an interval's width."""
    return None if ci95 is None else (ci95[1] - ci95[0]) / 2


def probability(p: float | None) -> str:
    """A p value: three decimals, and two digits below 0.01."""
    if p is None or not math.isfinite(p):
        return NOTHING
    if p < 1e-4:
        return "0" if p == 0 else f"{p:.0e}".replace("-", "−")
    return f"{p:.3f}" if p >= 0.01 else f"{p:.2g}"


def duration(seconds: float | None) -> str:
    """Seconds in the unit that a person would use."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.1 else "under 0.1 s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} days"


def memory(count: float) -> str:
    """Bytes in binary units, three digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} TiB"


def short(count: float) -> str:
    """A count with a letter for its thousands: 12.3k."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.3g}"


def plural(count: int, noun: str) -> str:
    """1 run, 2 runs."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def certificate(found: Mapping[str, Any]) -> str:
    """The proof that an arm in the sweep is the arm alone, in a sentence without its full stop."""
    gap = found["max_abs_difference"]
    if not found["arms_checked"]:
        return "no arm was re-run alone"
    steps = f"over the first {plural(found['steps'], 'step')}" if "steps" in found else "in the loss"
    if gap is None or not math.isfinite(gap):
        return f"{plural(found['arms_checked'], 'arm')} re-run alone: one diverged where the other did not"
    return f"{plural(found['arms_checked'], 'arm')} re-run alone, largest difference {gap:.2g} {steps}"


# --- the parts of the page ------------------------------------------------------------------


def write(folder: Path, outcome: "Outcome", results: Mapping[str, Any], sections: Sequence[Section]) -> Path:
    """Draw every picture into `folder`, and write report.html, which holds copies of them; returns its path."""
    plots.loss_curves(folder / "loss_curves.png", outcome, results)
    plots.learning_rates(folder / "learning_rates.png", results)
    for section in sections:
        if section.figure:
            name, draw = section.figure
            draw(folder / name)
    page = environment().get_template("report.html").render(context(folder, results, sections))
    return write_text(folder / "report.html", page)


def environment() -> Any:
    """Where the templates are, and how they are filled in."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    return jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def context(folder: Path, results: Mapping[str, Any], sections: Sequence[Section]) -> dict[str, Any]:
    """What the template shows, as text; the pictures must be in `folder`."""
    names = [arm["name"] for arm in results["arms"]]
    alike, unlike = fields(results["arms"])
    return {
        "results": results,
        "dots": {name: _dot(i) for i, name in enumerate(names)},
        "facts": _facts(results),
        "certificate": certificate(results["certificate"]),
        "verdict": clauses(results["verdict"]),
        "arms": _arms(results),
        "comparisons": _comparisons(results),
        "loss_curves": image(folder / "loss_curves.png"),
        "learning_rates": image(folder / "learning_rates.png"),
        "sections": [_section(section, folder) for section in sections],
        "alike": alike,
        "unlike": unlike,
        "rates": [f"{row['learning_rate']:g}" for row in results["arms"][0]["learning_rates"]],
        **context_of_run(folder),
    }


def context_of_run(folder: Path) -> dict[str, Any]:
    """The command and the versions that a folder's config.json records."""
    held = read_json(folder / "config.json") or {}
    return {"command": _command(held.get("command", "")), "versions": _versions(held)}


def image(path: Path) -> str:
    """A PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def _dot(i: int) -> dict[str, str]:
    """Colour and CSS class of arm i's mark: the shapes of plots.MARKERS."""
    return {"colour": plots.colour(i), "shape": {"o": "", "s": " square", "D": " diamond"}[plots.marker(i)]}


def _runs(results: Mapping[str, Any]) -> int:
    return results["seeds"] * sum(len(arm["learning_rates"]) for arm in results["arms"])


def _facts(results: Mapping[str, Any]) -> list[str]:
    facts = [
        plural(_runs(results), "run"),
        plural(results["seeds"], "seed"),
        plural(results["steps"], "step") + " each",
        plural(results["programs_compiled"], "program") + " compiled",
        duration(results["wall_seconds"]),
    ]
    speed = results.get("tokens_per_second")
    return facts + ([f"{short(speed)} tokens/s"] if speed else [])


def clauses(verdict: str) -> list[str]:
    """The verdict's clauses, each on a line of its own; joined with spaces they are the verdict."""
    return re.split(r"(?<=;) ", verdict)


def _arms(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the arms table."""
    primary = results["primary_metric"]
    digits = digits_for(arm["metrics"][primary]["ci95"] for arm in results["arms"])
    rows = []
    for arm in results["arms"]:
        found = arm["metrics"][primary]
        seeds = found["per_seed"]
        lost = sum(x is None for x in seeds)
        runs = len(seeds) * len(arm["learning_rates"])
        rows.append(
            {
                "name": arm["name"],
                "rate": f"{arm['best_learning_rate']:g}",
                "mean": DIVERGED if found["mean"] is None else fixed(found["mean"], digits),
                "ci95": interval(found["ci95"], digits),
                "seeds": [DIVERGED if x is None else fixed(x, digits) for x in seeds],
                "survivors": f"mean of {len(seeds) - lost} of {len(seeds)} seeds" if 0 < lost < len(seeds) else "",
                "diverged": f"{len(arm['diverged'])} of {runs}" if arm["diverged"] else "0",
                "divergences": [
                    f"learning rate {row['learning_rate']:g}, seed {row['seed']}: at step {row['step']}"
                    for row in arm["diverged"]
                ],
                "warning": sentence(arm["warning"]),
            }
        )
    return rows


def sentence(text: str | None) -> str:
    """Field names in a warning as words: learning_rate -> learning rate."""
    return (text or "").replace("learning_rate=", "learning rate ").replace("learning_rate", "learning rate")


def interval(ci95: Sequence[float] | None, digits: int, sign: bool = False) -> str:
    """ "low to high", or a dash."""
    return NOTHING if ci95 is None else " to ".join(fixed(x, digits, sign) for x in ci95)


def _comparisons(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the comparisons table."""
    digits = digits_for(row["ci95"] for row in results["comparisons"])
    return [
        {
            "a": row["a"],
            "b": row["b"],
            "difference": fixed(row["difference"], digits, sign=True),
            "ci95": interval(row["ci95"], digits, sign=True),
            "p": probability(row["p"]),
            "floor": probability(row["p_floor"]) if row["p"] is not None else "",
            "p_t": probability(row.get("p_t")),
            "p_adjusted": probability(row["p_adjusted"]),
            "verdict": row["verdict"],
            "decided": row.get("lower") is not None,
        }
        for row in results["comparisons"]
    ]


NUMBER = re.compile(r"\s*[-+−±<>≈]?\s*[\d.,]+(e[-+−]?\d+)?\s*%?\s*|–|", re.IGNORECASE)


def _section(section: Section, folder: Path) -> dict[str, Any]:
    """A question's section; columns of numbers only are set to the right."""
    rows = [[_cell(cell) for cell in row] for row in section.rows]
    numeric = [all(NUMBER.fullmatch(cell) for cell in column) for column in zip(*rows, strict=True)]
    return {
        "title": section.title,
        "text": section.text,
        "header": list(section.header),
        "rows": rows,
        "numeric": numeric or [False] * len(section.header),
        "figure": image(folder / section.figure[0]) if section.figure else "",
    }


def _cell(cell: str) -> str:
    return NOTHING if str(cell).strip().lower() in ("nan", "none", "") else str(cell)


def fields(arms: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Config and Hyper fields that all arms share, [(field, value)], and those that differ, {field: value by arm}.

    The learning rate is left out: it is swept in every arm.
    """
    settings = [{**arm["config"], **arm["hyper"]} for arm in arms]
    alike: list[tuple[str, str]] = []
    unlike: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for setting in settings for name in setting):
        values = [setting.get(name) for setting in settings]
        if name == "learning_rate":
            continue
        if all(value == values[0] for value in values):
            alike.append((name, _value(values[0])))
        else:
            unlike[name] = [_value(value) for value in values]
    return alike, unlike


def _value(value: Any) -> str:
    """A field's value as text."""
    if value is None or value == "" or value == [] or value == ():
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _command(command: str) -> str:
    """The command as a person types it."""
    return f"python {command}" if command.split(" ")[0].endswith(".py") else command


def _versions(held: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What config.json says about the source, the data and the libraries."""
    identity = held.get("identity", {})
    rows = [("started", held.get("started")), ("commit", held.get("commit")), ("data, SHA-256", identity.get("data"))]
    return [(name, str(value)) for name, value in [*rows, *held.get("versions", {}).items()] if value]
