"""claims.html: the ledger as one file in two languages, formulas in MathML, pictures inside, nothing loaded."""

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import plots
from experiments.claims.ledger import FULL, Checked
from experiments.claims.mapping import Mapped, mapped
from experiments.claims.record import Chapter, Curves, Number, Relation, Verdict, Words
from experiments.claims.table import short
from experiments.report import context_of_run, environment, image
from experiments.workdir import write_text

if TYPE_CHECKING:
    from markupsafe import Markup

VERDICTS = {
    Verdict.TRUE: Words("true", "正确"),
    Verdict.CONDITIONAL: Words("conditional", "有条件成立"),
    Verdict.IMPRECISE: Words("imprecise", "不严谨"),
    Verdict.WRONG: Words("wrong", "错误"),
    Verdict.OVERCLAIM: Words("overclaim", "言过其实"),
    Verdict.EMPIRICAL: Words("empirical", "需实验"),
    Verdict.GAP: Words("gap", "缺失"),
    Verdict.UNVERIFIABLE: Words("unverifiable", "无法检验"),
}
STATUSES = {
    "passed": Words("check passed", "检验通过"),
    "failed": Words("check failed", "检验未通过"),
    "broken": Words("check broken", "检验出错"),
    "unverifiable": Words("no code can tell", "代码无法判定"),
    "at full depth": Words("needs --depth=full", "需 --depth=full"),
}
# The words of the page itself, by where they stand.
TEXTS = {
    "title": Words("What the articles say, and what is true", "文章怎么说，事实如何"),
    "intro": Words(
        "Each claim of the four articles with its verdict, and the numbers that check it: what theory predicts, what "
        "was measured, and how far the two may be apart. Where a claim concerns attention, norms, masks or losses, the "
        "library's own functions were measured. A check that passed means that the ledger is right, not the article: "
        "the verdict says what the article is worth. Formulas are the right ones, also where the article "
        "prints another.",
        "四篇文章中的每一条论断，连同判定与检验它的数值：理论预测、实测结果，以及两者允许的差距。凡涉及注意力、归一化、"
        "掩码或损失的论断，都用本库自己的函数实测。“检验通过”表示账本正确，并不表示文章正确：文章是否成立看判定。公式均为正确写法，即便原文所印不同。",
    ),
    "chapters": Words("Chapters", "章节"),
    "show": Words("Show", "显示"),
    "all": Words("all", "全部"),
    "measured": Words("measured", "实测"),
    "predicted": Words("predicted", "预测"),
    "type": Words("type", "类型"),
    "exercises": Words("exercises", "用到"),
    "trouble": Words("Error of the check", "检验报错"),
    "map": Words("From the mathematics to the code", "从数学到代码"),
    "map_intro": Words(
        "The tables of S3 §6 and S1 §1.1, with the functions that the checks of the named claims call.",
        "S3 §6 与 S1 §1.1 的对照表，附上所列论断的检验实际调用的函数。",
    ),
    "mathematics": Words("mathematics", "数学"),
    "component": Words("in a Transformer", "在 Transformer 中"),
    "functions": Words("module and function", "模块与函数"),
    "claims": Words("claims", "论断"),
    "again": Words("How to run it again", "如何重跑"),
    "versions": Words("Versions", "版本"),
}


def mathml(latex: str) -> "Markup":
    """The formula as MathML, on a line of its own."""
    from latex2mathml.converter import convert
    from markupsafe import Markup

    return Markup(convert(latex, display="block"))


def raised(text: str) -> "Markup":
    """Text whose ^{…} stands above the line."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"\^\{([^}]*)\}", r"<sup>\1</sup>", str(escape(text))))


def picture(curves: Curves) -> str:
    """The curves as a data URI."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curves.png"
        with plots.drawing(path, 2.6) as figure:
            axes = figure.add_subplot()
            for i, (name, (x, y)) in enumerate(curves.lines.items()):
                axes.plot(x, y, color=plots.colour(i), marker=plots.marker(i), markersize=3, label=name)
            axes.set_xlabel(curves.x_label)
            axes.set_ylabel(curves.y_label)
            axes.set_xscale("log" if curves.log_x else "linear")
            axes.set_yscale("log" if curves.log_y else "linear")
            if len(curves.lines) > 1:
                handles = [plots.line(color=plots.colour(i), marker=plots.marker(i)) for i in range(len(curves.lines))]
                plots.legend(figure, handles, list(curves.lines))
        return image(path)


def expected(number: Number) -> str:
    """What a number should be, with its relation."""
    if number.predicted is None or number.relation is Relation.SHOWN:
        return ""
    if number.relation is Relation.NEAR:
        slack = f" ± {short(number.tolerance)}" if number.tolerance else ""
        return f"{short(number.predicted)}{slack}"
    return f"{number.relation} {short(number.predicted)}"


def card(one: Checked) -> dict[str, Any]:
    """What the page shows of a claim."""
    claim = one.claim
    return {
        "id": claim.id,
        "source": claim.source,
        "kind": claim.verdict.value,
        "verdict": VERDICTS[claim.verdict],
        "state": one.status.replace(" ", "-"),
        "status": STATUSES[one.status],
        "says": claim.says,
        "formula": mathml(claim.formula) if claim.formula else "",
        "said": one.said,
        "numbers": [(n.label, short(n.measured), expected(n), n.dtype, n.holds) for n in one.numbers],
        "functions": [(f"{use.__module__}.", use.__qualname__) for use in claim.uses],
        "caveats": one.caveats,
        "pictures": [(picture(curves), curves.caption) for curves in one.curves],
        "error": one.error,
    }


def map_rows(rows: Sequence[Mapped]) -> list[dict[str, Any]]:
    """The formula-to-code map for the page."""
    return [
        {
            "source": one.row.source,
            "mathematics": one.row.mathematics,
            "formula": mathml(one.row.formula),
            "component": one.row.component,
            "functions": one.functions,
            "claims": one.row.claims,
        }
        for one in rows
    ]


def write(folder: Path, chapters: Sequence[Chapter], checked: Sequence[Checked], depth: str) -> Path:
    """Write claims.html into the folder. chapters: all of them, for the map; checked: what was asked for."""
    cards = {one.claim.id: card(one) for one in checked}
    parts = [
        {"letter": chapter.letter, "title": chapter.title, "cards": here}
        for chapter in chapters
        if (here := [cards[claim.id] for claim in chapter.claims if claim.id in cards])
    ]
    kinds = Counter(one.claim.verdict for one in checked)
    states = Counter(one.status for one in checked)
    templates = environment()
    templates.filters["raised"] = raised
    text = templates.get_template("claims.html").render(
        text=TEXTS,
        chapters=parts,
        kinds=[(kind.value, VERDICTS[kind], kinds[kind]) for kind in Verdict if kinds[kind]],
        states=[(state.replace(" ", "-"), STATUSES[state], count) for state, count in states.items()],
        map=map_rows(mapped(chapters)),
        full=depth == FULL,
        **context_of_run(folder),
    )
    return write_text(folder / "claims.html", text)
