"""The READMEs' table of the ledger's most surprising rows, written by the ledger itself.

python -m experiments.claims.surprising        measures them, and writes the tables into README.md and README.zh.md
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.claims.ledger import Checked
from experiments.claims.record import Words

IDS = ("B12", "B17", "G03", "G04", "D07", "E08", "E11", "I02", "I09", "A10")
START, END = "<!-- surprising -->", "<!-- /surprising -->"
HEADS = Words("| | the article says | what is true |", "| | 文章说 | 事实 |")
READMES: Mapping[str, int] = {"README.md": 0, "README.zh.md": 1}  # file -> language


def table(checked: Sequence[Checked], language: int) -> str:
    """The rows in a language, as Markdown."""
    lines = [HEADS[language], "|---|---|---|"]
    for one in checked:
        said = " ".join(words[language] for words in one.said)
        lines.append(f"| {one.claim.id} | {cell(one.claim.says[language])} | {cell(said)} |")
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text that stays in one cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def block(text: str) -> str:
    """What stands between the marks."""
    return text.split(f"{START}\n")[1].split(END)[0].strip("\n")


def main(root: Path) -> None:
    """Measure, and write both tables."""
    from experiments import claims
    from experiments.claims import ledger
    from transformer_jax import sharding

    sharding.use_cpu_cores()
    book = claims.chapters()
    checked = {one.id: ledger.check(one, ledger.QUICK, root) for one in ledger.chosen(book, ",".join(IDS))}
    for name, language in READMES.items():
        path = root / name
        before, rest = path.read_text(encoding="utf-8").split(f"{START}\n")
        rows = table([checked[id] for id in IDS], language)
        path.write_text(f"{before}{START}\n{rows}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).resolve().parent.parent.parent)
