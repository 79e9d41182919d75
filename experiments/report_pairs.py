"""What the evaluation of a model of pairs shows: a table, a file of outputs, and a page with its errors and heads."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import evaluating, plots_pairs, terminal
from experiments.evaluating import Evaluated, Item
from experiments.heads import Heads
from experiments.lines import one_line
from experiments.report import NOTHING, context_of_run, environment, fixed, image, plural
from experiments.workdir import write_text
from transformer_jax.data.metrics import METRICS

if TYPE_CHECKING:
    from rich.console import Console

WORST, CONFUSED = 15, 15  # rows of the tables
PIXELS = 120  # of the page to an inch of a picture: 7-point names are then as high as the captions' letters
BETWEEN = " ||| "  # references in one cell
COLUMNS = ("split", "source", "references", "output", "score", "correct")
KINDS = {
    "encoder": "Encoder: which tokens of the source each of them reads (rows read columns).",
    "decoder": "Decoder: for each token that is written (rows), what it reads of the text so far (columns).",
    "cross": "Cross: for each token that is written (rows), what it reads of the source (columns).",
}


def write_outputs(path: Path, evaluated: Mapping[str, Evaluated]) -> Path:
    """outputs.tsv: a header, then a line an item. Tabs and line breaks inside a text are spaces."""
    rows = ["\t".join(COLUMNS)]
    for split, found in evaluated.items():
        for item in found.items:
            score = f"{item.score:.6f}" if item.ids else ""
            cells = (split, item.source, BETWEEN.join(item.references), item.output, score, str(int(item.correct)))
            rows.append("\t".join(map(one_line, cells)))
    return write_text(path, "\n".join(rows) + "\n")


def table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a row for each number, a column for each split."""
    splits = list(results["splits"].values())
    names = list(dict.fromkeys(name for split in splits for name in split["metrics"]))
    rows = [["items", *(f"{split['items']:,}" for split in splits)]]
    for name in names:
        rows.append([METRICS[name].label, *(fixed(split["metrics"][name]["value"], 2) for split in splits)])
    for name, digits in (("loss", 4), ("perplexity", 3)):
        rows.append([f"{name} (by tokens)", *(fixed(split[name], digits) for split in splits)])
    return ["", *results["splits"]], rows


def signatures(results: Mapping[str, Any]) -> list[str]:
    """What sacrebleu wants to be printed beside its numbers, once each."""
    lines = [
        f"{METRICS[name].label}: {found['signature']}"
        for split in results["splits"].values()
        for name, found in split["metrics"].items()
        if found["signature"]
    ]
    return list(dict.fromkeys(lines))


def show(results: Mapping[str, Any], folder: Path, console: "Console | None" = None) -> None:
    """The table, and where the files are."""
    from rich.text import Text

    console = terminal.console_of(console)
    terminal.say(console)
    terminal.say(console, results["title"], "bold")
    terminal.say(console, ", ".join(results["facts"]), "dim")
    for note in results["notes"]:
        console.print(Text(note), soft_wrap=True)
    terminal.say(console)
    terminal.table(console, *table(results))
    terminal.say(console)
    for line in signatures(results):
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print(Text(f"Report: {folder / 'report.html'}, outputs: {folder / 'outputs.tsv'}"), soft_wrap=True)


def write(
    folder: Path,
    results: Mapping[str, Any],
    evaluated: Mapping[str, Evaluated],
    unit: str,
    pieces: Mapping[str, Sequence[tuple[Item, list[Heads]]]],
) -> Path:
    """report.html. unit: what edits are counted in. pieces: for a split, the pairs whose attention is drawn."""
    header, rows = table(results)
    with tempfile.TemporaryDirectory() as place:
        picture = Path(place) / "picture.png"
        splits = [_split(name, found, unit, pieces.get(name, ()), picture) for name, found in evaluated.items()]
    shown = {
        "results": results,
        "verdict": verdict(results),
        "header": header,
        "rows": rows,
        "signatures": signatures(results),
        "splits": splits,
        "kinds": KINDS,
    }
    page = environment().get_template("pairs.html").render(shown | context_of_run(folder))
    return write_text(folder / "report.html", page)


def verdict(results: Mapping[str, Any]) -> list[str]:
    """The number to choose by, of each split, in a line."""
    lines = []
    for name, split in results["splits"].items():
        first, found = next(iter(split["metrics"].items()))
        unit = "%" if METRICS[first].lower else ""
        number = f"{fixed(found['value'], 2)}{unit}"
        lines.append(f"{name}: {METRICS[first].label} {number} of {plural(split['items'], 'item')}")
    return lines


def _split(
    name: str, found: Evaluated, unit: str, pieces: Sequence[tuple[Item, list[Heads]]], picture: Path
) -> dict[str, Any]:
    """What the template shows of one split."""
    first = next(iter(found.scores))
    lengths = evaluating.by_length(found.items, first)
    labels, counts, values = zip(*lengths, strict=True)
    plots_pairs.by_length(picture, labels, values, counts, METRICS[first].label)
    confused = evaluating.confusions(found.items, unit, CONFUSED) if unit != "words" else []
    wrong = sum(not item.correct for item in found.items)
    return {
        "name": name,
        "by_length": image(picture),
        "label": METRICS[first].label,
        "unit": unit,
        "wrong": f"{wrong:,} of {plural(len(found.items), 'item')}",
        "worst": [_row(item) for item in evaluating.worst(found.items, WORST)],
        "confusions": [(wanted or NOTHING, written or NOTHING, f"{count:,}") for wanted, written, count in confused],
        "pieces": [_piece(item, heads, picture) for item, heads in pieces],
    }


def _row(item: Item) -> dict[str, str]:
    others = len(item.references) - 1
    return {
        "edits": f"{item.edits}",
        "source": item.source,
        "reference": item.closest + (f" (and {plural(others, 'other')})" if others else ""),
        "output": item.output or NOTHING,
    }


def _piece(item: Item, heads: Sequence[Heads], picture: Path) -> dict[str, Any]:
    """A pair with pictures of its attentions; the page's width of each in pixels."""
    figures = []
    for one in heads:
        width = plots_pairs.attention(picture, one.weights_LNTS, one.rows, one.columns)
        figures.append({"kind": one.kind, "image": image(picture), "width": round(PIXELS * width)})
    return {**_row(item), "correct": item.correct, "figures": figures}
