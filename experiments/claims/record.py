"""What the ledger is made of: chapters of claims, and the numbers that check them.

    chapter = Chapter("E", Words("Probability and information", "概率与信息"))

    e09 = chapter.claim(
        "E09", "S1 §5.1", Verdict.TRUE,
        Words("A certain event tells nothing.", "必然事件不含信息。"),
        formula=r"-\\log 1 = 0",
    )

    @e09.quick
    def certain_event() -> Numbers:
        yield near("bits", Words("bits at p = 1", "p = 1 时的比特数"), -np.log2(1.0), 0.0)

A claim is checked by its `quick` function, by its `full` one (which trains, and gets a folder for that), or by
both. Each yields numbers; a claim passes if there is a judged one among them and all of those hold.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Words(NamedTuple):
    """A text in both languages."""

    en: str
    zh: str


class Caveat(UserWarning):
    """What a reader of a claim's numbers should know beside them; the ledger shows it with the claim.

    Warned by the check, however deep it stands: `warnings.warn(Caveat(words), stacklevel=2)`.
    """

    def __init__(self, words: Words) -> None:
        super().__init__(words.en)
        self.words = words


class Verdict(enum.StrEnum):
    """What the ledger says of a claim; not whether its check passed."""

    TRUE = "true"
    CONDITIONAL = "conditional"  # true under a condition that the article does not state
    IMPRECISE = "imprecise"
    WRONG = "wrong"
    OVERCLAIM = "overclaim"  # says more than follows
    EMPIRICAL = "empirical"  # only an experiment can tell
    GAP = "gap"  # something that the article lacks, and the library has
    UNVERIFIABLE = "unverifiable"  # no code can tell: it never passes or fails


class Relation(enum.StrEnum):
    """How a measured number stands to the predicted one."""

    NEAR = "="  # |measured - predicted| <= tolerance
    AT_MOST = "≤"
    AT_LEAST = "≥"
    SHOWN = ""  # reported, not judged


@dataclasses.dataclass(frozen=True)
class Number:
    """A measured number and what it should be. name: how the claim's finding refers to it.

    dtype: the type of the computation. NaN holds no relation: count NaN where they are expected.
    """

    name: str
    label: Words
    measured: float
    predicted: float | None
    tolerance: float
    relation: Relation
    dtype: str

    @property
    def holds(self) -> bool | None:
        """None: it is not judged."""
        if self.predicted is None or self.relation is Relation.SHOWN:
            return None
        # Equal infinities have no difference.
        gap = 0.0 if self.measured == self.predicted else self.measured - self.predicted
        if self.relation is Relation.NEAR:
            return abs(gap) <= self.tolerance
        return gap <= self.tolerance if self.relation is Relation.AT_MOST else gap >= -self.tolerance


def near(
    name: str, label: Words, measured: Any, predicted: float, tolerance: float = 0.0, dtype: str = "float64"
) -> Number:
    """|measured - predicted| <= tolerance."""
    return Number(name, label, float(measured), float(predicted), float(tolerance), Relation.NEAR, dtype)


def at_most(name: str, label: Words, measured: Any, bound: float, dtype: str = "float64") -> Number:
    """measured <= bound."""
    return Number(name, label, float(measured), float(bound), 0.0, Relation.AT_MOST, dtype)


def at_least(name: str, label: Words, measured: Any, bound: float, dtype: str = "float64") -> Number:
    """measured >= bound."""
    return Number(name, label, float(measured), float(bound), 0.0, Relation.AT_LEAST, dtype)


def shown(name: str, label: Words, measured: Any, dtype: str = "float64") -> Number:
    """A number that the finding needs and nothing is predicted for."""
    return Number(name, label, float(measured), None, 0.0, Relation.SHOWN, dtype)


@dataclasses.dataclass(frozen=True)
class Curves:
    """A picture of the check. lines: name -> (x, y); axes are named by symbols, as both languages share the picture."""

    caption: Words
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: bool = False
    log_y: bool = False


Numbers = Iterable[Number | Curves]
Quick = Callable[[], Numbers]
Full = Callable[[Path], Numbers]


@dataclasses.dataclass
class Claim:
    """One claim of an article.

    id: its row, such as "B12". source: articles and sections, such as "S0 §3.2, S1 §2.2". says: the claim in a
    sentence. formula: LaTeX, "" for none. finding: what is true instead, or the smallest counter-example; its
    {places} are filled with the quick check's numbers by their names, such as "{bits:.2f}" (with the full one's
    where there is no quick check). learned: the same of what training showed. uses: the library's functions and
    classes that the check exercises.
    """

    id: str
    source: str
    verdict: Verdict
    says: Words
    formula: str = ""
    finding: Words | None = None
    learned: Words | None = None
    uses: tuple[Callable[..., Any], ...] = ()
    measure: Quick | None = None
    train: Full | None = None

    def quick(self, function: Quick) -> Quick:
        """Decorator: the analytic check, a few seconds at most."""
        self.measure = function
        return function

    def full(self, function: Full) -> Full:
        """Decorator: the check that trains; its argument is a folder, where it may resume."""
        self.train = function
        return function


class Chapter:
    """The claims of one letter, in their order."""

    def __init__(self, letter: str, title: Words):
        self.letter, self.title = letter, title
        self.claims: list[Claim] = []

    def claim(
        self,
        id: str,
        source: str,
        verdict: Verdict,
        says: Words,
        *,
        formula: str = "",
        finding: Words | None = None,
        learned: Words | None = None,
        uses: Sequence[Callable[..., Any]] = (),
    ) -> Claim:
        """A new claim of this chapter. Raises ValueError for an id of another letter or one that is there already."""
        if not id.startswith(self.letter) or any(claim.id == id for claim in self.claims):
            raise ValueError(f"claim {id} in chapter {self.letter}, which has {[claim.id for claim in self.claims]}")
        made = Claim(id, source, verdict, says, formula, finding, learned, tuple(uses))
        self.claims.append(made)
        return made


def fill(finding: Words, numbers: Iterable[Number]) -> Words:
    """The finding with the measured numbers in its places, with a real minus."""
    values = {number.name: _Shown(number.measured) for number in numbers}
    return Words(finding.en.format(**values), finding.zh.format(**values))


class _Shown(float):
    """A float whose minus is a minus, and whose 0 is 0."""

    def __format__(self, spec: str) -> str:
        if spec.endswith(("e", "g")) and self == 0:
            return "0"
        if spec == "万":  # as Chinese counts
            return f"{self / 1e4:.0f}"
        if spec.endswith("d"):
            return format(round(self), spec) if math.isfinite(self) else str(float(self))
        return float.__format__(self, spec).replace("-", "−")
